"""`primus verify`: what differs between two builds, and the evidence of a published image."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from primus_images.cli.main import main
from primus_images.engine import pipeline
from primus_images.release import verification
from primus_images.release.statement import Trust
from primus_images.release.verification import Verified
from project_kit import Kit, make_project


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kit:
    kit = make_project(tmp_path / "project")
    monkeypatch.chdir(kit.root)
    return kit


def test_two_equal_builds_leave_nothing(kit: Kit, capsys: pytest.CaptureFixture[str]) -> None:
    kit.build("demo")
    assert main(["verify", "demo", "--json"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert not list((kit.root / ".primus").glob("verify-*"))
    document = json.loads(said.out)
    assert document["passed"] is True
    (image,) = document["images"]
    assert (image["target"], image["difference"]) == ("demo", None)
    assert image["digest"].startswith("sha256:")


def test_the_first_file_that_differs_is_named_and_both_builds_are_kept(
    kit: Kit,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kit.build("demo")
    real = pipeline.build
    built: list[Any] = []

    def build(plans: Any, workspace: Any, options: Any) -> Any:
        built.append(real(plans, workspace, options))
        kit.write("parts/alpha/blob", "other bytes")
        return built[-1]

    monkeypatch.setattr(pipeline, "build", build)
    assert main(["verify", "demo"]) == 1
    said = capsys.readouterr()
    line = said.out.splitlines()[0]
    assert re.search(r": differs: layer alpha: /opt/alpha\S*: .*\w+ \S+ against \S+", line)
    (kept,) = (kit.root / ".primus").glob("verify-*")
    assert f"the second store is {kept}" in said.err
    assert (kept / "store").is_dir()


@pytest.mark.parametrize("faults", [[], ["the sbom is of another image"]])
def test_a_published_image_passes_without_faults(
    kit: Kit,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    faults: list[str],
) -> None:
    asked: list[Any] = []

    def verify_image(name: str, trust: Trust, *, policy: Any, say: Any) -> Verified:
        asked.append((name, trust, policy))
        return Verified(digest="sha256:1", faults=faults)

    monkeypatch.setattr(verification, "verify_image", verify_image)
    words = ["verify", "--image", "a/b:v1", "--identity", "me", "--issuer", "them"]
    assert main(words) == len(faults)
    assert capsys.readouterr().out.splitlines()[0] == "a/b:v1 sha256:1"
    assert main([*words, "--json"]) == len(faults)
    document = json.loads(capsys.readouterr().out)
    assert (document["passed"], document["faults"]) == (not faults, faults)
    trust = Trust(key=None, identity="me", issuer="them")
    assert asked == [("a/b:v1", trust, None)] * 2
    (kit.root / "policy.yaml").write_text(
        Path(__file__).parents[3].joinpath("policy.yaml").read_text()
    )
    assert main([*words, "--policy", "policy.yaml"]) == len(faults)
    assert asked[2][2] is not None
