"""Project files → all the data that later steps need to plan, build, check and publish one image."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from primus_images.errors import InputError, PrimusError
from primus_images.files import write_file
from primus_images.gpus.table import Generation, environment, generation
from primus_images.plan.project import Choice, Project, choose
from primus_images.plan.target import Target, extra_root, extras_of, inside_of, pins_of, request_of
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
        """The image's name in the store: release, target, and ``-preview`` if its channel makes no
        release.
        """
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
        several = len(self.target.channels) > 1
        return f"primus lock {self.name}" + (f" --channel {self.choice.channel}" if several else "")

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
        if self.lock:
            return tuple(file for root in self.roots for file in self.lock.of("deb", root))
        return ()

    @property
    def stale(self) -> tuple[Drift, ...]:
        """The pins that the lock does not match; none if there is no lock."""
        if self.lock:
            return drift(self.lock, self.request)
        return ()

    @cached_property
    def known_issues(self) -> list[Issue]:
        """What is known to be wrong with the pinned and locked versions."""
        locked = (
            file
            for file in (self.lock.files if self.lock else ())
            if file.base in (None, *self.roots)
        )
        pins = {name: pin.version for name, pin in {**self.pins, **self.inside}.items()}
        return issues({**{file.name: file.version for file in locked}, **pins}, [self.name])

    @property
    def trained_with(self) -> dict[str, str]:
        """Component → the package or library that a run loads; without tools, and what is from the
        repository.
        """
        about = self.versions.components
        pins = {**self.pins, **self.inside}.items()
        return {
            name: pin.loaded_as(name) for name, pin in pins if not (pin.path or about[name].tool)
        }

    def place(self, *key: str | int) -> str:
        """Return ``images/<target>.yaml:line:col`` of a key."""
        return self.target_document.where(key)

    def pin_place(self, component: str, pin: Pin) -> str:
        """Return ``versions.yaml:line:col`` of a pin."""
        if pin.place >= 0:
            index = pin.place
        else:
            index = self.versions.components[component].pins.index(pin)
        return self.versions_document.where(("components", component, "pins", index))

    def base_place(self, base: str, *key: str) -> str:
        """Return ``versions.yaml:line:col`` of a base, or of one of its keys."""
        return self.versions_document.where(("bases", base, *key))

    def drift_place(self, pin: str) -> tuple[str, str]:
        """Return the component of a pin of the lock (empty for a base's) and its place; only the
        file if it is gone.
        """
        kind, _, rest = pin.partition(" ")
        name, _, key = rest.rpartition(" ")
        base, _, extra = name.partition(" ")
        if kind == "base" and base in self.versions.bases:
            return "", self.base_place(
                base, *(("extras", extra) if extra in self.extras else (key,))
            )
        component, where = self.pin_of(rest)
        return component if kind != "build" else "", where or "versions.yaml"

    def pin_of(self, about: str) -> tuple[str, str]:
        """Return the component that pins the package, image, repository or file ``about``, and its
        place.

        Both are empty if no pin names it, as for a dependency of a pinned package.
        """
        word = about.partition(" ")[0]
        package = normalised(word)
        # A file name begins with the package's name, in which hyphens may have become underscores.
        stem = normalised(re.split(r"-(?=[0-9])", word, maxsplit=1)[0])
        for component, pin in self.pins.items():
            if {package, stem} & _names(pin):
                return component, self.pin_place(component, pin)
        for name, base in self.request.bases.items():
            if base.image and base.image.partition("@")[0] in (word, word.partition("@")[0]):
                return f"base {name}", self.base_place(
                    name, "image"
                ) if name in self.versions.bases else ""
        for component, pin in self.pins.items():
            if pin.build and stem in {
                normalised(tool.partition("==")[0]) for tool in pin.build.wheels
            }:
                return f"build of {component}", self.pin_place(component, pin)
        return "", ""


def _names(pin: Pin) -> set[str]:
    repository = None
    if pin.git:
        repository = pin.git.rstrip("/").rpartition("/")[2].removesuffix(".git")
    return {
        normalised(name)
        for name in (pin.wheel, pin.sdist, pin.package, pin.deb, repository)
        if name
    }


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

    try:
        gpu = None
        if target.gpu is not None:
            gpu = generation(target.gpu)
    except InputError as error:
        raise InputError(
            error.message, where=error.where or place("gpu"), hint=error.hint
        ) from None
    baked = ()
    if gpu:
        baked = environment(gpu.name)
    where = {c: place("components", i) for i, c in enumerate(target.components)}
    where |= {
        c: place("more", choice.channel, i)
        for i, c in enumerate(target.more.get(choice.channel, ()))
    }
    pins = pins_of(versions, name, choice.sources, gpu.arch if gpu else None, where)
    base = versions.bases.get(choice.base or "")
    if base:
        packages = {name_of(p) for p in base.packages}
    else:
        packages = set()
    extras = extras_of(versions, target, choice.channel, choice.base, place)
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
        environment={
            **{variable.name: variable.value or "" for variable in baked},
            **{variable.name: variable.value for variable in target.environment},
        },
        request=request_of(versions, name, choice.channel, choice.base, pins, extras),
        lock=project.lock(lock_path),
        lock_path=lock_path,
        versions_document=project.versions_document,
        target_document=document,
    )


def lock_target(
    resolved: ResolvedTarget,
    progress: "Progress",
    shared: Shared,
    *,
    refresh: bool = False,
    gone: Sequence[LockedFile] = (),
    write: bool,
) -> Lock:
    """Resolve the target's request to exact files and ``write`` its lock; see
    :func:`primus_images.versions.relock.resolve`.

    With ``refresh``, no version of the lock is kept. An error about a package gets the line of its
    pin.
    """
    # Seam "sources": pip's and apt's code and requests, 150 ms that a plan with an up-to-date lock
    # does not need.
    from primus_images.versions import relock

    if refresh:
        previous = None
    else:
        previous = resolved.lock
    try:
        lock = relock.resolve(resolved.request, previous, shared, progress, gone)
    except PrimusError as error:
        if error.where is None and error.about:
            error.where = resolved.pin_of(error.about)[1] or None
        raise
    if write and lock != resolved.lock:
        write_file(resolved.lock_path, dumps(lock))
    return lock


def with_lock(resolved: ResolvedTarget) -> ResolvedTarget:
    """Return the target if it needs no lock, or has one. Raises InputError for a missing or stale
    lock.

    Only ``primus lock`` writes a lock, so that its changes are seen and committed.
    """
    stale = resolved.stale
    if not resolved.request.asks:
        return resolved
    if resolved.lock is not None and not stale:
        refused = next(
            (issue for issue in resolved.known_issues if issue.severity == "refuse"), None
        )
        if refused:
            where = resolved.pin_of(refused.component)[1] or None
            raise InputError(
                f"{resolved.name} would be wrong: {refused}",
                where=where,
                hint="pin another version",
            )
        return resolved
    what = "; ".join(map(str, stale[:5])) + (
        f"; and {len(stale) - 5} more" if len(stale) > 5 else ""
    )
    if resolved.lock:
        sentence = f"the lock of {resolved.name} is stale: {what}"
    else:
        sentence = f"{resolved.name} has no lock yet"
    where = next(
        (place for item in stale if ":" in (place := resolved.drift_place(item.pin)[1])), None
    )
    raise InputError(sentence, where=where, hint=f"{resolved.lock_command}, and commit the result")
