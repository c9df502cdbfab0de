"""The real cpu image, with its inputs fetched and its base built: wheels become layers here, `pip install` there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.buildkit import BuildKit
from benchmarks.measure import PRIMUS, Finished, run
from primus.errors import CheckFailed, HostError, InputError

__all__ = ["TARGET", "CpuProject", "prepare"]

TARGET = "cpu"
_BASE = "primus-base"


@dataclass(frozen=True, kw_only=True)
class CpuProject:
    """A copy of the repository's inputs, which is a Docker build context too; our builder's side of the comparison."""

    root: Path
    store: Path
    name: str = "ours"

    def command(self, targets: Sequence[str], *, offline: bool = True) -> list[str]:
        """The command line that builds ``targets``."""
        places = ["--project", str(self.root), "--store", str(self.store), *(["--offline"] if offline else [])]
        return [*PRIMUS, "build", *targets, *places]

    def build(self, targets: Sequence[str]) -> tuple[str, Finished]:
        """Build the targets in one call."""
        done = run(self.command(targets))
        return done.lines[-1], done

    def forget(self) -> None:
        """Take everything out of the store but the base, which BuildKit has from the start as well."""
        shutil.rmtree(self.root / ".primus" / "cache", ignore_errors=True)
        kept = "".join(path.read_text() for path in self._base_records())
        digests = set(re.findall(r"[0-9a-f]{64}", kept))
        for path in (self.store / "actions").glob("*.json"):
            if path not in self._base_records():
                path.unlink()
        for path in (self.store / "blobs" / "sha256").iterdir():
            if path.name not in digests:
                path.unlink()
        shutil.rmtree(self.store / "targets", ignore_errors=True)
        (self.store / "index.json").unlink(missing_ok=True)

    def change_recipe(self, turn: int) -> None:
        """Add a line to one recipe file."""
        recipe = min((self.root / "recipes").rglob("*.yaml"))
        recipe.write_text(recipe.read_text(encoding="utf-8") + f"# turn {turn}\n", encoding="utf-8")

    def base_tar(self) -> subprocess.Popen[bytes]:
        """A process that writes the base layer's tar to its standard output."""
        (record,) = [json.loads(path.read_text()) for path in self._base_records()]
        digest = record["layer"]["blob"]["digest"].removeprefix("sha256:")
        code = (
            "import sys, zstandard as z; z.ZstdDecompressor().copy_stream(open(sys.argv[1], 'rb'), sys.stdout.buffer)"
        )
        blob = str(self.store / "blobs" / "sha256" / digest)
        return subprocess.Popen([sys.executable, "-c", code, blob], stdout=subprocess.PIPE)

    def _base_records(self) -> list[Path]:
        return [p for p in (self.store / "actions").glob("*.json") if '"kind":"debs"' in p.read_text().replace(" ", "")]


def prepare(repository: Path, root: Path, kit: BuildKit) -> CpuProject:
    """Copy the inputs, fetch all files, build once, and give BuildKit the same base and the same wheels."""
    root.mkdir()
    ours = CpuProject(root=root, store=root.parent / f"{root.name}-store")
    for name in ("versions.yaml", "images", "recipes", "src"):
        source, copy = repository / name, root / name
        if source.is_dir():
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.is_file():
            shutil.copy2(source, copy)
    print("fetching what the cpu image needs, building it once", file=sys.stderr, flush=True)
    run(ours.command([TARGET], offline=False))
    _describe_for_docker(root)
    with ours.base_tar() as tar:
        kit.load_root(tar.stdout, _BASE)
    if tar.returncode:
        raise HostError("the base layer could not be unpacked")
    return ours


def _describe_for_docker(root: Path) -> None:
    from primus.images.filecache import FileCache
    from primus.images.project import Project

    project = Project.find(root)
    lock, base = project.lock(TARGET), project.choice(TARGET).base
    if lock is None or base is None:
        raise InputError("the cpu image has no lock or no base")
    cache = FileCache(project.work / "files")
    (root / "wheels").mkdir()
    wheels = lock.of("wheel")
    for wheel in wheels:
        (root / "wheels" / wheel.file).hardlink_to(cache.path(wheel.sha256))
    pip = next((w.file for w in wheels if w.name == "pip"), None)
    if pip is None:
        raise CheckFailed("the cpu image brings no pip wheel, so BuildKit's side cannot install its wheels")
    python = ".".join(project.versions.bases[base].python.split(".")[:2])
    # A bind mount and no cache folder: the wheels stay out of the image, which is the fastest way BuildKit knows.
    install: list[str] = [f"/usr/bin/python{python}", f"/wheels/{pip}/pip", "install", "--no-index", "--no-deps"]
    install += ["--no-cache-dir", "--disable-pip-version-check", "--root-user-action=ignore", "--quiet"]
    install += ["--break-system-packages", "--prefix=/opt/venv", *(f"/wheels/{w.file}" for w in wheels)]
    local = {name: pin for name, pin in project.pins(TARGET).items() if pin.path}
    copies = [f"COPY {pin.path} {pin.to}" for _, pin in sorted(local.items(), key=lambda i: i[0] == "recipes")]
    lines = [f"FROM {_BASE} AS {TARGET}", f"RUN --mount=type=bind,source=wheels,target=/wheels {_exec(install)}"]
    (root / "Dockerfile").write_text("\n".join([*lines, *copies, ""]))
    wanted = ["wheels", *(pin.path for pin in local.values() if pin.path)]
    (root / ".dockerignore").write_text("\n".join(["*", *(f"!{path}" for path in wanted), "**/__pycache__", ""]))


def _exec(words: Sequence[str]) -> str:
    # The form without a shell: a base this small has none to spare time for.
    return json.dumps(words)
