"""A project folder on disk: find and read versions.yaml, images/*.yaml and the locks, and choose a
target's channel.

The workspace has the folders that a build writes to: image store, fetched files, unpacked layers,
caches and logs.

An image never mixes files of two channels.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Self

from primus_images.errors import InputError, did_you_mean
from primus_images.files import stems
from primus_images.gpus.table import load_table
from primus_images.oci.store import Store
from primus_images.plan.stats import StatIndex
from primus_images.plan.target import Target
from primus_images.schema import build
from primus_images.versions.components import Versions
from primus_images.versions.filecache import FileCache
from primus_images.versions.lock import Lock, load as load_lock
from primus_images.waits import InUse
from primus_images.yamlfile import Document, read

# With the release, `-preview` and a publisher's mark, it is a tag, whose rule is in
# primus_images.release.registry.
_TARGET = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")

# Pure Python packages come from PyPI in every channel, and every channel uses local folders.
SOURCES: dict[str, tuple[str, ...]] = {
    "amd": ("amd", "pypi", "local"),
    "debian": ("debian", "pypi", "local"),
    "pypi": ("pypi", "local"),
    "local": ("local",),
}


class Project:
    """The folder that contains versions.yaml. Every file is read once, when it is first needed."""

    def __init__(
        self, root: Path, *, store: Path | None = None, channel: str | None = None
    ) -> None:
        self.root = root
        self.channel = channel
        work = root / ".primus"
        self.workspace = Workspace(Store(store or work / "store"), work)
        self._targets: dict[str, tuple[Target, Document]] = {}

    @classmethod
    def find(
        cls, start: Path | None = None, *, store: Path | None = None, channel: str | None = None
    ) -> Self:
        """Return the project at ``start``, or else the nearest one from the current folder upwards."""
        if start:
            folder = start.absolute()
        else:
            folder = cls.here()
        if folder is None or not os.path.lexists(folder / "versions.yaml"):
            folder_text = folder or f"{Path.cwd()} or above it"
            raise InputError(
                f"there is no versions.yaml in {folder_text}",
                hint="change to a checkout of the project, or name its folder with --project",
            )
        return cls(folder, store=store, channel=channel)

    @staticmethod
    def here() -> Path | None:
        """Return the nearest folder, from the current one upwards, that contains a versions.yaml."""
        current = Path.cwd()
        return next(
            (f for f in (current, *current.parents) if os.path.lexists(f / "versions.yaml")), None
        )

    @cached_property
    def versions(self) -> Versions:
        """The pins. Raises InputError for a pin of a target that does not exist."""
        versions = build(Versions, self.versions_document)
        names = self.target_names()
        for component, about in versions.components.items():
            for index, pin in enumerate(about.pins):
                for number, target in enumerate(pin.targets):
                    # A GPU, or a name that resembles no target, may be a target that this checkout
                    # does not contain.
                    if target in names or target in (gpu.name for gpu in load_table().generations):
                        continue
                    hint = did_you_mean(target, names)
                    if hint:
                        key = ("components", component, "pins", index, "targets", number)
                        where = self.versions_document.where(key)
                        raise InputError(f"no target is called {target!r}", where=where, hint=hint)
        return versions

    @cached_property
    def versions_document(self) -> Document:
        """The parsed text of versions.yaml, with places."""
        return read(self.root / "versions.yaml", "versions.yaml")

    def target_names(self) -> list[str]:
        """The names of the targets, one file each in images/."""
        return stems(self.root / "images")

    def target(self, name: str) -> tuple[Target, Document]:
        """Return the target called ``name``, and its file with places. InputError suggests the
        nearest name.
        """
        if name not in self._targets:
            path = self.root / "images" / f"{name}.yaml"
            names = self.target_names()
            if name not in names:
                hint = did_you_mean(name, names) or f"targets: {', '.join(names) or 'none'}"
                reason = next(
                    (gpu.no_image for gpu in load_table().generations if gpu.name == name), None
                )
                if reason:
                    raise InputError(
                        f"no image is built for {name}: {reason}",
                        hint=f"targets: {', '.join(names)}",
                    )
                raise InputError(f"no target is called {name!r}", hint=hint)
            if not _TARGET.fullmatch(name):
                raise InputError(
                    f"{name!r} cannot be the name of a target, because it is part of an image's "
                    "tag",
                    where=f"images/{path.name}",
                    hint=(
                        "use at most 64 lower-case letters, digits, '-', '_' and '.', as in mi300x"
                    ),
                )
            document = read(path, f"images/{path.name}")
            target = build(Target, document)
            self._targets[name] = (
                replace(target, recipes=tuple(self._recipes(target, document))),
                document,
            )
        return self._targets[name]

    def _recipes(self, target: Target, document: Document) -> Iterator[str]:
        recipes = stems(self.root / "recipes")
        for index, name in enumerate(target.recipes):
            if name == "all":
                yield from (other for other in recipes if other not in target.recipes)
            elif recipes and name not in recipes:
                hint = did_you_mean(name, recipes) or "add it to recipes/"
                raise InputError(
                    f"no recipe is called {name!r}",
                    where=document.where(("recipes", index)),
                    hint=hint,
                )
            else:
                yield name

    def lock_path(self, name: str, channel: str) -> Path:
        """Return the path of the target's committed lock for the channel."""
        return self.root / "images" / "locks" / channel / f"{name}.json"

    def lock(self, path: Path) -> Lock | None:
        """Return the lock at ``path``, or None if there is none yet."""
        return load_lock(path, str(path.relative_to(self.root)))


