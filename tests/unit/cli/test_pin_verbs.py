"""`primus lock`, `outdated` and `bump`, with a Python index in memory."""

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gits import git
from memory_index import FOLLOWED, MemoryIndex, connect
from primus_images.cli.main import main
from project_kit import Kit
from tables import text_of

LOCK = "images/locks/pypi/demo.json"
PLAIN = "images/locks/pypi/plain.json"
WHEELS = "tool==1.0<helper==1.0 tool==1.1<helper==1.0 helper==1.0 helper==2.0"


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> MemoryIndex:
    return connect(monkeypatch, MemoryIndex(WHEELS + FOLLOWED))


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: MemoryIndex) -> Kit:
    """A project with one pin of an index, and a component of its own folder."""
    kit = Kit(tmp_path / "project")
    kit.write("versions.yaml", text_of("versions/lock.yaml"))
    kit.write(
        "images/demo.yaml",
        "description: d\nbase: bookworm\nchannels: [pypi]\ncomponents: [tool, local]\n",
    )
    kit.write("part/file", "x")
    (kit.root / "recipes").mkdir()
    monkeypatch.chdir(kit.root)
    return kit


@pytest.fixture
def followed(kit: Kit) -> Kit:
    """Two targets whose pins follow each other."""
    kit.write("versions.yaml", text_of("versions/lock.yaml") + text_of("versions/followed.yaml"))
    kit.edit("images/demo.yaml", "[tool, local]", "[frame, jit, trainer, kernels]")
    text = (kit.root / "images/demo.yaml").read_text()
    kit.write("images/plain.yaml", text.replace(", kernels", ""))
    return kit


