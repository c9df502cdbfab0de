"""Charts: their data in the page, and the page in a real browser, where one is installed."""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from browser import CHROMIUM, Browser
from primus_images.report.html import axes, chart, comparison, curves_of, page as page_of
from primus_images.report.run import read
from primus_images.training.judge.checks import Verdict
from primus_images.training.judge.record import RecordedJob
from proof_kit import finished_run
from records import record

ROOT = Path(__file__).parents[3]
STEPS = range(1, 101)


def data_of(html: str) -> dict[str, object]:
    text = html.partition('<script type="application/json">')[2].partition("</script>")[0]
    return dict(json.loads(text))


def steps(points: Iterable[tuple[float, float | None]]) -> list[dict[str, float | None]]:
    return [{"step": x, "loss": y} for x, y in points]


def test_missing_values_are_null_and_no_label_ends_the_script() -> None:
    points = [(1, 1.0), (2, None), (3, math.nan), (4, 2.0)]
    html = chart("<b>", "y", {"</script><b>": steps(points)}, "loss")
    assert "<b>" not in html
    (line,) = data_of(html)["lines"]  # type: ignore[misc]
    assert line["label"] == "</script><b>"
    assert line["values"] == [1.0, None, None, 2.0]


def test_all_charts_share_what_they_are_drawn_by() -> None:
    series = {"a</script>": [{"step": 1, "loss": 1 / 3, "tokens": 512, "seconds": 0.123456789}]}
    shared = axes(series, {"a</script>": [1]})
    assert "</script>" not in shared
    of_line = {"step": [1], "tokens": [512], "seconds": [0.1234568], "resumed": [1]}
    assert json.loads(shared) == {"a</script>": of_line}
    (line,) = data_of(chart("Loss", "y", series, "loss"))["lines"]  # type: ignore[misc]
    assert line["values"] == [0.3333333]
    assert not {"tokens", "seconds", "points"} & line.keys()


def test_a_sparse_chart_has_the_places_of_its_values() -> None:
    run = [{"step": 1}, {"step": 2, "eval_loss": 2.0}, {"step": 3, "eval_loss": None}]
    series = {"a": run, "b": run[:1]}
    first, second = data_of(chart("", "", series, "eval_loss", sparse=True))["lines"]  # type: ignore[misc]
    assert (first["at"], first["values"]) == ([1], [2.0])
    assert (second["at"], second["values"], second["colour"]) == ([], [], 1)
    assert chart("", "", {"b": run[:1]}, "eval_loss", sparse=True) == ""


def test_perplexity_and_mfu_are_drawn() -> None:
    (step,) = curves_of({"a": [{"step": 1, "eval_loss": 2.0, "mfu_non_causal": 0.25}]})["a"]
    assert (step["eval_perplexity"], step["mfu"]) == (math.exp(2.0), 25.0)
    assert curves_of({"a": [{"step": 1, "mfu_non_causal": None}]})["a"][0].keys() == {
        "step",
        "mfu_non_causal",
    }


def test_a_chart_without_any_value_is_a_sentence() -> None:
    assert "nothing to draw" in chart("Loss", "y", {"a": steps([(1, None)])}, "loss")


def test_equal_lines_do_not_hide_each_other() -> None:
    html = chart("Loss", "y", {str(n): steps([(1, 1.0)]) for n in range(5)}, "loss")
    assert [line["width"] for line in data_of(html)["lines"]] == [5, 5, 4, 3, 2]  # type: ignore[attr-defined]


