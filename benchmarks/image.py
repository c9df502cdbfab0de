"""A real image, with its inputs fetched and its base built: our layers from wheels, compared with
`pip install`.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.buildkit import BuildKit
from benchmarks.measure import PRIMUS, Finished, run
from primus_images.errors import CheckFailed, HostError, InputError
from primus_images.files import read_sealed
from primus_images.oci.store import Layer, Store
from primus_images.plan.action import ImagePlan
from primus_images.plan.layers import plan_image
from primus_images.plan.project import Project, Workspace
from primus_images.plan.resolve import ResolvedTarget, resolve
from primus_images.versions.lock import LockedFile

_BASE = "primus-base"


@dataclass(frozen=True, kw_only=True)
class ImageProject:
    """Our side of the comparison: a copy of the repository's inputs, which is also a Docker build
    context.
    """

    root: Path
    store: Path
    target: str
    name: str = "ours"

    def command(self, targets: Sequence[str], *, offline: bool = True) -> list[str]:
        """Return the command line that builds ``targets``."""
        places = [
            "--project",
            str(self.root),
            "--store",
            str(self.store),
            *(["--offline"] if offline else []),
        ]
        return [*PRIMUS, "build", *targets, *places]

    def build(self, targets: Sequence[str]) -> tuple[str, Finished]:
        """Build the targets with one command."""
        done = run(self.command(targets))
        return done.lines[-1], done

    def forget(self) -> None:
        """Remove everything from the store except what BuildKit also starts with: the base, and the
        wheels built from source.
        """
        shutil.rmtree(self.root / ".primus" / "cache", ignore_errors=True)
        base = self._base_record()
        digests = set(re.findall(r"[0-9a-f]{64}", base.read_text()))
        for path in (self.store / "actions").glob("*.json"):
            if path != base and (read_sealed(path) or {}).get("kind") != "build":
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
        """Start a process that writes the base layer's tar archive to its standard output."""
        record = read_sealed(self._base_record())
        digest = record["layer"]["blob"]["digest"].removeprefix("sha256:")
        code = (
            "import sys, zstandard as z; z.ZstdDecompressor().copy_stream(open(sys.argv[1], "
            "'rb'), sys.stdout.buffer)"
        )
        blob = str(self.store / "blobs" / "sha256" / digest)
        return subprocess.Popen([sys.executable, "-c", code, blob], stdout=subprocess.PIPE)

    def _base_record(self) -> Path:
        return self.store / "actions" / f"{self._plan().layers[0].key}.json"

    def wheels(self) -> list[LockedFile]:
        """Return the image's wheels: those of its lock, and those built from source."""
        lock = self.resolved.lock
        builds = [a.key for a in self._plan().actions() if a.kind == "build"]
        records = [read_sealed(self.store / "actions" / f"{key}.json") for key in builds]
        built = [
            LockedFile(kind="wheel", name=r["name"], version="", **r["wheel"]) for r in records
        ]
        return [*(lock.of("wheel") if lock else ()), *built]

    def layers(self) -> list[Layer]:
        """Return the image's layers. The image must be built."""
        found = [Store(self.store).layer(action.key) for action in self._plan().layers]
        return [layer for layer in found if layer is not None]

    @property
    def workspace(self) -> Workspace:
        """The workspace of our builder."""
        return Project.find(self.root, store=self.store).workspace

    @property
    def resolved(self) -> ResolvedTarget:
        """The resolved target."""
        return resolve(Project.find(self.root, store=self.store), self.target)

    def _plan(self) -> ImagePlan:
        return plan_image(self.resolved, self.workspace.stats)


def prepare(repository: Path, root: Path, kit: BuildKit, target: str) -> ImageProject:
    """Copy the inputs, fetch all files, build once, and give BuildKit the same base and wheels."""
    root.mkdir()
    ours = ImageProject(root=root, store=root.parent / f"{root.name}-store", target=target)
    for name in ("versions.yaml", "images", "recipes", "src"):
        source, copy = repository / name, root / name
        if source.is_dir():
            shutil.copytree(
                source, copy, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
            )
        elif source.is_file():
            shutil.copy2(source, copy)
    print(f"fetching what the {target} image needs, building it once", file=sys.stderr, flush=True)
    _lend(repository / ".primus", root / ".primus" / "files", ours.store)
    run(ours.command([target], offline=False))
    _describe_for_docker(ours)
    with ours.base_tar() as tar:
        kit.load_root(tar.stdout, _BASE)
    if tar.returncode:
        raise HostError("the base layer could not be unpacked")
    return ours


def _lend(own: Path, files: Path, store: Path) -> None:
    """Link fetched files and copy the records of built wheels, so that nothing is fetched and
    compiled again.
    """
    if (own / "files").is_dir():
        shutil.copytree(own / "files", files, copy_function=os.link)
    (store / "actions").mkdir(parents=True)
    for path in (own / "store" / "actions").glob("*.json"):
        if (read_sealed(path) or {}).get("kind") == "build":
            shutil.copy2(path, store / "actions")


def _describe_for_docker(ours: ImageProject) -> None:
    root, target, resolved = ours.root, ours.target, ours.resolved
    base, wheels = resolved.choice.base, ours.wheels()
    if not wheels or base is None:
        raise InputError(f"the {target} image has no lock or no base")
    cache = ours.workspace.files
    (root / "wheels").mkdir()
    for wheel in wheels:
        (root / "wheels" / wheel.file).hardlink_to(cache.path(wheel.sha256))
    pip = next((w.file for w in wheels if w.name == "pip"), None)
    if pip is None:
        raise CheckFailed(
            f"the {target} image contains no pip wheel, so BuildKit's side cannot install its "
            "wheels"
        )
    python = ".".join(resolved.versions.bases[base].python.split(".")[:2])
    # A bind mount and no cache folder: the wheels stay out of the image, which is BuildKit's
    # fastest way.
    install: list[str] = [
        f"/usr/bin/python{python}",
        f"/wheels/{pip}/pip",
        "install",
        "--no-index",
        "--no-deps",
    ]
    install += [
        "--no-cache-dir",
        "--disable-pip-version-check",
        "--root-user-action=ignore",
        "--quiet",
    ]
    install += [
        "--break-system-packages",
        "--prefix=/opt/venv",
        *(f"/wheels/{w.file}" for w in wheels),
    ]
    local = {name: pin for name, pin in resolved.pins.items() if pin.path}
    site = f"/opt/venv/lib/python{python}/site-packages"
    ordered = [pin for _, pin in sorted(local.items(), key=lambda item: item[0] == "recipes")]
    copies = [f"COPY {pin.path} {(pin.to or '').replace('{site}', site)}" for pin in ordered]
    lines = [
        f"FROM {_BASE} AS {target}",
        f"RUN --mount=type=bind,source=wheels,target=/wheels {_exec(install)}",
    ]
    (root / "Dockerfile").write_text("\n".join([*lines, *copies, ""]))
    wanted = ["wheels", *(pin.path for pin in local.values() if pin.path)]
    (root / ".dockerignore").write_text(
        "\n".join(["*", *(f"!{path}" for path in wanted), "**/__pycache__", ""])
    )


def _exec(words: Sequence[str]) -> str:
    # The form without a shell, because the base is minimal.
    return json.dumps(words)
