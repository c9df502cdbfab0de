"""Updates, their state, schedules and the accumulation of micro-batches."""

from dataclasses import replace
from typing import Any

import torch

from silent.registry import local, silent, wrap


@silent("schedule", "torchtitan", "torchtitan.components.lr_scheduler", "learning rate", "update")
def rate_zero_later(module: Any) -> None:
    def step(original: Any, self: Any) -> None:
        original(self)
        for schedule in self.schedulers:
            if schedule.last_epoch >= 4:
                for group in schedule.optimizer.param_groups:
                    group["lr"] = 0.0

    wrap(module.LRSchedulersContainer, "step", step)


@silent("optimizer", "torchtitan", "torchtitan.train", "trained weights", "gradients")
def layer_frozen(module: Any) -> None:
    def init(original: Any, self: Any, config: Any) -> None:
        original(self, config)
        for parameter in self.model_parts[0].layers["1"].parameters():
            parameter.requires_grad_(False)

    wrap(module.Trainer, "__init__", init)


@silent("optimizer", "torchtitan", "torch.optim.adamw", "finite")
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


@silent("optimizer", "torchtitan --recipe=deepseek-16b", "torchtitan.models.moe.moe", "update")
def balancing_key_ignored(module: Any) -> None:
    """AMD-AGI/Primus#952: torchtitan moved a key, and every DeepSeek configuration trained without
    balancing.
    """

    def init(original: Any, self: Any, args: Any, *given: Any, **kwargs: Any) -> None:
        original(self, args, *given, **kwargs)
        self.load_balance_coeff = 0.0

    wrap(module.MoE, "__init__", init)


