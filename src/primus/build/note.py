"""The note that a build writes so that the next build can answer from it; see :mod:`primus.build.unchanged`."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primus.build.unchanged import marks_of, note_path
from primus.files import write_sealed

if TYPE_CHECKING:
    from primus.build.image import Built
    from primus.plan.action import Action, ImagePlan
    from primus.plan.resolve import ResolvedTarget
    from primus.plan.workspace import Workspace

# The layer of a local folder (None for what is not a local folder), paths, and their marks.
_Group = tuple[str | None, str, str]

_MARGIN_NS = 50_000_000


def remember(workspace: Workspace, plan: ImagePlan, built: Built, name: str, began_ns: int) -> None:
    """Write the note for a build whose planning began at ``began_ns`` (wall clock).

    ``name`` is the image's name in the answer. Writes no note if pins, target, lock or code were modified since the
    build began or shortly before, or if the command named the channel, because the next one may not. Files of local
    folders that were modified since then count as changed next time.
    """
    resolved, store = plan.resolved, workspace.store
    if resolved.choice.named:
        return
    trees = [action for action in plan.actions() if action.tree]
    since = began_ns - _MARGIN_NS
    try:
        fixed = (_text(_files(resolved)), _text(_engine()))
        groups: list[_Group] = [(None, text, marks_of(text, since)) for text in fixed]
        if any("-" in marks.split(" ") for _, _, marks in groups):
            return
        groups += [_group(action.name, action.root, (name for name, _, _ in action.tree), since) for action in trees]
        groups.append(_written(store.root, plan.state, built))
        note = {
            "store": str(store.root),
            "groups": groups,
            "name": name,
            "digest": built.digest,
            "target": plan.target,
            "ref": plan.ref,
            "state": plan.state,
            "root": str(resolved.root),
            "choice": asdict(resolved.choice),
            "channels": len(resolved.target.channels),
            "budget": resolved.budget_gb and round(resolved.budget_gb * 1e9),
            "local": _local(plan, trees, (store.record("targets", plan.state) or {}).get("plain", ())),
        }
        write_sealed(Path(note_path(str(resolved.root), plan.target)), note)
    except OSError:
        return


def renew(note: Mapping[str, Any], built: Built, trees: Mapping[str, Iterable[str]], began_ns: int) -> None:
    """Write the note again for a build that replaced layers of local folders; ``trees`` are their files."""
    store, since = Path(note["store"]), began_ns - _MARGIN_NS
    try:
        groups: list[_Group] = [
            _group(layer, note["local"][layer]["root"], trees[layer], since) if layer in trees else (layer, text, marks)
            for layer, text, marks in note["groups"][:-1]
        ]
        groups.append(_written(store, note["state"], built))
        path = Path(note_path(note["root"], note["target"]))
        write_sealed(path, {**note, "groups": groups, "digest": built.digest})
    except OSError:
        return


def _local(plan: ImagePlan, trees: Sequence[Action], plain: Collection[str]) -> dict[str, dict[str, object]]:
    """Return what the actions of local folders with ``plain`` layers were made from besides the files, by the names of
    the layers. See :mod:`primus.gates.swap`.

    A target with compiled kernels has none: whether the kernels fit, only the whole image can tell.
    """
    if plan.resolved.target.turbo:
        return {}
    return {
        action.name: {"root": action.root, "include": plan.resolved.pins[action.name].include, "spec": action.spec}
        for action in trees
        if action.kind == "files" and action.name in plain
    }


def _group(layer: str, root: str, names: Iterable[str], since: int) -> _Group:
    """Return the files and folders of a local folder, and their marks."""
    text = _text((*(f"{root}/{name}" for name in names), *_folders(root)))
    return layer, text, marks_of(text, since)


def _written(store: Path, state: str, built: Built) -> _Group:
    """Return the files that a build writes, and their marks."""
    digests = [built.digest, built.content, *(line.digest for line in built.layers)]
    blobs = (f"{store}/blobs/sha256/{digest.removeprefix('sha256:')}" for digest in digests)
    text = _text((*blobs, f"{store}/index.json", f"{store}/targets/{state}.json"))
    return None, text, marks_of(text)


def _text(paths: Iterable[str]) -> str:
    return "\n".join(paths)


def _files(resolved: ResolvedTarget) -> Iterator[str]:
    yield str(resolved.root / "versions.yaml")
    yield str(resolved.root / "images" / f"{resolved.name}.yaml")
    if resolved.lock_path.exists():
        yield str(resolved.lock_path)
    for folder in resolved.better_locks():
        yield str(folder if folder.exists() else folder.parent)


def _folders(root: str) -> Iterator[str]:
    """Yield every folder of a tree. Adding or removing a file changes its folder's mtime."""
    for folder, names, _ in os.walk(root):
        names[:] = [name for name in names if name not in ("__pycache__", ".git")]
        yield folder


def _engine() -> Iterator[str]:
    """Yield the files of the code and the GPU table that plan and judge, and the compressor: if they change, the
    same inputs may give another image.
    """
    for name in ("plan", "build", "build/kinds", "oci", "gpucode", "versions", "gpus", "gates", "gates/rules"):
        folder = f"{os.path.dirname(os.path.dirname(__file__))}/{name}"
        yield from (entry.path for entry in os.scandir(folder) if entry.name.endswith((".py", ".yaml")))
    spec = find_spec("zstandard")
    if spec and spec.origin:
        yield spec.origin
