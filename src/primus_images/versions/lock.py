"""The lock: every file of a target with name, version, file name, size and sha256.

It names no host.

There is one committed file per target and channel, with one entry per line, so that a diff is a
list of changes.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from primus_images.errors import InputError
from primus_images.files import path_fault, read_bytes
from primus_images.schema import build, parse_json
from primus_images.yamlfile import Document, read_values

SUITES: Mapping[str, Mapping[str, Any]] = read_values(Path(__file__).with_name("suites.yaml")).data
# The architecture of every image, in the words of Debian and registries, and of the kernel.
ARCHITECTURE = "amd64"
MACHINE = "x86_64"

# The keys of a lock that have a line of their own before its pins.
_HEAD = ("generated", "format", "target", "channel")

Kind = Literal["wheel", "sdist", "git", "deb", "layer"]


@dataclass(frozen=True, kw_only=True)
class LockedFile:
    """One file. ``index`` is the index of versions.yaml that offers it, or None for pip's own.

    ``base`` names the root file system of a deb, a layer, or a wheel of a build; a wheel without
    one belongs to the image. ``name`` is normalized as in PEP 503 for Python packages. A ``layer``
    belongs to an image from a registry, and ``git`` is the archive of a commit.
    """

    kind: Kind
    name: str
    version: str
    file: str
    size: int
    sha256: str
    base: str | None = None
    index: str | None = None

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"{self.size} is not a size in bytes")
        fault = path_fault(self.file)
        if fault:
            raise ValueError(f"{self.file!r} is not a file name: {fault}")


class BaseRequest(NamedTuple):
    """What a base needs from an archive and a registry. ``packages`` may contain ``name/suite``.

    ``over`` names the base of an extra. The lock then contains only the packages that this base
    does not have.
    """

    suite: str
    python: str
    packages: tuple[str, ...]
    image: str | None = None
    over: str | None = None


class Commit(NamedTuple):
    """A commit of a repository, and the version of its package."""

    url: str
    commit: str
    version: str

    def file_of(self, package: str) -> str:
        """Return the name of the commit's archive."""
        return f"{package}-{self.commit}.tar"


# Files of bases and commits, so that targets that are locked together resolve each of them once.
Shared = dict[BaseRequest | Commit, tuple[LockedFile, ...]]


@dataclass(frozen=True, kw_only=True)
class Request:
    """The input of a lock: what one target needs from the sources.

    ``python`` is the minor version of its base. ``wheels`` and ``sdists`` map normalized names of
    packages to exact versions; an empty version of a wheel stands for what fits. ``debs`` maps
    names of the base's packages to upstream versions. ``pure`` names wheels for any platform.
    ``bases`` contains the target's own base, its extras and the root file systems of its builds.
    ``builds`` are the wheels in these (``NAME``, of the image's version, or ``NAME==VERSION``).
    ``indexes`` are the channel's own (name → address), ``indexed`` the packages that must come from
    them.
    """

    target: str
    channel: str
    python: str
    bases: Mapping[str, BaseRequest] = field(default_factory=dict)
    wheels: Mapping[str, str] = field(default_factory=dict)
    sdists: Mapping[str, str] = field(default_factory=dict)
    debs: Mapping[str, str] = field(default_factory=dict)
    pure: tuple[str, ...] = ()
    builds: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gits: Mapping[str, Commit] = field(default_factory=dict)
    indexes: Mapping[str, str] = field(default_factory=dict)
    indexed: frozenset[str] = frozenset()

    @property
    def asks(self) -> bool:
        """Whether there is anything to lock. A target of local folders has no lock."""
        return bool(self.bases or self.wheels or self.sdists or self.gits)

    @property
    def provided(self) -> dict[str, str]:
        """Python packages that come from the base or are built here → their versions for pip."""
        versions: dict[str, str] = {}
        for name, version in self.debs.items():
            if name.startswith("python3-"):
                versions[name.removeprefix("python3-")] = f"{version}+debian"
        commits = {name: commit.version for name, commit in self.gits.items()}
        for name, version in {**self.sdists, **commits}.items():
            versions[name] = version if "+" in version else f"{version}+built"
        return versions

    def flat(self) -> dict[str, str]:
        """Return the request as pin → text. The lock stores it, and :func:`drift` compares it."""
        pins = {"architecture": ARCHITECTURE, "python": self.python}
        for name, base in self.bases.items():
            pins[f"base {name} suite"] = base.suite
            pins[f"base {name} python"] = base.python
            pins[f"base {name} packages"] = " ".join(sorted(base.packages))
            if base.image:
                pins[f"base {name} image"] = base.image
        for name, version in self.wheels.items():
            pins[f"wheel {name}"] = version or "what fits"
        for name in self.pure:
            pins[f"wheel {name} platform"] = "any"
        for name, wheels in self.builds.items():
            pins[f"build {name} wheels"] = " ".join(sorted(wheels))
        for name, version in self.debs.items():
            pins[f"deb {name}"] = version
        for name, version in self.sdists.items():
            pins[f"sdist {name}"] = version
        for name, commit in self.gits.items():
            pins[f"git {name}"] = f"{commit.version} {commit.commit}"
        return dict(sorted(pins.items()))


