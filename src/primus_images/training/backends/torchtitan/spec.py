"""What torchtitan trains in a job: the recipe's model, its documents, and the metrics it logs."""

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import torch
import torch.distributed as dist

from primus_images.recipes.architecture import Architecture, architecture
from primus_images.training.backends.loop.trackers import (
    NAMES,
    Tracker,
    peak_flops,
    shares_of_peak,
    trackers_of,
)
from primus_images.training.backends.torchtitan import render
from primus_images.training.run import fingerprint
from primus_images.training.run.metrics import of_recipe_unit

if TYPE_CHECKING:
    # It chooses the device when it is imported.
    from torchtitan.components.metrics import MetricsProcessor
else:
    MetricsProcessor = object


def register(job: Mapping[str, Any]) -> None:
    """Register the data of the job, and the model's flavor that its ``torchtitan.toml`` names."""
    from torchtitan.protocols.train_spec import get_train_spec, register_train_spec

    model = architecture(job["model"])
    name = render.model_name(model)
    spec = get_train_spec(name)
    kind = type(next(iter(spec.model_args.values())))
    flavor = arguments(kind, render.model_arguments(model, job["precision"]))
    if job["turbo"]:
        from primus_images.training.backends.torchtitan.turbo import changed_spec

        spec = changed_spec(spec, job["turbo"])
    changes = {
        "state_dict_adapter": adapter_of(spec.state_dict_adapter, model),
        "model_args": {**spec.model_args, render.FLAVOR: flavor},
        "build_tokenizer_fn": None,
        "build_dataloader_fn": _builder_of_loader(job),
        "build_metrics_processor_fn": _builder_of_metrics(job),
    }
    if model.moe.experts:
        from torchtitan.components.optimizer import build_optimizers_with_moe_load_balancing

        # Without it, the biases that balance experts stay zero in torchtitan's qwen3.
        changes["build_optimizers_fn"] = build_optimizers_with_moe_load_balancing
    register_train_spec(name, replace(spec, **changes))


def _builder_of_loader(job: Mapping[str, Any]) -> Any:
    from primus_images.training.backends.torchtitan.data import loader_of

    def build(*, dp_rank: int, job_config: Any, **_: Any) -> Any:
        return loader_of(job, dp_rank, job_config)

    return build


def _builder_of_metrics(job: Mapping[str, Any]) -> Any:
    from torchtitan.components.metrics import MetricsProcessor

    kind = type("ExactMetrics", (Exact, MetricsProcessor), {"job": job})

    def build(config: Any, parallel_dims: Any, _model_args: Any = None, tag: Any = None) -> Any:
        return kind(config, parallel_dims, tag)

    return build


class Exact(MetricsProcessor):
    """The part of a MetricsProcessor that writes the figures of each step.

    torchtitan's log rounds loss and gradient norm, and its own writers have other names, and an MFU
    of another GPU. ``job`` is the content of ``job.json``, ``stages`` the group of a pipeline.
    """

    job: Mapping[str, Any]
    stages: Any = None

    def __init__(self, config: Any, parallel_dims: Any, tag: Any = None) -> None:
        super().__init__(config, parallel_dims, tag)
        job = self.job
        settings = job["config"]
        self.began = self.time_last_log
        self.per_unit = of_recipe_unit(architecture(job["model"]), settings["training.seq_len"])
        self.tokens_of_step = job["global_batch"] * settings["training.seq_len"]
        self.peak: float | None = None
        if torch.cuda.is_available():
            gpu = torch.cuda.get_device_properties(0)
            self.peak = peak_flops(gpu.name, gpu.multi_processor_count, job["precision"])
        # The sums of the numbers of the samples of each micro-batch since the last log.
        self.samples: list[int] = []
        self.trackers: list[Tracker] = []
        if dist.get_rank() == 0:
            names = [name for name in NAMES if settings.get(f"metrics.enable_{name}")]
            self.trackers = trackers_of(names, Path(job["output"]), settings)

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Log a step."""
        if self.stages is not None:
            # Only the last stage has a loss. torchtitan logs negative numbers of the others.
            device = self.device_memory_monitor.device
            losses = torch.tensor([float(global_avg_loss), float(global_max_loss)], device=device)
            dist.all_reduce(losses, dist.ReduceOp.MAX, self.stages)
            global_avg_loss, global_max_loss = losses.tolist()
        now = time.perf_counter()
        # Of one rank: those that share samples divide their tokens.
        counted = self.ntokens_since_last_log / self.parallel_dims.non_data_parallel_size
        speed = counted / (now - self.time_last_log)
        data_hash = self._data_hash()
        # The log begins the count of memory anew.
        memory = self.device_memory_monitor.get_peak_stats().max_reserved_gib
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)
        if dist.get_rank() != 0:
            return
        figures = {
            "loss": float(global_avg_loss),
            "grad_norm": float(grad_norm),
            "lr": float((extra_metrics or {})["lr"]),
            "tokens": step * self.tokens_of_step,
            "tokens_per_second": speed,
            "seconds": round(now - self.began, 3),
            "memory_gib": memory,
        }
        self._write(step, figures, counted, data_hash)
        self._track(step, figures)

    def _data_hash(self) -> str:
        """Return the fingerprint of the samples since the last log, of all ranks."""
        device = self.device_memory_monitor.device
        total = torch.tensor(fingerprint.added(self.samples), device=device)
        self.samples = []
        mesh = self.parallel_dims.get_optional_mesh("batch")
        if mesh:
            dist.all_reduce(total, group=mesh.get_group())
        return fingerprint.written(int(total))

    def _write(
        self, step: int, figures: Mapping[str, float], counted: float, data_hash: str
    ) -> None:
        exact: dict[str, object] = {"step": step, "tokens": counted, "data_hash": data_hash}
        for name in ("loss", "grad_norm", "lr", "seconds"):
            exact[name] = repr(figures[name])
        with (Path(self.job["output"]) / "exact.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(exact) + "\n")

    def _track(self, step: int, figures: Mapping[str, float]) -> None:
        rates = self.per_unit.tera(figures["tokens_per_second"])
        for tracker in self.trackers:
            tracker.log({**figures, **rates, **shares_of_peak(rates, self.peak)}, step)

    def close(self) -> None:
        """End the trackers."""
        super().close()
        for tracker in self.trackers:
            tracker.close()


def adapter_of(adapter: Any, model: Architecture) -> Any:
    """Return torchtitan's reader of Hugging Face's files.

    For DeepSeek, torchtitan's own demands biases that only V3 has.
    """
    if render.model_name(model) != "deepseek_v3" or model.moe.score == "sigmoid":
        return adapter

    class WithoutBiases(adapter):
        def to_hf(self, state_dict: Mapping[str, Any]) -> Any:
            return super().to_hf(
                {
                    name: tensor
                    for name, tensor in state_dict.items()
                    if not name.endswith("expert_bias")
                }
            )

    return WithoutBiases


def arguments(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """Return torchtitan's arguments ``kind`` of a model, with ``values``, also nested ones."""
    usual = kind()
    changes = dict(values)
    for key, value in values.items():
        if isinstance(value, dict):
            part = getattr(usual, key)
            if part is None:
                # Llama 4 has no scaling by default; its type is Scaling | None.
                part = get_args(get_type_hints(kind)[key])[0]()
            changes[key] = replace(part, **value)
    return replace(usual, **changes)
