"""The note that a build writes so that the next build can answer from it; see :mod:`primus.build.unchanged`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from primus.build.image import Built
from primus.build.unchanged import marks_of, note_path
from primus.files import write_sealed
from primus.plan.action import ImagePlan
from primus.plan.resolve import ResolvedTarget
from primus.plan.workspace import Workspace

_MARGIN_NS = 50_000_000


def remember(workspace: Workspace, plan: ImagePlan, built: Built, name: str, began_ns: int) -> None:
    """Write the note for a build whose planning began at ``began_ns`` (wall clock).

    Writes no note if a file that the build read was modified since then or shortly before. ``name`` is the image's
    name in the answer.
    """
    read = [list(_files(plan.resolved)), *_trees(plan), list(_engine())]
    path = note_path(str(plan.resolved.root), plan.target)
    try:
        newest = max(max(s.st_mtime_ns, s.st_ctime_ns) for group in read for s in map(os.lstat, group))
        if newest > began_ns - _MARGIN_NS:
            return
        store = workspace.store
        blobs = [built.digest, built.content, *(line.digest for line in built.layers)]
        made = [str(store.blob_path(d)) for d in blobs]
        made += [str(store.root / "index.json"), str(store.root / "targets" / f"{plan.state}.json")]
        texts = ["\n".join(group) for group in (*read, made)]
        groups = [(text, marks_of(text)) for text in texts]
        note = {"store": str(store.root), "groups": groups, "name": name, "digest": built.digest}
        write_sealed(Path(path), note)
    except OSError:
        return


def _files(resolved: ResolvedTarget) -> Iterable[str]:
    yield str(resolved.root / "versions.yaml")
    yield str(resolved.root / "images" / f"{resolved.name}.yaml")
    if resolved.lock_path.exists():
        yield str(resolved.lock_path)
    for folder in resolved.better_locks():
        yield str(folder if folder.exists() else folder.parent)


def _trees(plan: ImagePlan) -> Iterable[list[str]]:
    """Yield the files and folders of each local tree."""
    for action in plan.actions():
        if action.tree:
            yield [*(f"{action.root}/{name}" for name, _, _ in action.tree), *_folders(action.root)]


def _folders(root: str) -> Iterable[str]:
    """Yield every folder of a tree. Adding or removing a file changes its folder's mtime."""
    for folder, names, _ in os.walk(root):
        names[:] = [name for name in names if name not in ("__pycache__", ".git")]
        yield folder


def _engine() -> Iterable[str]:
    """Yield the files of the code and the GPU table that plan and judge, and the compressor: if they change, the
    same inputs may give another image.
    """
    for name in ("plan", "build", "build/kinds", "oci", "gpucode", "versions", "gpus", "gates", "gates/rules"):
        folder = f"{os.path.dirname(os.path.dirname(__file__))}/{name}"
        yield from (entry.path for entry in os.scandir(folder) if entry.name.endswith((".py", ".yaml")))
    spec = find_spec("zstandard")
    if spec and spec.origin:
        yield spec.origin
