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
from primus_images.oci.store import CONFIG_TYPE, MANIFEST_TYPE
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
            print(f"! {sentence}", file=sys.stderr)
    rules = ""
    if options.judge:
        rules = rules_hash()
    complete = {plan.key: image for plan in plans if (image := finished(store, plan, rules))}
    if all(plan.key in complete for plan in plans):
        return [complete[plan.key] for plan in plans]
    store.prepare()
    for plan in plans:
        folder = plan.resolved.root / "recipes"
        if any(
            action.root == str(folder) and store.layer(action.key) is None for action in plan.layers
        ):
            check(folder)  # one that does not load would break `primus list` in the image
        if options.judge:
            check_pins(plan.resolved)
    layers = [action for plan in plans for action in plan.layers]
    with choose_progress(options.quiet) as progress:
        workshop = Workshop(
            workspace=workspace, progress=progress, engine=options.engine, judge=options.judge
        )
        with options.stage("fetch"):
            _fetch_files(workshop, plans, ordered(layers, workshop.done), offline=options.offline)
        with options.stage("build"):
            ran = _run_actions(workshop, ordered(layers, workshop.done))
        with options.stage("check"):  # compose → gates → index
            return [complete.get(plan.key) or _image(workshop, plan, ran, rules) for plan in plans]


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
        check_overlap(
            [
                (action.name, action.kind == "image", read_paths(store, layer))
                for action, layer in image.rows
            ]
        )
    failed = ()
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
    for kind in {action.kind: None for action in todo}:
        KINDS[kind].prepare([action for action in todo if action.kind == kind], workshop)
    inputs = {file.sha256: file for action in todo for file in action.files}
    absent = [
        file for file in inputs.values() if not workshop.workspace.files.has(file.sha256, file.size)
    ]
    if not absent:
        return
    # Seam "sources": the network libraries take a third of the start-up time of a build that
    # fetches nothing.
    from primus_images.versions.fetch import fetch

    locks = [(plan.resolved.lock, plan.resolved.request) for plan in plans]
    requests = {file: request for lock, request in locks if lock for file in lock.files}
    missing = {file: requests[file] for file in absent}
    fetch(missing, workshop.workspace.files, offline=offline, progress=workshop.progress)


def _run_actions(workshop: Workshop, actions: Sequence[Action]) -> dict[str, float]:
    # After the first failure, no further action starts; finished actions are kept. Hashing and
    # compressing acquire the GIL a thousand times per gigabyte and compete with gates that search
    # text. With the default switch interval, each time takes up to 5 ms.
    sys.setswitchinterval(0.0005)
    todo = {action.key: action for action in actions}
    order = TopologicalSorter(
        {a.key: todo.keys() & {n.key for n in (*a.needs, *a.tools)} for a in actions}
    )
    order.prepare()
    ran: dict[str, float] = {}
    running: dict[Future[float | None], str] = {}
    with ThreadPoolExecutor(max(2, os.cpu_count() or 2), thread_name_prefix="action") as pool:
        try:
            while order.is_active():
                # Start the largest action first, since it decides how long the build takes.
                for key in sorted(
                    order.get_ready(), key=lambda key: -sum(file.size for file in todo[key].files)
                ):
                    running[pool.submit(workshop.run, todo[key], KINDS[todo[key].kind])] = key
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
