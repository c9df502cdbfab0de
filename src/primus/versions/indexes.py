"""The Python indexes of this host, exactly as pip is configured to use them: pages, local folders, credentials, CA.

pip resolves; this module answers what pip does not: where a file of a given name lies, and how long it is.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urldefrag, urljoin, urlsplit, urlunsplit
from urllib.request import url2pathname

import requests
import urllib3
from requests.adapters import HTTPAdapter

from primus.errors import HostError

if TYPE_CHECKING:
    from primus.versions.lock import LockedFile

__all__ = [
    "Indexes",
    "Link",
    "local_path",
    "parse_config",
    "parse_page",
    "pip_failure_hides_network",
    "redact",
    "short",
]

# "Not here". AMD's indexes answer 403 for a package or file that they do not have, as object stores do that nobody may
# list (ROCm/rocm-cli #194, #271).
ABSENT = (403, 404, 410)
CONNECT_S, READ_S = 4.0, 20.0
# What pip takes when nothing is configured; asked of pip itself, so that no address stands in this project.
_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.01"


@dataclass(frozen=True, kw_only=True)
class Link:
    """One file an index offers. ``sha256`` and ``size`` are None where the page does not say."""

    file: str
    url: str
    sha256: str | None = None
    size: int | None = None


@dataclass(frozen=True, kw_only=True)
class Indexes:
    """What pip would search: simple indexes, then find-links places; and how it would reach them."""

    index_urls: tuple[str, ...]
    find_links: tuple[str, ...] = ()
    cert: str | None = None
    client_cert: str | None = None
    proxy: str | None = None
    trusted_hosts: tuple[str, ...] = ()
    credentials: Mapping[str, tuple[str, str]] = field(default_factory=dict, repr=False)

    @classmethod
    def of_host(cls) -> Indexes:
        """The configuration of this host's pip (files and PIP_* variables). Raises HostError when pip is missing."""
        listing = _pip("config", "list")
        settings = parse_config(listing)
        default = _pip_default_index() if "index-url" not in settings else ""
        return cls.from_settings(settings, default)

    @classmethod
    def from_settings(cls, settings: Mapping[str, str], default_index: str) -> Indexes:
        """The indexes that pip's settings name; ``default_index`` stands in when they name none."""
        urls: list[str] = []
        if settings.get("no-index", "").lower() not in ("1", "true", "yes", "on"):
            urls = [settings.get("index-url", default_index), *settings.get("extra-index-url", "").split()]
        credentials: dict[str, tuple[str, str]] = {}
        places = [_without_credentials(url, credentials) for url in (*urls, *settings.get("find-links", "").split())]
        return cls(
            index_urls=tuple(places[: len(urls)]),
            find_links=tuple(places[len(urls) :]),
            cert=settings.get("cert"),
            client_cert=settings.get("client-cert"),
            proxy=settings.get("proxy"),
            trusted_hosts=tuple(settings.get("trusted-host", "").split()),
            credentials=credentials,
        )

    def only(self, url: str) -> Indexes:
        """The one index at ``url``, reached as pip would reach it."""
        return replace(self, index_urls=(url,), find_links=())

    def session(self) -> requests.Session:
        """A session with pip's client certificate. Not for two threads at once."""
        if self.trusted_hosts:
            # Whoever wrote trusted-host knows; pip does not warn either.
            urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
        session = requests.Session()
        adapter = HTTPAdapter(max_retries=0, pool_maxsize=16)
        session.mount("https://", adapter)
        session.mount("http://", adapter)
        session.cert = self.client_cert
        return session

    def get(
        self, session: requests.Session, url: str, *, method: str = "GET", headers: Mapping[str, str] | None = None
    ) -> requests.Response:
        """One streamed request with the right CA and credentials. Raises ``requests`` errors as they are."""
        host = urlsplit(url).netloc
        trusted = host in self.trusted_hosts or (urlsplit(url).hostname or "") in self.trusted_hosts
        return session.request(
            method,
            url,
            stream=True,
            allow_redirects=True,
            headers=dict(headers or {}),
            auth=self.credentials.get(host),
            # Not on the session: there the environment's proxies would win over pip's own setting.
            proxies={"http": self.proxy, "https": self.proxy} if self.proxy else None,
            verify=False if trusted else self._ca(),
            timeout=(CONNECT_S, READ_S),
        )

    def _ca(self) -> str | bool:
        env = os.environ
        configured = self.cert or env.get("REQUESTS_CA_BUNDLE") or env.get("CURL_CA_BUNDLE")
        # pip trusts the system's store; requests alone would not see a company's own CA there.
        return configured or ssl.get_default_verify_paths().cafile or True

    def places(self, name: str) -> tuple[str, ...]:
        """Pages and folders that may offer files of the project ``name``, local ones first."""
        pages = [url.rstrip("/") + f"/{name}/" for url in self.index_urls]
        return tuple(sorted((*self.find_links, *pages), key=lambda place: local_path(place) is None))

    def offers(self, session: requests.Session, place: str) -> tuple[Link, ...]:
        """What one place offers; nothing when it does not know the project. HostError when it does not answer."""
        local = local_path(place)
        if local is not None:
            return _folder(local)
        answer = self._answer(session, place)
        if answer is None:
            return ()
        text, kind, final = answer
        return parse_page(text, kind, final)

    def links(self, session: requests.Session, name: str) -> Iterator[Link]:
        """Every file offered for the project ``name``, place after place. Raises HostError like :meth:`offers`."""
        for place in self.places(name):
            yield from self.offers(session, place)

    def probe(self, name: str) -> None:
        """Raise HostError within seconds when an index does not answer (asked for the page of ``name``)."""
        session = self.session()
        for url in self.remote:
            self._answer(session, url.rstrip("/") + f"/{name}/", head=True)

    @property
    def remote(self) -> tuple[str, ...]:
        """The indexes that a network lies before."""
        return tuple(url for url in self.index_urls if local_path(url) is None)

    def probe_any(self, files: Sequence[LockedFile]) -> None:
        """Raise HostError when the files need an index that is out of reach: no local place has them, and of the
        remote indexes none answers.
        """
        local = {
            link.file
            for place in {place for file in files for place in self.places(file.name) if local_path(place) is not None}
            for link in self.offers(self.session(), place)
        }
        lacking = next((file for file in files if file.file not in local), None)
        remote = self.remote
        if lacking is None:
            return
        errors: list[HostError] = []
        answered = threading.Event()

        def one(url: str) -> None:
            try:
                self.only(url).probe(lacking.name)
            except HostError as error:
                errors.append(error)
                if len(errors) < len(remote):
                    return
            answered.set()

        for url in remote:
            threading.Thread(target=one, args=(url,), daemon=True).start()
        if remote:
            answered.wait()
        if remote and len(errors) == len(remote):
            raise errors[0]

    def _answer(self, session: requests.Session, url: str, head: bool = False) -> tuple[str, str, str] | None:
        try:
            with self.get(session, url, headers={"Accept": _ACCEPT}) as response:
                if response.status_code in (401, 407):
                    raise HostError(
                        f"the Python index at {redact(url)} refused the request ({response.status_code})",
                        hint="give pip the credentials (netrc, or user and password in its index URL)",
                    )
                if response.status_code in ABSENT:
                    return None
                response.raise_for_status()
                return ("" if head else response.text), response.headers.get("Content-Type", ""), response.url
        except requests.RequestException as error:
            raise HostError(
                f"the Python index at {redact(url)} does not answer: {short(error)}",
                hint="check the network, or point pip at a mirror (pip config set global.index-url URL)",
            ) from None

    def measure(self, session: requests.Session, url: str) -> tuple[int, str | None]:
        """Length of the file at ``url``; its sha256 too, but only when it had to be read in full to learn it."""
        local = local_path(url)
        if local is not None:
            return local.stat().st_size, None
        plain = {"Accept-Encoding": "identity"}
        try:
            with self.get(session, url, method="HEAD", headers=plain) as response:
                length = response.headers.get("Content-Length", "")
                if response.ok and length.isdigit():
                    return int(length), None
            with self.get(session, url, headers=plain) as response:
                response.raise_for_status()
                length = response.headers.get("Content-Length", "")
                if length.isdigit():
                    return int(length), None
                size, digest = 0, hashlib.sha256()
                for block in response.iter_content(1 << 20):
                    size += len(block)
                    digest.update(block)
                return size, digest.hexdigest()
        except requests.RequestException as error:
            raise HostError(f"{redact(url)} does not answer: {short(error)}", hint="run it again") from None

    def digest(self, session: requests.Session, url: str) -> str:
        """sha256 of the file at ``url``, by reading all of it: for indexes that tell none."""
        digest = hashlib.sha256()
        local = local_path(url)
        if local is not None:
            with local.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        try:
            with self.get(session, url, headers={"Accept-Encoding": "identity"}) as response:
                response.raise_for_status()
                for block in response.iter_content(1 << 20):
                    digest.update(block)
        except requests.RequestException as error:
            raise HostError(f"{redact(url)} does not answer: {short(error)}", hint="run it again") from None
        return digest.hexdigest()


