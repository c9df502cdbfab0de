"""Wheels and sdists: the files that match the pins, found by uv on the indexes of the host's pip configuration."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version
from uv import find_uv_bin

from primus.errors import HostError, InputError
from primus.progress import Progress
from primus.terminal import counted
from primus.versions.indexes import Indexes
from primus.versions.lock import GLIBC, MACHINE, BaseRequest, Kind, LockedFile, Request
from primus.versions.traffic import bare_url, run_tool

# The newest glibc 2 that uv knows.
_NEWEST_GLIBC = 40


@dataclass(frozen=True, kw_only=True)
class Offer:
    """One file of an index. ``sha256`` and ``size`` are None if the index does not state them."""

    file: str
    url: str
    sha256: str | None
    size: int | None


class NoSolutionError(Exception):
    """No set of versions fits. The message is uv's explanation."""


def resolve_wheels(request: Request, *, progress: Progress, keep: Mapping[str, str]) -> tuple[LockedFile, ...]:
    """Return the pinned wheels and all dependencies. ``keep`` maps names to preferred versions.

    Raises InputError if no set of versions fits, HostError if an index does not answer.
    """
    if not request.wheels and not request.requires:
        return ()
    progress.start("wheels", "resolve wheels", unit="files")
    pins = [f"{name}=={version}" for name, version in request.wheels.items()]
    pins += [name for name in request.requires if name not in request.wheels]
    files = _locked(request, pins, keep=keep)
    for file in files:
        if file.version != (pinned := request.wheels.get(file.name, file.version)):
            raise InputError(
                f"{file.name} is pinned to {pinned}, but the index offers {file.version}",
                hint=f"pin {file.version} if that is the intended version",
            )
    progress.finish("wheels", counted(len(files), "wheel"))
    return files


def resolve_build(
    request: Request,
    root: str,
    wheels: Sequence[str],
    *,
    image: Mapping[str, str],
    keep: Mapping[str, str],
    progress: Progress,
) -> tuple[LockedFile, ...]:
    """Return the wheels of the build root ``root`` and all dependencies, in the versions of ``image`` if it has them.

    ``keep`` maps names to preferred versions. Raises InputError for a name without a version that the image does
    not have, and if the build's own packages do not fit the image's versions.
    """
    progress.start(root, f"resolve wheels of {root}", unit="files")
    pins: dict[str, str] = {}
    for wheel in wheels:
        name, _, version = wheel.partition("==")
        name = canonicalize_name(name)
        if not version and name not in image:
            raise InputError(f"{root}: the image has no {wheel}", hint=f"name a version: {wheel}==VERSION")
        pins[name] = f"{name}=={version or image[name]}"
    constraints = [f"{name}=={version}" for name, version in image.items() if name not in pins]
    files = _locked(request, list(pins.values()), constraints=constraints, keep=keep)
    progress.finish(root, counted(len(files), "wheel"))
    return tuple(replace(file, base=root) for file in files)


def resolve_sdists(request: Request, *, progress: Progress) -> tuple[LockedFile, ...]:
    """Return the source archive of each sdist pin. Its dependencies are pinned separately."""
    if not request.sdists:
        return ()
    progress.start("sdists", "find source archives", unit="files")
    files = tuple(_sdist(name, version, request) for name, version in request.sdists.items())
    progress.finish("sdists", counted(len(files), "source archive"))
    return files


def offered(name: str, request: Request, kind: str) -> set[Version]:
    """Return the versions of a package (``kind`` wheel or sdist) that work on the target's base.

    Raises HostError if an index does not answer.
    """
    tags, versions = _tags(request), set()
    for place in _own(request).values() if name in request.indexed else [Indexes.of_host()]:
        for file, needs in place.files(name):
            with contextlib.suppress(InvalidVersion, InvalidWheelFilename, InvalidSdistFilename, InvalidSpecifier):
                if kind == "wheel":
                    package, version, _, own = parse_wheel_filename(file)
                    fits = not tags.keys().isdisjoint(own)
                else:
                    (package, version), fits = parse_sdist_filename(file), True
                if package == name and fits and SpecifierSet(needs).contains(_base(request).python):
                    versions.add(version)
    return versions


def fits_together(request: Request, loose: Collection[str]) -> dict[str, str] | None:
    """Return the versions of all wheels if the request can be fulfilled, else None.

    Those named in ``loose`` may be newer. Raises HostError if an index does not answer.
    """
    pins = [f"{name}{'>=' if name in loose else '=='}{version}" for name, version in request.wheels.items()]
    try:
        packages = _Uv.of(request).resolve([*pins, *request.requires])
    except NoSolutionError:
        return None
    return {package["name"]: package["version"] for package in packages}


