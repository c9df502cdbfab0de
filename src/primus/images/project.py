"""A project folder on disk: versions.yaml, images/, recipes/, the locks and the store."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path

from primus.errors import InputError, did_you_mean
from primus.gpus.model import Generation, Table
from primus.gpus.table import TABLE_FILE, generation
from primus.images import wholefile
from primus.images.channel import Choice, choose
from primus.images.stats import StatIndex
from primus.images.store import Store
from primus.images.target import Target, environment_of, pins_of, request_of
from primus.schema import build
from primus.versions.lock import Lock, Request, dumps
from primus.versions.lock import load as load_lock
from primus.versions.model import Pin, Versions
from primus.yamlfile import Document

__all__ = ["Project"]

_CACHE_FORMAT = 1


class Project:
    """The folder that holds versions.yaml. Everything is read once, when it is first asked for."""

    def __init__(self, root: Path, *, store: Path | None = None, channel: str | None = None) -> None:
        self.root = root
        self.asked = channel
        self.work = root / ".primus"
        self.store = Store(store or self.work / "store")
        self._targets: dict[str, tuple[Target, Document]] = {}

    @classmethod
    def find(cls, start: Path | None = None, *, store: Path | None = None, channel: str | None = None) -> Project:
        """The project at ``start``, or, when none is given, of the current folder or its nearest parent that is one."""
        folder = start.absolute() if start else cls.here()
        if folder is None or not (folder / "versions.yaml").is_file():
            raise InputError(f"there is no versions.yaml in {folder or Path.cwd()}" + ("" if start else " or above it"))
        return cls(folder, store=store, channel=channel)

    @staticmethod
    def here() -> Path | None:
        """The nearest folder, from the current one up, that holds a versions.yaml."""
        current = Path.cwd()
        return next((f for f in (current, *current.parents) if (f / "versions.yaml").is_file()), None)

    @cached_property
    def stats(self) -> StatIndex:
        """Hashes of local files."""
        return StatIndex(self.work / "cache" / "stats.json")

    @cached_property
    def _versions(self) -> tuple[Versions, Document]:
        document = self._document(self.root / "versions.yaml")
        return build(Versions, document), document

    @property
    def versions(self) -> Versions:
        """The pins."""
        return self._versions[0]

    def pin_place(self, component: str, pin: Pin) -> str:
        """``versions.yaml:line:col`` of a pin."""
        index = pin.place if pin.place >= 0 else self.versions.components[component].pins.index(pin)
        return self._versions[1].where(("components", component, "pins", index))

    def base_place(self, base: str) -> str:
        """``versions.yaml:line:col`` of a base."""
        return self._versions[1].where(("bases", base))

    def place(self, *key: str) -> str:
        """``versions.yaml:line:col`` of any key."""
        return self._versions[1].where(key)

    def target_names(self) -> list[str]:
        """The targets: one file each in images/."""
        return sorted(p.stem for p in (self.root / "images").glob("*.yaml"))

    def target(self, name: str) -> Target:
        """The target called ``name``; InputError names the nearest one there is."""
        return self._target(name)[0]

    def _target(self, name: str) -> tuple[Target, Document]:
        if name not in self._targets:
            path = self.root / "images" / f"{name}.yaml"
            if not path.is_file():
                names = self.target_names()
                hint = did_you_mean(name, names) or "targets: " + ", ".join(names)
                raise InputError(f"no target is called {name!r}", hint=hint)
            document = self._document(path)
            self._targets[name] = (build(Target, document), document)
        return self._targets[name]

    def target_place(self, name: str, *key: str | int) -> str:
        """``images/<target>.yaml:line:col`` of a key."""
        return self._target(name)[1].where(key)

    def environment(self, name: str) -> dict[str, str]:
        """Variable → value in the target's containers."""
        target = self.target(name)
        return environment_of(target, self._gpus if target.gpu else None, partial(self.target_place, name))

    def arch(self, name: str) -> str | None:
        """The GPU architecture that the target's libraries must have code for: its generation's, or as it says."""
        gpu = self.gpu(name)
        return gpu.arch if gpu else self.target(name).arch

    def gpu(self, name: str) -> Generation | None:
        """The GPU that the target is for, if it names one."""
        target = self.target(name)
        if target.gpu is None:
            return None
        try:
            return generation(target.gpu, self._gpus)
        except InputError as error:
            raise InputError(error.message, where=self.target_place(name, "gpu"), hint=error.hint) from None

    @cached_property
    def _gpus(self) -> Table:
        return build(Table, self._document(TABLE_FILE, TABLE_FILE.name))

    def pins(self, name: str) -> dict[str, Pin]:
        """Component → pin for the target."""
        (target, document), choice = self._target(name), self.choice(name)
        where = {c: document.where(("components", i)) for i, c in enumerate(target.components)}
        more = target.more.get(choice.channel, ())
        where |= {c: document.where(("more", choice.channel, i)) for i, c in enumerate(more)}
        return pins_of(self.versions, name, choice.sources, self.arch(name), where)

    def request(self, name: str) -> Request:
        """What the target's lock must answer."""
        choice = self.choice(name)
        return request_of(self.versions, name, choice.channel, choice.base, self.pins(name))

    def budget_gb(self, name: str) -> float | None:
        """Most compressed GB that the image may weigh."""
        target = self.target(name)
        return target.budgets_gb.get(self.choice(name).channel, target.budget_gb)

    def budget_key(self, name: str) -> tuple[str, ...]:
        """The key of the target file that sets the budget."""
        channel = self.choice(name).channel
        return ("budgets_gb", channel) if channel in self.target(name).budgets_gb else ("budget_gb",)

    def choice(self, name: str) -> Choice:
        """The channel that builds the target."""
        return choose(name, self.target(name), self.asked, lambda c: self._lock_path(name, c).is_file())

    def ref(self, name: str) -> str:
        """The image's name in the store: release, target, and ``-preview`` where its channel makes no release."""
        return f"{self.versions.release}-{name}{self.choice(name).suffix}"

    def lock_path(self, name: str) -> Path:
        """Where the target's lock is committed."""
        return self._lock_path(name, self.choice(name).channel)

    def _lock_path(self, name: str, channel: str) -> Path:
        return self.root / "images" / "locks" / channel / f"{name}.json"

    def lock(self, name: str) -> Lock | None:
        """The target's lock, or None when there is none yet."""
        path = self.lock_path(name)
        return load_lock(path, str(path.relative_to(self.root)))

    def write_lock(self, name: str, lock: Lock) -> None:
        """Write the target's lock where it is committed, whole or not at all."""
        wholefile.write(self.lock_path(name), dumps(lock))

    def _document(self, path: Path, name: str | None = None) -> Document:
        """The file's parsed text, from the cache when the very same text was parsed before (yaml costs 40 ms)."""
        name = name or str(path.relative_to(self.root))
        try:
            text = path.read_bytes()
        except OSError as error:
            raise InputError(f"cannot be read: {error.strerror}", where=name) from None
        mark = hashlib.sha256(f"{_CACHE_FORMAT} {name} ".encode() + text).hexdigest()[:32]
        cache = self.work / "cache" / f"yaml-{mark}.json"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            known = json.loads(cache.read_bytes())
            places = {tuple(key): (line, column) for key, line, column in known["places"]}
            return Document(name=name, data=known["data"], places=places)
        from primus.yamlfile import read

        document = read(path, name)
        with contextlib.suppress(OSError):
            wholefile.write(cache, json.dumps({"data": document.data, "places": list(_rows(document))}))
        return document


def _rows(document: Document) -> Iterator[tuple[list[str | int], int, int]]:
    for key, (line, column) in document.places.items():
        yield list(key), line, column
