"""The pipeline of a build, step by step: lock → plan → fetch → build → compose → gates → index."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from primus.engine.image import Built, Composed, compose, finished, judged_by, name_image
from primus.engine.kinds import debs, files, kernels, wheels
from primus.engine.upkeep import remove_damage
from primus.engine.workshop import Kind, Workshop, require_space_for
from primus.errors import CheckFailed
from primus.oci.layer import check_overlap, read_paths
from primus.plan.action import Action, ImagePlan
from primus.plan.layers import plan_images
from primus.progress import choose_progress
from primus.recipes.catalogue import check
from primus.sandbox.processes import stop_all
from primus.versions.lock import suites_of

if TYPE_CHECKING:
    from primus.oci.store import Layer, Store
    from primus.plan.project import Choice
    from primus.plan.resolve import ResolvedTarget
    from primus.plan.workspace import Workspace
    from primus.progress import Progress


KINDS: Mapping[str, Kind] = {
    "image": Kind(files.adopt),
    "debs": Kind(debs.make, debs.prepare),
    "kernels": Kind(kernels.make, kernels.prepare),
    "wheels": Kind(wheels.make, wheels.prepare),
    "files": Kind(files.make),
    "build": Kind(wheels.build, wheels.prepare),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a build: ``offline`` uses downloaded files only, ``rehash`` reads all files and layers again,
    ``engine`` runs build actions, ``quiet`` shows no progress. ``spent`` gets the seconds of each stage.
    """

    offline: bool = False
    rehash: bool = False
    engine: str = "auto"
    quiet: bool = False
    spent: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count what happens inside as the stage ``name``."""
        begin = time.monotonic()
        yield
        self.spent[name] = time.monotonic() - begin


class Gates:
    """The checks that an image must pass before a name points to it. This one accepts every image."""

    def admit(self, plans: Sequence[ImagePlan]) -> None:
        """Raise CheckFailed for a plan whose image cannot pass, before anything is fetched."""

    def look(self, layer: Layer) -> None:
        """Examine a layer that the build has just created."""

    def judge(self, image: Composed) -> tuple[str, ...]:
        """Return one sentence for each gate that the image fails. Raises CheckFailed if it must not get its name."""
        return ()

    def close(self) -> None:
        """Release all resources. Called when the build ends."""


def build(
    targets: Sequence[ResolvedTarget],
    workspace: Workspace,
    options: Options,
    *,
    gates: Callable[[Workspace, Progress], Gates] = lambda *_: Gates(),
    rules: str = "",
) -> list[tuple[ImagePlan, Built]]:
    """Build the images of ``targets``, and return each with its plan.

    ``gates`` judge each image before it gets its name, and ``rules`` is a hash of their code. If the store has every
    image already and gates with these rules have judged it, nothing else is done.

    Raises InputError for a stale lock and for a recipe that does not load, CheckFailed for a failed action or a
    rejected image, HostError for a failing source, disk or sandbox.
    """
    store = workspace.store
    for target in targets:
        say_channel(target.name, target.choice, target.target.channels)
    plans = plan_images(targets, workspace.stats)  # lock → plan
    if options.rehash:
        store.prepare()
        for sentence in remove_damage(store, [action for plan in plans for action in plan.actions()]):
            print(f"! {sentence}", file=sys.stderr)
    complete = {plan.key: image for plan in plans if (image := finished(store, plan, rules))}
    if all(plan.key in complete for plan in plans):
        return [(plan, complete[plan.key]) for plan in plans]
    store.prepare()
    check_recipes(store, plans)
    with choose_progress(options.quiet) as progress, contextlib.closing(gates(workspace, progress)) as judges:
        judges.admit(plans)
        workshop = Workshop(workspace=workspace, progress=progress, engine=options.engine, look=judges.look)
        with options.stage("fetch"):
            fetch_files(workshop, plans, offline=options.offline)
        with options.stage("build"):
            built = run_actions(workshop, missing(plans, workshop.done))
        with options.stage("check"):  # compose → gates → index
            return [(plan, complete.get(plan.key) or _image(store, plan, built, judges, rules)) for plan in plans]


def _image(store: Store, plan: ImagePlan, built: Collection[str], gates: Gates, rules: str) -> Built:
    image = compose(store, plan)
    if image is None:
        raise CheckFailed(f"a layer of {plan.ref} was removed from the store while it was in use", hint="build again")
    layers = list(zip(plan.layers, image.layers, strict=True))
    # Most changes keep the paths of all layers, and the path lists of a whole image are long.
    apart = [[action.kind == "image", layer.paths] for action, layer in layers]
    if (store.record("targets", plan.state) or {}).get("apart") != apart:
        check_overlap([(action.name, action.kind == "image", read_paths(store, layer)) for action, layer in layers])
    failed = gates.judge(image)
    about = {"judged": judged_by(plan, rules), "apart": apart}
    return name_image(store, image, failed=failed, built=built, about=about)


def say_channel(name: str, choice: Choice, channels: Sequence[str]) -> None:
    """Print which of its ``channels`` builds the target ``name``, and why, if there are several."""
    if len(channels) > 1:
        print(f"{name}: channel {choice.channel}, {choice.reason}", file=sys.stderr)


def check_recipes(store: Store, plans: Sequence[ImagePlan]) -> None:
    """Raise InputError, with the place, for a recipe that is about to enter an image and does not load.

    One would break ``primus list`` in the image.
    """
    for plan in plans:
        folder = plan.resolved.root / "recipes"
        for action in plan.layers:
            if action.root == str(folder) and store.layer(action.key) is None:
                check(folder)


def fetch_files(workshop: Workshop, plans: Sequence[ImagePlan], *, offline: bool) -> None:
    """Check that this machine can run the missing actions, and fetch the files that they read."""
    todo = missing(plans, workshop.done)
    for kind in {action.kind: None for action in todo}:
        KINDS[kind].prepare([action for action in todo if action.kind == kind], workshop)
    inputs = {file.sha256: file for action in todo for file in action.files}
    absent = [file for file in inputs.values() if not workshop.files.has(file.sha256, file.size)]
    require_space_for(workshop.workspace, todo, () if offline else absent)
    if not absent:
        return
    # Seam "sources": the network libraries take a third of the start-up time of a build that fetches nothing.
    from primus.versions.fetch import Sources, fetch

    bases = {name: base for plan in plans for name, base in plan.resolved.request.bases.items()}
    fetch(
        absent,
        workshop.files,
        suites={name: suites_of(base.suite, base.packages) for name, base in bases.items()},
        pythons={base.python for base in bases.values()},
        sources=Sources(
            indexes={name: index.url for name, index in plans[0].resolved.versions.indexes.items()},
            images={name: base.image for name, base in bases.items() if base.image},
            repositories={git.commit: git.url for plan in plans for git in plan.resolved.request.gits.values()},
        ),
        offline=offline,
        progress=workshop.progress,
    )


def missing(plans: Sequence[ImagePlan], done: Callable[[Action], bool]) -> list[Action]:
    """Return the actions to run, each once. Actions that only finished actions depend on are skipped."""
    todo: dict[str, Action] = {}
    for plan in plans:
        for action in reversed(plan.actions()):
            is_layer = any(action.key == layer.key for layer in plan.layers)
            needed = any(action in (*other.needs, *other.tools) for other in todo.values())
            if action.key not in todo and (is_layer or needed) and not done(action):
                todo[action.key] = action
    return list(reversed(todo.values()))


def run_actions(workshop: Workshop, actions: Sequence[Action]) -> set[str]:
    """Run the actions, independent ones in parallel, and return the keys of those that ran here.

    After the first failure, no further action starts; finished actions are kept.
    """
    # Hashing and compressing acquire the GIL a thousand times per gigabyte and compete with gates that search text.
    # With the default switch interval, each time takes up to 5 ms.
    sys.setswitchinterval(0.0005)
    waiting = {action.key: action for action in actions}
    finished_keys: set[str] = set()
    running: dict[Future[bool], str] = {}
    with ThreadPoolExecutor(max(2, os.cpu_count() or 2), thread_name_prefix="action") as pool:
        try:
            while waiting or running:
                busy = set(running.values()) | set(waiting)
                ready = [a for a in waiting.values() if not any(n.key in busy for n in (*a.needs, *a.tools))]
                # Start the largest action first, since it decides how long the build takes.
                for action in sorted(ready, key=lambda a: -sum(file.size for file in a.files)):
                    del waiting[action.key]
                    running[pool.submit(workshop.run, action, KINDS[action.kind])] = action.key
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    key = running.pop(future)
                    if future.result():
                        finished_keys.add(key)
        except BaseException:
            for future in running:
                future.cancel()
            # Ctrl-C reaches only the main thread, while the pool waits for its workers. A worker may be about to
            # start another process.
            while wait(running, timeout=0.2).not_done:
                stop_all()
            raise
    return finished_keys
