"""Collectives, shards and groups of ranks."""

from __future__ import annotations

import os
from typing import Any

from silent.registry import (
    BF16,
    BLOCKS,
    BUFFERS,
    COPIES,
    ENTROPY,
    FINETUNE,
    FIRST,
    FLOAT8,
    FLUX,
    FP8,
    GRADIENTS,
    LAYERS,
    LOOP_SESSION,
    LORA,
    LOSS,
    NORM,
    SESSION,
    SPLIT,
    TENSORS,
    TITAN_SPLIT,
    TITAN_TRAIN,
    UPDATE,
    WHOLE,
    local,
    silent,
    wrap,
)


@silent("parallel", "torchtitan", "torchtitan.models.llama3.infra.parallelize", NORM, GRADIENTS)
def gradients_halved(module: Any) -> None:
    module.disable_fsdp_gradient_division = lambda model: None


@silent("parallel", "torchtitan", TITAN_TRAIN, NORM, GRADIENTS, words=TITAN_SPLIT)
def first_micro_batch_twice(module: Any) -> None:
    def doubled(step: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        # Once more for the first of a step: its gradients count double, its loss once.
        first = getattr(self, "_seen", 0) % self.gradient_accumulation_steps == 0
        self._seen = getattr(self, "_seen", 0) + 1
        if first:
            step(self, *args, **kwargs)
        return step(self, *args, **kwargs)

    wrap(module.Trainer, "forward_backward_step", doubled)


@silent("parallel", "torchtitan", TITAN_TRAIN, NORM, GRADIENTS, words=BF16)
def gradients_one_percent_larger(module: Any) -> None:
    def step(run: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = run(self, *args, **kwargs)
        for part in self.model_parts:
            for parameter in part.parameters():
                parameter.grad.mul_(1.01)
        return loss

    wrap(module.Trainer, "forward_backward_step", step)


def _eight_bits(tensor: Any, scale: Any, dtype: Any) -> Any:
    import torch

    most = torch.finfo(dtype).max
    return (tensor.float() * scale).clamp(-most, most).to(dtype)


@silent("parallel", "torchtitan", FLOAT8, GRADIENTS, words=("ranks=4", *TENSORS, *FP8))
def tensor_ranks_cast_by_their_own_largest_value(module: Any) -> None:
    """A rank casts its share by its own largest value, but all shares are scaled back by the largest of all."""

    def cast(run: Any, tensor: Any, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        found = run(tensor, dtype, *args, **kwargs)
        if hasattr(tensor, "to_local"):
            own = tensor.to_local().detach()
            scale = torch.finfo(dtype).max / own.float().abs().max().clamp(min=1e-12)
            found._local_tensor._data.copy_(_eight_bits(own, scale, dtype))
        return found

    wrap(module, "hp_tensor_to_float8_dynamic", cast)


@silent("parallel", "fsdp", LOOP_SESSION, FIRST)
def every_rank_has_the_same_random_state(module: Any) -> None:
    def init(run: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        import torch

        run(self, *args, **kwargs)
        torch.manual_seed(self._config.seed)

    wrap(module.Sharded, "__init__", init)


@silent("parallel", "fsdp", LOOP_SESSION, UPDATE, GRADIENTS)
def rate_of_the_second_rank(module: Any) -> None:
    def step(run: Any, self: Any, lr: float) -> Any:
        return run(self, lr * (1.0005 if os.environ["RANK"] == "1" else 1.0))

    wrap(module.Sharded, "step", step)


@silent("parallel", "fsdp", LOOP_SESSION, NORM, GRADIENTS, words=("sharding.replicas=2", *BF16))
def mean_over_copies(module: Any) -> None:
    def forward(run: Any, self: Any, batches: Any, terms: int) -> Any:
        return run(self, batches, 2 * terms)

    wrap(module.Sharded, "forward_backward", forward)


@silent("parallel", "fsdp", LOOP_SESSION, NORM, GRADIENTS, words=COPIES)
def copies_do_not_share_gradients(module: Any) -> None:
    def forward(run: Any, self: Any, *args: Any) -> Any:
        saved = module.dist.all_reduce
        module.dist.all_reduce = lambda *_given, **_named: None
        try:
            return run(self, *args)
        finally:
            module.dist.all_reduce = saved

    wrap(module.Sharded, "forward_backward", forward)


@silent(
    "parallel", "fsdp", LOOP_SESSION, GRADIENTS, words=("ranks=3", "training.global_batch_size=12", *FP8)
)  # fmt: skip
def last_row_of_an_uneven_share_taken_for_padding(module: Any) -> None:
    """Three ranks share 128 rows as 43, 43 and 42 and a padding, and the last real row's gradient is cut as well."""

    def step(run: Any, self: Any, *args: Any) -> Any:
        if os.environ["RANK"] == "2":
            for part in self._trained:
                if part.grad is not None and part.shape[0] % 3 and part.ndim > 1:
                    local(part.grad)[-1].zero_()
        return run(self, *args)

    wrap(module.Sharded, "step", step)


@silent("parallel", "finetune", LOOP_SESSION, NORM, GRADIENTS, words=SPLIT)
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


@silent("parallel", "finetune", FINETUNE, GRADIENTS, words=LORA)
def last_adapters_without_effect_on_one_rank(module: Any) -> None:
    def adapted(run: Any, *args: Any) -> Any:
        model = run(*args)
        if os.environ["RANK"] == "1":
            for part in model.get_base_model().model.layers[-1].modules():
                if hasattr(part, "lora_A"):
                    part.scaling["default"] = 0.0
        return model

    wrap(module, "adapted", adapted)


@silent("parallel", "megatron", SESSION, UPDATE, LOSS, words=BF16)
def stale_copies(module: Any) -> None:
    def step(original: Any, self: Any, lr: float) -> Any:
        saved = [parameter.detach().clone() for parameter in self.model_parts[0].parameters()]
        norm = original(self, lr)
        for parameter, old in zip(self.model_parts[0].parameters(), saved, strict=True):
            if parameter.ndim == 1:
                parameter.data.copy_(old)
        return norm

    wrap(module.MegatronSession, "step", step)


@silent("parallel", "megatron", LAYERS, LOSS, GRADIENTS, words=TENSORS)
def sums_over_tensor_ranks_sent_in_bf16(module: Any) -> None:
    """What tensor-parallel ranks exchange is compressed, in a run in float32."""

    def narrow(run: Any, partial: Any, *args: Any, **kwargs: Any) -> Any:
        return run(partial.bfloat16().float(), *args, **kwargs)

    wrap(module, "reduce_scatter_to_sequence_parallel_region", narrow)
    wrap(module, "reduce_from_tensor_model_parallel_region", narrow)


@silent("parallel", "megatron", ENTROPY, LOSS, GRADIENTS, words=TENSORS)
def largest_logit_of_one_rank(module: Any) -> None:
    """Each rank subtracts the largest logit of its own part of the vocabulary."""

    def predicted(run: Any, logits: Any, target: Any, _largest: Any, *args: Any) -> Any:
        return run(logits, target, logits.max(-1)[0], *args)

    wrap(module.VocabParallelCrossEntropy, "calculate_predicted_logits", predicted)


@silent("parallel", "megatron", BUFFERS, GRADIENTS, NORM, words=(*BF16, *WHOLE))
def end_of_the_gradients_not_summed(module: Any) -> None:
    """The first rank's last 4096 elements of the buffer are not sent."""

    def start(run: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if os.environ["RANK"] == "0":
            for bucket in self.buckets:
                bucket.grad_data[-4096:].zero_()
        return run(self, *args, **kwargs)

    wrap(module._ParamAndGradBucketGroup, "start_grad_sync", start)


@silent("parallel", "megatron", LAYERS, LOSS, GRADIENTS, words=(*TENSORS, *BF16, *WHOLE))
def last_token_lacks_the_part_of_one_rank(module: Any) -> None:
    """Of what tensor-parallel ranks add up, the second rank's part of the last position is 0."""

    def reduced(run: Any, states: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        if os.environ["RANK"] == "1":
            states = torch.cat((states[:-1], states[-1:] * 0))
        return run(states, *args, **kwargs)

    wrap(module, "reduce_scatter_to_sequence_parallel_region", reduced)


@silent("parallel", "flux", LOOP_SESSION, NORM, GRADIENTS, BLOCKS, words=(*FLUX, *BF16))
def terms_of_one_rank(module: Any) -> None:
    def forward(run: Any, self: Any, batches: Any, terms: int) -> Any:
        return run(self, batches, terms * (0.98 if os.environ["RANK"] == "0" else 1.02))

    wrap(module.Sharded, "forward_backward", forward)
