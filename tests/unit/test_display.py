from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from primus.images.display import RichProgress, choose_progress
from primus.progress import PlainProgress, QuietProgress


def _console() -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, force_terminal=True, width=120, color_system=None), stream


def test_choice_follows_json_and_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    with choose_progress() as progress:
        assert isinstance(progress, PlainProgress)
    with choose_progress(json=True) as progress:
        assert isinstance(progress, QuietProgress)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with choose_progress() as progress:
        assert isinstance(progress, RichProgress)


def test_bytes_show_amount_and_total_and_steps_show_counts() -> None:
    console, stream = _console()
    with RichProgress(console) as progress:
        progress.start("a", "torch 2.13.0+cpu", 200_000_000)
        progress.advance("a", 50_000_000)
        progress.start("b", "layers", 7, "layers")
        progress.advance("b", 3)
        progress._bars.refresh()
    shown = stream.getvalue()
    assert "50.0 MB/200.0 MB" in shown
    assert "3/7" in shown


def test_finished_lines_stay_and_markup_in_a_label_is_text() -> None:
    console, stream = _console()
    with RichProgress(console) as progress:
        progress.start("a", "file [bold]x[/bold]", 10)
        progress.finish("a", "10 B")
        progress.say("[red]said[/red]")
    assert "✓ file [bold]x[/bold]  10 B" in stream.getvalue()
    assert "[red]said[/red]" in stream.getvalue()


def test_unknown_keys_and_unknown_totals_do_no_harm() -> None:
    console, stream = _console()
    with RichProgress(console) as progress:
        progress.advance("never", 1)
        progress.start("a", "resolve", None, "files")
        progress.advance("a", 2)
        progress.finish("a")
        progress.finish("other", "done")
    assert "✓ resolve" in stream.getvalue()
    assert "✓ other  done" in stream.getvalue()
