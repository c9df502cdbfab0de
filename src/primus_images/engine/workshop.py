"""Run one action: create its layer or wheel, and record it.

:mod:`primus_images.engine.kinds` has the code for each kind.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from primus_images.errors import CheckFailed, HostError, InputError, PrimusError
from primus_images.files import text_if_readable
from primus_images.gates.examined import LayerFacts, machine_paths, observe, save
from primus_images.oci.layer import unpacked, write_layer
from primus_images.oci.store import Layer, Store, canonical_json, manifest_of
from primus_images.oci.tar import BLOCK, Entry, Member
from primus_images.plan.action import Action
from primus_images.plan.project import Workspace
from primus_images.progress import Progress
from primus_images.sandbox.container import Command, LayerRef, Mount, RootFs
from primus_images.sandbox.engine import Engine
from primus_images.sandbox.engines import choose
from primus_images.schema import build_typed
from primus_images.versions.lock import LockedFile
from primus_images.yamlfile import read_values

_NO_SPACE = (
    "No space left on device",
    "Disk quota exceeded",
    "You don't have enough free space in",
)
ENVIRONMENT: Mapping[str, Mapping[str, str]] = read_values(
    Path(__file__).with_name("environment.yaml")
).data
# The home directory is created inside: /tmp belongs to the image, which has no home. podman sets
# two variables.
_PRELUDE = 'unset container TERM; umask 022 && mkdir -p "$HOME" && exec "$@"'


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A wheel in the file cache; ``size`` is in bytes."""

    file: str
    sha256: str
    size: int


@dataclass(frozen=True, kw_only=True)
class Task:
    """A command for a sandbox without network.

    ``inputs`` maps absolute paths inside to host files or folders, all read-only. The host folder
    ``outputs`` is /out, the only place whose changes are kept. ``env`` adds to the environment of
    builds and of the image.
    """

    argv: Sequence[str]
    inputs: Mapping[str, Path]
    outputs: Path
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Kind:
    """A kind of action: two functions.

    ``make`` runs an action; the folder that it gets is empty, and removed afterwards. ``prepare``
    is called once, before long work begins, and raises HostError for what this machine lacks to run
    the actions.
    """

    make: Callable[[Action, "Workshop", Path], Layer | Wheel]
    prepare: Callable[[Sequence[Action], "Workshop"], None] = lambda *_: None


