"""The safetensors files of a folder of weights: which ones are loaded, and what their headers say."""

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
    """``shapes`` and ``dtypes`` by the tensors' names; ``text`` is the header as it stands in the
    file.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    text: bytes


def tensor_files(folder: Path) -> list[Path]:
    """Return the files that transformers or diffusers would load from a folder. Raises InputError
    if one is missing.
    """
    for stem in ("model", "diffusion_pytorch_model"):
        single = folder / f"{stem}.safetensors"
        index = folder / f"{stem}.safetensors.index.json"
        if single.exists():
            return [single]
        if not index.exists():
            continue
        try:
            named = sorted(
                {str(file) for file in json.loads(read_bytes(index))["weight_map"].values()}
            )
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise InputError("the index of the weights cannot be read", where=str(index)) from error
        missing = [
            name for name in named if Path(name).name != name or not (folder / name).is_file()
        ]
        if missing or not named:
            what = "have an index that names no file"
            if missing:
                what = f"lack {missing[0]}, which their index names"
            raise InputError(f"the weights {what}", where=str(index), hint="fetch them again")
        return [folder / name for name in named]
    pickles = sorted(
        path.name for path in (*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth"))
    )
    if pickles:
        pickle = next(iter(pickles), "")
        raise InputError(
            f"{folder} contains no safetensors files that transformers would load "
            "(model.safetensors, or an index)",
            hint=f"{pickle} is a pickle, which can run code: load it where you trust it, and "
            "save_pretrained",
        )
    pickle = next(iter(pickles), "")
    raise InputError(
        f"{folder} contains no safetensors files that transformers would load "
        "(model.safetensors, or an index)",
        hint="name a folder that contains model.safetensors or model.safetensors.index.json",
    )


_MIXTRALS = {
    ".block_sparse_moe.": ".mlp.",
    ".w1.": ".gate_proj.",
    ".w3.": ".up_proj.",
    ".w2.": ".down_proj.",
}


# The parts of a model that are not for text, and the names of the one that is.
_OTHER_PARTS = re.compile(r"(model\.)?(vision_|multi_modal_|audio_|embed_vision|embed_audio)")
_TEXT_PART = re.compile(r"^(model\.language_model\.|language_model\.(?=model\.|lm_head))")


def is_for_text(name: str) -> bool:
    """Whether a tensor is of the language model, in a file that may have parts for images or sound."""
    return not _OTHER_PARTS.match(name)


def text_name(name: str) -> str:
    """Return the name of a tensor in the language model, of which the file may name it as a part."""
    return _TEXT_PART.sub(lambda match: "model." if match[1].startswith("model.") else "", name)


def canonical_name(name: str) -> str:
    """Return the name in transformers' model of a tensor in a file, which may lack the head, or be
    Mixtral's.
    """
    name = text_name(name)
    if not name.startswith(("lm_head.weight", "model.")):
        name = f"model.{name}"
    for old, new in _MIXTRALS.items():
        name = name.replace(old, new)
    return name


def header(file: Path) -> Header:
    """Return the header of ``file``. Raises InputError if it is not a safetensors file, or is
    truncated.
    """
    try:
        refuse_pointer(file)
        with open_regular(file) as stream:
            length = int.from_bytes(stream.read(8), "little")
            text = b""
            if length <= _LONGEST:
                text = stream.read(length)
        content: dict[str, Any] = json.loads(text)
        content.pop("__metadata__", None)
        shapes = {name: tuple(map(int, entry["shape"])) for name, entry in content.items()}
        dtypes = {name: str(entry["dtype"]) for name, entry in content.items()}
        if any(
            math.prod(shapes[name]) * PLAIN[dtypes[name]]
            != entry["data_offsets"][1] - entry["data_offsets"][0]
            for name, entry in content.items()
            if dtypes[name] in PLAIN
        ):
            raise ValueError
        end = (
            8
            + length
            + max((int(entry["data_offsets"][1]) for entry in content.values()), default=0)
        )
        size = file.stat().st_size
    except OSError as error:
        raise InputError(f"cannot be read: {reason_of(error)}", where=str(file)) from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        raise InputError(
            "this is not a safetensors file, or it is damaged", where=str(file)
        ) from None
    if size < end:
        raise InputError(
            f"the file is truncated: {size:,} of {end:,} bytes",
            where=str(file),
            hint="fetch it again",
        )
    return Header(shapes=shapes, dtypes=dtypes, text=text)


def plain_shapes(head: Header) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights for text once those in MXFP4 are dequantized, which
    transposes them.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in ((name, shape) for name, shape in head.shapes.items() if is_for_text(name)):
        if head.dtypes[name] == "U8" and name.endswith(MXFP4) and len(shape) > 2:
            if name.endswith(MXFP4[0]):
                experts, rows, groups, pairs = shape
                shapes[text_name(name).removesuffix(MXFP4[0])] = (experts, groups * pairs * 2, rows)
        else:
            shapes[text_name(name)] = shape
    return shapes
