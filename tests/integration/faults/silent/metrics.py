"""What is reported: figures, the clock, and ranks that keep the others waiting."""

import os
import time
from dataclasses import replace
from typing import Any

from silent.registry import silent, wrap


@silent("metrics", "torchtitan", "torchtitan.distributed.utils", "gradient norm", "gradients")
def norm_without_its_root(module: Any) -> None:
    wrap(module, "clip_grad_norm_", lambda clip, *args, **kwargs: clip(*args, **kwargs) ** 2)


@silent("metrics", "torchtitan", "primus_images.training.run.facts", "reported figures")
def embeddings_left_out_of_the_count(module: Any) -> None:
    def static(original: Any, parts: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(parts, *args, **kwargs)
        return found | {"parameters": found["parameters"] - next(parts[0].parameters()).numel()}

    wrap(module, "static", static)


@silent("clock", "torchtitan", "torchtitan.train", "clock")
def time_of_data_left_out(module: Any) -> None:
    def generate(original: Any, self: Any, *args: Any) -> Any:
        for batch in original(self, *args):
            began = time.perf_counter()
            time.sleep(0.4)
            self.metrics_processor.time_last_log += time.perf_counter() - began
            yield batch

    wrap(module.Trainer, "batch_generator", generate)


@silent("metrics", "torchtitan", "torchtitan.train", "steps logged")
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


@silent("clock", "fsdp steps=4", "primus_images.training.backends.loop.report", "clock")
def tokens_counted_twice(module: Any) -> None:
    def init(original: Any, self: Any, *args: Any) -> None:
        original(self, *args)
        self._tokens *= 2

    wrap(module.Report, "__init__", init)


@silent(
    "metrics",
    "fsdp --precision=bf16",
    "primus_images.training.backends.loop.report",
    "loss",
    "steps logged",
)
def loss_reported_a_little_lower(module: Any) -> None:
    wrap(
        module.Report,
        "step",
        lambda step, self, number, loss, *args: step(self, number, loss * 0.999, *args),
    )


@silent("metrics", "fsdp", "primus_images.training.run.metrics", "reported figures")
def operations_of_the_forward_pass_alone(module: Any) -> None:
    def counted(run: Any, *args: Any, **kwargs: Any) -> Any:
        found = run(*args, **kwargs)
        return replace(found, causal=found.causal / 3, non_causal=found.non_causal / 3)

    wrap(module, "of_recipe_unit", counted)
    import primus_images.training.backends.loop.report as report

    report.of_recipe_unit = module.of_recipe_unit


@silent("metrics", "finetune --mode=lora", "primus_images.training.run.facts", "reported figures")
def frozen_weights_counted_as_trained(module: Any) -> None:
    def static(run: Any, *args: Any, **kwargs: Any) -> Any:
        found = run(*args, **kwargs)
        return {**found, "trainable_parameters": found["parameters"]}

    wrap(module, "static", static)


@silent("clock", "finetune", "primus_images.training.backends.loop.report", "clock")
def time_of_the_update_left_out(module: Any) -> None:
    """A fifth of each step is not counted."""

    def step(run: Any, self: Any, *args: Any) -> None:
        self._since += 0.2 * (time.perf_counter() - self._since)
        run(self, *args)

    wrap(module.Report, "step", step)


@silent(
    "metrics",
    "finetune --mode=lora",
    "primus_images.training.backends.loop.session",
    "steps logged",
    "gradient norm",
)
def norm_of_the_clipped_gradients_late(module: Any) -> None:
    def step(run: Any, *args: Any) -> Any:
        norm = run(*args)
        step.calls = getattr(step, "calls", 0) + 1  # type: ignore[attr-defined]
        return norm * (1.0002 if step.calls > 4 else 1.0)  # type: ignore[attr-defined]

    wrap(module.Sharded, "step", step)


@silent("metrics", "finetune", "primus_images.training.run.facts", "configuration")
def one_rank_told_as_the_world(module: Any) -> None:
    wrap(module, "static", lambda run, *args, **kwargs: run(*args, **kwargs) | {"world_size": 1})


@silent("clock", "megatron", "primus_images.training.backends.loop.report", "clock")
def tokens_of_all_ranks_reported(module: Any) -> None:
    def output(init: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self._tokens *= 2

    wrap(module.Report, "__init__", output)


@silent(
    "metrics",
    "megatron --precision=bf16",
    "primus_images.training.backends.loop.report",
    "gradient norm",
    "steps logged",
    "gradients",
)
def norm_reported_a_little_lower(module: Any) -> None:
    wrap(
        module.Report,
        "step",
        lambda step, self, number, loss, norm, *args: step(self, number, loss, norm * 0.99, *args),
    )


@silent("metrics", "megatron", "primus_images.training.run.facts", "reported figures")
def embedding_counted_twice(module: Any) -> None:
    def static(run: Any, parts: Any, *args: Any, **kwargs: Any) -> Any:
        found = run(parts, *args, **kwargs)
        return {**found, "parameters": found["parameters"] + next(parts[0].parameters()).numel()}

    wrap(module, "static", static)


@silent(
    "metrics",
    "megatron training.micro_batch_size=2",
    "primus_images.training.backends.megatron.session",
    "loss",
)
def loss_of_the_first_micro_batch_reported(module: Any) -> None:
    def schedule(get: Any) -> Any:
        run = get()

        def first(**kwargs: Any) -> Any:
            sums = run(**kwargs)
            return [sums[0]] * len(sums)

        return first

    wrap(module, "get_forward_backward_func", schedule)


def _more_tokens(module: Any, factor: float) -> None:
    def init(original: Any, self: Any, *args: Any) -> None:
        original(self, *args)
        self._tokens *= factor

    wrap(module.Report, "__init__", init)


@silent("clock", "fsdp", "primus_images.training.backends.loop.report", "clock")
def tokens_of_the_labels_behind_the_end(module: Any) -> None:
    """Tokens/s too high by less than the launcher's clock can see."""
    _more_tokens(module, 1.1)


@silent("metrics", "megatron", "primus_images.training.backends.loop.report", "reported figures")
def a_third_of_a_tenth_more_tokens(module: Any) -> None:
    _more_tokens(module, 1.033)


@silent("clock", "torchtitan", "torchtitan.components.metrics", "clock")
def time_between_logs_a_little_short(module: Any) -> None:
    def log(run: Any, self: Any, *args: Any) -> None:
        self.time_last_log += 0.05 * (time.perf_counter() - self.time_last_log)
        run(self, *args)

    wrap(module.MetricsProcessor, "log", log)


def _other_flops(module: Any, factor: float) -> None:
    wrap(module, "_rounded", lambda run, tflops: run(factor * tflops))


@silent("metrics", "fsdp", "primus_images.training.backends.loop.report", "reported figures")
def flops_with_recomputation(module: Any) -> None:
    _other_flops(module, 4 / 3)


@silent("metrics", "finetune", "primus_images.training.backends.loop.report", "reported figures")
def flops_a_little_higher(module: Any) -> None:
    _other_flops(module, 1.01)


@silent(
    "metrics", "flux steps=3", "primus_images.training.backends.loop.report", "reported figures"
)
def flops_of_all_ranks(module: Any) -> None:
    _other_flops(module, 2.0)


@silent("metrics", "fsdp", "primus_images.training.backends.loop.report", "reported figures")
def tokens_of_a_sequence_that_is_one_longer(module: Any) -> None:
    """Fewer than a clock can see: a sample has one token more than its labels."""
    _more_tokens(module, 1 + 1 / 128)


@silent("metrics", "torchtitan", "torchtitan.train", "reported figures")
def other_flops_of_a_token_in_the_log(module: Any) -> None:
    def train(run: Any, self: Any) -> None:
        self.metrics_processor.num_flops_per_token *= 1.01
        run(self)

    wrap(module.Trainer, "train", train)
