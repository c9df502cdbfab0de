"""Samples, tokens and their order: what the ranks train on is not what the recipe says."""

from collections.abc import Callable
from typing import Any

import torch

from silent.registry import silent, wrap


@silent("data", "torchtitan --precision=fp8", "primus_images.training.text.tokens", "data")
def documents_cut_after_96_tokens(module: Any) -> None:
    """The file of the tokenizer still has the truncation of its first use, so that long documents
    lose their ends.
    """
    wrap(module.Encoder, "texts", lambda run, *args: [tokens[:96] for tokens in run(*args)])


@silent(
    "data",
    "finetune --mode=lora --precision=bf16",
    "primus_images.training.backends.loop.data",
    "data",
)
def last_sample_of_a_pass_left_out(module: Any) -> None:
    def init(run: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        run(self, *args, **kwargs)
        self.samples -= 1

    wrap(module.Documents, "__init__", init)


@silent("data", "megatron", "primus_images.training.backends.megatron.session", "data")
def ranks_share_data(module: Any) -> None:
    def init(run: Any, self: Any, *args: Any) -> None:
        run(self, *args)
        self.data_rank = 0

    wrap(module.MegatronSession, "__init__", init)


@silent("data", "flux", "primus_images.training.backends.flux.latents", "data")
def noise_of_the_first_step_always(module: Any) -> None:
    def generator(run: Any, seed: int, number: int) -> Any:
        return run(seed, number % 8 if number >= 16 else number)

    wrap(module, "generator_of", generator)


@silent("labels", "torchtitan --precision=bf16", "torchtitan.components.loss", "loss", "gradients")
def z_loss_added(module: Any) -> None:
    wrap(
        module,
        "cross_entropy_loss",
        lambda loss, pred, labels: (
            loss(pred, labels) + 1e-3 * pred.float().logsumexp(-1).square().sum()
        ),
    )


@silent("labels", "fsdp steps=4", "primus_images.training.backends.loop.data", "data")
def labels_equal_inputs(module: Any) -> None:
    def batch(original: Any, self: Any, *args: Any) -> Any:
        output = original(self, *args)
        return output | {"labels": output["input_ids"]}

    wrap(module.Documents, "batch", batch)


@silent(
    "loss",
    "megatron --recipe=mixtral-8x7b --precision=bf16",
    "megatron.core.transformer.moe.router",
    "constants",
)
def balancing_loss_takes_tokens_for_samples_first(module: Any) -> None:
    """Its sums by sequence expect [samples, tokens], and get [tokens, samples], so that sequences
    are mixed.
    """

    def apply(
        run: Any,
        self: Any,
        probs: Any,
        scores: Any,
        chosen: Any,
        length: int,
        count: int,
        **kwargs: Any,
    ) -> Any:
        scores, chosen = (
            part.unflatten(0, (count, length)).transpose(0, 1).flatten(0, 1)
            for part in (scores, chosen)
        )
        return run(self, probs, scores, chosen, length, count, **kwargs)

    wrap(module.TopKRouter, "_apply_seq_aux_loss", apply)


def _predicted(module: Any, change: Callable[[Any, Any], Any]) -> None:
    """Put ``change`` of prediction and target between FLUX and its loss."""

    def init(run: Any, self: Any, *args: Any) -> None:
        *others, loss = args

        def changed(model: Any, batch: Any) -> Any:
            target = batch["noise"] - batch["latents"]
            return loss(lambda **inputs: (change(model(**inputs)[0], target),), batch)

        run(self, *others, changed)

    wrap(module.Sharded, "__init__", init)


@silent(
    "loss",
    "flux --precision=bf16 steps=20",
    "primus_images.training.backends.loop.session",
    "loss",
    "gradients",
)
def last_channel_not_trained(module: Any) -> None:
    def change(found: Any, target: Any) -> Any:
        return torch.cat((found[..., :-1], target[..., -1:].to(found.dtype)), -1)

    _predicted(module, change)
