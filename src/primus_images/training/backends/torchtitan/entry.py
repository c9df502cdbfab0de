"""One rank of a torchtitan job: ``python -m primus_images.training.backends.torchtitan.entry
OUTPUT_FOLDER``.

torchtitan's own trainer trains. This module registers the model dimensions and the corpus of the
recipe (``job.json`` there) with it, and records what ran.
"""

import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from primus_images.recipes.architecture import Architecture, architecture
from primus_images.refusals import refusal
from primus_images.training.backends import gloo
from primus_images.training.backends.gloo import choose_store
from primus_images.training.backends.loop.process import keep_graphs
from primus_images.training.backends.torchtitan import cpu, render
from primus_images.training.judge.witness import Witness
from primus_images.training.run import facts, identity, recompute
from primus_images.training.run.failure import noting, text_of
from primus_images.training.text import tokens
from primus_images.turbo.optimizations import active


def observed_trainer(job: Mapping[str, Any]) -> type:
    """Return a subclass of torchtitan's Trainer that writes the facts of the run, and its identity
    into checkpoints.

    Only the job's optimizations change the training. A judged run also records what the reference
    compares with: :mod:`primus_images.training.judge.witness`.
    """
    from torchtitan.train import Trainer

    base: Any = Trainer
    if job["turbo"]:
        from primus_images.training.backends.torchtitan.turbo import changed_trainer

        base = changed_trainer(Trainer, job["turbo"])
    output = Path(job["output"])

    class ObservedTrainer(base):  # type: ignore[misc,unused-ignore]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for part in self.model_parts:
                # torchtitan 0.2.2 builds DeepSeek's last norm without the model's epsilon.
                norm = getattr(part, "norm", None)
                if norm is not None and norm.eps is None:
                    norm.eps = self.model_args.norm_eps
            stages = self.parallel_dims.get_optional_mesh("pp")
            self.metrics_processor.stages = stages and stages.get_group()
            self.facts = {
                **facts.static(self.model_parts, self.device.type, self.metrics_processor.stages),
                "accumulation_steps": self.gradient_accumulation_steps,
                "seed": config.debug.seed,
                "vocab_size": self.model_args.vocab_size,
                "flops_per_unit": float(self.metrics_processor.num_flops_per_token),
            }
            self._save, self._load = self.checkpointer.save, self.checkpointer.load
            self.checkpointer.save, self.checkpointer.load = self._save_sealed, self._load_checked

        def _save_sealed(self, *args: Any, **kwargs: Any) -> None:
            self._seal()
            self._save(*args, **kwargs)
            self._seal()

        def _seal(self) -> None:
            # Checkpoints saved in the background are complete some steps later.
            if dist.get_rank() == 0:
                keep = self.job_config.checkpoint.keep_latest_k
                identity.seal_newest(output / "checkpoint", job["identity"], keep)

        def _load_checked(self, *args: Any, **kwargs: Any) -> bool:
            """Load the checkpoint, but keep this run's optimizer settings: torchtitan uses those of
            the old run.
            """
            folder = Path(self.job_config.checkpoint.initial_load_path or "")
            groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
            ours = [
                {key: value for key, value in group.items() if key != "params"} for group in groups
            ]
            rates = [list(schedule.base_lrs) for schedule in self.lr_schedulers]
            try:
                if self.job_config.checkpoint.initial_load_path:
                    identity.verify_tensors(folder)
                    self._forget_place(folder)
                loaded: bool = self._load(*args, **kwargs)
            except (CheckpointException, Exception) as error:
                why = f"the checkpoint cannot be read: {text_of(error)}"
                if "Missing key in checkpoint state_dict" in str(error):
                    why = refusal("partial_state", error=text_of(error)).message
                raise SystemExit(f"{folder}: {why}") from error
            if loaded:
                groups = [
                    group for optimizer in self.optimizers for group in optimizer.param_groups
                ]
                for group, settings in zip(groups, ours, strict=True):
                    group.update(settings)
                for schedule, base_lrs in zip(self.lr_schedulers, rates, strict=True):
                    schedule.base_lrs, groups = base_lrs, schedule.optimizer.param_groups
                    for group, base, factor in zip(
                        groups, base_lrs, schedule.lr_lambdas, strict=True
                    ):
                        group |= {"initial_lr": base, "lr": base * factor(schedule.last_epoch)}
                    schedule._last_lr = [group["lr"] for group in groups]
            return loaded

        def _forget_place(self, folder: Path) -> None:
            """Restart the data if the number of data-parallel ranks has changed, which the user has
            accepted.
            """
            now = job["identity"]["data_parallel"]
            before = identity.saved(folder).get("data_parallel")
            if before not in (None, now):
                self.checkpointer.exclude_from_loading = [
                    *self.checkpointer.exclude_from_loading,
                    "dataloader",
                ]
                if dist.get_rank() == 0:
                    print(
                        f"primus: the data start over: data_parallel was {before}, and is {now} "
                        "now",
                        flush=True,
                    )

        def batch_generator(self, data_iterable: Any) -> Iterator[Any]:
            for batch in super().batch_generator(data_iterable):
                # Read from the tokens themselves, because the configuration only states the
                # request.
                self.facts["local_batch_size"], self.facts["seq_len"] = batch[0]["input"].shape
                if self.witness:
                    self.witness.batch(inputs=batch[0]["input"], labels=batch[1])
                self.micro_batch = batch
                yield batch

        def train_step(self, data_iterator: Any) -> None:
            if "linears" in self.facts:
                super().train_step(data_iterator)
            else:
                if self.witness:  # a checkpoint is loaded by now
                    self.witness.first_weights(self.step - 1)
                with facts.watching(
                    self.model_parts, compiled=self.job_config.compile.enable
                ) as seen:
                    super().train_step(data_iterator)
                self._write_facts(seen)
            if self.witness:
                self.witness.step(self.step)
                # Exclude the time of writing evidence from the throughput of steps.
                self.metrics_processor.time_last_log = time.perf_counter()
            if job["verify_steps"] and self.step % job["verify_steps"] == 0:
                recompute.compare(self.model_parts, self.step, self._compute_again)
                self.metrics_processor.time_last_log = time.perf_counter()

        def _compute_again(self) -> None:
            inputs, labels = self.micro_batch
            placed = {name: tensor.to(self.device) for name, tensor in inputs.items()}
            one = torch.ones((), device=self.device)
            self.forward_backward_step(
                input_dict=placed, labels=labels.to(self.device), global_valid_tokens=one
            )

        def _write_facts(self, observed: Mapping[str, Any]) -> None:
            self.facts |= {**observed, **active(job["turbo"])}
            facts.write(output / "facts.json", self.facts)

        def train(self) -> None:
            mesh = self.parallel_dims.get_optional_mesh("batch")
            rank = 0
            if mesh:
                rank = mesh.get_local_rank()
            examined = ()
            if job["blocks"]:
                examined = job["examined"]
            if job["witness"]:
                self.witness = Witness(output, self.model_parts, rank, examined=examined)
            else:
                self.witness = None
            super().train()
            self._seal()
            self._write_facts(facts.final(self.model_parts, self.step))

    return ObservedTrainer


