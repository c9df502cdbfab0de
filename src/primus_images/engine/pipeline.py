"""The pipeline of a build, step by step: plan → fetch → build → compose → gates → index."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from graphlib import TopologicalSorter

from primus_images.engine.kinds import debs, files, wheels
from primus_images.engine.upkeep import remove_damage
from primus_images.engine.workshop import Kind, Workshop
from primus_images.errors import CheckFailed
from primus_images.gates.check import admit
from primus_images.gates.examined import examine_image
from primus_images.gates.rules import rules_hash
from primus_images.gates.rules.coherence import check_pins
from primus_images.oci.layer import check_overlap, read_paths
from primus_images.oci.store import CONFIG_TYPE, MANIFEST_TYPE, Store
from primus_images.plan.action import (
    Action,
    Built,
    ImagePlan,
    compose,
    finished,
    judged_by,
    ordered,
    tree_record,
)
from primus_images.plan.project import Workspace
from primus_images.programs import stop_all
from primus_images.progress import choose_progress
from primus_images.recipes.load import check
from primus_images.terminal import say
from primus_images.versions.lock import LockedFile, Request

KINDS: Mapping[str, Kind] = {
    "image": Kind(files.adopt),
    "debs": Kind(debs.make, debs.prepare),
    "kernels": Kind(debs.make_kernels, debs.prepare_kernels),
    "wheels": Kind(wheels.make, wheels.prepare),
    "files": Kind(files.make),
    "build": Kind(wheels.build, wheels.prepare),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a build: ``offline`` uses downloaded files only, ``rehash`` reads all files and
    layers again, ``engine`` runs build actions, ``quiet`` shows no progress, ``judge`` lets the
    gates judge the image. ``spent`` gets the seconds of each stage.
    """

    offline: bool = False
    rehash: bool = False
    engine: str = "auto"
    quiet: bool = False
    judge: bool = True
    spent: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count what happens inside as the stage ``name``."""
        begin = time.monotonic()
        yield
        self.spent[name] = time.monotonic() - begin


def build(plans: Sequence[ImagePlan], workspace: Workspace, options: Options) -> list[Built]:
    """Build the images of ``plans``.

    If the store has every image already and the gates have judged it by their present rules,
    nothing else is done.

    Raises InputError for a recipe that does not load, CheckFailed for a failed action or a rejected
    image, HostError for a failing source, disk or sandbox.
    """
    store = workspace.store
    if options.rehash:
        store.prepare()
        for sentence in remove_damage(store):
            say(f"! {sentence}")
    rules = rules_hash() if options.judge else ""
    complete = {}
    for plan in plans:
        image = finished(store, plan, rules)
        if image:
            complete[plan.key] = image
    if all(plan.key in complete for plan in plans):
        return [complete[plan.key] for plan in plans]
    store.prepare()
    for plan in plans:
        _check_recipes(store, plan)
        if options.judge:
            check_pins(plan.resolved)
    with choose_progress(options.quiet) as progress:
        workshop = Workshop(
            workspace=workspace, progress=progress, engine=options.engine, judge=options.judge
        )
        layers = [action for plan in plans for action in plan.layers]
        todo = ordered(layers, workshop.done)
        with options.stage("fetch"):
            _fetch_files(workshop, plans, todo, offline=options.offline)
        with options.stage("build"):
            ran = _run_actions(workshop, todo)
        with options.stage("check"):  # compose → gates → index
            return [complete.get(plan.key) or _image(workshop, plan, ran, rules) for plan in plans]


def _check_recipes(store: Store, plan: ImagePlan) -> None:
    """Load the recipes that enter a layer: a faulty one would break `primus list` in the image."""
    folder = plan.resolved.root / "recipes"
    for action in plan.layers:
        if action.root == str(folder) and store.layer(action.key) is None:
            check(folder)


def _image(workshop: Workshop, plan: ImagePlan, ran: Mapping[str, float], rules: str) -> Built:
    store = workshop.workspace.store
    image = compose(store, plan)
    if image is None:
        raise CheckFailed(
            f"a layer of {plan.ref} was removed from the store while it was in use",
            hint="build again",
        )
    # Most changes keep the paths of all layers, and the path lists of a whole image are long.
    apart = [[action.kind == "image", layer.paths] for action, layer in image.rows]
    if (store.record("targets", plan.state) or {}).get("apart") != apart:
        paths = [
            (action.name, action.kind == "image", read_paths(store, layer))
            for action, layer in image.rows
        ]
        check_overlap(paths)
    failed: tuple[str, ...] = ()
    if rules:
        failed = admit(examine_image(image, workshop.workspace, workshop.progress))
    store.put(image.config, CONFIG_TYPE)
    store.tag(plan.ref, store.put(image.manifest, MANIFEST_TYPE))
    record = {
        "digest": image.digest,
        "failed": list(failed),
        "inputs": tree_record(plan),
        "judged": judged_by(plan, rules),
        "apart": apart,
    }
    store.save("targets", plan.state, record)
    return Built(image=image, changed=True, failed=failed, ran=ran)


def _fetch_files(
    workshop: Workshop, plans: Sequence[ImagePlan], todo: Sequence[Action], *, offline: bool
) -> None:
    by_kind: dict[str, list[Action]] = {}
    inputs: dict[str, LockedFile] = {}
    for action in todo:
        by_kind.setdefault(action.kind, []).append(action)
        inputs |= {file.sha256: file for file in action.files}
    for kind, actions in by_kind.items():
        KINDS[kind].prepare(actions, workshop)
    cache = workshop.workspace.files
    absent = [file for file in inputs.values() if not cache.has(file.sha256, file.size)]
    if not absent:
        return
    # Seam "sources": the network libraries take a third of the start-up time of a build that
    # fetches nothing.
    from primus_images.versions.fetch import fetch

    requests: dict[LockedFile, Request] = {}
    for plan in plans:
        if plan.resolved.lock:
            requests |= dict.fromkeys(plan.resolved.lock.files, plan.resolved.request)
    missing = {file: requests[file] for file in absent}
    fetch(missing, cache, offline=offline, progress=workshop.progress)


def _run_actions(workshop: Workshop, actions: Sequence[Action]) -> dict[str, float]:
    """Run the actions, each after those that it needs, and return key → seconds.

    After the first failure, no further action starts; finished actions are kept.
    """
    # Hashing and compressing acquire the GIL a thousand times per gigabyte and compete with gates
    # that search text. With the default switch interval, each time takes up to 5 ms.
    sys.setswitchinterval(0.0005)
    todo = {action.key: action for action in actions}
    order = TopologicalSorter[str]()
    for action in actions:
        needed = {needed.key for needed in (*action.needs, *action.tools)}
        order.add(action.key, *(needed & todo.keys()))
    order.prepare()
    ran: dict[str, float] = {}
    running: dict[Future[float | None], str] = {}

    def size_of(key: str) -> int:
        return sum(file.size for file in todo[key].files)

    with ThreadPoolExecutor(max(2, os.cpu_count() or 2), thread_name_prefix="action") as pool:
        try:
            while order.is_active():
                # Start the largest action first, since it decides how long the build takes.
                for key in sorted(order.get_ready(), key=size_of, reverse=True):
                    action = todo[key]
                    running[pool.submit(workshop.run, action, KINDS[action.kind])] = key
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    key = running.pop(future)
                    seconds = future.result()
                    if seconds is not None:
                        ran[key] = seconds
                    order.done(key)
        except BaseException:
            for future in running:
                future.cancel()
            # Ctrl-C reaches only the main thread, while the pool waits for its workers. A worker
            # may be about to start another process.
            while wait(running, timeout=0.2).not_done:
                stop_all()
            raise
    return ran
