"""Faults of stores and inputs, and a judge of what the engine makes of each: a sentence, and a
valid store.
"""

import contextlib
import gzip
import hashlib
import io
import json
import os
import shutil
import signal
import socket
import stat
import tarfile
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import yaml

from primus_images.cli.main import main
from primus_images.engine.pipeline import KINDS
from primus_images.engine.workshop import Workshop
from primus_images.errors import PrimusError
from primus_images.oci.layer import assembler
from primus_images.plan.action import Action, Input
from primus_images.plan.project import Project, Workspace
from primus_images.plan.resolve import resolve
from primus_images.plan.skeleton import BYTECODE as SCRIPT
from primus_images.progress import Progress
from primus_images.versions.lock import Lock, LockedFile, dumps
from project_kit import Kit, make_project

_PLANTED: dict[str, dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parent / "fixtures/hostile_inputs.yaml").read_text()
)
# Longer than any of this takes, even on a machine with other work; what waits for a pipe waits
# forever.
_HANG_S = 60
_MOST_CPU_S = 5.0
_MOST_WORDS = 3000


@dataclass(frozen=True)
class Fault:
    """One fault. ``make`` brings it about in a fresh copy of the project and returns what undoes
    it, if that takes more than restoring the project's files; ``codes`` are the exit codes that are
    right.
    """

    name: str
    make: Callable[[Kit], object]
    words: tuple[str, ...] = ("build", "demo")
    codes: frozenset[int] = frozenset((1, 2, 3))
    engine: Callable[[Path], str] | None = None


@dataclass(frozen=True)
class Answer:
    """What a command said, and what it cost."""

    code: int
    out: str
    err: str
    cpu: float
    wall: float


class Hang(BaseException):
    """The command did not end."""


def call(root: Path, words: Sequence[str]) -> Answer:
    """Run ``primus WORDS`` in this process; a crash is raised, a hang is a :class:`Hang`."""
    out, err = io.StringIO(), io.StringIO()
    before, cpu, wall = Path.cwd(), time.process_time(), time.monotonic()

    def stop(*_: object) -> None:
        raise Hang(f"still running after {_HANG_S} s")

    old = signal.signal(signal.SIGALRM, stop)
    signal.alarm(_HANG_S)
    os.chdir(root)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = main([*words])
            except SystemExit as ended:
                code = int(ended.code or 0)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
        os.chdir(before)
    return Answer(
        code, out.getvalue(), err.getvalue(), time.process_time() - cpu, time.monotonic() - wall
    )


