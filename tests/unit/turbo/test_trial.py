"""Which optimizations a run uses: what is missing or fails its self-test is off, named, and an
error if required.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from primus_images.errors import CheckFailed, HostError
from primus_images.gpus.detect import DetectedGpus
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from primus_images.turbo import trial

# Stands for the process of the self-test: it answers as its first argument says, one line for each
# name.
TESTER = """
import json, os, sys
faults = json.loads(os.environ["FAULTS"])
for name in sys.argv[2:]:
    fault = faults.get(name, "")
    if fault == "crash":
        os.abort()
    print("a library says something")
    print(json.dumps({"name": name, "fault": fault}), flush=True)
"""


def _recipe(*words: str) -> Recipe:
    return resolve("llama3.1-8b", words, Choices(backend="torchtitan", precision="fp8", gpu="h200"))


@pytest.fixture
def decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tester = tmp_path / "tester.py"
    tester.write_text(TESTER)
    monkeypatch.setattr(
        trial, "missing_packages", lambda names: ["flash_attn"] if "flash" in names[0] else []
    )
    monkeypatch.setattr(trial, "_COMMAND", (trial.sys.executable, str(tester)))
    monkeypatch.setattr(
        trial, "detect", lambda: DetectedGpus(vendor="nvidia", names=("NVIDIA H200",), driver="580")
    )
    lines: list[str] = []

    def run(*words: str, faults: dict[str, str] | None = None) -> trial.Trial:
        lines.clear()
        environment = {"FAULTS": json.dumps(faults or {})}
        return trial.decide(_recipe(*words), tmp_path / "kept", environment, lines.append)

    run.lines = lines
    return run


def test_what_passes_is_used_and_what_is_missing_is_named(decide) -> None:
    found = decide()
    assert "fp8-linear" in found.names
    assert found.off == {"flash-attention-4": "flash_attn not installed"}
    assert decide.lines == [f"testing {len(found.names)} optimizations against float64 on this GPU"]
    assert "flash-attention-4 is off: flash_attn not installed" in found.sentence()


def test_a_pass_is_kept_for_the_same_sizes_and_a_failure_is_tested_again(decide) -> None:
    first = decide(faults={"fp8-linear": "output is scaled"})
    assert first.off["fp8-linear"] == "failed its self-test: output is scaled"
    again = decide()
    assert decide.lines[0].startswith("testing 1 ")
    assert "fp8-linear" in again.names
    decide()
    assert not decide.lines
    decide("training.seq_len=4096")
    assert decide.lines


def test_a_pass_holds_for_any_number_of_the_same_gpus(
    decide, monkeypatch: pytest.MonkeyPatch
) -> None:
    decide()
    eight = DetectedGpus(vendor="nvidia", names=("NVIDIA H200",) * 8, driver="580")
    monkeypatch.setattr(trial, "detect", lambda: eight)
    decide()
    assert not decide.lines
    monkeypatch.setattr(trial, "detect", lambda: replace(eight, driver="590"))
    decide()
    assert decide.lines


def test_a_kernel_that_ends_the_process_is_off_and_the_others_are_tested(decide) -> None:
    found = decide(faults={"fp8-linear": "crash"})
    assert found.off["fp8-linear"] == "failed its self-test: ended its process with exit code -6"
    assert {"real-rope", "fp8-feed-forward"} <= set(found.names)


@pytest.mark.parametrize("words", [("turbo=require",), ("turbo=fp8-linear",), ("nodes=2",)])
def test_a_failure_is_an_error_where_it_is_required_or_nodes_could_differ(
    decide, words: tuple[str, ...]
) -> None:
    if "require" in words[0]:
        with pytest.raises(HostError, match="flash-attention-4 needs flash_attn"):
            decide(*words)
        return
    with pytest.raises(CheckFailed, match="fp8-linear failed its self-test on this GPU: wrong"):
        decide(*words, faults={"fp8-linear": "wrong"})


def test_the_second_of_two_that_exclude_each_other_is_tested_only_if_the_first_fails(
    tmp_path, monkeypatch
) -> None:
    tested: list[list[str]] = []

    def faults(names, *_: object):
        tested.append(list(names))
        return {"turbo-fp8-linear": "wrong"} if "turbo-fp8-linear" in names else {}

    monkeypatch.setattr(trial, "missing_packages", lambda _: [])
    monkeypatch.setattr(trial, "_faults", faults)
    monkeypatch.setattr(trial, "detect", lambda: DetectedGpus(names=("AMD Instinct MI300X",)))
    choices = Choices(backend="torchtitan", precision="fp8", gpu="mi300x")
    decision = trial.decide(resolve("llama3.1-8b", [], choices), tmp_path, {})
    assert "fp8-linear" not in tested[0]
    assert tested[1] == ["fp8-linear", "fp8-feed-forward"]
    assert {"fp8-linear", "fp8-feed-forward"} <= set(decision.names)
    assert decision.off == {"turbo-fp8-linear": "failed its self-test: wrong"}


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', "\x00", '{"a": null}'])
def test_damaged_results_count_as_absent(decide, tmp_path: Path, text: str) -> None:
    decide()
    (tmp_path / "kept" / trial.KEPT).write_text(text)
    decide()
    assert decide.lines


def test_a_machine_without_a_gpu_uses_only_what_is_named(
    decide, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "detect", DetectedGpus)
    automatic = decide()
    assert (automatic.names, automatic.off["fp8-linear"]) == ((), "there is no GPU")
    assert decide("turbo=fp8-linear").names == ("fp8-linear",)
