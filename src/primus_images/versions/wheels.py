"""Wheels and sdists: the files that match the pins, found by uv on the indexes of the host's pip
configuration.

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
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename
from packaging.version import Version
from uv import find_uv_bin

from primus_images.errors import HostError, InputError
from primus_images.refusals import refusal
from primus_images.versions.indexes import Indexes, Offer, offers_in
from primus_images.versions.lock import MACHINE, SUITES, BaseRequest, Kind, LockedFile, Request
from primus_images.versions.traffic import bare_url, run_tool


class NoSolutionError(InputError):
    """No set of versions of the host's indexes fits the pins."""


def resolve_wheels(request: Request, keep: Mapping[str, str]) -> tuple[LockedFile, ...]:
    """Return the pinned wheels and all dependencies. ``keep`` prefers versions. InputError if no
    set of them fits.
    """
    pins = [f"{name}==={version}" if version else name for name, version in request.wheels.items()]
    files = _locked(request, pins, keep=keep)
    for file in files:
        if file.version != (pinned := request.wheels.get(file.name) or file.version):
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
    """Return the wheels of the build root ``root`` and all dependencies, in the versions of
    ``image`` if it has them.

    ``keep`` prefers versions. Raises InputError for a name without a version that the image does
    not have, and if the build's own packages do not fit the image's versions.
    """
    pins: dict[str, str] = {}
    for wheel in wheels:
        name, _, version = wheel.partition("==")
        name = canonicalize_name(name)
        if not version and name not in image:
            raise InputError(
                f"{root}: the image has no {wheel}", hint=f"name a version: {wheel}==VERSION"
            )
        pins[name] = f"{name}==={version or image[name]}"
    constraints = [f"{name}==={version}" for name, version in image.items() if name not in pins]
    files = _locked(request, list(pins.values()), constraints=constraints, keep=keep)
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
    """Return the versions of all wheels if they fit together, else None. Those named in ``loose``
    are newer if needed.

    ``constraints`` are those of a constraints file.
    """
    wheels = request.wheels.items()
    pins = [
        name + (f"{'>=' if name in loose else '==='}{version}" if version else "")
        for name, version in wheels
    ]
    keep = {name: request.wheels[name] for name in loose}
    try:
        packages = _compile(request, Indexes.of_host(request.indexes), pins, constraints, keep)
    except NoSolutionError:
        return None
    return {package["name"]: package["version"] for package in packages}


def _compile(
    request: Request,
    indexes: Indexes,
    pins: Sequence[str],
    constraints: Sequence[str],
    keep: Mapping[str, str],
) -> list[dict[str, Any]]:
    """Return the packages of a ``pylock.toml`` with all dependencies, as wheels. Raises
    NoSolutionError.

    Pins have ``===``, because ``==2.13.0`` means 2.13.0+cpu, too.
    """
    with tempfile.TemporaryDirectory(prefix="primus-uv-") as name:
        folder = Path(name)
        lock = folder / "pylock.toml"
        settings = folder / "uv.toml"
        provided = folder / "provided"
        if keep:
            rows = [
                f"[[packages]]\nname = {json.dumps(n)}\nversion = {json.dumps(v)}"
                for n, v in keep.items()
            ]
            lock.write_text(
                "\n".join(['lock-version = "1.0"', 'created-by = "primus"', *rows]),
                encoding="utf-8",
            )
        more = (f"-c {Path(place).absolute()}" for place in indexes.listed("constraint"))
        (folder / "constraints.txt").write_text("\n".join([*constraints, *more]), encoding="utf-8")
        (folder / "pins.in").write_text(
            "\n".join([*pins, *_provide(request.provided, provided)]), encoding="utf-8"
        )
        # The settings may contain credentials, so only this user can read them.
        settings.touch(0o600)
        settings.write_text(indexes.uv_settings(provided), encoding="utf-8")
        base = _base(request)
        # The newest glibc 2 that uv knows is 40.
        platform = f"{MACHINE}-manylinux_2_{min(SUITES[base.suite]['glibc'], 40)}"
        command = [find_uv_bin(), "pip", "compile", "pins.in", "--config-file", settings.name]
        command += [
            "--python",
            sys.executable,
            "--python-platform",
            platform,
            "--python-version",
            base.python,
        ]
        command += [
            "--format",
            "pylock.toml",
            "--output-file",
            lock.name,
            "--no-header",
            "--quiet",
            "--refresh",
        ]
        command += ["--only-binary", ":all:", "--constraints", "constraints.txt"]
        package = re.split("[=<>!~ ]", pins[0])[0]
        where = " ".join(indexes.shown)
        done = run_tool(
            command, where, f"compile {package} on", cwd=folder, env=indexes.uv_environment()
        )
        if done.returncode == 0:
            packages: list[dict[str, Any]] = tomllib.loads(lock.read_text(encoding="utf-8")).get(
                "packages", []
            )
            return packages
    error = failure(done.stderr, indexes)
    if isinstance(error, NoSolutionError):
        # uv takes an index that refuses a login for an index without packages.
        for place in (*indexes.urls, *indexes.own.values()):
            indexes.offers(package, place)
    raise error


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


def failure(text: str, indexes: Indexes) -> HostError | InputError:
    """Return the error for what uv writes when it fails."""
    text = re.sub(r"\n {3,}", " ", text)
    causes = [" ".join(line.split()) for line in re.findall(r"^ +cause: (.*)$", text, re.M)]
    url = re.search(r"Failed to fetch: `?(https?://[^\s`]+)", text)
    if url is None and "No solution found" in text:
        return unsolvable(" ".join(causes), indexes)
    if url is None:
        reason = " ".join([*re.findall(r"^error: (.*)$", text, re.M), *causes]) or "no reason given"
        return InputError(f"uv cannot resolve the Python packages: {reason}")
    reason = re.sub(r" for url .*", "", (causes or [text.strip()])[-1])
    return indexes.silence(url[1], reason, bare_url(url[1]).rstrip("/").rpartition("/")[2])


