from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from primus.cli.main import main
from primus.errors import InputError
from primus.release import docs, timing_pages

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def readme_command(name: str) -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (line,) = re.findall(rf"<!-- command: {name} -->\n```sh\n(.+)\n```\n<!-- end -->", text)
    return str(line)


def test_generated_files_are_up_to_date() -> None:
    assert docs.stale(ROOT) == (), "run: nox -s docs"


def test_a_missing_and_a_changed_file_are_written_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("versions.yaml", "README.md", "images", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name) if name != "README.md" else (tmp_path / name).write_bytes(
            (ROOT / name).read_bytes()
        )
    project = ["--project", str(tmp_path)]
    assert main(["docs", "--check", *project]) == 1
    assert "out of date: docs/schemas/versions.json" in capsys.readouterr().out
    assert main(["docs", *project]) == 0
    assert main(["docs", "--check", *project]) == 0
    schema = tmp_path / "docs/schemas/versions.json"
    schema.write_text(schema.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    capsys.readouterr()
    assert main(["docs", "--check", "--json", *project]) == 1
    assert json.loads(capsys.readouterr().out) == {"stale": ["docs/schemas/versions.json"]}


@pytest.mark.parametrize("name", ["engine.json", "faults.json"])
def test_broken_results_are_named(tmp_path: Path, name: str) -> None:
    for given in ("versions.yaml", "images"):
        (tmp_path / given).symlink_to(ROOT / given)
    (tmp_path / "README.md").write_bytes((ROOT / "README.md").read_bytes())
    results = tmp_path / "benchmarks/results" / name
    results.parent.mkdir(parents=True)
    for text in ("{", "{}", "[]"):
        results.write_text(text)
        with pytest.raises(InputError) as caught:
            docs.generated(tmp_path)
        assert caught.value.where == f"benchmarks/results/{name}"


def test_ci_runs_readmes_test_command() -> None:
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    # Only the function that reads README, so that nothing is installed.
    (function,) = re.findall(r"^readme_command\(\) \{\n.*?^\}\n", script, re.DOTALL | re.MULTILINE)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"{function}\nreadme_command tests"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == readme_command("tests") + "\n"
    assert 'bash -euo pipefail -c "$test_command"' in script
    assert "nox -s tests" not in script


def test_ci_script_parses_and_may_be_started() -> None:
    assert os.access(ROOT / ".ci/run", os.X_OK)
    subprocess.run(["bash", "-n", str(ROOT / ".ci/run")], check=True)


@pytest.mark.parametrize("name", ["validate", "tests"])
def test_readmes_commands_are_one_line_each(name: str) -> None:
    line = readme_command(name)
    assert "python3 -m venv .venv && .venv/bin/pip install -q -e '.[" in line
    subprocess.run(["bash", "-n", "-c", line], check=True)


def test_sessions_that_pages_name_exist() -> None:
    listed = subprocess.run([sys.executable, "-m", "nox", "-l"], cwd=ROOT, capture_output=True, text=True, check=True)
    sessions = set(re.findall(r"^[*-] ([\w-]+)", listed.stdout, re.MULTILINE))
    named = {
        (name, s)
        for name, page in zip(NAMES, PAGES, strict=True)
        for s in re.findall(r"nox -s ([\w-]+)", page.read_text())
    }
    assert {(name, s) for name, s in named if s not in sessions} == set()


@pytest.mark.parametrize("name", NAMES)
def test_every_link_leads_somewhere(name: str) -> None:
    page = ROOT / name
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{name}: {target}"
        assert file.is_relative_to(ROOT), f"{name}: {target}"
        if anchor:
            titles = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in anchors, f"{name}: {target}"


def result(**changes: object) -> dict[str, object]:
    side = {"median": 0.05, "min": 0.04, "max": 0.06, "repeats": 3, "samples": [0.04, 0.05, 0.06]}
    return {
        "date": "2026-11-20",
        "command": "nox -s bench",
        "quick": False,
        "machine": {"cpu": "C", "cores": 2, "memory_gib": 24, "kernel": "6.1", "system": "Debian", "python": "3.11"},
        "versions": {"docker.io": "20.10"},
        "load_average": {"before": [0, 0, 0], "after": [1, 1, 1]},
        "workload": {"components": 12, "blob_megabytes": 20, "small_files_per_component": 200},
        "memory_floor_megabytes": 20,
        "rows": [
            {"key": "noop", "name": "no-op", "unit": "s", "ours": side, "buildkit": side, "ratio": 1.0, "value": 1.0,
             "bar": {"ratio": 0.5}, "met": False},
            {"key": "four", "name": "four", "unit": "s", "ours": side, "value": 1.0, "met": True,
             "ours_one": side, "bar": {"times": 1.5, "of": "ours_one"}},
            {"key": "memory", "name": "memory", "unit": "MB", "bar": {"megabytes": 300}},
        ],
        **changes,
    }  # fmt: skip


def test_benchmark_page_says_what_was_met_and_what_not() -> None:
    page = timing_pages.benchmark_page(result())
    assert "Generated from benchmarks/results/engine.json" in page
    short = "0.050 s (0.040–0.060, n=3)"
    assert f"| no-op | {short} | {short} | 1.00× | ≤ 0.5× BuildKit | **no** |" in page
    assert f"| four | {short} | – | – | ≤ 1.5× one target in the same rounds ({short}; is 1.00×) | yes |" in page
    assert "| memory | – | – | – | ≤ 300 MB | – |" in page


def test_a_quick_run_is_no_result() -> None:
    assert "no result" in timing_pages.benchmark_page(result(quick=True)).split("\n")[1]


def test_an_assembly_page_says_what_each_side_leaves() -> None:
    sizes = {"wheels": 3, "wheel_bytes": 4 * 10**9, "layers": 2, "compressed_bytes": 3 * 10**9}
    sizes |= {"unpacked_bytes": 7 * 10**9, "docker_bytes": 8 * 10**9}
    page = timing_pages.assembly_page(result(target="h200", sizes=sizes))
    assert "Generated from benchmarks/results/h200-assembly.json" in page
    assert "3 wheels (4.00 GB)" in page
    assert "2 compressed layers, 3.00 GB (7.00 GB unpacked)" in page
    assert "creates 8.00 GB unpacked" in page
    assert "| no-op | " in page


def test_a_launcher_page_judges_the_difference() -> None:
    seen = {"median": 4.1, "min": 4.0, "max": 4.25, "repeats": 3}
    more = {"median": 0.234, "min": -0.1, "max": 1.5, "repeats": 3}
    rows = [
        {
            "name": "start",
            "unit": "s",
            "ours": seen,
            "bare": seen,
            "overhead": more,
            "bar": {"seconds": 1},
            "met": True,
        },
        {"name": "show", "unit": "s", "ours": more, "bar": {"seconds": 0.15}, "met": False},
        {"name": "plan", "unit": "s", "ours": more},
    ]
    page = timing_pages.launcher_page(result(rows=rows, commands={"ours": "primus train x", "bare": "torchrun"}))
    long, short = "4.10 s (4.00–4.25, n=3)", "0.234 s (-0.100–1.500, n=3)"
    assert "Generated from benchmarks/results/launcher.json" in page
    assert "`primus train x` compared with `torchrun`" in page
    assert f"| start | {long} | {long} | {short} | ≤ 1 s | yes |" in page
    assert f"| show | {short} | – | – | ≤ 0.15 s | **no** |" in page
    assert f"| plan | {short} | – | – | – | – |" in page


def test_every_kind_of_result_has_its_page_and_others_none(tmp_path: Path) -> None:
    for name in ("versions.yaml", "README.md", "images"):
        (tmp_path / name).symlink_to(ROOT / name)
    results = tmp_path / "benchmarks/results"
    results.mkdir(parents=True)
    sizes = dict.fromkeys(("wheels", "wheel_bytes", "layers", "compressed_bytes", "unpacked_bytes", "docker_bytes"), 1)
    (results / "h200-assembly.json").write_text(json.dumps(result(target="h200", sizes=sizes)))
    (results / "h200-proxy.json").write_text("{}")
    assert [n for n in docs.generated(tmp_path) if "benchmarks" in n] == ["docs/benchmarks/h200-assembly.md"]
    (results / "h200-assembly.json").write_text("{}")
    with pytest.raises(InputError) as caught:
        docs.generated(tmp_path)
    assert caught.value.where == "benchmarks/results/h200-assembly.json"
    assert "command" in (caught.value.hint or "")
