"""Project files → all the data that later steps need to plan, build and publish one image."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from primus_images.errors import InputError, PrimusError
from primus_images.files import write_file
from primus_images.gpus.table import Generation, environment, generation
from primus_images.plan.channel import Choice, choose
from primus_images.plan.project import Project
from primus_images.plan.request import extra_root, extras_of, inside_of, pins_of, request_of
from primus_images.plan.target import Target
from primus_images.system.issues import Issue, issues
from primus_images.versions.components import Pin, Versions
from primus_images.versions.lock import (
    Drift,
    Lock,
    LockedFile,
    Request,
    Shared,
    drift,
    dumps,
    name_of,
    normalised,
)
from primus_images.yamlfile import Document

if TYPE_CHECKING:
    from primus_images.progress import Progress


# Suites of Debian and Ubuntu, as package URLs and /etc/os-release name their distributions.
_SYSTEMS = {
    "bookworm": "debian-12",
    "trixie": "debian-13",
    "jammy": "ubuntu-22.04",
    "noble": "ubuntu-24.04",
}


@dataclass(frozen=True, kw_only=True)
class ResolvedTarget:
    """One target of a project, read and checked. Later steps take this and nothing wider.

    ``pins`` are by component, in the target's order. ``inside`` are the pins of components that are
    part of other components' files. ``lock`` is the committed lock; it may be stale (see
    :attr:`stale`). ``environment`` has the variables of every container, ``extras`` the optional
    layers. ``root`` is the project's folder.
    """

    name: str
    root: Path
    versions: Versions
    target: Target
    choice: Choice
    pins: Mapping[str, Pin]
    inside: Mapping[str, Pin]
    extras: tuple[str, ...] = ()
    gpu: Generation | None
    environment: Mapping[str, str]
    request: Request
    lock: Lock | None
    lock_path: Path
    versions_document: Document
    target_document: Document

    @property
    def ref(self) -> str:
        """The image's name in the store: release and target, marked if its channel is a preview."""
        return f"{self.versions.release}-{self.name}{self.choice.suffix}"

    @property
    def arch(self) -> str | None:
        """The GPU architecture that the target's libraries must contain code for."""
        if self.gpu:
            return self.gpu.arch
        return None

    @property
    def budget_gb(self) -> float | None:
        """The largest compressed size of the image, in GB."""
        return self.target.budgets_gb.get(self.choice.channel, self.target.budget_gb)

    @property
    def lock_name(self) -> str:
        """The lock's path in the project."""
        return self.lock_path.relative_to(self.root).as_posix()

    @property
    def lock_command(self) -> str:
        """The command that locks the target again, for the chosen channel."""
        command = f"primus lock {self.name}"
        if len(self.target.channels) > 1:
            command += f" --channel {self.choice.channel}"
        return command

    @property
    def system(self) -> str:
        """The distribution of the image, as package URLs name it; empty if it is unknown."""
        base = self.versions.bases.get(self.choice.base or "")
        return _SYSTEMS.get(base.suite if base else "", "")

    @property
    def roots(self) -> tuple[str, ...]:
        """The names in the lock of the base and its extras, whose packages are in the image."""
        base = self.choice.base
        if base:
            return (base, *(extra_root(base, extra) for extra in self.extras))
        return ()

    @property
    def debs(self) -> tuple[LockedFile, ...]:
        """The Debian packages of the image; none without a lock."""
        debs: list[LockedFile] = []
        if self.lock:
            for root in self.roots:
                debs += self.lock.of("deb", root)
        return tuple(debs)

    @property
    def stale(self) -> tuple[Drift, ...]:
        """The pins that the lock does not match; none if there is no lock."""
        if self.lock:
            return drift(self.lock, self.request)
        return ()

    @property
    def all_pins(self) -> dict[str, Pin]:
        """The pins of the image's components, and of what is part of their files."""
        return {**self.pins, **self.inside}

    @cached_property
    def known_issues(self) -> list[Issue]:
        """What is known to be wrong with the pinned and locked versions."""
        versions: dict[str, str | None] = {}
        for file in self.lock.files if self.lock else ():
            if file.base in (None, *self.roots):
                versions[file.name] = file.version
        for name, pin in self.all_pins.items():
            versions[name] = pin.version
        return issues(versions, [self.name])

    @property
    def trained_with(self) -> dict[str, str]:
        """Component → the package or library that a training run loads."""
        loaded = {}
        for name, pin in self.all_pins.items():
            if not pin.path and not self.versions.components[name].tool:
                loaded[name] = pin.loaded_as(name)
        return loaded

    def place(self, *key: str | int) -> str:
        """Return ``images/<target>.yaml:line:col`` of a key."""
        return self.target_document.where(key)

    def pin_place(self, component: str, pin: Pin) -> str:
        """Return ``versions.yaml:line:col`` of a pin."""
        return self.versions_document.where(("components", component, "pins", pin.place))

    def base_place(self, base: str, *key: str) -> str:
        """Return ``versions.yaml:line:col`` of a base, or of one of its keys."""
        return self.versions_document.where(("bases", base, *key))

    def drift_place(self, pin: str) -> tuple[str, str]:
        """Return the component of a pin of the lock, and its place; only the file if it is gone.

        The component is empty for a pin of a base or build.
        """
        kind, _, words = pin.partition(" ")
        if kind == "base":
            base, *extra, key = words.split(" ")
            if base in self.versions.bases:
                keys = ("extras", *extra) if extra and extra[0] in self.extras else (key,)
                return "", self.base_place(base, *keys)
        component, place = self.pin_of(words)
        if kind == "build":
            component = ""
        return component, place or "versions.yaml"

    def pin_of(self, about: str) -> tuple[str, str]:
        """Return the component that pins the package, image, repository or file ``about``, and its
        place.

        Both are empty if no pin names it, as for a dependency of a pinned package.
        """
        word = about.partition(" ")[0]
        # A file name begins with the package's name, in which hyphens may have become underscores.
        stem = re.split(r"-(?=[0-9])", word, maxsplit=1)[0]
        names = {normalised(word), normalised(stem)}
        for component, pin in self.pins.items():
            if names & _names(pin):
                return component, self.pin_place(component, pin)
        for component, pin in self.pins.items():
            if pin.build and names & {_package(wheel) for wheel in pin.build.wheels}:
                return f"build of {component}", self.pin_place(component, pin)
        base = self.versions.bases.get(self.choice.base or "")
        if base and base.image and word.partition("@")[0] == base.image.partition("@")[0]:
            return f"base {self.choice.base}", self.base_place(str(self.choice.base), "image")
        return "", ""


