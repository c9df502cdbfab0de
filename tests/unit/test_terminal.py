"""Tables and paragraphs fit the width they are given, lose no text, and carry colour only where it
is shown.
"""

import contextlib
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from primus_images.terminal import PLAIN, Screen, Styled, harmless
from project_kit import SOURCE, Kit, make_project

ROOT = Path(__file__).parents[2]
CELLS = st.text(st.characters(categories=("L", "N", "P", "Zs")), max_size=60)
TABLES = st.integers(1, 6).flatmap(
    lambda columns: st.lists(
        st.lists(CELLS, min_size=columns, max_size=columns), min_size=1, max_size=6
    )
)


def letters(text: str) -> list[str]:
    return sorted(re.sub(r"\s", "", text))


@given(TABLES, st.integers(40, 200))
def test_no_line_is_wider_than_the_screen_and_no_text_is_lost(
    rows: list[list[str]], width: int
) -> None:
    lines = Screen(width=width).table(rows, indent="  ")
    assert max(map(len, lines)) <= width
    assert letters("".join(lines)) == letters("".join(cell for row in rows for cell in row))
    head = [f"h{number}" for number in range(len(rows[0]))]
    lines = Screen(width=width).table(rows, head=head)
    assert max(map(len, lines)) <= width
    for cell in (cell for row in rows for cell in row):
        assert not [*letters(cell)] or set(letters(cell)) <= set("".join(lines))


@given(CELLS, st.integers(30, 120))
def test_a_paragraph_fits_too(text: str, width: int) -> None:
    lines = Screen(width=width).wrap(text, "  - ", "    ")
    assert max(map(len, lines)) <= width
    assert letters("".join(lines)) == letters("-" + text)


def test_words_stay_whole_as_long_as_they_fit() -> None:
    rows = [("rocm/primus:v26.8", "2.12.0+rocm7.15.0a20260727", "mi300x, mi325x")]
    head = ("tag", "PyTorch", "GPUs")
    assert len(Screen(width=80).table(rows, head=head)) == 2
    assert Screen(width=58).table(rows, head=head)[1:] == [
        "rocm/primus:v26.8  2.12.0+rocm7.15.0a20260727  mi300x,",
        "                                               mi325x",
    ]
    assert Screen(width=40).table(rows, head=head)[0] == "tag  PyTorch  GPUs"
    assert " ".join(Screen(width=40).table(rows)).split() == "  ".join(rows[0]).split()


def test_a_table_takes_the_whole_width() -> None:
    rows = [("one", "two three four"), ("five", "six")]
    (first, second) = PLAIN.table(rows, indent="")
    width = max(len(first), len(second))
    assert Screen(width=width).table(rows, indent="") == [first, second]
    narrower = Screen(width=width - 1).table(rows, indent="")
    assert [line.split() for line in narrower] == [
        ["one", "two", "three"],
        ["four"],
        ["five", "six"],
    ]


def test_a_pipe_gets_one_line_per_row_and_control_characters_do_no_harm() -> None:
    assert PLAIN.table([("a" * 300, Styled("b\x1b[2J\nc", "red"))]) == ["a" * 300 + "  b [2J c"]


def test_finished_text_wraps_below_itself_and_its_paths_stay_whole() -> None:
    text = (
        "  ✗ base: the loss does not fall as it should\n  → "
        "out/validation/cpu/llama3-proxy/report.html"
    )
    assert Screen(width=30, colour=True).fit(text).splitlines() == [
        "  \033[31m✗ \033[0mbase: the loss does not",
        "    fall as it should",
        "  → out/validation/cpu/llama3-proxy/report.html",
    ]
    assert PLAIN.fit(text) == text


@pytest.mark.parametrize(
    ("columns", "width"), [("100", 100), ("5", 20), ("²", None), ("9" * 5000, None), ("-1", None)]
)
def test_columns_that_are_no_number_are_ignored(
    columns: str, width: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert Screen.of(io.StringIO()).width == width


def test_colour_does_not_count_as_width() -> None:
    cells = [(Styled("✓ pass", "green"), "x"), ("plain", "y")]
    assert Screen(colour=True).table(cells) == ["\033[32m✓ pass\033[0m  x", "plain   y"]


def on_a_terminal(words: list[str], columns: int, cwd: Path, **env: str) -> list[str]:
    """The lines that a command prints on a terminal of that width, as they are sent to it."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR")}
    with subprocess.Popen(
        [sys.executable, "-m", "primus_images.cli.main", *words],
        stdout=follower,
        stderr=follower,
        stdin=subprocess.DEVNULL,
        cwd=cwd,
        env={**kept, "TERM": "xterm", "PYTHONPATH": str(SOURCE), **env},
    ) as process:
        os.close(follower)
        text = b""
        with contextlib.suppress(OSError):  # the follower is closed: the command has ended
            while block := os.read(leader, 1 << 16):
                text += block
        os.close(leader)
    assert process.returncode in (0, 1), text.decode()
    return text.decode().replace("\r", "").splitlines()


def bare(line: str) -> str:
    return re.sub(r"\033\[[0-9;]*m", "", line)


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    kit = make_project(tmp_path_factory.mktemp("terminal") / "project")
    kit.write(
        "parts/beta/a-file-whose-name-is-long-enough-to-need-more-than-one-line-of-sixty-columns",
        b"x",
    )
    kit.build()
    kit.write(
        "parts/beta/a-file-whose-name-is-long-enough-to-need-more-than-one-line-of-sixty-columns",
        b"y",
    )
    return kit


@pytest.mark.parametrize(
    "words",
    [
        ("list",),
        ("show", "llama3.1-8b", "--gpu", "mi355x", "--precision", "fp8"),
        ("releases", "v25.10"),
        ("diff", "v25.10", "v26.8"),
        ("plan", "--all", "--full"),
    ],
    ids=" ".join,
)
def test_every_table_fits_the_terminal(words: list[str]) -> None:
    lines = on_a_terminal(words, 60, ROOT)
    wide = [line for line in lines if len(bare(line)) > 60]
    assert not wide, wide[0]


def test_colour_on_a_terminal_only(kit: Kit) -> None:
    words = ["plan", "demo"]
    assert "\033[32m+" in "\n".join(on_a_terminal(words, 100, kit.root))
    for env in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        text = "".join(
            line
            for verb in ("plan", "build")
            for line in on_a_terminal([verb, "demo"], 100, kit.root, **env)
        )
        assert "\033" not in text
    assert "\033" not in kit.primus(*words).out


def test_numbers_are_aligned_at_their_right() -> None:
    rows = [("a", "9"), ("b", "1,000")]
    assert PLAIN.table(rows, head=("name", "size"), right={1}) == [
        "name   size",
        "a         9",
        "b     1,000",
    ]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]52;c;eA==\x07", "\ufffd]52;c;eA==\ufffd"),
        ("\x1b[2J\x1b[H", "\ufffd[2J\ufffd[H"),
        ("a\rb\x08c", "a\ufffdb\ufffdc"),
        ("\x9b1m\x7f", "\ufffd1m\ufffd"),
        ("\x1b[31mred\x1b[0m\tand\n", "\x1b[31mred\x1b[0m\tand\n"),
    ],
)
def test_text_of_others_does_not_command_the_terminal(text: str, shown: str) -> None:
    assert harmless(text) == shown


def test_text_of_others_may_not_bring_colors() -> None:
    assert harmless("\x1b[31mred\x1b[0m\tand\n", colors=False) == "\ufffd[31mred\ufffd[0m\tand\n"
