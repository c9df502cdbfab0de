"""`primus clean`: what of the store and the workspace can go."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from primus_images.cli.host.common import SourceOptions, open_project, sweep_containers
from primus_images.cli.verb import Options, answer
from primus_images.errors import InputError, did_you_mean
from primus_images.plan.project import Project
from primus_images.release.records import orphans
from primus_images.terminal import Screen, bytes_text


@dataclass(frozen=True, kw_only=True)
class CleanOptions(SourceOptions, Options):
    """The options of ``clean``."""

    image: Sequence[str]
    caches: bool
    validations: bool
    dry_run: bool


def clean(options: CleanOptions) -> int:
    """Free disk space: remove what no image, lock or last build needs."""
    # Seam "upkeep": the engine is slow to import.
    from primus_images.engine.upkeep import find_waste, remove

    project = open_project(options)
    store = project.workspace.store
    with project.workspace.alone():
        if not options.dry_run:
            sweep_containers(project.workspace)
        _require_images(options.image, store.images())
        needed = _locked_files(project)
        waste = find_waste(
            project.workspace,
            needed,
            without=options.image,
            caches=options.caches,
            more=_validations(project, options),
        )
        if not options.dry_run:
            remove(waste, store, sorted(set(options.image)))
    size = sum(item.size for item in waste)
    rows = []
    table = []
    for item in waste:
        rows.append({"kind": item.kind, "number": len(item.paths), "bytes": item.size})
        table.append((item.kind, f"{len(item.paths):,}", bytes_text(item.size)))
    lines = ["nothing to remove"]
    if waste:
        verb = "would free" if options.dry_run else "freed"
        lines = Screen.of().table(table, head=("what", "number", "size"), right=(1, 2))
        lines.append(f"{verb} {bytes_text(size)}")
    document = {
        "removed": not options.dry_run,
        "images": sorted(set(options.image)),
        "waste": rows,
        "bytes": size,
    }
    return answer(options, document, lines)


def _validations(project: Project, options: CleanOptions) -> dict[str, list[Path]]:
    """Return the validations of images that the store does not have, if they are to go."""
    if not options.validations:
        return {}
    store = project.workspace.store
    contents = set()
    for name, entry in store.images().items():
        if name not in options.image:
            manifest = json.loads(store.read(str(entry["digest"])))
            contents.add(manifest["config"]["digest"])
    folders = orphans(project.root / "out/validation", contents)
    return {"validations of images that are gone": folders}


def _require_images(names: Collection[str], images: Collection[str]) -> None:
    for name in names:
        if name not in images:
            listed = ", ".join(sorted(images)) or "none"
            hint = did_you_mean(name, images) or f"images: {listed}"
            raise InputError(f"the store has no image called {name!r}", hint=hint)


def _locked_files(project: Project) -> set[str]:
    """Return the hashes of the files in all locks."""
    hashes = set()
    for path in sorted((project.root / "images" / "locks").glob("*/*.json")):
        lock = project.lock(path)
        if lock:
            hashes |= {file.sha256 for file in lock.files}
    return hashes
