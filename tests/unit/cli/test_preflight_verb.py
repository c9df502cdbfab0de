"""`primus preflight` on made machines."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from primus_images.cli.main import main
from primus_images.system import nodes
from primus_images.system.host import Finding, Host
from sound_host import FAULTS, Machine, node, spoil


def test_the_command_reports_and_fails_with_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(tmp_path)
    machine.write("proc/sys/kernel/numa_balancing", "1")
    started = time.monotonic()
    assert main(["preflight", "--quick", "--json", "--root", str(tmp_path), "--output", "/"]) == 1
    assert time.monotonic() - started < 20
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] is False
    assert len(found["gpus"]) == 8
    numa = next(one for one in found["findings"] if one["check"] == "NUMA balancing")
    assert "echo 0" in numa["remedy"]
    assert main(["preflight", "--root", str(tmp_path / "nothing")]) == 2


def test_a_job_on_gpus_is_not_started_on_an_unfit_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from primus_images.gpus.detect import detect
    from primus_images.system import host
    from primus_images.training.backends.protocol import Backend

    machine = Machine(tmp_path / "host")
    machine.write("proc/self/limits", "Max processes 100 100 processes\n")
    monkeypatch.setattr("primus_images.cli.image.train.detect", lambda: detect(machine.root))
    monkeypatch.setattr("primus_images.cli.image.train.machine.check", lambda recipe, **_: None)
    monkeypatch.setattr("primus_images.cli.image.train.start.check_backend", lambda job: None)
    monkeypatch.setattr(
        "primus_images.cli.image.train.backend_of", lambda _: Backend(check_data=lambda _: None)
    )
    plain = host.Host

    def elsewhere(**options: Any) -> Host:
        return plain(**{**options, "root": machine.root})

    monkeypatch.setattr(host, "Host", elsewhere)
    words = ["train", "llama3.1-8b", "--gpu", "mi300x", "--output", str(tmp_path / "run")]
    assert main(words) == 3
    told = capsys.readouterr().err
    assert "only 100 processes are allowed" in told
    assert "--no-preflight" in told
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("gpus", "change", "words", "said"),
    [
        (8, None, [], ""),
        (8, None, ["--expect", "8", "--gpu", "mi300x", "--expect-nics", "2"], ""),
        (8, "one lost", ["--expect", "8"], "7 of 8 can be used"),
        (8, "no driver", ["--expect", "8"], "8 of 8 GPUs on the PCI bus have no driver"),
        (8, None, ["--gpu", "mi325x"], "MI300X (gfx942), not mi325x"),
        (8, None, ["--expect-nics", "3"], "2 of 3 devices have a driver: mlx5_0, mlx5_1"),
        (0, None, [], "no GPU on this machine, or its driver does not run"),
        (0, None, ["--expect", "8"], "0 of 8 can be used"),
        (0, None, ["--expect", "0"], ""),
    ],
)
def test_ready_needs_proof(
    gpus: int,
    change: str | None,
    words: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(tmp_path, gpus)
    if change:
        spoil(machine, FAULTS[change])
    plain = Host
    monkeypatch.setattr(
        "primus_images.cli.image.preflight.Host", lambda **of: plain(**of, environment={})
    )
    page = tmp_path / "page.html"
    code = main(
        [
            "preflight",
            "--quick",
            "--root",
            str(tmp_path),
            "--output",
            "/runs",
            "--html",
            str(page),
            *words,
        ]
    )
    out = capsys.readouterr().out
    assert code == bool(said), out
    assert said in " ".join(out.split())
    assert ("the node is ready" in page.read_text()) == (not said)


def written(folder: Path, *found: nodes.Node) -> list[str]:
    files = []
    for number, one in enumerate(found):
        file = folder / f"{number}.json"
        file.write_text(json.dumps(one.document()))
        files.append(str(file))
    return files


def test_sound_nodes_are_ready(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preflight", "--nodes", *written(tmp_path, node("n1"), node("n2"))]) == 0
    out = capsys.readouterr().out
    assert "n1" in out
    assert "2 nodes: ready" in out


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        (
            node("n3", Finding("failed", "/dev/shm", "it is missing", "mount it")),
            "/dev/shm: it is missing",
        ),
        (node("n3", tflops=500), "17% less than the median of the nodes"),
        (node("n3", driver="6.12.12"), "6.12.12; most nodes have 6.16.6"),
    ],
)
def test_the_node_with_the_problem_is_named(
    odd: nodes.Node, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    files = written(tmp_path, node("n1"), node("n2"), odd)
    assert main(["preflight", "--nodes", *files, "--html", str(page)]) == 1
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if "n3" in line)
    assert not line.startswith("✓")
    assert said in " ".join(out.split())
    text = page.read_text()
    assert "n3" in text
    assert said.rpartition(": ")[2] in text
    assert "<script src" not in text
    assert main(["preflight", "--nodes", *files, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["passed"] is False


def test_bad_combinations_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--benchmark"], ["--burn-in", "10m"]):
        assert main(["preflight", *words, "--quick"]) == 2
        assert main(["preflight", *words, "--root", str(tmp_path)]) == 2
    same = written(tmp_path, node("n1"), node("n1"))
    assert main(["preflight", "--nodes", *same]) == 2
    assert "two documents are from node n1" in capsys.readouterr().err
