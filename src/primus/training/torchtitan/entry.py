"""One rank of a torchtitan job: ``python -m primus.training.torchtitan.entry --job.config_file FILE``.

torchtitan's own trainer trains. This module registers the model dimensions and the corpus of the recipe (``job.json``
beside the config file) with it, and records what ran.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from primus.recipes.architecture import rebuilt
from primus.recipes.recipe import MOCK
from primus.training import gloo
from primus.training.compiled import keep_graphs, name_policies
from primus.training.corpus import HUB, Corpus, documents, row_reader
from primus.training.failure import noting
from primus.training.mock import texts
from primus.training.tcpstore import choose_store
from primus.training.torchtitan import cpu
from primus.training.torchtitan.render import model_arguments, model_name

# The names under which torchtitan finds the recipe's model and corpus.
FLAVOR = "recipe"
DATASET = "recipe_corpus"
MOCK_TEXTS = 2000


def main(argv: list[str]) -> None:
    """Train. torchtitan reads ``argv`` from ``sys.argv`` itself. Raises torchtitan's errors."""
    job = json.loads(_job_file(argv).read_text())
    import torch

    choose_store(Path(job["output"]))
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        cpu.apply(int(job["threads"]))
    if job["config"].get("compile.enable"):
        keep_graphs()
        name_policies()
    _register_corpus(int(job["config"].get("debug.seed") or 0), job)
    exact = Path(job["output"]) / "exact.jsonl"
    faster = tuple(job.get("turbo", ()))
    if faster:
        from primus.training.torchtitan import turbo

        turbo.patch(faster)
    _register_model(job, exact, faster)

    from torchtitan.train import main as train

    from primus.training.torchtitan.observe import observed_trainer

    if (tokenizer := str(job["assets"]["tokenizer"])).startswith(HUB):
        sys.argv += ["--model.hf_assets_path", _tokenizer_of(tokenizer.removeprefix(HUB))]
    examined = job["examined"] if job["blocks"] else ()
    facts = Path(job["output"]) / "facts.json"
    trainer = observed_trainer(facts, job["identity"], faster, judged=job["witness"], examined=examined)
    train(trainer)
    if on_cpu:
        gloo.leave()


def _job_file(argv: list[str]) -> Path:
    for position, word in enumerate(argv):
        if word == "--job.config_file":
            return Path(argv[position + 1]).parent / "job.json"
    raise SystemExit("entry: --job.config_file FILE is missing")


def _tokenizer_of(repository: str) -> str:
    """Download the tokenizer of a Hugging Face repository once. Returns its folder; the token is in HF_TOKEN."""
    from huggingface_hub import snapshot_download

    folder: str = snapshot_download(repository, allow_patterns=["tokenizer*", "special_tokens_map.json", "*.model"])
    return folder


def _register_corpus(seed: int, job: Mapping[str, Any]) -> None:
    from datasets import Dataset
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS

    given, tokenizer = job["assets"]["corpus"], job["assets"]["tokenizer"]
    folder = None if tokenizer.startswith(HUB) else Path(tokenizer)
    corpus = Corpus(path=Path(given), column=job["column"], tokenizer=folder)
    read = row_reader(corpus)

    def load(path: str) -> Any:
        if path == MOCK:
            return Dataset.from_list([{"text": text} for text in texts(seed, MOCK_TEXTS)])
        if path.startswith(HUB):
            from datasets import load_dataset

            return load_dataset(path.removeprefix(HUB), split="train", streaming=True)
        # Not with datasets.load_dataset, which writes a cache and may access the hub.
        return Dataset.from_list([{"text": text} for text in documents(corpus)])

    def text_of(sample: Mapping[str, Any]) -> str:
        return read(sample, given) if given.startswith(HUB) else sample["text"]

    DATASETS[DATASET] = DatasetConfig(path="", loader=load, sample_processor=text_of)


def _register_model(job: dict[str, Any], exact: Path, faster: tuple[str, ...]) -> None:
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.protocols.train_spec import get_train_spec, register_train_spec

    class ExactMetrics(MetricsProcessor):  # type: ignore[misc,unused-ignore]
        """torchtitan's metrics, and also unrounded loss and gradient norm, because its log rounds them."""

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

    model = rebuilt(job["model"])
    name = model_name(model.family)
    spec = get_train_spec(name)
    arguments = _arguments(type(next(iter(spec.model_args.values()))), model_arguments(model, job["precision"]))
    if faster:
        from primus.training.torchtitan.turbo import changed_spec

        spec = changed_spec(spec, faster)
    register_train_spec(
        name,
        replace(
            spec,
            model_args={**spec.model_args, FLAVOR: arguments},
            build_metrics_processor_fn=lambda config, dims, _args=None, tag=None: ExactMetrics(config, dims, tag),
        ),
    )


def _arguments(cls: type[Any], given: Mapping[str, Any]) -> Any:
    """Return torchtitan's arguments from plain values. A mapping becomes the dataclass that torchtitan expects."""
    nested = {entry.name: entry.default_factory for entry in fields(cls)}
    made = {
        key: _arguments(type(nested[key]()), value) if isinstance(value, dict) else value  # type: ignore[operator]
        for key, value in given.items()
    }
    return cls(**made)


if __name__ == "__main__":
    with noting(_job_file(sys.argv[1:]).parent):
        main(sys.argv[1:])
