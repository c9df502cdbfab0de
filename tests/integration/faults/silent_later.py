"""Silent faults of classes that the other lists lack, each written with the check that should name it before it ran."""

from __future__ import annotations

import os
from typing import Any

from silent import (
    ADAMW,
    DATA,
    GRADIENTS,
    LANGUAGE,
    LOGGED,
    LOSS,
    NORM,
    RATE,
    SESSION,
    SHARDED,
    UPDATE,
    silent,
    wrap,
)  # fmt: skip
from silent_subtle import REPORT
from silent_unseen import FLUX, LATENTS, LOOP, LOOP_DATA

COPIES = ("sharding.replicas=2",)
SPLIT = ("training.micro_batch_size=1", "training.global_batch_size=8", "validation.accumulation=1")


# Order of the data, tokenizer and labels


@silent("data", "fsdp", LOOP, DATA)
def ranks_exchange_their_last_data(module: Any) -> None:
    class Exchanged:
        data_rank = 0

    def batches(run: Any, given: Any, session: Any, data: Any, step: int) -> Any:
        other = Exchanged()
        other.data_rank = 1 - session.data_rank if step == given.last_step else session.data_rank
        return run(given, other, data, step)

    wrap(module, "_batches", batches)


@silent("data", "finetune", LOOP_DATA, DATA)
def vocabulary_with_two_tokens_exchanged(module: Any) -> None:
    def tokens(run: Any, *given: Any) -> Any:
        import numpy as np

        found = run(*given)
        one, other = np.bincount(found).argsort()[-3:-1]
        first, second = found == one, found == other
        found[first], found[second] = other, one
        return found

    wrap(module, "tokens_of", tokens)


@silent("data", "torchtitan", "torchtitan.components.tokenizer", DATA)
def begin_mark_also_at_the_end(module: Any) -> None:
    def encode(run: Any, self: Any, text: str, **named: Any) -> Any:
        tokens = run(self, text, **named)
        return [*tokens[:-1], tokens[0]]

    wrap(module.HuggingFaceTokenizer, "encode", encode)


@silent("data", "megatron", LOOP_DATA, DATA)
def documents_read_backwards(module: Any) -> None:
    wrap(module, "_documents", lambda run, *given: reversed(list(run(*given))))


@silent("labels", "fsdp", LOOP_DATA, DATA, LOSS)
def labels_after_end_marks_ignored(module: Any) -> None:
    def batch(run: Any, self: Any, *given: Any) -> Any:
        made = run(self, *given)
        made["labels"][made["input_ids"] == self.sample(0).max()] = -100
        return made

    wrap(module.Packed, "batch", batch)


# Schedule


@silent("schedule", "fsdp", LOOP, RATE, words=("training.lr_schedule=cosine", "training.min_lr=0.00001"))
def least_rate_ignored(module: Any) -> None:
    from dataclasses import replace

    wrap(module, "learning_rate", lambda rate, config, step: rate(replace(config, min_lr=0.0), step))


@silent("schedule", "finetune", LOOP, RATE, words=("--mode=lora", "training.lr_schedule=linear"))
def cosine_in_place_of_linear(module: Any) -> None:
    from dataclasses import replace

    wrap(module, "learning_rate", lambda rate, config, step: rate(replace(config, lr_schedule="cosine"), step))


# Weight decay and the optimizer's arithmetic


