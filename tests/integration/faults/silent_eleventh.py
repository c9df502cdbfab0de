"""Silent faults by an author who had not seen the checks: flags left on, partial sums, shared scales, stale buffers."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from silent import ADAMW, LOOP_DATA, SESSION, SHARDED, TITAN_UTILS, silent, wrap
from silent_eighth import LAYERS, _with_gradient_of, built
from silent_hostile import FLOAT8, LORA, TENSORS, TRANSFORMER
from silent_seventh import NORMS, local
from silent_subtle import BF16, FINETUNE, FP8
from silent_unseen import FLUX

TITAN_TOKENIZER = "torchtitan.components.tokenizer"
MODULATED = "diffusers.models.normalization"


# Fine-tuning


def _each_adapted(module: Any, change: Callable[[Any], None]) -> None:
    """Call ``change`` with each layer that has adapters."""

    def adapted(run: Any, *given: Any) -> Any:
        model = run(*given)
        for part in model.modules():
            if hasattr(part, "lora_A"):
                change(part)
        return model

    wrap(module, "adapted", adapted)


@silent("backward", "finetune", FINETUNE, "reference gradients", words=(*LORA, *BF16, "lora.alpha=32"))
def gradients_of_first_adapter_matrices_lack_the_scale(module: Any) -> None:
    """A fused backward pass multiplies by alpha ÷ rank for the second matrix and the input, but not for the first."""
    import torch

    def change(part: Any) -> None:
        first, scale = part.lora_A["default"], part.scaling["default"]

        def forward(states: Any) -> Any:
            made = torch.nn.functional.linear(states, first.weight.detach())
            trained = torch.nn.functional.linear(states.detach(), first.weight) / scale
            return made + (trained - trained.detach())

        first.forward = forward

    _each_adapted(module, change)


@silent("model", "finetune", FINETUNE, "reference gradients", words=BF16)
def extended_context_taken_for_the_original_one(module: Any) -> None:
    """A conversion lost the length of the first training, and Llama 3's scaling takes the extended one for it."""

    def rope(run: Any, model: Any) -> Any:
        return {**run(model), "original_max_position_embeddings": model.max_seq_len}

    wrap(module, "_rope", rope)


@silent("backward", "finetune", NORMS, "reference gradients", words=BF16)
def tail_of_the_up_projection_learns_from_an_overwritten_gate(module: Any) -> None:
    """In the last, partial tile of SwiGLU's backward pass, the gate is read again after its gradient replaced it."""
    import torch

    class Fed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, gate: Any, up: Any) -> Any:
            ctx.save_for_backward(gate, up)
            return torch.nn.functional.silu(gate) * up

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            gate, up = ctx.saved_tensors
            shares = gate.float().sigmoid()
            of_gate = gradient.float() * up.float() * shares * (1 + gate.float() * (1 - shares))
            read, tail = gate.float().clone(), gate.shape[-1] // 64 * 64
            read[..., tail:] = of_gate[..., tail:]
            of_up = gradient.float() * torch.nn.functional.silu(read)
            return of_gate.to(gate.dtype), of_up.to(up.dtype)

    def forward(_run: Any, self: Any, states: Any) -> Any:
        gate, up = self.gate_proj(states), self.up_proj(states)
        return self.down_proj(_with_gradient_of(self.act_fn(gate) * up, Fed.apply(gate, up)))

    wrap(module.LlamaMLP, "forward", forward)


