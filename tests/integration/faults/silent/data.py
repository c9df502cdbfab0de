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


ANSWERS = "steps=9 assets.corpus=assets/answers.jsonl"
DOCUMENTS = "steps=9 assets.corpus=assets/documents.jsonl"


@silent("epoch", f"fsdp {DOCUMENTS}", "primus_images.training.backends.loop.data", "data")
def order_of_the_first_epoch_again(module: Any) -> None:
    wrap(module, "_order", lambda run, count, seed, turn: run(count, seed, 0))


@silent(
    "epoch",
    f"finetune {ANSWERS} finetune.packing=true",
    "primus_images.training.backends.loop.data",
    "data",
)
def second_epoch_without_its_first_sample(module: Any) -> None:
    def place(run: Any, number: int, count: int, seed: int) -> int:
        return run(number + (number >= count), count, seed)  # type: ignore[no-any-return]

    wrap(module, "place_of", place)


@silent(
    "epoch",
    f"torchtitan {DOCUMENTS}",
    "primus_images.training.backends.torchtitan.data",
    "data",
)
def micro_batches_of_the_second_epoch_begin_late(module: Any) -> None:
    """One micro-batch of each rank is not read."""

    def share(run: Any, self: Any, number: int) -> Any:
        of_epoch = self._samples.samples // (self._size * self._ranks)
        return run(self, number + (number >= of_epoch))

    wrap(module._Share, "__getitem__", share)


@silent(
    "labels",
    f"finetune {ANSWERS} finetune.packing=true",
    "primus_images.training.backends.loop.data",
    "data",
)
def positions_go_on_in_the_next_document(module: Any) -> None:
    def batch(run: Any, self: Any, *args: Any) -> Any:
        made = run(self, *args)
        if "positions" in made:
            made["positions"] = torch.arange(self._seq_len).expand_as(made["positions"]).clone()
        return made

    wrap(module.Documents, "batch", batch)


@silent(
    "labels",
    f"finetune {ANSWERS}",
    "primus_images.training.backends.loop.data",
    "data",
)
def end_of_answers_not_trained(module: Any) -> None:
    def document(run: Any, self: Any, number: int) -> Any:
        tokens, labels = run(self, number)
        labels = labels.clone()
        labels[-1] = -100
        return tokens, labels

    wrap(module.Documents, "_document", document)


@silent(
    "labels",
    f"finetune {ANSWERS}",
    "primus_images.training.backends.loop.train",
    "loss",
    "gradients",
)
def ranks_divide_by_their_own_labels(module: Any) -> None:
    def step(run: Any, self: Any, batches: Any, terms: int, number: int) -> Any:
        own_terms = sum(module.terms_of(batch) for batch in batches)
        return run(self, batches, own_terms * self._job.world_size, number)

    wrap(module._Loop, "_mean_loss", step)


@silent(
    "data",
    "torchtitan",
    "primus_images.training.backends.torchtitan.data",
    "data",
)
def every_rank_reads_the_samples_of_the_first(module: Any) -> None:
    wrap(module, "loader_of", lambda run, job, rank, config: run(job, 0, config))
