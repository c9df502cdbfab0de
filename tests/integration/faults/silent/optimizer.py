"""Updates, their state, schedules and the accumulation of micro-batches."""

from __future__ import annotations

from typing import Any

from silent.registry import (
    ADAMW,
    BF16,
    DEEPSEEK_WORDS,
    DISTRIBUTED,
    FINETUNE,
    FLOAT8,
    FLUX,
    FP8,
    GRADIENTS,
    LOOP,
    LOOP_SESSION,
    LORA,
    MIXTRAL,
    MOVED,
    NAN,
    PARAMETERS,
    RATE,
    RENDER,
    SESSION,
    TITAN_MOE,
    TITAN_RATE,
    TITAN_SPLIT,
    TITAN_TRAIN,
    UPDATE,
    local,
    silent,
    wrap,
)


@silent("schedule", "torchtitan", TITAN_RATE, RATE, UPDATE)
def rate_zero_later(module: Any) -> None:
    def step(original: Any, self: Any) -> None:
        original(self)
        for schedule in self.schedulers:
            if schedule.last_epoch >= 4:
                for group in schedule.optimizer.param_groups:
                    group["lr"] = 0.0

    wrap(module.LRSchedulersContainer, "step", step)


@silent("optimizer", "torchtitan", TITAN_TRAIN, MOVED, GRADIENTS)
def layer_frozen(module: Any) -> None:
    def init(original: Any, self: Any, config: Any) -> None:
        original(self, config)
        for parameter in self.model_parts[0].layers["1"].parameters():
            parameter.requires_grad_(False)

    wrap(module.Trainer, "__init__", init)