def _names(pin: Pin) -> set[str]:
    repository = (pin.git or "").rstrip("/").rpartition("/")[2].removesuffix(".git")
    names = (pin.wheel, pin.sdist, pin.package, pin.deb, repository)
    return {normalised(name) for name in names if name}


def _package(wheel: str) -> str:
    return normalised(wheel.partition("==")[0])


def resolve(project: Project, name: str) -> ResolvedTarget:
    """Resolve the target ``name`` of the project.

    Raises InputError, with its place, for an unknown target, component, base or GPU, for a
    component without a pin for this target, and for a lock that cannot be read.
    """
    target, document = project.target(name)
    choice = choose(
        name, target, project.channel, lambda channel: project.lock_path(name, channel).is_file()
    )
    versions = project.versions
    lock_path = project.lock_path(name, choice.channel)

    def place(*key: str | int) -> str:
        return document.where(key)

    gpu = _gpu(target, place("gpu"))
    variables = {}
    for baked in environment(gpu.name) if gpu else ():
        variables[baked.name] = baked.value or ""
    for variable in target.environment:
        variables[variable.name] = variable.value
    places = {name: place("components", index) for index, name in enumerate(target.components)}
    for index, component in enumerate(target.more.get(choice.channel, ())):
        places[component] = place("more", choice.channel, index)
    pins = pins_of(versions, name, choice.sources, gpu.arch if gpu else None, places)
    base = versions.bases.get(choice.base or "")
    packages = {name_of(package) for package in base.packages} if base else set()
    extras = extras_of(versions, target, choice, place)
    return ResolvedTarget(
        name=name,
        root=project.root,
        versions=versions,
        target=target,
        choice=choice,
        pins=pins,
        inside=inside_of(versions, name, choice.sources, pins, packages),
        extras=extras,
        gpu=gpu,
        environment=variables,
        request=request_of(versions, name, choice, pins, extras),
        lock=project.lock(lock_path),
        lock_path=lock_path,
        versions_document=project.versions_document,
        target_document=document,
    )


def _gpu(target: Target, place: str) -> Generation | None:
    if target.gpu is None:
        return None
    try:
        return generation(target.gpu)
    except InputError as error:
        error.where = error.where or place
        raise


def lock_target(
    resolved: ResolvedTarget,
    progress: "Progress",
    shared: Shared,
    *,
    refresh: bool = False,
    gone: Sequence[LockedFile] = (),
) -> Lock:
    """Resolve the target's request to exact files: its new lock, which nothing has written yet.

    :func:`primus_images.versions.relock.resolve` explains the arguments.

    With ``refresh``, no version of the lock is kept. An error about a package gets its pin's line.
    """
    # Seam "sources": pip's and apt's code and requests, 150 ms that a plan with an up-to-date lock
    # does not need.
    from primus_images.versions import relock

    previous = None if refresh else resolved.lock
    try:
        return relock.resolve(resolved.request, previous, shared, progress, gone)
    except PrimusError as error:
        if error.where is None and error.about:
            error.where = resolved.pin_of(error.about)[1] or None
        raise


def save_lock(resolved: ResolvedTarget, lock: Lock) -> None:
    """Write the target's lock if it changed."""
    if lock != resolved.lock:
        write_file(resolved.lock_path, dumps(lock))


def with_lock(resolved: ResolvedTarget) -> ResolvedTarget:
    """Return the target if it needs no lock, or has one that fits and no refused version.

    Only ``primus lock`` writes a lock, so that its changes are seen and committed.
    """
    if not resolved.request.asks:
        return resolved
    hint = f"{resolved.lock_command}, and commit the result"
    if resolved.lock is None:
        raise InputError(f"{resolved.name} has no lock yet", hint=hint)
    stale = resolved.stale
    if stale:
        differences = [str(item) for item in stale[:5]]
        if len(stale) > 5:
            differences.append(f"and {len(stale) - 5} more")
        raise InputError(
            f"the lock of {resolved.name} is stale: {'; '.join(differences)}",
            where=_first_place(resolved, stale),
            hint=hint,
        )
    for issue in resolved.known_issues:
        if issue.severity == "refuse":
            raise InputError(
                f"{resolved.name} would be wrong: {issue}",
                where=resolved.pin_of(issue.component)[1] or None,
                hint="pin another version",
            )
    return resolved


def _first_place(resolved: ResolvedTarget, stale: Sequence[Drift]) -> str | None:
    for item in stale:
        place = resolved.drift_place(item.pin)[1]
        if ":" in place:
            return place
    return None
