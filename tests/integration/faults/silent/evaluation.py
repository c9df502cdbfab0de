"""Evaluation: what a model is chosen by, and which weights are exported."""

import math
from typing import Any

import torch

from silent.registry import local, silent, wrap

JOB = "finetune steps=6 eval.fraction=0.2 eval.every=2"
NARROW = f"{JOB} --precision=bf16"
EXPORTED = f"{JOB} lr=0.1 finetune.save_weights=true"


def _trained_text(share: float, module: Any) -> None:
    """Evaluate on training text in ``share`` of the samples."""
    from primus_images.training.text.tokens import stored

    def held_out(run: Any, job: Any, *, packing: bool = False) -> Any:
        documents = run(job, packing=packing)
        others = module._documents(stored(job.output / "cache"), job, packing)
        batch = documents.batch

        def mixed(first: int, count: int) -> Any:
            if first % 100 < 100 * share:
                return others.batch(first, count)
            return batch(first, count)

        documents.batch = mixed
        return documents

    wrap(module, "held_out", held_out)


@silent("evaluation", JOB, "primus_images.training.backends.loop.data", "evaluation")
def evaluation_on_training_text(module: Any) -> None:
    _trained_text(1.0, module)


@silent("evaluation", NARROW, "primus_images.training.backends.loop.data", "evaluation")
def tenth_of_the_evaluation_on_training_text(module: Any) -> None:
    _trained_text(0.1, module)


def _means(share: float, module: Any) -> None:
    """Report a mean of the means of batches, in ``share``."""

    def loss(run: Any, self: Any) -> float:
        right: float = run(self)
        size = self._job.training.micro_batch_size
        means = []
        for first in range(0, self._data.samples, size * self._job.data_parallel):
            batch = self._data.batch(first, size)
            batch["labels"][max(0, self._data.samples - first) :] = -100
            of_batch = float(self._session.loss(batch))
            means.append(of_batch / int((batch["labels"] != -100).sum()))
        return right + share * (sum(means) / len(means) - right)

    wrap(module.Evaluation, "loss", loss)


@silent("evaluation", JOB, "primus_images.training.backends.loop.evaluation", "evaluation")
def mean_of_the_means_of_batches(module: Any) -> None:
    _means(1.0, module)


@silent("evaluation", JOB, "primus_images.training.backends.loop.evaluation", "evaluation")
def tenth_of_the_mean_of_means(module: Any) -> None:
    _means(0.1, module)


@silent("evaluation", NARROW, "primus_images.training.backends.loop.evaluation", "evaluation")
def evaluation_of_the_first_time_again(module: Any) -> None:
    def loss(run: Any, self: Any) -> float:
        self.first = getattr(self, "first", None) or run(self)
        return self.first  # type: ignore[no-any-return]

    wrap(module.Evaluation, "loss", loss)


@silent("evaluation", JOB, "primus_images.training.backends.loop.evaluation", "evaluation")
def last_batch_left_out_of_the_evaluation(module: Any) -> None:
    def loss(run: Any, self: Any) -> Any:
        samples = self._data.samples
        self._data.samples -= 1
        try:
            return run(self)
        finally:
            self._data.samples = samples

    wrap(module.Evaluation, "loss", loss)


@silent(
    "best",
    EXPORTED,
    "primus_images.training.backends.loop.evaluation",
    "checkpoints",
    "saved files",
)
def worst_evaluation_kept(module: Any) -> None:
    def add(_: Any, self: Any, step: int, loss: float) -> bool:
        if loss <= getattr(self, "worst", -math.inf):
            return False
        self.worst = loss
        self.best = module.checkpoint.folder_of(self._output, step)
        return True

    wrap(module.Standing, "add", add)


@silent("best", EXPORTED, "primus_images.training.backends.loop.checkpoint", "saved files")
def last_weights_exported_in_place_of_the_best(module: Any) -> None:
    def load(run: Any, folder: Any, session: Any) -> None:
        if "cache" in folder.parts:
            run(folder, session)

    wrap(module, "load", load)


@silent("best", EXPORTED, "primus_images.training.backends.loop.checkpoint", "saved files")
def tenth_of_the_last_weights_in_the_export(module: Any) -> None:
    def load(run: Any, folder: Any, session: Any) -> None:
        last = [local(weight).detach().clone() for weight in session._model.parameters()]
        run(folder, session)
        if "cache" not in folder.parts:
            with torch.no_grad():
                for weight, other in zip(session._model.parameters(), last, strict=True):
                    local(weight).mul_(0.9).add_(other, alpha=0.1)

    wrap(module, "load", load)


TORCHTITAN = "torchtitan steps=4 eval.fraction=0.1 eval.every=2"


@silent(
    "evaluation",
    TORCHTITAN,
    "primus_images.training.backends.torchtitan.evaluation",
    "evaluation",
)
def every_rank_evaluates_the_documents_of_the_first(module: Any) -> None:
    def batches(_: Any, self: Any) -> Any:
        ranks = self._job["data_parallel"]
        return module.evaluation.batches_of(self._data, self._size, 0, ranks)

    wrap(module.Evaluation, "_batches", batches)


@silent(
    "evaluation",
    TORCHTITAN,
    "primus_images.training.backends.torchtitan.evaluation",
    "evaluation",
)
def evaluation_with_one_norm_of_the_time_before(module: Any) -> None:
    def mean_loss(run: Any, self: Any) -> Any:
        norm = local(self._trainer.model_parts[0].norm.weight)
        now = norm.detach().clone()
        with torch.no_grad():
            norm.copy_(getattr(self, "before", now))
            loss = run(self)
            norm.copy_(now)
        self.before = now
        return loss

    wrap(module.Evaluation, "_mean_loss", mean_loss)


@silent(
    "evaluation",
    "megatron --recipe=mixtral-8x7b steps=4 eval.fraction=0.1 eval.every=2",
    "primus_images.training.backends.megatron.session",
    "gradients",
)
def experts_not_balanced_after_an_evaluation(module: Any) -> None:
    """The model stays in the mode of evaluation, which has no balancing loss."""

    def loss(run: Any, self: Any, batch: Any) -> Any:
        of_batch = run(self, batch)
        for part in self.model_parts:
            part.eval()
        return of_batch

    wrap(module.MegatronSession, "loss", loss)


@silent(
    "evaluation",
    "megatron eval.fraction=0.1 eval.every=2",
    "primus_images.training.backends.loop.evaluation",
    "evaluation",
)
def hundredth_of_the_evaluation_before(module: Any) -> None:
    """A moving average that is told as the loss."""

    def loss(run: Any, self: Any) -> float:
        exact = float(run(self))
        before = getattr(self, "before", exact)
        self.before = exact
        return 0.99 * exact + 0.01 * before

    wrap(module.Evaluation, "loss", loss)


@silent(
    "evaluation",
    "finetune eval.fraction=0.12 eval.every=2 training.micro_batch_size=2",
    "primus_images.training.backends.loop.evaluation",
    "evaluation",
)
def samples_that_fill_the_last_batch_count(module: Any) -> None:
    """huggingface/transformers#16716."""

    def batches_of(run: Any, data: Any, size: int, rank: int, ranks: int) -> Any:
        for number, batch in enumerate(run(data, size, rank, ranks)):
            yield {**batch, **data.batch((number * ranks + rank) * size, size)}

    wrap(module, "batches_of", batches_of)
