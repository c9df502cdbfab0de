"""torchtitan's trainer, with notes on what really ran: see :mod:`primus.training.facts`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from primus.training import facts

__all__ = ["observed_trainer"]


def observed_trainer(facts_file: Path) -> type:
    """torchtitan's Trainer that also writes ``facts_file``; the training itself is unchanged."""
    from torchtitan.train import Trainer

    class ObservedTrainer(Trainer):  # type: ignore[misc,unused-ignore]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.facts = {
                **facts.static(self.model_parts, self.device.type),
                "accumulation_steps": self.gradient_accumulation_steps,
                "seed": config.debug.seed,
                "vocab_size": self.model_args.vocab_size,
            }

        def batch_generator(self, data_iterable: Any) -> Iterator[Any]:
            for batch in super().batch_generator(data_iterable):
                # Told from the tokens themselves: the configuration only says what was asked.
                self.facts["local_batch_size"], self.facts["seq_len"] = batch[0]["input"].shape
                yield batch

        def train_step(self, data_iterator: Any) -> None:
            if "linears" in self.facts:
                super().train_step(data_iterator)
                return
            with facts.watching(self.model_parts, compiled=self.job_config.compile.enable) as seen:
                super().train_step(data_iterator)
            self.facts.update(seen)
            facts.write(facts_file, self.facts)

        def train(self) -> None:
            super().train()
            self.facts["weights_sha256"] = facts.digest(self.model_parts)
            self.facts["last_step"] = self.step
            facts.write(facts_file, self.facts)

    return ObservedTrainer