@silent("optimizer", "fsdp", ADAMW, UPDATE)
def decay_added_to_the_gradient(module: Any) -> None:
    """Adam with an L2 penalty in place of AdamW."""

    def step(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.add_(parameter.detach(), alpha=group["weight_decay"])
        kept = [group["weight_decay"] for group in self.param_groups]
        for group in self.param_groups:
            group["weight_decay"] = 0.0
        found = run(self, *given, **named)
        for group, decay in zip(self.param_groups, kept, strict=True):
            group["weight_decay"] = decay
        return found

    wrap(module.AdamW, "step", step)


@silent("optimizer", "torchtitan", ADAMW, UPDATE)
def widest_tensor_does_not_decay(module: Any) -> None:
    """Embedding and head are in a group without decay, unlike what the recipe says."""

    def step(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        import torch

        rates = [group["lr"] * group["weight_decay"] for group in self.param_groups]
        with torch.no_grad():
            for group, rate in zip(self.param_groups, rates, strict=True):
                largest = max(parameter.numel() for parameter in group["params"])
                for parameter in group["params"]:
                    if parameter.numel() == largest:
                        parameter.mul_(1 / (1 - rate))
        return run(self, *given, **named)

    wrap(module.AdamW, "step", step)


@silent("optimizer", "megatron", ADAMW, UPDATE)
def decay_of_the_first_rate(module: Any) -> None:
    """Weights decay at a fixed rate, whatever the schedule says."""

    def step(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        import torch

        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(1 - 1e-3 * group["weight_decay"])
        return run(self, *given, **named)

    wrap(module.AdamW, "step", step)


@silent("precision", "fsdp", SHARDED, NORM, GRADIENTS)
def loss_scale_left_in_the_gradients(module: Any) -> None:
    """Clipping and Adam hide a constant factor."""

    def forward(run: Any, self: Any, *given: Any) -> Any:
        found = run(self, *given)
        for parameter in self._trained:
            parameter.grad.mul_(1024)
        return found

    wrap(module.Sharded, "forward_backward", forward)


# Copies of the model, and accumulation


@silent("parallel", "fsdp", SHARDED, NORM, GRADIENTS, words=COPIES)
def copies_do_not_share_gradients(module: Any) -> None:
    def forward(run: Any, self: Any, *given: Any) -> Any:
        kept = module.dist.all_reduce
        module.dist.all_reduce = lambda *_given, **_named: None
        try:
            return run(self, *given)
        finally:
            module.dist.all_reduce = kept

    wrap(module.Sharded, "forward_backward", forward)


@silent("parallel", "fsdp", SHARDED, LOSS, GRADIENTS, NORM, words=COPIES)
def one_copy_drifts(module: Any) -> None:
    def step(run: Any, self: Any, *given: Any) -> Any:
        import torch

        found = run(self, *given)
        if os.environ["RANK"] == "1":
            with torch.no_grad():
                for parameter in self._trained:
                    parameter.to_local().mul_(1.001)
        return found

    wrap(module.Sharded, "step", step)


@silent("parallel", "finetune", SHARDED, NORM, GRADIENTS, words=SPLIT)
def later_micro_batches_weigh_more(module: Any) -> None:
    def forward(run: Any, self: Any, batches: Any, terms: Any) -> Any:
        keep, total = self._loss, 0
        for number, batch in enumerate(batches):
            weight = 1 + 0.02 * (number - (len(batches) - 1) / 2)
            self._loss = lambda model, part, weight=weight: weight * keep(model, part)
            total = total + run(self, [batch], terms) / weight
        self._loss = keep
        return total

    wrap(module.Sharded, "forward_backward", forward)


# Adapters


@silent("model", "finetune", "peft.tuners.lora.layer", LOSS, GRADIENTS, words=("--mode=lora",))
def adapter_scale_one_percent_larger(module: Any) -> None:
    def forward(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        self.scaling = {name: 1.01 * self.lora_alpha[name] / self.r[name] for name in self.scaling}
        return run(self, *given, **named)

    wrap(module.Linear, "forward", forward)


@silent("model", "finetune", "peft.tuners.lora.layer", LOSS, GRADIENTS, words=("--mode=lora",))
def inputs_of_adapters_dropped(module: Any) -> None:
    def forward(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        import torch

        for name in self.lora_dropout:
            self.lora_dropout[name] = torch.nn.Dropout(0.05)
        return run(self, *given, **named)

    wrap(module.Linear, "forward", forward)


# Checkpoints


@silent("checkpoint", "fsdp", SHARDED, UPDATE)
def betas_changed_by_a_checkpoint(module: Any) -> None:
    def loaded(run: Any, self: Any, state: Any) -> None:
        run(self, state)
        for group in self._optimizer.param_groups:
            group["betas"] = (0.9, 0.999)

    wrap(module.Sharded, "load_state_dict", loaded)


@silent("checkpoint", "megatron", SESSION, UPDATE, LOSS, GRADIENTS)
def last_layer_loaded_from_the_first(module: Any) -> None:
    def loaded(run: Any, self: Any, state: Any) -> None:
        import torch

        run(self, state)
        found = {name: p for part in self.model_parts for name, p in part.named_parameters()}
        with torch.no_grad():
            for name, parameter in found.items():
                if ".layers.1." in name:
                    parameter.copy_(found[name.replace(".layers.1.", ".layers.0.")])

    owner = next(part for part in vars(module).values() if isinstance(part, type) and "load_state_dict" in vars(part))
    wrap(owner, "load_state_dict", loaded)


# FLUX


@silent("data", "flux", LATENTS, DATA, words=FLUX)
def times_shifted_to_noise(module: Any) -> None:
    def batch(run: Any, self: Any, *given: Any) -> Any:
        made = run(self, *given)
        return {**made, "time": 3 * made["time"] / (1 + 2 * made["time"])}

    wrap(module.Images, "batch", batch)


@silent("data", "flux", LATENTS, DATA, words=FLUX)
def one_time_for_all_images_of_a_batch(module: Any) -> None:
    def batch(run: Any, self: Any, *given: Any) -> Any:
        made = run(self, *given)
        return {**made, "time": made["time"][:1].expand_as(made["time"]).clone()}

    wrap(module.Images, "batch", batch)


# Reported figures


@silent("metrics", "fsdp", REPORT, LOGGED)
def log_shows_a_smaller_loss_than_the_file(module: Any) -> None:
    import sys

    class Shown:
        class stdout:
            flush = staticmethod(sys.stdout.flush)

            @staticmethod
            def write(text: str) -> None:
                before, mark, after = text.partition("loss:")
                if mark:
                    value, rest = after[:9], after[9:]
                    text = f"{before}{mark}{float(value) * 0.99:9.5f}{rest}"
                sys.stdout.write(text)

    module.sys = Shown


@silent("metrics", "megatron", REPORT, LOGGED, LOSS, NORM)
def figures_of_the_step_before(module: Any) -> None:
    def told(run: Any, self: Any, number: int, loss: float, norm: float, rate: float) -> None:
        before = getattr(self, "_before", norm)
        self._before = norm
        run(self, number, loss, before, rate)

    wrap(module.Report, "step", told)


@silent("labels", "finetune", LANGUAGE, LOSS, GRADIENTS)
def first_token_of_a_sample_not_trained(module: Any) -> None:
    def loss(run: Any, model: Any, batch: Any) -> Any:
        labels = batch["labels"].clone()
        labels[:, 0] = -100
        return run(model, {**batch, "labels": labels})

    wrap(module, "loss", loss)
