"""What a login node has: its container runtime, and sbatch, which takes the job."""

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from primus_images.errors import HostError, InputError
from primus_images.launch import slurm
from primus_images.launch.slurm import Site, container_here, submit


def installed(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    found = {name: f"/usr/bin/{name}" for name in names}
    monkeypatch.setattr(slurm.shutil, "which", found.get)


@pytest.mark.parametrize(
    ("programs", "srun_help", "container"),
    [
        (("srun", "docker"), "--container-image=PATH  use a container", "pyxis"),
        (("srun", "docker"), "--cpus", "docker"),
        (("srun",), "--cpus", "none"),
        ((), "", "none"),
        (("apptainer",), "", "apptainer"),
        (("apptainer", "podman"), "", "podman"),
        (("apptainer", "podman", "docker"), "", "docker"),
        # One that hangs or cannot be started does not count.
        (("srun", "podman"), subprocess.TimeoutExpired("srun", 20), "podman"),
        (("srun", "podman"), OSError("no"), "podman"),
    ],
)
def test_pyxis_precedes_the_programs_of_the_cluster(
    programs: tuple[str, ...],
    srun_help: str | Exception,
    container: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def captured(words: list[str], source: str, **options: Any) -> Any:
        assert words == ["/usr/bin/srun", "--help"]
        assert options == {"timeout": 20}
        if isinstance(srun_help, Exception):
            raise srun_help
        return subprocess.CompletedProcess(words, 0, srun_help, "")

    installed(monkeypatch, *programs)
    monkeypatch.setattr(slurm, "captured", captured)
    assert container_here() == container


Answers = Mapping[str, tuple[int, str, str]]
VERSION = (0, "slurm 23.11.4", "")


def cluster(monkeypatch: pytest.MonkeyPatch, answers: Answers) -> list[tuple[list[str], str]]:
    """A login node whose sbatch answers a version, and a script. Returns its calls."""
    asked = []

    def captured(words: list[str], source: str, text: str = "") -> Any:
        asked.append((words, text))
        return subprocess.CompletedProcess(words, *answers[words[1]])

    installed(monkeypatch, "sbatch")
    monkeypatch.setattr(slurm, "captured", captured)
    return asked


@pytest.mark.parametrize(
    ("out", "number"),
    [("12\n", "12"), ("12;cluster\n", "12"), ("hello of a plugin\n12;c\n", "12")],
)
@pytest.mark.parametrize(("wait", "code"), [(False, 0), (True, 7)])
def test_a_job_has_a_number_and_with_wait_its_exit_code(
    out: str, number: str, wait: bool, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = cluster(monkeypatch, {"--version": VERSION, "--parsable": (7, out, "")})
    assert submit("#!/bin/sh", tmp_path / "a/b", wait=wait) == (code, number)
    words = ["sbatch", "--parsable", *(["--wait"] if wait else [])]
    assert asked[1] == (words, "#!/bin/sh")
    assert (tmp_path / "a/b").is_dir()


@pytest.mark.parametrize(
    ("answer", "message", "hint"),
    [
        (
            (1, "", "error:\n  bad account"),
            "sbatch refused the job: error: bad account",
            "--dry-run prints the script",
        ),
        ((1, "out", ""), "sbatch refused the job: out", "--dry-run prints the script"),
        ((3, "", ""), "sbatch refused the job: exit code 3", "--dry-run prints the script"),
        ((0, "done", ""), "sbatch names no job: done", "squeue --me lists what it submitted"),
    ],
)
def test_a_job_that_sbatch_does_not_take_is_a_sentence(
    answer: tuple[int, str, str],
    message: str,
    hint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster(monkeypatch, {"--version": VERSION, "--parsable": answer})
    with pytest.raises(HostError) as caught:
        submit("x", tmp_path)
    assert (caught.value.message, caught.value.hint) == (message, hint)


@pytest.mark.parametrize(
    ("version", "old"),
    [
        ("slurm 20.11.0", None),
        ("slurm-wlm 20.11.9", None),
        ("slurm 20.10.9", "20.10"),
        ("slurm-wlm 19.12", "19.12"),
        ("slurm 21.1", None),
        ("unknown", None),
    ],
)
def test_a_slurm_without_overlap_is_too_old(
    version: str, old: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster(monkeypatch, {"--version": (0, version, ""), "--parsable": (0, "1", "")})
    if old is None:
        assert submit("x", tmp_path) == (0, "1")
        return
    with pytest.raises(HostError, match=f"this is Slurm {old}, which lacks `srun --overlap`"):
        submit("x", tmp_path)


def test_without_sbatch_the_script_can_be_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch)
    with pytest.raises(HostError, match="sbatch is not installed here") as caught:
        submit("x", tmp_path)
    assert caught.value.hint == "run it on a login node; --dry-run prints the script"


def test_a_container_needs_its_image() -> None:
    with pytest.raises(InputError, match="--container docker needs --image"):
        Site(container="docker")
    assert Site(container="none").image == ""


@pytest.mark.parametrize(
    ("grace", "time", "refused"), [(59, "1", False), (60, "1", True), (60, "", False)]
)
def test_a_warning_comes_before_the_end_of_the_time(grace: int, time: str, refused: bool) -> None:
    if not refused:
        assert Site(grace=grace, time=time).grace == grace
        return
    with pytest.raises(
        InputError, match=f"--grace {grace}: the job would be told to end at its start"
    ):
        Site(grace=grace, time=time)
