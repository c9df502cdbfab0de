"""What primus adds to torchtitan's trainer: facts of the run, checked checkpoints, and evidence."""

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from primus_images.training.backends.loop.checkpoint import Schedule, host_has_room, rotate
from primus_images.training.backends.loop.session import settings_of
from primus_images.training.backends.torchtitan.evaluation import Evaluation
from primus_images.training.judge.witness import Witness
from primus_images.training.run import facts, identity, recompute
from primus_images.training.run.failure import text_of
from primus_images.training.run.fingerprint import of_samples
from primus_images.turbo.optimizations import active

if TYPE_CHECKING:
    # It chooses the device, and reads the arguments, when it is imported.
    from torchtitan.train import Trainer
else:
    Trainer = object


def observed_trainer(job: Mapping[str, Any]) -> type:
    """Return torchtitan's Trainer with the job's optimizations, observed.

    Only the optimizations change the training.
    """
    from torchtitan.train import Trainer

    trainer = Trainer
    if job["turbo"]:
        from primus_images.training.backends.torchtitan.turbo import changed_trainer

        trainer = changed_trainer(Trainer, job["turbo"])
    return type("ObservedTrainer", (Observed, trainer), {"job": job})


class Observed(Trainer):
    """The part of a Trainer that writes facts, and the run's identity into checkpoints.

    A judged run also records what the reference compares with: see
    :mod:`primus_images.training.judge.witness`. ``job`` is the content of ``job.json``.
    """

    job: Mapping[str, Any]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for part in self.model_parts:
            # torchtitan 0.2.2 builds DeepSeek's last norm without the model's epsilon.
            norm = getattr(part, "norm", None)
            if norm is not None and norm.eps is None:
                norm.eps = self.model_args.norm_eps
            if self.job["model"].get("tied_embeddings"):
                # torchtitan leaves out the embedding, which multiplies as the output layer does.
                self.metrics_processor.num_flops_per_token += 6 * part.output.weight.numel()
        self.output = Path(self.job["output"])
        # The labels of the step, by which the losses of a pipeline are divided.
        self.labels_of_step = torch.ones((), device=self.device)
        if self.parallel_dims.pp_enabled:
            self.pp_schedule._loss_fn = self._loss_of_stage
        self.witness: Witness | None = None
        mesh = self.parallel_dims.get_optional_mesh("pp")
        stages = mesh and mesh.get_group()
        self.metrics_processor.stages = stages
        self.facts = {
            **facts.static(self.model_parts, self.device.type, stages),
            "accumulation_steps": self.gradient_accumulation_steps,
            "seed": config.debug.seed,
            "vocab_size": self.model_args.vocab_size,
            "flops_per_unit": self._flops_per_token(),
        }
        self.evaluation: Evaluation | None = None
        if self.job["evaluation"]:
            self.evaluation = Evaluation(self.job, self)
        self.ended = False
        self.compared = False
        self.saving: Schedule | None = None
        seconds = self.job["saving"]["seconds"]
        if seconds:
            self.saving = Schedule(0, seconds, self.device)
        elif self.evaluation:
            self.saving = Schedule(self.evaluation.interval, 0, self.device)
        # The best checkpoint is kept, however old it is.
        self.keep = config.checkpoint.keep_latest_k
        self.checkpointer.keep_latest_k = 0
        self._wait_for_writes_without_room()
        self._save = self.checkpointer.save
        self._load = self.checkpointer.load
        self.checkpointer.save = self._save_sealed
        self.checkpointer.load = self._load_checked

    def _wait_for_writes_without_room(self) -> None:
        """Let the ranks wait for writes if the host has no room for copies of their tensors."""
        from torchtitan.components.checkpoint import AsyncMode

        if not self.checkpointer.enable or "checkpoint.async_mode" in self.job["config"]:
            return
        if not host_has_room(self.model_parts):
            self.checkpointer.async_mode = AsyncMode.DISABLED

    def train(self) -> None:
        """Train all steps."""
        if self.job["witness"]:
            self.witness = self._witness()
        super().train()
        if self.checkpointer.enable:
            self.checkpointer._async_wait()
        self._seal()
        last = facts.final(self.model_parts, self.step)
        self._write_facts({**last, "flops_per_unit": self._flops_per_token()})

    def _flops_per_token(self) -> float:
        """Return the factor between the tokens/s and the FLOP/s of the log."""
        return float(self.metrics_processor.num_flops_per_token)

    def train_step(self, data_iterator: Any) -> None:
        """Train one step, and record what a judge compares."""
        if "linears" in self.facts:
            super().train_step(data_iterator)
        else:
            self._first_step(data_iterator)
        if self.witness:
            self.witness.step(self.step)
            # Exclude the time of writing evidence from the throughput of steps.
            self.metrics_processor.time_last_log = time.perf_counter()
        every = self.job["judge_every"]
        # At the beginning, too: kernels that cannot be deterministic end the run there.
        if every and (not self.compared or self.step % every == 0):
            self.compared = True
            recompute.compare(self.model_parts, self.step, self._compute_again)
            self.metrics_processor.time_last_log = time.perf_counter()
        if self.evaluation and self.evaluation.due(self.step):
            with self._evidence():
                self.ended = self.evaluation.run(self.step)
            self.metrics_processor.time_last_log = time.perf_counter()

    def should_continue_training(self) -> bool:
        """Return whether there is a next step."""
        return not self.ended and bool(super().should_continue_training())

    def _evidence(self) -> AbstractContextManager[None]:
        """Let the witness count the time in the context for no step."""
        if self.witness:
            return self.witness.busy(self.step)
        return nullcontext()

    def _loss_of_stage(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.loss_fn(output, labels)
        return loss / self.labels_of_step

    def forward_backward_step(
        self,
        *,
        input_dict: dict[str, torch.Tensor],
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor,
    ) -> torch.Tensor:
        """Add up the gradients of a micro-batch, and return its part of the loss.

        torchtitan 0.2.2 divides the loss that a pipeline reports, but not its gradients, so
        clipping would always cut them.
        """
        divisor = global_valid_tokens
        if self.parallel_dims.pp_enabled:
            self.labels_of_step = global_valid_tokens
            divisor = torch.ones_like(global_valid_tokens)
        part: torch.Tensor = super().forward_backward_step(
            input_dict=input_dict, labels=labels, global_valid_tokens=divisor
        )
        return part

    def _first_step(self, data_iterator: Any) -> None:
        if self.witness:  # a checkpoint is loaded by now
            self.witness.first_weights(self.step - 1)
        compiled = self.job_config.compile.enable
        with facts.watching(self.model_parts, compiled=compiled) as kernels:
            super().train_step(data_iterator)
        self._write_facts(kernels)

    def batch_generator(self, data_iterable: Any) -> Iterator[Any]:
        """Yield the micro-batches, and keep the last one."""
        for batch in super().batch_generator(data_iterable):
            inputs, labels = batch
            tokens = inputs["input"]
            # Read from the tokens themselves, because the configuration only states the request.
            self.facts["local_batch_size"], self.facts["seq_len"] = tokens.shape
            self.metrics_processor.samples.append(of_samples(tokens, labels))
            if self.witness:
                self.witness.batch(inputs=tokens, labels=labels)
            self.micro_batch = batch
            yield batch

    def _compute_again(self) -> None:
        inputs, labels = self.micro_batch
        self.forward_backward_step(
            input_dict={name: tensor.to(self.device) for name, tensor in inputs.items()},
            labels=labels.to(self.device),
            global_valid_tokens=torch.ones((), device=self.device),
        )

    def _witness(self) -> Witness:
        rank = 0
        mesh = self.parallel_dims.get_optional_mesh("batch")
        if mesh:
            rank = mesh.get_local_rank()
        examined = ()
        if self.job["blocks"]:
            examined = self.job["examined"]
        return Witness(self.output, self.model_parts, rank, examined=examined)

    def _write_facts(self, more: Mapping[str, Any]) -> None:
        self.facts |= {**more, **active(self.job["turbo"])}
        facts.write(self.output / "facts.json", self.facts)

    def _save_sealed(self, curr_step: int, last_step: bool = False) -> None:
        self._raise_failure()
        self._seal()
        best = self.evaluation is not None and self.evaluation.standing.is_best(curr_step)
        # All ranks ask, whether it is the best or not.
        due = self.saving is None or self.saving.due(curr_step, last=last_step)
        if due and self.evaluation:
            self.evaluation.standing.spare(curr_step)
        if best or due:
            self._save(curr_step, last_step)
            if self.evaluation and dist.get_rank() == 0:
                self.evaluation.note(curr_step)
        self._seal()

    def _raise_failure(self) -> None:
        """Raise what made a write in the background fail, without waiting for the next one."""
        if not self.checkpointer.enable:
            return
        written = self.checkpointer.save_future
        if written is not None and written.done():
            written.result()

    def _seal(self) -> None:
        if dist.get_rank() != 0:
            return
        # Checkpoints saved in the background are complete some steps later.
        if not identity.seal_newest(self.output / "checkpoint", self.job["identity"]):
            return
        spared: list[Path] = []
        if self.evaluation:
            self.evaluation.remove_former()
            spared = self.evaluation.spared
        rotate(self.output, self.keep, spared)

    def _load_checked(self, *args: Any, **kwargs: Any) -> bool:
        """Load the checkpoint, but keep this run's settings of optimizers and schedules.

        torchtitan would go on with those of the old run.
        """
        folder = Path(self.job_config.checkpoint.initial_load_path or "")
        settings = [settings_of(optimizer) for optimizer in self.optimizers]
        rates = [list(schedule.base_lrs) for schedule in self.lr_schedulers]
        try:
            if self.job_config.checkpoint.initial_load_path:
                identity.verify_tensors(folder)
            loaded: bool = self._load(*args, **kwargs)
        except (CheckpointException, Exception) as error:
            raise SystemExit(f"{folder}: {_why_not_loaded(error)}") from error
        if loaded:
            self._restore(settings, rates)
        return loaded

    def _restore(self, settings: list[list[dict[str, Any]]], rates: list[list[float]]) -> None:
        for optimizer, settings_of_groups in zip(self.optimizers, settings, strict=True):
            groups = optimizer.param_groups
            for group, settings_of_group in zip(groups, settings_of_groups, strict=True):
                group.update(settings_of_group)
        for schedule, base_rates in zip(self.lr_schedulers, rates, strict=True):
            schedule.base_lrs = base_rates
            schedule._last_lr = []
            groups = schedule.optimizer.param_groups
            factors = schedule.lr_lambdas
            for group, base_rate, factor in zip(groups, base_rates, factors, strict=True):
                group["initial_lr"] = base_rate
                group["lr"] = base_rate * factor(schedule.last_epoch)
                schedule._last_lr.append(group["lr"])


def _why_not_loaded(error: BaseException) -> str:
    if "Missing key in checkpoint state_dict: dataloader.steps" in str(error):
        return (
            "an older version saved the checkpoint, and read the data in another order. `primus "
            "export` its weights, and start from them"
        )
    if "Missing key in checkpoint state_dict" in str(error):
        return (
            f"the checkpoint lacks a part of the run's state ({text_of(error)}). One that was "
            "saved with checkpoint.last_save_model_only=true has only weights. Resume from an "
            "earlier one"
        )
    return f"the checkpoint cannot be read: {text_of(error)}"