class Bench:
    """A built project, and its digest; every fault works on a copy of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kit = make_project(folder / "clean")
        _based(self.kit)
        self.digest = self._digest(call(self.kit.root, ["build", "demo", "other"]))
        assert call(self.kit.root, ["plan", "based"]).code == 0
        # The state of a finished build is noted only when the files are older than the build.
        time.sleep(0.1)
        self._digest(call(self.kit.root, ["build", "demo", "other"]))
        call(self.kit.root, ["build", "demo"])

    @staticmethod
    def _digest(answer: Answer) -> str:
        assert answer.code == 0, answer.err
        return answer.out.split()[0]

    def judge(self, fault: Fault) -> tuple[str | None, float]:
        """What is wrong with the engine's answer to the fault (None: nothing), and the seconds it
        took.
        """
        root = self.folder / "case"
        shutil.copytree(self.kit.root, root, symlinks=True)
        try:
            if fault.engine:
                began = time.monotonic()
                return fault.engine(root) or None, time.monotonic() - began
            return self._judge(fault, Kit(root))
        except Exception as crash:  # noqa: BLE001  # the others are run all the same
            return f"it crashes: {crash!r:.300}", 0
        except Hang as hang:
            return str(hang), _HANG_S
        finally:
            _remove(root)

    def _judge(self, fault: Fault, kit: Kit) -> tuple[str | None, float]:
        fault.make(kit)
        answer = call(kit.root, fault.words)
        return self._wrong(fault, answer) or self._afterwards(kit), answer.wall

    def _wrong(self, fault: Fault, answer: Answer) -> str | None:
        if answer.code not in fault.codes:
            return f"exit code {answer.code}: {answer.err[-500:]}"
        if (
            answer.code == 0
            and fault.words[0] == "build"
            and answer.out.split()[:1] != [self.digest]
        ):
            return f"it built something else: {answer.out}"
        if answer.code and (wrong := no_sentence(answer.err)):
            return wrong
        return f"{answer.cpu:.1f} s" if answer.cpu > _MOST_CPU_S else None

    def _afterwards(self, kit: Kit) -> str | None:
        """The project's files as they were, the store as the fault left it: the clean image, and
        nothing damaged.
        """
        for path in self.kit.root.iterdir():
            if path.name != ".primus":
                _remove(kit.root / path.name)
                if path.is_dir():
                    shutil.copytree(path, kit.root / path.name, symlinks=True)
                else:
                    shutil.copy2(path, kit.root / path.name)
        answer = call(kit.root, ["build", "demo", "--rehash"])
        if answer.code:
            return f"afterwards, exit code {answer.code}: {answer.err[-500:]}"
        if answer.out.split() != [self.digest]:
            return f"afterwards another image: {answer.out}"
        return damage_in(kit.root / ".primus/store")


def no_sentence(text: str) -> str | None:
    """What is wrong with an error's text."""
    last = [line for line in text.splitlines() if line.startswith("primus ")]
    if "Traceback" in text or len(text) > _MOST_WORDS or len(last) != 1:
        return f"no sentence: {text[-600:]!r}"
    return None


def damage_in(store: Path) -> str | None:
    """Walk an OCI image layout as any reader would; what is wrong with it."""
    index = json.loads((store / "index.json").read_bytes())
    todo = [entry["digest"] for entry in index["manifests"]]
    for digest in todo:
        data = (store / "blobs/sha256" / digest.removeprefix("sha256:")).read_bytes()
        if f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
            return f"blob {digest} is damaged"
    for digest in list(todo):
        manifest = json.loads(
            (store / "blobs/sha256" / digest.removeprefix("sha256:")).read_bytes()
        )
        for entry in (manifest["config"], *manifest["layers"]):
            data = (store / "blobs/sha256" / entry["digest"].removeprefix("sha256:")).read_bytes()
            if (
                f"sha256:{hashlib.sha256(data).hexdigest()}" != entry["digest"]
                or len(data) != entry["size"]
            ):
                return f"blob {entry['digest']} is damaged"
    return None


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# -- damage to files --


