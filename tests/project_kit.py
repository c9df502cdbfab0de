"""A small project on disk, and the `primus` command line on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import primus
from primus.plan.action import ImagePlan
from primus.plan.layers import plan_image
from primus.plan.project import Project
from primus.plan.resolve import resolve
from primus.versions.lock import Lock

SOURCE = Path(primus.__file__).parents[1]


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def digest(self) -> str:
        """The last line of a build."""
        return self.out.splitlines()[-1]


@dataclass(frozen=True)
class Kit:
    root: Path

    def write(self, name: str, text: str | bytes) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    def edit(self, name: str, old: str, new: str) -> None:
        path = self.root / name
        text = path.read_text()
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {name}"
        path.write_text(text.replace(old, new))

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "primus.cli.main", *words]

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(SOURCE)}

    def primus(self, *words: str, **options: Any) -> Result:
        done = subprocess.run(
            self.command(*words), cwd=self.root, env=self.env, capture_output=True, text=True, check=False, **options
        )
        assert "Traceback" not in done.stderr, done.stderr
        return Result(done.returncode, done.stdout, done.stderr)

    def locked(self, target: str, package: str, channel: str = "pypi") -> str:
        """The version of a wheel in the lock of ``target``."""
        lock = json.loads((self.root / f"images/locks/{channel}/{target}.json").read_text())
        (version,) = {one["version"] for one in lock["files"] if (one["kind"], one["name"]) == ("wheel", package)}
        return str(version)

    def build(self, *words: str) -> Result:
        result = self.primus("build", *(words or ("demo",)))
        assert result.code == 0, result.err
        return result

    def layers(self, *words: str) -> dict[str, bool]:
        """Layer → whether this build made it."""
        result = json.loads(self.build(*(words or ("demo",)), "--json").out)
        return {line["name"]: line["built"] for line in result["images"][0]["layers"]}


def plan_over(root: Path, name: str, lock: Lock | None) -> ImagePlan:
    """The plan of a target over a lock that is not on disk."""
    project = Project(root)
    return plan_image(replace(resolve(project, name), lock=lock), project.workspace.stats)


def make_project(root: Path, *, size: int = 1000) -> Kit:
    """Three components from local folders, two targets."""
    kit = Kit(root)
    kit.write(
        "versions.yaml",
        """\
release: v26.11
created: 2026-11-20
bases: {}
components:
  alpha:
    name: Alpha
    pins:
      - {path: parts/alpha, to: /opt/alpha, channel: local}
  beta:
    name: Beta
    pins:
      - {path: parts/beta, to: /opt/beta, channel: local}
  recipes:
    name: Recipes
    pins:
      - {path: recipes, to: /opt/primus/recipes, channel: local}
""",
    )
    for target in ("demo", "other"):
        kit.write(
            f"images/{target}.yaml",
            f"""\
description: The {target} image
channels: [local]
components: [alpha, beta, recipes]
command: [sh]
environment:
  - {{name: COLOR, value: red, why: to see it change}}
""",
        )
    for part in ("alpha", "beta"):
        kit.write(f"parts/{part}/blob", (part * (size // 4 + 1)).encode()[:size])
        kit.write(f"parts/{part}/sub/run", "#!/bin/sh\n").chmod(0o755)
        (root / f"parts/{part}/link").symlink_to("sub/run")
    kit.write("recipes/one.yaml", "a: 1\n")
    return kit


def lend_files(kit: Kit) -> None:
    """Files that the repository's own builds fetched already need not be fetched twice."""
    own = SOURCE.parent / ".primus/files/sha256"
    here = kit.root / ".primus/files/sha256"
    here.mkdir(parents=True)
    for path in own.glob("*") if own.is_dir() else ():
        if not path.name.endswith(".part"):
            try:
                os.link(path, here / path.name)
            except OSError:
                return
