"""Where locked debs lie today: URIs from apt, and how apt on this host reaches them (proxy, CA, credentials)."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from primus.errors import HostError
from primus.versions.archive import Archive, host_stanzas, open_archive, reason, suite_of, titled
from primus.versions.debs import parse_records, parse_uris
from primus.versions.indexes import redact, short
from primus.versions.lock import LockedFile

if TYPE_CHECKING:
    import requests

__all__ = ["AptAccess", "Pool", "archive_probes", "locate"]


@dataclass(frozen=True, kw_only=True)
class AptAccess:
    """apt's ``Acquire`` settings and its ``auth.conf`` entries, as far as http and https go."""

    settings: Mapping[str, str]
    logins: Sequence[tuple[str, tuple[str, str]]] = field(default=(), repr=False)

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
        if "false" in {v.lower() for k, v in self.settings.items() if "verify-peer" in k}:
            import urllib3

            urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)

        def get(url: str, headers: Mapping[str, str]) -> requests.Response:
            parts = urlsplit(url)
            login, _, host = parts.netloc.rpartition("@")
            user, _, password = login.partition(":")
            bare = urlunsplit((parts.scheme, host, parts.path, parts.query, ""))
            proxy = self._setting(parts.scheme, "proxy", parts.hostname or "")
            proxies = {parts.scheme: "" if proxy == "DIRECT" else proxy} if proxy else None
            ca = self._setting(parts.scheme, "cainfo", parts.hostname or "")
            certificate = self._setting(parts.scheme, "sslcert", parts.hostname or "")
            key = self._setting(parts.scheme, "sslkey", parts.hostname or "")
            peer = self._setting(parts.scheme, "verify-peer", parts.hostname or "") or "true"
            return session.get(
                bare,
                stream=True,
                headers=dict(headers),
                timeout=(4.0, 20.0),
                auth=(user, password) if login else self.login(bare),
                cert=(certificate, key) if certificate and key else certificate or None,
                proxies=proxies,
                verify=False if peer.lower() in ("false", "no", "0") else (ca or _system_ca()),
            )

        return get

    def login(self, url: str) -> tuple[str, str] | None:
        """User and password of the first auth.conf entry that covers ``url``; one without a scheme means https."""
        return next((pair for place, pair in self.logins if re.match(re.escape(place) + r"(?=[/:]|$)", url)), None)

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


def archive_probes(suites: Iterable[str]) -> dict[str, Callable[[], object]]:
    """What to ask each mirror that apt would use for the suites, by its name in messages; see :func:`sources.ask`.

    Any answer but an error of the server is one: apt judges the rest, and says what is wrong with it.
    """
    wanted = tuple(suites)
    access = AptAccess.of_host() if wanted else None
    found: dict[str, Callable[[], object]] = {}
    for stanza in host_stanzas(wanted) if wanted else ():
        for uri in stanza["URIs"].split():
            suite = stanza["Suites"].split()[0]
            if access and urlsplit(uri).scheme in ("http", "https"):
                url = f"{uri.rstrip('/')}/dists/{suite}/InRelease"
                maker = titled(suite_of(suite)[0]).partition(" ")[0]
                found[f"the {maker} archive at {redact(uri)}"] = partial(_probe, access, url)
    return found


def _probe(access: AptAccess, url: str) -> None:
    import requests

    try:
        with access.get()(url, {}) as response:
            if response.status_code >= 500:
                raise HostError(f"{redact(url)}: HTTP status {response.status_code}")
    except requests.RequestException as error:
        raise HostError(f"{redact(url)}: {short(error)}") from None


def locate(debs: Sequence[LockedFile], suites: tuple[str, ...], architecture: str, spill: Path) -> Pool:
    """Look the debs up in the archive as it is now. Raises HostError when it is out of reach.

    Debs behind a transport only apt speaks (mirror lists, vendors' own methods) are fetched by apt into ``spill``.
    """
    with open_archive(suites, architecture) as archive:
        asked = [f"{f.name}={f.version}" for f in debs]
        records = parse_records(archive.run("apt-cache", "show", *asked).stdout)
        present = {key for key in records if key in {(f.name, f.version) for f in debs}}
        exact: dict[tuple[str, str], str] = {}
        if present:
            done = archive.run("apt-get", "download", "--print-uris", *(f"{n}={v}" for n, v in sorted(present)))
            exact = {key: uri for uri, key in _uris(done.stdout)}
        spilled = _spill(archive, exact, spill)
        near: dict[str, tuple[str, ...]] = {}
        gone = sorted({f.name for f in debs if (f.name, f.version) not in exact})
        known = {name for name, _ in parse_records(archive.run("apt-cache", "show", *gone).stdout)} if gone else set()
        if known:
            done = archive.run("apt-get", "download", "--print-uris", *sorted(known))
            for uri, (name, _) in _uris(done.stdout):
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
    # apt names what it saves like its archive cache: package_version_architecture.deb, epoch escaped.
    there = {key: file for file in spill.glob("*.deb") for key in parse_uris(f"'' {file.name} 0").items()}
    return {key: there[key].resolve().as_uri() for key in foreign if key in there}


def _uris(text: str) -> list[tuple[str, tuple[str, str]]]:
    found = []
    for line in text.splitlines():
        match = re.match(r"'([^']*)' ", line)
        if match:
            found += [(match[1], key) for key in parse_uris(line).items()]
    return found


def _logins(settings: Mapping[str, str]) -> tuple[tuple[str, tuple[str, str]], ...]:
    etc = Path(settings.get("dir", "/")) / settings.get("dir::etc", "etc/apt")
    files = [etc / settings.get("dir::etc::netrc", "auth.conf")]
    parts = etc / settings.get("dir::etc::netrcparts", "auth.conf.d")
    if parts.is_dir():
        files += sorted(parts.glob("*.conf"))
    found: list[tuple[str, tuple[str, str]]] = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except OSError:
            continue
        for host, user, password in re.findall(r"machine\s+(\S+)\s+login\s+(\S+)\s+password\s+(\S+)", text):
            place = host if "://" in host else f"https://{host}"
            found.append((place.rstrip("/"), (user, password)))
    return tuple(found)


def _system_ca() -> str | bool:
    import ssl

    return ssl.get_default_verify_paths().cafile or True
