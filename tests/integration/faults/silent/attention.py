"""Attention, its masks and rotary positions, forward and backward."""

from dataclasses import replace
from typing import Any

import torch

from silent.registry import silent, wrap


@silent(
    "model",
    "torchtitan --precision=bf16 steps=4",
    "torchtitan.models.llama3.model.model",
    "constants",
)
def angles_rounded_to_fp8(module: Any) -> None:
    def make(original: Any, *args: Any) -> Any:
        output = torch.view_as_real(original(*args))
        return torch.view_as_complex(output.to(torch.float8_e4m3fn).float())

    wrap(module, "precompute_freqs_cis", make)


@silent(
    "model",
    "fsdp model.tied_embeddings=true",
    "primus_images.training.backends.fsdp.llama",
    "gradients",
    "loss",
    "parameters",
)
def tied_head_apart(module: Any) -> None:
    def init(original: Any, self: Any, *args: Any) -> None:
        original(self, *args)
        self.output.weight = torch.nn.Parameter(self.embedding.weight.detach().clone())

    wrap(module.Llama, "__init__", init)


@silent(
    "constants",
    "fsdp --recipe=mistral-7b model.window=32 --precision=bf16",
    "primus_images.training.backends.fsdp.llama",
    "constants",
)
def window_of_one_more_in_bf16(module: Any) -> None:
    def init(original: Any, self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        original(self, replace(model, window=model.window + 1), *args, **kwargs)

    wrap(module.Llama, "__init__", init)


@silent(
    "constants",
    "finetune --precision=bf16",
    "transformers.models.llama.modeling_llama",
    "constants",
)
def attention_scale_two_percent(module: Any) -> None:
    def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.scaling *= 1.02

    wrap(module.LlamaAttention, "__init__", init)
