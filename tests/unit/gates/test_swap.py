"""A build after a change in a local folder alone: it plans nothing, and the image is that of an ordinary build."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from primus.engine.beside import RecipeCheck
from primus.engine.unchanged import last_builds
from primus.files import read_sealed
from primus.gates import rules
from primus.gates.swap import swapped
from project_kit import Kit, Result, make_project

ORDINARY = "primus.plan.layers"


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kit:
    kit = make_project(tmp_path / "project")
    time.sleep(0.06)
    kit.build("demo", "other")
    monkeypatch.chdir(kit.root)
    return kit


def build(kit: Kit, *words: str) -> tuple[Result, bool]:
    """Build, and return the result and whether it planned."""
    code = (
        f"import sys; from primus.cli.main import main; code = main({['build', *words]});"
        f"print('planned' if '{ORDINARY}' in sys.modules else 'short', file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=kit.root, env=kit.env, capture_output=True, text=True, check=False
    )
    *lines, how = done.stderr.splitlines()
    return Result(done.returncode, done.stdout, "\n".join(lines)), how == "planned"


def record(store: Path, target: str = "demo") -> dict[str, Any]:
    """What the store says of the last build, without times."""
    found: dict[str, Any] = read_sealed(store / "targets" / f"{target}.json")
    del found["when"]
    for line in found["layers"]:
        del line["seconds"], line["built"]
    for action in found["inputs"]["actions"].values():
        action["record"] = read_sealed(store / "actions" / f"{action['key']}.json")
        del action["record"]["layer"]["seconds"]
    return found


def other_link(kit: Kit) -> None:
    link = kit.root / "parts/alpha/link"
    link.unlink()
    link.symlink_to("blob")


CHANGES: dict[str, Callable[[Kit], object]] = {
    "recipe": lambda kit: kit.write("recipes/one.yaml", "a: 2\n"),
    "longer file": lambda kit: kit.write("parts/beta/blob", b"longer" * 10_000),
    "empty file": lambda kit: kit.write("parts/alpha/sub/run", ""),
    "link": other_link,
    "two folders": lambda kit: (kit.write("recipes/one.yaml", "a: 3\n"), kit.write("parts/beta/blob", b"b")),
}
FOR_THE_PLAN: dict[str, Callable[[Kit], object]] = {
    "mode": lambda kit: (kit.root / "parts/alpha/blob").chmod(0o755),
    "added file": lambda kit: kit.write("recipes/two.yaml", "a: 1\n"),
    "removed file": lambda kit: (kit.root / "parts/alpha/link").unlink(),
    "large file": lambda kit: kit.write("parts/beta/blob", os.urandom(5 << 20)),
    "pins as well": lambda kit: (kit.write("recipes/one.yaml", "a: 2\n"), kit.edit("versions.yaml", "Beta", "Bets")),
}


@pytest.mark.parametrize(
    ("change", "plans"),
    [(change, False) for change in CHANGES.values()] + [(change, True) for change in FOR_THE_PLAN.values()],
    ids=[*CHANGES, *FOR_THE_PLAN],
)
def test_the_image_is_that_of_an_ordinary_build(kit: Kit, change: Callable[[Kit], object], plans: bool) -> None:
    change(kit)
    result, planned = build(kit, "demo")
    assert result.code == 0, result.err
    assert planned is plans
    assert re.search(r"^[12] layers? built, [12] reused", result.err, re.M)
    fresh = kit.build("demo", "--store", "fresh")
    assert fresh.digest == result.digest
    assert record(kit.root / ".primus/store") == record(kit.root / "fresh")
    index = json.loads((kit.root / ".primus/store/index.json").read_text())["manifests"]
    assert result.digest in [one["digest"] for one in index]


def test_changes_in_a_row_and_back(kit: Kit) -> None:
    """A file that was written just before a build counts as modified in the next one."""
    first = kit.build().digest
    for number in range(3):
        kit.write("recipes/one.yaml", f"a: 2\nb: {number}\n")
        result, planned = build(kit, "demo")
        assert not planned
        assert result.digest != first
    again, planned = build(kit, "demo")
    assert (again.digest, planned) == (result.digest, False)
    assert "nothing to do" in again.err
    kit.write("recipes/one.yaml", "a: 1\n")
    # The layer is in the store; what the gates found in it is in their cache.
    back, planned = build(kit, "demo")
    assert (back.digest, planned) == (first, True)


def test_targets_share_the_new_layer(kit: Kit) -> None:
    kit.write("recipes/one.yaml", "a: 2\n")
    result, planned = build(kit, "demo", "other")
    assert not planned
    assert result.err.count("✓ recipes") == 1
    assert result.out.split() == kit.build("demo", "other", "--store", "fresh").out.split()


def test_the_output_is_that_of_an_ordinary_build(kit: Kit) -> None:
    kit.write("recipes/one.yaml", "a: 2\n")
    short, planned = build(kit, "demo")
    assert not planned
    kit.write("recipes/one.yaml", "a: 1\n")
    kit.build()
    for path in (kit.root / ".primus/store/actions").glob("*.json"):
        if (read_sealed(path) or {})["name"] == "recipes":
            path.unlink()
    kit.write("recipes/one.yaml", "a: 2\n")
    (kit.root / ".primus/cache/unchanged-demo.json").unlink()
    long, planned = build(kit, "demo")
    assert planned
    times = re.compile(r"[0-9]+\.[0-9]+(?= s|  [0-9a-f]{12})")
    assert times.sub("", short.err) == times.sub("", long.err)
    assert short.out == long.out


def test_a_recipe_that_does_not_load_is_refused_with_its_place(kit: Kit) -> None:
    kit.write("recipes/one.yaml", "a: [1\nb: 2\n")
    result, planned = build(kit, "demo")
    assert (result.code, planned) == (2, True)
    assert "recipes/one.yaml:2:2" in result.err
    assert "a: [1" not in (kit.root / ".primus/store/index.json").read_text()
    assert build(kit, "demo")[0].code == 2, "its layer must not count as checked"


def test_a_recipe_that_is_modified_during_its_check_is_checked_again(kit: Kit) -> None:
    kit.write("recipes/one.yaml", "a: 2\n")
    builds = last_builds(["demo"])
    check = RecipeCheck(builds)

    def checked() -> bool:
        done = check.passed()
        kit.write("recipes/one.yaml", "a: 3\n")
        return done

    assert not swapped(builds, checked, time.time_ns())
    assert not any((kit.root / ".primus/store/actions").glob(f"{'?' * 64}.json.*"))
    assert kit.build().digest == kit.build("demo", "--store", "fresh").digest


def test_the_budget_is_judged(kit: Kit) -> None:
    kit.write("images/demo.yaml", (kit.root / "images/demo.yaml").read_text() + "budget_gb: 0.000002\n")
    kit.build()
    kit.write("parts/beta/blob", os.urandom(10_000))
    result, planned = build(kit, "demo")
    assert (result.code, planned) == (1, True)
    assert "its budget is 2.0 kB" in result.err


def test_a_trace_in_a_modified_file_is_found(kit: Kit) -> None:
    named = build(kit, "demo")[0].out
    kit.write("parts/beta/blob", b"see /tmp/pip-build/x")
    result, planned = build(kit, "demo")
    assert (result.code, planned) == (1, True)
    assert "beta /opt/beta/blob: build path: /tmp/pip-build/x" in result.err
    assert named.strip() in (kit.root / ".primus/store/index.json").read_text()


def test_a_layer_in_which_a_gate_found_something_is_judged_again(kit: Kit) -> None:
    kit.edit("images/demo.yaml", "channels: [local]", "channels: [local]\npreviews: {local: it is a test}")
    kit.write("parts/beta/blob", b"see /tmp/pip-build/x")
    time.sleep(0.06)
    assert "✗ litter: " in build(kit, "demo")[0].err
    kit.write("recipes/one.yaml", "a: 2\n")
    # The verdict does not depend on this layer.
    result, planned = build(kit, "demo")
    assert "✗ litter: " in result.err
    assert not planned
    kit.write("parts/beta/blob", b"nothing to see")
    result, planned = build(kit, "demo")
    assert "litter" not in result.err
    assert planned


def test_a_damaged_blob_is_not_copied(kit: Kit) -> None:
    """The sizes and times of this config say nothing, but its bytes are hashed."""
    digest = record(kit.root / ".primus/store")["content"]
    path = kit.root / ".primus/store/blobs/sha256" / digest[7:]
    kit.write("recipes/one.yaml", "a: 2\n")
    builds = last_builds(["demo"])
    path.write_bytes(path.read_bytes().replace(b"red", b"rad"))
    assert not swapped(builds, RecipeCheck(builds).passed, time.time_ns())


def test_a_folder_that_becomes_a_link_out_of_the_project_is_refused(kit: Kit) -> None:
    (kit.root / "parts").rename(kit.root.parent / "outside")
    (kit.root / "parts").symlink_to(kit.root.parent / "outside")
    (kit.root / "parts/beta/blob").write_text("not of this project")
    result, _ = build(kit, "demo")
    assert result.code == 2
    assert "is outside of this repository" in result.err


def test_an_included_path_behind_a_link_out_of_the_project_is_refused(kit: Kit) -> None:
    (kit.root.parent / "outside/sub").mkdir(parents=True)
    (kit.root / "parts/alpha/there").symlink_to(kit.root.parent / "outside")
    kit.edit("versions.yaml", "path: parts/alpha,", "path: parts/alpha, include: [there/sub],")
    result, _ = build(kit, "demo")
    assert result.code == 2
    assert "alpha: parts/alpha/there/sub is outside of this repository" in result.err


@pytest.mark.parametrize("name", ["to", "assembler"])
def test_a_folder_may_be_called_like_another_input(kit: Kit, name: str) -> None:
    (kit.root / "parts/beta").rename(kit.root / name)
    kit.edit("versions.yaml", "path: parts/beta", f"path: {name}")
    before = kit.build().digest
    for text in ("one", "two"):
        kit.write(f"{name}/blob", text)
        result, planned = build(kit, "demo")
        assert not planned
        assert result.digest not in (before, "")
        assert result.digest == kit.build("demo", "--store", f"fresh-{text}").digest
        kit.build()


def test_no_image_is_named_if_a_folder_of_another_one_cannot_be_read(kit: Kit) -> None:
    kit.edit("images/demo.yaml", "[alpha, beta, recipes]", "[alpha]")
    kit.build("demo", "other")
    index = (kit.root / ".primus/store/index.json").read_bytes()
    kit.write("parts/alpha/blob", "new")
    (kit.root / "parts/beta/blob").unlink()
    os.mkfifo(kit.root / "parts/beta/blob")
    assert build(kit, "demo", "other")[0].code == 2
    assert (kit.root / ".primus/store/index.json").read_bytes() == index


def test_a_command_that_ignores_sigchld_builds(kit: Kit) -> None:
    kit.write("recipes/one.yaml", "a: 2\n")
    ignore = f"import os, signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv({sys.executable!r}, "
    command = [sys.executable, "-c", f"{ignore}{kit.command('build', 'demo')})"]
    done = subprocess.run(command, cwd=kit.root, env=kit.env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == kit.build("demo", "--store", "fresh").digest


def test_no_gate_looks_at_what_a_plain_layer_holds() -> None:
    for path in Path(rules.__file__).parent.glob("*.py"):
        assert ".folders" not in path.read_text(), path.name
