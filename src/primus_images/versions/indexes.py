"""The Python indexes of this host: pip's configuration, for uv and for requests of our own."""

import ast
import hashlib
import json
import os
import re
import ssl
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from html import unescape
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote, urljoin, urlsplit
from urllib.request import url2pathname

import requests
import urllib3
from requests.adapters import HTTPAdapter
from urllib3.util import Retry
from uv import find_uv_bin

from primus_images.errors import HostError
from primus_images.versions.lock import Kind, LockedFile
from primus_images.versions.traffic import bare_url, cause, seconds_for, within
from primus_images.waits import answer_of

LOGIN_HINT = "give pip the credentials (netrc, or in the index URL)"
_BLOCK = 1 << 18
# Seconds to connect, and seconds of silence.
_TIMEOUT = (4.0, 20.0)
# Bytes of an index's page of one package. That of a large package with nightly builds has a few
# megabytes.
_LARGEST_PAGE = 64 << 20
# What reading a page of another form raises.
_ODD = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
_RETRIES = Retry(
    total=2,
    connect=1,
    read=1,
    backoff_factor=0.5,
    status_forcelist=(408, 425, 429, 500, 502, 503, 504),
    respect_retry_after_header=False,
    raise_on_status=False,
)


@dataclass(frozen=True, kw_only=True)
class Offer:
    """One file of an index; None is not stated.

    ``python`` are the versions of Python that it requires (empty: any).
    """

    file: str
    url: str
    sha256: str | None = None
    size: int | None = None
    python: str = ""
    yanked: bool = False

    def __post_init__(self) -> None:
        if (self.size or 0) < 0 or not re.fullmatch(r"[0-9a-f]{64}", self.sha256 or "0" * 64):
            raise ValueError(f"it states size {self.size} and sha256 {self.sha256} for {self.file}")


