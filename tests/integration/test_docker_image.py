"""The image in a Docker engine, run by anybody; and the engine as the sandbox of a build."""

import json
import subprocess
from collections.abc import Iterator

import pytest
from docker_engine import private_dockerd

from host_tools import needs
from project_kit import Kit

# An engine takes a minute to load an image of gigabytes, and another to remove it. By default,
# test_sandbox_build.py loads a small one twice, and test_cpu_image.py runs the image in the
# sandbox: its entry, a login shell, any user.
pytestmark = [pytest.mark.integration, pytest.mark.slow, needs("dockerd")]


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
    return subprocess.run(
        command, input=text, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.fixture(scope="module", params=["cpu", "mi355x"])
def image(request: pytest.FixtureRequest, engine: pytest.MonkeyPatch, cpu_image: Kit) -> str:
    """The name of an image in the engine: of cpu, and of a GPU preview, which takes minutes to
    build and load.
    """
    cpu_image.build(request.param)
    tag = json.loads(cpu_image.primus("load", request.param, "--json").out)["tag"]
    return str(tag)


# No GPU, no bridge: what a first user without devices has.
RUN = ("run", "--rm", "--network", "none")


def test_its_entry_greets_and_runs_the_command(image: str) -> None:
    shell = docker(
        *RUN, "-i", image, text="python3 -c 'import torch; print(torch.ones(3).sum().item())'"
    )
    assert (shell.returncode, shell.stdout) == (0, "3.0\n"), shell.stderr
    assert f"Primus v26.11 {'cpu' if '-cpu' in image else 'mi355x'}" in shell.stderr
    assert ("PREVIEW" in shell.stderr) == image.endswith("-preview")
    for command, code in (("true", 0), ("false", 1), ("no-such-command", 127), ("", 127)):
        assert docker(*RUN, image, command).returncode == code


def test_a_login_shell_has_primus_and_its_completion(image: str) -> None:
    shell = docker(
        *RUN,
        image,
        "bash",
        "-lc",
        "primus --version && complete -p primus && ps --version && less --version",
    )
    assert shell.returncode == 0, shell.stderr
    assert "complete -F _primus_first_tab primus" in shell.stdout


def test_a_regular_user_can_train_in_a_read_only_root(image: str) -> None:
    writable = ("--tmpfs", "/tmp:mode=1777,exec", "--tmpfs", "/workspace/runs:mode=1777")
    train = ("primus", "train", "llama3-proxy", "--gpu", "cpu", "--steps", "2")
    trained = docker(
        *RUN, "--user", "1000:1000", "--read-only", "--shm-size", "1g", *writable, image, *train
    )
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert "✓ 2 steps" in trained.stdout
    assert "lost with the container" in trained.stderr or "-v" in trained.stderr


def test_a_run_that_cannot_be_kept_is_a_sentence(image: str) -> None:
    train = ("primus", "train", "llama3-proxy", "--gpu", "cpu", "--steps", "2")
    refused = docker(*RUN, "--read-only", image, *train)
    assert refused.returncode == 3, refused.stderr
    assert "cannot write to" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_gpu_recipe_without_devices_is_refused(image: str) -> None:
    refused = docker(*RUN, image, "primus", "train", "llama3.1-8b")
    assert refused.returncode == 2, refused.stderr
    assert "--proxy" in refused.stderr