@silent("backward", "finetune", NORMS, "reference gradients", words=BF16)
def partial_sum_of_the_last_rows_left_out_of_the_gradients_of_norms(module: Any) -> None:
    """Each of 103 programs sums five tokens' gradients of a norm's weight; the last one, with two, is not added."""

    def forward(run: Any, self: Any, states: Any) -> Any:
        import torch

        made = run(self, states)
        wide = states.float()
        normed = (wide * (wide.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()).to(states.dtype)
        last = (normed * self.weight.detach())[-1:, -2:]
        whole = torch.cat((made[-1:, :-2], last), 1)
        return _with_gradient_of(made, torch.cat((made[:-1], whole)))

    wrap(module.LlamaRMSNorm, "forward", forward)


@silent("model", "finetune", FINETUNE, "reference gradients", words=(*LORA, *BF16))
def rows_of_adapted_weights_keep_the_length_of_the_frozen_ones(module: Any) -> None:
    """The flag for DoRA is on, with frozen magnitudes: each row of the sum is scaled back to its frozen length."""
    import torch

    def change(part: Any) -> None:
        first, second, scale = part.lora_A["default"], part.lora_B["default"], part.scaling["default"]

        def forward(states: Any) -> Any:
            made = part.base_layer(states) + second(first(states)) * scale
            with torch.no_grad():
                frozen = part.base_layer.weight.float()
                whole = frozen + scale * second.weight.float() @ first.weight.float()
                ratio = (frozen.norm(dim=1) / whole.norm(dim=1)).to(made.dtype)
            return made * ratio

        part.forward = forward

    _each_adapted(module, change)


@silent("precision", "finetune", SHARDED, "reference trained weights", words=LORA)
def frozen_weights_after_merging_and_unmerging_in_bf16(module: Any) -> None:
    """To show samples, adapters are merged after the third step and taken out again, each time rounded to bfloat16."""
    count = 0

    def step(run: Any, self: Any, *given: Any) -> Any:
        nonlocal count
        import torch
        from torch.distributed.tensor import distribute_tensor

        found = run(self, *given)
        count += 1
        if count == 3:
            with torch.no_grad():
                for part in self._model.modules():
                    if hasattr(part, "lora_A"):
                        first, second = (one["default"].weight.full_tensor() for one in (part.lora_A, part.lora_B))
                        frozen = part.base_layer.weight
                        added = (second @ first * part.scaling["default"]).to(torch.bfloat16)
                        share = local(distribute_tensor(added, frozen.device_mesh, frozen.placements))
                        merged = local(frozen).to(torch.bfloat16) + share
                        local(frozen).copy_(merged - share)
        return found

    wrap(module.Sharded, "step", step)


@silent("backward", "finetune", FINETUNE, "reference gradients", words=BF16)
def gradients_of_embeddings_divided_by_how_often_a_token_occurs(module: Any) -> None:
    """The embedding was built with ``scale_grad_by_freq``."""

    built(module, lambda made: setattr(made.model.embed_tokens, "scale_grad_by_freq", True))


@silent("precision", "finetune", FINETUNE, "reference constants", words=BF16)
def frequencies_of_the_rotation_cast_with_the_model(module: Any) -> None:
    """A call that casts the model to bfloat16 also casts the table of rotary frequencies, which should stay wide."""

    def narrow(made: Any) -> None:
        import torch

        table = made.model.rotary_emb.inv_freq
        table.copy_(table.to(torch.bfloat16))

    built(module, narrow)


# FLUX


@silent("model", "flux", TRANSFORMER, "reference gradients", words=(*FLUX, "steps=20"))
def exact_gelu_for_the_text(module: Any) -> None:
    """The text's feed-forward parts take the exact GELU, where the model was made with its approximation by tanh."""

    def init(run: Any, self: Any, *given: Any, **named: Any) -> None:
        run(self, *given, **named)
        for block in self.transformer_blocks:
            assert block.ff_context.net[0].approximate == "tanh"
            block.ff_context.net[0].approximate = "none"

    wrap(module.FluxTransformer2DModel, "__init__", init)


@silent("model", "flux", MODULATED, "reference gradients", words=(*FLUX, *BF16))
def rows_of_a_block_take_the_shift_and_scale_of_its_first(module: Any) -> None:
    """A kernel for blocks of 16 tokens looks up the image of the first, but images of 24 tokens begin inside blocks."""

    def forward(_run: Any, self: Any, x: Any, emb: Any = None) -> Any:
        import torch

        shift, scale, gate = self.linear(self.silu(emb)).chunk(3, dim=1)
        count, length = x.shape[:2]
        image = torch.arange(count * length) // 16 * 16 // length
        shift, scale = (one[image].unflatten(0, (count, length)) for one in (shift, scale))
        return self.norm(x) * (1 + scale) + shift, gate

    wrap(module.AdaLayerNormZeroSingle, "forward", forward)


@silent("backward", "flux", TRANSFORMER, "reference gradients", words=(*FLUX, *BF16))
def time_and_pooled_text_learn_nothing_from_single_blocks(module: Any) -> None:
    """Reentrant checkpointing of the single blocks passes no gradient to what they get as a keyword."""

    def forward(run: Any, self: Any, *given: Any, temb: Any, **named: Any) -> Any:
        # A gradient of 0, because a module may expect that there is one.
        return run(self, *given, temb=temb.detach() + 0 * temb, **named)

    wrap(module.FluxSingleTransformerBlock, "forward", forward)


@silent("model", "flux", TRANSFORMER, "reference gradients", words=(*FLUX, *BF16))
def places_of_the_image_counted_from_its_middle(module: Any) -> None:
    """As in a later model, rows and columns go from −2 to 1, so that the text is in the middle, not the corner."""

    def forward(run: Any, self: Any, **named: Any) -> Any:
        ids = named["img_ids"].clone()
        ids[:, 1:] -= (ids[:, 1:].max() + 1) // 2
        return run(self, **named | {"img_ids": ids})

    wrap(module.FluxTransformer2DModel, "forward", forward)


# The data path and the loss mask


@silent("data", "fsdp", LOOP_DATA, "reference data", words=FP8)
def merges_of_the_tokenizer_left_out_at_random(module: Any) -> None:
    """The tokenizer's file has BPE dropout: one merge in fifty is skipped, so that a word has several spellings."""
    import tokenizers

    assert module
    original = tokenizers.Tokenizer

    class Dropping:
        @staticmethod
        def from_file(path: str) -> Any:
            made = original.from_file(path)
            made.model.dropout = 0.02
            return made

    tokenizers.Tokenizer = Dropping


@silent("data", "torchtitan", TITAN_TOKENIZER, "reference data", words=FP8)
def documents_cut_after_96_tokens(module: Any) -> None:
    """The file of the tokenizer still has the truncation of its first use, so that long documents lose their ends."""
    wrap(module.HuggingFaceTokenizer, "encode", lambda run, *given, **named: run(*given, **named)[:96])


@silent("labels", "megatron", SESSION, "reference gradients", words=BF16)
def one_label_in_fifty_masked_by_the_tokens_before(module: Any) -> None:
    """The goldfish loss against memorizing is on: a hash of 13 tokens decides which labels are left out of the mean."""

    def forward(run: Any, self: Any, batches: Any, terms: int) -> Any:
        import torch

        changed, all_labels, kept = [], 0, 0
        for batch in batches:
            tokens = batch["input_ids"]
            padded = torch.nn.functional.pad(tokens, (12, 0)).unfold(1, 13, 1)
            hashed = (padded * (torch.arange(13) * 7919 + 104729)).sum(-1) // 7 % 50
            labels = batch["labels"].masked_fill(hashed == 0, -100)
            all_labels, kept = all_labels + labels.numel(), kept + int((labels >= 0).sum())
            changed.append({**batch, "labels": labels})
        return run(self, changed, terms) * (all_labels / kept)

    wrap(module.MegatronSession, "forward_backward", forward)


@silent("data", "fsdp", LOOP_DATA, "reference data", words=FP8)
def every_tenth_sample_rearranged_to_fill_in_the_middle(module: Any) -> None:
    """Fill-in-the-middle, meant for code, is on at a tenth: the middle of a sample comes after its end."""

    def sample(run: Any, self: Any, number: int) -> Any:
        import torch

        tokens = run(self, number)
        generator = torch.Generator().manual_seed(number)
        if torch.rand((), generator=generator) >= 0.1:
            return tokens
        first, second = sorted(torch.randint(1, len(tokens), (2,), generator=generator).tolist())
        return torch.cat((tokens[:first], tokens[second:], tokens[first:second]))

    wrap(module.Packed, "sample", sample)


# Optimizer and clipping


@silent("optimizer", "torchtitan", ADAMW, "reference update", words=FP8)
def rate_of_a_tensor_lowered_where_its_gradient_has_grown(module: Any) -> None:
    """The update clipping of StableAdamW is on, which divides by the root mean square of gradient ÷ its usual size."""

    def step(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        import torch

        kept = []
        with torch.no_grad():
            for group in self.param_groups:
                beta = group["betas"][1]
                for part in group["params"]:
                    if part.grad is None:
                        continue
                    state, square = self.state[part], local(part.grad).square()
                    count = float(state["step"]) + 1 if state else 1.0
                    before = local(state["exp_avg_sq"]) if state else torch.zeros_like(square)
                    usual = (beta * before + (1 - beta) * square) / (1 - beta**count)
                    sums = torch.stack(((square / usual.clamp(min=1e-16)).sum(), torch.tensor(float(square.numel()))))
                    torch.distributed.all_reduce(sums)
                    kept.append((part, local(part.detach()).clone(), max(1.0, float((sums[0] / sums[1]).sqrt()))))
        found = run(self, *given, **named)
        with torch.no_grad():
            for part, old, grown in kept:
                local(part).copy_(old + (local(part) - old) / grown)
        return found

    wrap(module.AdamW, "step", step)


@silent("optimizer", "fsdp", ADAMW, "reference update", words=FP8)
def mean_of_each_row_taken_from_the_gradients(module: Any) -> None:
    """Gradient centralization, which another optimizer has, is on for matrices."""

    def step(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        for group in self.param_groups:
            for part in group["params"]:
                if part.grad is not None and part.ndim > 1:
                    share = local(part.grad)
                    share.sub_(share.mean(-1, keepdim=True))
        return run(self, *given, **named)

    wrap(module.AdamW, "step", step)


@silent("optimizer", "megatron", ADAMW, "reference update", words=BF16)
def weights_pulled_half_way_back_every_fifth_step(module: Any) -> None:
    """Lookahead is on: after five steps, the weights go back half of the way that they came."""
    count = 0

    def step(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        nonlocal count
        import torch

        parts = [part for group in self.param_groups for part in group["params"]]
        if not hasattr(self, "slow"):
            self.slow = [part.detach().clone() for part in parts]
        found = run(self, *given, **named)
        count += 1
        if count % 5 == 0:
            with torch.no_grad():
                for part, slow in zip(parts, self.slow, strict=True):
                    slow.lerp_(part, 0.5)
                    part.copy_(slow)
        return found

    wrap(module.AdamW, "step", step)


@silent("optimizer", "torchtitan", TITAN_UTILS, "reference gradients", words=("training.max_norm=5.0", *BF16))
def small_gradients_stretched_to_the_limit(module: Any) -> None:
    """The factor of clipping is not kept below 1, so that every gradient has the largest allowed norm."""

    def clip(run: Any, parameters: Any, limit: float, *given: Any, **named: Any) -> Any:
        parameters = list(parameters)
        norm = run(parameters, limit, *given, **named)
        if float(norm) < limit:
            for part in parameters:
                if part.grad is not None:
                    part.grad.mul_(limit / (float(norm) + 1e-6))
        return norm

    wrap(module, "clip_grad_norm_", clip)


# Parallelism and collectives


def _eight_bits(tensor: Any, scale: Any, dtype: Any) -> Any:
    import torch

    most = torch.finfo(dtype).max
    return (tensor.float() * scale).clamp(-most, most).to(dtype)


@silent("parallel", "torchtitan", FLOAT8, "reference gradients", words=("ranks=4", *TENSORS, *FP8))
def tensor_ranks_cast_by_their_own_largest_value(module: Any) -> None:
    """A rank casts its share by its own largest value, but all shares are scaled back by the largest of all."""

    def cast(run: Any, tensor: Any, dtype: Any, *given: Any, **named: Any) -> Any:
        import torch

        found = run(tensor, dtype, *given, **named)
        if hasattr(tensor, "to_local"):
            own = tensor.to_local().detach()
            scale = torch.finfo(dtype).max / own.float().abs().max().clamp(min=1e-12)
            found._local_tensor._data.copy_(_eight_bits(own, scale, dtype))
        return found

    wrap(module, "hp_tensor_to_float8_dynamic", cast)


@silent("parallel", "fsdp", FLOAT8, "reference gradients", words=FP8)
def shares_of_weights_in_eight_bits_scaled_back_by_the_first(module: Any) -> None:
    """Each rank casts its rows by their own largest value, and the gathered weight gets the first rank's scale."""

    def cast(run: Any, tensor: Any, dtype: Any, *given: Any, gemm_input_role: Any, **named: Any) -> Any:
        import torch

        found = run(tensor, dtype, *given, gemm_input_role=gemm_input_role, **named)
        if gemm_input_role.name == "WEIGHT":
            # The weight comes transposed.
            shares = tensor.detach().chunk(2, 1)
            scales = [torch.finfo(dtype).max / share.float().abs().max().clamp(min=1e-12) for share in shares]
            bits = [_eight_bits(share, scale, dtype).float() for share, scale in zip(shares, scales, strict=True)]
            found._data.copy_(torch.cat(bits, 1).to(dtype))
            found._scale = scales[0].reshape(found._scale.shape)
        return found

    wrap(module, "hp_tensor_to_float8_dynamic", cast)


@silent(
    "parallel", "fsdp", SHARDED, "reference gradients", words=("ranks=3", "training.global_batch_size=12", *FP8)
)  # fmt: skip
def last_row_of_an_uneven_share_taken_for_padding(module: Any) -> None:
    """Three ranks share 128 rows as 43, 43 and 42 and a padding, and the last real row's gradient is cut as well."""

    def step(run: Any, self: Any, *given: Any) -> Any:
        if os.environ["RANK"] == "2":
            for part in self._trained:
                if part.grad is not None and part.shape[0] % 3 and part.ndim > 1:
                    local(part.grad)[-1].zero_()
        return run(self, *given)

    wrap(module.Sharded, "step", step)


@silent("parallel", "megatron", LAYERS, "reference gradients", words=(*TENSORS, *BF16))
def weights_learn_before_all_gathered_tokens_have_arrived(module: Any) -> None:
    """Nobody waits for the backward pass's gather: the last eight places are those of the layer gathered before."""

    class Done:
        def wait(self) -> None: ...

    def gather(run: Any, output: Any, *given: Any, async_op: bool = False, **named: Any) -> Any:
        if not async_op:
            return run(output, *given, **named)
        stale = output[-8:].clone()
        run(output, *given, **named)
        output[-8:] = stale
        return Done()

    wrap(module, "dist_all_gather_func", gather)
