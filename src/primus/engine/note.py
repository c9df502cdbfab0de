"""The note that a build writes so that the next build can answer from it; see :mod:`primus.engine.unchanged`."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primus.engine.unchanged import engine, marks_of, note_path
from primus.errors import HostError
from primus.files import write_sealed
from primus.oci.store import Store

if TYPE_CHECKING:
    from primus.engine.image import Built
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
        fixed = (_text(_files(resolved, trees)), _text(_engine()))
        groups: list[_Group] = [(None, text, marks_of(text, since, follow=True)) for text in fixed]
        if any("-" in marks.split(" ") for _, _, marks in groups):
            return
        groups += [
            _group(action.name, action.root, _include(plan, action), (name for name, _, _ in action.tree), since)
            for action in trees
        ]
        groups.append(_written(store.root, plan.state, built))
        if not _is_last(store, plan.state, plan.ref, built):
            return
        note = {
            "engine": engine(),
            # A folder of the path may become a link that leaves the project.
            "real": [(path, os.path.realpath(path)) for path in (str(resolved.root), *(one.root for one in trees))],
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
    except (OSError, HostError):
        return


def renew(note: Mapping[str, Any], built: Built, trees: Mapping[str, Iterable[str]], began_ns: int) -> None:
    """Write the note again for a build that replaced layers of local folders; ``trees`` are their files."""
    store, since = Store(Path(note["store"])), began_ns - _MARGIN_NS
    try:
        groups: list[_Group] = [
            _group(layer, note["local"][layer]["root"], note["local"][layer]["include"], trees[layer], since)
            if layer in trees
            else (layer, text, marks)
            for layer, text, marks in note["groups"][:-1]
        ]
        groups.append(_written(store.root, note["state"], built))
        if not _is_last(store, note["state"], note["ref"], built):
            return
        path = Path(note_path(note["root"], note["target"]))
        write_sealed(path, {**note, "groups": groups, "digest": built.digest})
    except (OSError, HostError):
        return


def _is_last(store: Store, state: str, ref: str, built: Built) -> bool:
    """Whether the files whose marks were just taken are of this build, and not of another one that ended since."""
    last, named = store.record("targets", state) or {}, store.images().get(ref, {})
    return (last.get("digest"), named.get("digest")) == (built.digest, built.digest)


def _local(plan: ImagePlan, trees: Sequence[Action], plain: Collection[str]) -> dict[str, dict[str, object]]:
    """Return what the actions of local folders with ``plain`` layers were made from besides the files, by the names of
    the layers. See :mod:`primus.gates.swap`.
    """
    return {
        action.name: {"root": action.root, "include": _include(plan, action), "spec": action.spec}
        for action in trees
        if action.kind == "files" and action.name in plain
    }


def _include(plan: ImagePlan, action: Action) -> Sequence[str]:
    """Return the children of a local folder to which its pin restricts it."""
    return plan.resolved.pins[action.name].include if action.kind == "files" else ()


def _group(layer: str, root: str, include: Iterable[str], names: Iterable[str], since: int) -> _Group:
    """Return the files and folders of a local folder, and their marks."""
    # A child may lie behind a link, which a walk does not follow.
    folders = (folder for top in (root, *(f"{root}/{name}" for name in include)) for folder in _folders(top))
    text = _text((*(f"{root}/{name}" for name in names), *folders))
    return layer, text, marks_of(text, since)


def _written(store: Path, state: str, built: Built) -> _Group:
    """Return the files that a build writes, and their marks."""
    digests = [built.digest, built.content, *(line.digest for line in built.layers)]
    blobs = (f"{store}/blobs/sha256/{digest.removeprefix('sha256:')}" for digest in digests)
    text = _text((*blobs, f"{store}/index.json", f"{store}/targets/{state}.json"))
    return None, text, marks_of(text, follow=True)


def _text(paths: Iterable[str]) -> str:
    return "\n".join(paths)


def _files(resolved: ResolvedTarget, trees: Sequence[Action]) -> Iterator[str]:
    root = resolved.root
    yield str(root / "versions.yaml")
    yield str(root / "images" / f"{resolved.name}.yaml")
    # Pins name targets, and a target names recipes. If one of those appears or vanishes, its folder changes.
    yield str(root / "images")
    recipes = root / "recipes"
    if resolved.target.recipes and not any(action.root == str(recipes) for action in trees):
        yield str(_nearest(recipes))
    for lock in resolved.locks():
        yield str(_nearest(lock))


def _nearest(path: Path) -> Path:
    """Return the path, or the nearest folder above it in which it may appear."""
    return next(one for one in (path, *path.parents) if one.exists())


def _folders(top: str) -> Iterator[str]:
    """Yield every folder of a tree. Adding or removing a file changes its folder's mtime."""
    for folder, names, _ in os.walk(top):
        names[:] = [name for name in names if name not in ("__pycache__", ".git")]
        # Its own marks, not those of a link to it.
        yield f"{folder}/."


def _engine() -> Iterator[str]:
    """Yield the files of the code and the GPU table that plan and judge, and the compressor: if they change, the
    same inputs may give another image.
    """
    for name in (".", "plan", "engine", "engine/kinds", "oci", "gpucode", "versions", "gpus", "gates", "gates/rules"):
        folder = f"{os.path.dirname(os.path.dirname(__file__))}/{name}"
        yield from (entry.path for entry in os.scandir(folder) if entry.name.endswith((".py", ".yaml")))
    spec = find_spec("zstandard")
    if spec and spec.origin:
        yield spec.origin
