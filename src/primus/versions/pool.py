"""Where locked debs lie today: URIs from apt, and how apt on this host reaches them (proxy, CA, credentials)."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from primus.versions.archive import open_archive
from primus.versions.debs import parse_records, parse_uris
from primus.versions.lock import LockedFile

if TYPE_CHECKING:
    import requests

__all__ = ["AptAccess", "Pool", "locate"]


@dataclass(frozen=True, kw_only=True)
class AptAccess:
    """apt's ``Acquire`` settings and its ``auth.conf`` entries, as far as http and https go."""

    settings: Mapping[str, str]
    logins: Mapping[str, tuple[str, str]] = field(default_factory=dict, repr=False)

    @classmethod
    def of_host(cls) -> AptAccess:
        """What apt on this host is configured to."""
        dump = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=False).stdout
        settings = {k.lower(): v for k, v in re.findall(r'^([^ ]+) "(.*)";$', dump, re.M)}
        return cls(settings=settings, logins=_logins(settings))

    def get(self) -> Callable[[str, Mapping[str, str]], requests.Response]:
        """A function that asks for a URL as apt would. One per thread."""
        import requests

        session = requests.Session()

        def get(url: str, headers: Mapping[str, str]) -> requests.Response:
            parts = urlsplit(url)
            login, _, host = parts.netloc.rpartition("@")
            user, _, password = login.partition(":")
            bare = urlunsplit((parts.scheme, host, parts.path, parts.query, ""))
            proxy = self._setting(parts.scheme, "proxy", parts.hostname or "")
            proxies = {parts.scheme: "" if proxy == "DIRECT" else proxy} if proxy else None
            ca = self._setting(parts.scheme, "cainfo", parts.hostname or "")
            peer = self._setting(parts.scheme, "verify-peer", parts.hostname or "") or "true"
            return session.get(
                bare,
                stream=True,
                headers=dict(headers),
                timeout=(4.0, 20.0),
                auth=(user, password) if login else self.logins.get(parts.hostname or ""),
                proxies=proxies,
                verify=False if peer.lower() in ("false", "no", "0") else (ca or _system_ca()),
            )

        return get

    def _setting(self, scheme: str, name: str, host: str) -> str:
        for key in (f"acquire::{scheme}::{name}::{host}", f"acquire::{scheme}::{host}::{name}"):
            if self.settings.get(key):
                return self.settings[key]
        plain = self.settings.get(f"acquire::{scheme}::{name}", "")
        # apt uses the http proxy for https as well when https has none of its own.
        return plain or (self.settings.get("acquire::http::proxy", "") if name == "proxy" else "")


@dataclass(frozen=True, kw_only=True)
class Pool:
    """URIs of the debs of one base. ``exact`` are by (package, version), ``near`` are folders of its other versions."""

    exact: Mapping[tuple[str, str], str]
    near: Mapping[str, tuple[str, ...]]
    access: AptAccess

    def urls(self, file: LockedFile) -> tuple[str, ...]:
        """Where the file may lie, best first. A pool keeps a file for a while after its index forgot it."""
        exact = self.exact.get((file.name, file.version))
        if exact is not None:
            return (exact,)
        return tuple(folder + file.file.replace("+", "%2b") for folder in self.near.get(file.name, ()))

    def get(self) -> Callable[[str, Mapping[str, str]], requests.Response]:
        """See :meth:`AptAccess.get`."""
        return self.access.get()


def locate(debs: Sequence[LockedFile], suite: str, architecture: str) -> Pool:
    """Look the debs up in the archive as it is now. Raises HostError when it is out of reach."""
    with open_archive(suite, architecture) as archive:
        asked = [f"{f.name}={f.version}" for f in debs]
        records = parse_records(archive.run("apt-cache", "show", *asked).stdout)
        present = {key for key in records if key in {(f.name, f.version) for f in debs}}
        exact: dict[tuple[str, str], str] = {}
        if present:
            done = archive.run("apt-get", "download", "--print-uris", *(f"{n}={v}" for n, v in sorted(present)))
            exact = {key: uri for uri, key in _uris(done.stdout)}
        near: dict[str, tuple[str, ...]] = {}
        for name in sorted({f.name for f in debs if (f.name, f.version) not in exact}):
            done = archive.run("apt-get", "download", "--print-uris", name)
            near[name] = tuple(uri.rpartition("/")[0] + "/" for uri, _ in _uris(done.stdout))
    return Pool(exact=exact, near=near, access=AptAccess.of_host())


def _uris(text: str) -> list[tuple[str, tuple[str, str]]]:
    found = []
    for line in text.splitlines():
        match = re.match(r"'([^']*)' ", line)
        if match:
            found += [(match[1], key) for key in parse_uris(line).items()]
    return found


def _logins(settings: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    from pathlib import Path

    etc = Path(settings.get("dir", "/")) / settings.get("dir::etc", "etc/apt")
    files = [etc / settings.get("dir::etc::netrc", "auth.conf")]
    parts = etc / settings.get("dir::etc::netrcparts", "auth.conf.d")
    if parts.is_dir():
        files += sorted(parts.glob("*.conf"))
    found: dict[str, tuple[str, str]] = {}
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except OSError:
            continue
        for host, user, password in re.findall(r"machine\s+(\S+)\s+login\s+(\S+)\s+password\s+(\S+)", text):
            bare = host.rpartition("//")[2].partition("/")[0].partition(":")[0]
            found.setdefault(bare, (user, password))
    return found


def _system_ca() -> str | bool:
    import ssl

    return ssl.get_default_verify_paths().cafile or True