@dataclass(frozen=True, kw_only=True)
class Indexes:
    """The places that pip would search, first to last, and how it would reach them.

    They may contain credentials. ``own`` are a channel's own indexes of versions.yaml, by name, and
    ``settings`` pip's settings by their names.
    """

    urls: tuple[str, ...] = field(repr=False)
    own: Mapping[str, str] = field(default_factory=dict, repr=False)
    settings: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def of_host(cls, own: Mapping[str, str]) -> Self:
        """Return the configuration of this host's pip. Raises HostError without pip."""
        listing = _pip_config(frozenset(os.environ.items()))
        return replace(cls.from_settings(parse_config(listing)), own=own)

    @classmethod
    def from_settings(cls, settings: Mapping[str, str]) -> Self:
        """Return the indexes that pip's settings name, or the default of pip and uv."""
        urls: list[str] = []
        if settings.get("no-index", "").lower() not in ("1", "true", "yes", "on"):
            urls = [
                settings.get("index-url") or _default_index(),
                *settings.get("extra-index-url", "").split(),
            ]
        return cls(urls=tuple(urls), settings=settings)

    def listed(self, setting: str) -> tuple[str, ...]:
        """Return the words of a setting of pip that is a list; empty if it is not set."""
        return tuple(self.settings.get(setting, "").split())

    @property
    def places(self) -> tuple[str, ...]:
        """Return the addresses of pip's indexes and find-links, local ones first."""
        places = (*self.listed("find-links"), *self.urls)
        return tuple(sorted(places, key=lambda place: local_path(place) is None))

    @property
    def shown(self) -> tuple[str, ...]:
        """Return every address without credentials."""
        return tuple(map(bare_url, self._addresses))

    @property
    def _addresses(self) -> tuple[str, ...]:
        return (*self.urls, *self.listed("find-links"), *self.own.values())

    def uv_settings(self, wheels: Path) -> str:
        """Return a ``uv.toml`` of these indexes and the folder ``wheels``.

        The order is pip's, because uv tries its default last.
        """
        urls = (*self.urls, *self.own.values())
        lines = [
            'index-strategy = "unsafe-best-match"',
            f"find-links = {json.dumps([*self.listed('find-links'), str(wheels)])}",
            f"allow-insecure-host = {json.dumps(self.listed('trusted-host'))}",
            f"no-index = {json.dumps(not urls)}",
            'keyring-provider = "disabled"',
            'python-downloads = "never"',
        ]
        for url in urls:
            lines += ["[[index]]", f"url = {json.dumps(url)}", "ignore-error-codes = [403]"]
        if urls:
            lines.append("default = true")
        return "\n".join([*lines, ""])

    def uv_environment(self) -> dict[str, str]:
        """Return the environment in which uv reaches what pip would.

        Other settings of uv on this host do not apply.
        """
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("UV_") or name == "UV_CACHE_DIR"
        }
        environment |= {
            # A source that does not answer must be named within seconds.
            "UV_HTTP_CONNECT_TIMEOUT": "3",
            "UV_HTTP_TIMEOUT": "6",
            "UV_HTTP_RETRIES": "1",
            "UV_SYSTEM_CERTS": "true",
            "NO_COLOR": "1",
        }
        ca = self._ca()
        if ca:
            environment["SSL_CERT_FILE"] = ca
        certificate = self.settings.get("client-cert")
        if certificate:
            environment["SSL_CLIENT_CERT"] = certificate
        proxy = self.settings.get("proxy")
        if proxy:
            for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
                environment[name] = proxy
                environment[name.lower()] = proxy
        return environment

    @cached_property
    def _session(self) -> requests.Session:
        if self.listed("trusted-host"):
            urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
        session = requests.Session()
        for scheme in ("http://", "https://"):
            session.mount(scheme, HTTPAdapter(max_retries=_RETRIES))
        return session

    def get(
        self, url: str, method: str = "GET", headers: Mapping[str, str] | None = None
    ) -> requests.Response:
        """Make one streamed request with pip's CA, proxy and credentials.

        Raises the errors of ``requests``.
        """
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        proxy = self.settings.get("proxy")
        trusted = not {host, parts.hostname}.isdisjoint(self.listed("trusted-host"))
        return self._session.request(
            method,
            parts._replace(netloc=host).geturl(),
            stream=True,
            allow_redirects=True,  # requests itself follows none for HEAD
            headers=headers,
            auth=self._login(host),
            # Not set on the session, where the environment's proxies would precede pip's own
            # setting.
            proxies={"http": proxy, "https": proxy} if proxy else None,
            verify=False if trusted else self._ca() or True,
            cert=self.settings.get("client-cert"),
            timeout=_TIMEOUT,
        )

    def offers(self, package: str, place: str) -> list[Offer]:
        """Return every file of the package at ``place``: an index, or find-links.

        Raises HostError if it does not answer.
        """
        url = place
        folder = local_path(place)
        if place not in self.listed("find-links"):
            url = f"{place.rstrip('/')}/{package}/"
            folder = folder and folder / package
        try:
            if folder:
                return _files_in(folder.absolute())
            return within(seconds_for(0), url, lambda: self._files_at(url))
        except (*_ODD, OSError, urllib3.exceptions.HTTPError) as error:
            raise self.silence(url, cause(error), package) from None

    def _files_at(self, url: str) -> list[Offer]:
        """Return the files on the page of a package; none if the index has no such package."""
        with self.get(url) as page:
            if page.status_code in (403, 404):
                return []
            page.raise_for_status()
            content = page.raw.read(_LARGEST_PAGE + 1, decode_content=True)
            if len(content) > _LARGEST_PAGE:
                raise ValueError("its page has no end")
            if "json" in page.headers.get("Content-Type", ""):
                return offers_in(json.loads(content)["files"], page.url)
            return offers_in(_files(content.decode("utf-8", "replace")), page.url)

    def silence(self, url: str, reason: str, about: str) -> HostError:
        """Return the error for an index that does not answer the request for ``url``."""
        address = bare_url(url)
        place = f"the Python index at {address}"
        hint = "point pip at a mirror (pip config set global.index-url URL)"
        for name, own in self.own.items():
            if address.startswith(bare_url(own).rstrip("/")):
                place = f"the index {name} ({bare_url(own)})"
                hint = "use another channel (--channel)"
        if re.search(r"\b40[17]\b", reason):
            message = f"{place} wants valid authentication credentials: {reason}"
            return HostError(message, hint=LOGIN_HINT, about=about)
        return HostError(
            f"{place} does not answer: {reason}", hint=f"check the network, or {hint}", about=about
        )

    def _login(self, host: str) -> tuple[str, str] | None:
        for url in self._addresses:
            login, at, netloc = urlsplit(url).netloc.rpartition("@")
            if at and netloc == host:
                user, _, password = login.partition(":")
                return unquote(user), unquote(password)
        return None

    def _ca(self) -> str | None:
        # pip trusts the system's certificate store. requests alone would not find a company's own
        # CA in it.
        return (
            self.settings.get("cert")
            or os.environ.get("REQUESTS_CA_BUNDLE")
            or os.environ.get("CURL_CA_BUNDLE")
            or ssl.get_default_verify_paths().cafile
        )

    def locked(
        self, kind: Kind, name: str, version: str, offer: Offer, index: str | None = None
    ) -> LockedFile:
        """Return the offered file with its length and sha256, which are measured if need be."""
        size = offer.size
        sha256 = offer.sha256
        if size is None or sha256 is None:
            size, sha256 = self.measure(offer.url, f"{name} {version}", sha256)
        return LockedFile(
            kind=kind,
            name=name,
            version=version,
            file=offer.file,
            size=size,
            sha256=sha256,
            index=index,
        )

    def measure(self, url: str, about: str, sha256: str | None) -> tuple[int, str]:
        """Return length and sha256 of the file at ``url``.

        It is read in full only if one of them is not stated. Raises HostError if there is no such
        file, or if the answer is a web page.
        """
        try:
            if sha256 is not None:
                head = self.open(url, 0, "HEAD")
                with answer_of(bare_url(url)), suppress(requests.HTTPError), head as (length, _, _):
                    if length is not None:
                        return length, sha256
            digest = hashlib.sha256()
            size = 0
            with answer_of(bare_url(url), lambda: size), self.open(url) as (_, _, blocks):
                for block in blocks:
                    digest.update(block)
                    size += len(block)
        except (OSError, urllib3.exceptions.HTTPError) as error:
            raise HostError(
                f"the index lists {about}, but the file at {bare_url(url)} is not there: "
                f"{cause(error)}",
                hint="try again later, or pin another version",
                about=about.partition(" ")[0],
            ) from None
        return size, digest.hexdigest()

    @contextmanager
    def open(
        self, url: str, start: int = 0, method: str = "GET"
    ) -> Iterator[tuple[int | None, int, Iterator[bytes]]]:
        """Yield length, if it is stated, offset and blocks of a file from ``start``.

        The offset is 0 if the server has no ranges. Raises the errors of ``requests`` and
        ``urllib3``, and OSError for a local file.
        """
        path = local_path(url)
        if path:
            with path.open("rb") as file:
                file.seek(start)
                yield path.stat().st_size, start, iter(partial(file.read, _BLOCK), b"")
            return
        headers = {"Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        with self.get(url, method, headers) as response:
            response.raise_for_status()
            if response.headers.get("Content-Type", "").startswith("text/html"):
                raise requests.RequestException("it sends a web page")
            length = response.headers.get("Content-Length", "")
            offset = start if response.status_code == 206 else 0
            blocks = response.raw.stream(_BLOCK, decode_content=False)
            yield int(length) if length.isdigit() else None, offset, blocks


def _files(page: str) -> list[dict[str, Any]]:
    """Return what an HTML page lists, as a JSON page has it."""
    files = []
    for attributes in re.findall(r"""(?i)<a\b((?:[^>"']|"[^"]*"|'[^']*')*)>""", page):
        quoted = re.findall(r"""([\w-]+)\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))""", attributes)
        values = {name.lower(): unescape("".join(texts)) for name, *texts in quoted}
        url, _, fragment = values.get("href", "").partition("#")
        hashes = dict(re.findall(r"^(sha256)=([0-9a-f]{64})$", fragment))
        python = values.get("data-requires-python")
        yanked = "data-yanked" in attributes
        files.append({"url": url, "hashes": hashes, "requires-python": python, "yanked": yanked})
    return files


def _files_in(folder: Path) -> list[Offer]:
    """Return the files in a local folder, and those that its ``index.html`` lists."""
    listing = folder / "index.html"
    text = listing.read_text(encoding="utf-8") if listing.exists() else ""
    listed = offers_in(_files(text), listing.as_uri())
    return listed + [Offer(file=path.name, url=path.as_uri()) for path in folder.glob("*.*")]


def offers_in(files: Any, base: str = "") -> list[Offer]:
    """Return the files of an index's page at the address ``base``, or of a pylock's package."""
    offers = []
    for row in files:
        place = row["url"] if "url" in row else row["path"]
        name = row.get("filename") or unquote(urlsplit(place).path.rpartition("/")[2])
        size = row.get("size")
        offer = Offer(
            file=str(name),
            url=urljoin(base, place),
            sha256=row.get("hashes", {}).get("sha256"),
            size=None if size is None else int(size),
            python=str(row.get("requires-python") or ""),
            yanked=bool(row.get("yanked")),
        )
        offers.append(offer)
    return offers


def local_path(url: str) -> Path | None:
    """Return the path of a file: URL or a bare path; None for a remote URL."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        return Path(url2pathname(parts.path))
    if parts.scheme == "":
        return Path(url).expanduser()
    return None


def parse_config(listing: str) -> dict[str, str]:
    """Return pip's settings for `install` from the output of `pip config list`.

    Variables override files.
    """
    layers: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for section, name, value in re.findall(r"^([^.=\n]+)\.([^=\n]+)=(.*)$", listing, re.M):
        if section in layers:
            layers[section][name.replace("_", "-")] = str(ast.literal_eval(value))
    return layers["global"] | layers["install"] | layers[":env:"]


@cache
def _pip_config(environment: frozenset[tuple[str, str]]) -> str:
    # A lock of all targets asks dozens of times, and pip takes half a second.
    # No module of the current folder, which may be a checkout of somebody else.
    command = [sys.executable, "-P", "-m", "pip", "config", "list"]
    listing = subprocess.run(
        command, env=dict(environment), capture_output=True, errors="replace", check=False
    )
    if listing.returncode != 0:
        raise HostError(
            "pip does not run here", hint=f"install it for {sys.executable}: python -m ensurepip"
        )
    return listing.stdout


@cache
def _default_index() -> str:
    # This project names no index. uv's help names the one that both tools use without
    # configuration.
    text = subprocess.run(
        [find_uv_bin(), "pip", "compile", "--help"], capture_output=True, text=True, check=False
    )
    match = re.search(r"by default: <([^>]+)>", text.stdout)
    if match is None:
        raise HostError(
            "uv reports no default index", hint="set one: pip config set global.index-url URL"
        )
    return match[1]
