"""Wheels and sdists: the files that match the pins, found by pip's resolver with the host's pip configuration."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import threading
import zipfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from primus.errors import HostError, InputError
from primus.progress import Progress
from primus.terminal import counted
from primus.versions import traffic
from primus.versions.indexes import Indexes, pip_failure_hides_network
from primus.versions.lock import LockedFile, Request
from primus.versions.names import normalised
from primus.versions.pages import Link
from primus.versions.piprun import explain, no_such, run_pip
from primus.versions.reachable import HOST_DEADLINE_S, require_answers
from primus.versions.suites import GLIBC, MACHINES
from primus.versions.traffic import bare_url

_LEGACY = {5: "manylinux1", 12: "manylinux2010", 17: "manylinux2014"}


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One file in pip's report. ``sha256`` may be unknown; ``index`` is set for an index of versions.yaml."""

    name: str
    version: str
    file: str
    url: str
    sha256: str | None
    index: str | None = None
    size: int | None = None


def platforms(suite: str, architecture: str) -> tuple[str, ...]:
    """Return the wheel platform tags that the suite supports, newest first. Raises InputError for an unknown suite."""
    if suite not in GLIBC or architecture not in MACHINES:
        known = ", ".join(GLIBC)
        raise InputError(f"no glibc version is known for suite {suite!r} on {architecture}", hint=f"known: {known}")
    machine = MACHINES[architecture]
    tags: list[str] = []
    for minor in range(GLIBC[suite], 4, -1):
        tags.append(f"manylinux_2_{minor}_{machine}")
        if minor in _LEGACY and (machine == "x86_64" or minor == 17):
            tags.append(f"{_LEGACY[minor]}_{machine}")
    return (*tags, f"linux_{machine}")


def resolve_wheels(
    request: Request, *, progress: Progress, keep: Mapping[str, str] | None = None
) -> tuple[LockedFile, ...]:
    """Return the pinned wheels and all dependencies. ``keep`` maps names to preferred versions.

    Raises InputError if no set of versions fits, HostError if an index does not answer.
    """
    if not request.wheels and not request.requires:
        return ()
    indexes = Indexes.of_host()
    name = next(iter((*request.wheels, *request.requires)))
    require_answers(
        {
            f"the Python index at {bare_url(url)}": (partial(indexes.only(url).probe, name), name)
            for url in indexes.remote
        },
        deadline=HOST_DEADLINE_S,
        hint="check the network, or point pip at a mirror (pip config set global.index-url URL)",
    )
    progress.start("wheels", "resolve wheels", unit="files")
    pins = [f"{name}=={version}" for name, version in request.wheels.items()]
    pins += [name for name in request.requires if name not in request.wheels]
    constraints = [f"{n}=={v}" for n, v in (keep or {}).items() if n not in request.wheels]
    report = _report(request, pins, constraints, indexes)
    if report is None:
        report = _report(request, pins, [], indexes)
        progress.say("the locked versions are not compatible with the new pins; resolving the dependencies again")
    found = tuple(one for one in parse_report(report or {}) if one.name not in request.provided)
    for one in found:
        wanted = request.wheels.get(one.name, one.version)
        if one.version != wanted:
            raise InputError(
                f"{one.name} is pinned to {wanted}, but the index offers {one.version}",
                hint=f"pin {one.version} if that is the intended version",
            )
    placed = [_pure(one, indexes) if one.name in request.pure else one for one in _placed(found, request, indexes)]
    files = _measured("wheel", placed, indexes)
    progress.finish("wheels", counted(len(files), "wheel"))
    return files


def _placed(found: Sequence[Candidate], request: Request, indexes: Indexes) -> Sequence[Candidate]:
    """Return every file with the index that it belongs to; see :func:`_indexed`."""
    if not request.indexes:
        return found
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda one: _indexed(one, request, indexes), found))


def _indexed(one: Candidate, request: Request, indexes: Indexes) -> Candidate:
    """Return the file from the index that it belongs to, wherever pip found it.

    A package of the channel belongs to the channel's own indexes (InputError if none offers it), any other to those
    of pip's configuration, if they have it.
    """
    session, own = indexes.session(), one.name in request.indexed
    mine = None if own else next((link for link in indexes.links(session, one.name) if link.file == one.file), None)
    if mine is not None:
        return replace(one, url=mine.url, sha256=mine.sha256, size=mine.size)
    for name, url in request.indexes.items():
        for link in indexes.only(url).links(session, one.name):
            if link.file == one.file:
                return replace(one, url=link.url, sha256=link.sha256, size=link.size, index=name)
    if own:
        raise InputError(
            f"{one.name} {one.version} is pinned to channel {request.channel}, but none of its indexes has {one.file}",
            hint="its indexes: " + ", ".join(f"{name} ({bare_url(url)})" for name, url in request.indexes.items()),
            about=one.name,
        )
    return one


