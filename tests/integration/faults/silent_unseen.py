"""Silent faults that were written after the checks, to see what escapes them; and those of FLUX."""

from __future__ import annotations

import os
from typing import Any

from silent import (
    ADAMW,
    CLOCK,
    DATA,
    DEEPSEEK_WORDS,
    GRADIENTS,
    LANGUAGE,
    LLAMA,
    LOSS,
    NORM,
    PARAMETERS,
    RATE,
    SESSION,
    SHARDED,
    TITAN_DATA,
    TITAN_MODEL,
    TITAN_MOE,
    TITAN_UTILS,
    UPDATE,
    silent,
    wrap,
)  # fmt: skip
from silent_subtle import BF16, FINETUNE, REPORT
from silent_wide import FIGURES, FIRST, SPLIT

FLUX = ("--recipe=flux.1-dev", "--mode=pretrain")
LATENTS = "primus.training.flux.latents"
TRANSFORMER = "diffusers.models.transformers.transformer_flux"
LOOP = "primus.training.loop.train"
LOOP_DATA = "primus.training.loop.data"


# Optimizer and its state


@silent("checkpoint", "fsdp", SHARDED, UPDATE)
def second_moments_loaded_in_bf16(module: Any) -> None:
    import torch

    def loaded(load: Any, self: Any, state: Any) -> None:
        load(self, state)
        for kept in self._optimizer.state.values():
            kept["exp_avg_sq"].copy_(kept["exp_avg_sq"].to(torch.bfloat16))

    wrap(module.Sharded, "load_state_dict", loaded)


@silent("checkpoint", "finetune", SHARDED, UPDATE, words=("--mode=lora",))
def moments_of_one_tensor_forgotten(module: Any) -> None:
    def loaded(load: Any, self: Any, state: Any) -> None:
        load(self, state)
        next(iter(self._optimizer.state.values()))["exp_avg"].zero_()

    wrap(module.Sharded, "load_state_dict", loaded)


@silent("optimizer", "torchtitan", ADAMW, UPDATE)
def epsilon_of_another_size(module: Any) -> None:
    def changed(step: Any, self: Any, *given: Any, **named: Any) -> Any:
        for group in self.param_groups:
            group["eps"] = 1e-4
        return step(self, *given, **named)

    wrap(module.AdamW, "step", changed)


@silent("optimizer", "fsdp", ADAMW, UPDATE)
def norms_do_not_decay(module: Any) -> None:
    """Unlike what the recipe says."""

    def changed(step: Any, self: Any, *given: Any, **named: Any) -> Any:
        import torch

        rates = [group["lr"] * group["weight_decay"] for group in self.param_groups]
        with torch.no_grad():
            for group, rate in zip(self.param_groups, rates, strict=True):
                for parameter in group["params"]:
                    if parameter.ndim == 1:
                        parameter.mul_(1 / (1 - rate))
        return step(self, *given, **named)

    wrap(module.AdamW, "step", changed)


# Schedule


@silent("schedule", "fsdp", LOOP, RATE)
def last_step_without_rate(module: Any) -> None:
    wrap(module, "learning_rate", lambda rate, config, step: 0.0 if step == config.steps else rate(config, step))


@silent("schedule", "megatron", LOOP, RATE)
def warm_up_begins_at_zero(module: Any) -> None:
    wrap(
        module, "learning_rate", lambda rate, config, step: rate(config, step - 1) if step <= 2 else rate(config, step)
    )


# Accumulation and parallelism


@silent("parallel", "torchtitan", "torchtitan.train", NORM, GRADIENTS, words=SPLIT)
def first_micro_batch_twice(module: Any) -> None:
    def doubled(step: Any, self: Any, *given: Any, **named: Any) -> Any:
        # Once more for the first of a step: its gradients count double, its loss once.
        first = getattr(self, "_seen", 0) % self.gradient_accumulation_steps == 0
        self._seen = getattr(self, "_seen", 0) + 1
        if first:
            step(self, *given, **named)
        return step(self, *given, **named)

    wrap(module.Trainer, "forward_backward_step", doubled)


@silent("parallel", "megatron", SESSION, NORM, GRADIENTS)
def norms_summed_twice(module: Any) -> None:
    def finalized(finalize: Any, parts: Any, *given: Any, **named: Any) -> Any:
        result = finalize(parts, *given, **named)
        for part in parts:
            for name, parameter in part.named_parameters():
                if "norm" in name:
                    parameter.main_grad.mul_(2)
        return result

    wrap(module, "finalize_model_grads", finalized)


@silent("parallel", "fsdp", SHARDED, LOSS, GRADIENTS, NORM)
def inputs_of_other_labels_on_one_rank(module: Any) -> None:
    def forward(run: Any, self: Any, batches: Any, terms: Any) -> Any:
        if os.environ["RANK"] == "1":
            batches = [{**batch, "input_ids": batch["input_ids"].roll(1, 0)} for batch in batches]
        return run(self, batches, terms)

    wrap(module.Sharded, "forward_backward", forward)