def locate(
    files: Sequence[LockedFile], indexes: Indexes, pythons: Collection[str], names: Mapping[str, str]
) -> Iterator[Offer]:
    """Yield the places that offer the locked files, by name; some may be missing, or have other bytes.

    ``pythons`` are the versions of Python that the files are for, ``names`` the indexes of versions.yaml. Raises
    HostError if a file is missing and an index does not answer.
    """
    platforms = [["--universal", "--python-version", python] for python in sorted(pythons)] or [["--universal"]]
    missing = {file.file: file for file in files}
    failures: list[HostError] = []
    # uv takes a version from the first index that has it, and nothing if one version is nowhere.
    for place in dict.fromkeys((indexes, *indexes.places)):
        groups = [[*missing.values()], *([file] for file in missing.values())]
        for group, platform in itertools.product(groups, platforms):
            pins = [(file.name, file.version) for file in group if file.file in missing]
            packages: list[dict[str, Any]] = []
            try:
                packages = _Uv(place, platform, names=names).find(pins) if pins else []
            except NoSolutionError:
                continue
            except HostError as error:
                failures.append(error)
                break
            for offer in (file for package in packages for file in _offers(package) if file.file in missing):
                if offer.sha256 == missing[offer.file].sha256:
                    del missing[offer.file]
                yield offer
    if missing and failures:
        raise failures[0]


@dataclass(frozen=True)
class _Uv:
    """``uv pip compile`` for one platform, on some indexes."""

    indexes: Indexes
    platform: Sequence[str]
    provided: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, request: Request) -> _Uv:
        """Return uv on the indexes of this host and of the request's channel."""
        host = Indexes.of_host()
        indexes = replace(host, urls=(*host.urls, *request.indexes.values()))
        return cls(indexes, _platform(request), request.provided, request.indexes)

    def resolve(
        self, requirements: Sequence[str], constraints: Sequence[str] = (), keep: Mapping[str, str] | None = None
    ) -> list[dict[str, Any]]:
        """Return the packages of a ``pylock.toml`` with all dependencies, as wheels. ``keep`` prefers versions.

        Raises NoSolutionError, or HostError if an index does not answer.
        """
        with tempfile.TemporaryDirectory(prefix="primus-uv-") as name:
            folder = Path(name)
            rows = [f"[[packages]]\n{_row(n, v)}" for n, v in (keep or {}).items()]
            if rows:
                locked = "\n".join(['lock-version = "1.0"', 'created-by = "primus"', *rows])
                (folder / "pylock.toml").write_text(locked, encoding="utf-8")
            (folder / "constraints.txt").write_text("\n".join(constraints), encoding="utf-8")
            words = ["--output-file", "pylock.toml", "--only-binary", ":all:", "--constraints", "constraints.txt"]
            for place in self.indexes.constraints:
                words += ["--constraints", str(Path(place).absolute())]
            self._run(folder, [*requirements, *self._provide(folder / "provided")], words)
            packages: list[dict[str, Any]] = tomllib.loads((folder / "pylock.toml").read_text()).get("packages", [])
            return packages

    def find(self, pins: Sequence[tuple[str, str]], *words: str) -> list[dict[str, Any]]:
        """Return the packages with exactly these names and versions, without reading metadata."""
        packages: list[dict[str, Any]] = tomllib.loads(self._find(pins, *words)).get("packages", [])
        return packages

    def index_of(self, pins: Sequence[tuple[str, str]]) -> dict[str, str]:
        """Return package → address of the index from which it comes."""
        text = self._find(pins, "--format", "requirements.txt", "--emit-index-annotation")
        return dict(re.findall(r"^([^=\s]+)==\S+\n(?: +#.*\n)*? +# from (\S+)$", text, re.M))

    def _find(self, pins: Sequence[tuple[str, str]], *words: str) -> str:
        with tempfile.TemporaryDirectory(prefix="primus-uv-") as name:
            metadata = [f"[[dependency-metadata]]\n{_row(*pin)}requires-dist = []\n" for pin in pins]
            return self._run(Path(name), ["==".join(pin) for pin in pins], ["--no-deps", *words], "".join(metadata))

    def _run(self, folder: Path, requirements: Sequence[str], words: Sequence[str], settings: str = "") -> str:
        # The settings may contain credentials, so only this user can read them.
        indexes = self.indexes
        if self.provided:
            indexes = replace(indexes, find_links=(*indexes.find_links, str(folder / "provided")))
        (folder / "uv.toml").touch(0o600)
        (folder / "uv.toml").write_text(indexes.uv_settings() + settings, encoding="utf-8")
        (folder / "pins.in").write_text("\n".join(requirements), encoding="utf-8")
        command = [find_uv_bin(), "pip", "compile", "pins.in", "--config-file", "uv.toml", "--python", sys.executable]
        command += ["--no-header", "--quiet", "--refresh", *self.platform, *words]
        if "--format" not in words:
            command += ["--format", "pylock.toml"]
        package = re.split("[=<>!~ ]", requirements[0])[0]
        where = " ".join(self.indexes.shown)
        done = run_tool(command, where, f"compile {package} on", cwd=folder, env=indexes.uv_environment(), text=True)
        if done.returncode == 0:
            return str(done.stdout)
        error = failure(done.stderr, self.names)
        if isinstance(error, NoSolutionError):
            indexes.require_login(package)
        raise error

    def _provide(self, folder: Path) -> list[str]:
        # Without these empty wheels, a dependency on torch would add the index's build of it, beside the base's own.
        folder.mkdir()
        for name, version in self.provided.items():
            stem = f"{name.replace('-', '_')}-{version}"
            with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
                about = f"{stem}.dist-info"
                wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
                wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
                wheel.writestr(f"{about}/RECORD", "")
        return [f"{name}=={version}" for name, version in self.provided.items()]


