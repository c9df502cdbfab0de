"""Figures in README and the guides are those of committed results, and the output that they show is
real.
"""

import json
import re
import shlex
from pathlib import Path

import pytest

from primus_images.cli.main import main
from primus_images.recipes.load import entries
from primus_images.recipes.schema import backends

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
CONSOLE = [
    pytest.param(command, shown, id=command)
    for page in PAGES
    for command, shown in re.findall(
        r"^```console\n\$ primus (.*)\n((?:.*\n)*?)```", page.read_text(), re.MULTILINE
    )
]
# A speed-up, with the paragraph that it is in.
RATIO = re.compile(r"\b\d+\.\d+(?= times| ×)")
SPEEDS = ROOT / "benchmarks/results/finetune-trl-1xh200.json"


@pytest.mark.parametrize(("command", "shown"), CONSOLE)
def test_shown_output_is_what_the_command_prints(
    command: str, shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == shown


def test_the_verdict_in_the_readme_is_that_of_the_recorded_curve() -> None:
    (curves,) = (ROOT / "benchmarks/golden").glob("*-cpu.json")
    recorded = json.loads(curves.read_text())["curves"]["llama3-proxy-torchtitan-pretrain"]["loss"]
    fifth = len(recorded) // 5
    first, last = sum(recorded[:fifth]) / fifth, sum(recorded[-fifth:]) / fifth
    text = (ROOT / "README.md").read_text()
    assert f"mean of the first fifth {first:.4f}, of the last {last:.4f}" in text
    assert f"loss {recorded[0]:.4f} → {recorded[-1]:.4f} over {len(recorded)} steps" in text


def test_every_recipe_and_backend_has_a_golden_curve() -> None:
    (curves,) = (ROOT / "benchmarks/golden").glob("*-cpu.json")
    recorded = json.loads(curves.read_text())["curves"]
    cells = {f"{entry.recipe}-{entry.backend}-{entry.mode}" for entry in entries()}
    assert set(recorded) == cells, (
        "record it: primus validate cpu --suite quick --recipe RECIPE --record-golden"
    )


def ratios() -> list[tuple[str, str]]:
    """Each speed-up of the guides and of the change log, with its paragraph, or its item."""
    found = []
    for page in [*PAGES, ROOT / "CHANGELOG.md"]:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for part in re.split(r"\n(?:\n|- )", text):
            found += [(ratio, part) for ratio in RATIO.findall(part)]
    return found


def close(figure: float, shown: str) -> bool:
    """Whether ``shown`` is ``figure``, rounded to as many places as it has."""
    places = len(shown.partition(".")[2])
    return abs(figure - float(shown)) <= 0.5001 * 10**-places


def measured(reports: list[Path]) -> list[float]:
    """The figures with three decimals in some reports: ratios are given so there."""
    text = "".join(report.read_text(encoding="utf-8") for report in reports)
    return [float(word) for word in re.findall(r"\b\d+\.\d{3}\b", text)]


def beside_trl() -> list[float]:
    """The ratios of each variant of primus to TRL with the same model and mode."""
    medians = json.loads(SPEEDS.read_text(encoding="utf-8"))["medians"]
    speeds = {(row["model"], row["mode"], row["variant"]): row for row in medians}
    quotients = []
    for (model, mode, variant), row in speeds.items():
        if variant.startswith("primus"):
            trl = speeds[model, mode, "trl-plain-compile-flash4"]
            quotients.append(row["tokens_per_second"] / trl["tokens_per_second"])
    return quotients


@pytest.mark.parametrize(
    ("ratio", "paragraph"), [pytest.param(*one, id=one[0]) for one in ratios()]
)
def test_a_speed_up_stands_in_the_result_that_is_linked(ratio: str, paragraph: str) -> None:
    if paragraph.startswith("`primus finetune` is"):
        stated = RATIO.findall(paragraph)
        quotients = beside_trl()
        assert any(close(quotient, ratio) for quotient in quotients)
        assert all(any(close(quotient, word) for word in stated) for quotient in quotients)
        return
    reports = ROOT / "benchmarks/reports"
    linked = [reports / f"{name}.md" for name in re.findall(r"reports/([\w-]+)\.md", paragraph)]
    figures = measured(linked or sorted(reports.glob("speed-*.md")))
    assert any(close(figure, ratio) for figure in figures), paragraph


def test_every_row_of_the_optimizations_is_measured() -> None:
    text = (ROOT / "docs/turbo.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| ([\d.]+(?: and [\d.]+)?) \| [^|]+ \|$", text, re.M)
    assert len(rows) > 8
    reports = ROOT / "benchmarks/reports"
    for what, shown in rows:
        linked = re.findall(r"reports/([\w-]+)\.md", what) or ["speed-4xh200"]
        figures = measured([reports / f"{name}.md" for name in linked])
        for ratio in shown.split(" and "):
            assert any(close(figure, ratio) for figure in figures), what


def test_the_speeds_beside_trl_are_measured() -> None:
    text = (ROOT / "docs/turbo.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]+ \| (\d) \| ([\d,]+) \| ([\d.]+) GiB \| [^|]+ \|$", text, re.M)
    medians = json.loads(SPEEDS.read_text(encoding="utf-8"))["medians"]
    stored = [(row["runs"], row["tokens_per_second"], row["memory_gib"]) for row in medians]
    assert len(rows) == len(stored)
    for (runs, speed, memory), (count, tokens, gib) in zip(rows, stored, strict=True):
        assert (int(runs), float(speed.replace(",", ""))) == (count, tokens)
        assert close(gib, memory)


def test_the_first_steps_beside_trl_are_measured() -> None:
    text = " ".join((ROOT / "docs/turbo.md").read_text(encoding="utf-8").split())
    pattern = (
        r"first step of Llama 3.2 1B comes after (\d+) seconds, and after (\d+) with TRL; "
        r"that of LoRA in BF16 after (\d+) and (\d+)\."
    )
    (shown,) = re.findall(pattern, text)
    longest: dict[tuple[str, str], float] = {}
    for row in json.loads(SPEEDS.read_text(encoding="utf-8"))["results"]:
        program = row["variant"].partition("-plain")[0]
        if (row["model"], row["mode"]) in (("llama3.2-1b", "full"), ("llama3.1-8b", "lora")):
            case = (row["mode"], program)
            longest[case] = max(longest.get(case, 0), row.get("first_step_seconds", 0))
    cases = [("full", "primus"), ("full", "trl"), ("lora", "primus"), ("lora", "trl")]
    for figure, case in zip(shown, cases, strict=True):
        assert close(longest[case], figure), case


def test_the_micro_batches_of_llama_on_h200_are_those_of_the_recipe() -> None:
    text = " ".join((ROOT / "docs/turbo.md").read_text(encoding="utf-8").split())
    (first, second, last) = re.findall(r"the first of (\d), (\d) and (\d) sequences", text)[0]
    recipe = (ROOT / "recipes/llama3.1-8b.yaml").read_text(encoding="utf-8")
    cases = recipe.split("- when: ")
    of_h200 = [case for case in cases if "torchtitan, gpu: h200" in case and "tuned:" in case]
    assert len(of_h200) == 2
    for case in of_h200:
        assert f"training.local_batch_size: [{first}, {second}, {last}]" in case


def test_every_short_name_of_a_setting_is_listed() -> None:
    rows = [
        row for row in (ROOT / "docs/training.md").read_text().splitlines() if row.startswith("| `")
    ]
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert {name for one in backends().values() for name in (*one.keys, *one.degrees)} <= listed


@pytest.mark.parametrize(
    "setting", ["tp=2", "pp=2", "cp=2", "replicas=2", "resharding=never", "mlflow=true"]
)
def test_backends_take_a_setting_as_the_page_says(setting: str) -> None:
    name = setting.partition("=")[0]
    page = (ROOT / "docs/training.md").read_text(encoding="utf-8")
    (meaning,) = re.findall(rf"^\| [^|]*`{name}`[^|]* \| (.+) \|$", page, re.M)
    only = re.search(r"only with ([\w ]+)$", meaning)
    lacking = re.search(r"not with (\w+)", meaning)
    for backend in ("torchtitan", "megatron", "fsdp", "finetune"):
        said = not lacking or lacking[1].lower() != backend
        if only:
            said = backend in only[1].lower().split()
        code = main(["show", "llama3.1-8b", "--backend", backend, "--gpu", "h200", setting])
        assert (code == 0) == said, backend
