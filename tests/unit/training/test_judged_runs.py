"""Runs of every backend that the reference repeats: everything that a run leaves agrees with it.

``tiny_runs.json`` has their figures. ``PRIMUS_WRITE_FIGURES=1`` writes it anew.
"""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
for name in ("torchtitan", "megatron", "peft", "diffusers"):
    # An import of torchtitan would choose its device.
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)

from tiny_runs import RESUMED, RUNS, ended  # noqa: E402

# Of libraries, which pytest would raise.
pytestmark = pytest.mark.filterwarnings("ignore")

FIGURES = Path(__file__).with_name("tiny_runs.json")
# Of the machine, of its libraries, and of a sum in another order.
UNSTABLE = {"loaded", "versions", "weights_sha256", "matmul_flops", "turbo_calls"}


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


def differences(figures: Any, recorded: Any, share: float, place: str = "") -> Iterator[str]:
    """Yield what differs: a number by more than ``share`` of it, and rounding by more than the sums
    of different CPUs do.
    """
    if isinstance(figures, dict) and isinstance(recorded, dict):
        for key in {**figures, **recorded}:
            values = (figures.get(key), recorded.get(key))
            yield from differences(*values, share, f"{place}/{key}")
    elif isinstance(figures, list) and isinstance(recorded, list) and len(figures) == len(recorded):
        for number, values in enumerate(zip(figures, recorded, strict=True)):
            yield from differences(*values, share, f"{place}/{number}")
    elif isinstance(figures, float) and isinstance(recorded, float):
        if not _is_close(figures, recorded, share, place):
            yield f"{place}: {figures}, not {recorded}"
    elif figures != recorded:
        yield f"{place}: {figures}, not {recorded}"


def _is_close(figure: float, recorded: float, share: float, place: str) -> bool:
    if "/noise" in place or place.endswith("/closest"):
        # A few units in the last place, or the difference of two almost equal scores.
        return recorded / 10 <= figure <= recorded * 10
    if place.endswith("/rounded"):
        # The share of weights that the rounding of an update moved.
        return math.isclose(figure, recorded, abs_tol=0.2)
    return math.isclose(figure, recorded, rel_tol=share, abs_tol=1e-9)


@pytest.mark.parametrize("name", RUNS)
def test_run_and_reference_agree(name: str) -> None:
    outcome = ended(name)
    assert outcome.exit_code == 0
    # A busy machine may stop this process within a step of a millisecond.
    wrong = [verdict for verdict in outcome.run.verdicts if not verdict.passed]
    assert [verdict for verdict in wrong if verdict.name != "clock"] == []


@pytest.mark.parametrize("name", sorted(RUNS.keys() - RESUMED.keys()))
def test_figures_are_those_of_the_file(name: str) -> None:
    now = figures(name)
    if os.environ.get("PRIMUS_WRITE_FIGURES"):
        rows = json.loads(FIGURES.read_text()) | {name: now}
        lines = [f"{json.dumps(key)}: {json.dumps(row)}" for key, row in sorted(rows.items())]
        FIGURES.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    recorded = json.loads(FIGURES.read_text())[name]
    share = 1e-3
    if RUNS[name][0].endswith(("bf16", "fp8")):
        # A sum of a CPU that adds in another order may round to the next number of BF16.
        share = 2e-2
    assert list(differences(now, recorded, share)) == []


def test_resumed_run_ends_with_the_same_weights() -> None:
    whole, rest = ended("fsdp"), ended("fsdp-again")
    assert [step.step for step in rest.series.steps] == [3]
    assert rest.series.steps[0].loss == whole.series.steps[2].loss
    assert rest.facts["weights_sha256"] == whole.facts["weights_sha256"]


def test_steps_on_text_have_a_fingerprint_of_their_samples() -> None:
    whole, rest = ended("fsdp"), ended("fsdp-again")
    hashes = [step.data_hash for step in whole.series.steps]
    assert len({*hashes}) == 3
    assert None not in hashes
    assert rest.series.steps[0].data_hash == hashes[2]
    assert [step.data_hash for step in ended("flux").series.steps] == [None] * 3
