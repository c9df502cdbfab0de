"""The records of validations on disk: kept by the image that they judged, and never replaced.

``out/validation/TARGET/RELEASE-IMAGE/CELL/record.json``, where IMAGE begins the digest of the
image's config. A later validation of the same cell puts the earlier one beside itself.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from primus_images.errors import InputError
from primus_images.recipes.digest import misstated
from primus_images.schema import read_json
from primus_images.training.judge.record import NO_GPU, Record, RecordedImage

FILE = "record.json"
_DIGITS = 12


def image_folder(folder: Path, image: RecordedImage) -> Path:
    """Return the folder of an image's validations below that of its target."""
    return folder / f"{image.ref}-{_short(image.content)}"


def make_room(folder: Path) -> None:
    """Move the validation that ``folder`` has beside it, under the time at which it was made."""
    try:
        made = Record.of(read_json(folder / FILE).data).made
    except FileNotFoundError:
        return
    except (OSError, InputError):
        made = "damaged"
    name = f"{folder.name}.{re.sub('[^0-9A-Za-z]', '', made)}"
    place = folder.with_name(name)
    number = 2
    while place.exists():
        place = folder.with_name(f"{name}.{number}")
        number += 1
    folder.rename(place)


def records_of(folder: Path, content: str) -> list[Record]:
    """Return the newest record of each cell of an image, of those below its target's folder.

    ``content`` is the digest of the image's config. Raises InputError for what is no record.
    """
    paths = [
        *folder.glob(f"*-{_short(content)}/*/{FILE}"),
        # Where earlier versions kept them.
        *folder.glob(f"*/{FILE}"),
    ]
    records = [read_record(path) for path in sorted(paths)]
    return newest(record for record in records if record.image.content == content)


def all_records(output: Path) -> Iterator[Record]:
    """Yield the newest record of each image and cell below the folder of all validations.

    What is no record is left out.
    """
    records = []
    for path in sorted([*output.glob(f"*/*/{FILE}"), *output.glob(f"*/*/*/{FILE}")]):
        with suppress(InputError):
            records.append(read_record(path))
    yield from newest(records)


def summary(records: Iterable[Record], release: str) -> str | None:
    """Return what the images of a release (``v26.11``, ``v26.11-cpu``) were validated with.

    None if no record is of it.
    """
    counts: dict[tuple[str, str, str], Counter[bool]] = {}
    for record in records:
        ref = record.image.ref
        if ref == release or ref.startswith(f"{release}-"):
            where = "CPU" if record.gpu == NO_GPU else record.gpu
            image = (ref, _short(record.image.content), where)
            counts.setdefault(image, Counter())[record.passed] += 1
    parts = []
    for (ref, content, where), count in sorted(counts.items()):
        parts.append(f"{ref} ({content}): {count[True]} of {count.total()} passed on {where}")
    return "; ".join(parts) or None


def newest(records: Iterable[Record]) -> list[Record]:
    """Return the newest record of each image, cell, GPU, wrapper and set of runs."""
    by_cell: dict[object, Record] = {}
    for record in sorted(records, key=lambda record: record.made):
        recipe = record.recipe
        cell = (recipe.name, recipe.backend, recipe.mode, recipe.precision)
        runs = tuple(job.name for job in record.jobs)
        by_cell[record.image.content, cell, record.gpu, record.wrap, runs] = record
    return list(by_cell.values())


def orphans(output: Path, contents: Collection[str]) -> list[Path]:
    """Return the folders of validations below ``output`` whose images are not among ``contents``.

    Those are the digests of the configs of images.
    """
    folders = []
    for path in sorted([*output.glob(f"*/*/{FILE}"), *output.glob(f"*/*/*/{FILE}")]):
        with suppress(InputError):
            if read_record(path).image.content not in contents:
                folders.append(path.parent)
    return folders


def read_record(path: Path) -> Record:
    """Read a record, whose recipe must be whole. Raises InputError for what is none."""
    try:
        data = read_json(path).data
    except OSError:
        raise InputError("not a validation record", where=str(path), hint="remove it") from None
    try:
        record = Record.of(data, str(path))
    except InputError as error:
        raise InputError(
            f"not a validation record: {error.message}", where=str(path), hint="remove it"
        ) from None
    fault = misstated(asdict(record.recipe))
    if fault:
        raise InputError(
            f"not a validation record: {fault}",
            where=str(path),
            hint="remove it, and validate again",
        )
    return record


def _short(content: str) -> str:
    return content.removeprefix("sha256:")[:_DIGITS]
