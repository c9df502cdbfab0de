"""Micro-benchmarks judged, and what preflight found on several nodes as one verdict. No figure here
is measured.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from primus_images.cli.image.train import _preflight as before_a_run
from primus_images.cli.main import main
from primus_images.errors import HostError
from primus_images.gpus.detect import DetectedGpus, visible
from primus_images.gpus.table import load_table
from primus_images.system import nodes
from primus_images.system.host import Host
from primus_images.system.nodes import Measurement
from primus_images.training.run import processes
from sound_host import gemm


@pytest.mark.parametrize(
    ("one", "level", "said"),
    [
        (gemm(600, 610), "ok", "600–610 TFLOP/s; at least 500 expected"),
        # A clock that is above its nominal rate for a moment is no wrong measurement.
        (gemm(1350, 1355), "ok", "1,350–1,355 TFLOP/s; at least 500 expected"),
        (gemm(600, 450), "slow", "GPU 1: 450 TFLOP/s, and at least 500 are expected (a guide)"),
        (gemm(700, 700, 700, 620), "slow", "GPU 3: 620 TFLOP/s, 11% less than the median"),
        (
            gemm(600, 5000, 600),
            "failed",
            "GPU 1: 5,000 TFLOP/s is more than the GPU's peak of 1,307",
        ),
        (gemm(600, 610, least=None), "ok", "not judged: a guide"),
    ],
)
def test_a_figure_is_judged_by_its_range_and_by_the_other_gpus(
    one: Measurement, level: str, said: str
) -> None:
    (found,) = nodes.judge(one)
    assert found.level == level
    assert said in found.message
    assert (found.remedy != "") == (level != "ok")


def test_a_node_is_as_fast_as_its_slowest_gpu() -> None:
    """A step waits for the slowest rank."""
    parts = []
    for name, figures in {"a": (600, 610), "b": (600, 605), "c": (450, 900)}.items():
        node = nodes.Node(
            name=name,
            gpus=("AMD Instinct MI300X",) * 2,
            driver="6.12",
            findings=(),
            measurements=(gemm(*figures),),
        )
        parts.append(node)
    ((name, found),) = nodes.compare(parts)
    assert name == "c"
    assert found.message == "450, 25% less than the median of the nodes, 600"


def test_every_gpu_and_benchmark_has_a_row_with_its_source() -> None:
    table = nodes.EXPECTED
    wanted = {(gpu, what) for gpu in load_table().imaged for what in nodes.UNITS}
    assert set(table) == wanted, "add or remove rows in src/primus_images/system/expected.yaml"
    for (gpu, what), row in table.items():
        assert row["source"], (gpu, what)
        most = nodes.peak_of(gpu, what)
        assert row["least"] is None or most is None or 0 < row["least"] < most, (gpu, what)
        # A collective's figure is of a number of GPUs.
        assert what not in ("all-reduce", "all-to-all") or row["least"] is None or row["gpus"], (
            gpu,
            what,
        )


def test_a_figure_of_eight_gpus_does_not_judge_two() -> None:
    rank = {"gemm bf16": 600.0, "all-reduce": 200.0}
    two = {one.what: one for one in nodes.measurements("mi300x", [rank, rank])}
    eight = {one.what: one for one in nodes.measurements("mi300x", [rank] * 8)}
    assert (two["all-reduce"].least, eight["all-reduce"].least) == (None, 304)
    assert len(eight["gemm bf16"].figures) == 8
    assert len(eight["all-reduce"].figures) == 1
    assert [one.level for one in nodes.judge(two["all-reduce"])] == ["ok"]
    assert [one.level for one in nodes.judge(eight["all-reduce"])] == ["slow"]


def test_the_benchmark_says_why_it_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [one.message for one in nodes.benchmark(Host(root=tmp_path))[0]] == [
        "no GPU on this machine"
    ]
    # As on a login node: the driver's files are there, PyTorch is not.
    (tmp_path / "proc/driver/nvidia/gpus/0").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/gpus/0/information").write_text("Model: NVIDIA H200\n")
    hidden = Host(root=tmp_path, environment={"CUDA_VISIBLE_DEVICES": ""})
    assert "hides all GPUs" in nodes.benchmark(hidden)[0][0].message
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found, measured = nodes.benchmark(Host(root=tmp_path, environment={}))
    assert (found[0].level, measured) == ("skipped", [])
    assert "PyTorch is not installed" in found[0].message


@pytest.fixture
def torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replaces torchrun by the code given."""

    def write(code: str) -> None:
        (tmp_path / "torch/distributed").mkdir(parents=True)
        (tmp_path / "torch/distributed/run.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return write


def test_the_burn_in_needs_a_gpu_and_its_verdict_is_shown_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nodes, "visible", lambda count, environment: ())
    for gpus, reason in (
        ((), "no GPU on this machine"),
        (("NVIDIA H200",), "the environment hides all GPUs"),
    ):
        monkeypatch.setattr(
            "primus_images.system.host.detect", lambda root, gpus=gpus: DetectedGpus(names=gpus)
        )
        assert main(["preflight", "--burn-in", "1s", "--output", "/"]) == 3
        assert f"--burn-in: {reason}" in capsys.readouterr().err
    wrong = {"what": "exchange", "ranks": [0, 1], "elements": 5, "of": 9, "rounds": 1, "first": 2}
    states = [
        {"device": "0000:c1:00.0", "round": 3, "place": 1, "wrong": rows} for rows in ([], [wrong])
    ]
    for rank, state in enumerate(states):
        state |= {"what": "memory", "ranks": [rank]}
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps(state))
    monkeypatch.setattr(nodes, "visible", lambda count, environment: ("4", "5"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setattr(
        nodes,
        "_run",
        lambda folder, *_: shutil.copytree(tmp_path, folder, dirs_exist_ok=True) and 0,
    )
    page = tmp_path / "page.html"
    assert (
        main(["preflight", "--burn-in", "1s", "--output", "/", "--json", "--html", str(page)]) == 1
    )
    gpu = f"GPU 5 of {nodes.name_here()} (0000:c1:00.0)"
    sentence = f"{gpu}: exchange with GPU 4: 5 of 9 elements are wrong in 1 round, first in round 2"
    assert sentence in [row["message"] for row in json.loads(capsys.readouterr().out)["findings"]]
    assert sentence in page.read_text()
    job: Any = SimpleNamespace(
        recipe=SimpleNamespace(gpu="mi300x", get=lambda *_: 1), output=tmp_path
    )
    monkeypatch.setattr("primus_images.system.preflight.preflight", lambda host: [])
    with pytest.raises(HostError, match=r"burn-in: GPU 5 of .* 5 of 9 elements are wrong"):
        before_a_run(job, 1.0)


def test_a_benchmark_that_fails_is_a_sentence(torchrun: Callable[[str], None]) -> None:
    torchrun("raise SystemExit('W: x\\nRuntimeError: HIP error: invalid device\\nmore')")
    assert (
        nodes.measure(2, "") == "PyTorch fails on the GPUs: RuntimeError: HIP error: invalid device"
    )


def test_no_rank_outlives_a_benchmark_that_hangs(
    torchrun: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(processes, "_LOOK_SECONDS", 0.2)
    torchrun(
        "import pathlib, subprocess\n"
        "rank = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(rank.pid))\n"
        "rank.wait()\n"
    )
    assert nodes.measure(2, "", 2) == "the GPUs did not finish within 2 s"
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, ["0", "1", "2", "3"]),
        ({"HIP_VISIBLE_DEVICES": "2,3"}, ["2", "3"]),
        ({"ROCR_VISIBLE_DEVICES": "4,5"}, ["0", "1"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "1"}, ["1"]),
        ({"HIP_VISIBLE_DEVICES": "-1"}, []),
    ],
)
def test_only_devices_that_the_environment_shows_are_used(
    environment: dict[str, str], found: tuple[str, ...]
) -> None:
    assert visible(4, environment) == tuple(found)