def _edit(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(change(path.read_bytes()))


def _flipped(data: bytes) -> bytes:
    place = len(data) // 2
    return data[:place] + bytes([data[place] ^ 1 << 5]) + data[place + 1 :] if data else b"\1"


def _instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def _socket(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # the address has room for 108 bytes
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


_DAMAGES: Mapping[str, Callable[[Path], object]] = {
    "a bit in the middle": _edit(_flipped),
    "empty": _edit(lambda data: b""),
    "half": _edit(lambda data: data[: len(data) // 2]),
    "more bytes": _edit(lambda data: data + b"\0\xff more"),
    "gone": Path.unlink,
    "a folder": _instead(Path.mkdir),
    "a pipe": _instead(os.mkfifo),
    "a link to itself": _instead(lambda path: path.symlink_to(path.name)),
    "a link to /dev/zero": _instead(lambda path: path.symlink_to("/dev/zero")),
    "a list": _edit(lambda _: b"[[]]"),
    "many brackets": _edit(lambda _: b"[" * 200_000),
    "half a surrogate": _edit(lambda _: b'{"a": "\\ud800"}'),
}
_ANY, _INPUT, _READ = frozenset((0, 1, 2, 3)), frozenset((2,)), frozenset((2, 3))


def _stored() -> Iterator[Fault]:
    """Damage to each kind of file below .primus: the build repairs it or says what to do, and
    builds nothing else.
    """
    kinds = {
        "oci-layout": "store/oci-layout",
        "index": "store/index.json",
        "manifest": "manifest",
        "config": "config",
        "layer": "layer 0",
        "record of an action": "store/actions/*.json",
        "record of a target": "store/targets/demo.json",
        "lock file": "store/locks/index",
        "hashes of files": "cache/stats.json",
        "facts of the gates": "cache/gates/*.json",
    }
    for kind, pattern in kinds.items():
        for what, damage in _DAMAGES.items():
            yield Fault(
                f"store: {kind}, {what}", partial(_damage_stored, pattern, damage), codes=_ANY
            )
    yield Fault("store: lists of paths, gone", _drop_lists, codes=_ANY)
    yield Fault(
        "store: a pipe in tmp",
        lambda kit: os.mkfifo(kit.root / ".primus/store/tmp/x"),
        codes=frozenset((0,)),
    )
    for name in (
        "store/blobs",
        "store/actions",
        "store/targets",
        "store/tmp",
        "store/locks",
        "cache",
        "store",
        "",
    ):
        yield Fault(
            f"store: .primus/{name} is gone", partial(_drop_stored, name), codes=frozenset((0, 3))
        )


def _drop_stored(name: str, kit: Kit) -> None:
    _remove(kit.root / ".primus" / name)


def _damage_stored(pattern: str, damage: Callable[[Path], object], kit: Kit) -> None:
    work = kit.root / ".primus"
    damage(_stored_file(work, pattern))
    if "gates" in pattern:
        # They are asked when the image is judged again.
        (work / "store/targets/demo.json").unlink()


def _stored_file(work: Path, pattern: str) -> Path:
    if "*" in pattern or "/" in pattern:
        return sorted(work.glob(pattern))[0]
    store = work / "store"
    blobs = store / "blobs/sha256"
    entry = next(
        m for m in json.loads((store / "index.json").read_bytes())["manifests"] if "demo" in str(m)
    )
    manifest = blobs / entry["digest"].removeprefix("sha256:")
    if pattern == "manifest":
        return manifest
    data = json.loads(manifest.read_bytes())
    found = data["config"] if pattern == "config" else data["layers"][0]
    return blobs / str(found["digest"]).removeprefix("sha256:")


def _drop_lists(kit: Kit) -> None:
    for path in (kit.root / ".primus/store/blobs/sha256").iterdir():
        if path.read_bytes().startswith((b"dir ", b"file ")):
            path.unlink()


# -- the project's own files --

_BOMB = "a0: &a0 {k: 1, l: 2}\n" + "".join(
    f"a{n}: &a{n} {{k: *a{n - 1}, l: *a{n - 1}}}\n" for n in range(1, 40)
)
_YAML: Mapping[str, str] = {
    "an alias bomb": _BOMB,
    "a bomb of lists": "a0: &a0 [x, x]\n"
    + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40)),
    "a hundred thousand brackets": "[" * 100_000,
    "a hundred thousand braces": "{a: " * 100_000,
    "deep indentation": "".join(" " * n + "a:\n" for n in range(500)),
    "a hundred thousand keys": "".join(f"k{n}: 1\n" for n in range(100_000)),
    "three million characters": "# " + "x" * 3_000_000,
    **_PLANTED["YAML"],
}


def _damage(file: str, damage: Callable[[Path], object], kit: Kit) -> None:
    damage(kit.root / file)


def _write(file: str, text: str | bytes, kit: Kit) -> None:
    kit.write(file, text)


def _inputs() -> Iterator[Fault]:
    """What can be wrong with versions.yaml and a target's file."""
    for what, text in _YAML.items():
        yield Fault(f"YAML: {what}", partial(_write, "versions.yaml", text), codes=_INPUT)
    for file in ("versions.yaml", "images/demo.yaml"):
        for what, damage in _DAMAGES.items():
            make = partial(_damage, file, damage)
            # A flipped bit or a cut can leave a valid file that asks for another image.
            if any(word in what for word in ("bit", "half", "end")):
                yield Fault(
                    f"project: {file}, {what}",
                    make,
                    words=("plan", "demo"),
                    codes=frozenset((0, 2)),
                )
            else:
                yield Fault(f"project: {file}, {what}", make, codes=_READ)
    for what, (old, new) in _PLANTED["pins"].items():
        yield Fault(
            f"pins: {what}",
            lambda kit, old=old, new=new: kit.edit("versions.yaml", old, new),
            codes=frozenset((1, 2)),
        )


def _odd_name(name: bytes, kit: Kit) -> None:
    path = Path(os.fsdecode(os.fsencode(kit.root / "parts/alpha") + b"/" + name))
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"x")


def _trees() -> Iterator[Fault]:
    """What may not lie in a component's folder."""
    for what, name in _PLANTED["names"].items():
        yield Fault(f"names: {what}", partial(_odd_name, name.encode("latin-1")), codes=_INPUT)
    kinds: Mapping[str, Callable[[Path], object]] = {
        "a pipe": os.mkfifo,
        "a socket": _socket,
        "a device": lambda path: os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5)),
        "a link with a control character": lambda path: path.symlink_to("a\nb"),
        "a link that is not UTF-8": lambda path: path.symlink_to(os.fsdecode(b"\xff")),
    }
    for what, build in kinds.items():
        if what == "a device" and os.geteuid() != 0:
            continue
        yield Fault(
            f"special files: {what}", partial(_damage, "parts/alpha/thing", build), codes=_INPUT
        )

    def folder(kit: Kit) -> None:
        _remove(kit.root / "parts/alpha")
        os.mkfifo(kit.root / "parts/alpha")

    yield Fault("special files: a pipe for a folder", folder, codes=frozenset((2,)))

    def away(kit: Kit) -> None:
        _remove(kit.root / "parts/alpha")
        (kit.root / "parts/alpha").symlink_to("/etc/ssl")

    yield Fault("special files: a folder that is a link to elsewhere", away, codes=frozenset((2,)))