@dataclass(frozen=True, kw_only=True)
class Lock:
    """A resolved request: ``pins`` is the request, ``files`` the result by kind and name."""

    generated: str = field(default="by `primus lock`; do not edit", compare=False)
    format: int = 1
    target: str
    channel: str
    pins: Mapping[str, str]
    files: tuple[LockedFile, ...]

    @property
    def distinct(self) -> tuple[LockedFile, ...]:
        """Return each file once. The root file system of a build repeats the base's packages."""
        return tuple({f.sha256: f for f in self.files}.values())

    def of(self, kind: Kind, base: str | None = None) -> tuple[LockedFile, ...]:
        """Return the files of one kind: those of ``base``, or Python packages of the image."""
        return tuple(f for f in self.files if f.kind == kind and f.base == base)

    @property
    def python_packages(self) -> tuple[LockedFile, ...]:
        """Return the image's wheels, and the sources that are built to wheels."""
        return (*self.of("wheel"), *self.of("sdist"), *self.of("git"))


class Drift(NamedTuple):
    """One pin on which versions.yaml and the lock differ; None means absent.

    ``locked`` is the pin's file if that differs.
    """

    pin: str
    locked: str | None
    wanted: str | None

    def __str__(self) -> str:
        return f"{self.pin}: locked {self.locked or 'nothing'}, wanted {self.wanted or 'nothing'}"


def normalised(name: str) -> str:
    """Normalize the name of a Python package as PEP 503 does."""
    return re.sub(r"[-_.]+", "-", name).lower()


def name_of(package: str) -> str:
    """Return the package of an entry: ``librccl1/experimental`` → ``librccl1``."""
    return package.partition("/")[0]


def suites_of(suite: str, packages: Sequence[str]) -> tuple[str, ...]:
    """Return the base's own suite, then those that its packages name."""
    named = [package.partition("/")[2] for package in packages]
    return tuple(dict.fromkeys([suite, *filter(None, named)]))


def upstream(version: str) -> str:
    """Return the upstream part of a Debian version: ``1:3.11.2-6+deb12u9`` → ``3.11.2``."""
    bare = version.partition(":")[2] or version
    return re.split(r"[+~]", bare.rpartition("-")[0] or bare)[0]


def drift(lock: Lock, request: Request) -> tuple[Drift, ...]:
    """Return the pins that the lock, or the files in it, do not match; empty if all match."""
    wanted = {**request.flat(), "target": request.target, "channel": request.channel}
    locked: dict[str, str] = {**lock.pins, "target": lock.target, "channel": lock.channel}
    for pin, file in _misfits(lock, request):
        if locked.get(pin) == wanted[pin]:
            locked[pin] = file
    return tuple(
        Drift(pin=pin, locked=locked.get(pin), wanted=wanted.get(pin))
        for pin in sorted({*wanted, *locked})
        if locked.get(pin) != wanted.get(pin)
    )


def _misfits(lock: Lock, request: Request) -> Iterator[tuple[str, str]]:
    """Yield each pin that no file fulfills, as after a merge, and what the lock has instead."""
    for root, base in request.bases.items():
        if not base.over and not lock.of("layer" if base.image else "deb", root):
            yield f"base {root} packages", f"no file of {root}"
    files = {f"{file.kind} {file.name}": file for file in lock.files if file.base is None}
    for pin, identity in _identities(request).items():
        file = files.get(pin)
        if file is None:
            yield pin, f"no file of {pin.partition(' ')[2]}"
        elif identity not in ("", file.version, file.file):
            yield pin, file.file


def _identities(request: Request) -> dict[str, str]:
    """Return pin of a Python package → the version, or file name, that its file has; empty: any."""
    identities: dict[str, str] = {}
    for name, version in request.wheels.items():
        if name not in request.provided:
            identities[f"wheel {name}"] = version
    for name, version in request.sdists.items():
        identities[f"sdist {name}"] = version
    for name, commit in request.gits.items():
        identities[f"git {name}"] = commit.file_of(name)
    return identities


def dumps(lock: Lock) -> str:
    """Return the text of the lock: JSON with one pin and one file per line."""
    head = [f"{_json(key)}: {_json(getattr(lock, key))}" for key in _HEAD]
    pins = [f"    {_json(pin)}: {_json(text)}" for pin, text in sorted(lock.pins.items())]
    files = []
    for file in sorted(lock.files, key=file_order):
        stated = {key: value for key, value in asdict(file).items() if value is not None}
        files.append(f"    {_json(stated)}")
    parts = [
        *(f"  {line}" for line in head),
        '  "pins": {\n' + ",\n".join(pins) + "\n  }",
        '  "files": [\n' + ",\n".join(files) + "\n  ]",
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def file_order(file: LockedFile) -> tuple[str, str, str]:
    """Return what tells the files of a lock apart, and sorts them."""
    return file.kind, file.base or "", file.name


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def loads(text: str | bytes, name: str) -> Lock:
    """Parse a lock. ``name`` is the file's name in the messages of InputError."""
    try:
        return _parsed(parse_json(text, name))
    except InputError as error:
        # `primus lock` reads the lock that it replaces, so it also refuses a damaged one.
        raise InputError(
            f"not a lock: {error.message}",
            where=error.where,
            hint="restore it from version control, or delete it and run `primus lock`",
        ) from None


def _parsed(document: Document) -> Lock:
    if isinstance(document.data, dict) and document.data.get("format") != Lock.format:
        number = document.data.get("format")
        raise InputError(
            f"its format {number} is not {Lock.format}", where=document.where(("format",))
        )
    lock = build(Lock, document)
    listed = set[tuple[str, str, str]]()
    for index, file in enumerate(lock.files):
        if file_order(file) in listed:
            raise InputError(
                f"the {file.kind} {file.name} is listed twice",
                where=document.where(("files", index)),
            )
        listed.add(file_order(file))
    return lock


def load(path: Path, name: str | None = None) -> Lock | None:
    """Return the lock at ``path``, or None if it does not exist."""
    try:
        return loads(read_bytes(path, name), name or str(path))
    except FileNotFoundError:
        return None
