"""Silent faults of further kinds: first weights, exported files, random states, reported sizes, and rarer slips."""

from __future__ import annotations

import os
import time
from typing import Any

from silent import (
    ADAMW,
    CLOCK,
    DATA,
    DEEPSEEK,
    DEEPSEEK_WORDS,
    GRADIENTS,
    LANGUAGE,
    LLAMA,
    LOSS,
    MOVED,
    NORM,
    PARAMETERS,
    RATE,
    SESSION,
    SHARDED,
    TITAN_DATA,
    TITAN_LOSS,
    TITAN_METRICS,
    TITAN_MODEL,
    TITAN_MOE,
    TITAN_RATE,
    TITAN_TRAIN,
    TITAN_UTILS,
    UPDATE,
    silent,
    wrap,
)  # fmt: skip
from silent_subtle import BF16, CHECKPOINT, FINETUNE, MIXTRAL, OPTIMIZER, REPORT

FIRST, FIGURES, KEPT = "reference first weights", "reported figures", "reference saved files"
RENDER = "primus.training.megatron.render"
# Two micro-batches a step.
SPLIT = ("torchtitan.training.local_batch_size=2",)
BIASED = ("model.qkv_bias=true",)


# torchtitan: data and labels


@silent("data", "torchtitan", TITAN_DATA, DATA)
def other_rank_every_second_sample(module: Any) -> None:
    original = module.split_dataset_by_node

    def split(dataset: Any, rank: int, size: int) -> Any:
        return original(dataset, rank, size).map(lambda row, number: dataset[0] if number % 2 else row,
                                                 with_indices=True)  # fmt: skip

    module.split_dataset_by_node = split


@silent("data", "torchtitan", "torchtitan.components.tokenizer", DATA)
def no_end_mark(module: Any) -> None:
    wrap(
        module.HuggingFaceTokenizer,
        "encode",
        lambda encode, self, text, **_given: encode(self, text, add_bos=True, add_eos=False),
    )


@silent("data", "torchtitan", TITAN_TRAIN, LOSS, GRADIENTS)
def model_sees_padding(module: Any) -> None:
    def changed(original: Any, self: Any, inputs: Any, labels: Any) -> Any:
        found, *others = original(self, inputs, labels)
        found = found.clone()
        found[:, -4:] = 0
        return (found, *others)

    wrap(module.Trainer, "post_dataloading_process", changed)


@silent("labels", "torchtitan", TITAN_LOSS, LOSS, GRADIENTS)
def common_token_not_trained(module: Any) -> None:
    def masked(loss: Any, pred: Any, labels: Any) -> Any:
        return loss(pred, labels.masked_fill(labels == labels.flatten().mode().values, -100))

    wrap(module, "cross_entropy_loss", masked)


@silent("labels", "torchtitan", TITAN_LOSS, LOSS, GRADIENTS)
def late_tokens_weigh_more(module: Any) -> None:
    import torch

    def weighed(pred: Any, labels: Any) -> Any:
        each = torch.nn.functional.cross_entropy(
            pred.flatten(0, 1).float(), labels.flatten(0, 1), reduction="none"
        ).view_as(labels)
        return (each * torch.linspace(0.99, 1.01, each.shape[1])).sum()

    module.cross_entropy_loss = weighed


# torchtitan: model


@silent("model", "torchtitan", TITAN_MODEL, LOSS, GRADIENTS)
def queries_one_position_late(module: Any) -> None:
    original = module.apply_rotary_emb

    def rotate(xq: Any, xk: Any, freqs_cis: Any, *given: Any, **named: Any) -> Any:
        queries, _ = original(xq, xk, freqs_cis.roll(1, 0), *given, **named)
        _, keys = original(xq, xk, freqs_cis, *given, **named)
        return queries, keys

    module.apply_rotary_emb = rotate


@silent("model", "torchtitan", TITAN_MODEL, LOSS, GRADIENTS)
def heads_take_other_groups(module: Any) -> None:
    class Turned(module.ScaledDotProductAttentionWrapper):  # type: ignore[name-defined,misc]
        def forward(self, q: Any, k: Any, v: Any, **given: Any) -> Any:
            return super().forward(q, k.roll(1, 1), v, **given)

    module.ScaledDotProductAttentionWrapper = Turned