def failure(text: str, names: Mapping[str, str]) -> NoSolutionError | HostError | InputError:
    """Return the error for what uv writes when it fails. ``names`` are the indexes of versions.yaml."""
    text = re.sub(r"\n {3,}", " ", text)
    causes = [" ".join(line.split()) for line in re.findall(r"^ +cause: (.*)$", text, re.M)]
    url = re.search(r"Failed to fetch: `?(https?://[^\s`]+)", text)
    if url is None and "No solution found" in text:
        return NoSolutionError(" ".join(causes))
    if url is None:
        reason = " ".join([*re.findall(r"^error: (.*)$", text, re.M), *causes]) or "no reason given"
        return InputError(f"uv cannot resolve the Python packages: {reason}")
    address = bare_url(url[1])
    name = next((name for name, index in names.items() if address.startswith(bare_url(index).rstrip("/"))), None)
    if name is not None:
        place, hint = f"the index {name} ({bare_url(names[name])})", "use another channel (--channel)"
    else:
        place, hint = f"the Python index at {address}", "point pip at a mirror (pip config set global.index-url URL)"
    reason = re.sub(r" for url .*", "", (causes or [text.strip()])[-1])
    about = address.rstrip("/").rpartition("/")[2]
    return HostError(f"{place} does not answer: {reason}", hint=f"check the network, or {hint}", about=about)


def unsolvable(error: NoSolutionError, urls: Sequence[str]) -> InputError:
    """Return the error for pins that no set of files of the indexes ``urls`` fulfills."""
    pinned = re.search(r"you require ([^\s=]+)==", str(error))
    return InputError(
        f"the pins do not fit the Python indexes of this host ({', '.join(urls)}): "
        + str(error).removeprefix("Because ").partition(", we can conclude that your")[0],
        hint="correct a pin in versions.yaml, or check that pip's index-url, extra-index-url and find-links, or "
        "`indexes` in versions.yaml, reach its channel",
        about=pinned[1] if pinned else None,
    )


def _own(request: Request) -> dict[str | None, Indexes]:
    return {name: Indexes.of_host().only(url) for name, url in request.indexes.items()}


def _places_with(
    places: Mapping[str | None, Indexes], name: str, version: str, request: Request, without: str
) -> Iterator[tuple[str | None, dict[str, Any]]]:
    for index, place in places.items():
        with contextlib.suppress(NoSolutionError):
            uv = _Uv(place, _platform(request), names=request.indexes)
            yield index, uv.find([(name, version)], without, ":all:")[0]


def _sdist(name: str, version: str, request: Request) -> LockedFile:
    host = Indexes.of_host()
    places: Mapping[str | None, Indexes] = _own(request) if name in request.indexed else {None: host}
    for index, package in _places_with(places, name, version, request, "--no-binary"):
        (offer,) = _offers({**package, "wheels": []})
        return _measured("sdist", name, version, offer, index, host)
    absent = NoSolutionError(f"there is no source archive of {name}=={version}")
    raise unsolvable(absent, [url for place in places.values() for url in place.shown])


