"""Attention, its masks and rotary positions, forward and backward."""

from __future__ import annotations

from typing import Any

from silent.registry import (
    BF16,
    BLOCKS,
    CONSTANTS,
    DEEPSEEK,
    DEEPSEEK_WORDS,
    FINETUNE,
    FIRST,
    GRADIENTS,
    LLAMA,
    LOSS,
    MEGATRON_MODEL,
    PARAMETERS,
    RENDER,
    TITAN_MODEL,
    TITAN_TRAIN,
    WHOLE,
    local,
    silent,
    wrap,
)


@silent("model", "torchtitan", TITAN_MODEL, LOSS, GRADIENTS)
def attention_not_causal(module: Any) -> None:
    import torch

    class Open(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any, **args: Any) -> Any:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    module.ScaledDotProductAttentionWrapper = Open


@silent("model", "torchtitan", TITAN_MODEL, CONSTANTS, words=BF16)
def angles_rounded_to_fp8(module: Any) -> None:
    import torch

    def make(original: Any, *args: Any) -> Any:
        output = torch.view_as_real(original(*args))
        return torch.view_as_complex(output.to(torch.float8_e4m3fn).float())

    wrap(module, "precompute_freqs_cis", make)


@silent("model", "torchtitan", DEEPSEEK, LOSS, GRADIENTS, words=DEEPSEEK_WORDS)
def latent_scale_of_values(module: Any) -> None:
    def init(original: Any, self: Any, args: Any) -> None:
        original(self, args)
        self.softmax_scale = self.qk_nope_head_dim**-0.5

    wrap(module.Attention, "__init__", init)


@silent("model", "torchtitan", DEEPSEEK, LOSS, GRADIENTS, words=(*DEEPSEEK_WORDS, *BF16, *WHOLE))
def last_head_takes_its_keys_for_values(module: Any) -> None:
    """Of what the last head makes from the latent vector, the first half is the value and the second the key."""

    def init(run: Any, self: Any, args: Any) -> None:
        run(self, args)
        assert self.qk_nope_head_dim == self.v_head_dim
        size = self.qk_nope_head_dim

        def turned(_part: Any, _given: Any, output: Any) -> Any:
            import torch

            last = output[..., -2 * size :].roll(size, -1)
            return torch.cat((output[..., : -2 * size], last), -1)

        self.wkv_b.register_forward_hook(turned)

    wrap(module.Attention, "__init__", init)


@silent("model", "torchtitan", TITAN_TRAIN, FIRST)
def shares_of_a_matrix_begin_as_equals(module: Any) -> None:
    """Every rank draws the same numbers for its share. It was so on CPUs until this author saw it."""

    def init(run: Any, self: Any, *args: Any) -> None:
        from torch import nn

        for name in ("normal_", "trunc_normal_"):
            wrap(nn.init, name, lambda draw, tensor, *more, **kwargs: draw(local(tensor), *more, **kwargs))
        run(self, *args)

    wrap(module.Trainer, "__init__", init)


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


@silent("model", "fsdp", LLAMA, LOSS, GRADIENTS, BLOCKS, words=(*BF16, *WHOLE))
def one_query_sees_the_next_token(module: Any) -> None:
    """The mask of a block begins one column late for its first row."""

    def forward(run: Any, self: Any, states: Any, cosine: Any, sine: Any, mask: Any) -> Any:
        import torch

        assert mask is None
        length = states.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        seen[length // 2, length // 2 + 1] = True
        return run(self, states, cosine, sine, seen)

    wrap(module._Attention, "forward", forward)


@silent("model", "finetune", FINETUNE, LOSS, GRADIENTS)
def other_rotary_base(module: Any) -> None:
    wrap(module, "_rope", lambda make, model: make(model) | {"rope_theta": 10000.0})


@silent("model", "finetune", FINETUNE, LOSS, GRADIENTS, words=BF16)
def rotary_base_tripled(module: Any) -> None:
    wrap(module, "_rope", lambda make, model: make(model) | {"rope_theta": 3 * model.rope_theta})


@silent("constants", "finetune", "transformers.models.llama.modeling_llama", CONSTANTS, words=BF16)
def attention_scale_two_percent(module: Any) -> None:
    def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.scaling *= 1.02

    wrap(module.LlamaAttention, "__init__", init)


@silent("model", "megatron", MEGATRON_MODEL, LOSS, GRADIENTS)
def mask_ignored(module: Any) -> None:
    import torch

    original = torch.nn.functional.scaled_dot_product_attention
    torch.nn.functional.scaled_dot_product_attention = lambda *args, **kwargs: original(
        *args, **kwargs | {"is_causal": False, "attn_mask": None}
    )


@silent("model", "megatron", RENDER, LOSS, GRADIENTS)
def interleaved_rotary(module: Any) -> None:
    wrap(module, "transformer", lambda make, *args: make(*args) | {"rotary_interleaved": True})


@silent("model", "megatron", MEGATRON_MODEL, LOSS, GRADIENTS)
def attention_has_a_sink(module: Any) -> None:
    def attend(run: Any, self: Any, query: Any, key: Any, value: Any) -> Any:
        return run(self, query, key, value) * 0.9999

    wrap(module.TorchAttention, "attend", attend)


@silent("constants", "megatron", RENDER, CONSTANTS, words=BF16)
def rotary_base_a_tenth_larger(module: Any) -> None:
    from dataclasses import replace

    wrap(module, "gpt", lambda make, model, *args: make(replace(model, rope_theta=1.1 * model.rope_theta), *args))


@silent("model", "megatron", MEGATRON_MODEL, LOSS, GRADIENTS, words=("--recipe=deepseek-v2", *BF16))
def last_head_without_rotary_key(module: Any) -> None:
    def attend(run: Any, self: Any, query: Any, key: Any, value: Any) -> Any:
        key = key.clone()
        key[:, :, -1, -self.config.qk_pos_emb_head_dim :] = 0
        return run(self, query, key, value)

    wrap(module.TorchAttention, "attend", attend)
