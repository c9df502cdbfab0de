"""The lock: every file of a target with name, version, file name, size and sha256, but without host
names.

There is one committed file per target and channel, with one entry per line, so that a diff is a
list of changes.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from primus_images.errors import InputError
from primus_images.files import path_fault, read_bytes
from primus_images.schema import build, parse_json
from primus_images.yamlfile import read_values

SUITES: Mapping[str, Mapping[str, Any]] = read_values(Path(__file__).with_name("suites.yaml")).data
# The architecture of every image, as Debian and registries call it, and as the kernel and wheels
# do.
ARCHITECTURE = "amd64"
MACHINE = "x86_64"

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


# Files of bases and commits, so that targets that are locked together resolve each of them once.
Shared = dict[BaseRequest | Commit, tuple[LockedFile, ...]]


@dataclass(frozen=True, kw_only=True)
class Request:
    """The input of a lock: what one target needs from the sources. ``python`` is the minor version
    of its base.

    ``wheels`` and ``sdists`` map normalized package names to exact versions (wheels also to an
    empty one: what fits), and ``debs`` maps names of the base's packages to upstream versions.
    ``pure`` names wheels for any platform. ``bases`` contains the target's own base, its extras and
    the root file systems of its builds; ``builds`` the wheels in these (``NAME``, of the image's
    version, or ``NAME==VERSION``). ``indexes`` are the channel's own (name → address), ``indexed``
    the packages that must come from them.
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
        """Whether there is anything to lock. A target that consists of local folders has no lock."""
        return bool(self.bases or self.wheels or self.sdists or self.gits)

    @property
    def provided(self) -> dict[str, str]:
        """Python packages that come from the base or are built here, with versions as pip compares
        them.
        """
        names = {
            name: version for name, version in self.debs.items() if name.startswith("python3-")
        }
        brought = {
            name.removeprefix("python3-"): f"{version}+debian" for name, version in names.items()
        }
        built = {**self.sdists, **{name: commit.version for name, commit in self.gits.items()}}
        return brought | {
            name: version if "+" in version else f"{version}+built"
            for name, version in built.items()
        }

    def flat(self) -> dict[str, str]:
        """Return the request as one flat mapping, which the lock stores and in which changes are
        detected.
        """
        result = {"architecture": ARCHITECTURE, "python": self.python}
        for name, base in self.bases.items():
            result[f"base {name} suite"] = base.suite
            result[f"base {name} python"] = base.python
            result[f"base {name} packages"] = " ".join(sorted(base.packages))
            if base.image:
                result[f"base {name} image"] = base.image
        result |= {f"wheel {name}": version or "what fits" for name, version in self.wheels.items()}
        result |= {f"wheel {name} platform": "any" for name in self.pure}
        result |= {
            f"build {name} wheels": " ".join(sorted(wheels)) for name, wheels in self.builds.items()
        }
        result |= {f"deb {name}": version for name, version in self.debs.items()}
        result |= {f"sdist {name}": version for name, version in self.sdists.items()}
        result |= {
            f"git {name}": f"{commit.version} {commit.commit}" for name, commit in self.gits.items()
        }
        return dict(sorted(result.items()))


@dataclass(frozen=True, kw_only=True)
class Lock:
    """A resolved request. ``pins`` is the request, ``files`` the result, sorted by kind and name."""

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
        """Return the Python packages of the image: its wheels, and the sources that are built to
        wheels.
        """
        return (*self.of("wheel"), *self.of("sdist"), *self.of("git"))


