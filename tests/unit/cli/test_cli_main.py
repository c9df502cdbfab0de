import inspect
import os
import re
import shutil
import subprocess
import sys
import types
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import yaml

from primus_images.cli.main import main
from primus_images.cli.verb import VERBS, Verb, _named, parser_of
from primus_images.errors import CheckFailed, HostError, InputError, PrimusError

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, kw_only=True)
class FakeOptions:
    """The options of ``fake``."""

    number: int


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A verb called ``fake`` whose ``run`` a test decides."""
    fake = types.ModuleType("primus_images.cli.host.fake")
    number = {"--number": {"type": "whole", "default": 0}}
    fake.run = lambda options: options.number  # type: ignore[attr-defined]

    def run(options: FakeOptions) -> int:
        """Do nothing."""
        return int(fake.run(options))

    fake.fake = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "primus_images.cli.host.fake", fake)
    monkeypatch.setitem(
        VERBS, "fake", Verb("host.fake.fake", "do nothing", "primus fake", [number])
    )
    return fake


def raiser(error: BaseException) -> object:
    def run(options: FakeOptions) -> int:
        raise error

    return run


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["help"], []])
def test_usage(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(words) == 0
    out = capsys.readouterr().out
    shown = re.findall(r"^  ([a-z0-9-]+) +\S", out, re.MULTILINE)
    assert sorted(shown) == sorted(
        VERBS if words else ["build", "list", "train", "finetune", "launch"]
    )
    assert max(map(len, out.splitlines())) <= 80


def test_help_with_a_verb_is_the_help_of_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["help", "publish"])
    assert capsys.readouterr().out.startswith("usage: primus publish ")


def test_a_missing_package_is_a_sentence(
    verb: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    verb.run = raiser(ModuleNotFoundError("No module named 'msgpack.x'", name="msgpack.x"))
    assert main(["fake"]) == 3
    assert (
        "the Python package msgpack.x is missing\n  → pip install '.[images]'"
        in capsys.readouterr().err
    )


def test_unknown_verb_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["buidl"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no verb 'buidl'; did you mean 'build'?" in captured.err
    assert main(["zzzzzz"]) == 2
    assert "did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["run", "cpu", "echo"], "write the command after --: -- echo …"),
        (["train", "llama3.1-8b", "--lr", "1e-4"], "lr is a setting: write lr=1e-4"),
        (["train", "llama3.1-8b", "--max-steps", "5"], "write --steps N"),
    ],
)
def test_what_is_no_option_leads_to_what_is_meant(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert hint in capsys.readouterr().err


def test_an_empty_value_is_not_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["bump", "--release", ""], ["bump", "--release="]):
        assert main(words) == 2
        assert "argument --release: must not be empty" in capsys.readouterr().err


def test_inside_the_image_host_verbs_do_not_exist(tmp_path: Path) -> None:
    (pin,) = yaml.safe_load((ROOT / "versions.yaml").read_text())["components"]["primus"]["pins"]
    for name in pin["include"]:
        there = tmp_path / "primus_images" / name
        there.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / pin["path"] / name).is_dir() else shutil.copy)(
            ROOT / pin["path"] / name, there
        )

    def primus(word: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "primus_images.cli.main", word]
        return subprocess.run(
            command,
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )

    refused = primus("build")
    assert refused.returncode == 2
    assert "`build` manages images from outside" in refused.stderr
    assert "run it on the host" in refused.stderr
    usage = primus("--help").stdout
    assert "  train " in usage
    assert "  build " not in usage


@pytest.mark.parametrize(
    ("kind", "code"), [(PrimusError, 1), (CheckFailed, 1), (InputError, 2), (HostError, 3)]
)
def test_an_error_is_a_sentence_with_an_exit_code(
    kind: type[PrimusError], code: int, verb: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    verb.run = raiser(kind("it is wrong", where="f:1:2", hint="do this"))  # type: ignore[attr-defined]
    assert main(["fake"]) == code
    captured = capsys.readouterr()
    assert captured.err == "primus fake: f:1:2: it is wrong\n  → do this\n"
    assert captured.out == ""


def test_other_errors_of_the_program_are_not_hidden(verb: types.ModuleType) -> None:
    verb.run = raiser(RuntimeError("a fault"))  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="a fault"):
        main(["fake"])


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert f"usage: primus {name}" in out
    assert f"example: primus {name}" in out
    # What `run` prints is its command's own business.
    assert name == "run" or "--json" in out


def test_help_wraps_paragraphs_and_keeps_lists(
    verb: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = """A command can be run
