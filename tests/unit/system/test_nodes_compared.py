"""What shows only between nodes, what a job expects of one, and how fast its disk is."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from primus_images.errors import InputError
from primus_images.system import banner, fabric, nodes
from primus_images.system.host import Finding, Host
from primus_images.system.preflight import disk_speed, expected
from sound_host import Machine, node


@pytest.mark.parametrize(
    ("odd", "check", "said"),
    [
        (node("n3", tflops=500), "gemm bf16", "17% less than the median of the nodes"),
        (node("n3", driver="6.12.12"), "driver", "6.12.12; most nodes have 6.16.6"),
        (node("n3", driver=""), "driver", "unknown; most nodes have 6.16.6"),
        (node("n3", Finding("ok", "RDMA", "2 devices; all good")), "RDMA", "2 devices; most nodes"),
    ],
)
def test_the_node_that_differs_from_most_is_named(
    odd: nodes.Node, check: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "n3.json").write_text(json.dumps(odd.document()))
    read = nodes.read(tmp_path / "n3.json")
    assert read == odd
    assert nodes.compare([node("n1"), node("n2")]) == []
    ((name, found),) = nodes.compare([node("n1"), node("n2"), read])
    assert name == "n3"
    assert check in f"{found.check} {found.message}"
    assert said in found.message
    assert found.problem


def test_a_little_slower_is_as_fast() -> None:
    assert nodes.compare([node("n1"), node("n2"), node("n3", tflops=570)]) == []


def test_each_node_has_a_row_with_its_worst_problem() -> None:
    slow = Finding("slow", "clock", "it is slow")
    failed = Finding("failed", "/dev/shm", "it is missing")
    bad = node("n2", failed, slow)
    between = [("n3", slow)]
    rows = nodes.rows([node("n1"), bad, node("n3")], between)
    gpus = "8 × AMD Instinct MI300X"
    assert rows == [
        (nodes.MARKS["ok"], "n1", gpus, "ready"),
        (nodes.MARKS["failed"], "n2", gpus, "/dev/shm: it is missing; clock: it is slow"),
        (nodes.MARKS["slow"], "n3", gpus, "clock: it is slow"),
    ]
    assert node("n1").document()["passed"] is True
    assert bad.document()["passed"] is False


def test_what_is_no_document_of_a_node_is_refused_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "n.json"
    for text in ("[1]", '{"name": "n1"}', json.dumps({**node("n1").document(), "gpus": 8})):
        file.write_text(text)
        with pytest.raises(InputError) as caught:
            nodes.read(file)
        assert str(file) in str(caught.value)
    with pytest.raises(InputError, match="two documents are from node n1"):
        nodes.compare([node("n1"), node("n1")])


@pytest.mark.parametrize(
    ("there", "gpus", "gpu", "nics", "said"),
    [
        (8, None, None, None, []),
        (8, 8, "mi300x", 2, []),
        (8, 7, None, None, ["8 of 7"]),
        (8, None, "mi325x", None, ["not mi325x"]),
        (8, 9, "mi325x", 3, ["8 of 9", "not mi325x", "2 of 3 devices have a driver: mlx5_0"]),
        (0, None, "mi325x", None, ["no GPU on this machine"]),
        (0, 0, "mi325x", None, []),
        (0, 8, None, None, ["0 of 8"]),
    ],
)
def test_a_machine_has_what_a_job_expects(
    tmp_path: Path, there: int, gpus: int | None, gpu: str | None, nics: int | None, said: list[str]
) -> None:
    host = Host(root=Machine(tmp_path, there).root, environment={}, output=Path("/runs"))
    found = [one.message for one in expected(host, gpus, gpu, nics)]
    assert len(found) == len(said)
    for message, part in zip(found, said, strict=True):
        assert part in message


def test_a_disk_is_measured_by_writing_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    for seconds, level in ((0.05, "slow"), (0.001, "ok")):
        # Read at the beginning, before each of the three blocks, and at the end.
        clock = iter(seconds * number for number in range(100))
        monkeypatch.setattr("time.monotonic", clock.__next__)
        found = disk_speed(tmp_path, megabytes=3)
        assert found.level == level
        assert re.search(r"\b(15|750) MB/s", found.message), found.message
    assert len(synced) == 2
    assert not list(tmp_path.iterdir())
    gone = disk_speed(tmp_path / "gone")
    assert gone.level == "failed"
    assert "no such file or directory" in gone.message


def test_the_interface_to_this_machine_itself_is_the_loopback() -> None:
    assert fabric.own_address("127.0.0.1") == "127.0.0.1"
    assert fabric.interface_towards("127.0.0.1") == "lo"
    assert fabric.interface_towards("") == ""
    assert fabric.own_address("no such host") == ""


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["nothing-of-this-name"], 127, "'nothing-of-this-name' cannot be run: No such file"),
        ([""], 127, "'' cannot be run"),
        (["/"], 126, "'/' cannot be run: Permission denied"),
    ],
)
def test_a_command_that_cannot_be_run_ends_as_in_a_shell(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert banner.main(words) == code
    assert said in capsys.readouterr().err


def test_a_shell_is_greeted_and_a_script_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(os, "execvp", lambda name, words: started.append((name, words)))
    monkeypatch.delenv("PRIMUS_NO_BANNER", raising=False)
    banner.main([])
    assert started[0][0] == "/bin/bash"
    assert "start: primus train llama3-proxy" in capsys.readouterr().err
    banner.main(["sh", "-c", "true"])
    assert started[1] == ("sh", ["sh", "-c", "true"])
    assert capsys.readouterr().err == ""
