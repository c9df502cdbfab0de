"""What torchtitan trains in a job: the recipe's model, its documents, and the metrics it logs."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from primus_images.recipes.architecture import Architecture, architecture
from primus_images.training.backends.torchtitan import render
from primus_images.training.text.tokens import Tokens

if TYPE_CHECKING:
    # It chooses the device when it is imported.
    from torchtitan.components.metrics import MetricsProcessor
else:
    MetricsProcessor = object


def register(job: Mapping[str, Any], tokens: Tokens) -> None:
    """Register what the job's ``torchtitan.toml`` names: a data set and a flavor of a model."""
    from torchtitan.protocols.train_spec import get_train_spec, register_train_spec

    _register_data_set(len(tokens.ends))
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
        "build_tokenizer_fn": lambda _config: _reader(tokens),
        "build_metrics_processor_fn": _builder_of_metrics(Path(job["output"])),
    }
    if model.moe.experts:
        from torchtitan.components.optimizer import build_optimizers_with_moe_load_balancing

        # Without it, the biases that balance experts stay zero in torchtitan's qwen3.
        changes["build_optimizers_fn"] = build_optimizers_with_moe_load_balancing
    register_train_spec(name, replace(spec, **changes))


def _register_data_set(documents: int) -> None:
    """Register documents by number, which the "tokenizer" turns to tokens."""
    from datasets import Dataset
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS

    DATASETS[render.DATASET] = DatasetConfig(
        path="",
        loader=lambda _path: Dataset.from_dict({"document": range(documents)}),
        sample_processor=lambda row: row["document"],
    )


def _reader(tokens: Tokens) -> SimpleNamespace:
    def encode(number: int, **_options: Any) -> list[int]:
        numbers: list[int] = tokens.tokens[tokens.document(number)].tolist()
        return numbers

    return SimpleNamespace(encode=encode)


def _builder_of_metrics(output: Path) -> Any:
    from torchtitan.components.metrics import MetricsProcessor

    kind = type("ExactMetrics", (Exact, MetricsProcessor), {"file": output / "exact.jsonl"})

    def build(config: Any, parallel_dims: Any, _model_args: Any = None, tag: Any = None) -> Any:
        return kind(config, parallel_dims, tag)

    return build


class Exact(MetricsProcessor):
    """The part of a MetricsProcessor that writes the figures of each step to ``file``.

    torchtitan's log rounds loss and gradient norm. ``stages`` is the group of a pipeline.
    """

    file: Path
    stages: Any = None

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
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)
        if dist.get_rank() == 0:
            figures = {
                "step": step,
                "loss": repr(float(global_avg_loss)),
                "grad_norm": repr(float(grad_norm)),
            }
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(figures) + "\n")


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
            changes[key] = replace(getattr(usual, key), **value)
    return replace(usual, **changes)