on one machine, or in a well-known cluster.

- one, by hand, which is what most users want
- two, see https://example.org/a-name-that-is-long
  indented lines begin where they did, too

The end."""
    monkeypatch.setitem(VERBS, "fake", VERBS["fake"]._replace(more=more))
    monkeypatch.setenv("COLUMNS", "40")
    shown = parser_of("fake").format_help()
    description = shown.partition("Do nothing.\n\n")[2].partition("\n\noptions")[0]
    assert description.splitlines() == [
        "A command can be run on one machine,",
        "or in a well-known cluster.",
        "",
        "- one, by hand, which is what most",
        "  users want",
        "- two, see",
        "  https://example.org/a-name-that-is-long",
        "  indented lines begin where they did,",
        "  too",
        "",
        "The end.",
    ]


@pytest.mark.parametrize(
    ("example", "lines"),
    [
        (
            "primus fake one --format two-words --json",
            ["example: primus fake one \\", "    --format two-words --json"],
        ),
        (
            "primus fake https://example.org/long-long-long-name -- echo",
            [
                "example: primus fake \\",
                "    https://example.org/long-long-long-name \\",
                "    -- echo",
            ],
        ),
        (
            "primus fake 'one two three four five six'",
            ["example: primus fake 'one two three four five six'"],
        ),
    ],
)
def test_an_example_that_is_too_long_goes_on_after_a_backslash(
    example: str, lines: list[str], verb: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VERBS, "fake", VERBS["fake"]._replace(example=example))
    monkeypatch.setenv("COLUMNS", "40")
    assert parser_of("fake").format_help().splitlines()[-len(lines) :] == lines


def completions(line: str, folder: Path) -> list[str]:
    """What a shell would offer for the line, through argcomplete's own protocol."""
    answer = folder / "answer"
    env = {
        **os.environ,
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "_ARGCOMPLETE_IFS": "\n",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
    }
    subprocess.run(
        [sys.executable, "-m", "primus_images.cli.main"],
        env=env,
        cwd=ROOT,
        check=False,
        capture_output=True,
    )
    return [word.split(":")[0].strip() for word in answer.read_text().split("\n") if word.strip()]


def test_verbs_and_targets_complete(tmp_path: Path) -> None:
    assert completions("primus pl", tmp_path) == ["plan"]
    assert completions("primus build c", tmp_path) == ["cpu"]
    assert completions("primus validate cpu --eng", tmp_path) == ["--engine"]


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("primus compat ", "run_pretrain.sh"),
        ("primus train llama3.1-8b --turbo ", "auto"),
        ("primus train llama3.1-8b --accept-change ", "assets.corpus"),
        ("primus show llama3.1-8b --gpu ", "mi300x"),
    ],
)
def test_values_from_a_list_complete_and_no_file_is_offered(
    line: str, word: str, tmp_path: Path
) -> None:
    found = completions(line, tmp_path)
    assert word in found
    assert "versions.yaml" not in found


def test_a_missing_recipe_alone_is_called_required(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit"]) == 2
    assert "required: RECIPE|WEIGHTS\n" in capsys.readouterr().err


@pytest.mark.parametrize("name", VERBS)
def test_the_options_of_a_verb_are_the_fields_of_its_dataclass(name: str) -> None:
    function = _named(f"cli.{VERBS[name].call}")
    (parameter,) = inspect.signature(function).parameters.values()
    parser = parser_of(name)
    # The words after -- are no action of argparse.
    names = {parser.rest, *(action.dest for action in parser._actions)} - {"", "help"}
    assert {field.name for field in fields(parameter.annotation)} == names
