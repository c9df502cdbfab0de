"""torchtitan's trainer, which also records what ran: see :mod:`primus.training.facts`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from primus.training import facts, identity, shards
from primus.training.failure import text_of
from primus.training.job import steps
from primus.training.straggler import Pace
from primus.training.witness import Witness
from primus.turbo.optimizations import active


def observed_trainer(
    facts_file: Path,
    known: Mapping[str, Any],
    faster: Sequence[str] = (),
    *,
    judged: bool = False,
    examined: Sequence[int] = (),
) -> type:
    """Return a subclass of torchtitan's Trainer that writes ``facts_file``, and the identity ``known`` into
    checkpoints.

    Only the optimizations in ``faster`` change the training. A ``judged`` run also records what the reference
    compares with: :mod:`primus.training.witness`; what blocks compute at the steps ``examined``.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.api import CheckpointException
    from torchtitan.train import Trainer

    base: Any = Trainer
    if faster:
        from primus.training.torchtitan.turbo import changed_trainer

        base = changed_trainer(Trainer, faster)

    class ObservedTrainer(base):  # type: ignore[misc,unused-ignore]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for part in self.model_parts:
                # torchtitan 0.2.2 builds DeepSeek's last norm without the model's epsilon.
                if (norm := getattr(part, "norm", None)) is not None and norm.eps is None:
                    norm.eps = self.model_args.norm_eps
            stages = self.parallel_dims.get_optional_mesh("pp")
            if stages is not None:
                self._log = self.metrics_processor.log
                self.metrics_processor.log = self._log_of_all_stages
            self.facts = {
                **facts.static(self.model_parts, self.device.type, stages and stages.get_group()),
                "accumulation_steps": self.gradient_accumulation_steps,
                "seed": config.debug.seed,
                "vocab_size": self.model_args.vocab_size,
                "flops_per_unit": float(self.metrics_processor.num_flops_per_token),
            }
            self._save, self._load = self.checkpointer.save, self.checkpointer.load
            self.checkpointer.save, self.checkpointer.load = self._save_sealed, self._load_told

        def _log_of_all_stages(self, step: int, average: Any, largest: Any, *given: Any, **named: Any) -> None:
            """Log the loss on the last pipeline stage only. For the others, torchtitan logs negative numbers."""
            both = torch.tensor([float(average), float(largest)], device=self.device)
            dist.all_reduce(both, dist.ReduceOp.MAX, self.parallel_dims.get_mesh("pp").get_group())
            self._log(step, *both.tolist(), *given, **named)

        def _save_sealed(self, *given: Any, **named: Any) -> None:
            self._seal()
            self._save(*given, **named)
            self._seal()

        def _seal(self) -> None:
            """Seal every complete checkpoint. Those saved in the background are complete some steps later."""
            if dist.get_rank() == 0:
                for folder in steps(facts_file.parent / "checkpoint"):
                    if (folder / ".metadata").is_file() and not (folder / identity.FILE).exists():
                        identity.seal(folder, known)

        def _load_told(self, *given: Any, **named: Any) -> bool:
            """Load the checkpoint, but keep this run's optimizer settings: torchtitan uses those of the old run."""
            folder = Path(self.job_config.checkpoint.initial_load_path or "")
            ours = [dict(group) for group in self._parameter_groups()]
            rates = [list(schedule.base_lrs) for schedule in self.lr_schedulers]
            try:
                if self.job_config.checkpoint.initial_load_path:
                    shards.verify(folder)
                    self._forget_place(folder)
                loaded: bool = self._load(*given, **named)
            except (CheckpointException, Exception) as error:
                if "Missing key in checkpoint state_dict" in str(error):
                    raise SystemExit(
                        f"{folder}: the checkpoint lacks a part of the run's state ({text_of(error)}). One that was "
                        "saved with checkpoint.last_save_model_only=true has only weights. Resume from an earlier one"
                    ) from error
                raise SystemExit(f"{folder}: the checkpoint cannot be read: {text_of(error)}") from error
            if loaded:
                for group, settings in zip(self._parameter_groups(), ours, strict=True):
                    group.update({key: value for key, value in settings.items() if key != "params"})
                for schedule, base_lrs in zip(self.lr_schedulers, rates, strict=True):
                    schedule.base_lrs = base_lrs
                    follow(schedule)
            return loaded

        def _parameter_groups(self) -> list[dict[str, Any]]:
            return [group for optimizer in self.optimizers for group in optimizer.param_groups]

        def _forget_place(self, folder: Path) -> None:
            """Restart the data if the number of data-parallel ranks has changed, which the user has accepted."""
            field = "data_parallel"
            if (before := identity.saved(folder).get(field)) not in (None, known[field]):
                self.checkpointer.exclude_from_loading = [*self.checkpointer.exclude_from_loading, "dataloader"]
                if dist.get_rank() == 0:
                    print(f"primus: the data start over: {field} was {before}, and is {known[field]} now", flush=True)

        def batch_generator(self, data_iterable: Any) -> Iterator[Any]:
            for batch in super().batch_generator(data_iterable):
                # Read from the tokens themselves, because the configuration only states the request.
                self.facts["local_batch_size"], self.facts["seq_len"] = batch[0]["input"].shape
                if self.witness:
                    self.witness.batch(inputs=batch[0]["input"], labels=batch[1])
                yield batch

        def train_step(self, data_iterator: Any) -> None:
            if self.witness and "linears" not in self.facts:
                # At this point, a checkpoint is loaded.
                self.witness.first_weights(self.step - 1)
            watched = "linears" not in self.facts
            self._watched_step(data_iterator)
            if not watched:
                self.pace.step(self.step)
            if self.witness:
                self.witness.step(self.step)
                # Exclude the time of writing evidence from the throughput of steps.
                self.metrics_processor.time_last_log = time.perf_counter()
            self.pace.start()

        def _watched_step(self, data_iterator: Any) -> None:
            if "linears" in self.facts:
                super().train_step(data_iterator)
                return
            with facts.watching(self.model_parts, compiled=self.job_config.compile.enable) as seen:
                super().train_step(data_iterator)
            self.facts.update(seen)
            if faster:
                self.facts.update(active(faster))
            facts.write(facts_file, self.facts)

        def train(self) -> None:
            self.witness = self._witness() if judged else None
            self.pace = Pace(facts_file.parent, self.device.type)
            super().train()
            self._seal()
            self.facts["weights_sha256"] = facts.digest(self.model_parts)
            self.facts["last_step"] = self.step
            if faster:
                self.facts.update(active(faster))
            facts.write(facts_file, self.facts)

        def _witness(self) -> Witness:
            mesh = self.parallel_dims.get_optional_mesh("batch")
            rank = mesh.get_local_rank() if mesh else 0
            return Witness(facts_file.parent, self.model_parts, rank, examined=examined)

    return ObservedTrainer


def follow(schedule: Any) -> None:
    """Set the learning rates of ``schedule`` (a LambdaLR) for its step, as if it had always had its settings."""
    rates = zip(schedule.optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True)
    for group, base, factor in rates:
        group["initial_lr"] = base
        group["lr"] = base * factor(schedule.last_epoch)
    schedule._last_lr = [group["lr"] for group in schedule.optimizer.param_groups]