def parse_config(listing: str) -> dict[str, str]:
    """pip's effective settings for `install` from the text of `pip config list` (variables win over files)."""
    layers: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listing.splitlines():
        key, equals, value = line.partition("=")
        section, dot, name = key.partition(".")
        if not equals or not dot or section not in layers:
            continue
        try:
            layers[section][name.replace("_", "-")] = str(ast.literal_eval(value))
        except (SyntaxError, ValueError):
            continue
    return layers["global"] | layers["install"] | layers[":env:"]


def parse_page(text: str, content_type: str, url: str) -> tuple[Link, ...]:
    """The links of a simple page, PEP 691 JSON or PEP 503 HTML."""
    if "json" in content_type:
        files = json.loads(text).get("files", [])
        return tuple(
            Link(
                file=f["filename"],
                url=urljoin(url, f["url"]),
                sha256=f.get("hashes", {}).get("sha256"),
                size=f.get("size"),
            )
            for f in files
        )
    reader = _Anchors()
    reader.feed(text)
    base = urljoin(url, reader.base) if reader.base else url
    return tuple(_link(urljoin(base, href)) for href in reader.hrefs)


def redact(url: str) -> str:
    """``url`` without credentials, query and fragment: what a message may show."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def short(error: Exception) -> str:
    """The cause of a network error in a few words, without its URL."""
    text = str(error)
    known = {
        "refused": "connection refused",
        "Name or service not known": "its name is not known",
        "name resolution": "its name is not known",
        "CERTIFICATE_VERIFY_FAILED": "its certificate is not trusted (set pip's `cert`, or REQUESTS_CA_BUNDLE)",
        "timed out": "no answer in time",
        "roxy": "the proxy refuses",
        "No route to host": "no route to it",
        "unreachable": "the network is unreachable",
    }
    for mark, words in known.items():
        if mark in text:
            return words
    status = getattr(getattr(error, "response", None), "status_code", None)
    return f"HTTP status {status}" if status else type(error).__name__


def pip_failure_hides_network(text: str) -> bool:
    """Whether pip's error output speaks of a network that failed and not of a version that is missing."""
    marks = ("connection broken", "Could not fetch URL", "Max retries exceeded", "HTTPError", "SSLError")
    absent = tuple(f" {status} Client Error" for status in ABSENT)
    return any(mark in line for line in text.splitlines() for mark in marks if not any(a in line for a in absent))


