"""Headers of safetensors files: names, types and shapes of their tensors, read without the library."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primus.errors import InputError
from primus.files import open_regular, read_bytes

_LENGTH = struct.Struct("<Q")
_LONGEST = 100 << 20
_SAMPLE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Header:
    """``shapes`` by the tensors' names; ``text`` is the header as it stands in the file."""

    shapes: Mapping[str, tuple[int, ...]]
    text: bytes


def files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder, sorted; if there is an index, the files that it lists.

    Raises InputError if there are none, or if a listed file is missing.
    """
    listed = sorted(folder.glob("*.safetensors"))
    for index in sorted(folder.glob("*.safetensors.index.json"))[:1]:
        try:
            named = {folder / str(file) for file in json.loads(read_bytes(index))["weight_map"].values()}
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise InputError("the index of the weights cannot be read", where=str(index)) from error
        if missing := sorted(file.name for file in named if not file.is_file()):
            raise InputError(f"the weights lack {missing[0]}, which their index names", where=str(index))
        listed = sorted(named)
    if not listed:
        raise InputError(
            f"{folder} contains no safetensors files", hint="name a folder that contains *.safetensors files"
        )
    return listed


def header(file: Path) -> Header:
    """Return the header of ``file``. Raises InputError if it is not a safetensors file, or is truncated."""
    try:
        with open_regular(file) as stream:
            length = _LENGTH.unpack(stream.read(_LENGTH.size))[0]
            text = stream.read(length) if length <= _LONGEST else b""
        content: dict[str, Any] = json.loads(text)
        content.pop("__metadata__", None)
        shapes = {name: tuple(map(int, entry["shape"])) for name, entry in content.items()}
        end = _LENGTH.size + length + max((int(entry["data_offsets"][1]) for entry in content.values()), default=0)
        size = file.stat().st_size
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(file)) from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, struct.error):
        raise InputError("this is not a safetensors file, or it is damaged", where=str(file)) from None
    if size < end:
        raise InputError(f"the file is truncated: {size:,} of {end:,} bytes", where=str(file), hint="fetch it again")
    return Header(shapes=shapes, text=text)


def fingerprint(folder: Path) -> str:
    """Return a sha256 that distinguishes weights: names, sizes and headers of the files, and some bytes of each.

    Reading all bytes would take minutes.
    """
    hasher = hashlib.sha256()
    for file in files(folder):
        size = file.stat().st_size
        hasher.update(f"{file.name} {size} ".encode() + header(file).text)
        with file.open("rb") as stream:
            for place in (size // 3, size // 2, size - _SAMPLE):
                stream.seek(max(0, place))
                hasher.update(stream.read(_SAMPLE))
    return hasher.hexdigest()
