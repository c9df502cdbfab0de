"""A project folder on disk: versions.yaml, images/*.yaml and the locks, and the workspace.

The workspace has the folders that a build writes to: image store, fetched files, unpacked layers,
caches and logs.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Self

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
        """Return the project at ``start``, else the nearest one from the current folder upwards."""
        folder = start.absolute() if start else cls.here()
        if folder is None or not os.path.lexists(folder / "versions.yaml"):
            place = folder or f"{Path.cwd()} or above it"
            raise InputError(
                f"there is no versions.yaml in {place}",
                hint="change to a checkout of the project, or name its folder with --project",
            )
        return cls(folder, store=store, channel=channel)

    @staticmethod
    def here() -> Path | None:
        """Return the nearest folder with a versions.yaml, from the current one upwards."""
        for folder in (Path.cwd(), *Path.cwd().parents):
            if os.path.lexists(folder / "versions.yaml"):
                return folder
        return None

    @cached_property
    def versions(self) -> Versions:
        """The pins. Raises InputError for a pin of a target that does not exist."""
        versions = build(Versions, self.versions_document)
        for name, component in versions.components.items():
            for index, pin in enumerate(component.pins):
                for number, target in enumerate(pin.targets):
                    self._check_target(target, "components", name, "pins", index, "targets", number)
        return versions

    def _check_target(self, target: str, *key: str | int) -> None:
        """Refuse a misspelled target of a pin.

        A GPU, or a name that resembles no target, may be a target that this checkout lacks.
        """
        names = self.target_names()
        if target in names or any(gpu.name == target for gpu in load_table().generations):
            return
        hint = did_you_mean(target, names)
        if hint:
            place = self.versions_document.where(key)
            raise InputError(f"no target is called {target!r}", where=place, hint=hint)

    @cached_property
    def versions_document(self) -> Document:
        """The parsed text of versions.yaml, with places."""
        return read(self.root / "versions.yaml", "versions.yaml")

    def target_names(self) -> list[str]:
        """The names of the targets, one file each in images/."""
        return stems(self.root / "images")

    def target(self, name: str) -> tuple[Target, Document]:
        """Return the target called ``name``, and its file with places."""
        if name not in self._targets:
            if name not in self.target_names():
                raise self._unknown_target(name)
            place = f"images/{name}.yaml"
            if not _TARGET.fullmatch(name):
                raise InputError(
                    f"{name!r} cannot be the name of a target, because it is part of an image's "
                    "tag",
                    where=place,
                    hint="use at most 64 lower-case letters, digits, '-', '_' and '.', as in "
                    "mi300x",
                )
            document = read(self.root / place, place)
            target = build(Target, document)
            target = replace(target, recipes=tuple(self._recipes(target, document)))
            self._targets[name] = (target, document)
        return self._targets[name]

    def _unknown_target(self, name: str) -> InputError:
        names = self.target_names()
        targets = f"targets: {', '.join(names) or 'none'}"
        for gpu in load_table().generations:
            if gpu.name == name and gpu.no_image:
                return InputError(f"no image is built for {name}: {gpu.no_image}", hint=targets)
        return InputError(
            f"no target is called {name!r}", hint=did_you_mean(name, names) or targets
        )

    def _recipes(self, target: Target, document: Document) -> Iterator[str]:
        recipes = stems(self.root / "recipes")
        for index, name in enumerate(target.recipes):
            if name == "all":
                yield from (other for other in recipes if other not in target.recipes)
            elif recipes and name not in recipes:
                raise InputError(
                    f"no recipe is called {name!r}",
                    where=document.where(("recipes", index)),
                    hint=did_you_mean(name, recipes) or "add it to recipes/",
                )
            else:
                yield name

    def lock_path(self, name: str, channel: str) -> Path:
        """Return the path of the target's committed lock for the channel."""
        return self.root / "images" / "locks" / channel / f"{name}.json"

    def lock(self, path: Path) -> Lock | None:
        """Return the lock at ``path``, or None if there is none yet."""
        return load_lock(path, str(path.relative_to(self.root)))


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
        # runc takes no root below a symbolic link, as a scratch project makes one.
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
