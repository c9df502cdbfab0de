"""Runs of every backend that the reference repeats: everything that a run leaves agrees with it.

``tiny_runs.json`` has their figures. ``PRIMUS_WRITE_FIGURES=1`` writes it anew.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

torch = pytest.importorskip("torch")
for name in ("torchtitan", "megatron", "peft", "diffusers"):
    # An import of torchtitan would choose its device.
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)

import tiny_runs  # noqa: E402

from primus_images.recipes.resolve import resolve  # noqa: E402
from primus_images.recipes.setting import Choices  # noqa: E402
from primus_images.training.run.job import Job  # noqa: E402
from primus_images.training.run.outcome import Outcome  # noqa: E402

# Of libraries, which pytest would raise.
pytestmark = pytest.mark.filterwarnings("ignore")

FIGURES = Path(__file__).with_name("tiny_runs.json")
SHORT = "ranks=1 steps=3 local_batch=2 global_batch=4"
TEXT = f"{SHORT} seq_len=32"
CHATS = f"{SHORT} seq_len=96 assets.corpus=assets/answers.jsonl"
SMALL = (
    "model.hidden_size=48 model.heads=4 model.kv_heads=2 model.head_dim=8 model.ffn_size=48 "
    "model.layers=2"
)
EVALUATED = "eval.fraction=0.1 eval.every=2"
# name → recipe, backend, mode, precision, settings. {NAME} is the folder of that run.
RUNS = {
    "fsdp": (
        "llama3.1-8b fsdp pretrain fp32",
        f"{TEXT} {SMALL} {EVALUATED} checkpoint=1 saving.keep=2 training.tensorboard=true "
        "training.profile_step=2 training.lr_schedule=linear training.decay_steps=6 "
        "training.recompute=full",
    ),
    "fsdp-again": (
        "llama3.1-8b fsdp pretrain fp32",
        f"{TEXT} {SMALL} {EVALUATED} training.lr_schedule=linear training.decay_steps=6",
    ),
    "fsdp-bf16": (
        "llama3.1-8b fsdp pretrain bf16",
        f"{TEXT} {SMALL} training.master_dtype=bfloat16 sharding.reduce_dtype=bfloat16 "
        "training.lr_schedule=cosine",
    ),
    "fsdp-fp8": ("qwen2.5-7b fsdp pretrain fp8", TEXT),
    "finetune-full": (
        "llama3.1-8b finetune full fp32",
        f"{CHATS} {SMALL} {EVALUATED} eval.patience=1 finetune.save_weights=true "
        "finetune.packing=true",
    ),
    "finetune-lora": (
        "llama3.1-8b finetune lora fp32",
        f"{CHATS} {SMALL} finetune.lora.dropout=0.1 finetune.export=merged "
        "finetune.weights={finetune-full}/weights",
    ),
    "finetune-adapters": (
        "mixtral-8x7b finetune lora bf16",
        f"{TEXT} finetune.save_weights=true finetune.lora.rank=4",
    ),
    "finetune-gemma3": ("gemma3-4b finetune full fp32", TEXT),
    "finetune-gpt-oss": ("gpt-oss-20b finetune full fp32", TEXT),
    "finetune-llama4": ("llama4-scout finetune full fp32", TEXT),
    "flux": ("flux.1-dev flux pretrain fp32", f"{SHORT} checkpoint=3"),
    "flux-bf16": ("flux.1-dev flux pretrain bf16", SHORT),
    "torchtitan": (
        "llama3.1-8b torchtitan pretrain fp32",
        f"{TEXT} {EVALUATED} checkpoint=2",
    ),
    "torchtitan-moe": ("qwen3-30b-a3b torchtitan pretrain bf16", f"{TEXT} ep=1"),
    "torchtitan-mla": ("deepseek-16b torchtitan pretrain fp32", f"{TEXT} ep=1"),
    "torchtitan-fp8": ("llama3.1-8b torchtitan pretrain fp8", TEXT),
    "megatron": (
        "llama3.1-8b megatron pretrain bf16",
        f"{TEXT} {EVALUATED} checkpoint=2",
    ),
    "megatron-moe": ("qwen3-30b-a3b megatron pretrain fp32", f"{TEXT} ep=1"),
    "megatron-mla": ("deepseek-v3-proxy megatron pretrain fp32", f"{TEXT} ep=1 checkpoint=3"),
}
RESUMED = {"fsdp-again": "fsdp"}
ROOT = Path(mkdtemp())


@cache
def ended(name: str) -> Outcome:
    """Return the outcome of a run, which takes place once."""
    words, settings = RUNS[name]
    recipe, backend, mode, precision = words.split()
    folders = {other: folder(other) for other in RUNS if f"{{{other}}}" in settings}
    choices = Choices(backend=backend, mode=mode, gpu="cpu", proxy=True, precision=precision)
    overrides = [word.format(**folders) for word in settings.split()]
    resume_from = None
    if name in RESUMED:
        resume_from = folder(RESUMED[name]) / "checkpoint/step-2"
    job = Job(
        name=name,
        recipe=resolve(recipe, overrides, choices),
        output=ROOT / name,
        # The reference does not know the moments of an earlier run.
        judged=resume_from is None,
        resume_from=resume_from,
    )
    return tiny_runs.run(job)


def folder(name: str) -> Path:
    return ended(name).folder


# Of the machine, of its libraries, and of a sum in another order.
UNSTABLE = {"loaded", "versions", "weights_sha256", "matmul_flops"}


def figures(name: str) -> dict[str, Any]:
    """Return the figures of a run and those of the reference, without times and versions."""
    outcome = ended(name)
    findings = json.loads((outcome.folder / "proof.json").read_text())
    steps = []
    for step in findings["steps"]:
        gaps = step.pop("gaps", {})
        noise = step.pop("noise", {"gaps": {}})
        of_blocks = {}
        for row in step.pop("blocks"):
            of_blocks[row["name"]] = row.get("noise", 0.0)
        steps.append(
            {
                **step,
                "update": step["update"]["name"] if step["update"]["gap"] > 1e-3 else "",
                "blocks": len(of_blocks),
                "noise of blocks": max(of_blocks.values(), default=0.0),
                "kinds": len(gaps),
                "noise": noise.get("loss"),
                "noise of norm": noise.get("grad_norm"),
                "noise of gradients": _mean(noise["gaps"]),
            }
        )
    findings["steps"] = steps
    findings["constants"] = sorted(findings["constants"])
    findings["evaluations"] = [row["loss"] for row in findings["evaluations"]]
    facts = {key: value for key, value in outcome.facts.items() if key not in UNSTABLE}
    facts["linears"].pop("plain", None)
    files = [path for path in outcome.folder.rglob("*") if path.is_file()]
    names = sorted(str(path.relative_to(outcome.folder)) for path in files)
    kept = [name for name in names if not re.search("cache/|events|witness/", name)]
    series = [[step.loss, step.grad_norm, step.lr] for step in outcome.series.steps]
    return {"facts": facts, "proof": findings, "files": kept, "series": series}


def _mean(gaps: Mapping[str, Sequence[Any]]) -> float:
    return sum(gap for gap, _ in gaps.values()) / max(1, len(gaps))


def differences(one: Any, other: Any, place: str = "") -> Iterator[str]:
    """Yield what differs. Figures of rounding may differ by half."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in {**one, **other}:
            yield from differences(one.get(key), other.get(key), f"{place}/{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, pair in enumerate(zip(one, other, strict=True)):
            yield from differences(*pair, f"{place}/{number}")
    elif isinstance(one, float) and isinstance(other, float):
        tolerance = 0.5 if "noise" in place else 1e-3
        if one != pytest.approx(other, rel=tolerance, abs=1e-9):
            yield f"{place}: {one}, not {other}"
    elif one != other:
        yield f"{place}: {one}, not {other}"


@pytest.mark.parametrize("name", RUNS)
def test_run_and_reference_agree(name: str) -> None:
    outcome = ended(name)
    assert outcome.exit_code == 0
    assert [verdict for verdict in outcome.run.verdicts if not verdict.passed] == []


@pytest.mark.parametrize("name", sorted(RUNS.keys() - RESUMED.keys()))
def test_figures_are_those_of_the_file(name: str) -> None:
    now = figures(name)
    if os.environ.get("PRIMUS_WRITE_FIGURES"):
        rows = json.loads(FIGURES.read_text()) | {name: now}
        lines = [f"{json.dumps(key)}: {json.dumps(row)}" for key, row in sorted(rows.items())]
        FIGURES.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    expected = json.loads(FIGURES.read_text())[name]
    assert list(differences(now, expected)) == []


def test_resumed_run_ends_with_the_same_weights() -> None:
    whole, rest = ended("fsdp"), ended("fsdp-again")
    assert [step.step for step in rest.series.steps] == [3]
    assert rest.series.steps[0].loss == whole.series.steps[2].loss
    assert rest.facts["weights_sha256"] == whole.facts["weights_sha256"]
