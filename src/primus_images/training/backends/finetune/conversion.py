"""Weights of a folder by the names of transformers' model, which renames and joins some of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from primus_images.recipes.architecture import Architecture
from primus_images.recipes.tensors import is_for_text, text_name
from primus_images.training.backends.finetune.initial import plain_name, stored
from primus_images.training.backends.finetune.models import config_of_weights
from primus_images.training.backends.loop import weights

# What transformers does to make a weight of all experts, which `stored` does as well.
_STACKS = "MergeModulelist"
_STACKING = {_STACKS, "Concatenate"}


class Loaded(weights.Files):
    """The weights of a folder as transformers loads them, all of them in memory."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        tensors = {}
        for name, tensor in weights.Files(folder).tensors():
            if is_for_text(name):
                tensors[text_name(name)] = tensor
        config = config_of_weights(folder)
        kind = AutoModelForCausalLM._model_mapping[type(config)]
        model = kind.from_pretrained(None, config=config, state_dict=tensors, dtype=torch.float32)
        self._tensors = model.state_dict()

    @override
    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @override
    def rows_of(self, name: str) -> weights.Rows:
        tensor = self._tensors[name]
        return lambda first, last: tensor[first:last] if tensor.ndim else tensor


def files_of(source: Path, causal: Any, model: Architecture) -> weights.Files:
    """Return the weights in ``source`` for ``causal``, which transformers has built for them."""
    if are_converted(source, causal, model):
        return Loaded(source)
    return weights.Files(source)


def are_converted(source: Path, causal: Any, model: Architecture) -> bool:
    """Return whether transformers makes weights of ``causal`` from several tensors in ``source``,
    or from tensors of other names.

    Ask before FSDP changes the classes of modules, by which transformers knows its conversions.
    """
    if model.has_formula:
        return False
    from transformers.conversion_mapping import get_model_conversion_mapping

    for conversion in get_model_conversion_mapping(causal, add_legacy=False):
        operations = {type(operation).__name__ for operation in _operations(conversion)}
        if operations and (_STACKS not in operations or operations - _STACKING):
            return True
    files = weights.Files(source)
    saved = causal.state_dict().keys()
    # Each tied weight once.
    names = [name for name, _ in (*causal.named_parameters(), *causal.named_buffers())]
    return not all(_is_stored(files, f"model.{name}") for name in names if name in saved)


def _operations(conversion: Any) -> Sequence[Any]:
    return getattr(conversion, "operations", None) or ()


def _is_stored(files: weights.Files, name: str) -> bool:
    if ".lora_" in name:
        return True
    try:
        stored(files, plain_name(name))
    except SystemExit:
        return False
    return True
