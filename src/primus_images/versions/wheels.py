"""Wheels and sdists: the files that match the pins, found by uv on the indexes of the host's pip.

Every function here that asks an index raises HostError if it does not answer.
"""

import contextlib
import json
import re
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename
from packaging.version import Version
from uv import find_uv_bin

from primus_images.errors import HostError, InputError
from primus_images.versions.indexes import Indexes, Offer, offers_in
from primus_images.versions.lock import MACHINE, SUITES, BaseRequest, LockedFile, Request
from primus_images.versions.traffic import bare_url, run_tool


class NoSolutionError(InputError):
    """No set of versions of the host's indexes fits the pins."""


def resolve_wheels(request: Request, keep: Mapping[str, str]) -> tuple[LockedFile, ...]:
    """Return the pinned wheels and all dependencies. ``keep`` prefers versions.

    Raises InputError if no set of them fits.
    """
    pins = [f"{name}==={version}" if version else name for name, version in request.wheels.items()]
    files = _locked(request, _Wanted(pins, keep=keep))
    for file in files:
        pinned = request.wheels.get(file.name)
        if pinned and file.version != pinned:
            raise InputError(
                f"{file.name} is pinned to {pinned}, but the index offers {file.version}",
                hint=f"pin {file.version} if that is the intended version",
            )
    return files


def resolve_build(
    request: Request,
    root: str,
    wheels: Sequence[str],
    image: Mapping[str, str],
    keep: Mapping[str, str],
) -> tuple[LockedFile, ...]:
    """Return the wheels of the build ``root`` and all dependencies, in the image's versions.

    ``image`` are these versions, and ``keep`` prefers versions of other packages. Raises InputError
    for a name without a version that the image does not have, and if the build's own packages do
    not fit the image's versions.
    """
    versions = dict(image)
    pinned = []
    for wheel in wheels:
        name, _, version = wheel.partition("==")
        name = canonicalize_name(name)
        if not version and name not in image:
            raise InputError(
                f"{root}: the image has no {wheel}", hint=f"name a version: {wheel}==VERSION"
            )
        versions[name] = version or image[name]
        pinned.append(name)
    pins = [f"{name}==={versions.pop(name)}" for name in dict.fromkeys(pinned)]
    constraints = [f"{name}==={version}" for name, version in versions.items()]
    files = _locked(request, _Wanted(pins, constraints, keep))
    return tuple(replace(file, base=root) for file in files)


def resolve_sdists(request: Request) -> tuple[LockedFile, ...]:
    """Return the source archive of each sdist pin. Its dependencies are pinned separately."""
    return tuple(_sdist(name, version, request) for name, version in request.sdists.items())


def offered(name: str, request: Request, kind: str) -> set[Version]:
    """Return the versions of a package (``kind`` wheel or sdist) that work on the target's base."""
    files = _available(name, request, Indexes.of_host(request.indexes), kind)
    return {version for _, version, offer in files if not offer.yanked}


def fits_together(
    request: Request, loose: Collection[str], constraints: Sequence[str]
) -> dict[str, str] | None:
    """Return the versions of all wheels if they fit together, else None.

    Those named in ``loose`` are newer if needed. ``constraints`` are those of a constraints file.
    """
    pins = []
    for name, version in request.wheels.items():
        operator = ">=" if name in loose else "==="
        pins.append(f"{name}{operator}{version}" if version else name)
    wanted = _Wanted(pins, constraints, {name: request.wheels[name] for name in loose})
    try:
        packages = _compile(request, Indexes.of_host(request.indexes), wanted)
    except NoSolutionError:
        return None
    return {package["name"]: package["version"] for package in packages}


class _Wanted(NamedTuple):
    """Packages for uv: pins, the lines of a constraints file, and versions to prefer.

    Pins have ``===``, because ``==2.13.0`` means 2.13.0+cpu, too.
    """

    pins: Sequence[str]
    constraints: Sequence[str] = ()
    keep: Mapping[str, str] = MappingProxyType({})