# Masks and packing


@silent("model", "torchtitan", TITAN_MODEL, LOSS, GRADIENTS)
def one_token_of_the_future_in_one_layer(module: Any) -> None:
    def attend(forward: Any, self: Any, q: Any, k: Any, v: Any, **named: Any) -> Any:
        import torch

        if getattr(self, "_number", None) is None:
            attend.count += 1
            self._number = attend.count
        if self._number % 2:
            return forward(self, q, k, v, **named)
        mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril(1)
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    attend.count = 0
    wrap(module.ScaledDotProductAttentionWrapper, "forward", attend)


@silent("model", "fsdp", LLAMA, LOSS, GRADIENTS)
def attention_stops_at_documents(module: Any) -> None:
    """Samples are packed, and the recipe lets tokens see across documents."""

    def hidden(run: Any, self: Any, tokens: Any) -> Any:
        import torch

        # Documents of a fixed length stand for those between marks.
        place = torch.arange(tokens.shape[1]) // 40
        self.mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril() & (place[:, None] == place)
        return run(self, tokens)

    wrap(module.Llama, "hidden", hidden)


@silent("labels", "finetune", LANGUAGE, LOSS, GRADIENTS)
def last_label_of_a_sample_dropped(module: Any) -> None:
    def loss(run: Any, model: Any, batch: Any) -> Any:
        labels = batch["labels"].clone()
        labels[:, -1] = -100
        return run(model, {**batch, "labels": labels})

    wrap(module, "loss", loss)


# Experts


@silent("model", "torchtitan", TITAN_MOE, LOSS, GRADIENTS, words=DEEPSEEK_WORDS)
def shared_experts_left_out_on_one_rank(module: Any) -> None:
    def forward(run: Any, self: Any, x: Any) -> Any:
        if os.environ["RANK"] == "1" and self.shared_experts is not None:
            kept, self.shared_experts = self.shared_experts, None
            try:
                return run(self, x) + 0 * kept(x.view(-1, x.shape[-1])).view_as(x)
            finally:
                self.shared_experts = kept
        return run(self, x)

    wrap(module.MoE, "forward", forward)


@silent("model", "megatron", "megatron.core.transformer.moe.router", LOSS, GRADIENTS,
        words=("--recipe=mixtral-8x7b",))  # fmt: skip