# -- locks --


def _based(kit: Kit) -> None:
    """A third target with a base image, a wheel and a lock. It is planned and not built, which
    needs no sandbox.
    """
    base = f"{{suite: trixie, python: 3.13.1, packages: [], image: tiny@sha256:{'a' * 64}}}"
    kit.edit("versions.yaml", "bases: {}\n", f"bases:\n  tiny: {base}\n")
    pin = "  demo-pkg: {name: Demo, pins: [{wheel: demo-pkg, version: 1.0, channel: pypi}]}\n"
    kit.write("versions.yaml", (kit.root / "versions.yaml").read_text() + pin)
    target = "description: Based\nchannels: [pypi]\nbase: tiny\ncomponents: [demo-pkg, alpha]\n"
    kit.write("images/based.yaml", target)
    layer, wheel = b"layer", b"wheel"
    files = (replace(_locked("layer", layer), name="tiny-01", base="tiny"), _locked("wheel", wheel))
    lock = Lock(
        target="based",
        channel="pypi",
        pins=resolve(Project(kit.root), "based").request.flat(),
        files=files,
    )
    kit.write("images/locks/pypi/based.json", dumps(lock))


def _locked(kind: Literal["layer", "wheel"], data: bytes) -> LockedFile:
    sha256 = hashlib.sha256(data).hexdigest()
    file = "demo_pkg-1.0-py3-none-any.whl" if kind == "wheel" else f"{sha256}.tar.gz"
    return LockedFile(
        kind=kind, name="demo-pkg", version="1.0", file=file, size=len(data), sha256=sha256
    )


_LOCK = "images/locks/pypi/based.json"


