from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from primus.errors import InputError
from primus.plan.layers import plan_images
from primus.plan.project import Project
from primus.plan.resolve import resolve
from primus.versions import relock

ROOT = Path(__file__).resolve().parents[3]


def test_every_command_that_locks_names_the_line_of_the_pin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("versions.yaml", "images", "recipes", "src"):
        (tmp_path / name).symlink_to(ROOT / name) if name != "versions.yaml" else None
    text = (ROOT / "versions.yaml").read_text(encoding="utf-8")
    (tmp_path / "versions.yaml").write_text(text.replace("wheel: peft, version: ", "wheel: peft, version: 9"))

    def refused(*_: Any, **__: Any) -> Any:
        raise InputError("there is no wheel of peft 90.21.2", about="peft")

    monkeypatch.setattr(relock, "resolve", refused)
    project = Project.find(tmp_path)
    line = next(n for n, row in enumerate(text.splitlines(), 1) if "wheel: peft" in row)
    with pytest.raises(InputError) as caught:
        plan_images([resolve(project, "cpu")], project.workspace.stats)
    assert caught.value.where == f"versions.yaml:{line}:9"
