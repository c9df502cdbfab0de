"""`primus lock` as a person types it, on a project whose wheels lie on 127.0.0.1 and whose debs in
a file archive.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from gits import commit, git
from loopback import Server, index_debs, make_deb, make_wheel, serve
from primus_images.plan.project import Project
from primus_images.release import golden
from project_kit import Kit
from tables import text_of

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(shutil.which("apt-get") is None, reason="needs apt"),
]

VERSIONS = text_of("versions/lock.yaml")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Kit, Server]]:
    root = tmp_path / "www"
    for version in ("1.0", "1.1"):
        make_wheel(root / "files", "tool", version, needs=("helper",))
    make_wheel(root / "files", "helper", "1.0")
    make_deb(root / "pool", "python3.11-minimal", "3.11.2-6", essential=True)
    make_deb(root / "pool", "usr-is-merged", "37")
    index_debs(root, "bookworm")
    kit = Kit(tmp_path / "project")
    kit.write("versions.yaml", VERSIONS)
    kit.write(
        "images/demo.yaml",
        "description: d\nbase: bookworm\nchannels: [pypi]\ncomponents: [tool, local]\n",
    )
    kit.write("images/plain.yaml", "description: d\nchannels: [local]\ncomponents: [local]\n")
    kit.write("part/file", "x")
    for name in [n for n in os.environ if n.startswith("PIP_") or n.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    sources = kit.write("apt/sources.list", f"deb [trusted=yes] file:{root}/ bookworm main\n")
    conf = kit.write(
        "apt/apt.conf", f'Dir::Etc::sourcelist "{sources}";\nDir::Etc::sourceparts "/dev/null";\n'
    )
    monkeypatch.setenv("APT_CONFIG", str(conf))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with serve(root) as server:
        monkeypatch.setenv("PIP_INDEX_URL", server.url + "/simple")
        yield kit, server


NAME = "rocm/primus:v26.11"
NO_CURVES = "has no golden curves, so training was not compared"
LOCK = "images/locks/pypi/demo.json"


def test_from_no_lock_to_a_fresh_one(world: tuple[Kit, Server]) -> None:
    kit, server = world
    before = kit.primus("lock", "--check")
    assert before.code == 1
    assert f"versions.yaml:12:9: {LOCK} is stale: tool: nothing → 1.0\n" in before.out
    assert (
        f"versions.yaml:6:5: {LOCK} is stale: base bookworm python: nothing → 3.11.2\n"
        in before.out
    )
    refused = kit.primus("build", "demo", "--offline")
    assert (refused.code, "demo has no lock yet" in refused.err) == (2, True)
    made = kit.primus("lock")
    assert made.code == 0
    assert f"{LOCK}: 4 files" in made.err
    text = (kit.root / LOCK).read_text()
    assert str(server.port) not in text
    assert str(kit.root) not in text
    assert [f["name"] for f in json.loads(text)["files"]] == [
        "python3.11-minimal",
        "usr-is-merged",
        "helper",
        "tool",
    ]
    assert kit.primus("lock", "--check").code == 0
    assert not (kit.root / "images/locks/local").exists(), "a target without pins has no lock"


def test_a_changed_pin_is_named_by_line_and_changes_itself_alone(world: tuple[Kit, Server]) -> None:
    kit, server = world
    assert kit.primus("lock").code == 0
    make_wheel(server.root / "files", "helper", "2.0")
    kit.edit("versions.yaml", "{wheel: tool, version: 1.0", "{wheel: tool, version: 1.1")
    stale = kit.primus("lock", "demo", "--check")
    assert stale.code == 1
    line = VERSIONS.splitlines().index("      - {wheel: tool, version: 1.0, channel: pypi}") + 1
    assert stale.out.startswith(f"versions.yaml:{line}:")
    assert "tool: 1.0 → 1.1" in stale.out
    text = (kit.root / LOCK).read_text()
    tried = kit.primus("lock", "--dry-run")
    assert (tried.code, (kit.root / LOCK).read_text()) == (1, text)
    assert ["wheel", "tool", "1.0", "→", "1.1"] in [line.split() for line in tried.err.splitlines()]
    for verb in ("plan", "explain", "build"):
        refused = kit.primus(verb, "demo")
        assert refused.code == 2
        assert "the lock of demo is stale: wheel tool: locked 1.0, wanted 1.1" in refused.err
        assert "primus lock demo" in refused.err
    assert (kit.root / LOCK).read_text() == text
    (change,) = json.loads(kit.primus("lock", "--json").out)[0]["changes"]
    assert change == {"kind": "wheel", "name": "tool", "old": "1.0", "new": "1.1"}
    refreshed = kit.primus("lock", "--refresh")
    assert refreshed.code == 0
    assert [line.split() for line in refreshed.err.splitlines() if "→" in line] == [
        ["wheel", "helper", "1.0", "→", "2.0"]
    ]


def test_a_fresh_lock_is_not_written_again_and_asks_nobody(world: tuple[Kit, Server]) -> None:
    kit, server = world
    assert kit.primus("lock").code == 0
    stat = (kit.root / LOCK).stat()
    server.log.clear()
    again = kit.primus("lock")
    assert "nothing changed" in again.err
    assert (kit.root / LOCK).stat().st_mtime_ns == stat.st_mtime_ns
    assert server.log == []


def test_pins_without_a_fitting_lock_state_neither_packages_nor_curves(
    world: tuple[Kit, Server],
) -> None:
    kit, _ = world
    assert kit.primus("lock").code == 0
    kit.write(".gitignore", ".primus\n")
    curve = golden.Curve(recipe="abc", cpu="A", loss=(6.0, 5.0), grad_norm=(1.0, 1.0))
    curves = golden.Curves(release="v26.11-demo", versions={"tool": "1.0"}, curves={"a": curve})
    golden.save(kit.root, curves)
    commit(kit.root, {})

    def compared() -> tuple[set[str], str]:
        shown = json.loads(kit.primus("diff", "HEAD", "versions.yaml", "--json").out)
        return {section["name"] for section in shown["sections"]}, *shown["curves"]

    sections, sentence = compared()
    assert {"packages", "downloads", "environment"} <= sections
    assert "both sides have the curves of one run" in sentence
    kit.edit("versions.yaml", "{wheel: tool, version: 1.0", "{wheel: tool, version: 1.1")
    without = (sections - {"packages", "downloads"}, f"{NAME} {NO_CURVES}")
    assert compared() == without
    (kit.root / LOCK).unlink()
    assert compared() == without


def test_a_failure_leaves_the_old_lock_alone(world: tuple[Kit, Server]) -> None:
    kit, _ = world
    assert kit.primus("lock").code == 0
    text = (kit.root / LOCK).read_text()
    kit.edit("versions.yaml", "{wheel: tool, version: 1.0", "{wheel: tool, version: 9.9")
    failed = kit.primus("lock")
    assert failed.code == 2
    assert "tool==9.9" in failed.err
    kit.edit("versions.yaml", "{wheel: tool, version: 9.9", "{wheel: tool, version: 1.0")
    kit.edit("versions.yaml", "python: 3.11.2", "python: 3.11.7")
    failed = kit.primus("lock")
    assert failed.code == 2
    assert "states Python 3.11.7, but Debian bookworm has 3.11.2" in failed.err
    assert (kit.root / LOCK).read_text() == text


def test_a_lock_that_is_no_lock_is_named(world: tuple[Kit, Server]) -> None:
    kit, _ = world
    kit.write(LOCK, "{")
    broken = kit.primus("lock", "--check")
    assert broken.code == 2
    assert f"{LOCK}:1:2: not a lock: not JSON" in broken.err
    # The advice must work: `primus lock` alone refuses the damaged file.
    assert kit.primus("lock").code == 2
    assert "delete it and run `primus lock`" in broken.err
    (kit.root / LOCK).unlink()
    assert kit.primus("lock").code == 0


def test_what_is_gone_is_locked_again_by_name(world: tuple[Kit, Server]) -> None:
    kit, server = world
    assert kit.primus("lock").code == 0
    (server.root / "pool/python3.11-minimal_3.11.2-6_amd64.deb").unlink()
    make_deb(server.root / "pool", "python3.11-minimal", "3.11.2-7", essential=True)
    index_debs(server.root, "bookworm")
    make_wheel(server.root / "files", "helper", "2.0")
    text = (kit.root / LOCK).read_text()
    gone = kit.primus("build", "demo")
    assert gone.code == 3
    assert "for offers: python3.11-minimal 3.11.2-6" in gone.err
    assert (kit.root / LOCK).read_text() == text
    assert kit.primus("lock", "--refresh-package", "python3.11-minimal").code == 0
    lock = Project.find(kit.root).lock(kit.root / LOCK)
    assert lock is not None
    versions = {f.name: f.version for f in lock.files if f.name != "usr-is-merged"}
    assert versions == {"python3.11-minimal": "3.11.2-7", "tool": "1.0", "helper": "1.0"}


NATIVE = text_of("versions/native.yaml")


def test_a_build_has_packages_of_its_own_and_the_images_wheels(world: tuple[Kit, Server]) -> None:
    kit, server = world
    files = server.root / "files"
    make_wheel(files, "setup", "1.0", needs=("wheelhouse",))
    make_wheel(files, "wheelhouse", "1.0")
    make_wheel(files, "runtime", "3.0")
    (files / "native-1.0.tar.gz").write_bytes(b"source")
    make_deb(server.root / "pool", "compiler", "12")
    index_debs(server.root, "bookworm")
    kit.edit("images/demo.yaml", "[tool, local]", "[tool, native, local]")
    (kit.root / "versions.yaml").write_text(VERSIONS + NATIVE)
    made = kit.primus("lock", "demo")
    assert made.code == 0, made.err
    locked = [
        (f.get("base"), f["name"]) for f in json.loads((kit.root / LOCK).read_text())["files"]
    ]
    assert {n for b, n in locked if b is None} == {"tool", "helper", "native", "runtime"}
    assert {n for b, n in locked if b == "bookworm"} == {"python3.11-minimal", "usr-is-merged"}
    build = {
        "python3.11-minimal",
        "usr-is-merged",
        "compiler",
        "tool",
        "helper",
        "setup",
        "wheelhouse",
    }
    assert {n for b, n in locked if b == "native build"} == build
    make_wheel(files, "wheelhouse", "2.0")
    make_wheel(files, "setup", "1.1", needs=("wheelhouse",))
    kit.edit("versions.yaml", "setup==1.0", "setup==1.1")
    line = (kit.root / "versions.yaml").read_text().splitlines().index("      - sdist: native") + 1
    stale = kit.primus("lock", "demo", "--check").out
    assert stale.startswith(f"versions.yaml:{line}:"), stale
    assert "build native build wheels: setup==1.0 tool → setup==1.1 tool" in stale
    (change,) = json.loads(kit.primus("lock", "demo", "--json").out)[0]["changes"]
    assert change == {"kind": "wheel", "name": "setup", "old": "1.0", "new": "1.1"}


def test_a_builds_wheel_that_the_image_lacks_needs_a_version(world: tuple[Kit, Server]) -> None:
    kit, server = world
    make_wheel(server.root / "files", "setup", "1.0")
    (server.root / "files" / "native-1.0.tar.gz").write_bytes(b"source")
    kit.edit("images/demo.yaml", "[tool, local]", "[tool, native, local]")
    text = NATIVE.replace("setup==1.0", "setup").replace("        requires: [runtime]\n", "")
    (kit.root / "versions.yaml").write_text(VERSIONS + text.replace("debs: [compiler], ", ""))
    failed = kit.primus("lock", "demo")
    assert failed.code == 2
    assert "native build: the image has no setup" in failed.err


def test_a_train_is_bumped_as_one_commit_that_keeps_comments(world: tuple[Kit, Server]) -> None:
    kit, server = world
    for name, versions in {
        "transformers": (
            "1.0+rocm10.0.0",
            "1.0+rocm9.5.0",
            "1.1+rocm10.1.0",
            "1.2+rocm10.2.0",
            "3.0+cpu",
        ),
        "transformers-device": ("1.0+rocm10.0.0", "1.1+rocm10.1.0"),
        "needy": ("1.0", "2.0"),
    }.items():
        for version in versions:
            needs = {"needy 2.0": ("tool<1.1",)}.get(f"{name} {version}", ())
            make_wheel(server.root / "files", name, version, needs=needs)
    pins = "".join(
        f"  {name}:\n    name: N\n    held: {held}\n    behind: it is small\n    pins:\n      # "
        f"Why {name}.\n"
        f"      - {{wheel: {name}, version: {version}, channel: pypi}}\n"
        for name, version, held in (
            ("transformers", "1.0+rocm10.0.0", "true"),
            ("transformers-device", "1.0+rocm10.0.0", "true"),
            ("needy", "1.0", "false"),
        )
    )
    kit.write("versions.yaml", VERSIONS.replace("v26.11\n", "v26.11 # ours\n") + pins)
    kit.edit(
        "images/demo.yaml",
        "[tool, local]",
        "[tool, local, transformers, transformers-device, needy]",
    )
    assert kit.primus("lock").code == 0
    git(kit.root, "init", "-q")
    git(kit.root, "config", "user.name", "t")
    git(kit.root, "config", "user.email", "t@example.invalid")
    git(kit.root, "add", "versions.yaml", "images")
    git(kit.root, "commit", "-qm", "one")
    listed = json.loads(kit.primus("outdated", "--json").out)
    assert {
        row["component"]: (row["pinned"], row["compatible"], row["newest"]) for row in listed
    } == {
        "tool": ("1.0", "1.1", "1.1"),
        "transformers": ("1.0+rocm10.0.0", "1.1+rocm10.1.0", "1.1+rocm10.1.0"),
        "transformers-device": ("1.0+rocm10.0.0", "1.1+rocm10.1.0", "1.1+rocm10.1.0"),
        "needy": ("1.0", "2.0", "2.0"),
    }
    before = (kit.root / "versions.yaml").read_text()
    shown = kit.primus("bump", "transformers")
    assert shown.code == 0, shown.err
    assert (
        "+      - {wheel: transformers-device, version: 1.1+rocm10.1.0, channel: pypi}" in shown.out
    )
    assert f"{LOCK}: 7 files, 0.0 MB; 2 changed" in shown.out
    assert (
        "! transformers moves to 1.1+rocm10.1.0; `behind` in versions.yaml says: it is small"
        in shown.out
    )
    assert (kit.root / "versions.yaml").read_text() == before
    assert kit.primus("bump", "transformers", "--commit").code == 0
    made = kit.primus("bump", "tool=1.1", "--release", "v26.12", "--commit")
    assert made.code == 0, made.err
    after = (kit.root / "versions.yaml").read_text()
    assert re.findall("#.*", before) == re.findall("#.*", after)
    assert (
        re.match("release: v26.12 # ours\ncreated: .*\nsupported_until: 20", after)
        and kit.primus("lock", "--check").code == 0
    )
    assert git(kit.root, "log", "-1", "--format=%s") == "Begin v26.12"
    assert git(kit.root, "status", "--porcelain", "--untracked-files=no") == ""
    # needy 2.0 needs an older tool, which now is no longer pinned.
    (row,) = [
        row
        for row in json.loads(kit.primus("outdated", "--json").out)
        if row["component"] == "needy"
    ]
    assert (row["compatible"], row["newest"]) == (None, "2.0")
    refused = kit.primus("bump", "needy=2.0")
    assert refused.code == 2 and "do not fit" in refused.err and "needy" in refused.err
    assert "did you mean 'needy'" in kit.primus("bump", "neddy").err
    assert kit.primus("bump", "needy=7").code == 2
    assert "nothing moves: pins are as named" in kit.primus("bump", "tool==1.1").out
    for word in ("tool=1.1.0", "tool=v1.1", "tool=1.1-0"):
        assert ("no index offers" in kit.primus("bump", word).err) == (word == "tool=1.1-0")
    assert "+      - {wheel: tool, version: 1.0, " in kit.primus("bump", "tool=1.0.0").out
    for word in ("latest", ">=1.1", "1.1=2"):
        assert f"tool={word} names no version" in kit.primus("bump", f"tool={word}").err
    server.faults.status["/simple/needy/"] = [500] * 9
    failed = kit.primus("outdated")
    assert (
        failed.code == 3 and "does not answer" in failed.out and "needy: it is small" in failed.out
    )


def test_a_pin_keeps_its_build_and_stays_with_what_it_needs(world: tuple[Kit, Server]) -> None:
    kit, server = world
    words = (
        "frame==1.0+cpu frame==1.1+cpu frame==1.2+cpu frame==1.0<jit==3.0 "
        "frame==1.1<jit==3.1 jit==3.0 jit==3.1"
    )
    for word in (
        f"{words} jit==3.2 jit==3.3+cu130 trainer==1.0 trainer==2.0 kernels==5.0 "
        "kernels==6.0<frame>=1.1"
    ).split():
        wheel, _, needs = word.partition("<")
        make_wheel(server.root / "files", *wheel.split("=="), needs=(needs,) if needs else ())
    kit.write("versions.yaml", VERSIONS + text_of("versions/followed.yaml"))
    kit.edit("images/demo.yaml", "[tool, local]", "[frame, jit, trainer]")
    kit.write("images/plain.yaml", (kit.root / "images/demo.yaml").read_text())
    kit.edit("images/demo.yaml", "trainer]", "trainer, kernels]")
    assert kit.primus("lock").code == 0
    best = {
        (row["component"], row["pinned"], row["targets"][0]): (
            row["compatible"],
            row["newest"],
            row["moves"],
        )
        for row in json.loads(kit.primus("outdated", "--json").out)
    }
    together = {"frame": "1.1", "jit": "3.1"}
    assert best == {
        ("frame", "1.0", "demo"): ("1.1", "1.1", together),
        ("jit", "3.0", "demo"): ("3.1", "3.2", together),
        ("frame", "1.1+cpu", "plain"): ("1.2+cpu", "1.2+cpu", {"frame": "1.2+cpu"}),
        ("jit", "3.1", "plain"): (None, "3.2", {}),
        ("kernels", "5.0", "demo"): ("6.0", "6.0", {**together, "kernels": "6.0"}),
        ("trainer", "1.0", "demo"): (None, "2.0", {}),
    }
    # Not 1.1+cpu.
    both, every = [("frame", "1.1"), ("jit", "3.1")], [("frame", "1.2+cpu"), ("kernels", "6.0")]
    cases = {
        "": [*both, *every],
        "jit": both,
        "kernels": [*both, every[1]],
        "kernels frame": [*both, *every],
    }
    for names, expected in (cases | {"frame=1.1": both}).items():
        shown = kit.primus("bump", *names.split())
        moved = re.findall(r"(?m)^\+ .*wheel: (\w+), version: ([^,]+),", shown.out)
        assert sorted(moved) == sorted(expected), shown.err
    follows = "does not fit: it follows frame, whose wheel names 3.0"
    for word, reason in {
        "frame=1.2+cu130": "no index offers frame 1.2+cu130",
        "frame=7": "no index offers frame 7",
        "jit=3.2": f"jit 3.2 {follows}",
        "jit=3.3+cu130": f"jit 3.3+cu130 {follows}",
    }.items():
        assert reason in kit.primus("bump", word).err
    some = kit.primus("bump", "frame=1.1").out
    assert "! frame moves for demo only; for plain, frame 1.1 is another build" in some
    alone = kit.primus("bump", "jit").out
    assert "! jit moves for demo only; for plain, no newer version fits (pinned: 3.1)" in alone
    refused = kit.primus("bump", "trainer=2.0")
    assert (
        refused.code,
        "trainer 2.0 needs frame>=1.2, and a target may have 1.0" in refused.err,
    ) == (2, True)
