"""Known issues: which versions have them, and where they are shown or refused."""

import json
from pathlib import Path

import pytest

from primus_images.cli.main import main
from primus_images.errors import InputError
from primus_images.gpus.table import arch_of, load_table
from primus_images.system import issues as module
from primus_images.system.host import Host
from primus_images.system.issues import issues
from primus_images.system.preflight import preflight
from project_kit import make_project

TABLE = """\
issues:
  - {component: some-part, versions: "VERSIONS", gpus: [mi355x], symptom: it fails, source: here,
     until: null}
"""


@pytest.mark.parametrize(
    ("versions", "version", "has"),
    [
        ("<63", "50.0-2ubuntu0.1", True),
        ("<63", "63.0-1", False),
        ("<63", "1:62.9", True),
        (">=10.0.0,<10.1", "10", True),
        (">=10.0.0,<10.1", "10.0.5", True),
        (">=10.0.0,<10.1", "10.1.0", False),
        (">9,<=10", "10.0", True),
        ("==2.17.0+rocm10.0.0", "2.17.0+rocm10.0.0", True),
        ("==2.17.0+rocm10.0.0", "2.17.0", False),
        ("<2", "1.0 (cpu), 3.0 (mi300x)", True),
        ("<2", "3.0 (cpu), 4.0 (mi300x)", False),
        ("<2", "3c0ffee", False),
        ("*", "3c0ffee", True),
    ],
)
def test_versions(versions: str, version: str, has: bool, tmp_path: Path) -> None:
    path = tmp_path / "table.yaml"
    path.write_text(TABLE.replace("VERSIONS", versions))
    for name in ("some-part", "Some Part", "some_part"):
        assert bool(issues({name: version}, ["mi355x"], path)) == has
    assert not issues({"some-part": version}, ["mi300x"], path) and not issues({}, ["mi355x"], path)


def test_an_issue_of_an_architecture_or_vendor_is_one_of_its_gpus_and_no_word_is_unknown(
    tmp_path: Path,
) -> None:
    for word in ("gfx950", "nvidia", "mi300x"):
        (path := tmp_path / f"{word}.yaml").write_text(
            TABLE.replace("VERSIONS", "*").replace("mi355x", word)
        )
        for gpu in load_table().generations:
            meant = word in (gpu.name, gpu.arch, arch_of(gpu).vendor)
            assert bool(issues({"some-part": "1"}, [gpu.name], path)) == meant
    (path := tmp_path / "mi350.yaml").write_text(
        TABLE.replace("VERSIONS", "*").replace("mi355x", "mi350")
    )
    with pytest.raises(InputError, match="'mi350' is no GPU, architecture or vendor"):
        issues({}, [], path)


def test_the_shipped_table_names_the_pins_that_have_an_issue(tmp_path: Path) -> None:
    found = issues({"pytorch": "2.12.0+rocm10.0.0", "apex": "1.13.0+rocm10.0.0"}, ["mi300x"])
    assert [issue.component for issue in found] == ["apex"]
    assert not issues({"pytorch": "2.13.0+rocm10.0.0", "apex": "1.13.0+rocm10.0.0"}, ["mi300x"])
    image = tmp_path / "etc/primus/image.json"
    image.parent.mkdir(parents=True)
    image.write_text(json.dumps({"components": {"ROCm": "10.0.0", "PyTorch": "2.12.0"}}))
    status = tmp_path / "var/lib/dpkg/status"
    status.parent.mkdir(parents=True)
    status.write_text(
        "Package: a\nVersion: 1\n\nPackage: libibverbs1\nStatus: install ok\nVersion: 50.0-2\n"
    )
    assert [issue.component for issue in Host(root=tmp_path).issues("mi350x")] == [
        "libibverbs1",
        "rocm",
    ]
    (finding,) = [f for f in preflight(Host(root=tmp_path)) if f.check == "known issues"]
    assert "Thor2" in finding.message and "ROCm/MAD#200" in finding.message and not finding.problem


@pytest.mark.parametrize(("severity", "code"), [("note", 0), ("refuse", 2)])
def test_a_plan_names_an_issue_or_refuses_it(
    severity: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = (
        TABLE.replace("VERSIONS", "*")
        .replace("until", f"severity: {severity}, until")
        .replace("gpus: [mi355x], ", "")
    )
    (tmp_path / "table.yaml").write_text(text.replace("some-part", "gamma"))
    monkeypatch.setattr(module, "FILE", tmp_path / "table.yaml")
    kit = make_project(tmp_path / "project")
    kit.edit(
        "versions.yaml",
        "bases: {}\n",
        "bases: {bookworm: {suite: bookworm, python: 3.11.2, packages: [aa]}}\n",
    )
    kit.edit(
        "versions.yaml",
        "  beta:\n",
        "  gamma:\n    name: G\n    pins:\n"
        "      - {wheel: gamma, version: 1.0, channel: pypi}\n  beta:\n",
    )
    kit.edit(
        "images/demo.yaml",
        "[local]\ncomponents: [alpha,",
        "[pypi]\nbase: bookworm\ncomponents: [alpha, gamma,",
    )
    pins = {
        "architecture": "amd64",
        "base bookworm packages": "aa",
        "base bookworm python": "3.11.2",
        "base bookworm suite": "bookworm",
        "python": "3.11",
        "wheel gamma": "1.0",
    }
    files = [
        {
            "kind": "deb",
            "name": "aa",
            "version": "1",
            "file": "aa.deb",
            "size": 1,
            "sha256": "0" * 64,
            "base": "bookworm",
        },
        {
            "kind": "wheel",
            "name": "gamma",
            "version": "1.0",
            "file": "gamma-1.0-py3-none-any.whl",
            "size": 1,
            "sha256": "1" * 64,
        },
    ]
    lock = {"format": 1, "target": "demo", "channel": "pypi", "pins": pins, "files": files}
    kit.write("images/locks/pypi/demo.json", json.dumps(lock))
    monkeypatch.chdir(kit.root)
    assert main(["plan", "demo"]) == code
    out, err = capsys.readouterr()
    assert "gamma *: it fails (here)" in (out if code == 0 else err)
    assert code == 0 or "versions.yaml:12:9: demo would be wrong" in err
