"""Plans → images in the store: fetch, run, assemble."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Protocol

from primus.display import choose_progress
from primus.engine import heap
from primus.engine.execute import Workshop
from primus.engine.image import Built, Composed, Options, Verdict, compose, current, judged_by, line_of, name_image
from primus.engine.kinds import load
from primus.engine.recipes import check_recipes
from primus.engine.rehash import find_damage
from primus.engine.space import require_space_for
from primus.errors import CheckFailed
from primus.oci.imported import stacked
from primus.oci.layer import read_paths
from primus.oci.overlap import check_overlap
from primus.oci.store import Layer, Store
from primus.plan.action import Action, ImagePlan, tree_record
from primus.plan.layers import plan_image
from primus.plan.locking import lock_target
from primus.sandbox.running import stop_all
from primus.versions.lock import LockedFile
from primus.versions.suites import suites_of

if TYPE_CHECKING:
    from primus.oci.tar import Watch
    from primus.plan.workspace import Workspace
    from primus.progress import Progress


class Gates(Protocol):
    """The checks that an image must pass before a name points to it. ``mark`` is a hash of their code."""

    mark: str

    def watch(self) -> Watch:
        """Return an observer that examines a layer while it is written."""

    def look(self, layer: Layer, watch: Watch | None) -> None:
        """Examine a layer that the build has just created. ``watch``, if given, has already seen its bytes."""

    def judge(self, image: Composed) -> Verdict:
        """Judge an image. Raises CheckFailed if it must not get its name."""

    def close(self) -> None:
        """Release all resources. Called when the build ends."""


def build_images(
    plans: Sequence[ImagePlan],
    workspace: Workspace,
    *,
    gates: Callable[[Workspace, Progress], Gates] | None,
    options: Options,
) -> list[Built]:
    """Build the images of ``plans``. Independent actions run in parallel, and each blob is built once.

    ``gates`` judge each image before it gets its name; None accepts all images.

    Raises InputError for a recipe that does not load, CheckFailed for a failed action or a rejected image,
    HostError for a failing source, disk or sandbox.
    """
    store = workspace.store
    store.prepare()
    if options.rehash:
        for fault in find_damage(store, (action for plan in plans for action in plan.actions())):
            print(f"! {fault}", file=sys.stderr)
    check_recipes(store, plans)
    with choose_progress(options.quiet) as progress, contextlib.ExitStack() as stack:
        judge = gates(workspace, progress) if gates else None
        if judge:
            stack.callback(judge.close)
        mark = judge.mark if judge else None
        before = {plan.key: image for plan in plans if (image := current(store, plan, mark)) is not None}
        workshop = Workshop(
            workspace=workspace,
            progress=progress,
            engine=options.engine,
            watch=judge.watch if judge else lambda: None,
            made=judge.look if judge else lambda *_: None,
        )
        todo = missing(plans, workshop.done)
        files = {f.sha256: f for action in todo for f in action.files}
        absent = [f for f in files.values() if not workspace.files.has(f.sha256, f.size)]
        if todo:
            heap.share()
            for kind in {action.kind: None for action in todo}:
                load(kind).prepare([action for action in todo if action.kind == kind], workshop)
            require_space_for(workspace, todo, () if options.offline else absent)
        if absent:
            plans = _fetch(workshop, plans, options)
            todo = missing(plans, workshop.done)
        done_here = run_actions(workshop, todo)
        return [before.get(plan.key) or assemble(store, plan, done_here, judge) for plan in plans]


def _fetch(workshop: Workshop, plans: Sequence[ImagePlan], options: Options) -> Sequence[ImagePlan]:
    """Fetch the missing files. Returns the plans; if a source no longer has a file, its target is locked and
    planned again.
    """
    # Seam "sources": the network libraries take a third of the start-up time of a build that fetches nothing.
    from primus.fetch.files import GoneError, fetch
    from primus.versions.sources import Sources

    def get(plans: Sequence[ImagePlan]) -> None:
        files = {f.sha256: f for action in missing(plans, workshop.done) for f in action.files}
        absent = [f for f in files.values() if not workshop.files.has(f.sha256, f.size)]
        bases = {n: b for plan in plans for n, b in plan.resolved.request.bases.items()}
        fetch(
            absent,
            workshop.files,
            suites={name: suites_of(base.suite, base.packages) for name, base in bases.items()},
            sources=Sources.of_project(plans[0].resolved.versions, bases),
            offline=options.offline,
            progress=workshop.progress,
        )

    try:
        get(plans)
    except GoneError as gone:
        if options.locked or options.offline:
            raise
        plans = _relock(workshop, plans, gone.files)
        get(plans)
    return plans


def _relock(workshop: Workshop, plans: Sequence[ImagePlan], gone: Sequence[LockedFile]) -> list[ImagePlan]:
    """Lock again the targets whose files no source has any more, and plan them again."""
    progress = workshop.progress
    progress.say(f"! no source has {', '.join(f.label for f in gone)} any more; locking again")
    result = []
    for plan in plans:
        resolved = plan.resolved
        if resolved.lock is not None and any(f in resolved.lock.files for f in gone):
            resolved = lock_target(resolved, progress, gone=gone)
        result.append(plan_image(resolved, workshop.workspace.stats))
    return result


def missing(plans: Sequence[ImagePlan], done: Callable[[Action], bool]) -> list[Action]:
    """Return the actions to run, each once. Actions that only finished actions depend on are skipped."""
    wanted: dict[str, Action] = {}
    for plan in plans:
        for action in reversed(plan.actions()):
            is_layer = any(action.key == layer.key for layer in plan.layers)
            needed = any(action in (*other.needs, *other.tools) for other in wanted.values())
            if action.key not in wanted and (is_layer or needed) and not done(action):
                wanted[action.key] = action
    return list(reversed(wanted.values()))


def run_actions(workshop: Workshop, actions: Sequence[Action]) -> set[str]:
    """Run the actions, independent ones in parallel, and return the keys of those that ran here.

    After the first failure, no further action starts; finished actions are kept.
    """
    # Hashing and compressing acquire the GIL a thousand times per gigabyte and compete with gates that search text.
    # With the default switch interval, each time takes up to 5 ms.
    sys.setswitchinterval(0.0005)
    waiting = {a.key: a for a in actions}
    done_here: set[str] = set()
    running: dict[Future[bool], str] = {}
    workers = max(2, os.cpu_count() or 2)
    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="action") as pool:
        try:
            while waiting or running:
                busy = set(running.values()) | set(waiting)
                ready = [a for a in waiting.values() if not any(n.key in busy for n in (*a.needs, *a.tools))]
                # Start the largest action first, since it decides how long the build takes.
                for action in sorted(ready, key=lambda a: -sum(f.size for f in a.files)):
                    del waiting[action.key]
                    running[pool.submit(workshop.run, action)] = action.key
                finished, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    key = running.pop(future)
                    if future.result():
                        done_here.add(key)
                # Free memory for the next action in the sandbox.
                heap.give_back()
        except BaseException:
            for future in running:
                future.cancel()
            # Ctrl-C reaches only the main thread, while the pool waits for its workers. A worker may be about to
            # start another process.
            while wait(running, timeout=0.2).not_done:
                stop_all()
            raise
    return done_here


def assemble(store: Store, plan: ImagePlan, built: set[str], gates: Gates | None) -> Built:
    """Check overlaps and run the gates, write config and manifest, then tag the image. All layers must be in the
    store.

    Raises CheckFailed if layers overlap or the gates reject the image; the tag then stays unchanged.
    """
    image = compose(store, plan)
    if image is None:
        raise CheckFailed(f"a layer of {plan.ref} was removed from the store while it was in use", hint="build again")
    pairs = list(zip(plan.layers, image.layers, strict=True))
    # Most changes keep the paths of all layers, and the path lists of a whole image are long.
    apart = [[a.kind == "image", layer.paths] for a, layer in pairs]
    if (store.record("targets", plan.state) or {}).get("apart") != apart:
        paths = [(a, read_paths(store, layer)) for a, layer in pairs]
        given = stacked(found for a, found in paths if a.kind == "image")
        check_overlap([("the base image", given), *((a.name, found) for a, found in paths if a.kind != "image")])
    verdict = gates.judge(image) if gates else Verdict()
    return name_image(
        store,
        image.config,
        image.manifest,
        target=plan.target,
        ref=plan.ref,
        state=plan.state,
        layers=[(layer.blob, line_of(a.name, layer, built=a.key in built)) for a, layer in pairs],
        verdict=verdict,
        about={
            "key": plan.key,
            "judged": judged_by(plan, gates.mark) if gates else None,
            "apart": apart,
            "inputs": tree_record(plan),
        },
    )