def _locked(
    request: Request, pins: Sequence[str], *, constraints: Sequence[str] = (), keep: Mapping[str, str]
) -> tuple[LockedFile, ...]:
    uv, tags = _Uv.of(request), _tags(request)
    try:
        packages = uv.resolve(pins, constraints, keep)
    except NoSolutionError as error:
        raise unsolvable(error, uv.indexes.shown) from None
    packages = [package for package in packages if package["name"] not in request.provided]
    origins: dict[str, str] = {}
    if request.indexes:
        exact = [(package["name"], package["version"]) for package in packages]
        origins = replace(uv, provided={}, names={}).index_of(exact)
    names = {bare_url(url).rstrip("/"): name for name, url in reversed([*request.indexes.items()])}

    def locked(package: dict[str, Any]) -> LockedFile:
        name, version = package["name"], package["version"]
        index = names.get(bare_url(origins.get(name, "")).rstrip("/"))
        if index is None and name in request.indexed:
            # uv found it elsewhere, but it must come from an index of the channel.
            places = _places_with(_own(request), name, version, request, "--only-binary")
            index, package = next(places, (None, package))
            if index is None:
                own = ", ".join(f"{name} ({bare_url(url)})" for name, url in request.indexes.items())
                raise InputError(
                    f"{name} {version} is pinned to channel {request.channel}, but none of its indexes has "
                    f"{_best(package, tags, request.pure).file}",
                    hint=f"its indexes: {own}",
                    about=name,
                )
        return _measured("wheel", name, version, _best(package, tags, request.pure), index, uv.indexes)

    with ThreadPoolExecutor(8) as pool:
        return tuple(pool.map(locked, packages))


def _best(package: Mapping[str, Any], tags: Mapping[Tag, int], pure: Collection[str]) -> Offer:
    wheels = [wheel for wheel in _offers(package) if wheel.file.endswith(".whl")]
    if package["name"] in pure:
        wheels = [wheel for wheel in wheels if wheel.file.endswith("-none-any.whl")]
        if not wheels:
            raise InputError(
                f"{package['name']} {package['version']} has no wheel for every platform",
                hint="leave out `pure`, or pin a version with one",
            )
    return min(wheels, key=lambda wheel: min(tags.get(tag, len(tags)) for tag in parse_wheel_filename(wheel.file)[3]))


def _offers(package: Mapping[str, Any]) -> list[Offer]:
    files = [*package.get("wheels", ()), *([package["sdist"]] if "sdist" in package else ())]
    urls = [file.get("url") or file["path"] for file in files]
    return [
        Offer(
            file=unquote(urlsplit(url).path.rpartition("/")[2]),
            url=url,
            sha256=file.get("hashes", {}).get("sha256"),
            size=file.get("size"),
        )
        for url, file in zip(urls, files, strict=True)
    ]


def _measured(kind: Kind, name: str, version: str, offer: Offer, index: str | None, indexes: Indexes) -> LockedFile:
    size, sha256 = offer.size, offer.sha256
    if size is None or sha256 is None:
        size, sha256 = indexes.measure(offer.url, f"{name} {version}", sha256)
    return LockedFile(kind=kind, name=name, version=version, file=offer.file, size=size, sha256=sha256, index=index)


def _base(request: Request) -> BaseRequest:
    bases = [base for base in request.bases.values() if base.python.startswith(request.python + ".")]
    if not bases:
        raise InputError(f"no base of target {request.target} has Python {request.python}")
    # If there are several bases with this Python, what works on the oldest works on all.
    base = min(bases, key=lambda b: GLIBC.get(b.suite, 0))
    if base.suite not in GLIBC:
        raise InputError(f"no glibc version is known for suite {base.suite!r}", hint=f"known: {', '.join(GLIBC)}")
    return base


def _platform(request: Request) -> tuple[str, ...]:
    base = _base(request)
    platform = f"{MACHINE}-manylinux_2_{min(GLIBC[base.suite], _NEWEST_GLIBC)}"
    return ("--python-platform", platform, "--python-version", base.python)


def _tags(request: Request) -> dict[Tag, int]:
    python, interpreter = tuple(map(int, request.python.split("."))), f"cp{request.python.replace('.', '')}"
    legacy = {17: ["manylinux2014"], 12: ["manylinux2010"], 5: ["manylinux1"]}
    names = [
        name
        for glibc in range(GLIBC[_base(request).suite], 4, -1)
        for name in [f"manylinux_2_{glibc}", *legacy.get(glibc, [])]
    ]
    platforms = [f"{name}_{MACHINE}" for name in [*names, "linux"]]
    tags = [*cpython_tags(python, platforms=platforms), *compatible_tags(python, interpreter, platforms)]
    return {tag: rank for rank, tag in reversed(list(enumerate(tags)))}


def _row(name: str, version: str) -> str:
    return f"name = {json.dumps(name)}\nversion = {json.dumps(version)}\n"
