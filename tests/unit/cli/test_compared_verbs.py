"""`primus diff`, `sbom` and `import-exp`: what is printed, as text and as a document."""

import json
from pathlib import Path

import pytest
import yaml

from primus_images.cli.main import main
from project_kit import make_project
from tables import text_of


def test_a_difference_is_a_page_notes_or_a_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["diff", "v26.7", "v26.8"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("rocm/primus:v26.7 → rocm/primus:v26.8")
    assert main(["diff", "v26.7", "v26.8", "--markdown"]) == 0
    notes = capsys.readouterr().out
    assert notes != page
    assert "rocm" in notes
    assert main(["diff", "v26.7", "v26.8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
    assert main(["diff", "v26.7", "v0.0"]) == 2


def test_two_images_of_the_store_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kit = make_project(tmp_path / "project")
    monkeypatch.chdir(kit.root)
    kit.build("demo", "other")
    assert main(["diff", "v26.11-demo", "v26.11-other"]) == 0
    assert "v26.11-demo" in capsys.readouterr().out.splitlines()[0]
    assert main(["sbom", "demo"]) == 2
    assert "demo has no lock, so its contents are unknown" in capsys.readouterr().err


def test_an_experiment_becomes_a_file_or_a_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("PRIMUS_ROOT", "PRIMUS_ALLOW_UNMAPPED", "PRIMUS_TEAM", "PRIMUS_USER"):
        monkeypatch.setenv(name, "")
    Path("exp.yaml").write_text(text_of("experiments/megatron.yaml"))
    assert main(["import-exp", "exp.yaml"]) == 0
    said = capsys.readouterr()
    assert "is as in the recipe llama3.1-8b" in said.err
    assert main(["import-exp", "exp.yaml", "--out", "mine.yaml"]) == 0
    assert capsys.readouterr().out == ""
    assert Path("mine.yaml").read_text() == said.out
    assert yaml.safe_load(said.out)["uses"][-1] == "llama3.1-8b.yaml"
    assert main(["import-exp", "exp.yaml", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["recipe"], document["backend"]) == ("llama3.1-8b", "megatron")
    assert (document["text"], document["precision"]) == (said.out, "bf16")
    assert (document["nodes"], document["unmapped"]) == (1, [])
    assert document["settings"]["megatron.training.lr"] == 1e-5