@silent("model", "torchtitan", TITAN_MODEL, LOSS, GRADIENTS)
def gate_and_value_exchanged(module: Any) -> None:
    module.FeedForward.forward = lambda self, x: self.w2(module.F.silu(self.w3(x)) * self.w1(x))


@silent("model", "torchtitan", TITAN_MODEL, LOSS, GRADIENTS)
def logits_capped(module: Any) -> None:
    wrap(module.Transformer, "forward", lambda run, self, *a, **n: 30.0 * (run(self, *a, **n) / 30.0).tanh())


@silent("model", "torchtitan", TITAN_MODEL, LOSS, GRADIENTS, words=BF16)
def residual_stream_grows(module: Any) -> None:
    wrap(
        module.TransformerBlock,
        "forward",
        lambda run, self, x, *others, **named: run(self, x, *others, **named) * 1.02,
    )


@silent("model", "torchtitan", TITAN_MODEL, FIRST)
def first_weights_half_as_large(module: Any) -> None:
    def init(original: Any, self: Any, *given: Any, **named: Any) -> None:
        original(self, *given, **named)
        for layer in self.layers.values():
            layer.feed_forward.w1.weight.data.mul_(0.5)

    wrap(module.Transformer, "init_weights", init)


@silent("model", "torchtitan", TITAN_MODEL, FIRST)
def depth_left_out_of_first_weights(module: Any) -> None:
    def init(original: Any, self: Any, layer_id: int, args: Any) -> None:
        original(self, layer_id, args)
        self.weight_init_std = 0.02

    wrap(module.TransformerBlock, "__init__", init)


@silent("model", "torchtitan", TITAN_MODEL, FIRST)
def norms_begin_above_one(module: Any) -> None:
    def init(original: Any, self: Any, *given: Any, **named: Any) -> None:
        original(self, *given, **named)
        for layer in self.layers.values():
            layer.ffn_norm.weight.data.mul_(1.05)

    wrap(module.Transformer, "init_weights", init)


@silent("precision", "torchtitan", TITAN_LOSS, LOSS, GRADIENTS, words=BF16)
def loss_in_bf16(module: Any) -> None:
    import torch

    module.cross_entropy_loss = lambda pred, labels: torch.nn.functional.cross_entropy(
        pred.flatten(0, 1).bfloat16(), labels.flatten(0, 1), reduction="sum", ignore_index=-100
    ).float()


# torchtitan: optimizer, schedule, ranks, figures


@silent("optimizer", "torchtitan", TITAN_UTILS, GRADIENTS, NORM)
def clipped_by_value(module: Any) -> None:
    def clip(original: Any, parameters: Any, limit: float, *given: Any, **named: Any) -> Any:
        parameters = list(parameters)
        for parameter in parameters:
            local = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
            local.clamp_(-0.01, 0.01)
        return original(parameters, limit, *given, **named)

    wrap(module, "clip_grad_norm_", clip)


@silent("optimizer", "torchtitan", TITAN_TRAIN, GRADIENTS, NORM)
def embedding_gradient_halved(module: Any) -> None:
    def step(original: Any, self: Any, *given: Any, **named: Any) -> Any:
        loss = original(self, *given, **named)
        self.model_parts[0].tok_embeddings.weight.grad.to_local().mul_(0.5)
        return loss

    wrap(module.Trainer, "forward_backward_step", step)


@silent("optimizer", "torchtitan", OPTIMIZER, UPDATE)
def betas_exchanged(module: Any) -> None:
    wrap(
        module.OptimizersContainer,
        "__init__",
        lambda init, self, parts, cls, settings: init(self, parts, cls, settings | {"betas": settings["betas"][::-1]}),
    )


@silent("optimizer", "torchtitan", OPTIMIZER, UPDATE)
def largest_second_moment_kept(module: Any) -> None:
    wrap(
        module.OptimizersContainer,
        "__init__",
        lambda init, self, parts, cls, settings: init(self, parts, cls, settings | {"amsgrad": True}),
    )


