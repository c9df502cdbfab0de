"""Steps of `primus prove` that run Python, and the folder that they leave."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from primus_images.plan.project import Project
from primus_images.plan.resolve import resolve
from primus_images.release.prove import folder as sent
from primus_images.release.prove.run import Outcome, run_all
from primus_images.release.prove.steps import Setting, Step

ROOT = Path(__file__).parents[1]
SECRETS = {
    "HF_TOKEN": "plain-text-of-a-token",
    "PIP_INDEX_URL": "https://me:pass-word@pypi.corp.example/simple",
    "USER": "jane.doe",
}


def setting_of(folder: Path, target: str = "mi300x", **changes: object) -> Setting:
    setting = Setting(
        project=ROOT,
        target=target,
        gpu=target,
        channel="amd",
        locked=False,
        gpus=8,
        here=True,
        root=folder / "machine",
        work=folder / "work",
    )
    return replace(setting, **changes)


def step_of(name: str, code: str, needs: str = "", minutes: float = 1) -> Step:
    """A step that runs Python."""
    command = (sys.executable, "-c", code)
    return Step(name=name, title=f"step {name}", minutes=minutes, command=command, needs=needs)


def outcomes_of(steps: list[Step], setting: Setting, minutes: float = 60) -> dict[str, Outcome]:
    *_, last = run_all(steps, setting, minutes, lambda _: None)
    return last


def written(
    tmp_path: Path, steps: list[Step], monkeypatch: pytest.MonkeyPatch, sign: object = None
) -> Path:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    setting = setting_of(tmp_path)
    proof = sent.Proof(
        steps=steps,
        outcomes=outcomes_of(steps, setting),
        setting=replace(setting, here=False),
        resolved=resolve(Project(ROOT), "mi300x"),
    )
    sent.write(tmp_path / "record", proof, sign)
    return tmp_path / "record"