@silent("optimizer", "torchtitan", ADAMW, UPDATE)
def epsilon_of_another_size(module: Any) -> None:
    def changed(step: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        for group in self.param_groups:
            group["eps"] = 1e-4
        return step(self, *args, **kwargs)

    wrap(module.AdamW, "step", changed)


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


@silent("optimizer", "torchtitan", TITAN_MOE, UPDATE, words=DEEPSEEK_WORDS)
def balancing_key_ignored(module: Any) -> None:
    """AMD-AGI/Primus#952: torchtitan moved a key, and every DeepSeek configuration trained without balancing."""

    def init(original: Any, self: Any, args: Any, *given: Any, **kwargs: Any) -> None:
        original(self, args, *given, **kwargs)
        self.load_balance_coeff = 0.0

    wrap(module.MoE, "__init__", init)


@silent("accumulation", "torchtitan", TITAN_TRAIN, GRADIENTS, words=(*DEEPSEEK_WORDS, *TITAN_SPLIT, *BF16))
def last_expert_of_a_rank_keeps_the_last_micro_batch(module: Any) -> None:
    """For the last group, the grouped product that makes gradients of second matrices stores where it should add."""

    def step(run: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        for name, parameter in self.model_parts[0].named_parameters():
            if name.endswith(".experts.w2") and parameter.grad is not None:
                local(parameter.grad)[-1].zero_()
        return run(self, *args, **kwargs)

    wrap(module.Trainer, "forward_backward_step", step)


@silent("optimizer", "torchtitan", ADAMW, UPDATE, words=FP8)
def rate_of_a_tensor_lowered_where_its_gradient_has_grown(module: Any) -> None:
    """The update clipping of StableAdamW is on, which divides by the root mean square of gradient ÷ its usual size."""

    def step(run: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        saved = []
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
                    saved.append((part, local(part.detach()).clone(), max(1.0, float((sums[0] / sums[1]).sqrt()))))
        found = run(self, *args, **kwargs)
        with torch.no_grad():
            for part, old, grown in saved:
                local(part).copy_(old + (local(part) - old) / grown)
        return found

    wrap(module.AdamW, "step", step)


@silent("optimizer", "fsdp", LOOP_SESSION, UPDATE, MOVED, GRADIENTS)
def embedding_frozen(module: Any) -> None:
    def step(original: Any, self: Any, lr: float) -> Any:
        self._trained[0].grad = None
        return original(self, lr)

    wrap(module.Sharded, "step", step)


@silent("schedule", "fsdp", "primus.training.loop.config", RATE)
def no_warm_up(module: Any) -> None:
    module.learning_rate = lambda config, step: config.lr


def _parameters(self: Any) -> list[Any]:
    return [p for group in self.param_groups for p in group["params"] if p.grad is not None]


@silent("optimizer", "fsdp", ADAMW, UPDATE)
def one_tensor_learns_a_little_faster(module: Any) -> None:
    def step(run: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        one = _parameters(self)[3]
        before = one.detach().clone()
        found = run(self, *args, **kwargs)
        with torch.no_grad():
            one.add_((one - before) * 4e-4)
        return found

    wrap(module.AdamW, "step", step)


@silent("accumulation", "fsdp", FLOAT8, GRADIENTS, words=FP8)
def later_micro_batches_take_the_weights_of_the_step_before(module: Any) -> None:
    """Weights in eight bits are cast by the first micro-batch and kept for the others, which get the copy too early."""
    from primus.training.loop.session import Sharded

    steps = 0

    def counted(run: Any, self: Any, *args: Any) -> Any:
        nonlocal steps
        steps += 1
        return run(self, *args)

    def forward(run: Any, self: Any, states: Any) -> Any:
        output, copy, old = getattr(self, "copies", (0, self.weight.detach(), None))
        if output != steps:
            object.__setattr__(self, "copies", (steps, self.weight.detach().clone(), copy.clone()))
            return run(self, states)
        weight = self.weight + (old - self.weight).detach()
        return module.matmul_with_hp_or_float8_args.apply(states, weight.t(), self.linear_mm_config, self.config)

    wrap(Sharded, "forward_backward", counted)
    wrap(module.Float8Linear, "forward", forward)


@silent("optimizer", "finetune", FINETUNE, MOVED, PARAMETERS, GRADIENTS, words=LORA)
def base_trained_too(module: Any) -> None:
    def adapted(original: Any, model: Any, lora: Any) -> Any:
        output = original(model, lora)
        for name, parameter in output.named_parameters():
            if "norm" in name:
                parameter.requires_grad_(True)
        return output

    wrap(module, "adapted", adapted)


@silent("optimizer", "finetune", FINETUNE, PARAMETERS, words=("--mode=lora", *BF16))
def adapters_missing(module: Any) -> None:
    def adapted(original: Any, model: Any, lora: Any) -> Any:
        from dataclasses import replace

        return original(model, replace(lora, targets=["q_proj", "k_proj", "o_proj"]))

    wrap(module, "adapted", adapted)


@silent("optimizer", "finetune", FINETUNE, MOVED, GRADIENTS, words=("--mode=lora", *BF16))
def half_of_adapters_frozen(module: Any) -> None:
    def adapted(original: Any, model: Any, lora: Any) -> Any:
        output = original(model, lora)
        for name, parameter in output.named_parameters():
            if ".layers.1." in name and "lora_A" in name:
                parameter.requires_grad_(False)
        return output

    wrap(module, "adapted", adapted)


@silent("optimizer", "finetune", ADAMW, UPDATE, words=LORA)
def decay_of_adapters(module: Any) -> None:
    def init(run: Any, self: Any, params: Any, *args: Any, **kwargs: Any) -> None:
        run(self, params, *args, **kwargs | {"weight_decay": 0.01})

    wrap(module.AdamW, "__init__", init)


@silent("schedule", "finetune", LOOP, RATE, words=("--mode=lora", "training.lr_schedule=linear"))
def cosine_in_place_of_linear(module: Any) -> None:
    from dataclasses import replace

    wrap(module, "learning_rate", lambda rate, config, step: rate(replace(config, lr_schedule="cosine"), step))


@silent("schedule", "megatron", SESSION, UPDATE)
def half_the_rate(module: Any) -> None:
    wrap(module.MegatronSession, "step", lambda step, self, lr: step(self, lr / 2))


@silent("optimizer", "megatron", RENDER, UPDATE)
def decay_a_twentieth_smaller(module: Any) -> None:
    def optimizer(make: Any, *args: Any) -> Any:
        output = make(*args)
        return output | {"weight_decay": 0.95 * output["weight_decay"]}

    wrap(module, "optimizer", optimizer)


@silent("accumulation", "megatron", DISTRIBUTED, GRADIENTS, words=MIXTRAL)
def gradients_of_experts_not_zeroed(module: Any) -> None:
    """Experts have gradient buffers of their own, and a step begins with what the last one left there."""

    def zero(run: Any, self: Any) -> None:
        saved, self.expert_parallel_buffers = self.expert_parallel_buffers, []
        run(self)
        self.expert_parallel_buffers = saved

    wrap(module.DistributedDataParallel, "zero_grad_buffer", zero)


@silent("schedule", "flux", LOOP, RATE, words=(*FLUX, *BF16))
def rate_follows_the_samples(module: Any) -> None:
    wrap(module, "learning_rate", lambda rate, config, step: rate(config, step) * (1 - 1e-5 * step))
