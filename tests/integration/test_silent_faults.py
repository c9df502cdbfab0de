"""Silent faults in real two-rank runs: the loss falls and nothing complains, but the reference
names each.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from training_kit import Python

pytestmark = pytest.mark.integration

INSIDE = Path(__file__).with_name("inside")
# What CI runs, cheap jobs: a fault of each mechanism, several in one job where other checks name
# them, and of those without a fault the ones with the most features; one of torchtitan is in
# test_cpu_image.py. `--slow` runs all.
QUICK = (
    "fsdp_one_row_rounded_in_checkpoints+fsdp_labels_equal_inputs+fsdp_flops_with_recomputation+"
    "fsdp_one_tensor_learns_a_little_faster+fsdp_tokens_of_the_labels_behind_the_end",
    "torchtitan_angles_rounded_to_fp8+torchtitan_gradients_summed_in_bf16",
    "finetune_another_mask_in_the_recomputation+finetune_adapter_scaled_twice",
    "finetune_last_weights_exported_in_place_of_the_best+finetune_mean_of_the_means_of_batches",
    "fsdp_moments_not_saved",
    "megatron_stale_copies",
    "healthy_torchtitan",
    "healthy_fsdp",
    "healthy_finetune",
    "healthy_experts_tensor_parallel",
    "healthy_flux",
)


def harness(python: Python, out: Path, *words: str, timeout: int) -> str:
    """Run ``inside/every_fault.py`` and return what it printed."""
    ended = python.run(
        str(INSIDE / "every_fault.py"), str(out), "--together", "2", *words, timeout=timeout
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def wrong(out: Path, expected: int) -> list[dict[str, Any]]:
    """Return the runs that are not as they should be: a healthy one that fails, or a fault that no
    check names.
    """
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == expected
    return [row for row in rows if not row["ok"]]


@pytest.mark.timeout(900)
def test_healthy_runs_pass_and_one_fault_of_each_class_is_named(
    python: Python, tmp_path: Path
) -> None:
    """A fault that sets a name that a module has lost would change nothing, or fail when it is run
    months later.
    """
    # A quarter of the tokens is enough for these.
    words = ("--patches", "--settings", "seq_len=32", "--names", *QUICK)
    said = harness(python, tmp_path / "out", *words, timeout=900)
    assert said.splitlines() == [f"{len(QUICK)} runs, {len(QUICK)} to do"]
    assert wrong(tmp_path / "out", len(QUICK)) == []


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_every_silent_fault_is_named(python: Python, tmp_path: Path) -> None:
    runs = int(harness(python, tmp_path / "out", timeout=5400).split()[0])
    assert wrong(tmp_path / "out", runs) == []