def _set_in_file(key: str, value: object, data: dict[str, Any]) -> None:
    data["files"][1][key] = value


def _locks() -> Iterator[Fault]:
    """Locks of a wrong shape."""

    def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[Kit], object]:
        def make(kit: Kit) -> None:
            data = json.loads((kit.root / _LOCK).read_bytes())
            change(data)
            kit.write(_LOCK, json.dumps(data))

        return make

    changes: dict[str, Callable[[dict[str, Any]], object]] = {}
    for key in ("generated", "format", "target", "channel", "pins", "files"):
        if key != "generated":
            changes[f"without {key}"] = lambda data, key=key: data.pop(key)
        for what, value in {"null": None, "a number": 3, "an object": {"a": {}}}.items():
            changes[f"{key} is {what}"] = lambda data, key=key, value=value: data.update(
                {key: value}
            )
    for key in ("kind", "name", "version", "file", "size", "sha256"):
        changes[f"a file without {key}"] = lambda data, key=key: data["files"][1].pop(key)
        for what, value in {"null": None, "a list": ["x"]}.items():
            changes[f"a file's {key} is {what}"] = partial(_set_in_file, key, value)
    for what, (key, value) in _PLANTED["locks"].items():
        changes[what] = partial(_set_in_file, key, value)
    changes["another format"] = lambda data: data.update(format=99)
    changes["another target"] = lambda data: data["pins"].update({"wheel demo-pkg": "2.0"})
    changes["no files"] = lambda data: data.update(files=[])
    words = ("plan", "based")
    for what, change in changes.items():
        # A size beyond any disk is only a number to a plan.
        codes = frozenset((0, 2)) if what == "a huge size" else _INPUT
        yield Fault(f"locks: {what}", changed(change), words=words, codes=codes)
    for what, damage in _DAMAGES.items():
        codes = frozenset((0, 2)) if "bit" in what else _READ
        yield Fault(
            f"locks: the file is damaged, {what}",
            partial(_damage, _LOCK, damage),
            words=words,
            codes=codes,
        )
    for what, text in _PLANTED["lock texts"].items():
        yield Fault(
            f"locks: {what}",
            partial(_write, _LOCK, text.encode("latin-1")),
            words=words,
            codes=_INPUT,
        )


# -- wheels and layers: through the same actions as a build, in a store of their own --

_PATHS = {
    **_PLANTED["paths"],
    "a very long name": "demo/" + "n" * 300,
    "a very long path": "d/" * 2500 + "x",
}
_INFO = "demo_pkg-1.0.dist-info"
_WHEEL = {
    f"{_INFO}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    f"{_INFO}/METADATA": b"Metadata-Version: 2.1\nName: demo_pkg\nVersion: 1.0\n",
    "demo/data.txt": b"data " * 1000,
    f"{_INFO}/RECORD": b"demo/data.txt,,\n",
}


def _zip(
    files: Mapping[str, bytes],
    change: Callable[[zipfile.ZipFile], object] = lambda _: None,
    drop: str = "",
) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            if name != drop:
                archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
        change(archive)
    return out.getvalue()


def _with(name: str, data: bytes = b"x", mode: int = 0, system: int = 3) -> bytes:
    def add(archive: zipfile.ZipFile) -> None:
        info = zipfile.ZipInfo("placeholder")
        info.filename = info.orig_filename = name
        info.external_attr, info.create_system = mode << 16, system
        archive.writestr(info, data)

    return _zip(_WHEEL, add)


def _patched(old: bytes, new: bytes) -> bytes:
    assert len(old) == len(new)
    return _zip(_WHEEL).replace(old, new)


def _lying(size: int) -> bytes:
    """A wheel whose directory says that a file has ``size`` bytes."""
    data = bytearray(_zip(_WHEEL))
    at = data.index(b"PK\1\2", data.index(b"PK\1\2"))
    while data[at + 46 : at + 59] != b"demo/data.txt":
        at = data.index(b"PK\1\2", at + 1)
    data[at + 24 : at + 28] = size.to_bytes(4, "little")
    return bytes(data)


