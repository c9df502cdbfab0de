"""Run one action: make its layer or its wheel, and record it. Every kind has one function here."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from primus.build.bytecode import bytecode_entries
from primus.build.kernels import KernelFiles
from primus.build.preflight import disk_is_full
from primus.build.rootfs import root_entries
from primus.build.unpacked import over_entries
from primus.build.wheel import wheel_entries
from primus.errors import CheckFailed, HostError, InputError
from primus.oci.imported import adopt_layer
from primus.oci.layer import compression_of, write_layer
from primus.oci.left_out import NOTHING
from primus.oci.roots import root_of_layers
from primus.oci.store import Layer
from primus.oci.tar import BLOCK, Entry, Watch
from primus.plan.action import Action
from primus.plan.aot import BAKED, command_of
from primus.plan.prefix import Prefix
from primus.plan.skeleton import inline_entries
from primus.plan.source import BYTECODE, ORDER
from primus.sandbox.engines import choose
from primus.sandbox.isolated import log_tail, run_isolated
from primus.sandbox.tools import need
from primus.versions.lock import LockedFile

if TYPE_CHECKING:
    from primus.build.kernels import KernelFiles
    from primus.fetch.filecache import FileCache
    from primus.plan.workspace import Workspace
    from primus.progress import Progress
    from primus.sandbox.container import RootFs

__all__ = ["Workshop"]


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
        """The fetched files."""
        return self.workspace.files

    def run(self, action: Action) -> bool:
        """Do the action unless another builder just did; True when it was done here.

        A second builder of the same action waits for the first and takes its result.
        """
        store = self.workspace.store
        with store.lock(action.key):
            if self.done(action):
                return False
            try:
                if action.kind == "build":
                    self._build(action)
                else:
                    self._layer_of(action)
            except InputError as error:
                # Of something that a pin asks for, so that its line is the place to change.
                where = error.where or next((i.where for i in action.inputs if i.where), None)
                raise InputError(f"{action.name}: {error.message}", where=where, hint=error.hint) from None
        return True

    def _layer_of(self, action: Action) -> None:
        """Make the action's layer and record it."""
        store, watch = self.workspace.store, None
        self.progress.start(action.key, action.name)
        with self._verified(action), store.folder("work") as scratch:
            if action.kind == "image":
                (given,) = action.files
                layer = adopt_layer(store, self.files.path(given.sha256), given.sha256)
            else:
                layer, watch = self._write(action, scratch)
        store.save_layer(action.key, layer, {"name": action.name, "kind": action.kind, "tree": action.tree})
        self.progress.finish(action.key, f"{layer.blob.size / 1e6:.1f} MB, {layer.seconds:.1f} s")
        self.made(layer, watch)

    def _write(self, action: Action, scratch: Path) -> tuple[Layer, Watch | None]:
        left_out = NOTHING
        if action.kind == "kernels":
            kernels = self._kernels(action, scratch)
            entries, left_out = kernels.entries, kernels.left_out
        else:
            entries = list(self._entries(action, scratch))
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
        return replace(layer, left_out=left_out), watch

    def done(self, action: Action) -> bool:
        """Whether the action's outcome is in the store."""
        if action.makes_layer:
            return self.workspace.store.layer(action.key) is not None
        record = self.workspace.store.record("actions", action.key)
        return record is not None and self.files.has(record["wheel"]["sha256"], record["wheel"]["size"])

    def _entries(self, action: Action, scratch: Path) -> Iterator[Entry]:
        kinds: dict[str, Callable[[Action, Path], Iterator[Entry]]] = {
            "files": self._files,
            "wheels": self._wheels,
            "debs": self._debs,
            "turbo": self._turbo,
        }
        return kinds[action.kind](action, scratch)

    def _files(self, action: Action, scratch: Path) -> Iterator[Entry]:
        to = str(action.spec.get("to", "")).strip("/")
        for name, kind, value in action.tree:
            path = f"{to}/{name}" if to else name
            if kind == "link":
                yield Entry(path=path, kind="symlink", mode=0o777, link=value)
                continue
            source = Path(action.root) / name
            mode = 0o755 if kind == "exec" else 0o644
            yield Entry(path=path, mode=mode, size=_size(source), source=source, sha256=value)
        inline = action.spec.get("inline")
        if isinstance(inline, dict):
            yield from inline_entries(inline)

    def _debs(self, action: Action, scratch: Path) -> Iterator[Entry]:
        if "over" in action.spec:
            yield from over_entries(action.files, scratch, find=self._file)
            return
        mmdebstrap = need("mmdebstrap", "mmdebstrap", say=self.progress.say)
        yield from root_entries(
            action.files,
            str(action.spec["suite"]),
            scratch,
            find=self._file,
            mmdebstrap=str(mmdebstrap),
            log=self._log(action),
            kernels=cast("Mapping[str, Sequence[str]]", action.spec.get("kernels", {})),
        )

    def _kernels(self, action: Action, scratch: Path) -> KernelFiles:
        found = KernelFiles(arch=str(action.spec["arch"]))
        patterns = cast("Mapping[str, Sequence[str]]", action.spec["kernels"])
        for deb in action.files:
            found.take(self._file(deb), patterns[deb.name], scratch / deb.name)
        return found

    def _wheels(self, action: Action, scratch: Path) -> Iterator[Entry]:
        prefix = Prefix(root=str(action.spec["prefix"]), python=str(action.spec["python"]))
        entries: list[Entry] = []
        for file in self._read_by(action):
            entries += wheel_entries(self._file(file), file.file, prefix, action.spec.get("without", ()))  # type: ignore[arg-type]
        yield from entries
        yield from self._bytecode(action, prefix.site, entries, scratch)

    def _bytecode(self, action: Action, site: str, entries: list[Entry], scratch: Path) -> Iterator[Entry]:
        """Compile the modules among ``entries`` with the image's own interpreter."""

        script = self._own_code(action, "bytecode", BYTECODE, scratch)

        def run(inputs: Mapping[str, Path], out: Path, place: str) -> None:
            log = self._log(action)
            code = run_isolated(
                self.root(*action.tools),
                [f"/usr/bin/python{action.spec['python']}", "-I", "/compile.py", place],
                inputs={**inputs, "/compile.py": script},
                outputs=out,
                env={},
                log=log,
                engine=choose(self.engine, self.progress.say),
            )
            if code != 0:
                raise self._failed(f"compiling bytecode of {action.name}", code, log)

        yield from bytecode_entries(entries, site, scratch, run)

    def _turbo(self, action: Action, scratch: Path) -> Iterator[Entry]:
        """Compile Triton kernels in the image's own root file system, where no GPU is needed."""
        environment = action.spec["environment"]
        assert isinstance(environment, dict)
        out, log, sources = scratch / "out", self._log(action), scratch / "sources"
        for entry in self._files(action, scratch):
            (sources / entry.path).parent.mkdir(parents=True, exist_ok=True)
            with (sources / entry.path).open("wb") as copy:
                copy.writelines(entry.chunks())
        code = run_isolated(
            self.root(*action.tools),
            command_of(action),
            inputs={"/in/primus": sources},
            outputs=out,
            env={**environment, "PYTHONPATH": "/in", "PYTHONDONTWRITEBYTECODE": "1"},
            log=log,
            engine=choose(self.engine, self.progress.say),
        )
        if code != 0:
            raise self._failed(f"compiling {action.name}", code, log)
        for path in sorted(p for p in out.rglob("*") if p.is_file()):
            yield Entry(path=f"{BAKED}/{path.relative_to(out)}".lstrip("/"), size=path.stat().st_size, source=path)

    def _build(self, action: Action) -> None:
        """Source → wheel in the sandbox: no network, sources read-only, one wheel taken from what it leaves."""
        (source,) = action.files
        self.progress.start(action.key, action.name, None)
        log = self._log(action)
        with self._verified(action), self.workspace.store.folder("build") as scratch:
            out = scratch / "out"
            out.mkdir()
            inside = f"/in/{source.file}"
            code = run_isolated(
                self.root(*action.tools),
                ["/bin/sh", "-c", str(action.spec["script"]), "wheel", inside, str(action.spec["python"])],
                inputs={
                    inside: self._file(source),
                    "/in/order/sitecustomize.py": self._own_code(action, "sorted folders", ORDER, scratch),
                },
                outputs=out,
                env={**_build_env(action.job_bytes), **action.spec["environment"]},  # type: ignore[dict-item]
                log=log,
                engine=choose(self.engine, self.progress.say),
            )
            if code != 0:
                raise self._failed(action.name, code, log)
            wheels = [path for path in out.glob("*.whl") if path.is_file() and not path.is_symlink()]
            if len(wheels) != 1:
                names = ", ".join(sorted(w.name for w in wheels)) or "none"
                raise CheckFailed(f"{action.name} must leave one wheel, it left {names}", where=str(log))
            with wheels[0].open("rb") as stream:
                sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
            wheel = {"file": wheels[0].name, "sha256": sha256, "size": wheels[0].stat().st_size}
            self.files.put(wheels[0], sha256)
            record = {"name": action.name, "kind": action.kind, "wheel": wheel}
        self.workspace.store.save("actions", action.key, record)
        self.progress.finish(action.key, wheels[0].name)

    def _built(self, action: Action) -> Iterator[LockedFile]:
        for needed in action.needs:
            record = self.workspace.store.record("actions", needed.key)
            if record is None:
                raise HostError(f"{needed.name} has no result in the store", hint="build again")
            wheel = record["wheel"]
            yield LockedFile(kind="wheel", name=str(needed.spec["package"]), version="", **wheel)

    def root(self, *actions: Action) -> RootFs:
        """The root file system made of these actions' layers."""
        layers = [self._layer(action) for action in actions]
        return root_of_layers(self.workspace.store, self.workspace.unpacked, layers)

    def _layer(self, action: Action) -> Layer:
        layer = self.workspace.store.layer(action.key)
        if layer is None:
            raise HostError(f"the layer of {action.name} is not in the store", hint="build again")
        return layer

    def _read_by(self, action: Action) -> tuple[LockedFile, ...]:
        return (*action.files, *self._built(action)) if action.kind == "wheels" else action.files

    @contextlib.contextmanager
    def _verified(self, action: Action) -> Iterator[None]:
        """Verify the fetched files that the action reads, and afterwards that nobody has written to them meanwhile."""
        marks: dict[str, tuple[int, ...]] = {}
        for file in self._read_by(action):
            marks[file.sha256] = self.files.mark(file.sha256)
            self._verify(file)
        yield
        # apt compares each package of a root file system with its hash as it takes it, and links change its inode.
        if action.kind != "debs" or "over" in action.spec:
            for file in self._read_by(action):
                if self.files.mark(file.sha256) != marks[file.sha256]:
                    self._verify(file)

    def _verify(self, file: LockedFile) -> None:
        if not self.files.verify(file.sha256):
            self.files.drop(file.sha256)
            raise HostError(
                f"the fetched {file.file} is damaged: its bytes no longer hash to sha256:{file.sha256}",
                hint="it was removed from the file cache; build again to download it",
            )

    def _file(self, file: LockedFile) -> Path:
        return self.files.path(file.sha256)

    @staticmethod
    def _own_code(action: Action, name: str, path: Path, scratch: Path) -> Path:
        """A copy of a file of this package that runs in the sandbox: of the bytes whose hash is in the key."""
        data = path.read_bytes()
        if f"sha256:{hashlib.sha256(data).hexdigest()}" not in (i.value for i in action.inputs if i.name == name):
            raise CheckFailed(f"{path} changed while the build read it", hint="build again")
        copy = scratch / path.name
        copy.write_bytes(data)
        return copy

    def _log(self, action: Action) -> Path:
        folder = self.workspace.logs
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / f"{action.name.replace(' ', '-')}-{action.key[:12]}.log"
        self.progress.follow(action.key, log)
        return log

    def _failed(self, what: str, code: int, log: Path) -> CheckFailed | HostError:
        if full := disk_is_full(log, self.workspace.store.root):
            return full
        return CheckFailed(f"{what} ended with exit code {code}:\n{log_tail(log)}")


def _size(path: Path) -> int:
    """The size of a file of a tree; 0 when it has gone, which its hash tells."""
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


def _build_env(job_bytes: int) -> dict[str, str]:
    """The environment of every build; as many compilers as there are cores, and memory for."""
    (line,) = [m for m in Path("/proc/meminfo").read_text().splitlines() if m.startswith("MemAvailable:")]
    memory = 1024 * int(line.split()[1])
    jobs = str(max(1, min(len(os.sched_getaffinity(0)), memory // max(job_bytes, 1))))
    return {
        "CMAKE_BUILD_PARALLEL_LEVEL": jobs,
        "MAX_JOBS": jobs,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
        "PYTHONPATH": "/in/order",
    }
