"""The note that answers a no-op build: it holds exactly while nothing was touched."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from primus.cli.main import main
from primus.engine import note, unchanged
from primus.files import read_sealed, seal, write_sealed
from project_kit import Kit, make_project


def nothing_to_do(words: list[str]) -> bool:
    return unchanged.nothing_to_do(unchanged.last_builds(words), time.time_ns())


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kit:
    kit = make_project(tmp_path / "project")
    (kit.root / "parts/alpha/empty").mkdir()
    time.sleep(0.06)
    kit.build("demo", "other")
    monkeypatch.chdir(kit.root)
    assert nothing_to_do(["demo"])
    return kit


def same_size_same_times(kit: Kit) -> None:
    path = kit.root / "parts/beta/blob"
    before = path.stat()
    path.write_bytes(b"x" * before.st_size)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def new_engine(kit: Kit) -> None:
    note = next((kit.root / ".primus/cache").glob("unchanged-demo.json"))
    data = read_sealed(note)
    engine = next(i for i, (_, paths, _) in enumerate(data["groups"]) if "plan/layers.py" in paths)
    data["groups"][engine][2] = data["groups"][engine][2].replace("1", "2")
    write_sealed(note, data)


def change_note(kit: Kit, change: Callable[[dict[str, Any]], object]) -> None:
    path = kit.root / ".primus/cache/unchanged-demo.json"
    note = read_sealed(path)
    change(note)
    write_sealed(path, note)


def move_out(kit: Kit, name: str) -> None:
    """The files stay the same, and a link leads to them."""
    (kit.root / name).rename(kit.root.parent / "outside")
    (kit.root / name).symlink_to(kit.root.parent / "outside")


def blob(kit: Kit) -> Path:
    manifest = json.loads((kit.root / ".primus/store/index.json").read_text())["manifests"][0]
    data = json.loads((kit.root / ".primus/store/blobs/sha256" / manifest["digest"][7:]).read_text())
    return kit.root / ".primus/store/blobs/sha256" / data["layers"][0]["digest"][7:]


TOUCHES: dict[str, Callable[[Kit], object]] = {
    "pins": lambda kit: kit.edit("versions.yaml", "/opt/beta", "/opt/bets"),
    "target": lambda kit: kit.edit("images/demo.yaml", "red", "rod"),
    "content of the same size and time": same_size_same_times,
    "mode": lambda kit: (kit.root / "parts/alpha/sub/run").chmod(0o644),
    "added file": lambda kit: kit.write("parts/alpha/new", ""),
    "added in an empty folder": lambda kit: kit.write("parts/alpha/empty/new", ""),
    "removed file": lambda kit: (kit.root / "parts/alpha/link").unlink(),
    "removed folder": lambda kit: shutil.rmtree(kit.root / "parts/alpha/sub"),
    "missing blob": lambda kit: blob(kit).unlink(),
    "cut blob": lambda kit: os.truncate(blob(kit), 10),
    "index": lambda kit: (kit.root / ".primus/store/index.json").write_text("{}"),
    "engine": new_engine,
    "broken note": lambda kit: kit.write(".primus/cache/unchanged-demo.json", "{"),
    "odd note": lambda kit: kit.write(".primus/cache/unchanged-demo.json", "[1]"),
    "deep note": lambda kit: (kit.root / ".primus/cache/unchanged-demo.json").write_bytes(seal(b"[" * 100_000)),
    "number in the note": lambda kit: change_note(kit, lambda note: note.update(groups=[[None, 5, ""]])),
    "another target's note": lambda kit: shutil.copy(
        kit.root / ".primus/cache/unchanged-other.json", kit.root / ".primus/cache/unchanged-demo.json"
    ),
    "another checkout of the engine": lambda kit: change_note(kit, lambda note: note["engine"].__setitem__(0, "/opt")),
    "another compressor": lambda kit: change_note(kit, lambda note: note["engine"].__setitem__(1, "/opt")),
    "another zlib": lambda kit: change_note(kit, lambda note: note["engine"].__setitem__(2, "1.0")),
    "first lock": lambda kit: kit.write("images/locks/local/demo.json", "{"),
    "added target": lambda kit: kit.write("images/more.yaml", ""),
    "folder moved out of the project": lambda kit: move_out(kit, "parts"),
    "local folder moved out of the project": lambda kit: move_out(kit, "parts/alpha"),
}


@pytest.mark.parametrize("touch", TOUCHES.values(), ids=TOUCHES.keys())
def test_any_touch_leads_to_the_plan(
    kit: Kit, touch: Callable[[Kit], object], capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    touch(kit)
    assert not nothing_to_do(["demo"])
    assert capfd.readouterr().out == ""


def link_versions(kit: Kit) -> None:
    (kit.root / "versions.yaml").rename(kit.root / "pins.yaml")
    (kit.root / "versions.yaml").symlink_to("pins.yaml")


def link_folder(kit: Kit) -> None:
    (kit.root / "parts/alpha").rename(kit.root / "real")
    (kit.root / "parts/alpha").symlink_to("../real")


def include_behind_link(kit: Kit) -> None:
    kit.edit("versions.yaml", "path: parts/alpha,", "path: parts/alpha, include: [there/sub],")
    (kit.root / "real").mkdir()
    (kit.root / "parts/alpha/sub").rename(kit.root / "real/sub")
    (kit.root / "parts/alpha/there").symlink_to("../../real")


def list_recipe(kit: Kit) -> None:
    kit.edit("images/demo.yaml", "[alpha, beta, recipes]", "[alpha, beta]\nrecipes: [one]")
    kit.write("recipes/two.yaml", "a: 1\n")


def two_channels(kit: Kit) -> None:
    kit.edit("images/demo.yaml", "channels: [local]", "channels: [local, pypi]")


# What the project is like, and what is then changed in it.
HIDDEN: dict[str, tuple[Callable[[Kit], object], Callable[[Kit], object]]] = {
    "pins behind a link": (link_versions, lambda kit: kit.edit("pins.yaml", "/opt/beta", "/opt/bets")),
    "added file behind a link": (link_folder, lambda kit: kit.write("real/new", "")),
    "added file behind an included link": (include_behind_link, lambda kit: kit.write("real/sub/new", "")),
    "recipe that the target lists": (list_recipe, lambda kit: (kit.root / "recipes/one.yaml").unlink()),
    "lock of a lower channel": (two_channels, lambda kit: kit.write("images/locks/pypi/demo.json", "{")),
}


@pytest.mark.parametrize(("before", "touch"), HIDDEN.values(), ids=HIDDEN.keys())
def test_what_the_build_read_elsewhere_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: Callable[[Kit], object], touch: Callable[[Kit], object]
) -> None:
    kit = make_project(tmp_path / "project")
    before(kit)
    time.sleep(0.06)
    kit.build()
    monkeypatch.chdir(kit.root)
    assert nothing_to_do(["demo"])
    touch(kit)
    builds = unchanged.last_builds(["demo"])
    assert not builds or any(changed for _, changed in builds)


def test_the_copy_of_a_project_is_another_project(kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = str(tmp_path / "store")
    kit.build("demo", "--store", store)
    assert nothing_to_do(["demo", "--store", store])
    shutil.copytree(kit.root, tmp_path / "copy", symlinks=True)
    monkeypatch.chdir(tmp_path / "copy")
    assert not nothing_to_do(["demo", "--store", store])


def test_a_build_that_another_one_overtook_is_not_noted(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other build began earlier, with older files, and named its image just before this one writes its note."""
    (kit.root / ".primus/cache/unchanged-demo.json").unlink()
    paths = [kit.root / ".primus/store" / name for name in ("index.json", "targets/demo.json")]
    older = [path.read_bytes() for path in paths]
    kit.write("parts/beta/blob", "new")
    time.sleep(0.06)
    write = note._written

    def overtaken(*words: Any) -> Any:
        for path, data in zip(paths, older, strict=True):
            path.write_bytes(data)
        return write(*words)

    monkeypatch.setattr(note, "_written", overtaken)
    assert main(["build", "demo"]) == 0
    assert not nothing_to_do(["demo"])


