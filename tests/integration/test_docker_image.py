"""The image in a Docker engine: loaded, run by anybody; and the engine as the sandbox of a build."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from docker_engine import private_dockerd
from test_native_build import lend_files
from test_ordinary_user import TARGET, VERSIONS

from host_tools import needs
from project_kit import Kit

pytestmark = [
    pytest.mark.integration,
    needs("dockerd"),
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pytest.MonkeyPatch]:
    """A private engine, named to every command by DOCKER_HOST."""
    patch = pytest.MonkeyPatch()
    with private_dockerd(tmp_path_factory.mktemp("docker")) as url:
        patch.setenv("DOCKER_HOST", url)
        yield patch
    patch.undo()


def docker(*words: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = ["/usr/bin/docker", *words]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=300)


def test_loaded_image_runs_for_anybody(engine: pytest.MonkeyPatch, cpu_image: Kit) -> None:
    loaded = json.loads(cpu_image.primus("load", "cpu", "--json").out)
    again = json.loads(cpu_image.primus("load", "cpu", "--json").out)
    assert (loaded["image_id"], again["bytes_sent"]) == (again["image_id"], 0)
    inspected = json.loads(docker("image", "inspect", "rocm/primus:v26.11-cpu").stdout)[0]
    assert inspected["Id"] == loaded["image_id"]
    assert inspected["Config"]["Labels"]["io.primus.pins.pytorch"] == "2.13.0+cpu"
    run = ("run", "--rm", "--network", "none", "-i")
    shell = docker(*run, "rocm/primus:v26.11-cpu", text="python3 -c 'import torch; print(torch.ones(3).sum().item())'")
    assert (shell.returncode, shell.stdout) == (0, "3.0\n"), shell.stderr
    assert "Primus v26.11 cpu" in shell.stderr
    other = docker(*run, "--user", "4321", "--read-only", "rocm/primus:v26.11-cpu", "primus", "--help")
    assert other.returncode == 0
    assert "  train" in other.stdout


def test_docker_as_the_sandbox_gives_the_same_digest(engine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kit = Kit(tmp_path / "project")
    kit.write("versions.yaml", VERSIONS)
    kit.write("images/small.yaml", TARGET)
    lend_files(kit)
    want = kit.build("small").digest
    store = kit.root / ".primus/store"
    (store / "targets/small.json").unlink()
    for record in (store / "actions").iterdir():
        if json.loads(record.read_bytes())["kind"] == "wheels":
            record.unlink()
    again = kit.build("small", "--engine", "docker")
    assert again.digest == want
    assert "1 layers built, 3 reused" in again.err