@silent(
    "accumulation",
    "torchtitan --recipe=deepseek-16b training.local_batch_size=2 --precision=bf16",
    "torchtitan.train",
    "gradients",
)
def last_expert_of_a_rank_keeps_the_last_micro_batch(module: Any) -> None:
    """For the last group, the grouped product that makes gradients of second matrices stores where
    it should add.
    """

    def step(run: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        for name, parameter in self.model_parts[0].named_parameters():
            if name.endswith(".experts.w2") and parameter.grad is not None:
                local(parameter.grad)[-1].zero_()
        return run(self, *args, **kwargs)

    wrap(module.Trainer, "forward_backward_step", step)


@silent("optimizer", "torchtitan --precision=fp8", "torch.optim.adamw", "update")
def rate_of_a_tensor_lowered_where_its_gradient_has_grown(module: Any) -> None:
    """The update clipping of StableAdamW is on, which divides by the root mean square of gradient ÷
    its usual size.
    """

    def step(run: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
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
                    sums = torch.stack(
                        (
                            (square / usual.clamp(min=1e-16)).sum(),
                            torch.tensor(float(square.numel())),
                        )
                    )
                    torch.distributed.all_reduce(sums)
                    saved.append(
                        (
                            part,
                            local(part.detach()).clone(),
                            max(1.0, float((sums[0] / sums[1]).sqrt())),
                        )
                    )
        found = run(self, *args, **kwargs)
        with torch.no_grad():
            for part, old, grown in saved:
                local(part).copy_(old + (local(part) - old) / grown)
        return found

    wrap(module.AdamW, "step", step)


@silent(
    "schedule",
    "fsdp training.warmup_steps=3",
    "primus_images.training.backends.loop.train",
    "learning rate",
)
def no_warm_up(module: Any) -> None:
    module.learning_rate = lambda config, step: config.lr


def _parameters(self: Any) -> list[Any]:
    return [p for group in self.param_groups for p in group["params"] if p.grad is not None]


@silent("optimizer", "fsdp steps=4", "torch.optim.adamw", "update")
def one_tensor_learns_a_little_faster(module: Any) -> None:
    def step(run: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        one = _parameters(self)[3]
        before = one.detach().clone()
        found = run(self, *args, **kwargs)
        with torch.no_grad():
            one.add_((one - before) * 4e-4)
        return found

    wrap(module.AdamW, "step", step)


@silent(
    "optimizer",
    "finetune --mode=lora",
    "primus_images.training.backends.finetune.models",
    "trained weights",
    "parameters",
    "gradients",
)
def base_trained_too(module: Any) -> None:
    def adapted(original: Any, model: Any, lora: Any) -> Any:
        output = original(model, lora)
        for name, parameter in output.named_parameters():
            if "norm" in name:
                parameter.requires_grad_(True)
        return output

    wrap(module, "adapted", adapted)


@silent(
    "optimizer",
    "finetune --mode=lora --precision=bf16",
    "primus_images.training.backends.finetune.models",
    "trained weights",
    "gradients",
)
def half_of_adapters_frozen(module: Any) -> None:
    def adapted(original: Any, model: Any, lora: Any) -> Any:
        output = original(model, lora)
        for name, parameter in output.named_parameters():
            if ".layers.1." in name and "lora_A" in name:
                parameter.requires_grad_(False)
        return output

    wrap(module, "adapted", adapted)


@silent(
    "schedule",
    "finetune --mode=lora training.lr_schedule=linear",
    "primus_images.training.backends.loop.train",
    "learning rate",
)
def cosine_in_place_of_linear(module: Any) -> None:
    wrap(
        module,
        "learning_rate",
        lambda rate, config, step: rate(replace(config, lr_schedule="cosine"), step),
    )


@silent(
    "schedule",
    "flux --precision=bf16",
    "primus_images.training.backends.loop.train",
    "learning rate",
)
def rate_follows_the_samples(module: Any) -> None:
    wrap(module, "learning_rate", lambda rate, config, step: rate(config, step) * (1 - 1e-5 * step))


def _second_step(module: Any, factor: float) -> None:
    """From the second step on, micro-batches after the first count less."""

    def forward_backward(run: Any, self: Any, batches: Any, terms: int) -> Any:
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 1:
            return run(self, batches, terms)
        total = run(self, batches[:1], terms)
        for batch in batches[1:]:
            loss = self._loss(self._model, batch)
            (factor * loss / terms).backward()
            total = total + loss.detach()
        return total

    wrap(module.Sharded, "forward_backward", forward_backward)


SPLIT = "steps=4 training.micro_batch_size=2"


@silent(
    "accumulation", f"fsdp {SPLIT}", "primus_images.training.backends.loop.session", "gradients"
)
def later_micro_batches_lost_from_the_second_step_on(module: Any) -> None:
    _second_step(module, 0.0)


@silent(
    "accumulation",
    f"finetune --precision=bf16 {SPLIT}",
    "primus_images.training.backends.loop.session",
    "gradients",
)
def later_micro_batches_a_tenth_lighter_from_the_second_step_on(module: Any) -> None:
    _second_step(module, 0.9)


@silent(
    "accumulation", f"flux {SPLIT}", "primus_images.training.backends.loop.session", "gradients"
)
def later_micro_batches_doubled_from_the_second_step_on(module: Any) -> None:
    _second_step(module, 2.0)


@silent(
    "accumulation",
    f"finetune assets.corpus=assets/answers.jsonl {SPLIT}",
    "primus_images.training.backends.loop.session",
    "gradients",
)
def tenth_of_the_means_of_micro_batches_from_the_second_step_on(module: Any) -> None:
    """huggingface/transformers#34191: each micro-batch is divided by its own labels."""

    def forward_backward(run: Any, self: Any, batches: Any, terms: int) -> Any:
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 1:
            return run(self, batches, terms)
        total = 0.0
        micro_batches = len(batches) * module.dist.get_world_size()
        for batch in batches:
            loss = self._loss(self._model, batch)
            own = max(1, module.terms_of(batch))
            (0.9 * loss / terms + 0.1 * loss / own / micro_batches).backward()
            total = total + loss.detach()
        return total

    wrap(module.Sharded, "forward_backward", forward_backward)


@silent(
    "accumulation", f"fsdp {SPLIT}", "primus_images.training.backends.loop.session", "gradients"
)
def tenth_of_the_gradients_of_the_step_before_kept(module: Any) -> None:
    def step(run: Any, self: Any, lr: float) -> Any:
        kept = [0.1 * parameter.grad for parameter in self._trained]
        norm = run(self, lr)
        for parameter, gradient in zip(self._trained, kept, strict=True):
            parameter.grad = gradient
        return norm

    wrap(module.Sharded, "step", step)


@silent(
    "accumulation",
    "torchtitan steps=4 training.local_batch_size=1 validation.accumulation=1",
    "torchtitan.train",
    "gradients",
)
def gradients_divided_once_more_from_the_second_step_on(module: Any) -> None:
    """huggingface/transformers#37766: already a mean, divided again; the reported loss is exact."""

    def step(run: Any, self: Any, *, global_valid_tokens: Any, **given: Any) -> Any:
        if self.step == 1:
            return run(self, global_valid_tokens=global_valid_tokens, **given)
        return 1.1 * run(self, global_valid_tokens=1.1 * global_valid_tokens, **given)

    wrap(module.Trainer, "forward_backward_step", step)


@silent(
    "accumulation",
    f"megatron {SPLIT}",
    "primus_images.training.backends.megatron.session",
    "loss",
    "gradients",
)
def first_micro_batch_in_place_of_the_last_from_the_second_step_on(module: Any) -> None:
    def forward_backward(run: Any, self: Any, batches: Any, terms: int) -> Any:
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps > 1:
            batches = [*batches[:-1], batches[0]]
        return run(self, batches, terms)

    wrap(module.MegatronSession, "forward_backward", forward_backward)