@silent("optimizer", "torchtitan", ADAMW, UPDATE)
def decay_not_scaled_by_rate(module: Any) -> None:
    def step(original: Any, self: Any, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(1 - 1e-4)
        return original(self, closure)

    wrap(module.AdamW, "step", step)


@silent("optimizer", "torchtitan", ADAMW, UPDATE)
def no_bias_correction(module: Any) -> None:
    def step(original: Any, self: Any, closure: Any = None) -> Any:
        out = original(self, closure)
        for state in self.state.values():
            state["step"] += 1000
        return out

    wrap(module.AdamW, "step", step)


@silent("schedule", "torchtitan", TITAN_RATE, RATE)
def schedule_one_step_longer(module: Any) -> None:
    wrap(
        module,
        "build_lr_schedulers",
        lambda build, optimizers, config, steps: build(optimizers, config, steps + 1),
    )


@silent("schedule", "torchtitan", TITAN_RATE, RATE)
def warm_up_counted_in_micro_batches(module: Any) -> None:
    wrap(module.LRSchedulersContainer, "step", lambda step, self: (step(self), step(self))[0])


@silent("parallel", "torchtitan", TITAN_TRAIN, NORM, GRADIENTS, words=SPLIT)
def last_micro_batch_divided_twice(module: Any) -> None:
    def step(original: Any, self: Any, *given: Any, **named: Any) -> Any:
        self.micro = getattr(self, "micro", 0) + 1
        loss_fn = self.loss_fn
        if self.micro % 2 == 0:
            self.loss_fn = lambda *each: (whole := loss_fn(*each)).detach() / 2 + whole / 2
        try:
            return original(self, *given, **named)
        finally:
            self.loss_fn = loss_fn

    wrap(module.Trainer, "forward_backward_step", step)


@silent("parallel", "torchtitan", TITAN_TRAIN, LOSS, GRADIENTS)
def weights_of_the_step_before(module: Any) -> None:
    kept: list[Any] = []

    def step(original: Any, self: Any, *given: Any, **named: Any) -> Any:
        weights = [p.to_local() if hasattr(p, "to_local") else p.data for p in self.model_parts[0].parameters()]
        now = [weight.detach().clone() for weight in weights]
        if self.step == 4:
            for weight, old in zip(weights, kept, strict=True):
                weight.data.copy_(old)
        loss = original(self, *given, **named)
        for weight, new in zip(weights, now, strict=True):
            weight.data.copy_(new)
        kept[:] = now
        return loss

    wrap(module.Trainer, "forward_backward_step", step)


@silent("metrics", "torchtitan", TITAN_TRAIN, FIGURES)
def flops_counted_half_more(module: Any) -> None:
    def init(original: Any, self: Any, config: Any) -> None:
        original(self, config)
        self.metrics_processor.num_flops_per_token *= 1.5

    wrap(module.Trainer, "__init__", init)


@silent("metrics", "torchtitan", "primus.training.facts", FIGURES)
def embeddings_left_out_of_the_count(module: Any) -> None:
    def static(original: Any, parts: Any, *given: Any, **named: Any) -> Any:
        found = original(parts, *given, **named)
        return found | {"parameters": found["parameters"] - next(parts[0].parameters()).numel()}

    wrap(module, "static", static)


@silent("metrics", "torchtitan", TITAN_METRICS, FIGURES)
def memory_read_after_the_reset(module: Any) -> None:
    def log(original: Any, self: Any, *given: Any, **named: Any) -> Any:
        stats = self.device_memory_monitor.get_peak_stats()
        self.device_memory_monitor.get_peak_stats = lambda: stats._replace(max_reserved_gib=0.0, max_reserved_pct=0.0)
        return original(self, *given, **named)

    wrap(module.MetricsProcessor, "log", log)


@silent("clock", "torchtitan", TITAN_TRAIN, CLOCK)
def time_of_data_left_out(module: Any) -> None:
    def generate(original: Any, self: Any, *given: Any) -> Any:
        for batch in original(self, *given):
            began = time.perf_counter()
            time.sleep(0.4)
            self.metrics_processor.time_last_log += time.perf_counter() - began
            yield batch

    wrap(module.Trainer, "batch_generator", generate)


@silent("model", "torchtitan", TITAN_MOE, LOSS, GRADIENTS, words=DEEPSEEK_WORDS)
def tokens_to_the_next_expert(module: Any) -> None:
    def forward(original: Any, self: Any, x: Any, bias: Any = None) -> Any:
        scores, chosen, count = original(self, x, bias)
        return scores, (chosen + 1) % self.num_experts, count.roll(1)

    wrap(module.TokenChoiceTopKRouter, "forward", forward)


@silent("model", "torchtitan", TITAN_MOE, LOSS, GRADIENTS, words=DEEPSEEK_WORDS)
def routing_forced_to_balance(module: Any) -> None:
    def init(original: Any, self: Any, *given: Any, **named: Any) -> None:
        original(self, *given, **named)
        self._debug_force_load_balance = True

    wrap(module.TokenChoiceTopKRouter, "__init__", init)


@silent("model", "torchtitan", DEEPSEEK, LOSS, GRADIENTS, words=DEEPSEEK_WORDS)
def latent_scale_of_values(module: Any) -> None:
    def init(original: Any, self: Any, args: Any) -> None:
        original(self, args)
        self.softmax_scale = self.qk_nope_head_dim**-0.5

    wrap(module.Attention, "__init__", init)


# our own loop: fsdp and fine-tuning


@silent("model", "fsdp", LLAMA, LOSS, GRADIENTS)
def epsilon_outside_the_root(module: Any) -> None:
    import torch

    class Outside(torch.nn.RMSNorm):
        def forward(self, x: Any) -> Any:
            return x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps) * self.weight

    module.nn.RMSNorm = Outside


