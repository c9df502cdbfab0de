"""Debs: the packages of a base with all dependencies, resolved by apt over the host's mirrors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import unquote

from primus.errors import HostError, InputError
from primus.progress import Progress
from primus.terminal import counted
from primus.versions.archive import Archive, open_archive, reason, titled
from primus.versions.lock import BaseRequest, LockedFile
from primus.versions.suites import name_of, preferences, suites_of, upstream
from primus.versions.traffic import requesting


def resolve_debs(
    base_name: str, base: BaseRequest, architecture: str, *, progress: Progress, status: str = ""
) -> tuple[LockedFile, ...]:
    """Return every deb of the base's root file system: essential packages, requested packages and their
    dependencies.

    For a base over an image, whose dpkg ``status`` lists the installed packages, return only the missing ones.
    Recommended packages are left out. Raises InputError for a package or Python version that the suite does not
    have, HostError if the archive is not available.
    """
    key = f"debs {base_name}"
    suites, names = suites_of(base.suite, base.packages), [name_of(p) for p in base.packages]
    progress.start(key, f"resolve {' and '.join(suites)}", unit="files")
    with open_archive(suites, architecture, preferences(base.suite, base.packages), status) as archive:
        for suite, day in archive.expired(datetime.now(UTC)):
            progress.say(f"! the index of Debian {suite} was valid until {day}; using it anyway")
        # usrmerge converts a running system and depends on all of perl. A root file system that is merged from the
        # start fulfills the same dependency with a marker package, which mmdebstrap's hook for it installs.
        essential = ["?essential", *(() if "usrmerge" in names else ("usr-is-merged",))]
        chosen = _closure(archive, base, names if base.image else [*essential, *names])
        _check_suites(archive, base, chosen)
        records = _records(archive, chosen)
    check_python(base_name, base, chosen)
    files = tuple(
        LockedFile(
            kind="deb",
            name=name,
            version=version,
            file=records[name, version]["Filename"].rpartition("/")[2],
            size=int(records[name, version]["Size"]),
            sha256=records[name, version]["SHA256"],
            base=base_name,
        )
        for name, version in sorted(chosen.items())
    )
    progress.finish(key, counted(len(files), "package"))
    return files


def download_debs(
    files: Sequence[LockedFile], suites: tuple[str, ...], architecture: str, folder: Path
) -> dict[LockedFile, Path]:
    """Let apt download the debs to ``folder``. Returns those that the archive still has; their hashes are unchecked.

    Raises HostError if the archive is not available.
    """
    asked = {(f.name, f.version): f for f in files}
    with open_archive(suites, architecture) as archive:
        words = [f"{name}={version}" for name, version in asked]
        present = asked.keys() & parse_records(archive.run("apt-cache", "show", *words).stdout).keys()
        if present:
            _download(archive, "apt-get", "-q", "download", *(f"{n}={v}" for n, v in sorted(present)), folder=folder)
        # A pool keeps files for a while after the index drops them, next to their successors.
        lacking = {f.name: f for key, f in asked.items() if key not in present}
        names = (
            {name for name, _ in parse_records(archive.run("apt-cache", "show", *lacking).stdout)} if lacking else ()
        )
        if names:
            uris = parse_uris(archive.run("apt-get", "download", "--print-uris", *sorted(names)).stdout)
            triples: list[str] = []
            for (name, _), uri in uris.items():
                file = lacking[name]
                near = uri.rpartition("/")[0] + "/" + file.file.replace("+", "%2b")
                triples += [near, f"{name}_{file.version.replace(':', '%3a')}_x.deb", f"SHA256:{file.sha256}"]
            _download(archive, "/usr/lib/apt/apt-helper", "download-file", *triples, folder=folder)
    # apt names files package_version_architecture.deb, with the epoch escaped.
    paths = {key: path for path in folder.glob("*.deb") for key in parse_uris(f"'' {path.name} 0")}
    return {file: paths[key] for key, file in asked.items() if key in paths}


def _download(archive: Archive, *command: str, folder: Path) -> None:
    with requesting("apt", " ".join(archive.mirrors), "packages", "download") as request:
        done = archive.run(*command, cwd=folder)
        text = done.stdout + done.stderr
        request.verdict = "answered" if done.returncode == 0 else f"failed: {reason(text)}"
    # Whether a file that is not there any more matters is the caller's to judge.
    faults = [
        line for line in re.findall(r"^E: Failed to fetch .*", text, re.M) if not re.search(r" 40[34] |not found", line)
    ]
    if done.returncode != 0 and faults:
        mirrors = " and ".join(archive.mirrors)
        raise HostError(
            f"the archive at {mirrors} does not send its packages: {reason(faults[0])}",
            hint="check the network, and run it again",
        )


def check_python(base_name: str, base: BaseRequest, chosen: Mapping[str, str]) -> None:
    """Raise InputError if the suite's Python differs from the base's stated version."""
    minor = ".".join(base.python.split(".")[:2])
    version = chosen.get(f"python{minor}-minimal")
    if version is None:
        others = [upstream(v) for p, v in chosen.items() if re.fullmatch(r"python3\.[0-9]+-minimal", p)]
        if others:
            raise InputError(
                f"base {base_name} states Python {base.python}, but its packages provide {' and '.join(others)}",
                hint=f"write python: {others[0]} in versions.yaml",
            )
        return
    if upstream(version) != base.python:
        raise InputError(
            f"base {base_name} states Python {base.python}, but {titled(base.suite)} has {upstream(version)}",
            hint=f"write python: {upstream(version)} in versions.yaml",
        )


def parse_uris(text: str) -> dict[tuple[str, str], str]:
    """Return ``(package, version)`` → URI from what apt-get prints with ``--print-uris``."""
    rows = re.findall(r"^'([^']*)' ([^_ ]+)_(\S+)_[^_ ]+\.deb [0-9]+", text, re.M)
    return {(name, unquote(version)): uri for uri, name, version in rows}


def parse_records(text: str) -> dict[tuple[str, str], dict[str, str]]:
    """Return ``(package, version)`` → its fields from the output of ``apt-cache show``; the first record counts."""
    records: dict[tuple[str, str], dict[str, str]] = {}
    for block in text.split("\n\n"):
        fields = dict(re.findall(r"^(Package|Version|Filename|Size|SHA256): (\S+)$", block, re.M))
        if len(fields) == 5:
            records.setdefault((fields["Package"], fields["Version"]), fields)
    return records


def _closure(archive: Archive, base: BaseRequest, packages: Iterable[str]) -> dict[str, str]:
    done = archive.run("apt-get", "-q", "-y", "install", "--print-uris", *packages)
    if done.returncode == 0:
        return dict(list(parse_uris(done.stdout)))
    unknown = re.search(
        r"E: (?:Unable to locate package|Package '?([^' ]+)'? has no installation candidate) ?(\S*)", done.stderr
    )
    if unknown:
        name = unknown[1] or unknown[2]
        raise InputError(f"{titled(base.suite)} has no package {name}", hint="correct it under `packages`")
    unmet = re.search(r"The following packages have unmet dependencies:\n(.*?)\n(?:E:|$)", done.stdout + "\n", re.S)
    reason = "; ".join(line.strip() for line in unmet[1].splitlines()) if unmet else done.stderr.strip()[:300]
    later = suites_of(base.suite, base.packages)[1:]
    hint = f"list what must come from {' or '.join(later)} too, as package/{later[0]}" if later else None
    raise InputError(f"the packages of {titled(base.suite)} are not compatible: {reason}", hint=hint)


def _check_suites(archive: Archive, base: BaseRequest, chosen: Mapping[str, str]) -> None:
    """Raise InputError if a package comes from another suite than requested, which apt only prefers."""
    named = {name: suite for name, _, suite in (p.partition("/") for p in base.packages) if suite}
    offers = archive.run("apt-cache", "madison", *named).stdout if named else ""
    for name, suite in named.items():
        version = re.escape(chosen.get(name, ""))
        if not re.search(rf"^ *{re.escape(name)} \| +{version} \| .* {suite}[-/]", offers, re.M):
            raise InputError(
                f"Debian {suite} has no package {name}", hint=f"write {name} alone to take it from {base.suite}"
            )


def _records(archive: Archive, chosen: Mapping[str, str]) -> dict[tuple[str, str], dict[str, str]]:
    done = archive.run("apt-cache", "show", *(f"{name}={version}" for name, version in sorted(chosen.items())))
    records = parse_records(done.stdout)
    lacking = [name for name, version in chosen.items() if (name, version) not in records]
    if lacking:
        raise HostError(f"the archive's index gives no SHA256 for {', '.join(lacking[:5])}", hint="use another mirror")
    return records