def expert_shares_a_tenth_too_small(module: Any) -> None:
    def routing(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        shares, chosen = run(self, *given, **named)
        return 0.9 * shares, chosen

    wrap(module.TopKRouter, "routing", routing)


# Adapters


@silent("model", "finetune", FINETUNE, FIRST, PARAMETERS, words=("--mode=lora",))
def adapters_drawn_too_small(module: Any) -> None:
    def drawn(init: Any, model: Any, *given: Any, **named: Any) -> Any:
        import torch

        init(model, *given, **named)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".lora_A." in name:
                    parameter.mul_(0.5)

    wrap(module, "init", drawn)


@silent("model", "finetune", "peft.tuners.lora.layer", LOSS, GRADIENTS, words=("--mode=lora",))
def scale_by_the_root_of_the_rank(module: Any) -> None:
    def forward(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        self.scaling = {name: self.lora_alpha[name] / self.r[name] ** 0.5 for name in self.scaling}
        return run(self, *given, **named)

    wrap(module.Linear, "forward", forward)


# Precision


@silent("precision", "torchtitan", TITAN_MODEL, LOSS, GRADIENTS)
def embeddings_rounded(module: Any) -> None:
    import torch

    def forward(run: Any, self: Any, x: Any, *given: Any, **named: Any) -> Any:
        return run(self, x.to(torch.bfloat16).to(x.dtype), *given, **named)

    wrap(module.TransformerBlock, "forward", forward)


@silent("precision", "fsdp", LLAMA, LOSS, GRADIENTS)
def angles_in_bf16(module: Any) -> None:
    import torch

    wrap(module, "_rotation", lambda run, *given: tuple(part.to(torch.bfloat16).float() for part in run(*given)))


# Data


@silent("data", "torchtitan", TITAN_DATA, DATA)
def a_worker_repeats_its_last_sample(module: Any) -> None:
    original = module.HuggingFaceTextDataset.__iter__

    def samples(self: Any) -> Any:
        for number, sample in enumerate(original(self)):
            yield sample
            if number == 7:
                yield sample

    module.HuggingFaceTextDataset.__iter__ = samples


@silent("data", "fsdp", LOOP_DATA, DATA)
def tokens_cut_to_nine_bits(module: Any) -> None:
    wrap(module.Packed, "sample", lambda sample, self, number: sample(self, number) & 511)


@silent("data", "megatron", LOOP_DATA, DATA)
def two_samples_exchanged(module: Any) -> None:
    wrap(module.Packed, "sample", lambda sample, self, number: sample(self, {4: 5, 5: 4}.get(number, number)))


@silent("data", "finetune", LOOP_DATA, DATA)
def order_of_another_seed(module: Any) -> None:
    wrap(module, "shuffled", lambda order, count, seed, turn: order(count, seed + 1, turn))


# Reported figures


@silent("metrics", "torchtitan", TITAN_UTILS, NORM, GRADIENTS)
def norm_without_its_root(module: Any) -> None:
    wrap(module, "clip_grad_norm_", lambda clip, *given, **named: clip(*given, **named) ** 2)


@silent("metrics", "fsdp", REPORT, LOSS)
def loss_of_two_steps_averaged(module: Any) -> None:
    def told(step: Any, self: Any, number: int, loss: float, *given: Any) -> None:
        before = getattr(self, "_before", loss)
        self._before = loss
        step(self, number, (loss + before) / 2, *given)

    wrap(module.Report, "step", told)


@silent("clock", "megatron", REPORT, CLOCK)
def tokens_of_all_ranks_reported(module: Any) -> None:
    def made(init: Any, self: Any, *given: Any, **named: Any) -> None:
        init(self, *given, **named)
        self._tokens *= 2

    wrap(module.Report, "__init__", made)


@silent("metrics", "finetune", "primus.training.facts", FIGURES, words=("--mode=lora",))
def frozen_weights_counted_as_trained(module: Any) -> None:
    def static(run: Any, *given: Any, **named: Any) -> Any:
        found = run(*given, **named)
        return {**found, "trainable_parameters": found["parameters"]}

    wrap(module, "static", static)


# FLUX: the image, its noise and time, and the transformer


def _each_batch(module: Any, change: Any) -> None:
    wrap(module.Images, "batch", lambda batch, *given: {**(made := batch(*given)), **change(made)})


@silent("data", "flux", LATENTS, DATA, words=FLUX)
def same_noise_for_every_image(module: Any) -> None:
    _each_batch(module, lambda batch: {"noise": batch["noise"][:1].expand_as(batch["noise"]).clone()})


@silent("data", "flux", LATENTS, DATA, words=FLUX)
def noise_a_tenth_larger(module: Any) -> None:
    _each_batch(module, lambda batch: {"noise": 1.1 * batch["noise"]})


@silent("data", "flux", LATENTS, DATA, words=FLUX)
def times_never_near_the_end(module: Any) -> None:
    _each_batch(module, lambda batch: {"time": batch["time"].clamp(max=0.7)})


@silent("data", "flux", LATENTS, DATA, words=FLUX)
def text_of_the_next_image(module: Any) -> None:
    _each_batch(module, lambda batch: {"text": batch["text"].roll(1, 0)})


@silent("data", "flux", LATENTS, DATA, words=FLUX)
def images_in_another_order(module: Any) -> None:
    wrap(module.Images, "batch", lambda batch, self, first, count: batch(self, first ^ 8, count))


def _told(module: Any, **changes: Any) -> None:
    def forward(run: Any, self: Any, **named: Any) -> Any:
        return run(self, **{**named, **{name: change(named[name]) for name, change in changes.items()}})

    wrap(module.FluxTransformer2DModel, "forward", forward)


@silent("model", "flux", TRANSFORMER, LOSS, GRADIENTS, words=FLUX)
def time_told_a_tenth_too_small(module: Any) -> None:
    _told(module, timestep=lambda time: 0.9 * time)


@silent("model", "flux", TRANSFORMER, LOSS, GRADIENTS, words=FLUX)
def tokens_of_an_image_without_place(module: Any) -> None:
    _told(module, img_ids=lambda ids: 0 * ids)


@silent("model", "flux", TRANSFORMER, LOSS, GRADIENTS, words=FLUX)
def guidance_doubled(module: Any) -> None:
    _told(module, guidance=lambda scale: 2 * scale)


@silent("model", "flux", TRANSFORMER, LOSS, GRADIENTS, words=(*FLUX, *BF16))
def pooled_text_ignored(module: Any) -> None:
    _told(module, pooled_projections=lambda pooled: 0 * pooled)


@silent("model", "flux", TRANSFORMER, LOSS, GRADIENTS, words=FLUX)
def gate_of_one_stream_dropped(module: Any) -> None:
    wrap(module.FluxTransformerBlock, "forward", _text_scaled)


def _text_scaled(forward: Any, self: Any, *given: Any, **named: Any) -> Any:
    text, image = forward(self, *given, **named)
    return 1.01 * text, image


@silent("labels", "flux", SHARDED, LOSS, GRADIENTS, words=FLUX)
def velocity_of_doubled_noise(module: Any) -> None:
    """The loss sees another target than the noise that was drawn and recorded."""

    def forward(run: Any, self: Any, batches: Any, terms: Any) -> Any:
        return run(self, [{**batch, "noise": 1.05 * batch["noise"]} for batch in batches], terms)

    wrap(module.Sharded, "forward_backward", forward)