@dataclass(frozen=True, kw_only=True)
class Workshop:
    """What actions work with: the store, the fetched files, the progress.

    ``judge`` collects facts for the gates.
    """

    workspace: Workspace
    progress: Progress
    engine: str = "auto"
    judge: bool = True

    def run(self, action: Action, kind: Kind) -> float | None:
        """Run the action, and return its seconds; None if another builder ran it meanwhile."""
        store = self.workspace.store
        with store.lock(action.key, f"another build of {action.name}"):
            if self.done(action):
                return None
            self.progress.start(action.key, action.name, None)
            begin = time.monotonic()
            try:
                with self._verified(action), store.folder("work") as scratch:
                    result = kind.make(action, self, scratch)
            except InputError as error:
                # A file that a pin requests is wrong, so report the pin's line.
                lines = [entry.where for entry in action.inputs if entry.where]
                where = error.where or next(iter(lines), None)
                raise InputError(
                    f"{action.name}: {error.message}", where=where, hint=error.hint
                ) from None
            seconds = round(time.monotonic() - begin, 3)
            store.save("actions", action.key, record_of(action, result))
            if isinstance(result, Wheel):
                product = result.file
            else:
                product = f"{result.blob.size / 1e6:.1f} MB"
            self.progress.finish(action.key, f"{product}, {seconds:.1f} s")
        return seconds

    def write(self, action: Action, entries: Sequence[Entry]) -> Layer:
        """Write the entries as the action's layer. Raises what ``write_layer`` raises."""
        self.progress.start(action.key, action.name, sum(BLOCK + entry.size for entry in entries))
        store = self.workspace.store
        facts = list[LayerFacts]()

        def look(members: Iterator[Member]) -> None:
            # On the store's disk: the folder for temporary files is often in memory.
            facts.append(observe(members, machine_paths(self.workspace), store.root / "tmp"))

        def advance(count: int) -> None:
            self.progress.advance(action.key, count)

        layer = write_layer(store, entries, advance=advance, look=look if self.judge else list)
        for seen in facts:
            save(self.workspace, layer, seen)
        return layer

    def done(self, action: Action) -> bool:
        """Whether the store has the action's result."""
        if action.kind != "build":
            return self.workspace.store.layer(action.key) is not None
        wheel = wheel_of(self.workspace.store, action.key)
        return wheel is not None and self.workspace.files.has(wheel.sha256, wheel.size)

    def file(self, file: LockedFile) -> Path:
        """Return the path of a fetched file."""
        return self.workspace.files.path(file.sha256)

    def read_by(self, action: Action) -> tuple[LockedFile, ...]:
        """Return the files that the action reads: fetched ones, and wheels that were built."""
        if action.kind != "wheels":
            return action.files
        files = list(action.files)
        for needed in action.needs:
            wheel = wheel_of(self.workspace.store, needed.key)
            if wheel is None:
                raise HostError(f"{needed.name} has no result in the store", hint="build again")
            package = str(needed.spec["package"])
            files.append(LockedFile(kind="wheel", name=package, version="", **asdict(wheel)))
        return tuple(files)

    @contextlib.contextmanager
    def _verified(self, action: Action) -> Iterator[None]:
        cache = self.workspace.files
        marks = {}
        for file in self.read_by(action):
            marks[file] = cache.mark(file.sha256)
            self._verify(file)
        yield
        # apt compares each package with its hash as it reads it, and hard links change the inode's
        # times.
        if action.kind == "debs" and "over" not in action.spec:
            return
        for file, mark in marks.items():
            if cache.mark(file.sha256) != mark:
                self._verify(file)

    def _verify(self, file: LockedFile) -> None:
        if not self.workspace.files.verify(file.sha256):
            self.workspace.files.drop(file.sha256)
            raise HostError(
                f"the fetched {file.file} is damaged: its bytes no longer hash to "
                f"sha256:{file.sha256}",
                hint="it was removed from the file cache; build again to download it",
            )

    def log(self, action: Action) -> Path:
        """Return the path of the log of the action's commands."""
        folder = self.workspace.logs
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / f"{action.name.replace(' ', '-')}-{action.key[:12]}.log"
        self.progress.follow(action.key, log)
        return log

    def run_with_tools(self, action: Action, task: Task, what: str) -> None:
        """Run the task on the layers of the action's tools; ``what`` names it in a message.

        Raises CheckFailed with the end of the log if the command fails, HostError if the disk is
        full.
        """
        log = self.log(action)
        store = self.workspace.store
        layers = []
        for tool in action.tools:
            layer = store.layer(tool.key)
            if layer is None:
                raise HostError(
                    f"a layer that {action.name} needs is not in the store", hint="build again"
                )
            layers.append(layer)
        root = root_of_layers(store, self.workspace.unpacked, layers)
        code = run_isolated(choose(self.engine), root, task, log)
        if code:
            full = disk_is_full(log, store.root)
            if full:
                raise full
            raise CheckFailed(f"{what} ended with exit code {code}:\n{log_tail(log)}")


def record_of(action: Action, result: Layer | Wheel) -> dict[str, Any]:
    """Return the record of a finished action."""
    return {"name": action.name, "kind": action.kind, type(result).__name__.lower(): asdict(result)}


def wheel_of(store: Store, key: str) -> Wheel | None:
    """Return the wheel that the action ``key`` created; None if the store has no record of one."""
    try:
        return build_typed(Wheel, (store.record("actions", key) or {})["wheel"], key)
    except (KeyError, InputError):
        # Another version may have written it in another shape.
        return None


