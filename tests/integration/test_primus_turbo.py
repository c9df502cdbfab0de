"""Primus Turbo in real runs: its public API in plain PyTorch stands in for the package."""

import json
import subprocess
from pathlib import Path

import pytest
from training_kit import Python

pytestmark = pytest.mark.integration

# Its public API in plain PyTorch.
STAND_IN = "primus_turbo"
ATTENTION = "turbo-attention"
EXPERTS = "turbo-attention,turbo-grouped-gemm"


def train(
    python: Python, recipe: str, backend: str, turbo: str, output: Path, fault: str = STAND_IN
) -> subprocess.CompletedProcess[str]:
    """Three steps of the proxy for an AMD GPU, in BF16 on this CPU."""
    words = (
        recipe,
        "--backend",
        backend,
        "--gpu",
        "mi300x",
        "--proxy",
        "--precision",
        "bf16",
        "--ranks",
        "2",
    )
    asked = ("--steps", "3", "--turbo", turbo, "--output", str(output), "--json", "seq_len=32")
    return python.run("-m", "primus_images.cli.main", "train", *words, *asked, fault=fault)


def losses(output: Path) -> list[float]:
    return [
        float(json.loads(line)["loss"])
        for line in (output / "exact.jsonl").read_text().splitlines()
    ]


@pytest.mark.parametrize(
    ("recipe", "backend", "turbo"),
    [
        ("llama3.1-8b", "torchtitan", ATTENTION),
        ("llama3.1-8b", "megatron", ATTENTION),
        pytest.param("deepseek-16b", "torchtitan", EXPERTS, marks=pytest.mark.slow),
        pytest.param("mixtral-8x7b", "megatron", ATTENTION, marks=pytest.mark.slow),
    ],
)
def test_the_loss_is_that_of_the_plain_run_and_the_run_names_what_was_called(
    python: Python, tmp_path: Path, recipe: str, backend: str, turbo: str
) -> None:
    plain = train(python, recipe, backend, "off", tmp_path / "plain")
    assert plain.returncode == 0, plain.stderr
    faster = train(python, recipe, backend, turbo, tmp_path / "turbo")
    assert faster.returncode == 0, faster.stdout + faster.stderr
    assert losses(tmp_path / "turbo") == pytest.approx(losses(tmp_path / "plain"), rel=1e-3)
    facts = json.loads((tmp_path / "turbo/facts.json").read_text())
    assert facts["turbo"] == sorted(turbo.split(","))
    assert "turbo" not in json.loads((tmp_path / "plain/facts.json").read_text())


def test_what_was_asked_for_and_did_not_run_fails_the_run(python: Python, tmp_path: Path) -> None:
    ended = train(
        python,
        "llama3.1-8b",
        "torchtitan",
        ATTENTION,
        tmp_path / "run",
        f"{STAND_IN},turbo_left_out",
    )
    assert ended.returncode == 1, ended.stderr
    failed = [verdict for verdict in json.loads(ended.stdout)["verdicts"] if not verdict["passed"]]
    assert any("turbo is [], not ['turbo-attention']" in verdict["reason"] for verdict in failed)


def test_without_the_package_the_job_is_refused_before_it_starts(
    python: Python, tmp_path: Path
) -> None:
    ended = train(python, "llama3.1-8b", "torchtitan", ATTENTION, tmp_path / "none", fault="")
    assert ended.returncode == 3, ended.stderr
    assert "primus_turbo" in ended.stderr
    assert not (tmp_path / "none/facts.json").exists()


CALLS = """
import torch
from primus_images.turbo import primus_turbo
from primus_images.turbo.optimizations import CALLS
torch.manual_seed(0)
q, k, v = torch.randn(2, 16, 4, 32), torch.randn(2, 16, 2, 32), torch.randn(2, 16, 2, 32)
exact = primus_turbo.attention(q.double(), k.double(), v.double(), window=5)
place = torch.arange(16)
before = place[:, None] - place[None, :]
scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double().repeat_interleave(2, 2)) / 32**0.5
scores.masked_fill_(~((before >= 0) & (before < 5)), float("-inf"))
wanted = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.double().repeat_interleave(2, 2))
assert torch.allclose(exact, wanted)
up = torch.nn.Linear(128, 256, bias=False)
down = torch.nn.Linear(256, 128, bias=False)
model = torch.nn.Sequential(up, down)
x = torch.randn(8, 128)
before = model(x)
primus_turbo.convert_linears(model, ["nothing"])
assert {type(m).__name__ for m in model} == {"Float8Linear"}
assert 0 < (model(x) - before).abs().max() < 0.1 * before.abs().max()
try:
    primus_turbo.convert_linears(torch.nn.Sequential(torch.nn.Linear(100, 128)), [])
except SystemExit as refused:
    assert "multiples of 128" in str(refused)
else:
    raise AssertionError
print(sorted(CALLS))
"""


def test_every_call_computes_what_its_definition_says(python: Python) -> None:
    ended = python.run("-c", CALLS, fault=STAND_IN)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split("\n")[0] == "['turbo_attention', 'turbo_fp8_linear']"
