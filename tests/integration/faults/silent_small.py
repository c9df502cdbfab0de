"""Silent faults whose effect is below the noise of a narrow precision, and others written to see what escapes."""

from __future__ import annotations

from typing import Any

from silent import (
    ADAMW,
    CONSTANTS,
    DATA,
    GRADIENTS,
    LANGUAGE,
    LLAMA,
    LOSS,
    TITAN_DATA,
    TITAN_LOSS,
    TITAN_MODEL,
    UPDATE,
    silent,
    wrap,
)  # fmt: skip
from silent_subtle import BF16
from silent_unseen import FLUX, LATENTS, LOOP_DATA
from silent_wide import RENDER

TRANSFORMER = "diffusers.models.transformers.transformer_flux"
MIXTRAL_BF16 = ("--recipe=mixtral-8x7b", *BF16)


# Constants of the model


@silent("constants", "torchtitan", TITAN_MODEL, CONSTANTS, words=BF16)
def angles_rounded_to_bf16(module: Any) -> None:
    import torch

    def make(original: Any, *given: Any) -> Any:
        return torch.view_as_complex(torch.view_as_real(original(*given)).to(torch.bfloat16).float())

    wrap(module, "precompute_freqs_cis", make)


@silent("constants", "torchtitan", TITAN_MODEL, CONSTANTS, words=BF16)
def epsilon_of_every_norm(module: Any) -> None:
    def init(original: Any, self: Any, *given: Any, **named: Any) -> None:
        import torch

        original(self, *given, **named)
        for part in self.modules():
            if isinstance(part, torch.nn.RMSNorm):
                part.eps = 2e-3

    wrap(module.Transformer, "__init__", init)


@silent("constants", "torchtitan", TITAN_MODEL, CONSTANTS, words=("--precision=fp8",))
def attention_scale_in_fp8(module: Any) -> None:
    wrap(
        module.ScaledDotProductAttentionWrapper,
        "forward",
        lambda run, self, q, k, v, **named: run(self, q * 1.02, k, v, **named),
    )


@silent("constants", "torchtitan", TITAN_LOSS, CONSTANTS, words=BF16)
def labels_smoothed_a_little(module: Any) -> None:
    import torch

    def smoothed(pred: Any, labels: Any) -> Any:
        return torch.nn.functional.cross_entropy(
            pred.flatten(0, 1).float(), labels.flatten(0, 1), reduction="sum", label_smoothing=0.01
        )

    module.cross_entropy_loss = smoothed


@silent("constants", "fsdp", LLAMA, CONSTANTS, words=BF16)
def angles_in_fp8(module: Any) -> None:
    import torch

    wrap(module, "_rotation", lambda run, *given: tuple(part.to(torch.float8_e4m3fn).float() for part in run(*given)))


@silent("constants", "fsdp", LANGUAGE, CONSTANTS, words=BF16)
def small_z_loss(module: Any) -> None:
    def summed(run: Any, head: Any, states: Any, labels: Any) -> Any:
        more = 1e-3 * head(states).float().logsumexp(-1).square().sum()
        return run(head, states, labels) + more - more.detach()

    wrap(module, "_summed", summed)


@silent("constants", "fsdp", LLAMA, CONSTANTS, words=("--recipe=mistral-7b", "model.window=32", *BF16))
def window_of_one_more_in_bf16(module: Any) -> None:
    from dataclasses import replace

    def init(original: Any, self: Any, model: Any, *given: Any, **named: Any) -> None:
        original(self, replace(model, window=model.window + 1), *given, **named)

    wrap(module.Llama, "__init__", init)


@silent("constants", "finetune", "transformers.models.llama.modeling_llama", CONSTANTS, words=BF16)
def attention_scale_two_percent(module: Any) -> None:
    def init(original: Any, self: Any, *given: Any, **named: Any) -> None:
        original(self, *given, **named)
        self.scaling *= 1.02

    wrap(module.LlamaAttention, "__init__", init)


@silent("constants", "megatron", RENDER, CONSTANTS, words=BF16)
def rotary_base_a_tenth_larger(module: Any) -> None:
    from dataclasses import replace

    wrap(module, "gpt", lambda make, model, *given: make(replace(model, rope_theta=1.1 * model.rope_theta), *given))


