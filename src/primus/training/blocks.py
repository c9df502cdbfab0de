"""Recording what enters and leaves the blocks of a model in training, and its output, at some steps."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from primus.training.gather import whole_tensor

# A block of a transformer, and the layer that makes logits or, in FLUX, the velocity.
_BLOCK = re.compile(r"(?:^|\.)((?:single_)?transformer_blocks|layers)\.(\d+)")
_OUTPUT = re.compile(r"(?:.*\.)?(?:output|lm_head|output_layer|proj_out)")
# Wrappers around modules, which add their names.
_WRAPPER = re.compile(r"\.?(?:_checkpoint_wrapped_module|_orig_mod|_fsdp_wrapped_module)\b")

Tensors = dict[str, torch.Tensor]


class Blocks:
    """Hooks on the blocks and the output layer of ``parts``. :meth:`taken` returns what they saw.

    The hooks are only in place between :meth:`watch` and :meth:`taken`.
    """

    def __init__(self, parts: Sequence[torch.nn.Module]) -> None:
        self._modules = dict(_blocks(parts))
        self._hooks: list[Any] = []
        self._seen: dict[str, list[Tensors]] = {}

    def watch(self) -> None:
        """Record all calls from now on, but not those that repeat a forward pass within the backward pass."""
        self._seen = {name: [] for name in self._modules}
        for name, module in self._modules.items():
            recorder = _Recorder(self._seen[name], whole=name != "output")
            self._hooks += [
                module.register_forward_pre_hook(recorder.before, with_kwargs=True),
                module.register_forward_hook(recorder.after),
            ]

    def taken(self) -> dict[str, list[Tensors]]:
        """Return name of a module → its inputs, outputs and their gradients, per call; and remove the hooks.

        Names are ``layers.N``, ``transformer_blocks.N``, ``single_transformer_blocks.N`` and ``output``. The output
        layer's calls have no inputs.
        """
        while self._hooks:
            self._hooks.pop().remove()
        seen, self._seen = self._seen, {}
        return seen


def _blocks(parts: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Module]]:
    for part in parts:
        for given, module in part.named_modules():
            name = _WRAPPER.sub("", given)
            if given != name and _WRAPPER.search(given.rpartition(".")[2]):
                # The wrapper around it has been found. It is called once, the module within it twice if it recomputes.
                continue
            if (found := _BLOCK.search(name)) and found.end() == len(name):
                # Megatron numbers the layers of each pipeline stage from 0, but knows their place in the model.
                number = getattr(module, "layer_number", int(found[2]) + 1) - 1
                yield f"{found[1]}.{number}", module
            elif _OUTPUT.fullmatch(name) and not _BLOCK.search(name):
                yield "output", module


class _Recorder:
    """Appends one mapping per call of a module to ``calls``: its tensors, and later their gradients.

    Without ``whole``, only its outputs. Logits and their gradients are the largest tensors of a small model.
    """

    def __init__(self, calls: list[Tensors], *, whole: bool) -> None:
        self._calls = calls
        self._whole = whole
        # Calls that had no graph. The backward pass repeats them, first come first, and then they get their gradients.
        self._without_graph: list[Tensors] = []
        self._current: Tensors | None = None

    def before(self, _module: torch.nn.Module, given: Sequence[Any], named: Mapping[str, Any]) -> None:
        known = {"hidden_states": given[0], **named} if given else named
        tensors = {f"in.{name}": known.get(name) for name in ("hidden_states", "encoder_hidden_states", "temb")}
        if not _within_backward():
            self._current = {}
            self._calls.append(self._current)
            if not torch.is_grad_enabled():
                self._without_graph.append(self._current)
        else:
            self._current = self._without_graph.pop(0) if self._without_graph else None
        if self._whole:
            self._record(tensors)

    def after(self, _module: torch.nn.Module, _given: Sequence[Any], out: Any) -> None:
        parts = out if isinstance(out, tuple) else (out,)
        self._record({f"out.{number}": part for number, part in enumerate(parts)})

    def _record(self, tensors: Mapping[str, Any]) -> None:
        if (call := self._current) is None:
            return
        for name, tensor in tensors.items():
            if isinstance(tensor, torch.Tensor):
                call.setdefault(name, whole_tensor(tensor))
                if self._whole and tensor.requires_grad and torch.is_grad_enabled():
                    tensor.register_hook(partial(_keep, call, f"grad.{name}", tensor.shape))


def _keep(call: Tensors, name: str, shape: torch.Size, gradient: torch.Tensor | None) -> None:
    # Autograd passes None where a block's result is not used, which stands for zeros.
    call[name] = torch.zeros(shape) if gradient is None else whole_tensor(gradient)


def _within_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)
