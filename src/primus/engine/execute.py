"""Run one action: create its layer or wheel, and record it. :mod:`primus.engine.kinds` has the code for each kind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from primus.engine.kinds import Made, Wheel, load
from primus.engine.records import wheel_of
from primus.errors import HostError, InputError
from primus.oci.layer import compression_of, write_layer
from primus.oci.store import Layer
from primus.oci.tar import BLOCK, Entry, Watch
from primus.plan.action import Action
from primus.versions.lock import LockedFile

if TYPE_CHECKING:
    from primus.fetch.filecache import FileCache
    from primus.plan.workspace import Workspace
    from primus.progress import Progress


@dataclass(frozen=True, kw_only=True)
class Workshop:
    """What actions work with: the store, the fetched files, a progress callback.

    ``watch`` returns an observer for the next layer while it is written; ``made`` is called with each finished layer
    and its observer.
    """

    workspace: Workspace
    progress: Progress
    engine: str = "auto"
    watch: Callable[[], Watch | None] = lambda: None
    made: Callable[[Layer, Watch | None], None] = lambda *_: None

    @property
    def files(self) -> FileCache:
        """The cache of fetched files."""
        return self.workspace.files

    def run(self, action: Action) -> bool:
        """Run the action, unless another builder has just done so. Returns True if it ran here.

        A second builder of the same action waits for the first one and uses its result.
        """
        store = self.workspace.store
        with store.lock(action.key):
            if self.done(action):
                return False
            self.progress.start(action.key, action.name, None)
            try:
                with self._verified(action), store.folder("work") as scratch:
                    made = load(action.kind).make(action, self, scratch)
            except InputError as error:
                # A file that a pin requests is wrong, so report the pin's line.
                where = error.where or next((i.where for i in action.inputs if i.where), None)
                raise InputError(f"{action.name}: {error.message}", where=where, hint=error.hint) from None
            record = {"name": action.name, "kind": action.kind}
            if isinstance(made, Wheel):
                store.save("actions", action.key, {**record, "wheel": asdict(made)})
                self.progress.finish(action.key, made.file)
            else:
                layer = made.layer
                store.save_layer(action.key, layer, {**record, "tree": action.tree})
                self.progress.finish(action.key, f"{layer.blob.size / 1e6:.1f} MB, {layer.seconds:.1f} s")
                self.made(layer, made.watch)
        return True

    def write(self, action: Action, entries: Sequence[Entry]) -> Made:
        """Write the entries as the action's layer; see :func:`primus.oci.layer.write_layer` for what it raises."""
        self.progress.start(action.key, action.name, sum(BLOCK + e.size for e in entries))
        watch = self.watch()
        try:
            layer = write_layer(
                self.workspace.store,
                entries,
                compression=compression_of(next(i.value for i in action.inputs if i.name == "assembler")),
                advance=lambda n: self.progress.advance(action.key, n),
                watch=watch,
            )
        finally:
            if watch:
                watch.close()
        return Made(layer=layer, watch=watch)

    def done(self, action: Action) -> bool:
        """Whether the store has the action's result."""
        if action.makes_layer:
            return self.workspace.store.layer(action.key) is not None
        wheel = wheel_of(self.workspace.store, action.key)
        return wheel is not None and self.files.has(wheel.sha256, wheel.size)

    def file(self, file: LockedFile) -> Path:
        """Return the path of a fetched file."""
        return self.files.path(file.sha256)

    def read_by(self, action: Action) -> tuple[LockedFile, ...]:
        """Return the locked files that the action reads; for ``wheels``, also the wheels that ``build`` actions
        created.
        """
        return (*action.files, *self._built(action)) if action.kind == "wheels" else action.files

    @contextlib.contextmanager
    def _verified(self, action: Action) -> Iterator[None]:
        """Verify the fetched files that the action reads, before and after the action, in case they are changed
        meanwhile.
        """
        marks: dict[str, tuple[int, ...]] = {}
        for file in self.read_by(action):
            marks[file.sha256] = self.files.mark(file.sha256)
            self._verify(file)
        yield
        # apt compares each package with its hash as it reads it, and hard links change the inode's times.
        if action.kind != "debs" or "over" in action.spec:
            for file in self.read_by(action):
                if self.files.mark(file.sha256) != marks[file.sha256]:
                    self._verify(file)

    def _verify(self, file: LockedFile) -> None:
        if not self.files.verify(file.sha256):
            self.files.drop(file.sha256)
            raise HostError(
                f"the fetched {file.file} is damaged: its bytes no longer hash to sha256:{file.sha256}",
                hint="it was removed from the file cache; build again to download it",
            )

    def _built(self, action: Action) -> Iterator[LockedFile]:
        for needed in action.needs:
            wheel = wheel_of(self.workspace.store, needed.key)
            if wheel is None:
                raise HostError(f"{needed.name} has no result in the store", hint="build again")
            yield LockedFile(kind="wheel", name=str(needed.spec["package"]), version="", **asdict(wheel))

    def layer(self, action: Action) -> Layer:
        """Return the layer that the action created. Raises HostError if it is no longer in the store."""
        layer = self.workspace.store.layer(action.key)
        if layer is None:
            raise HostError(f"the layer of {action.name} is not in the store", hint="build again")
        return layer

    def log(self, action: Action) -> Path:
        """Return the path of the log of the action's commands."""
        folder = self.workspace.logs
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / f"{action.name.replace(' ', '-')}-{action.key[:12]}.log"
        self.progress.follow(action.key, log)
        return log