@silent("constants", "megatron", "megatron.core.transformer.moe.router", CONSTANTS, words=MIXTRAL_BF16)
def experts_two_percent_heavier(module: Any) -> None:
    def routing(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        shares, chosen = run(self, *given, **named)
        return 1.02 * shares, chosen

    wrap(module.TopKRouter, "routing", routing)


@silent("constants", "megatron", RENDER, CONSTANTS, words=MIXTRAL_BF16)
def balancing_loss_a_half_larger(module: Any) -> None:
    def make(original: Any, *given: Any) -> Any:
        made = original(*given)
        return {**made, "moe_aux_loss_coeff": 1.6 * made["moe_aux_loss_coeff"]}

    wrap(module, "transformer", make)


@silent("constants", "flux", TRANSFORMER, CONSTANTS, words=(*FLUX, *BF16))
def epsilon_of_queries_and_keys(module: Any) -> None:
    def init(original: Any, self: Any, *given: Any, **named: Any) -> None:
        import torch

        original(self, *given, **named)
        for part in self.modules():
            if "Norm" in type(part).__name__ and isinstance(getattr(part, "eps", None), float):
                part.eps = 2e-3
        assert any(isinstance(part, torch.nn.Module) and getattr(part, "eps", 0) == 2e-3 for part in self.modules())

    wrap(module.FluxTransformer2DModel, "__init__", init)


# Data


# Enough samples that the corpus is read a second time.
@silent("data", "fsdp", LOOP_DATA, DATA, words=("training.micro_batch_size=64", "training.global_batch_size=128"))
def second_pass_in_the_same_order(module: Any) -> None:
    wrap(module, "shuffled", lambda order, count, seed, turn: order(count, seed, 0))


@silent("data", "finetune", LOOP_DATA, DATA)
def one_token_lost_between_samples(module: Any) -> None:
    def init(original: Any, self: Any, tokens: Any, *given: Any) -> None:
        original(self, tokens[1:], *given)

    wrap(module.Packed, "__init__", init)


@silent("data", "torchtitan", "torchtitan.components.tokenizer", DATA)
def text_in_lower_case(module: Any) -> None:
    wrap(module.HuggingFaceTokenizer, "encode", lambda encode, self, text, **named: encode(self, text.lower(), **named))


@silent("data", "torchtitan", TITAN_DATA, DATA)
def spaces_at_the_end_stripped(module: Any) -> None:
    def init(original: Any, self: Any, *given: Any, **named: Any) -> None:
        original(self, *given, **named)
        process = self._text_processor
        self._text_processor = lambda sample: process(sample)[:-1]

    wrap(module.HuggingFaceTextDataset, "__init__", init)


@silent("data", "flux", LATENTS, DATA, words=FLUX)
def latents_of_256_values(module: Any) -> None:
    def batch(run: Any, self: Any, first: int, count: int) -> Any:
        made = run(self, first, count)
        return {**made, "latents": (made["latents"] * 32).round() / 32}

    wrap(module.Images, "batch", batch)


# Optimizer, parallelism, kernels


@silent("optimizer", "finetune", ADAMW, UPDATE, words=("--mode=lora", *BF16))
def second_adapter_matrix_learns_faster(module: Any) -> None:
    def step(original: Any, self: Any, *given: Any, **named: Any) -> Any:
        import torch

        outer = [p for group in self.param_groups for p in group["params"] if p.shape[0] > p.shape[1]]
        before = [parameter.detach().clone() for parameter in outer]
        found = original(self, *given, **named)
        with torch.no_grad():
            for parameter, old in zip(outer, before, strict=True):
                parameter.add_(parameter - old)
        return found

    wrap(module.AdamW, "step", step)


@silent("precision", "megatron", "primus.training.megatron.model", LOSS, GRADIENTS)
def attention_given_back_in_bf16(module: Any) -> None:
    import torch

    def attend(run: Any, self: Any, *given: Any) -> Any:
        out = run(self, *given)
        return out.to(torch.bfloat16).to(out.dtype)

    wrap(module.TorchAttention, "attend", attend)


@silent("constants", "fsdp", LLAMA, CONSTANTS, words=BF16)
def shares_of_attention_in_fp8(module: Any) -> None:
    import torch

    _attention(module, lambda shares: shares + (shares.to(torch.float8_e4m3fn).float() - shares).detach())


def _attention(module: Any, change: Any) -> None:
    import torch

    def attend(_run: Any, query: Any, key: Any, value: Any, **_named: Any) -> Any:
        key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value))
        scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
        return change(scores.float().softmax(-1)).to(value.dtype) @ value

    wrap(module.functional, "scaled_dot_product_attention", attend)
