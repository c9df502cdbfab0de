"""The initial weights of a sharded model, from Hugging Face's files or from the seed."""

import math
import re

import torch
from torch import Tensor, nn

from primus_images.recipes.tensors import MXFP4
from primus_images.training.backends.loop import weights

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
# The parts that PEFT adds to the names of weights.
_ADAPTED = re.compile(r"^base_model\.model\.|\.base_layer(?=\.)")
_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)$")
_MATRICES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def init(model: nn.Module, seed: int, files: weights.Files | None, norm: float = 1.0) -> None:
    """Set every weight of the sharded ``model`` from ``files``, or without them from ``seed``.

    Norms are drawn as ``norm``. Adapters start without effect. Raises SystemExit if the files lack
    a weight.
    """
    for name, parameter in model.named_parameters():
        plain = plain_name(name)
        if ".lora_B." in plain:
            weights.fill(parameter, weights.constant(parameter, 0.0))
        elif ".lora_A." in plain:
            # The same variance as in PEFT's own initialization.
            std = 1 / math.sqrt(3 * parameter.shape[-1])
            weights.fill(parameter, weights.normal(plain, parameter, seed, std))
        elif files is not None:
            weights.fill(parameter, stored(files, plain))
        else:
            outer = plain in (HEAD, EMBEDDING)
            weights.draw_one(plain, parameter, seed, outer=outer, norm=norm)
    if files is not None:
        saved = model.state_dict()
        for name, buffer in model.named_buffers():
            if name in saved:
                weights.fill(buffer, stored(files, plain_name(name)))


def plain_name(name: str) -> str:
    """Return the name in transformers' model of a weight of :class:`models.FineTuned`."""
    return _ADAPTED.sub("", name.removeprefix("model."))


def stored(files: weights.Files, name: str) -> weights.Rows:
    """Return the rows of a weight of transformers' model from ``files``.

    Raises SystemExit if they lack it.
    """
    blocks, scales = (f"{name}{part}" for part in MXFP4)
    experts = _EXPERTS.match(name)
    if blocks in files:
        return _dequantized(files.rows_of(blocks), files.rows_of(scales))
    if experts and name not in files:
        return _stacked(files, experts[1], _MATRICES[experts[2]])
    return files.rows_of(name)


def _dequantized(blocks: weights.Rows, scales: weights.Rows) -> weights.Rows:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    def rows(first: int, last: int) -> Tensor:
        return convert_moe_packed_tensors(blocks(first, last), scales(first, last))

    return rows


def _stacked(files: weights.Files, experts: str, matrices: tuple[str, ...]) -> weights.Rows:
    """Return a weight of all experts, of which the files have each expert's ``matrices``."""
    for matrix in matrices:
        files.rows_of(f"{experts}.0.{matrix}.weight")  # raises SystemExit without it

    def expert(number: int) -> Tensor:
        return torch.cat(
            [files.whole(f"{experts}.{number}.{matrix}.weight") for matrix in matrices]
        )

    def rows(first: int, last: int) -> Tensor:
        return torch.stack([expert(number) for number in range(first, last)])

    return rows
