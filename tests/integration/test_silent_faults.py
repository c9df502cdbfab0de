"""Silent faults in real two-rank runs: the loss falls and nothing complains, but the reference names each."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).with_name("inside")))
from silent_jobs import SILENT, failed, job_of

from primus.training.job import Job

pytestmark = pytest.mark.integration

INSIDE = Path(__file__).with_name("inside")
RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "silent-faults.json"
BACKENDS = ("torchtitan", "fsdp", "finetune", "megatron")
# One of each class of fault, over all backends: CI runs these; `--slow` runs all.
QUICK = (
    "megatron_model_built_from_the_next_seed", "fsdp_one_tensor_learns_a_little_faster",
    "torchtitan_attention_not_causal", "torchtitan_rate_zero_later", "fsdp_labels_equal_inputs",
    "fsdp_tokens_counted_twice", "finetune_adapter_scaled_twice", "megatron_output_projections_as_large_as_others",
    "torchtitan_gradients_summed_in_bf16", "fsdp_moments_not_saved", "megatron_stale_copies",
    "torchtitan_one_rank_sleeps_in_every_layer", "torchtitan_angles_rounded_to_fp8",
)  # fmt: skip

Run = Callable[[dict[str, tuple[str, tuple[str, ...], str]]], dict[str, Job]]


@pytest.fixture(scope="module")
def run(python: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Name → (backend, words, fault or "-"), all trained one after the other in the cpu image."""

    def train(cases: dict[str, tuple[str, tuple[str, ...], str]]) -> dict[str, Job]:
        root = tmp_path_factory.mktemp("silent")
        rows = [" ".join((str(root / name), fault, backend, *words)) for name, (backend, words, fault) in cases.items()]
        (root / "list").write_text("\n".join(rows))
        ended = subprocess.run(
            [*python, str(INSIDE / "many.py"), str(root / "list")], capture_output=True, text=True, check=False,
            timeout=60 * len(cases) + 120,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        return {name: job_of(root / name, backend, words) for name, (backend, words, _) in cases.items()}

    return train


def _missed(jobs: dict[str, Job]) -> list[str]:
    rows = []
    for name, job in jobs.items():
        found = failed(job)
        if not set(found) & set(SILENT[name].names) or "exit code" in found:
            rows.append(f"{name}: expected one of {SILENT[name].names}, failed: {found or 'nothing'}")
    return rows


def test_healthy_runs_pass_and_one_fault_of_each_class_is_named(run: Run) -> None:
    healthy = {f"healthy_{backend}": (backend, (), "-") for backend in BACKENDS}
    narrow = ("torchtitan", "megatron")
    healthy |= {f"healthy_bf16_{backend}": (backend, ("--precision=bf16",), "-") for backend in narrow}
    healthy["healthy_fused_torchtitan"] = ("torchtitan", ("--precision=bf16", "turbo=fused-adamw"), "-")
    # Weights and gradients in bfloat16, and weight decay that is added to the gradients.
    narrow_words = ("--precision=bf16", "training.dtype=bfloat16", "optimizer.name=Adam")
    healthy["healthy_narrow_torchtitan"] = ("torchtitan", narrow_words, "-")
    # Ranks that share sequences: Megatron then weighs the balancing loss by the tokens of one of them.
    healthy["healthy_experts_tensor_parallel"] = ("megatron", ("--recipe=mixtral-8x7b", "tp=2", "ep=1"), "-")
    faulty = {name: (SILENT[name].backend, SILENT[name].words, name) for name in QUICK}
    jobs = run(healthy | faulty)
    assert {name: failed(jobs[name]) for name in healthy} == {name: [] for name in healthy}
    assert _missed({name: jobs[name] for name in faulty}) == []


def test_the_references_models_are_those_of_transformers_and_diffusers(python: list[str]) -> None:
    ended = subprocess.run(
        [*python, str(INSIDE / "reference_models.py")], capture_output=True, text=True, check=False, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    gaps = dict(line.split() for line in ended.stdout.splitlines())
    assert len(gaps) == 6
    assert all(float(gap) < (1e-4 if name == "flux" else 1e-5) for name, gap in gaps.items()), gaps


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_every_silent_fault_is_named(run: Run, request: pytest.FixtureRequest) -> None:
    assert len(SILENT) >= 371
    jobs = run({name: (case.backend, case.words, name) for name, case in SILENT.items()})
    assert _missed(jobs) == []
    if request.config.getoption("--record-faults"):
        rows = [
            {
                "fault": name.removeprefix(f"{case.backend}_").replace("_", " "),
                "kind": case.kind,
                "backend": case.backend,
                "named_by": failed(jobs[name]),
            }
            for name, case in SILENT.items()
        ]
        facts = json.loads((jobs[next(iter(jobs))].output / "facts.json").read_text())
        record = {
            "command": "pytest tests/integration/test_silent_faults.py --record-faults",
            "date": datetime.now(UTC).date().isoformat(),
            "versions": facts["versions"],
            "faults": rows,
        }
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
