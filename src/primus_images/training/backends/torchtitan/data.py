"""The micro-batches of torchtitan's ranks: samples by number, as in every backend."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchtitan.components.dataloader import BaseDataLoader
from typing_extensions import override

from primus_images.recipes.recipe import MOCK
from primus_images.training.backends.loop import data
from primus_images.training.backends.loop.session import Data
from primus_images.training.text.tokens import stored

MicroBatch = tuple[dict[str, Tensor], Tensor]


class _Share(Dataset[MicroBatch]):
    """The micro-batches of one of ``ranks``, by number.

    Step s takes the samples from (s − 1) · global batch on, and each rank as many of them, one
    after the other. So what a step trains on does not depend on the number of ranks.
    """

    def __init__(self, samples: Data, size: int, accumulation: int, rank: int, ranks: int) -> None:
        self._samples = samples
        self._size = size
        self._accumulation = accumulation
        self._rank = rank
        self._ranks = ranks

    def __getitem__(self, number: int) -> MicroBatch:
        step, micro_batch = divmod(number, self._accumulation)
        of_step = step * self._ranks + self._rank
        first = (of_step * self._accumulation + micro_batch) * self._size
        batch = self._samples.batch(first, self._size)
        return {"input": batch["input_ids"]}, batch["labels"]


class Loader(BaseDataLoader):
    """The micro-batches of a rank without end. Its state is the number of steps that were read.

    ``options`` are torchtitan's of ``training.dataloader``.
    """

    def __init__(self, share: _Share, accumulation: int, options: Mapping[str, Any]) -> None:
        self._share = share
        self._accumulation = accumulation
        self._options = dict(options)
        if not self._options["num_workers"]:
            # PyTorch refuses both without workers.
            del self._options["prefetch_factor"]
            del self._options["persistent_workers"]
        self._read = 0

    @override
    def __iter__(self) -> Iterator[MicroBatch]:
        numbers = range(self._read, sys.maxsize)
        loader = DataLoader(self._share, batch_size=None, sampler=numbers, **self._options)
        for batch in loader:
            self._read += 1
            yield batch

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._read // self._accumulation}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._read = state_dict["steps"] * self._accumulation


def loader_of(job: Mapping[str, Any], rank: int, config: Any) -> Loader:
    """Return the loader of data-parallel ``rank``; ``config`` is torchtitan's."""
    training = config.training
    seed = config.debug.seed or 0
    if job["assets"]["corpus"] == MOCK:
        samples: Data = data.Mock(seed, training.seq_len, job["model"]["vocab_size"])
    else:
        tokens = stored(Path(job["output"]) / "cache")
        samples = data.stream(tokens, training.seq_len, seed)
    accumulation = job["accumulation"]
    share = _Share(
        samples, training.local_batch_size, accumulation, rank, ranks=job["data_parallel"]
    )
    return Loader(share, accumulation, asdict(training.dataloader))
