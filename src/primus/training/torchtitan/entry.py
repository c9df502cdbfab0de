"""One rank of a torchtitan job: ``python -m primus.training.torchtitan.entry --job.config_file FILE``.

torchtitan's own trainer does the training. This module hands it, through its own registries, the model
dimensions and the corpus of the recipe (``job.json`` beside the config file), and notes what really ran.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from primus.training.torchtitan import cpu

__all__ = ["main"]

# The names under which torchtitan finds the recipe's model and corpus.
FLAVOR = "recipe"
DATASET = "recipe_corpus"


def main(argv: list[str]) -> None:
    """Train; torchtitan reads ``argv`` from ``sys.argv`` itself. Raises what torchtitan raises."""
    job = json.loads(_job_file(argv).read_text())
    import torch

    _store()
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        cpu.apply(int(job["threads"]))
    _register_corpus()
    exact = Path(job["output"]) / "exact.jsonl"
    _register_model(job, exact)

    from torchtitan.train import main as train

    from primus.training.torchtitan.observe import observed_trainer

    train(observed_trainer(Path(job["output"]) / "facts.json"))
    if on_cpu:
        cpu.leave()


def _store() -> None:
    """Let the ranks' store do without libuv where torch has none, as Debian's."""
    from torch.distributed import TCPStore

    try:
        TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=True)
    except RuntimeError as error:
        if "libuv" not in str(error):
            raise
        os.environ["USE_LIBUV"] = "0"


def _job_file(argv: list[str]) -> Path:
    for position, word in enumerate(argv):
        if word == "--job.config_file":
            return Path(argv[position + 1]).parent / "job.json"
    raise SystemExit("entry: --job.config_file FILE is missing")


def _register_corpus() -> None:
    from datasets import Dataset
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS

    def load(path: str) -> Any:
        # Read here, not by datasets.load_dataset: that writes a cache and may ask the hub.
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        return Dataset.from_list([json.loads(line) for line in lines])

    DATASETS[DATASET] = DatasetConfig(path="", loader=load, sample_processor=lambda sample: sample["text"])


def _register_model(job: dict[str, Any], exact: Path) -> None:
    from dataclasses import replace

    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.protocols.train_spec import get_train_spec, register_train_spec

    class ExactMetrics(MetricsProcessor):  # type: ignore[misc,unused-ignore]
        """torchtitan's metrics, plus loss and gradient norm to the last bit: its log rounds them."""

        def log(self, step: int, global_avg_loss: float, global_max_loss: float, grad_norm: float,
                extra_metrics: dict[str, Any] | None = None) -> None:  # fmt: skip
            super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)
            import torch.distributed as dist

            if dist.get_rank() == 0:
                line = {
                    "step": step,
                    "loss": repr(float(global_avg_loss)),
                    "grad_norm": repr(float(grad_norm)),
                }
                with exact.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")

    name = job["model"]["name"]
    spec = get_train_spec(name)
    arguments = type(next(iter(spec.model_args.values())))
    register_train_spec(
        name,
        replace(
            spec,
            model_args={**spec.model_args, FLAVOR: arguments(**job["model"]["args"])},
            build_metrics_processor_fn=lambda config, dims, _args=None, tag=None: ExactMetrics(config, dims, tag),
        ),
    )


if __name__ == "__main__":
    main(sys.argv[1:])