def resolve_build(
    request: Request,
    root: str,
    wheels: Sequence[str],
    *,
    image: Mapping[str, str],
    keep: Mapping[str, str],
    progress: Progress,
) -> tuple[LockedFile, ...]:
    """Return the wheels of the build root ``root`` and all dependencies, in the versions of ``image`` if it has
    them.

    ``keep`` maps names to preferred versions. Raises InputError for a name without a version that the image does
    not have, and if the build's own packages do not fit the image's versions.
    """
    progress.start(root, f"resolve wheels of {root}", unit="files")
    lacking = [name for name in wheels if "==" not in name and normalised(name) not in image]
    if lacking:
        raise InputError(f"{root}: the image has no {lacking[0]}", hint=f"name a version: {lacking[0]}==VERSION")
    pins = [name if "==" in name else f"{name}=={image[normalised(name)]}" for name in wheels]
    own = {normalised(name.partition("==")[0]) for name in wheels}
    fixed = [f"{n}=={v}" for n, v in image.items() if n not in own]
    kept = [f"{n}=={v}" for n, v in keep.items() if n not in own and n not in image]
    indexes = Indexes.of_host()
    report = _report(request, pins, [*fixed, *kept], indexes) or _report(request, pins, fixed, indexes)
    if report is None:
        raise InputError(
            f"the wheels of {root} do not fit the versions in the image", hint="pin other versions under `build`"
        )
    found = tuple(one for one in parse_report(report) if one.name not in request.provided)
    files = _measured("wheel", _placed(found, request, indexes), indexes)
    progress.finish(root, counted(len(files), "wheel"))
    return tuple(replace(file, base=root) for file in files)


def resolve_sdists(request: Request, *, progress: Progress) -> tuple[LockedFile, ...]:
    """Return the source archive of each sdist pin. Its dependencies are pinned separately."""
    if not request.sdists:
        return ()
    progress.start("sdists", "find source archives", unit="files")
    indexes = Indexes.of_host()
    session = indexes.session()
    found: list[Candidate] = []
    for name, version in request.sdists.items():
        places: dict[str | None, Indexes] = {None: indexes}
        if name in request.indexed:
            places = {index: indexes.only(url) for index, url in request.indexes.items()}
        offered = [
            (index, link, offers)
            for index, place in places.items()
            for link in place.links(session, name)
            if (offers := _sdist_version(link.file, name)) is not None
        ]
        match = next(((index, link) for index, link, offers in offered if _same(offers, version)), None)
        if match is None:
            asked = [url for place in places.values() for url in place.index_urls]
            raise no_such(name, version, [offers for _, _, offers in offered], "source archive", asked)
        index, link = match
        _check_python(link, f"{name} {version}", name, request)
        found.append(
            Candidate(
                name=name,
                version=version,
                file=link.file,
                url=link.url,
                sha256=link.sha256,
                size=link.size,
                index=index,
            )
        )
    files = _measured("sdist", found, indexes)
    progress.finish("sdists", f"{len(files)} source archives")
    return files


def _check_python(link: Link, label: str, name: str, request: Request) -> None:
    """Raise InputError if the source is not for the Python of the target's base."""
    pythons = [base.python for base in request.bases.values() if base.python.startswith(request.python + ".")]
    python = pythons[0] if pythons else request.python
    try:
        fits = not link.requires_python or SpecifierSet(link.requires_python).contains(python, prereleases=True)
    except InvalidSpecifier:
        return
    if not fits:
        raise InputError(
            f"the source archive of {label} needs Python {link.requires_python}; the base has {python}",
            hint="pin a version for the base's Python",
            about=name,
        )


def parse_report(report: Mapping[str, Any]) -> tuple[Candidate, ...]:
    """Return the files that pip would install, from its report. Raises InputError if one of them is not a wheel."""
    found: list[Candidate] = []
    for item in report.get("install", ()):
        info = item["download_info"]
        archive = info.get("archive_info") or {}
        sha256 = archive.get("hashes", {}).get("sha256") or archive.get("hash", "").removeprefix("sha256=")
        file = unquote(urlsplit(info["url"]).path.rpartition("/")[2])
        name = normalised(item["metadata"]["name"])
        if not file.endswith(".whl"):
            raise InputError(f"{name} would be installed from {file}, which is not a wheel", hint="pin it as an sdist")
        version = item["metadata"]["version"]
        digest = sha256 if re.fullmatch(r"[0-9a-f]{64}", sha256 or "") else None
        found.append(Candidate(name=name, version=version, file=file, url=info["url"], sha256=digest))
    return tuple(found)


