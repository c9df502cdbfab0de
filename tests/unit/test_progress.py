import io
import time
from pathlib import Path

import pytest
from rich.console import Console

from primus_images.progress import Progress, choose_progress, last_line


def _console() -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, force_terminal=True, width=120, color_system=None), stream


def test_json_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with choose_progress(json=True) as progress:
        progress.start("a", "label")
        progress.finish("a")
    assert capsys.readouterr() == ("", "")


def test_a_log_gets_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with choose_progress() as progress:
        progress.start("a", "torch :smile: " + "x" * 200)
        progress.finish("a", "10 B")
    assert capsys.readouterr().err == "✓ torch :smile: " + "x" * 200 + "  10 B\n"


def test_a_bar_shows_amount_and_total_and_the_last_line_of_a_log(tmp_path: Path) -> None:
    console, stream = _console()
    (tmp_path / "log").write_text("[2/9] Building\n")
    with Progress(console) as progress:
        progress.start("a", "torch 2.13.0+cpu", 200_000_000)
        progress.advance("a", 50_000_000)
        progress.start("b", "layers", 7, "layers")
        progress.advance("b", 3)
        progress.follow("b", tmp_path / "log")
        progress._bars.refresh()
    shown = stream.getvalue()
    assert "50.0 MB/200.0 MB" in shown
    assert "3/7" in shown
    assert "[2/9] Building" in shown


def test_finished_lines_stay_and_markup_in_a_label_is_text() -> None:
    console, stream = _console()
    with Progress(console) as progress:
        progress.start("a", "file [bold]x[/bold]", 10)
        progress.finish("a", "10 B")
        progress.advance("unknown", 1)
        progress.finish("unknown", "done")
    assert "✓ file [bold]x[/bold]  10 B" in stream.getvalue()
    assert "✓ unknown  done" in stream.getvalue()


def test_a_finished_task_has_no_heartbeat() -> None:
    stream = io.StringIO()
    with Progress(Console(file=stream), heartbeat_s=0.02) as progress:
        progress.start("a", "fetch")
        progress.finish("a")
        time.sleep(0.1)
    assert stream.getvalue() == "✓ fetch\n"


def test_a_log_gets_a_heartbeat_with_elapsed_time_and_the_tools_last_line(tmp_path: Path) -> None:
    log, stream = tmp_path / "log", io.StringIO()
    log.write_text("[1/9] first\n\x1b[32m[2/9] Building CUDA object x.o\x1b[0m\n\n")
    with Progress(Console(file=stream), heartbeat_s=0.05) as progress:
        progress.start("a", "transformer-engine")
        progress.follow("a", log)
        progress.start("b", "torch", 200)
        progress.advance("b", 50)
        until = time.monotonic() + 20
        while "25 %" not in stream.getvalue() and time.monotonic() < until:
            time.sleep(0.01)
        lines = stream.getvalue().splitlines()
        progress.finish("a", "wheel")
    assert "… transformer-engine  0:00:00  [2/9] Building CUDA object x.o" in lines
    assert "… torch  0:00:00  25 %" in lines
    after = stream.getvalue()
    assert after.endswith("✓ transformer-engine  wheel\n")
    time.sleep(0.2)
    assert stream.getvalue() == after


def test_the_last_line_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_line(log) == ""
    log.write_bytes(b"x" * 10_000 + b"\n10 %\r20 %\r\xff\r\n  \n")
    assert last_line(log) == "\ufffd"
    log.write_text("y" * 300)
    assert last_line(log) == "y" * 99 + "…"


def test_a_task_that_has_just_begun_has_no_heartbeat() -> None:
    stream = io.StringIO()
    with Progress(Console(file=stream), heartbeat_s=1.0) as progress:
        progress.start("old", "old")
        time.sleep(0.8)
        progress.start("new", "new")
        time.sleep(0.4)
    (line,) = stream.getvalue().splitlines()
    assert line.startswith("… old  0:00:0")
