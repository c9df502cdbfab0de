"""What weights and checkpoints are: fingerprints, and what a checkpoint was trained from."""

import hashlib
import io
import json
import stat
import struct
import zipfile
import zlib
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from primus_images.errors import InputError, nearest
from primus_images.files import read_bytes, sha256_of, write_file
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.rules import rules_of
from primus_images.recipes.schema import model_rules
from primus_images.recipes.tensors import header, tensor_files
from primus_images.training.run.job import step_of, steps
from primus_images.yamlfile import flat

_SAMPLE = 1 << 16
FILE = "recipe.json"
FORMAT = 1
ALL = "all"
_METADATA = ".metadata"
_ZIP_ERRORS = (
    OSError,
    ValueError,
    EOFError,
    RuntimeError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)
# These change the tensors or their names, so no option can accept a difference.
_NEVER = ("backend", "mode", "layout")


def fingerprint(folder: Path) -> str:
    """Return a sha256 of the files' names, sizes and headers, and some bytes of each.

    Hashing all bytes would take minutes.
    """
    hasher = hashlib.sha256()
    for file in tensor_files(folder):
        size = file.stat().st_size
        hasher.update(f"{file.name} {size} ".encode() + header(file).text)
        with file.open("rb") as stream:
            for place in (size // 3, size // 2, size - _SAMPLE):
                stream.seek(max(0, place))
                hasher.update(stream.read(_SAMPLE))
    return hasher.hexdigest()


def of(recipe: Recipe) -> dict[str, Any]:
    """Return the fields that a resumed run must share with the run that made its checkpoint.

    Files are compared by content, not by name.
    """
    fields: dict[str, Any] = {"backend": recipe.backend, "mode": recipe.mode}
    for key, value in flat(asdict(recipe.architecture)):
        if key != "hf_repo":
            fields[f"model.{key}"] = value
    for key, digest in recipe.asset_digests.items():
        fields[f"assets.{key}"] = recipe.get(f"assets.{key}", str)
        if digest:
            fields[f"assets.{key}"] = f"sha256:{digest}"
    fields["data.column"] = ""
    for key, value in recipe.section("data").items():
        fields[f"data.{key}"] = value
    fields |= {
        "seq_len": recipe.seq_len,
        "global_batch": recipe.global_batch,
        "seed": recipe.seed,
        **rules_of(recipe).layout(recipe),
    }
    section = recipe.section(recipe.backend)
    # Checkpoints from before these settings have no such fields.
    if section.get("packing"):
        fields["packing"] = True
    if "eval.fraction" in recipe.settings:
        fields["eval.fraction"] = recipe.get("eval.fraction", float)
    if recipe.mode == "lora":
        for key in ("rank", "alpha", "targets"):
            fields[f"lora.{key}"] = section.get(f"lora.{key}")
        # The checkpoint contains only the adapters.
        fields["weights"] = recipe.find(f"{recipe.backend}.weights", "random")
        if recipe.weights:
            fields["weights"] = f"sha256:{fingerprint(recipe.weights)}"
    return fields


def seal(folder: Path, identity: Mapping[str, Any]) -> None:
    """Write ``identity``, the step and all file sizes to the complete checkpoint in ``folder``."""
    files = {
        path.name: path.stat().st_size
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != FILE
    }
    content = {
        "format": FORMAT,
        "step": step_of(folder.with_name(folder.name.removeprefix("."))),
        "identity": dict(identity),
        "files": files,
        "metadata_sha256": sha256_of(folder / _METADATA),
    }
    write_file(folder / FILE, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def seal_newest(checkpoints: Path, identity: Mapping[str, Any]) -> bool:
    """Seal the complete checkpoints in a folder to which a backend writes them, one after the
    other. Returns whether there were any.
    """
    sealed = False
    for folder in reversed(steps(checkpoints)):
        if (folder / FILE).exists():
            break
        # Without metadata, it is not complete yet. A folder that disappears while it is looked at
        # seems to exist.
        with suppress(FileNotFoundError, FileExistsError):
            seal(folder, identity)
            sealed = True
    return sealed


def check(folder: Path, recipe: Recipe, accepted: Sequence[str] = ()) -> None:
    """Raise InputError if the checkpoint is damaged, or of another run than ``recipe`` describes.

    ``accepted`` are fields that may differ, prefixes of their names (``model``), or ``all``.
    """
    current = of(recipe)
    _check_accepted(accepted, current)
    content = _content_to_resume(folder, accepted)
    if content is None:
        return
    step = content.get("step")
    if step is not None and step != step_of(folder):
        raise InputError(
            f"the folder is named {folder.name}, but the checkpoint is of step {step}",
            where=folder,
            hint=f"rename the folder to step-{step}",
        )
    # A field of a model that an older version did not have had its default.
    saved_fields: dict[str, Any] = {}
    for key, rule in model_rules().items():
        if f"model.{key}" in current:
            saved_fields[f"model.{key}"] = rule.default
    saved_fields |= content["identity"]
    refused = []
    for field in current | saved_fields:
        same = saved_fields.get(field) == current.get(field)
        if not same and not _accepts(accepted, field):
            refused.append(field)
    if refused:
        raise _of_another_run(folder, refused, saved_fields, current)


def _check_accepted(accepted: Sequence[str], current: Mapping[str, Any]) -> None:
    changeable = [field for field in current if not _fixed(field)]
    for name in accepted:
        if not any(_covers(name, field) for field in changeable):
            raise InputError(
                f"--accept-change {name}: there is no such field{nearest(name, current)}",
                hint=f"there are: {', '.join(changeable)}",
            )


def _content_to_resume(folder: Path, accepted: Sequence[str]) -> dict[str, Any] | None:
    """Return the seal of a checkpoint; None if it has none and any change is accepted."""
    try:
        return _content(folder)
    except _DamageError as error:
        others = [path for path in steps(folder.parent) if path != folder and complete(path)]
        hint = "start again without --resume-from"
        if others:
            hint = f"--resume-from {others[-1]} appears to be intact"
        raise InputError(f"the checkpoint is damaged: {error}", where=folder, hint=hint) from error
    except FileNotFoundError:
        if ALL in accepted:
            return None
        raise InputError(
            f"the checkpoint has no {FILE}, which says what it was trained from",
            where=folder,
            hint=f"--accept-change {ALL} resumes from it anyway",
        ) from None


def _of_another_run(
    folder: Path, refused: Sequence[str], before: Mapping[str, Any], now: Mapping[str, Any]
) -> InputError:
    changes = []
    for field in refused:
        was = _shown(before.get(field))
        changes.append(f"{field} was {was}, and is {_shown(now.get(field))} now")
    hint = "to resume anyway: " + " ".join(f"--accept-change {field}" for field in refused)
    never = [field for field in refused if _fixed(field)]
    if never:
        hint = f"a checkpoint cannot be resumed with another {' or '.join(never)}"
    return InputError(
        f"the checkpoint belongs to another run: {'; '.join(changes)}", where=folder, hint=hint
    )


def _fixed(field: str) -> bool:
    """Whether no option allows another value of the field."""
    return field.partition(".")[0] in _NEVER


def _covers(name: str, field: str) -> bool:
    """Whether ``name`` is the field, its section or ``all``."""
    return name in (ALL, field) or field.startswith(f"{name}.")


def _accepts(accepted: Sequence[str], field: str) -> bool:
    """Whether ``--accept-change`` allows another value of the field."""
    return not _fixed(field) and any(_covers(name, field) for name in accepted)


def _shown(value: object) -> str:
    if isinstance(value, str) and value.startswith("sha256:"):
        return value[:19] + "…"
    return json.dumps(value, ensure_ascii=False)


def saved(folder: Path) -> Mapping[str, Any]:
    """Return the fields that were sealed into ``folder``; none if it is not a whole checkpoint."""
    with suppress(_DamageError, InputError, FileNotFoundError):
        return dict(_content(folder)["identity"])
    return {}


def complete(folder: Path) -> bool:
    """Return whether ``folder`` is a sealed checkpoint with all its files in their full sizes."""
    return bool(saved(folder))


def complete_checkpoints(output: Path) -> list[Path]:
    """Return the complete checkpoints of the run in ``output``, oldest first."""
    return [folder for folder in steps(output / "checkpoint") if complete(folder)]


class _DamageError(Exception):
    pass


def _content(folder: Path) -> dict[str, Any]:
    """Return the seal of a checkpoint. FileNotFoundError: it has none."""
    content = _seal(folder)
    for name, size in content["files"].items():
        _check_size(folder / Path(name).name, size)
    try:
        digest = sha256_of(folder / _METADATA)
    except (OSError, InputError) as error:
        raise _DamageError(f"{_METADATA} cannot be read") from error
    if digest != content.get("metadata_sha256"):
        raise _DamageError(f"{_METADATA} has changed")
    return content


def _seal(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_bytes(folder / FILE))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError, InputError) as error:
        raise _DamageError(f"{FILE} cannot be read") from error
    if not isinstance(content, dict) or not all(
        isinstance(content.get(key), dict) for key in ("identity", "files")
    ):
        raise _DamageError(f"{FILE} was not written by primus")
    written = content.get("format")
    if written != FORMAT:
        raise InputError(
            f"the checkpoint has format {written}, but this version of primus reads format "
            f"{FORMAT}",
            where=folder / FILE,
            hint="resume with the version of primus that wrote it",
        )
    return content


def _check_size(file: Path, size: object) -> None:
    if not isinstance(size, int):
        raise _DamageError(f"{FILE} was not written by primus")
    try:
        status = file.stat()
    except OSError as error:
        raise _DamageError(f"{file.name} is missing") from error
    if not stat.S_ISREG(status.st_mode) or status.st_size != size:
        raise _DamageError(f"{file.name} has {status.st_size:,} of {size:,} bytes")


def verify_tensors(folder: Path, names: Container[str] | None = None) -> None:
    """Compare the tensors ``names`` (None: all) in ``folder`` with their CRC-32.

    torch does not verify it. If there are ranks, they share the work. Raises SystemExit if a tensor
    differs.
    """
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    items = []
    for index, place in dcp.FileSystemReader(folder).read_metadata().storage_data.items():
        if names is None or index.fqn in names:
            items.append((place.relative_path, place.offset, place.length, index.fqn))
    items.sort()
    if dist.is_initialized():
        items = items[dist.get_rank() :: dist.get_world_size()]
    for file, offset, length, name in items:
        if not _intact(folder / Path(file).name, offset, length):
            raise SystemExit(
                f"{folder}: the checkpoint is damaged: {name} in {file} does not match its "
                "checksum (resume from another checkpoint)"
            )


def _intact(file: Path, offset: int, length: int) -> bool:
    """Whether the zip archive at ``offset``, which is one tensor, matches its checksums."""
    try:
        with file.open("rb") as whole:
            whole.seek(offset)
            archive = zipfile.ZipFile(io.BytesIO(whole.read(length)))
            return archive.testzip() is None
    except _ZIP_ERRORS:
        return False