@silent("model", "fsdp", LLAMA, LOSS, GRADIENTS, words=("--recipe=mistral-7b", "model.window=32"))
def second_layer_without_window(module: Any) -> None:
    count = 0

    def forward(original: Any, self: Any, states: Any, cosine: Any, sine: Any, mask: Any) -> Any:
        nonlocal count
        count += 1
        return original(self, states, cosine, sine, None if count % 2 == 0 else mask)

    wrap(module._Attention, "forward", forward)


@silent("model", "fsdp", LLAMA, GRADIENTS, LOSS, PARAMETERS, words=("model.tied_embeddings=true",))
def tied_head_apart(module: Any) -> None:
    def init(original: Any, self: Any, *given: Any) -> None:
        original(self, *given)
        import torch

        self.output.weight = torch.nn.Parameter(self.embedding.weight.detach().clone())

    wrap(module.Llama, "__init__", init)


@silent("model", "fsdp", LLAMA, LOSS, GRADIENTS, MOVED, words=BIASED)
def biases_not_added(module: Any) -> None:
    def forward(original: Any, self: Any, *given: Any) -> Any:
        for each in (self.query, self.key, self.value):
            each.forward = lambda x, each=each: module.functional.linear(x, each.weight) + 0 * each.bias
        return original(self, *given)

    wrap(module._Attention, "forward", forward)


@silent("labels", "fsdp", LANGUAGE, LOSS, GRADIENTS)
def chunks_averaged(module: Any) -> None:
    count = 0

    def summed(original: Any, head: Any, states: Any, labels: Any) -> Any:
        nonlocal count
        count += 1
        return original(head, states, labels) * (1.002 if count % 2 else 0.998)

    wrap(module, "_summed", summed)


@silent("precision", "fsdp", SHARDED, UPDATE, words=BF16)
def master_weights_in_bf16(module: Any) -> None:
    def shard(original: Any, model: Any, blocks: Any, given: Any, process: Any, **named: Any) -> Any:
        from dataclasses import replace

        training = replace(given.training, master_dtype="bfloat16")
        return original(model, blocks, replace(given, training=training), process, **named)

    import importlib

    wrap(module, "shard", shard)
    importlib.import_module("primus.training.fsdp.entry").shard = module.shard


@silent("optimizer", "fsdp", SHARDED, UPDATE)
def moments_forgotten_once(module: Any) -> None:
    count = 0

    def step(original: Any, self: Any, lr: float) -> Any:
        nonlocal count
        count += 1
        if count == 5:
            for state in self._optimizer.state.values():
                state["exp_avg"].zero_()
        return original(self, lr)

    wrap(module.Sharded, "step", step)