class Drift(NamedTuple):
    """One pin on which versions.yaml and the lock differ; None means absent. ``locked`` is its file
    if that differs.
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
    return tuple(dict.fromkeys((suite, *(s for p in packages if (s := p.partition("/")[2])))))


def upstream(version: str) -> str:
    """Return the upstream part of a Debian version: ``1:3.11.2-6+deb12u9`` → ``3.11.2``."""
    bare = version.partition(":")[2] or version
    return re.split(r"[+~]", bare.rpartition("-")[0] or bare)[0]


def drift(lock: Lock, request: Request) -> tuple[Drift, ...]:
    """Return where the lock, its pins or the files of pinned packages, does not match the request;
    empty if it does.
    """
    pins = {**request.flat(), "target": request.target, "channel": request.channel}
    locked: dict[str, str] = {**lock.pins, "target": lock.target, "channel": lock.channel}
    locked |= {pin: file for pin, file in _misfits(lock, request) if locked.get(pin) == pins[pin]}
    names = sorted({*pins, *locked})
    return tuple(
        Drift(pin=n, locked=locked.get(n), wanted=pins.get(n))
        for n in names
        if locked.get(n) != pins.get(n)
    )


def _misfits(lock: Lock, request: Request) -> Iterator[tuple[str, str]]:
    """Yield each pin of a Python package or base that no file fulfills, as after a merge, and what
    the lock has.
    """
    files = {(f.kind, f.base, f.name): f for f in lock.files}
    asked: list[tuple[str, tuple[Kind, str | None, str], str]] = [
        *(
            (f"wheel {n}", ("wheel", None, n), v)
            for n, v in request.wheels.items()
            if n not in request.provided
        ),
        *((f"sdist {n}", ("sdist", None, n), v) for n, v in request.sdists.items()),
        *(
            (f"git {n}", ("git", None, n), f"{c.version} {n}-{c.commit}.tar")
            for n, c in request.gits.items()
        ),
    ]
    for root, words in (
        (root, wheel.partition("==")) for root, wheels in request.builds.items() for wheel in wheels
    ):
        asked.append((f"build {root} wheels", ("wheel", root, normalised(words[0])), words[2]))
    for root, base in request.bases.items():
        if not base.over and not lock.of("layer" if base.image else "deb", root):
            yield f"base {root} packages", f"no file of {root}"
    for pin, key, text in asked:
        file = files.get(key)
        if file is None or text not in ("", file.version, f"{file.version} {file.file}"):
            yield pin, file.file if file else f"no file of {key[2]}"


def dumps(lock: Lock) -> str:
    """Return the text of the lock: JSON with one pin and one file per line."""

    line = partial(json.dumps, ensure_ascii=False)
    order = sorted(lock.files, key=lambda f: (f.kind, f.base or "", f.name))
    pins = ",\n".join(f"    {line(k)}: {line(v)}" for k, v in sorted(lock.pins.items()))
    files = ",\n".join(
        "    " + line({k: v for k, v in asdict(f).items() if v is not None}) for f in order
    )
    top = ",\n".join(
        f'  "{k}": {line(getattr(lock, k))}' for k in ("generated", "format", "target", "channel")
    )
    return f'{{\n{top},\n  "pins": {{\n{pins}\n  }},\n  "files": [\n{files}\n  ]\n}}\n'


def loads(text: str | bytes, name: str) -> Lock:
    """Parse a lock; ``name`` is the file's name in messages. Raises InputError if the text is not a
    lock.
    """
    try:
        document = parse_json(text, name)
        if (
            isinstance(document.data, dict)
            and (number := document.data.get("format")) != Lock.format
        ):
            raise InputError(
                f"its format {number} is not {Lock.format}", where=document.where(("format",))
            )
        lock = build(Lock, document)
        seen: set[tuple[str, str | None, str]] = set()
        for index, file in enumerate(lock.files):
            entry = (file.kind, file.base, file.name)
            if entry in seen:
                raise InputError(
                    f"the {file.kind} {file.name} is listed twice",
                    where=document.where(("files", index)),
                )
            seen.add(entry)
        return lock
    except InputError as error:
        # `primus lock` reads the lock that it replaces, so it also refuses a damaged one.
        raise InputError(
            f"not a lock: {error.message}",
            where=error.where,
            hint="restore it from version control, or delete it and run `primus lock`",
        ) from None


def load(path: Path, name: str | None = None) -> Lock | None:
    """Return the lock at ``path``, or None if it does not exist."""
    try:
        return loads(read_bytes(path, name), name or str(path))
    except FileNotFoundError:
        return None