def _wheels() -> Iterator[tuple[str, bytes]]:
    yield "no archive", b"hello"
    yield "empty", b""
    yield "only an end mark", b"PK\5\6" + bytes(18)
    yield "cut in half", _zip(_WHEEL)[: len(_zip(_WHEEL)) // 2]
    yield "without its end", _zip(_WHEEL)[:-10]
    yield "no WHEEL", _zip(_WHEEL, drop=f"{_INFO}/WHEEL")
    yield "no RECORD", _zip(_WHEEL, drop=f"{_INFO}/RECORD")
    yield "RECORD is no text", _zip({**_WHEEL, f"{_INFO}/RECORD": b"\xff\xfe\0"})
    for what, path in {**_PATHS, **_PLANTED["wheels"]}.items():
        yield what, _with(path)
    yield "a symbolic link", _with("demo/link", b"/etc/passwd", stat.S_IFLNK | 0o777)
    yield "a pipe", _with("demo/pipe", b"", stat.S_IFIFO | 0o644)
    yield "a device", _with("demo/device", b"", stat.S_IFCHR | 0o644)
    with warnings.catch_warnings(action="ignore"):
        twice = _with("demo/data.txt", b"other")
    yield "one path twice", twice
    for what, text in _PLANTED["entry points"].items():
        yield what, _with(f"{_INFO}/entry_points.txt", text.encode("latin-1"))
    yield "a bomb of zeros", _bomb_wheel()
    yield "a size of 4 GiB in the directory", _lying(0xFFFFFFF0)
    yield "a size too small in the directory", _lying(10)
    yield "a size too large in the directory", _lying(6000)
    yield (
        "an unknown compression",
        _patched(b"PK\1\2\x14\x03\x14\0\0\0\x08\0", b"PK\1\2\x14\x03\x14\0\0\0\x63\0"),
    )
    yield (
        "encrypted",
        _patched(b"PK\1\2\x14\x03\x14\0\0\0\x08\0", b"PK\1\2\x14\x03\x14\0\1\0\x08\0"),
    )


def _bomb_wheel() -> bytes:
    """A file whose few bytes stand for 200 MB: more than a hundred times as many, beyond what is
    free.
    """
    out = io.BytesIO(_zip(_WHEEL))
    with (
        zipfile.ZipFile(out, "a", zipfile.ZIP_DEFLATED) as archive,
        archive.open("demo/bomb", "w") as stream,
    ):
        for _ in range(200):
            stream.write(bytes(1 << 20))
    return out.getvalue()


def _tar(*members: tuple[str, bytes, bytes, str]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, kind, data, link in members:
            member = tarfile.TarInfo(name)
            member.type, member.size, member.linkname, member.mode = kind, len(data), link, 0o644
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


_FILE = ("etc/a", tarfile.REGTYPE, b"text", "")


def _layers() -> Iterator[tuple[str, bytes]]:
    def packed(*members: tuple[str, bytes, bytes, str]) -> bytes:
        return gzip.compress(_tar(_FILE, *members), mtime=0)

    good = packed()
    yield "no gzip", b"hello"
    yield "empty", b""
    yield "gzip of no tar", gzip.compress(b"hello" * 1000)
    yield "cut in half", good[: len(good) // 2]
    yield "cut in the tar", gzip.compress(_tar(("etc/a", tarfile.REGTYPE, b"x" * 5000, ""))[:2000])
    yield "noise behind it", good + b"noise"
    yield "a damaged sum", good[:-8] + bytes([good[-8] ^ 1]) + good[-7:]
    for what, path in _PATHS.items():
        yield what, packed((path, tarfile.REGTYPE, b"x", ""))
    yield "a path that is not UTF-8", packed(("etc/\udcff", tarfile.REGTYPE, b"x", ""))
    for what, (path, kind, text, link) in _PLANTED["layers"].items():
        yield what, packed((path, kind.encode(), text.encode(), link))
    out = io.BytesIO()
    with gzip.GzipFile(fileobj=out, mode="wb", mtime=0) as stream:
        member = tarfile.TarInfo("bomb")
        member.size = 200 << 20
        stream.write(member.tobuf())
        for _ in range(200):
            stream.write(bytes(1 << 20))
    yield "a bomb of zeros", out.getvalue()


def _archives() -> Iterator[Fault]:
    kinds: tuple[tuple[Literal["wheel", "layer"], Iterator[tuple[str, bytes]]], ...] = (
        ("wheel", _wheels()),
        ("layer", _layers()),
    )
    damages = ("a bit in the middle", "half", "empty", "gone", "a folder", "a pipe")
    for kind, archives in kinds:
        for what, data in archives:
            yield Fault(f"{kind}s: {what}", _nothing, engine=partial(_take, kind, data, None))
        for what in (*damages, "a link to /dev/zero"):
            take = partial(_take, kind, _good(kind), _DAMAGES[what])
            yield Fault(f"{kind}s: in the cache, {what}", _nothing, engine=take)


def _nothing(_: Kit) -> None:
    """The fault is in an archive."""


def _good(kind: str) -> bytes:
    return _zip(_WHEEL) if kind == "wheel" else gzip.compress(_tar(_FILE), mtime=0)


def _take(
    kind: Literal["wheel", "layer"],
    data: bytes,
    damage: Callable[[Path], object] | None,
    root: Path,
) -> str:
    """Let the engine take the archive into its store; what is wrong with the outcome."""
    workspace = Project(root).workspace
    workspace.store.prepare()
    clean = _made(workspace, kind, _good(kind), None)
    blobs = root / ".primus/store/blobs/sha256"
    before = sorted(path.name for path in blobs.iterdir())
    began = time.process_time()
    try:
        return f"it was taken: {_made(workspace, kind, data, damage)}"
    except PrimusError as error:
        if error.exit_code not in (1, 2, 3) or (wrong := no_sentence(f"primus build: {error}")):
            return wrong or f"exit code {error.exit_code}"
    if time.process_time() - began > _MOST_CPU_S:
        return "it took too long"
    if sorted(path.name for path in blobs.iterdir()) != before:
        return "it left something in the store"
    return "" if _made(workspace, kind, _good(kind), None) == clean else "afterwards another layer"


def _made(
    workspace: Workspace,
    kind: Literal["wheel", "layer"],
    data: bytes,
    damage: Callable[[Path], object] | None,
) -> str:
    """The digest of the layer that the action makes of ``data``, whose copy in the cache is damaged
    first.
    """
    file = _locked(kind, data)
    own = hashlib.sha256(SCRIPT.read_bytes()).hexdigest()
    action = Action(
        name="demo",
        kind="wheels" if kind == "wheel" else "image",
        inputs=(
            Input(name="assembler", value=assembler()),
            Input(name="bytecode", value=f"sha256:{own}"),
            Input(name="demo", value=file.sha256, where="versions.yaml:9:1"),
        ),
        spec={"prefix": "opt/venv", "python": "3.13"},
        files=(file,),
    )
    (workspace.store.root / f"actions/{action.key}.json").unlink(missing_ok=True)
    files = workspace.files
    files.drop(file.sha256)
    files.path(file.sha256).parent.mkdir(parents=True, exist_ok=True)
    files.path(file.sha256).write_bytes(data)
    if damage:
        damage(files.path(file.sha256))
    Workshop(workspace=workspace, progress=Progress()).run(action, KINDS[action.kind])
    layer = workspace.store.layer(action.key)
    assert layer is not None
    return layer.blob.digest


def faults() -> list[Fault]:
    """All of them."""
    return [*_stored(), *_inputs(), *_trees(), *_locks(), *_archives()]