def _report(
    request: Request, pins: Sequence[str], constraints: Sequence[str], indexes: Indexes
) -> dict[str, Any] | None:
    """Return pip's report; None if there is none with these constraints (without constraints, it raises)."""
    bases = [base for base in request.bases.values() if base.python.startswith(request.python + ".")]
    if not bases:
        raise InputError(f"no base of target {request.target} has Python {request.python}")
    # If there are several bases with this Python, what works on the oldest works on all.
    base = min(bases, key=lambda b: GLIBC.get(b.suite, 0))
    tags = platforms(base.suite, request.architecture)
    abi = "cp" + request.python.replace(".", "")
    with tempfile.TemporaryDirectory(prefix="primus-pip-") as folder:
        out = Path(folder, "report.json")
        constraints_file = Path(folder, "constraints.txt")
        constraints_file.write_text("\n".join(constraints), encoding="utf-8")
        args = ["install", "--dry-run", "--ignore-installed", "--report", str(out), "--only-binary=:all:"]
        args += ["--python-version", base.python, "--implementation", "cp", "--abi", abi, "--abi", "abi3"]
        args += ["--abi", "none", *(part for tag in tags for part in ("--platform", tag))]
        args += _provided(request, Path(folder, "provided"))
        args += [word for url in request.indexes.values() for word in ("--extra-index-url", url)]
        args += ["--target", str(Path(folder, "target")), "--constraint", str(constraints_file)]
        patience = traffic.PATIENCE
        args += ["--retries", str(patience.tries - 1), "--timeout", f"{patience.read_s / 2:g}"]
        args += ["--no-input", "--disable-pip-version-check", "--no-color", *pins]
        # These would change the result or conflict with --target. Indexes, CA and proxies stay the host's.
        off = {"PIP_USER": "0", "PIP_REQUIRE_VIRTUALENV": "0", "PIP_NO_DEPS": "0", "PIP_QUIET": "0", "PIP_PRE": "0"}
        shim = [sys.executable, "-P", str(Path(__file__).with_name("pipfor.py"))]
        done = run_pip([*shim, base.python, MACHINES[request.architecture]], args, os.environ | off)
        if done.returncode != 0 or not out.is_file():
            if constraints and not pip_failure_hides_network(done.stderr):
                return None
            # pip writes what failed to stderr, and the reason to stdout.
            urls = (*indexes.index_urls, *indexes.find_links, *request.indexes.values())
            raise explain(f"{done.stderr}\n{done.stdout}\n\n", urls)
        report: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    if report.get("environment", {}).get("python_version") != request.python:
        raise HostError(
            f"this pip cannot resolve for Python {request.python}", hint="use pip 25.3 or newer: pip install -U pip"
        )
    return report


def _pure(one: Candidate, indexes: Indexes) -> Candidate:
    """Return the same version's wheel for any platform, where pip prefers one for this. InputError without one."""
    if one.file.endswith("-none-any.whl"):
        return one
    stem = "-".join(one.file.split("-")[:2])
    for link in indexes.links(indexes.session(), one.name):
        if link.file.startswith(stem + "-") and link.file.endswith("-none-any.whl"):
            return Candidate(name=one.name, version=one.version, file=link.file, url=link.url, sha256=link.sha256)
    raise InputError(
        f"{one.name} {one.version} has no wheel for every platform", hint="leave out `pure`, or pin a version with one"
    )


def _provided(request: Request, folder: Path) -> list[str]:
    """Return arguments that make pip accept the base's packages as installed: an empty wheel of each, and no other
    version.

    Otherwise, a dependency on torch would add the index's build of it to the lock, beside the base's own.
    """
    folder.mkdir()
    for name, version in request.provided.items():
        stem = f"{name.replace('-', '_')}-{version}"
        with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
            about = f"{stem}.dist-info"
            wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{about}/RECORD", "")
    pins = [f"{name}=={version}" for name, version in request.provided.items()]
    return ["--find-links", str(folder), *pins] if pins else []


def _measured(kind: Any, found: Sequence[Candidate], indexes: Indexes) -> tuple[LockedFile, ...]:
    local = threading.local()

    def measured(one: Candidate) -> LockedFile:
        if not hasattr(local, "session"):
            local.session = indexes.session()
        about = f"{one.name} {one.version}"
        size, read = indexes.measure(local.session, one.url, about)
        if one.size not in (None, size):
            raise HostError(
                f"the index states {one.size:,} bytes for {one.file}, but {bare_url(one.url)} sends {size:,}",
                hint="run it again later; the index or its mirror is being changed",
                about=one.name,
            )
        sha256 = one.sha256 or read or indexes.read(local.session, one.url, about)[1]
        return LockedFile(
            kind=kind,
            name=one.name,
            version=one.version,
            file=one.file,
            size=size,
            sha256=sha256,
            index=one.index,
        )

    with ThreadPoolExecutor(8) as pool:
        return tuple(sorted(pool.map(measured, found), key=lambda f: f.name))


def _sdist_version(file: str, name: str) -> str | None:
    match = re.fullmatch(r"(.+?)-([0-9][^-]*)\.(?:tar\.gz|zip)", file)
    return match[2] if match and normalised(match[1]) == name else None


def _same(offered: str | None, wanted: str) -> bool:
    try:
        return offered is not None and Version(offered) == Version(wanted)
    except InvalidVersion:
        return offered == wanted