def _compile(request: Request, indexes: Indexes, wanted: _Wanted) -> list[dict[str, Any]]:
    """Return the packages of a ``pylock.toml`` with all dependencies, as wheels.

    Raises NoSolutionError if there are none.
    """
    with tempfile.TemporaryDirectory(prefix="primus-uv-") as name:
        folder = Path(name)
        _write_inputs(folder, request, indexes, wanted)
        base = _base(request)
        # The newest glibc 2 that uv knows is 40.
        platform = f"{MACHINE}-manylinux_2_{min(SUITES[base.suite]['glibc'], 40)}"
        command = [
            find_uv_bin(),
            *("pip", "compile", "pins.in", "--constraints", "constraints.txt"),
            *("--config-file", "uv.toml", "--only-binary", ":all:"),
            *("--python", sys.executable, "--python-version", base.python),
            *("--python-platform", platform),
            *("--format", "pylock.toml", "--output-file", "pylock.toml"),
            *("--no-header", "--quiet", "--refresh"),
        ]
        package = re.split("[=<>!~ ]", wanted.pins[0])[0]
        places = " ".join(indexes.shown)
        environment = indexes.uv_environment()
        done = run_tool(command, places, f"compile {package} on", cwd=folder, env=environment)
        if done.returncode == 0:
            lock = tomllib.loads((folder / "pylock.toml").read_text(encoding="utf-8"))
            packages: list[dict[str, Any]] = lock.get("packages", [])
            return packages
    error = failure(done.stderr, indexes)
    if isinstance(error, NoSolutionError):
        # uv takes an index that refuses a login for an index without packages.
        for place in (*indexes.urls, *indexes.own.values()):
            indexes.offers(package, place)
    raise error


def _write_inputs(folder: Path, request: Request, indexes: Indexes, wanted: _Wanted) -> None:
    if wanted.keep:
        rows = ['lock-version = "1.0"', 'created-by = "primus"']
        for name, version in wanted.keep.items():
            rows.append(f"[[packages]]\nname = {json.dumps(name)}\nversion = {json.dumps(version)}")
        (folder / "pylock.toml").write_text("\n".join(rows), encoding="utf-8")
    files = [f"-c {Path(place).absolute()}" for place in indexes.listed("constraint")]
    constraints = [*wanted.constraints, *files]
    (folder / "constraints.txt").write_text("\n".join(constraints), encoding="utf-8")
    pins = [*wanted.pins, *_provide(request.provided, folder / "provided")]
    (folder / "pins.in").write_text("\n".join(pins), encoding="utf-8")
    settings = folder / "uv.toml"
    # The settings may contain credentials, so only this user can read them.
    settings.touch(0o600)
    settings.write_text(indexes.uv_settings(folder / "provided"), encoding="utf-8")


