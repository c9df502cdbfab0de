"""Errors whose sentences are data: those of ``refusals.yaml`` in each package, with what they are
about.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from primus_images.errors import CheckFailed, HostError, InputError, PrimusError
from primus_images.yamlfile import read_values


@cache
def texts() -> Mapping[str, Mapping[str, str]]:
    """Return name of an error → its texts, of all packages that are here. ``recipes/refusals.yaml``
    explains them.
    """
    files = sorted(Path(__file__).parent.glob("*/refusals.yaml"))
    return {name: row for file in files for name, row in read_values(file).data.items()}


def refusal(
    name: str, where: object = None, about: str | None = None, /, **values: object
) -> PrimusError:
    """Return the error ``name`` of the file, or other place, ``where``; its texts contain
    ``values``.

    ``about`` is that of :class:`primus_images.errors.PrimusError`.
    """
    row = texts()[name]
    if "lacks" in row:
        kind = HostError
    elif "failed" in row:
        kind = CheckFailed
    else:
        kind = InputError
    if where is None:
        place = None
    else:
        place = str(where)
    hint = row.get("hint", "").format(**values)
    return kind(row["why"].format(**values), where=place, hint=hint or None, about=about)