def test_vendored_files_are_those_of_the_pinned_package() -> None:
    folder = ROOT / "src/primus_images/report/uplot"
    for name, sha256 in yaml.safe_load((folder / "vendored.yaml").read_text())["files"].items():
        content = (folder / Path(name).name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == sha256, f"{name}: update vendored.yaml, too"


# The words of tables that lie on several lines, though they are short.
BROKEN = """[...document.querySelectorAll("table.runs :is(td, th)")].flatMap((cell) => {
  const found = [];
  const walk = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
  while (walk.nextNode())
    for (const word of walk.currentNode.textContent.matchAll(/[A-Za-z]{2,14}/g)) {
      const range = document.createRange();
      range.setStart(walk.currentNode, word.index);
      range.setEnd(walk.currentNode, word.index + word[0].length);
      if (new Set([...range.getClientRects()].map((box) => box.top)).size > 1) found.push(word[0]);
    }
  return found;
})"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.parametrize("width", [1280, 390])
def test_no_word_of_three_runs_is_broken_and_a_resume_is_drawn(width: int, tmp_path: Path) -> None:
    folders = [finished_run(tmp_path / name) for name in ("first", "second", "third")]
    job = json.loads((folders[1] / "job.json").read_text())
    job["resume_from"] = f"{folders[0]}/checkpoint/step-7"
    (folders[1] / "job.json").write_text(json.dumps(job))
    lines = (folders[1] / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folders[1] / "metrics.jsonl").write_text("".join(lines[7:]))
    page = tmp_path / "report.html"
    page.write_text(comparison([read(folder) for folder in folders]), encoding="utf-8")
    with Browser(page, tmp_path / "profile", width=width, phone=width < 1000) as browser:
        browser.open(page)
        assert browser.js("document.documentElement.scrollWidth <= innerWidth")
        assert browser.js(BROKEN) == []
        assert browser.js("primusCharts.length") == 6
        drawn = "CanvasRenderingContext2D.prototype.setLineDash = (d) => { window.dashes = d; }"
        browser.js(f"{drawn}; primusCharts[0].redraw()")
        assert browser.js("(window.dashes || []).length") == 2
        assert browser.js("document.getElementById('steps').textContent.includes('[7]')")
        faults = [e for e in browser.events if e["method"] == "Runtime.exceptionThrown"]
        assert not faults


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A record of two jobs with the same loss but for one missing step."""
    series = [
        {
            "step": x,
            "loss": None if x == 50 else 1 + 1000 / x**2,
            "tokens_per_second": 1000.0 + (200 if x % 2 else 0),
            "grad_norm": 1.0,
            "tokens": 512.0 * x,
        }
        for x in STEPS
    ]
    long = Verdict(
        "loss falls", True, "why " * 80, measured="-17.7% on each of 8 ranks " * 5, limit="-10%"
    )
    jobs = [RecordedJob(name=name, ran=False, series=tuple(series)) for name in ("base", "repeat")]
    made = record(
        passed=False,
        verdicts=(long, replace(long, measured="x" * 90, passed=False)),
        jobs=tuple(jobs),
    )
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(page_of(made), encoding="utf-8")
    return path


@pytest.fixture(scope="module", params=[1280, 390], ids=["desktop", "phone"])
def window(
    page: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed (Debian and Ubuntu call the package chromium)")
    profile, width = tmp_path_factory.mktemp("profile"), request.param
    with Browser(page, profile, width=width, phone=width < 1000) as browser:
        yield browser


@pytest.fixture
def browser(page: Path, window: Browser) -> Iterator[Browser]:
    window.events.clear()
    window.open(page)
    window.js((ROOT / "tests/fixtures/readable.js").read_text(encoding="utf-8"))
    yield window
    faults = [
        e for e in window.events if e["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")
    ]
    assert not faults
    # The page itself, and nothing from anywhere.
    asked = [
        e["params"]["request"]["url"]
        for e in window.events
        if e["method"] == "Network.requestWillBeSent"
    ]
    assert [url for url in asked if not url.startswith(("file:///", "about:"))] == []
    assert len([url for url in asked if url.startswith("file:///")]) == 1


def ranges(browser: Browser) -> list[list[float]]:
    found: list[list[float]] = browser.js("primusCharts.map(c => [c.scales.x.min, c.scales.x.max])")
    return found


def place(browser: Browser) -> tuple[float, float, float]:
    """Left edge, width and middle height of the first chart's plotting area, as the browser's mouse
    knows them.
    """
    browser.js("primusCharts[0].over.scrollIntoView({block: 'center'})")
    box = browser.js(
        "(b => [b.x, b.width, b.y + b.height / 2])(primusCharts[0].over.getBoundingClientRect())"
    )
    return box[0], box[1], box[2]


def test_text_is_readable_and_nothing_overflows(browser: Browser) -> None:
    assert browser.js("document.documentElement.scrollWidth <= innerWidth")
    assert browser.js("small()") == []
    # On the canvas the font is in the device's pixels.
    pixels = (
        "parseFloat(primusCharts[0].axes[0].font[0].match(/([0-9.]+)px/)[1]) / devicePixelRatio"
    )
    assert browser.js(pixels) >= 13


def test_dragging_zooms_every_chart_and_a_double_click_ends_it(browser: Browser) -> None:
    assert ranges(browser) == [[1, 100]] * 3
    left, width, y = place(browser)
    if browser.js("navigator.maxTouchPoints") > 0:
        middle = left + width / 2
        browser.touch("touchStart", (middle - 20, y), (middle + 20, y))
        browser.touch("touchMove", (middle - 60, y), (middle + 60, y))
        browser.touch("touchEnd")
    else:
        browser.mouse("mousePressed", left + width * 0.25, y)
        browser.mouse("mouseMoved", left + width * 0.75, y)
        browser.mouse("mouseReleased", left + width * 0.75, y)
    one, *others = ranges(browser)
    assert others == [one] * 2
    assert 15 < one[0] < 40
    assert 60 < one[1] < 85
    browser.js("document.querySelector('#reset').click()")
    assert ranges(browser) == [[1, 100]] * 3
    browser.js("document.querySelector('#in').click()")
    (low, high), *_ = ranges(browser)
    assert (low, high) == pytest.approx((25.75, 75.25))
    browser.js("primusCharts[1].over.dispatchEvent(new MouseEvent('dblclick', {bubbles: true}))")
    assert ranges(browser) == [[1, 100]] * 3


def test_curves_are_drawn_by_what_the_reader_chooses(browser: Browser) -> None:
    disabled = "[...document.querySelector('#axis').options].map(option => option.disabled)"
    assert browser.js(disabled) == [False, False, True], "no step has its seconds"
    choose = "(x => { const axis = document.querySelector('#axis'); axis.value = x; "
    choose += "axis.dispatchEvent(new Event('change')); return primusCharts[0].series[0].label; })"
    assert browser.js(f"{choose}('tokens')") == "tokens"
    assert ranges(browser) == [[512, 51200]] * 3
    assert browser.js(f"{choose}('step')") == "step"
    assert ranges(browser) == [[1, 100]] * 3


def test_smoothing_evens_out_and_keeps_gaps(browser: Browser) -> None:
    def spread() -> float:
        values = browser.js("primusCharts[1].data.at(-1).slice(50)")
        return float(max(values) - min(values))

    assert spread() == 200
    browser.js(
        "(s => {s.value = 0.9; s.dispatchEvent(new "
        "Event('input'))})(document.querySelector('#smoothing'))"
    )
    assert spread() < 30
    assert browser.js("primusCharts[0].data.at(-1)[49]") is None
    assert browser.js("document.querySelector('output').innerText") == "0.9"
    # The values themselves stay behind the smooth line, without a second name in the legend.
    shown = browser.js(
        "[...primusCharts[1].root.querySelectorAll('.u-series')].filter(e => e.offsetWidth).length"
    )
    assert shown == 3


def test_a_log_axis_is_logarithmic(browser: Browser) -> None:
    def apart() -> list[float]:
        return [
            browser.js(f"primusCharts[0].valToPos({a}, 'y') - primusCharts[0].valToPos({b}, 'y')")
            for a, b in ((1, 10), (10, 100))
        ]

    linear = apart()
    assert linear[1] > 5 * linear[0]
    browser.js("document.querySelector('#log').click()")
    assert apart()[0] == pytest.approx(apart()[1], rel=0.01)


def test_equal_lines_are_both_seen_and_a_name_hides_its_line(browser: Browser) -> None:
    assert browser.js("drawn()") == [True, True]
    browser.js("primusCharts[0].root.querySelectorAll('.u-series th')[2].click()")
    assert browser.js("new Promise(done => setTimeout(done, 50)).then(drawn)") == [True, False]
