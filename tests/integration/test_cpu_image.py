"""The cpu image itself: what it holds, how it runs, that other tools read it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from primus.recipes.choose import supported
from primus.recipes.load import read
from project_kit import Kit

pytestmark = pytest.mark.integration


def inside(kit: Kit, *words: str, options: tuple[str, ...] = ()) -> str:
    result = kit.primus("run", "cpu", "--no-entrypoint", *options, "--", *words)
    assert result.code == 0, result.err
    return result.out


def test_second_build_does_nothing(cpu_image: Kit) -> None:
    result = cpu_image.build("cpu", "--locked", "--offline")
    assert "nothing to do" in result.err


def test_versions_inside_equal_the_lock(cpu_image: Kit) -> None:
    lock = json.loads((cpu_image.root / "images/locks/pypi/cpu.json").read_text())
    want = {f["name"]: f["version"] for f in lock["files"] if f["kind"] == "wheel"}
    seen = json.loads(inside(cpu_image, "pip", "list", "--format", "json", "--disable-pip-version-check"))
    found = {re.sub(r"[-_.]+", "-", row["name"]).lower(): row["version"] for row in seen}
    assert {name: found.get(name) for name in want} == want
    debs = {f["name"]: f["version"] for f in lock["files"] if f["kind"] == "deb"}
    rows = inside(cpu_image, "dpkg-query", "-W", "-f", "${Package} ${Version}\n").splitlines()
    assert dict(row.split() for row in rows) == debs


def test_every_gate_passes(cpu_image: Kit) -> None:
    result = cpu_image.primus("check", "cpu", "--json")
    assert result.code == 0, result.out
    (image,) = json.loads(result.out)["images"]
    gates = {gate["gate"]: gate for gate in image["gates"]}
    assert gates["coverage"]["summary"].startswith("no GPU architecture to cover")
    debs = sum(
        f["kind"] == "deb" for f in json.loads((cpu_image.root / "images/locks/pypi/cpu.json").read_text())["files"]
    )
    assert f"{debs} debs" in gates["versions"]["summary"]


def test_dependencies_are_complete(cpu_image: Kit) -> None:
    assert "No broken requirements" in inside(cpu_image, "pip", "check")


def test_any_user_can_train_and_write(cpu_image: Kit) -> None:
    code = "import os, torch; open('/workspace/x', 'w').write('y'); print(os.getuid(), torch.ones(2).sum().item())"
    assert inside(cpu_image, "python3", "-c", code, options=("--user", "12345:12345")).split() == ["12345", "2.0"]


def test_banner_greets_a_shell_and_stays_out_of_a_commands_way(cpu_image: Kit) -> None:
    shell = cpu_image.primus("run", "cpu", input="echo from the shell")
    assert shell.code == 0
    assert shell.out == "from the shell\n"
    for words in ("v26.11", "2.13.0+cpu", "primus train llama3-proxy", "GPU"):
        assert words in shell.err
    command = cpu_image.primus("run", "cpu", "--", "sh", "-c", "echo from the command; exit 7")
    assert (command.code, command.out) == (7, "from the command\n")


def test_only_loopback_is_there(cpu_image: Kit) -> None:
    assert inside(
        cpu_image, "python3", "-c", "import socket; print([n for _, n in socket.if_nameindex()])"
    ).split() == ["['lo']"]


def test_outside_code_does_not_ship(cpu_image: Kit) -> None:
    names = ("versions", "images", "sandbox", "cli.host")
    code = f"import importlib.util as u; print([n for n in {names} if u.find_spec('primus.' + n)])"
    assert inside(cpu_image, "python3", "-c", code).strip() == "[]"
    assert "  build" not in inside(cpu_image, "primus", "--help")


def test_nothing_of_the_machine_is_left(cpu_image: Kit) -> None:
    for path in ("/etc/machine-id", "/var/log", "/etc/apt/sources.list", "/var/lib/apt/lists", "/etc/resolv.conf.host"):
        shown = inside(cpu_image, "sh", "-c", f"find {path} -type f -size +0 2>/dev/null | head -3")
        assert shown.strip() == "", f"{path} holds {shown}"
    aged = inside(cpu_image, "find", "/usr", "/opt", "/var", "-newermt", "1980-01-02", "-not", "-type", "d")
    assert aged.strip() == ""


@pytest.mark.skipif(shutil.which("skopeo") is None, reason="skopeo is not installed")
def test_skopeo_reads_the_store(cpu_image: Kit, tmp_path: Path) -> None:
    ref = "oci:.primus/store:v26.11-cpu"
    seen = subprocess.run(["skopeo", "inspect", ref], cwd=cpu_image.root, capture_output=True, text=True, check=True)
    data = json.loads(seen.stdout)
    assert data["Digest"] == cpu_image.build("cpu").digest
    assert data["Labels"]["io.primus.pins.torchtitan"] == "0.2.2"
    copy = ["skopeo", "copy", "--quiet", ref, f"dir:{tmp_path / 'copy'}"]
    subprocess.run(copy, cwd=cpu_image.root, check=True)


def test_validation_passes_and_leaves_its_evidence(cpu_image: Kit, tmp_path: Path) -> None:
    result = cpu_image.primus("validate", "cpu", "--locked", "--output", str(tmp_path), timeout=900)
    assert result.code == 0, result.out + result.err
    folder = tmp_path / "cpu/llama3-proxy"
    record = json.loads((folder / "record.json").read_text())
    assert record["passed"] is True
    assert record["image"]["manifest"] == cpu_image.build("cpu").digest
    assert record["versions"]["torch"] == "2.13.0+cpu"
    assert {v["name"] for v in record["verdicts"]} >= {"loss falls", "same result again", "resume", "accumulation"}
    assert "<svg" in (folder / "report.html").read_text()


@pytest.mark.timeout(1800)
def test_every_recipe_trains_by_every_backend_and_in_every_mode(cpu_image: Kit, tmp_path: Path) -> None:
    words = ("validate", "cpu", "--locked", "--suite", "quick", "--output", str(tmp_path))
    result = cpu_image.primus(*words, timeout=1700)
    assert result.code == 0, result.out + result.err
    lines = result.out.splitlines()
    recipes = cpu_image.root / "recipes"
    cells = [
        f"{path.stem}-{backend}-{mode}"
        for path in recipes.glob("*.yaml")
        for backend, mode in supported(read(path).settings)
    ]
    assert {line.split()[1] for line in lines[:-1]} == set(cells)
    assert all(line.startswith("✓") for line in lines[:-1])
    assert lines[-1] == f"passed: {len(cells)} of {len(cells)} passed"

    again = cpu_image.primus(*words, timeout=300)
    assert again.code == 0
    assert again.out.count("(kept)") == len(cells)
