"""The action that compiles kernels: what its key holds, what it does not, and how it fails."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from primus.engine.execute import Workshop
from primus.errors import CheckFailed, InputError
from primus.plan import aot as turbo
from primus.plan.action import Action
from primus.plan.project import Project
from primus.progress import QuietProgress
from primus.versions.lock import Lock, LockedFile
from project_kit import plan_over

VERSIONS = """\
release: v26.11
created: 2026-11-20
bases:
  debs: {suite: sid, python: 3.14.10, packages: [python3-torch]}
components:
  pytorch:
    name: PyTorch
    pins:
      - {deb: python3-torch, version: 2.14.1, channel: debian}
  triton:
    name: Triton
    pins:
      - {wheel: triton, version: 3.8.0, channel: pypi}
  liger-kernel:
    name: Liger Kernel
    pins:
      - {wheel: liger-kernel, version: 0.8.5, channel: pypi}
  pip:
    name: pip
    pins:
      - {wheel: pip, version: "26.3", channel: pypi}
  primus:
    name: Primus
    pins:
      - {path: src, to: "{site}/primus", channel: local}
"""
TARGET = """\
description: x
channels: [debian]
base: debs
gpu: GPU
components: [pytorch, triton, liger-kernel, pip, primus]
turbo: [liger-kernel]
environment:
  - {name: TRITON_CACHE_DIR, value: /tmp/a, why: w}
  - {name: TRITON_F32_DEFAULT, value: ieee, why: w}
"""
WHEELS = {"triton": "3.8.0", "liger-kernel": "0.8.5", "pip": "26.3"}
DEBS = {"python3-torch": "2.14.1-1", "python3.14": "3.14.10-1", "libc6": "2.43-7"}


class Kit:
    """A project of two targets; every change is one edit of a file or of the lock."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "src").mkdir()
        (root / "src/a.py").touch()
        (root / "images").mkdir()
        (root / "versions.yaml").write_text(VERSIONS)
        for name in ("mi300x", "mi325x"):
            (root / f"images/{name}.yaml").write_text(TARGET.replace("GPU", name))

    def edit(self, name: str, old: str, new: str) -> None:
        text = (self.root / name).read_text()
        assert text.count(old) == 1
        (self.root / name).write_text(text.replace(old, new))

    def layers(self, name: str = "mi300x", **versions: str) -> dict[str, Action]:
        files = [
            LockedFile(
                kind=kind,  # type: ignore[arg-type]
                name=package,
                version=versions.get(package.replace("-", "_"), version),
                file=f"{package}.x",
                size=1,
                sha256=hashlib.sha256(package.encode()).hexdigest(),
                base=base,
            )
            for kind, base, table in (("wheel", None, WHEELS), ("deb", "debs", DEBS))
            for package, version in table.items()
        ]
        lock = Lock(target=name, channel="debian", pins={}, files=tuple(files))
        return {a.name: a for a in plan_over(self.root, name, lock).layers}

    def key(self, **versions: str) -> str:
        return self.layers(**versions)["turbo gfx942"].key


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return Kit(tmp_path)


def test_two_targets_with_one_gpu_share_the_layer_and_local_trees_stay_on_top(kit: Kit) -> None:
    mine, other = kit.layers("mi300x"), kit.layers("mi325x")
    assert mine["turbo gfx942"].key == other["turbo gfx942"].key
    names = list(mine)
    assert names.index("pip") < names.index("turbo gfx942") < names.index("primus")
    assert "primus" not in {a.name for a in mine["turbo gfx942"].tools}
    assert mine["turbo gfx942"].spec["units"] == 304


def test_the_key_holds_what_decides_the_kernels_and_nothing_else(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    key = kit.key()
    assert kit.key(libc6="2.44-1") == key
    assert kit.key(**{"python3.14": "3.14.11-1"}) != key
    assert kit.key(python3_torch="2.14.1-2") != key
    (kit.root / "src/a.py").write_text("changed")
    kit.edit("images/mi300x.yaml", "/tmp/a", "/tmp/b")
    kit.edit("versions.yaml", 'version: "26.3"', 'version: "26.4"')
    assert kit.key(pip="26.4") == key
    kit.edit("versions.yaml", "version: 0.8.5", "version: 0.8.6")
    changed = kit.key(pip="26.4", liger_kernel="0.8.6")
    assert changed != key
    kit.edit("versions.yaml", "version: 3.8.0", "version: 3.9.0")
    changed_too = kit.key(pip="26.4", liger_kernel="0.8.6", triton="3.9.0")
    assert changed_too not in (key, changed)
    kit.edit("images/mi300x.yaml", "value: ieee", "value: tf32")
    last = kit.layers(pip="26.4", liger_kernel="0.8.6", triton="3.9.0")["turbo gfx942"]
    assert last.key != changed_too
    assert [i.where[:20] for i in last.inputs if i.name == "TRITON_F32_DEFAULT"] == ["images/mi300x.yaml:7"]
    monkeypatch.setattr(turbo, "_SOURCES", turbo._SOURCES[1:])
    assert kit.key(pip="26.4", liger_kernel="0.8.6", triton="3.9.0") not in (last.key, changed_too)


def test_a_target_that_cannot_have_kernels_is_refused_with_the_line(kit: Kit) -> None:
    kit.edit("images/mi300x.yaml", "triton, liger-kernel, pip", "triton, pip")
    with pytest.raises(InputError, match="need liger-kernel, which is not among the components") as caught:
        kit.layers()
    assert (caught.value.where or "").startswith("images/mi300x.yaml:6:")
    kit.edit("images/mi300x.yaml", "gpu: mi300x\n", "")
    with pytest.raises(InputError, match="this target has none"):
        kit.layers()


def test_a_compiler_that_fails_fails_the_build_with_its_words(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def refuse(root: object, argv: Sequence[str], *, inputs: Mapping[str, Path], log: Path, **options: Any) -> int:
        sources = {name for name in ("errors.py", "files.py", "aot/bake.py") if (inputs["/in/primus"] / name).is_file()}
        asked.update(argv=argv, sources=sources, env=options["env"])
        log.write_text("liger-rope x\n  _triton_rope\n✗ liger-rope does not compile for gfx942: _triton_rope: no\n")
        return 1

    monkeypatch.setattr("primus.engine.sandboxed.run_isolated", refuse)
    monkeypatch.setattr("primus.engine.sandboxed.choose", lambda *_: None)
    monkeypatch.setattr("primus.engine.sandboxed.root_of_layers", lambda *_: None)
    monkeypatch.setattr(Workshop, "layer", lambda *_: None)
    workspace = Project(kit.root).workspace
    workspace.store.prepare()
    workshop = Workshop(workspace=workspace, progress=QuietProgress())
    with pytest.raises(CheckFailed, match="liger-rope does not compile for gfx942: _triton_rope"):
        workshop.run(kit.layers()["turbo gfx942"])
    assert asked["argv"][-5:] == ["gfx942", "304", "/opt/primus/triton", "/out", "liger-kernel"]
    assert asked["env"]["TRITON_F32_DEFAULT"] == "ieee"
    assert "TRITON_CACHE_DIR" not in asked["env"]
    assert asked["sources"] == {"errors.py", "files.py", "aot/bake.py"}
    assert not workshop.done(kit.layers()["turbo gfx942"])
