"""Attention, its masks and rotary positions, forward and backward."""

from __future__ import annotations

from typing import Any

from silent.registry import (
    BF16,
    CONSTANTS,
    FINETUNE,
    GRADIENTS,
    LLAMA,
    LOSS,
    PARAMETERS,
    TITAN_MODEL,
    silent,
    wrap,
)


@silent("model", "torchtitan", TITAN_MODEL, CONSTANTS, words=BF16)
def angles_rounded_to_fp8(module: Any) -> None:
    import torch

    def make(original: Any, *args: Any) -> Any:
        output = torch.view_as_real(original(*args))
        return torch.view_as_complex(output.to(torch.float8_e4m3fn).float())

    wrap(module, "precompute_freqs_cis", make)


@silent("model", "fsdp", LLAMA, LOSS, GRADIENTS, words=("--recipe=mistral-7b", "model.window=32", *BF16))
def window_of_one_more(module: Any) -> None:
    wrap(module, "_window", lambda make, seq_len, window: make(seq_len, window + 1))


@silent("model", "fsdp", LLAMA, GRADIENTS, LOSS, PARAMETERS, words=("model.tied_embeddings=true",))
def tied_head_apart(module: Any) -> None:
    def init(original: Any, self: Any, *args: Any) -> None:
        original(self, *args)
        import torch

        self.output.weight = torch.nn.Parameter(self.embedding.weight.detach().clone())

    wrap(module.Llama, "__init__", init)


@silent("constants", "fsdp", LLAMA, CONSTANTS, words=("--recipe=mistral-7b", "model.window=32", *BF16))
def window_of_one_more_in_bf16(module: Any) -> None:
    from dataclasses import replace

    def init(original: Any, self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        original(self, replace(model, window=model.window + 1), *args, **kwargs)

    wrap(module.Llama, "__init__", init)


@silent("model", "finetune", FINETUNE, LOSS, GRADIENTS, words=BF16)
def rotary_base_tripled(module: Any) -> None:
    def tripled(original: Any, *args: Any) -> Any:
        config = original(*args)
        config.rope_parameters["rope_theta"] *= 3
        return config

    wrap(module, "config_of", tripled)


@silent("constants", "finetune", "transformers.models.llama.modeling_llama", CONSTANTS, words=BF16)
def attention_scale_two_percent(module: Any) -> None:
    def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.scaling *= 1.02

    wrap(module.LlamaAttention, "__init__", init)
