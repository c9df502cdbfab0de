import re
import subprocess
import sys
from pathlib import Path

import pytest
from docs import generated

from primus_images.errors import InputError
from primus_images.release.policy import Policy

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    page
    for glob in ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "src/**/*.md")
    for page in ROOT.glob(glob)
)
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def readme_command(name: str) -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (line,) = re.findall(rf"<!-- command: {name} -->\n```sh\n(.+)\n```\n<!-- end -->", text)
    return str(line)


def test_generated_files_are_up_to_date() -> None:
    assert not generated.stale(ROOT), "run: nox -s docs"


def test_a_missing_and_a_changed_file_are_written_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("versions.yaml", "pyproject.toml", "README.md", "images", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name) if name != "README.md" else (
            tmp_path / name
        ).write_bytes((ROOT / name).read_bytes())

    def run(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["generated", *words, "--project", str(tmp_path)])
        return generated.main()

    assert run("--check") == 1
    assert "out of date: docs/schemas/versions.json" in capsys.readouterr().out
    assert run() == 0
    schema = tmp_path / "docs/schemas/versions.json"
    schema.write_text(schema.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    capsys.readouterr()
    assert run("--check") == 1
    assert capsys.readouterr().out == "out of date: docs/schemas/versions.json\n"


def test_a_rule_of_the_policy_without_a_description_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    described = generated.notes_of(Policy)
    monkeypatch.setattr(generated, "notes_of", lambda _: {**described, "driver": {}})
    with pytest.raises(InputError, match="the policy's driver has no description"):
        generated._policy()


def test_ci_runs_readmes_test_command() -> None:
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert f"\nrun tests {readme_command('tests')}\n" in script
    for program in (".ci/run", "dev"):
        subprocess.run(["bash", "-n", str(ROOT / program)], check=True)


def test_sessions_that_pages_name_exist() -> None:
    listed = subprocess.run(
        [sys.executable, "-m", "nox", "-l"], cwd=ROOT, capture_output=True, text=True, check=True
    )
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
    text = re.sub(
        r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
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