class Choice(NamedTuple):
    """The channel that builds a target. ``base`` is its root file system, ``preview`` the reason
    why its image is not a release, ``reason`` why the channel was chosen.
    """

    channel: str
    base: str | None
    preview: str | None
    reason: str

    @property
    def sources(self) -> tuple[str, ...]:
        """The channels whose pins it may use, best first."""
        return SOURCES[self.channel]

    @property
    def suffix(self) -> str:
        """The suffix of the image's name."""
        if self.preview:
            return "-preview"
        return ""


def choose(
    name: str, target: Target, requested: str | None, locked: Callable[[str], bool]
) -> Choice:
    """Return the ``requested`` channel, else the best one with a committed lock, else the best one.

    The choice depends on locks, not on the network, so the same checkout chooses the same channel
    on every machine. ``locked`` returns whether a channel has a lock. Raises InputError for a
    channel that the target does not have.
    """
    channel = requested or next(filter(locked, target.channels), None)
    if channel is None:
        channel = target.channels[0]
        reason = "the best channel; none has a lock yet"
    elif channel not in target.channels:
        raise InputError(
            f"{name} has no channel {channel!r}", hint="its channels: " + ", ".join(target.channels)
        )
    elif requested:
        reason = "selected by --channel"
    else:
        better = target.channels[: target.channels.index(channel)]
        reason = "the best channel with a lock"
        if len(target.channels) == 1:
            reason = "the only channel"
        if better:
            reason += (
                f"; {', '.join(better)} has none here (primus lock {name} --channel {better[0]})"
            )
    base = target.bases.get(channel, target.base)
    return Choice(channel=channel, base=base, preview=target.previews.get(channel), reason=reason)


class Workspace:
    """The store, and the folder that contains everything else (``.primus`` of a project). It
    contains no input.

    ``files`` are fetched ones, ``unpacked`` layers for the sandbox, ``facts`` the cached results of
    gates for each layer, and ``logs`` those of actions that ran in the sandbox.
    """

    def __init__(self, store: Store, folder: Path) -> None:
        self.store = store
        self.folder = folder
        self.files = FileCache(folder / "files")
        # runc takes no root below a symbolic link, as `primus triage` makes one.
        self.unpacked = (
            folder.parent / folder.readlink() if folder.is_symlink() else folder
        ) / "unpacked"
        self.facts = folder / "cache" / "gates"
        self.logs = folder / "logs"
        # Commands with different stores share the folder, so it has a lock of its own.
        self._in_use = InUse(folder / "in-use", "the downloads and unpacked layers", folder)

    def hold(self) -> None:
        """Prevent :meth:`alone` from starting until this process ends."""
        self.store.in_use.hold()
        self._in_use.hold()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other commands from using the store and the folder. Raises HostError if one is using
        them.
        """
        with self.store.in_use.alone(), self._in_use.alone():
            yield

    @cached_property
    def stats(self) -> StatIndex:
        """The cache of hashes of local files."""
        return StatIndex(self.folder / "cache" / "stats.json")