class _Anchors(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.hrefs: list[str] = []
        self.base: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        href = dict(attrs).get("href")
        if href and tag == "a":
            self.hrefs.append(href)
        elif href and tag == "base" and self.base is None:
            self.base = href


def _link(url: str) -> Link:
    bare, fragment = urldefrag(url)
    match = re.search(r"(?:^|&)sha256=([0-9a-f]{64})", fragment)
    return Link(file=unquote(urlsplit(bare).path.rpartition("/")[2]), url=bare, sha256=match[1] if match else None)


def local_path(url: str) -> Path | None:
    """The path behind a file: URL or a bare path; None for a remote URL."""
    parts = urlsplit(url)
    if parts.scheme in ("file", "copy"):
        return Path(url2pathname(parts.path))
    return Path(url).expanduser() if parts.scheme == "" else None


def _folder(path: Path) -> tuple[Link, ...]:
    """Files in a find-links folder, of one page file, or of a static index folder (index.html inside)."""
    if path.is_file():
        return parse_page(path.read_text(encoding="utf-8"), "text/html", path.as_uri())
    if not path.is_dir():
        return ()
    index = path / "index.html"
    if index.is_file():
        return parse_page(index.read_text(encoding="utf-8"), "text/html", path.resolve().as_uri() + "/")
    return tuple(Link(file=p.name, url=p.resolve().as_uri()) for p in sorted(path.iterdir()) if p.is_file())


def _without_credentials(url: str, credentials: dict[str, tuple[str, str]]) -> str:
    parts = urlsplit(url)
    login, at, host = parts.netloc.rpartition("@")
    if not at:
        return url
    user, _, password = login.partition(":")
    credentials[host] = (unquote(user), unquote(password))
    return urlunsplit((parts.scheme, host, parts.path, parts.query, parts.fragment))


def _pip(*args: str) -> str:
    done = subprocess.run([sys.executable, "-m", "pip", *args], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise HostError("pip does not run here", hint=f"install it for {sys.executable}: python -m ensurepip")
    return done.stdout


def _pip_default_index() -> str:
    # pip offers no command that tells; its constant is the same in every release since 8.
    code = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise HostError("pip reports no default index", hint="set one: pip config set global.index-url URL")
    return done.stdout.strip()
