"""The Python indexes of this host: pip's configuration, as settings for uv and as requests for files."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
import re
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

import requests
import urllib3
from requests.adapters import HTTPAdapter
from urllib3.util import Retry
from uv import find_uv_bin

from primus.errors import HostError
from primus.versions.traffic import LOG, bare_url, cause

_BLOCK = 1 << 18
# Seconds to connect, and seconds of silence.
_TIMEOUT = (4.0, 20.0)
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
class Indexes:
    """The places that pip would search, first to last, and how it would reach them. They may contain credentials."""

    urls: tuple[str, ...] = field(repr=False)
    find_links: tuple[str, ...] = field(default=(), repr=False)
    constraints: tuple[str, ...] = ()
    cert: str | None = None
    client_cert: str | None = None
    proxy: str | None = field(default=None, repr=False)
    trusted_hosts: tuple[str, ...] = ()
    keyring: bool = False

    @classmethod
    def of_host(cls) -> Indexes:
        """Return the configuration of this host's pip (files and PIP_* variables). Raises HostError without pip."""
        return cls.from_settings(parse_config(_pip_config(frozenset(os.environ.items()))))

    @classmethod
    def from_settings(cls, settings: Mapping[str, str]) -> Indexes:
        """Return the indexes that pip's settings name, or the default of pip and uv if they name none."""
        urls: list[str] = []
        if settings.get("no-index", "").lower() not in ("1", "true", "yes", "on"):
            urls = [settings.get("index-url") or _default_index(), *settings.get("extra-index-url", "").split()]
        return cls(
            urls=tuple(urls),
            find_links=tuple(settings.get("find-links", "").split()),
            constraints=tuple(settings.get("constraint", "").split()),
            cert=settings.get("cert"),
            client_cert=settings.get("client-cert"),
            proxy=settings.get("proxy"),
            trusted_hosts=tuple(settings.get("trusted-host", "").split()),
            keyring=settings.get("keyring-provider", "") in ("subprocess", "import"),
        )

    def only(self, url: str) -> Indexes:
        """Return only the index at ``url``, reached as pip would reach it."""
        return replace(self, urls=(url,), find_links=())

    @property
    def places(self) -> tuple[Indexes, ...]:
        """Return each index and each find-links folder alone, local ones first."""
        folders = [replace(self, urls=(), find_links=(place,)) for place in self.find_links]
        places = (*folders, *map(self.only, self.urls))
        return tuple(sorted(places, key=lambda place: local_path(place.shown[0]) is None))

    @property
    def shown(self) -> tuple[str, ...]:
        """Return every address without credentials."""
        return tuple(map(bare_url, (*self.urls, *self.find_links)))

    def uv_settings(self) -> str:
        """Return the text of a ``uv.toml`` with these indexes, in pip's order: uv tries its default index last."""
        lines = [
            'index-strategy = "unsafe-best-match"',
            f"find-links = {json.dumps(self.find_links)}",
            f"allow-insecure-host = {json.dumps(self.trusted_hosts)}",
            f"no-index = {json.dumps(not self.urls)}",
            f'keyring-provider = "{"subprocess" if self.keyring else "disabled"}"',
            'python-downloads = "never"',
        ]
        for url in self.urls:
            lines += ["[[index]]", f"url = {json.dumps(url)}", "ignore-error-codes = [403]"]
        return "\n".join([*lines, *(["default = true"] if self.urls else []), ""])

    def uv_environment(self) -> dict[str, str]:
        """Return the environment in which uv reaches what pip would. Other settings of uv on this host do not apply."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("UV_") or k == "UV_CACHE_DIR"}
        # A source that does not answer must be named within seconds.
        environment |= {"UV_HTTP_CONNECT_TIMEOUT": "3", "UV_HTTP_TIMEOUT": "6", "UV_HTTP_RETRIES": "1"}
        environment |= {"UV_SYSTEM_CERTS": "true", "NO_COLOR": "1"}
        ca = self._ca()
        if isinstance(ca, str):
            environment["SSL_CERT_FILE"] = ca
        if self.client_cert:
            environment["SSL_CLIENT_CERT"] = self.client_cert
        if self.proxy:
            names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
            environment |= {word: self.proxy for name in names for word in (name, name.lower())}
        return environment

    def get(self, url: str, *, method: str = "GET", start: int = 0) -> requests.Response:
        """Make one streamed request with pip's CA, proxy and credentials. Raises the errors of ``requests``."""
        if self.trusted_hosts:
            urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
        parts, began, outcome = urlsplit(url), time.monotonic(), "no answer"
        session = requests.Session()
        session.mount(f"{parts.scheme}://", HTTPAdapter(max_retries=_RETRIES))
        try:
            response = session.request(
                method,
                url,
                stream=True,
                allow_redirects=True,  # requests itself follows none for HEAD
                headers={"Accept-Encoding": "identity", **({"Range": f"bytes={start}-"} if start else {})},
                auth=self._login(parts.netloc),
                # Not set on the session, where the environment's proxies would precede pip's own setting.
                proxies={"http": self.proxy, "https": self.proxy} if self.proxy else None,
                verify=False if {parts.netloc, parts.hostname} & {*self.trusted_hosts} else self._ca(),
                cert=self.client_cert,
                timeout=_TIMEOUT,
            )
            headers = response.headers
            outcome = f"{response.status_code} {headers.get('Content-Type')} {headers.get('Content-Length')}"
        except requests.RequestException as error:
            outcome = cause(error)
            raise
        finally:
            LOG.info("primus %s %s, %.1f s: %s", method, bare_url(url), time.monotonic() - began, outcome)
        return response

    def files(self, package: str) -> Iterator[tuple[str, str]]:
        """Yield every file of the package that was not yanked, and the Python that it requires (empty: any).

        Raises HostError if an index does not answer.
        """
        for url in (*self.urls, *self.find_links):
            folder = local_path(url)
            try:
                if folder is None:
                    with self.get(f"{url.rstrip('/')}/{package}/") as page:
                        if page.status_code in (403, 404):
                            continue
                        page.raise_for_status()
                        text = page.text
                else:
                    here = folder if url in self.find_links else folder / package
                    pages = [path.read_text(encoding="utf-8") for path in here.glob("index.html")]
                    text = "".join([*pages, *(f"<a>{path.name}</a>" for path in here.glob("*.*"))])
            except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
                message = f"the Python index at {bare_url(url)} does not answer: {cause(error)}"
                raise HostError(message, hint="check the network", about=package) from None
            for about, name in re.findall(r"<a\b([^>]*)>\s*([^<]+?)\s*</a>", text):
                if "data-yanked" not in about:
                    needs = re.search(r'data-requires-python="([^"]*)"', about)
                    yield name, unescape(needs[1]) if needs else ""

    def require_login(self, package: str) -> None:
        """Raise HostError if an index wants credentials for the package, which uv takes for an index without it."""
        for url in (url for url in self.urls if local_path(url) is None):
            with contextlib.suppress(requests.RequestException), self.get(f"{url.rstrip('/')}/{package}/") as page:
                if page.status_code in (401, 407):
                    raise HostError(
                        f"the Python index at {bare_url(url)} wants valid authentication credentials "
                        f"({page.status_code})",
                        hint="give pip the credentials (netrc, or in the index URL)",
                        about=package,
                    )

    def _login(self, host: str) -> tuple[str, str] | None:
        for url in (*self.urls, *self.find_links):
            login, at, netloc = urlsplit(url).netloc.rpartition("@")
            if at and netloc == host:
                user, colon, password = map(unquote, login.partition(":"))
                if self.keyring and not colon:
                    command = ["keyring", "get", url, user]
                    password = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
                return user, password
        return None

    def _ca(self) -> str | bool:
        configured = self.cert or os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE")
        # pip trusts the system's certificate store. requests alone would not find a company's own CA in it.
        return configured or ssl.get_default_verify_paths().cafile or True

    def measure(self, url: str, about: str, sha256: str | None) -> tuple[int, str]:
        """Return length and sha256 of the file at ``url``. It is read in full only if one of them is not stated.

        Raises HostError if there is no such file, or if the answer is a web page.
        """
        try:
            if sha256 is not None:
                if path := local_path(url):
                    return path.stat().st_size, sha256
                with self.get(url, method="HEAD") as response:
                    length = response.headers.get("Content-Length", "")
                    if response.ok and length.isdigit() and not _is_page(response):
                        return int(length), sha256
            digest, size = hashlib.sha256(), 0
            for _, block in self.read(url):
                digest.update(block)
                size += len(block)
        except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
            raise HostError(
                f"the index lists {about}, but the file at {bare_url(url)} is not there: {cause(error)}",
                hint="try again later, or pin another version",
                about=about.partition(" ")[0],
            ) from None
        return size, digest.hexdigest()

    def read(self, url: str, start: int = 0) -> Iterator[tuple[int, bytes]]:
        """Yield offset and bytes of the blocks of a file, from ``start``, or from 0 if the server has no ranges.

        Raises the errors of ``requests`` and ``urllib3``, and OSError for a local file.
        """
        if path := local_path(url):
            with path.open("rb") as file:
                file.seek(start)
                while block := file.read(_BLOCK):
                    yield start, block
                    start += len(block)
            return
        with self.get(url, start=start) as response:
            response.raise_for_status()
            if _is_page(response):
                raise requests.RequestException("it sends a web page")
            position = start if response.status_code == 206 else 0
            for block in response.raw.stream(_BLOCK, decode_content=False):
                yield position, block
                position += len(block)