def test_it_says_what_the_long_way_says(kit: Kit, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    assert nothing_to_do(["other", "demo"])
    short = capfd.readouterr()
    long = kit.build("other", "demo", "--engine", "auto")
    assert short.out == long.out
    bare = [re.sub(r"[0-9.]+ s$", "", text, flags=re.M) for text in (short.err, long.err)]
    assert bare == ["v26.11-other: nothing to do, \nv26.11-demo: nothing to do, \n"] * 2


def test_it_is_one_line_where_both_streams_are_one(kit: Kit) -> None:
    for words in (("demo",), ("demo", "--engine", "auto")):
        done = subprocess.run(
            kit.command("build", *words), cwd=kit.root, env=kit.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, check=True,
        )  # fmt: skip
        assert re.fullmatch(r"v26\.11-demo: nothing to do, [0-9.]+ s  sha256:[0-9a-f]{64}\n", done.stdout)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["demo", "--json"],
        ["absent"],
        ["demo", "absent"],
        ["../demo"],
        ["demo", "--offline", "other"],
        ["demo", "--project"],
        ["demo", "--project", ""],
        ["demo", "--store", ""],
    ],
)
def test_what_it_does_not_know_is_left_to_the_plan(kit: Kit, words: list[str]) -> None:
    assert not nothing_to_do(words)


def test_places_and_harmless_options_are_understood(kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert nothing_to_do(["--offline", "demo", "--locked"])
    store = str(tmp_path / "store")
    assert not nothing_to_do(["demo", "--store", store])
    kit.build("demo", "--store", store)
    assert nothing_to_do(["demo", "--store", store])
    assert not nothing_to_do(["demo"]), "the note is of the other store"
    monkeypatch.chdir(tmp_path)
    assert not nothing_to_do(["demo", "--store", store]), "no project here"
    assert nothing_to_do(["demo", "--store", "store", "--project", "project"])
    assert nothing_to_do(["demo", "--store", ".//store/", "--project", "./project"])
    monkeypatch.chdir(kit.root)
    kit.build("demo", "--store", ".")
    assert not nothing_to_do(["demo", "--store"]), "argparse refuses it"


def test_other_targets_note_does_not_count(kit: Kit) -> None:
    kit.edit("images/other.yaml", "red", "rod")
    assert nothing_to_do(["demo"])
    assert not nothing_to_do(["demo", "other"])


def test_it_works_from_a_folder_below(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(kit.root / "parts/alpha")
    assert nothing_to_do(["demo"])


def test_file_written_just_before_the_build_counts_as_modified(kit: Kit) -> None:
    """A second write in the same moment would leave no trace in the times."""
    ahead = time.time_ns() + 60 * 10**9
    os.utime(kit.write("parts/beta/blob", b"late"), ns=(ahead, ahead))
    kit.build()
    assert not nothing_to_do(["demo"])


def test_build_of_a_named_channel_does_not_answer_for_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = make_project(tmp_path / "project")
    kit.edit("images/demo.yaml", "channels: [local]", "channels: [pypi]")
    time.sleep(0.06)
    kit.build("demo", "--channel", "pypi")
    monkeypatch.chdir(kit.root)
    assert not nothing_to_do(["demo"])
    kit.build("demo")
    assert nothing_to_do(["demo"])
