"""The current locations of locked debs: URIs from apt, and apt's way to reach them (proxy, CA, credentials)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from primus.errors import HostError
from primus.versions.apt import AptAccess
from primus.versions.archive import Archive, open_archive, reason
from primus.versions.debs import parse_records, parse_uris
from primus.versions.lock import LockedFile


@dataclass(frozen=True, kw_only=True)
class Pool:
    """URIs of the debs of one base. ``exact`` are by (package, version), ``near`` are folders of other versions."""

    exact: Mapping[tuple[str, str], str]
    near: Mapping[str, tuple[str, ...]]
    access: AptAccess

    def urls(self, file: LockedFile) -> tuple[str, ...]:
        """Return possible locations, best first. A pool keeps files for a while after the index drops them."""
        exact = self.exact.get((file.name, file.version))
        if exact is not None:
            return (exact,)
        return tuple(folder + file.file.replace("+", "%2b") for folder in self.near.get(file.name, ()))


def locate(debs: Sequence[LockedFile], suites: tuple[str, ...], architecture: str, spill: Path) -> Pool:
    """Look up the debs in the current archive. Raises HostError if it is not available.

    For transports that only apt supports (mirror lists, vendors' own methods), apt fetches the debs to ``spill``.
    """
    with open_archive(suites, architecture) as archive:
        asked = [f"{f.name}={f.version}" for f in debs]
        records = parse_records(archive.run("apt-cache", "show", *asked).stdout)
        present = {key for key in records if key in {(f.name, f.version) for f in debs}}
        exact: dict[tuple[str, str], str] = {}
        if present:
            done = archive.run("apt-get", "download", "--print-uris", *(f"{n}={v}" for n, v in sorted(present)))
            exact = parse_uris(done.stdout)
        spilled = _spill(archive, exact, spill)
        near: dict[str, tuple[str, ...]] = {}
        gone = sorted({f.name for f in debs if (f.name, f.version) not in exact})
        known = {name for name, _ in parse_records(archive.run("apt-cache", "show", *gone).stdout)} if gone else set()
        if known:
            done = archive.run("apt-get", "download", "--print-uris", *sorted(known))
            for (name, _), uri in parse_uris(done.stdout).items():
                near[name] = (*near.get(name, ()), uri.rpartition("/")[0] + "/")
    exact |= spilled
    return Pool(exact=exact, near=near, access=AptAccess.of_host())


def _spill(archive: Archive, exact: Mapping[tuple[str, str], str], spill: Path) -> dict[tuple[str, str], str]:
    foreign = {key: uri for key, uri in exact.items() if urlsplit(uri).scheme not in ("http", "https", "file", "copy")}
    if not foreign:
        return {}
    spill.mkdir(parents=True, exist_ok=True)
    asked = [f"{name}={version}" for name, version in sorted(foreign)]
    done = archive.run("apt-get", "-q", "download", *asked, cwd=spill)
    if done.returncode != 0:
        raise HostError("apt could not download from its sources: " + reason(done.stdout + done.stderr))
    # apt saves files under the names of its archive cache: package_version_architecture.deb, with the epoch escaped.
    there = {key: file for file in spill.glob("*.deb") for key in parse_uris(f"'' {file.name} 0")}
    return {key: there[key].resolve().as_uri() for key in foreign if key in there}