def _is_page(response: requests.Response) -> bool:
    return response.headers.get("Content-Type", "").startswith("text/html")


def local_path(url: str) -> Path | None:
    """Return the path of a file: URL or a bare path; None for a remote URL."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        return Path(url2pathname(parts.path))
    return Path(url).expanduser() if parts.scheme == "" else None


def parse_config(listing: str) -> dict[str, str]:
    """Return pip's settings for `install` from the output of `pip config list`. Variables override files."""
    layers: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for section, name, value in re.findall(r"^([^.=\n]+)\.([^=\n]+)=(.*)$", listing, re.M):
        if section in layers:
            layers[section][name.replace("_", "-")] = str(ast.literal_eval(value))
    return layers["global"] | layers["install"] | layers[":env:"]


@cache
def _pip_config(environment: frozenset[tuple[str, str]]) -> str:
    # A lock of all targets asks dozens of times, and pip takes half a second.
    command = [sys.executable, "-m", "pip", "config", "list"]
    listing = subprocess.run(command, env=dict(environment), capture_output=True, text=True, check=False)
    if listing.returncode != 0:
        raise HostError("pip does not run here", hint=f"install it for {sys.executable}: python -m ensurepip")
    return listing.stdout


@cache
def _default_index() -> str:
    # This project names no index. uv's help names the one that both tools use without configuration.
    text = subprocess.run([find_uv_bin(), "pip", "compile", "--help"], capture_output=True, text=True, check=False)
    match = re.search(r"by default: <([^>]+)>", text.stdout)
    if match is None:
        raise HostError("uv reports no default index", hint="set one: pip config set global.index-url URL")
    return match[1]