def unsolvable(reason: str, indexes: Indexes) -> NoSolutionError:
    """Return the error for pins that no set of files of the indexes fulfills; ``reason`` is in uv's
    words.
    """
    reason = reason.replace("===", "==")
    pinned = re.search(r"you require ([^\s=]+)==", reason)
    return NoSolutionError(
        f"the pins do not fit the Python indexes of this host ({', '.join(indexes.shown)}): "
        + reason.removeprefix("Because ").partition(", we can conclude that your")[0],
        hint="correct a pin in versions.yaml, or check that pip's index-url, extra-index-url and find-links, or "
        "`indexes` in versions.yaml, reach its channel",
        about=pinned[1] if pinned else None,
    )


def _available(
    name: str, request: Request, indexes: Indexes, kind: str
) -> Iterator[tuple[str | None, Version, Offer]]:
    """Yield index, version and file of the package's source archives, or of the wheels that fit the
    target's base.

    What must come from the channel's own indexes comes from them alone; they are the last for all
    else.
    """
    tags = _tags(request)
    python = _base(request).python
    if name in request.indexed:
        places = []
    else:
        places = [(None, place) for place in indexes.places]
    for index, place in (*places, *indexes.own.items()):
        for offer in indexes.offers(name, place):
            # What packaging raises for a name, a version or a specifier that is none.
            with contextlib.suppress(ValueError):
                if kind == "wheel":
                    package, version, _, built_for = parse_wheel_filename(offer.file)
                    fits = not tags.keys().isdisjoint(built_for)
                else:
                    (package, version), fits = parse_sdist_filename(offer.file), True
                if package == name and fits and SpecifierSet(offer.python).contains(python):
                    yield index, version, offer


def _sdist(name: str, version: str, request: Request) -> LockedFile:
    indexes = Indexes.of_host(request.indexes)
    for index, other, offer in _available(name, request, indexes, "sdist"):
        if other == Version(version):
            return _measured("sdist", name, version, offer, index, indexes)
    raise unsolvable(f"there is no source archive of {name}=={version}", indexes)


def _locked(
    request: Request,
    pins: Sequence[str],
    *,
    constraints: Sequence[str] = (),
    keep: Mapping[str, str],
) -> tuple[LockedFile, ...]:
    indexes = Indexes.of_host(request.indexes)
    packages = _compile(request, indexes, pins, constraints, keep)
    packages = [package for package in packages if package["name"] not in request.provided]
    with ThreadPoolExecutor(8) as pool:
        return tuple(pool.map(partial(_wheel, request=request, indexes=indexes), packages))


def _wheel(package: Mapping[str, Any], request: Request, indexes: Indexes) -> LockedFile:
    name = package["name"]
    version = package["version"]
    wheel = _best(package, offers_in(package["wheels"]), request)
    index = None
    if indexes.own:
        # uv does not say from where it has it.
        files = [
            (i, o)
            for i, v, o in _available(name, request, indexes, "wheel")
            if v == Version(version)
        ]
        places = [(index, offer) for index, offer in files if index or offer.file == wheel.file]
        if not places:
            own = ", ".join(f"{n} ({bare_url(url)})" for n, url in indexes.own.items())
            words = {
                "version": version,
                "channel": request.channel,
                "file": wheel.file,
                "indexes": own,
            }
            raise refusal("not_in_channel", None, name, name=name, **words)
        index = places[0][0]
        if index is not None:
            wheel = _best(package, [offer for place, offer in places if place == index], request)
    return _measured("wheel", name, version, wheel, index, indexes)


def _best(package: Mapping[str, Any], wheels: Sequence[Offer], request: Request) -> Offer:
    tags = _tags(request)
    if package["name"] in request.pure:
        wheels = [wheel for wheel in wheels if wheel.file.endswith("-none-any.whl")]
        if not wheels:
            raise InputError(
                f"{package['name']} {package['version']} has no wheel for every platform",
                hint="leave out `pure`, or pin a version with one",
            )
    return min(
        wheels,
        key=lambda wheel: min(
            tags.get(tag, len(tags)) for tag in parse_wheel_filename(wheel.file)[3]
        ),
    )


def _measured(
    kind: Kind, name: str, version: str, offer: Offer, index: str | None, indexes: Indexes
) -> LockedFile:
    size = offer.size
    sha256 = offer.sha256
    if size is None or sha256 is None:
        size, sha256 = indexes.measure(offer.url, f"{name} {version}", sha256)
    return LockedFile(
        kind=kind,
        name=name,
        version=version,
        file=offer.file,
        size=size,
        sha256=sha256,
        index=index,
    )


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
    python = tuple(map(int, request.python.split(".")))
    interpreter = f"cp{request.python.replace('.', '')}"
    legacy = {17: ["manylinux2014"], 12: ["manylinux2010"], 5: ["manylinux1"]}
    names = [
        name
        for glibc in range(SUITES[_base(request).suite]["glibc"], 4, -1)
        for name in [f"manylinux_2_{glibc}", *legacy.get(glibc, [])]
    ]
    platforms = [f"{name}_{MACHINE}" for name in [*names, "linux"]]
    tags = [
        *cpython_tags(python, platforms=platforms),
        *compatible_tags(python, interpreter, platforms),
    ]
    return {tag: rank for rank, tag in reversed(list(enumerate(tags)))}
