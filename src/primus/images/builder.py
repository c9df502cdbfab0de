"""From target names to images in the store: lock, plan, fetch, run, assemble."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from primus.errors import InputError
from primus.images.action import ImagePlan
from primus.images.build import missing
from primus.images.plan import plan_image
from primus.versions.lock import Drift, LockedFile, drift
from primus.versions.suites import suites_of

if TYPE_CHECKING:
    from primus.images.build import Built, Gates
    from primus.images.execute import Workshop
    from primus.images.project import Project
    from primus.progress import Progress

__all__ = ["build_images", "plan_images"]


def plan_images(
    project: Project, names: Sequence[str], *, locked: bool = False, offline: bool = False, quiet: bool = False
) -> list[ImagePlan]:
    """The plans of the targets, each over a lock that answers its pins.

    A stale or missing lock is made again, said aloud, unless ``locked`` (CI, releases) or ``offline`` forbids it.
    """
    return [_plan(project, name, locked=locked, offline=offline, quiet=quiet) for name in names]


def _plan(project: Project, name: str, *, locked: bool, offline: bool, quiet: bool) -> ImagePlan:
    request = project.request(name)
    if not request.bases and not request.wheels and not request.sdists and not request.gits:
        return plan_image(project, name, None)
    lock = project.lock(name)
    stale = drift(lock, request) if lock else ()
    if lock is None or stale:
        what = "; ".join(map(str, stale[:5])) + (f"; and {len(stale) - 5} more" if len(stale) > 5 else "")
        sentence = f"the lock of {name} is stale: {what}" if lock else f"{name} has no lock yet"
        if locked or offline:
            raise InputError(sentence, where=_place(project, stale), hint=f"primus lock {name}, and commit the result")
        from primus.images.display import choose_progress
        from primus.sandbox.tools import with_packages
        from primus.versions.relock import resolve

        print(f"! {sentence}; locking it again", file=sys.stderr)
        with choose_progress(quiet) as progress:
            lock = with_packages(partial(resolve, request, previous=lock, progress=progress), say=progress.say)
        project.write_lock(name, lock)
    return plan_image(project, name, lock)


def _place(project: Project, stale: Sequence[Drift]) -> str | None:
    """The line of versions.yaml of the first pin that drifted and still stands there."""
    for item in stale:
        kind, _, rest = item.pin.partition(" ")
        if kind == "base" and rest.split(" ")[0] in project.versions.bases:
            return project.base_place(rest.split(" ")[0])
        for component, entry in project.versions.components.items():
            for pin in entry.pins:
                if pin.named(kind) == rest and pin.version == (item.wanted or "").partition(" ")[0]:
                    return project.pin_place(component, pin)
    return None


def build_images(
    project: Project,
    plans: Sequence[ImagePlan],
    *,
    gates: Callable[[Project, Progress], Gates] | None,
    locked: bool = False,
    offline: bool = False,
    rehash: bool = False,
    engine: str = "auto",
    quiet: bool = False,
) -> list[Built]:
    """Make every image of ``plans``; independent actions side by side, each blob once. ``gates`` judge each image
    before it gets its name; None lets any pass.

    Raises CheckFailed for a failed action or a refused image, HostError for a source, disk or sandbox that fails.
    """
    from primus.images.build import assemble, current, run_actions
    from primus.images.display import choose_progress
    from primus.images.execute import Workshop
    from primus.images.filecache import FileCache

    store = project.store
    store.prepare()
    if rehash:
        _drop_damaged(project, plans)
    with choose_progress(quiet) as progress, contextlib.ExitStack() as stack:
        judge = gates(project, progress) if gates else None
        if judge:
            stack.callback(judge.close)
        mark = judge.mark if judge else None
        before = {plan.key: image for plan in plans if (image := current(store, plan, mark)) is not None}
        workshop = Workshop(
            project=project,
            files=FileCache(project.work / "files"),
            progress=progress,
            engine=engine,
            watch=judge.watch if judge else lambda: None,
            made=judge.look if judge else lambda *_: None,
        )
        todo = missing(plans, workshop.done)
        if todo:
            from primus.images import heap

            heap.share()
        files = {f.sha256: f for action in todo for f in action.files}
        absent = [f for f in files.values() if not workshop.files.has(f.sha256, f.size)]
        if todo:
            from primus.images.preflight import preflight

            preflight(workshop, todo, () if offline else absent)
        if absent:
            plans = _fetch(project, workshop, plans, may_relock=not (locked or offline), offline=offline)
            todo = missing(plans, workshop.done)
        done_here = run_actions(workshop, todo)
        return [before.get(plan.key) or assemble(project, plan, done_here, judge) for plan in plans]


def _fetch(
    project: Project, workshop: Workshop, plans: Sequence[ImagePlan], *, may_relock: bool, offline: bool
) -> Sequence[ImagePlan]:
    """Fetch what the plans still lack; returns the plans, new ones where a file was gone and had to be locked again."""
    from primus.images.fetch import GoneError, fetch
    from primus.versions.sources import Sources

    def get(plans: Sequence[ImagePlan]) -> None:
        files = {f.sha256: f for action in missing(plans, workshop.done) for f in action.files}
        absent = [f for f in files.values() if not workshop.files.has(f.sha256, f.size)]
        bases = {n: b for plan in plans for n, b in project.request(plan.target).bases.items()}
        suites = {name: suites_of(base.suite, base.packages) for name, base in bases.items()}
        fetch(
            absent,
            workshop.files,
            suites=suites,
            sources=Sources.of_project(project.versions, bases),
            offline=offline,
            progress=workshop.progress,
        )

    try:
        get(plans)
    except GoneError as gone:
        if not may_relock:
            raise
        plans = _relock(project, plans, gone.files, workshop.progress)
        get(plans)
    return plans


def _relock(
    project: Project, plans: Sequence[ImagePlan], gone: Sequence[LockedFile], progress: Progress
) -> list[ImagePlan]:
    """Resolve again what no source has any more, and plan anew."""
    from primus.sandbox.tools import with_packages
    from primus.versions.relock import resolve

    progress.say(f"! no longer to be had: {', '.join(f.label for f in gone)}; locking again what holds them")
    result = []
    for plan in plans:
        lock = project.lock(plan.target)
        if lock is not None and any(f in lock.files for f in gone):
            request = project.request(plan.target)
            call = partial(resolve, request, previous=lock, gone=gone, progress=progress)
            lock = with_packages(call, say=progress.say)
            project.write_lock(plan.target, lock)
        result.append(plan_image(project, plan.target, lock))
    return result


def _drop_damaged(project: Project, plans: Sequence[ImagePlan]) -> None:
    """Hash every blob that the plans would reuse; take damaged ones out of the store, said aloud."""
    store = project.store
    for action in {a.key: a for plan in plans for a in plan.layers}.values():
        layer = store.layer(action.key)
        for digest in (layer.blob.digest, layer.paths) if layer is not None else ():
            if fault := store.check(digest):
                print(f"! {action.name}: {fault}; building it again", file=sys.stderr)
                store.discard(digest)
