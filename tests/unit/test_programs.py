import os
import platform
import time
from pathlib import Path

import pytest

from primus_images import programs, waits
from primus_images.errors import HostError

DEBIAN = {"PRETTY_NAME": "Debian GNU/Linux 12", "ID": "debian"}


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Debian host as root whose PATH holds only a fake apt-get that logs, installs `mytool`."""
    log, folder = tmp_path / "log", tmp_path / "bin"
    folder.mkdir()
    apt = folder / "apt-get"
    apt.write_text(
        f'#!/bin/sh\necho "$DEBIAN_FRONTEND $*" >> {log}\n'
        f'case "$*" in *unheard*) echo "E: Unable to locate package unheard" >&2; exit 100;;\n'
        f'*install*mypackage*) printf "#!/bin/sh\\n" > {folder}/mytool; /bin/chmod +x '
        f"{folder}/mytool;; esac\n"
    )
    apt.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: DEBIAN)
    monkeypatch.setattr(programs, "_LISTS", tmp_path / "lists")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return tmp_path


def test_a_missing_tool_is_installed_and_said_first(
    host: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert programs.need("mytool", "mypackage") == host / "bin/mytool"
    said = (
        "mytool is missing: installing with `apt-get install -y --no-install-recommends "
        "mypackage`\n"
    )
    assert capsys.readouterr().err == said
    assert (host / "log").read_text().splitlines() == [
        "noninteractive -q update",
        "noninteractive install -y --no-install-recommends mypackage",
    ]


def test_apt_that_fails_says_why_and_what_to_type(host: Path) -> None:
    with pytest.raises(HostError) as error:
        programs.need("mytool", "unheard")
    assert "could not be installed: Unable to locate package unheard" in str(error.value)
    assert "apt-get install -y --no-install-recommends unheard" in str(error.value)


def test_apt_that_succeeds_without_the_tool_is_no_success(host: Path) -> None:
    with pytest.raises(HostError, match="does not provide othertool"):
        programs.need("othertool", "mypackage")


def test_several_tools_come_by_one_command(host: Path, capsys: pytest.CaptureFixture[str]) -> None:
    programs.install({"mytool": "mypackage", "other": "otherpackage"})
    command = "install -y --no-install-recommends mypackage otherpackage"
    assert (
        capsys.readouterr().err
        == f"mytool and other are missing: installing with `apt-get {command}`\n"
    )
    assert (host / "log").read_text().splitlines()[1:] == [f"noninteractive {command}"]


@pytest.mark.parametrize(
    ("user", "release", "message"),
    [
        (1000, DEBIAN, "sudo apt-get install -y --no-install-recommends mypackage"),
        (1000, {"ID": "linuxmint", "ID_LIKE": "ubuntu debian"}, "sudo apt-get"),
        (0, {"ID": "fedora"}, "install mypackage (the names of the packages on Debian and Ubuntu)"),
    ],
)
def test_without_root_or_apt_nothing_is_installed(
    host: Path, monkeypatch: pytest.MonkeyPatch, user: int, release: dict[str, str], message: str
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: release)
    with pytest.raises(HostError) as error:
        programs.need("mytool", "mypackage")
    assert message in str(error.value)
    assert not (host / "log").exists()


@pytest.mark.parametrize(("age_h", "updates"), [(23, False), (25, True)])
def test_lists_of_packages_are_fetched_again_after_a_day(
    host: Path, age_h: float, updates: bool
) -> None:
    lists = host / "lists"
    lists.mkdir()
    (lists / "deb_dists_sid_InRelease").touch()
    then = time.time() - age_h * 3600
    os.utime(lists, (then, then))
    programs.need("mytool", "mypackage")
    commands = (host / "log").read_text().splitlines()
    assert commands[0].endswith("update") is updates
    assert ("noninteractive -q update" in commands) is updates
    assert len(commands) == 1 + updates


def test_a_removal_that_hangs_says_what_is_awaited(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(waits, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(waits, "_PRINTED", {})
    with programs.finally_run(["/bin/sleep", "0.5"], {}, "podman, which removes the container a"):
        pass
    assert "waiting for podman, which removes the container a (Ctrl-C" in capsys.readouterr().err
