"""apt's own settings for http and https: proxies, certificates, logins."""

from __future__ import annotations

import re
import ssl
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import requests
import urllib3


@dataclass(frozen=True, kw_only=True)
class AptAccess:
    """apt's ``Acquire`` settings for http and https, and its ``auth.conf`` entries."""

    settings: Mapping[str, str]
    logins: Sequence[tuple[str, tuple[str, str]]] = field(default=(), repr=False)

    @classmethod
    def of_host(cls) -> AptAccess:
        """Return the configuration of this host's apt."""
        dump = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=False).stdout
        settings = {k.lower(): v for k, v in re.findall(r'^([^ ]+) "(.*)";$', dump, re.M)}
        return cls(settings=settings, logins=_logins(settings))

    def get(self) -> Callable[[str, Mapping[str, str]], requests.Response]:
        """Return a function that requests a URL as apt would. Each thread needs its own."""
        session = requests.Session()
        if "false" in {v.lower() for k, v in self.settings.items() if "verify-peer" in k}:
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
            system_ca = ssl.get_default_verify_paths().cafile or True
            return session.get(
                bare,
                stream=True,
                headers=dict(headers),
                timeout=(4.0, 20.0),
                auth=(user, password) if login else self.login(bare),
                cert=(certificate, key) if certificate and key else certificate or None,
                proxies=proxies,
                verify=False if peer.lower() in ("false", "no", "0") else (ca or system_ca),
            )

        return get

    def login(self, url: str) -> tuple[str, str] | None:
        """Return user and password of the first auth.conf entry for ``url``. An entry without a scheme is for https."""
        return next((pair for place, pair in self.logins if re.match(re.escape(place) + r"(?=[/:]|$)", url)), None)

    def _setting(self, scheme: str, name: str, host: str) -> str:
        for key in (f"acquire::{scheme}::{name}::{host}", f"acquire::{scheme}::{host}::{name}"):
            if self.settings.get(key):
                return self.settings[key]
        plain = self.settings.get(f"acquire::{scheme}::{name}", "")
        # Like apt, use the http proxy for https if https has none.
        return plain or (self.settings.get("acquire::http::proxy", "") if name == "proxy" else "")


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
