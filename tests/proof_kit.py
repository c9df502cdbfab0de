"""What a run leaves, and what the reference writes of a run that it agrees with."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from primus_images.recipes.architecture import architecture, shapes
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from primus_images.recipes.weights import model_of
from primus_images.training.judge.checks import Verdict
from primus_images.training.run import identity, logs, metrics, ranks
from primus_images.training.run.job import Job

# Of one token.
FLOPS = 3e6


def evidence(seen: Mapping[int, tuple[float, float]]) -> dict[str, Any]:
    """The ``proof.json`` of a healthy run in float32, for step → (loss, gradient norm)."""
    rows = [
        {
            "step": step,
            "data": [],
            "loss": loss,
            "grad_norm": norm,
            "rate": 0.01,
            "rates": [0.01],
            "own_gradient": True,
            "gaps": {"a.weight": (1e-6, "a.1.weight")},
            "missing": [],
            "stale": [],
            "biases": [],
            "apart": [],
            "blocks": [
                {
                    "name": "logits",
                    "balanced": False,
                    "certain": 1.0,
                    "typical": 1.0,
                    "token": 1.0,
                    "token_at": [0, 0],
                    "position": 1.0,
                    "position_at": 0,
                    "share": 0.0,
                    "noise": 1e-6,
                },
            ],
            "used_norm": norm,
            "rounded": 0.0,
            "update": {"gap": 0.0, "name": ""},
            "closest": 1.0,
            "regular": step == 1,
            "noise": {"loss": 1e-9, "grad_norm": 1e-8, "gaps": {"a.weight": (1e-7, "a.0.weight")}},
        }
        for step, (loss, norm) in seen.items()
    ]
    epsilon = {"share": 0.01, "rounding": 0.02, "deviation": 0.01, "biased": False, "eight": False}
    return {
        "precision": "fp32",
        "unseen": False,
        "on_cpu": True,
        "whole": True,
        "max_norm": 1.0,
        "summands": 2,
        "narrow_sums": False,
        "steps": rows,
        "parameters": {"missing": [], "odd": [], "count": 10, "trained": 10, "flops": FLOPS},
        "moved": [],
        "first": [],
        "saved": [],
        "checkpoints": [],
        "evaluations": [],
        "dropout": None,
        "tokens": 200.0,
        "constants": {"norm epsilon + 0.001": epsilon},
    }


FACTS = {"device": "cuda", "gpu": "NVIDIA H200", "gpu_units": 132}
H200 = Choices(backend="torchtitan", mode="pretrain", gpu="h200", precision="bf16")


def verdicts(passed: bool) -> tuple[Verdict, ...]:
    return (
        Verdict(
            name="exit code", passed=True, reason="all ranks ended with 0", measured="0", limit="0"
        ),
        Verdict(
            name="finite",
            passed=passed,
            reason="loss <b>is</b> NaN at step 3",
            measured="1 bad",
            limit="0 bad",
        ),
    )


def series_of(speed: float) -> logs.Series:
    line = (
        "step: {}  loss: {}  grad_norm: 1.0  memory: 47.5GiB(34%)  tps: {}  tflops: 500  mfu: N/A"
    )
    return logs.read_steps("\n".join(line.format(n, 20 - n, round(speed)) for n in range(1, 16)))


def finished_run(
    output: Path,
    *,
    recipe: str = "llama3.1-8b",
    choices: Choices = H200,
    speed: float = 9000.0,
    passed: bool = True,
    facts: dict[str, Any] = FACTS,
) -> Path:
    """The folder ``output`` as `primus train` leaves it, made by its own functions."""
    job = Job(name=output.name, recipe=resolve(recipe, (), choices), output=output)
    output.mkdir(parents=True)
    series = series_of(speed)
    summary = metrics.summarize(series, job.recipe, facts)
    result = {
        "exit_code": 0,
        "seconds": 61.5,
        "argv": [],
        "passed": passed,
        "verdicts": [vars(verdict) for verdict in verdicts(passed)],
        "summary": {**vars(summary), "mfu": vars(summary.mfu) if summary.mfu else None},
    }
    (output / "job.json").write_text(ranks.job_file(job), encoding="utf-8")
    (output / "result.json").write_text(json.dumps(result), encoding="utf-8")
    (output / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
    lines = "".join(json.dumps(row) + "\n" for row in metrics.rows(series, job.recipe, facts))
    (output / "metrics.jsonl").write_text(lines, encoding="utf-8")
    return output


def kept(folder: Path, recipe: Recipe) -> Path:
    """A complete checkpoint of ``recipe``."""
    folder.mkdir(parents=True)
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        (folder / name).write_bytes(name.encode() * 100)
    identity.seal(folder, identity.of(recipe))
    return folder


def sparse_weights(folder: Path) -> None:
    """Write the headers of all tensors of the folder's config.json, before a hole of their size."""
    model = {
        key.removeprefix("model."): setting.value
        for key, setting in model_of(folder, "llama3").items()
    }
    rows, end = {}, 0
    for name, shape in shapes(architecture(model)).items():
        rows[name] = {
            "dtype": "BF16",
            "shape": shape,
            "data_offsets": [end, end := end + 2 * math.prod(shape)],
        }
    head = json.dumps(rows).encode()
    (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head)
    os.truncate(folder / "model.safetensors", 8 + len(head) + end)