def test_the_scheduler_names_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    for variable, name in (("NODE_NAME", "pool-7"), ("SLURMD_NODENAME", "gpu-12")):
        monkeypatch.setenv(variable, name)
        main(
            [
                "preflight",
                "--quick",
                "--json",
                "--root",
                str(tmp_path),
                "--output",
                "/",
                "--html",
                str(page),
            ]
        )
        assert json.loads(capsys.readouterr().out)["name"] == name
        assert name in page.read_text()


def counted_wrong(*ranks: int) -> dict[str, Any]:
    return {
        "what": "exchange",
        "ranks": list(ranks),
        "elements": 1,
        "of": 2,
        "rounds": 1,
        "first": 1,
    }


def test_the_gpu_that_takes_part_in_all_wrong_results_is_named_first() -> None:
    states = [
        {"device": "a", "wrong": [counted_wrong(0, 1), counted_wrong(0, 2)]},
        {"device": "b", "wrong": [counted_wrong(0, 1)]},
        {"device": "c", "wrong": []},
    ]
    sentences = list(nodes._wrong(states, ("4", "5", "6"), ""))
    assert sentences[0].startswith("GPU 4 of ")
    assert "takes part in everything that is wrong" in sentences[0]
    assert len(sentences) == 4
    # A result of one GPU alone names it anyway.
    alone = [{"device": "a", "wrong": [counted_wrong(0)]}, {"device": "b", "wrong": []}]
    (sentence,) = nodes._wrong(alone, ("4", "5"), "")
    assert "takes part" not in sentence


def test_the_gpu_that_failed_first_or_holds_the_others_up_is_named() -> None:
    states = [
        {"device": "a", "what": "memory", "ranks": [0], "error": "lost", "failed_at": 2.0},
        {"device": "b", "what": "memory", "ranks": [1], "error": "broke", "failed_at": 1.0},
    ]
    (sentence,) = nodes._wrong(states, ("0", "1"), "PyTorch fails")
    assert sentence.startswith("GPU 1 of ")
    assert sentence.endswith("memory fails: broke")
    states = [
        {"device": "a", "what": "memory", "ranks": [0], "round": 3, "place": 4},
        {"device": "b", "what": "exchange", "ranks": [0, 1], "round": 3, "place": 5},
    ]
    (sentence,) = nodes._wrong(states, ("0", "1"), "hangs")
    assert sentence.startswith("GPU 0 of ")
    assert sentence.endswith("memory of round 3 does not end")
    assert list(nodes._wrong([{}, {}], ("0", "1"), "PyTorch fails")) == ["PyTorch fails"]


def test_loading_pytorch_may_take_longer_than_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(nodes.time, "monotonic", lambda: now)
    said: list[str] = []
    progress = nodes._Progress(tmp_path, 1, 60.0, said.append, patience=10)
    assert not progress.should_end()
    now = 29.0
    assert not progress.should_end()
    now = 31.0
    assert progress.should_end()
    (tmp_path / "rank-0.json").write_text('{"round": 1, "wrong": []}')
    assert not progress.should_end()
    now = 40.0
    assert not progress.should_end()
    now = 42.0
    assert progress.should_end()
    assert said == [
        "burn-in: 0 of 60 s, round 1, no wrong result",
        "burn-in: 11 of 60 s, round 1, no wrong result",
    ]