class Said:
    """What commands print in this process, whose index is in memory."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.err = ""

    def of(self, words: str, code: int = 0) -> str:
        self._capsys.readouterr()
        done = main(words.split())
        said = self._capsys.readouterr()
        assert done == code, said.err
        self.err = " ".join(said.err.split())
        return said.out

    def json(self, words: str, code: int = 0) -> Any:
        return json.loads(self.of(f"{words} --json", code))


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    return Said(capsys)


def test_a_lock_is_checked_made_and_checked_again(kit: Kit, said: Said) -> None:
    out = said.of("lock --check", 1)
    assert f"versions.yaml:12:9: {LOCK} is stale: tool: nothing → 1.0\n" in out
    assert "→ primus lock demo" in said.err
    assert "not compared, because no source was asked: dependencies" in said.err
    document = said.json("lock --check", 1)
    assert document["fresh"] is False
    assert ("tool", "versions.yaml:12:9") in [
        (row["component"], row["where"]) for row in document["stale"]
    ]
    assert {row["lock"] for row in document["stale"]} == {LOCK}
    said.of("lock --dry-run", 1)
    assert not (kit.root / LOCK).exists()
    said.of("lock")
    assert f"{LOCK}: 3 files, 0.0 MB; new" in said.err
    assert kit.locked("demo", "helper") == "1.0"
    assert said.of("lock --check") == f"✓ {LOCK} matches versions.yaml\n"
    assert said.json("lock --check") == {"fresh": True, "stale": []}
    said.of("lock --dry-run")
    assert f"{LOCK}: 3 files, 0.0 MB; nothing changed" in said.err
    assert said.json("lock demo")[0] == {"lock": LOCK, "files": 3, "changes": []}


def test_what_changed_in_a_lock_is_said(kit: Kit, said: Said, index: MemoryIndex) -> None:
    said.of("lock")
    kit.edit("versions.yaml", "version: 1.0", "version: 1.1")
    index.wheels["tool"]["1.1"] = ""
    assert "tool: 1.0 → 1.1" in said.of("lock --check", 1)
    (row,) = said.json("lock --dry-run", 1)
    assert row["changes"] == [
        {"kind": "wheel", "name": "helper", "old": "1.0", "new": None},
        {"kind": "wheel", "name": "tool", "old": "1.0", "new": "1.1"},
    ]
    assert kit.locked("demo", "tool") == "1.0"
    said.of("lock")
    assert "2 changed wheel helper 1.0 → — wheel tool 1.0 → 1.1" in said.err
    index.wheels["tool"]["1.1"] = "helper"
    assert "nothing changed" in (said.of("lock"), said.err)[1], "nobody asked"
    said.of("lock --refresh")
    assert "wheel helper — → 2.0" in said.err
    index.wheels["helper"] = {"3.0": ""}
    said.of("lock --refresh-package helper")
    assert "wheel helper 2.0 → 3.0" in said.err


def test_a_package_is_refreshed_by_the_name_of_its_lock(kit: Kit, said: Said) -> None:
    said.of("lock")
    said.of("lock --refresh-package helpr", 2)
    assert "'helpr': the locks have no such package; did you mean 'helper'?" in said.err
    for option in ("--dry-run", "--refresh", "--refresh-package helper"):
        said.of(f"lock --check {option}", 2)
        assert "--check contacts no source, so there is nothing to resolve" in said.err


@pytest.mark.parametrize(
    ("words", "locks"),
    [
        ("lock", [LOCK, PLAIN]),
        ("lock plain", [PLAIN]),
        ("lock --all", [LOCK, PLAIN]),
        ("lock --channel pypi", [LOCK, PLAIN]),
        ("lock --channel debian", []),
    ],
)
def test_targets_are_named_or_all_of_a_channel(
    followed: Kit, said: Said, words: str, locks: list[str]
) -> None:
    followed.write("images/own.yaml", "description: d\nchannels: [local]\ncomponents: [local]\n")
    assert [row["lock"] for row in said.json(words)] == locks


def test_newer_versions_are_listed_with_the_newest_that_fits(followed: Kit, said: Said) -> None:
    rows = {(row["component"], row["pinned"]): row for row in said.json("outdated")}
    together = {"frame": "1.1", "jit": "3.1"}
    assert {key: (row["compatible"], row["newest"], row["moves"]) for key, row in rows.items()} == {
        ("frame", "1.0"): ("1.1", "1.1", together),
        ("jit", "3.0"): ("3.1", "3.2", together),
        ("frame", "1.1+cpu"): ("1.2+cpu", "1.2+cpu", {"frame": "1.2+cpu"}),
        ("jit", "3.1"): (None, "3.2", {}),
        ("kernels", "5.0"): ("6.0", "6.0", {**together, "kernels": "6.0"}),
        ("trainer", "1.0"): (None, "2.0", {}),
    }
    assert rows["trainer", "1.0"]["targets"] == ["demo", "plain"]
    lines = [re.split("  +", line) for line in said.of("outdated").splitlines()]
    assert lines[0] == ["component", "channel", "targets", "pinned", "compatible", "newest"]
    assert ["jit", "pypi", "demo", "3.0", "3.1 (with frame)", "3.2"] in lines
    assert ["trainer", "pypi", "demo, plain", "1.0", "–", "2.0"] in lines


def test_pins_at_their_newest_version_are_counted_and_an_index_that_is_silent_is_named(
    kit: Kit, said: Said, index: MemoryIndex
) -> None:
    kit.edit("versions.yaml", "name: Tool", "name: Tool\n    behind: it is small")
    assert "tool: it is small" in said.of("outdated")
    assert said.of("outdated").splitlines()[2] == "0 pins of 1 at the newest version"
    index.silent = {"tool"}
    assert "the index of tool does not answer" in said.of("outdated", 3)
    index.silent, index.wheels = set(), {"tool": {"1.0": ""}}
    assert said.of("outdated").splitlines()[-1] == "1 pin of 1 at the newest version"


@pytest.mark.parametrize(
    ("words", "moved"),
    [
        ("", ["frame 1.1", "frame 1.2+cpu", "jit 3.1", "kernels 6.0"]),
        ("jit", ["frame 1.1", "jit 3.1"]),
        ("kernels", ["frame 1.1", "jit 3.1", "kernels 6.0"]),
        ("kernels frame", ["frame 1.1", "frame 1.2+cpu", "jit 3.1", "kernels 6.0"]),
        ("frame=1.1", ["frame 1.1", "jit 3.1"]),
        ("frame==1.1.0", ["frame 1.1", "jit 3.1"]),
    ],
)
def test_pins_move_with_those_that_they_follow(
    followed: Kit, said: Said, words: str, moved: list[str]
) -> None:
    out = said.of(f"bump {words}")
    lines = re.findall(r"(?m)^\+ .*wheel: (\w+), version: ([^,]+),", out)
    assert sorted(f"{name} {version}" for name, version in lines) == moved
    assert (followed.root / "versions.yaml").read_text().count("version: 1.1,") == 0


@pytest.mark.parametrize(
    ("words", "remark"),
    [
        ("frame=1.1", "! frame moves for demo only; for plain, frame 1.1 is another build"),
        ("jit", "! jit moves for demo only; for plain, no newer version fits (pinned: 3.1)"),
    ],
)
def test_targets_that_stay_are_said(followed: Kit, said: Said, words: str, remark: str) -> None:
    assert remark in said.of(f"bump {words}")
    assert any(
        remark.endswith(line[-20:]) or remark[2:] in line
        for line in said.json(f"bump {words}")["remarks"]
    )


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("frame=1.2+cu130", "no index offers frame 1.2+cu130"),
        ("frame=7", "no index offers frame 7"),
        ("jit=3.2", "jit 3.2 does not fit: it follows frame, whose wheel names 3.0"),
        ("jit=3.3+cu130", "jit 3.3+cu130 does not fit: it follows frame"),
        ("trainer=2.0", "trainer 2.0 needs frame>=1.2, and a target may have 1.0"),
        ("traner", "no pin of a Python index is called 'traner'; did you mean 'trainer'?"),
        ("jit jit=3.1", "jit is named twice"),
        ("jit=latest", "jit=latest names no version"),
        ("jit=", "jit= names no version"),
        ("tool", "tool is pinned for channel pypi, which builds none of these targets now"),
    ],
)
def test_what_cannot_move_is_refused(followed: Kit, said: Said, words: str, reason: str) -> None:
    said.of(f"bump {words}", 2)
    assert reason in said.err


def test_an_index_that_is_silent_moves_nothing(kit: Kit, said: Said, index: MemoryIndex) -> None:
    index.silent = {"tool"}
    said.of("bump", 3)
    assert "tool: the index of tool does not answer" in said.err
    assert "name the components that can be moved" in said.err


def test_a_bump_shows_its_difference_and_writes_it_when_asked(kit: Kit, said: Said) -> None:
    kit.edit("versions.yaml", "name: Tool", "name: Tool # ours\n    behind: it is small")
    said.of("lock")
    before = (kit.root / "versions.yaml").read_text()
    lines = said.of("bump").splitlines()
    assert lines[:2] == ["--- old", "+++ versions.yaml"]
    assert lines[3:5] == [
        "-      - {wheel: tool, version: 1.0, channel: pypi}",
        "+      - {wheel: tool, version: 1.1, channel: pypi}",
    ]
    assert f"{LOCK}: 3 files, 0.0 MB; 1 changed" in lines
    assert lines[-3:-1] == ["", "Bump tool 1.0 → 1.1"]
    assert lines[-1].startswith("! tool moves to 1.1; `behind` in versions.yaml says: it is small.")
    document = said.json("bump")
    assert (document["moves"], document["message"]) == ({"tool": "1.1"}, "Bump tool 1.0 → 1.1")
    change = {"kind": "wheel", "name": "tool", "old": "1.0", "new": "1.1"}
    assert document["locks"] == [{"lock": LOCK, "changes": [change]}]
    assert (kit.root / "versions.yaml").read_text() == before
    said.of("bump --write")
    assert (kit.root / "versions.yaml").read_text() == before.replace("n: 1.0", "n: 1.1")
    assert kit.locked("demo", "tool") == "1.1"
    assert said.of("bump") == "nothing moves: pins are as named, or the newest that fit\n"
    assert said.json("bump tool=1.1")["message"] == ""
    assert "+      - {wheel: tool, version: 1.0, channel: pypi}" in said.of("bump tool=1.0")


def test_a_bump_is_one_commit_of_its_own_files(
    kit: Kit, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_AUTHOR_NAME": "t"}.items():
        monkeypatch.setenv(name, value)
    said.of("lock")
    git(kit.root, "init", "-q")
    git(kit.root, "config", "user.name", "t")
    git(kit.root, "config", "user.email", "t@example.invalid")
    kit.write("other", "a")
    git(kit.root, "add", "versions.yaml", "images", "other")
    git(kit.root, "commit", "-qm", "one")
    kit.write("other", "b")
    text = (kit.root / "versions.yaml").read_text()
    kit.write("versions.yaml", text + "# mine\n")
    said.of("bump --commit", 2)
    assert "versions.yaml was changed and not committed" in said.err
    kit.write("versions.yaml", text)
    said.of("bump tool=1.1 --release v26.12 --commit")
    assert git(kit.root, "log", "-1", "--format=%B") == "Begin v26.12\n\ntool 1.0 → 1.1"
    assert git(kit.root, "show", "--format=", "--name-only").split() == [LOCK, "versions.yaml"]
    assert git(kit.root, "status", "--porcelain", "--untracked-files=no") == "M other"
    today = datetime.now(tz=UTC).date().isoformat()
    begun = (kit.root / "versions.yaml").read_text().splitlines()
    assert begun[:2] == ["release: v26.12", f"created: {today}"]
    assert begun[2].startswith("supported_until: 20")
    (kit.root / ".git/hooks/pre-commit").write_text("#!/bin/sh\necho no >&2; exit 1\n")
    (kit.root / ".git/hooks/pre-commit").chmod(0o755)
    said.of("bump --release v26.12.1 --commit", 3)
    assert "git does not commit: no → the files are written; commit them" in said.err
