"""The safetensors files of a folder of weights, and what their headers say."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primus_images.errors import InputError
from primus_images.files import open_regular, read_bytes, reason_of, refuse_pointer

_LONGEST = 100 << 20
OTHER_MODEL = "config.json describes another model than the tensors: take both from the same source"
# The dtypes of plain weights, and their sizes.
PLAIN = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
# A weight in MXFP4 is two tensors of bytes: pairs of values, and a scale of every 32 values.
MXFP4 = ("_blocks", "_scales")


@dataclass(frozen=True, kw_only=True)
class Header:
    """``shapes`` and ``dtypes`` by the tensors' names; ``text`` is the header in the file."""

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    text: bytes


def tensor_files(folder: Path) -> list[Path]:
    """Return the files that transformers or diffusers would load from a folder.

    Raises InputError if one is missing.
    """
    for stem in ("model", "diffusion_pytorch_model"):
        single = folder / f"{stem}.safetensors"
        index = folder / f"{stem}.safetensors.index.json"
        if single.exists():
            return [single]
        if index.exists():
            return _indexed(index)
    pickles = [path for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".pth")]
    hint = "name a folder that contains model.safetensors or model.safetensors.index.json"
    if pickles:
        hint = (
            f"{min(pickles).name} is a pickle, which can run code: load it where you trust it, and "
            "save_pretrained"
        )
    raise InputError(
        f"{folder} contains no safetensors files that transformers would load "
        "(model.safetensors, or an index)",
        hint=hint,
    )


def _indexed(index: Path) -> list[Path]:
    folder = index.parent
    try:
        names = sorted(set(map(str, json.loads(read_bytes(index))["weight_map"].values())))
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise InputError("the index of the weights cannot be read", where=index) from error
    if not names:
        raise InputError(
            "the weights have an index that names no file", where=index, hint="fetch them again"
        )
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise InputError(
                f"the weights lack {name}, which their index names",
                where=index,
                hint="fetch them again",
            )
    return [folder / name for name in names]


_MIXTRALS = {
    ".block_sparse_moe.": ".mlp.",
    ".w1.": ".gate_proj.",
    ".w3.": ".up_proj.",
    ".w2.": ".down_proj.",
}


# The parts of a model that are not for text, and the names of the one that is.
_OTHER_PARTS = re.compile(
    r"(model\.)?(vision_|visual\.|multi_modal_|audio_|embed_vision|embed_audio|connector\.|image_newline)"
)
_TEXT_PART = re.compile(r"^(model\.(?:language|text)_model\.|language_model\.(?=model\.|lm_head))")


def is_for_text(name: str) -> bool:
    """Whether a tensor is of the language model, and not of a part for images or sound."""
    return not _OTHER_PARTS.match(name)


def text_name(name: str) -> str:
    """Return the name of a tensor in the language model, which may be a part of the file's."""
    return _TEXT_PART.sub(lambda match: "model." if match[1].startswith("model.") else "", name)


def canonical_name(name: str) -> str:
    """Return transformers' name of a tensor in a file that may lack the head, or be Mixtral's."""
    name = text_name(name)
    if not name.startswith(("lm_head.weight", "model.")):
        name = f"model.{name}"
    for old, new in _MIXTRALS.items():
        name = name.replace(old, new)
    return name


def header(file: Path) -> Header:
    """Return the header of ``file``. Raises InputError if it is damaged, or no safetensors file."""
    try:
        text = _header_text(file)
        content: dict[str, Any] = json.loads(text)
        content.pop("__metadata__", None)
        shapes = {}
        dtypes = {}
        end = 8 + len(text)
        for name, entry in content.items():
            shapes[name] = tuple(map(int, entry["shape"]))
            dtypes[name] = str(entry["dtype"])
            first, last = map(int, entry["data_offsets"])
            width = PLAIN.get(dtypes[name])
            if width and math.prod(shapes[name]) * width != last - first:
                raise ValueError
            end = max(end, 8 + len(text) + last)
        size = file.stat().st_size
    except OSError as error:
        raise InputError(f"cannot be read: {reason_of(error)}", where=file) from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        raise InputError("this is not a safetensors file, or it is damaged", where=file) from None
    if size < end:
        raise InputError(
            f"the file is truncated: {size:,} of {end:,} bytes", where=file, hint="fetch it again"
        )
    return Header(shapes=shapes, dtypes=dtypes, text=text)


def _header_text(file: Path) -> bytes:
    refuse_pointer(file)
    with open_regular(file) as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > _LONGEST:
            return b""
        return stream.read(length)


def plain_shapes(head: Header) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights for text, of which those in MXFP4 are dequantized.

    This transposes them.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in head.shapes.items():
        if not is_for_text(name):
            continue
        blocks, scales = MXFP4
        is_quantized = head.dtypes[name] == "U8" and len(shape) > 2
        if is_quantized and name.endswith(blocks):
            experts, rows, groups, pairs = shape
            shapes[text_name(name).removesuffix(blocks)] = (experts, groups * pairs * 2, rows)
        elif not (is_quantized and name.endswith(scales)):
            shapes[text_name(name)] = shape
    return shapes
