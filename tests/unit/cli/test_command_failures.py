"""What `primus` says and returns if a command raises: one sentence each, and the exit code."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from primus_images.cli import main as module
from primus_images.cli.main import main
from primus_images.errors import CheckFailed, HostError, InputError


def os_error(code: int, file: str | None = None) -> OSError:
    if file is None:
        return OSError(code, os.strerror(code))
    return OSError(code, os.strerror(code), file)


@pytest.fixture
def discarded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The streams to which nothing more is written."""
    found: list[int] = []
    monkeypatch.setattr(module, "_discard", found.append)
    return found


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (InputError("wrong", where="a.yaml:1:2"), 2, "primus show: a.yaml:1:2: wrong"),
        (HostError("lacks", hint="add"), 3, "primus show: lacks\n  → add"),
        (CheckFailed("fails"), 1, "primus show: fails"),
        (
            KeyboardInterrupt(),
            130,
            "primus show: interrupted; finished work is kept, run the command again to continue",
        ),
        (KeyboardInterrupt("go on"), 130, "primus show: interrupted; go on"),
        (
            ModuleNotFoundError("x", name="jinja2.sandbox"),
            3,
            "primus show: the Python package jinja2.sandbox is missing\n"
            "  → pip install '.[images]' in a checkout",
        ),
        (
            os_error(errno.EROFS, "/x"),
            3,
            "(/x)\n  → choose a folder on a file system that can be written to",
        ),
        (os_error(errno.EDQUOT, "/x"), 3, "(/x)\n  → free some space and run it again"),
        (os_error(errno.ENOSPC, "/x"), 3, "(/x)\n  → free some space and run it again"),
        (MemoryError(), 3, "→ free some, or raise the limits that `ulimit -a` shows"),
        (os_error(errno.EIO, "/x"), 3, "(/x)"),
        (os_error(errno.EIO, "y" * 300), 3, f"({'y' * 200})"),
        (HostError("login https://me:word@host/x"), 3, "login https://…@host/x"),
        (HostError("a\tb\x1b[2J"), 3, "primus show: a b"),
    ],
)
def test_each_failure_is_a_sentence_and_an_exit_code(
    error: BaseException,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    discarded: list[int],
) -> None:
    def fail(args: Any) -> int:
        raise error

    monkeypatch.setattr(module, "_main", fail)
    assert main(["show", "x"]) == code
    text = capsys.readouterr().err
    assert text.rstrip("\n").endswith(said) or text.startswith(said)
    assert text.startswith("primus show: ")
    assert "\x1b" not in text


def test_a_file_of_another_owner_names_the_owner(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "ownership", lambda path: f"{path} belongs to root")
    for code in (errno.EACCES, errno.EPERM):

        def fail(args: Any, code: int = code) -> int:
            raise os_error(code, str(tmp_path))

        monkeypatch.setattr(module, "_main", fail)
        assert main(["show"]) in (2, 3)
        advice = f"{tmp_path} belongs to root: run this as its owner, or change its permissions"
        assert advice in capsys.readouterr().err


def test_a_reader_that_went_ends_the_command_in_silence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], discarded: list[int]
) -> None:
    def fail(args: Any) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(module, "_main", fail)
    assert main(["show"]) == 141
    assert (discarded, capsys.readouterr().err) == ([1], "")


def test_a_module_of_our_own_that_is_missing_is_a_fault_of_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(args: Any) -> int:
        raise ModuleNotFoundError("x", name="primus_images.absent")

    monkeypatch.setattr(module, "_main", fail)
    with pytest.raises(ModuleNotFoundError):
        main(["show"])


@pytest.mark.parametrize(
    ("words", "amds"),
    [
        (["train", "pretrain", "--config", "x"], True),
        (["train", "llama3.1-8b"], False),
        (["train"], False),
        (["preflight"], False),
        (["preflight", "--gpu", "mi300x"], False),
        (["preflight", "--gpu"], True),
        (["preflight", "--gpu", "--network"], True),
        (["show", "x"], False),
    ],
)
def test_commands_of_amds_primus_are_told_from_ours(words: list[str], amds: bool) -> None:
    assert module._is_amds(words[0], words[1:]) is amds


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["shw"], 2, "no verb 'shw'; did you mean 'show'?"),
        (["xyzzy"], 2, "no verb 'xyzzy'"),
        (["show", "a\udcff"], 2, "argument 1 is not UTF-8 text: 'a\\udcff'"),
        (["show", "x", "\udcff"], 2, "argument 2 is not UTF-8 text"),
    ],
)
def test_words_that_are_no_command_are_refused(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == code
    assert said in capsys.readouterr().err


def test_a_verb_of_the_host_is_named_inside_an_image(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inside = {name: verb for name, verb in module.VERBS.items() if name != "build"}
    monkeypatch.setattr(module, "installed_verbs", lambda: inside)
    assert main(["build", "cpu"]) == 2
    said = capsys.readouterr().err
    assert "`build` manages images from outside" in said
    assert "run it on the host, in a checkout of the project" in said


@pytest.mark.parametrize(
    ("words", "first"),
    [
        (["help", "show"], "usage: primus show"),
        (["help"], ""),
        (["--help"], ""),
        (["-h"], ""),
    ],
)
def test_help_is_of_a_verb_or_of_all(
    words: list[str], first: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert main(words) == 0
    except SystemExit as stop:
        assert stop.code == 0
    said = capsys.readouterr().out
    assert said.startswith(first)
    short = "`primus --help` lists all verbs." in said
    assert not short
    assert main([]) == 0
    assert "`primus --help` lists all verbs." in capsys.readouterr().out


def test_a_folder_that_is_gone_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gone() -> Path:
        raise FileNotFoundError

    monkeypatch.setattr(module.Path, "cwd", gone)
    assert main(["show", "x"]) == 3
    assert "the current folder no longer exists" in capsys.readouterr().err