@silent("optimizer", "fsdp", SHARDED, UPDATE)
def two_small_steps_for_one(module: Any) -> None:
    def step(original: Any, self: Any, lr: float) -> Any:
        kept = self._optimizer.zero_grad
        self._optimizer.zero_grad = lambda: None
        original(self, lr / 2)
        self._optimizer.zero_grad = kept
        return original(self, lr / 2)

    wrap(module.Sharded, "step", step)


@silent("checkpoint", "fsdp", CHECKPOINT, KEPT)
def random_state_not_loaded(module: Any) -> None:
    module._set_random_state = lambda state: None


@silent("checkpoint", "fsdp", SHARDED, UPDATE)
def step_count_not_loaded(module: Any) -> None:
    def load(original: Any, self: Any, state: Any) -> None:
        original(self, state)
        for each in self._optimizer.state.values():
            each["step"].zero_()

    wrap(module.Sharded, "load_state_dict", load)


@silent("checkpoint", "megatron", SESSION, LOSS, GRADIENTS)
def two_weights_exchanged_in_checkpoint(module: Any) -> None:
    import torch

    def load(original: Any, self: Any, state: Any) -> None:
        original(self, state)
        layers = [p for n, p in self.model_parts[0].named_parameters() if n.endswith("linear_proj.weight")]
        with torch.no_grad():
            first, second = layers[0].clone(), layers[1].clone()
            layers[0].copy_(second)
            layers[1].copy_(first)

    wrap(module.MegatronSession, "load_state_dict", load)


@silent("metrics", "fsdp", REPORT, FIGURES)
def flops_of_twice_the_layers(module: Any) -> None:
    def counted(original: Any, model: Any, *given: Any, **named: Any) -> Any:
        from dataclasses import replace

        return original(replace(model, layers=2 * model.layers), *given, **named)

    wrap(module, "of_recipe_unit", counted)


@silent("clock", "fsdp", SHARDED, CLOCK)
def clock_begins_after_the_forward_pass(module: Any) -> None:
    import gc

    def step(original: Any, self: Any, lr: float) -> Any:
        from primus.training.loop.train import Report

        for report in (each for each in gc.get_objects() if isinstance(each, Report)):
            report.start()
        return original(self, lr)

    wrap(module.Sharded, "step", step)


SAVED = ("finetune.save_weights=true",)


@silent("checkpoint", "finetune", FINETUNE, KEPT, words=("--mode=lora", *SAVED))
def adapters_saved_with_another_scale(module: Any) -> None:
    def ready(original: Any, model: Any, *given: Any) -> None:
        original(model, *given)
        model.model.peft_config["default"].lora_alpha *= 2

    wrap(module, "ready_to_generate", ready)


@silent("checkpoint", "finetune", "torch.distributed.checkpoint.state_dict", KEPT, words=SAVED)
def saved_weights_half_rounded(module: Any) -> None:
    def state(original: Any, *given: Any, **named: Any) -> Any:
        found = original(*given, **named)
        return {name: tensor.bfloat16().float() if "layers.1." in name else tensor for name, tensor in found.items()}

    wrap(module, "get_model_state_dict", state)


@silent("model", "finetune", FINETUNE, LOSS, GRADIENTS)
def neighbours_rotated_together(module: Any) -> None:
    import torch
    from transformers.models.llama import modeling_llama

    def half(x: Any) -> Any:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)

    modeling_llama.rotate_half = half


@silent("model", "finetune", FINETUNE, FIRST, PARAMETERS)
def first_weights_twice_as_large(module: Any) -> None:
    wrap(module.weights, "normal", lambda make, name, parameter, seed, std: make(name, parameter, seed, 2 * std))


# Megatron


@silent("model", "megatron", RENDER, FIRST)
def output_projections_as_large_as_others(module: Any) -> None:
    import importlib

    weights = importlib.import_module("primus.training.megatron.weights")
    weights._kind = lambda name: "embedding" if name.startswith("embedding.") else "other"


@silent("model", "megatron", RENDER, LOSS, GRADIENTS, words=MIXTRAL)
def scores_before_the_choice(module: Any) -> None:
    wrap(module, "transformer", lambda make, *given: make(*given) | {"moe_router_pre_softmax": True})