def main(folder: Path) -> None:
    """Train the job in ``folder``. torchtitan reads ``sys.argv`` itself. Raises torchtitan's
    errors.
    """
    job = json.loads((folder / "job.json").read_text())
    choose_store(folder)
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        cpu.apply()
    if job["config"].get("compile.enable"):
        keep_graphs()
    written = tokens.stored(folder / "cache")
    if job["turbo"]:
        from primus_images.training.backends.torchtitan import turbo

        turbo.patch(job["turbo"])
    _register(job, written)

    from torchtitan.train import main as train

    train(observed_trainer(job))
    if on_cpu:
        gloo.leave()


def _register(job: Mapping[str, Any], written: tokens.Tokens) -> None:
    """Register the recipe's model, and the documents of its corpus by number, which the "tokenizer"
    turns to tokens.
    """
    from datasets import Dataset
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import build_optimizers_with_moe_load_balancing
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS
    from torchtitan.protocols.train_spec import get_train_spec, register_train_spec

    class ExactMetrics(MetricsProcessor):  # type: ignore[misc,unused-ignore]
        stages: Any = None

        def log(
            self,
            step: int,
            global_avg_loss: float,
            global_max_loss: float,
            grad_norm: float,
            extra_metrics: dict[str, Any] | None = None,
        ) -> None:
            if self.stages is not None:
                # Only the last pipeline stage has a loss. torchtitan logs negative numbers of the
                # others.
                device = self.device_memory_monitor.device
                both = torch.tensor([float(global_avg_loss), float(global_max_loss)], device=device)
                dist.all_reduce(both, dist.ReduceOp.MAX, self.stages)
                global_avg_loss, global_max_loss = both.tolist()
            super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)
            # torchtitan's log rounds loss and gradient norm.
            if dist.get_rank() == 0:
                line = {
                    "step": step,
                    "loss": repr(float(global_avg_loss)),
                    "grad_norm": repr(float(grad_norm)),
                }
                with (Path(job["output"]) / "exact.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")

    DATASETS[render.DATASET] = DatasetConfig(
        path="",
        loader=lambda _path: Dataset.from_dict({"document": range(len(written.ends))}),
        sample_processor=lambda row: row["document"],
    )
    documents = SimpleNamespace(
        encode=lambda number, **_: written.tokens[written.document(number)].tolist()
    )
    model = architecture(job["model"])
    name = render.model_name(model)
    spec = get_train_spec(name)
    kind = type(next(iter(spec.model_args.values())))
    arguments = _arguments(kind, render.model_arguments(model, job["precision"]))
    if job["turbo"]:
        from primus_images.training.backends.torchtitan.turbo import changed_spec

        spec = changed_spec(spec, job["turbo"])
    register_train_spec(
        name,
        replace(
            spec,
            state_dict_adapter=adapter_of(spec.state_dict_adapter, model),
            model_args={**spec.model_args, render.FLAVOR: arguments},
            build_tokenizer_fn=lambda _config: documents,
            # Without it, the biases that balance experts stay zero in torchtitan's qwen3.
            build_optimizers_fn=build_optimizers_with_moe_load_balancing
            if model.moe.experts
            else spec.build_optimizers_fn,
            build_metrics_processor_fn=lambda config, dims, _args=None, tag=None: ExactMetrics(
                config, dims, tag
            ),
        ),
    )


def adapter_of(adapter: Any, model: Architecture) -> Any:
    """Return torchtitan's reader of Hugging Face's files, which for DeepSeek demands biases that
    only V3 has.
    """
    if render.model_name(model) != "deepseek_v3" or model.moe.score == "sigmoid":
        return adapter

    class WithoutBiases(adapter):  # type: ignore[misc]
        def to_hf(self, state_dict: Mapping[str, Any]) -> Any:
            return super().to_hf(
                {name: t for name, t in state_dict.items() if not name.endswith("expert_bias")}
            )

    return WithoutBiases


def _arguments(cls: type[Any], values: Mapping[str, Any]) -> Any:
    usual = cls()
    nested = {
        key: replace(getattr(usual, key), **value)
        for key, value in values.items()
        if isinstance(value, dict)
    }
    return replace(usual, **{**values, **nested})


if __name__ == "__main__":
    output = Path(sys.argv[1])
    sys.argv[1:] = ["--job.config_file", str(output / render.FILE)]
    with noting(output):
        main(output)