def _provide(packages: Mapping[str, str], folder: Path) -> list[str]:
    # Without these empty wheels, a dependency on torch would add the index's build of it, beside
    # the base's own.
    folder.mkdir()
    for name, version in packages.items():
        stem = f"{name.replace('-', '_')}-{version}"
        with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
            about = f"{stem}.dist-info"
            wheel.writestr(
                f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            )
            wheel.writestr(
                f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(f"{about}/RECORD", "")
    return [f"{name}=={version}" for name, version in packages.items()]


def failure(log: str, indexes: Indexes) -> HostError | InputError:
    """Return the error for what uv writes when it fails."""
    log = re.sub(r"\n {3,}", " ", log)
    causes = [" ".join(line.split()) for line in re.findall(r"^ +cause: (.*)$", log, re.M)]
    url = re.search(r"Failed to fetch: `?(https?://[^\s`]+)", log)
    if url:
        reason = re.sub(r" for url .*", "", [log.strip(), *causes][-1])
        package = bare_url(url[1]).rstrip("/").rpartition("/")[2]
        return indexes.silence(url[1], reason, package)
    if "No solution found" in log:
        return unsolvable(" ".join(causes), indexes)
    reason = " ".join([*re.findall(r"^error: (.*)$", log, re.M), *causes]) or "no reason given"
    return InputError(f"uv cannot resolve the Python packages: {reason}")


def unsolvable(reason: str, indexes: Indexes) -> NoSolutionError:
    """Return the error for pins that no set of files fulfills; ``reason`` is in uv's words."""
    reason = reason.replace("===", "==")
    pinned = re.search(r"you require ([^\s=]+)==", reason)
    reason = reason.removeprefix("Because ").partition(", we can conclude that your")[0]
    places = ", ".join(indexes.shown)
    return NoSolutionError(
        f"the pins do not fit the Python indexes of this host ({places}): {reason}",
        hint="correct a pin in versions.yaml, or check that pip's index-url, extra-index-url and "
        "find-links, or `indexes` in versions.yaml, reach its channel",
        about=pinned[1] if pinned else None,
    )


def _available(
    name: str, request: Request, indexes: Indexes, kind: str
) -> Iterator[tuple[str | None, Version, Offer]]:
    """Yield index, version and file of the package's source archives, or of wheels for the base.

    What must come from the channel's own indexes comes from them alone; they are the last for all
    else.
    """
    tags = _tags(request)
    python = _base(request).python
    places: list[tuple[str | None, str]] = list(indexes.own.items())
    if name not in request.indexed:
        places = [*((None, place) for place in indexes.places), *places]
    for index, place in places:
        for offer in indexes.offers(name, place):
            # What packaging raises for a name, a version or a specifier that is none.
            with contextlib.suppress(ValueError):
                if kind == "wheel":
                    package, version, _, built_for = parse_wheel_filename(offer.file)
                    fits = not tags.keys().isdisjoint(built_for)
                else:
                    package, version = parse_sdist_filename(offer.file)
                    fits = True
                if package == name and fits and SpecifierSet(offer.python).contains(python):
                    yield index, version, offer


def _sdist(name: str, version: str, request: Request) -> LockedFile:
    indexes = Indexes.of_host(request.indexes)
    for index, other, offer in _available(name, request, indexes, "sdist"):
        if other == Version(version):
            return indexes.locked("sdist", name, version, offer, index)
    raise unsolvable(f"there is no source archive of {name}=={version}", indexes)


def _locked(request: Request, wanted: _Wanted) -> tuple[LockedFile, ...]:
    indexes = Indexes.of_host(request.indexes)
    packages = [
        package
        for package in _compile(request, indexes, wanted)
        if package["name"] not in request.provided
    ]
    with ThreadPoolExecutor(8) as pool:
        return tuple(pool.map(partial(_wheel, request=request, indexes=indexes), packages))


def _wheel(package: Mapping[str, Any], request: Request, indexes: Indexes) -> LockedFile:
    name = package["name"]
    version = package["version"]
    wheel = _best(package, offers_in(package["wheels"]), request)
    if not indexes.own:
        return indexes.locked("wheel", name, version, wheel)
    # uv does not say from where it has it.
    offers: dict[str | None, list[Offer]] = {}
    for index, other, offer in _available(name, request, indexes, "wheel"):
        if other == Version(version) and (index or offer.file == wheel.file):
            offers.setdefault(index, []).append(offer)
    if not offers:
        own = ", ".join(f"{index} ({bare_url(url)})" for index, url in indexes.own.items())
        raise InputError(
            f"{name} {version} is pinned to channel {request.channel}, but none of its indexes "
            f"has {wheel.file}",
            hint=f"its indexes: {own}",
            about=name,
        )
    index = next(iter(offers))
    if index:
        wheel = _best(package, offers[index], request)
    return indexes.locked("wheel", name, version, wheel, index)


def _best(package: Mapping[str, Any], wheels: Sequence[Offer], request: Request) -> Offer:
    """Return the wheel that fits the base best."""
    if package["name"] in request.pure:
        wheels = [wheel for wheel in wheels if wheel.file.endswith("-none-any.whl")]
        if not wheels:
            raise InputError(
                f"{package['name']} {package['version']} has no wheel for every platform",
                hint="leave out `pure`, or pin a version with one",
            )
    ranks = _tags(request)

    def rank(wheel: Offer) -> int:
        return min(ranks.get(tag, len(ranks)) for tag in parse_wheel_filename(wheel.file)[3])

    return min(wheels, key=rank)


def _base(request: Request) -> BaseRequest:
    # The others are the roots of builds and extras, which have its suite and Python.
    base = next(iter(request.bases.values()), None)
    if base is None:
        raise InputError(f"target {request.target} has Python packages, but no base")
    if base.suite not in SUITES:
        raise InputError(
            f"no glibc version is known for suite {base.suite!r}",
            hint=f"known: {', '.join(SUITES)}",
        )
    return base


def _tags(request: Request) -> dict[Tag, int]:
    """Return the tags of wheels that work on the base → their rank, 0 for the best."""
    python = tuple(map(int, request.python.split(".")))
    # Minor version of glibc → the older name of its platform.
    legacy = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
    newest = SUITES[_base(request).suite]["glibc"]
    oldest = min(legacy)
    platforms = []
    for glibc in range(newest, oldest - 1, -1):
        platforms.append(f"manylinux_2_{glibc}_{MACHINE}")
        if glibc in legacy:
            platforms.append(f"{legacy[glibc]}_{MACHINE}")
    platforms.append(f"linux_{MACHINE}")
    interpreter = f"cp{request.python.replace('.', '')}"
    tags = [
        *cpython_tags(python, platforms=platforms),
        *compatible_tags(python, interpreter, platforms),
    ]
    ranks: dict[Tag, int] = {}
    for rank, tag in enumerate(tags):
        ranks.setdefault(tag, rank)
    return ranks