@silent("model", "megatron", RENDER, GRADIENTS, words=MIXTRAL)
def balancing_loss_doubled(module: Any) -> None:
    def transformer(original: Any, *given: Any) -> Any:
        made = original(*given)
        return made | {"moe_aux_loss_coeff": 2 * made["moe_aux_loss_coeff"]}

    wrap(module, "transformer", transformer)


@silent("parallel", "megatron", SESSION, NORM, GRADIENTS, words=MIXTRAL)
def experts_gradients_halved(module: Any) -> None:
    def run(original: Any, self: Any, batches: Any, terms: int) -> Any:
        total = original(self, batches, terms)
        for parameter in self.model_parts[0].parameters():
            if not getattr(parameter, "allreduce", True):
                parameter.main_grad.mul_(0.5)
        return total

    wrap(module.MegatronSession, "forward_backward", run)


@silent("precision", "megatron", SESSION, UPDATE, words=BF16)
def master_weights_rounded(module: Any) -> None:
    import torch

    def step(original: Any, self: Any, lr: float) -> Any:
        norm = original(self, lr)
        with torch.no_grad():
            for inner in self._inner():
                for group in inner.param_groups:
                    for parameter in group["params"]:
                        parameter.copy_(parameter.bfloat16())
        return norm

    wrap(module.MegatronSession, "step", step)


@silent("metrics", "megatron", SESSION, NORM, GRADIENTS)
def norm_of_one_rank(module: Any) -> None:
    wrap(module.MegatronSession, "step", lambda step, self, lr: step(self, lr) / 2**0.5)


# On record upstream

NAN, STEPS = "finite", "steps logged"


@silent("optimizer", "torchtitan", ADAMW, NAN)
def last_step_not_finite(module: Any) -> None:
    """AMD-AGI/Primus#962: loss or gradient norm went non-finite, and the run ended as a success."""
    count = 0

    def step(original: Any, self: Any, closure: Any = None) -> Any:
        nonlocal count
        count += 1
        out = original(self, closure)
        if count == 5:
            self.param_groups[0]["params"][0].data.fill_(float("nan"))
        return out

    wrap(module.AdamW, "step", step)


@silent("parallel", "megatron", SESSION, NORM, GRADIENTS, words=("megatron.training.micro_batch_size=2",))
def first_micro_batch_alone(module: Any) -> None:
    """AMD-AGI/Primus#1046: the gradient that is not fused kept that of the first micro-batch only."""

    def run(original: Any, self: Any, batches: Any, terms: int) -> Any:
        total = original(self, batches, terms)
        original(self, batches[:1], terms)
        return total

    wrap(module.MegatronSession, "forward_backward", run)


@silent("precision", "fsdp", LLAMA, NAN, LOSS, GRADIENTS, words=BF16)
def attention_overflows(module: Any) -> None:
    """AMD-AGI/Primus#1178: without its GPU's environment file, a run on MI350X turned to NaN."""
    count = 0

    def attend(original: Any, *given: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        out = original(*given, **named)
        return out * float("nan") if count > 12 else out

    wrap(module.functional, "scaled_dot_product_attention", attend)


@silent("optimizer", "torchtitan", TITAN_MOE, UPDATE, words=DEEPSEEK_WORDS)
def balancing_key_ignored(module: Any) -> None:
    """AMD-AGI/Primus#952: torchtitan moved a key, and every DeepSeek configuration trained without balancing."""

    def init(original: Any, self: Any, args: Any, *given: Any, **named: Any) -> None:
        original(self, args, *given, **named)
        self.load_balance_coeff = 0.0

    wrap(module.MoE, "__init__", init)


@silent("metrics", "torchtitan", TITAN_TRAIN, STEPS)
def error_printed_and_success_returned(module: Any) -> None:
    """ROCm/MAD#172: a script printed an error and returned 0."""

    def train(original: Any, self: Any) -> None:
        step = self.train_step

        def failing(data: Any) -> None:
            if self.step == 4:
                print("ERROR: training failed", flush=True)
                os._exit(0)
            step(data)

        self.train_step = failing
        original(self)

    wrap(module.Trainer, "train", train)