def own_code(action: Action, name: str, path: Path, scratch: Path) -> Path:
    """Copy a file of this package, whose hash is the action's input ``name``, to ``scratch``."""
    data = path.read_bytes()
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    if digest not in [entry.value for entry in action.inputs if entry.name == name]:
        raise CheckFailed(f"{path} changed while the build read it", hint="build again")
    copy = scratch / path.name
    copy.write_bytes(data)
    return copy


def disk_is_full(log: Path, *places: Path) -> PrimusError | None:
    """Return an error if a tool failed because the disk of one of ``places`` is full.

    The disk shows it, or the end of the tool's log.
    """
    full = [place for place in places if place.exists() and os.statvfs(place).f_bavail == 0]
    text = text_if_readable(log, 200_000)
    if not full and not any(words in text for words in _NO_SPACE):
        return None
    return HostError(
        f"the disk that holds {[*full, *places][0]} is full",
        hint=f"free some space and run it again: finished work is kept (log: {log})",
    )


def run_isolated(engine: Engine, root: RootFs, task: Task, log: Path) -> int:
    """Run the task in ``root`` as its root user, without network, and return its exit code.

    The output replaces ``log``. Raises InputError for an invalid input path, and HostError if the
    machine cannot isolate it.
    """
    task.outputs.mkdir(parents=True, exist_ok=True)
    mounts = [Mount(source=source, target=target) for target, source in sorted(task.inputs.items())]
    mounts.append(Mount(source=task.outputs, target="/out", read_only=False))
    command = Command(
        argv=("/bin/sh", "-c", _PRELUDE, "build", *task.argv),
        env={**ENVIRONMENT["every"], **task.env},
        cwd="/",
        mounts=tuple(mounts),
        user="0",
        entrypoint=False,
        hostname="build",
    )
    with log.open("wb") as out, Path(os.devnull).open("rb") as nothing:
        return engine.run(root, command, stdin=nothing, stdout=out, stderr=out)


def log_tail(log: Path) -> str:
    """Return the last 30 lines of a log and a line with its path, for a message after a failure."""
    return "\n".join([*text_if_readable(log, 12_000).splitlines()[-30:], f"full log: {log}"])


def root_of_layers(store: Store, cache: Path, layers: Sequence[Layer]) -> RootFs:
    """Return a root file system of these layers, bottom first, without an image's settings."""
    rootfs = {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]}
    config = canonical_json(
        {"architecture": "amd64", "os": "linux", "config": {}, "rootfs": rootfs}
    )
    manifest = manifest_of(config, [layer.blob for layer in layers], {})
    return RootFs(
        name="layers", manifest=manifest, config_bytes=config, tar=_tar_of(store), cache=cache
    )


def digest_of_image(store: Store, target: str, *, ref: str) -> str:
    """Return the digest of the image of ``target`` that the store calls ``ref``.

    Raises InputError if it is not built.
    """
    images = store.images()
    if ref not in images:
        names = ", ".join(sorted(images)) or "no image"
        raise InputError(
            f"{ref} is not built; the store has {names}", hint=f"primus build {target}"
        )
    return str(images[ref]["digest"])


def root_of_image(store: Store, cache: Path, target: str, *, ref: str) -> RootFs:
    """Return the image of ``target`` that the store calls ``ref``.

    Raises InputError, which lists the existing images, if it is not built; HostError if its
    manifest or config is damaged.
    """
    manifest = store.read(digest_of_image(store, target, ref=ref))
    config = store.read(json.loads(manifest)["config"]["digest"])
    return RootFs(name=ref, manifest=manifest, config_bytes=config, tar=_tar_of(store), cache=cache)


def _tar_of(store: Store) -> Callable[[LayerRef], Iterator[bytes]]:
    return lambda layer: unpacked(layer, store.blob_path(layer.digest))
