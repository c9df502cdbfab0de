"""Labels, masks and the loss itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from silent.registry import (
    BF16,
    CONSTANTS,
    DATA,
    END,
    FLUX,
    GRADIENTS,
    LOOP_DATA,
    LOOP_SESSION,
    LOSS,
    MIXTRAL,
    ROUTER,
    SESSION,
    TITAN_DATA,
    TITAN_LOSS,
    WHOLE,
    each_sample,
    silent,
    wrap,
)


@silent("labels", "torchtitan", TITAN_DATA, DATA)
def labels_not_shifted(module: Any) -> None:
    each_sample(module, lambda number, tokens, label: (tokens, tokens))


@silent("labels", "torchtitan", TITAN_LOSS, LOSS, GRADIENTS, words=BF16)
def z_loss_added(module: Any) -> None:
    wrap(
        module,
        "cross_entropy_loss",
        lambda loss, pred, labels: loss(pred, labels) + 1e-3 * pred.float().logsumexp(-1).square().sum(),
    )


@silent("labels", "fsdp", LOOP_DATA, DATA)
def labels_equal_inputs(module: Any) -> None:
    def batch(original: Any, self: Any, *args: Any) -> Any:
        output = original(self, *args)
        return output | {"labels": output["input_ids"]}

    wrap(module._Tokens, "batch", batch)


@silent("labels", "fsdp", LOOP_SESSION, LOSS, GRADIENTS, words=BF16)
def one_label_shifted(module: Any) -> None:
    def summed(original: Any, head: Any, states: Any, labels: Any) -> Any:
        labels = labels.clone()
        labels[..., 3:6] = labels[..., 2:5].clone()
        return original(head, states, labels)

    wrap(module, "_summed", summed)


@silent("labels", "finetune", LOOP_SESSION, LOSS, GRADIENTS, words=(*BF16, *WHOLE))
def end_marks_not_trained(module: Any) -> None:
    """The mark that ends a document also pads, and so the model never learns to stop."""

    def loss(run: Any, model: Any, batch: Any) -> Any:
        return run(model, {**batch, "labels": batch["labels"].masked_fill(batch["labels"] == END, -100)})

    wrap(module, "loss", loss)


@silent("labels", "megatron", SESSION, LOSS, GRADIENTS, words=BF16)
def first_label_counts_half(module: Any) -> None:
    def run(original: Any, self: Any, batches: Any, terms: int) -> Any:
        changed = []
        for batch in batches:
            labels = batch["labels"].clone()
            labels[0, 0] = -100
            changed.append({**batch, "labels": labels})
        return original(self, changed, terms)

    wrap(module.MegatronSession, "forward_backward", run)


@silent("labels", "megatron", "megatron.core.models.common.language_module.language_module", LOSS, GRADIENTS)
def padding_of_the_vocabulary_in_the_softmax(module: Any) -> None:
    """Eight logits of 0, which pad the vocabulary, are not masked."""

    def loss(run: Any, self: Any, labels: Any, logits: Any) -> Any:
        import torch

        return run(self, labels, torch.cat([logits, logits.new_zeros(*logits.shape[:-1], 8)], -1))

    wrap(module.LanguageModule, "compute_language_model_loss", loss)


@silent("loss", "megatron", ROUTER, CONSTANTS, words=(*MIXTRAL, *BF16))
def balancing_loss_takes_tokens_for_samples_first(module: Any) -> None:
    """Its sums by sequence expect [samples, tokens], and get [tokens, samples], so that sequences are mixed."""

    def apply(run: Any, self: Any, probs: Any, scores: Any, chosen: Any, length: int, count: int, **kwargs: Any) -> Any:
        scores, chosen = (part.unflatten(0, (count, length)).transpose(0, 1).flatten(0, 1) for part in (scores, chosen))
        return run(self, probs, scores, chosen, length, count, **kwargs)

    wrap(module.TopKRouter, "_apply_seq_aux_loss", apply)


@silent("labels", "flux", LOOP_SESSION, LOSS, GRADIENTS, words=FLUX)
def velocity_of_doubled_noise(module: Any) -> None:
    """The loss sees another target than the noise that was drawn and recorded."""

    def forward(run: Any, self: Any, batches: Any, terms: Any) -> Any:
        return run(self, [{**batch, "noise": 1.05 * batch["noise"]} for batch in batches], terms)

    wrap(module.Sharded, "forward_backward", forward)


def _predicted(module: Any, change: Callable[[Any, Any], Any]) -> None:
    """Put ``change`` of prediction and target between FLUX and its loss."""

    def init(run: Any, self: Any, model: Any, loss: Any, *args: Any, **kwargs: Any) -> None:
        def changed(model: Any, batch: Any) -> Any:
            target = batch["noise"] - batch["latents"]
            return loss(lambda **inputs: (change(model(**inputs)[0], target),), batch)

        run(self, model, changed, *args, **kwargs)

    wrap(module.Sharded, "__init__", init)


@silent("loss", "flux", LOOP_SESSION, LOSS, GRADIENTS, words=(*FLUX, *BF16, *WHOLE))
def last_channel_not_trained(module: Any) -> None:
    def change(found: Any, target: Any) -> Any:
        import torch

        return torch.cat((found[..., :-1], target[..., -1:].to(found.dtype)), -1)

    _predicted(module, change)
