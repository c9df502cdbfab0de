"""The Python indexes of this host, as pip is configured to use them: pages, local folders, credentials, CA.

pip resolves versions. This module answers what pip does not: where a file is, and how large it is.
"""

from __future__ import annotations

import ast
import hashlib
import os
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit, urlunsplit

import requests
import urllib3
from requests.adapters import HTTPAdapter

from primus.errors import HostError
from primus.versions import traffic
from primus.versions.answers import ABSENT, LASTING, PASSING, PLAIN, SafeSession, file_length, retry_after, short
from primus.versions.pages import Link, NotAPage, folder, local_path, parse_page
from primus.versions.traffic import bare_url, notify, requesting

if TYPE_CHECKING:
    from primus.versions.lock import LockedFile

# pip's default index without any configuration. It is read from pip, so that this project contains no address.
_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.01"


@dataclass(frozen=True, kw_only=True)
class Indexes:
    """The places that pip would search (simple indexes, then find-links), and how it would reach them."""

    index_urls: tuple[str, ...]
    find_links: tuple[str, ...] = ()
    cert: str | None = None
    client_cert: str | None = None
    proxy: str | None = None
    trusted_hosts: tuple[str, ...] = ()
    credentials: Mapping[str, tuple[str, str]] = field(default_factory=dict, repr=False)

    @classmethod
    def of_host(cls) -> Indexes:
        """Return the configuration of this host's pip (files and PIP_* variables). Raises HostError without pip."""
        settings = parse_config(_pip("config", "list"))
        return cls.from_settings(settings, _pip_default_index() if "index-url" not in settings else "")

    @classmethod
    def from_settings(cls, settings: Mapping[str, str], default_index: str) -> Indexes:
        """Return the indexes that pip's settings name, or ``default_index`` if they name none."""
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
        """Return only the index at ``url``, reached as pip would reach it."""
        return replace(self, index_urls=(url,), find_links=())

    def session(self) -> requests.Session:
        """Return a session with pip's client certificate. It must not be used by two threads at the same time."""
        if self.trusted_hosts:
            # trusted-host was set on purpose, and pip does not warn either.
            urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
        session = SafeSession()
        adapter = HTTPAdapter(max_retries=0, pool_maxsize=16)
        session.mount("https://", adapter)
        session.mount("http://", adapter)
        session.cert = self.client_cert
        return session

    def get(
        self,
        session: requests.Session,
        url: str,
        *,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        about: str = "",
    ) -> requests.Response:
        """Make one streamed request with the right CA and credentials. Raises the errors of ``requests``."""
        host = urlsplit(url).netloc
        trusted = host in self.trusted_hosts or (urlsplit(url).hostname or "") in self.trusted_hosts
        with requesting("primus", url, about or url.rpartition("/")[2], method) as request:
            try:
                response = session.request(
                    method,
                    url,
                    stream=True,
                    allow_redirects=True,
                    headers=dict(headers or {}),
                    auth=self.credentials.get(host),
                    # Not set on the session, where the environment's proxies would take precedence over pip's own
                    # setting.
                    proxies={"http": self.proxy, "https": self.proxy} if self.proxy else None,
                    verify=False if trusted else self._ca(),
                    timeout=(traffic.PATIENCE.connect_s, traffic.PATIENCE.read_s),
                )
            except requests.RequestException as error:
                request.verdict = f"failed: {short(error)}"
                raise
            length = response.headers.get("Content-Length", "")
            kind = response.headers.get("Content-Type", "")
            request.answer(response.status_code, kind, int(length) if length.isdigit() else None)
        return response

    def _patient(
        self,
        session: requests.Session,
        url: str,
        about: str,
        *,
        what: str,
        headers: Mapping[str, str] | None = None,
        probe: bool = False,
    ) -> requests.Response:
        """Make a request with :meth:`get`, and retry it after a temporary failure. "Not found" counts as an
        answer.

        A ``probe`` asks once, and accepts a temporary failure as an answer. Raises HostError that names
        ``what`` was requested and for ``about`` which package.
        """
        cause, hint = "", "check the network, or point pip at a mirror (pip config set global.index-url URL)"
        patience, tries = traffic.PATIENCE, 1 if probe else traffic.PATIENCE.tries
        for number in range(1, tries + 1):
            pause = patience.pause_s * 2 ** (number - 1)
            try:
                response = self.get(session, url, headers=headers, about=about)
            except requests.RequestException as error:
                cause = short(error)
                if isinstance(error, requests.exceptions.SSLError | requests.TooManyRedirects | LASTING):
                    break
            else:
                status = response.status_code
                if status < 400 or status in (*ABSENT, 416) or (probe and status in PASSING):
                    return response
                response.close()
                cause = f"HTTP status {status}"
                if status in (401, 407):
                    raise HostError(
                        f"{what} at {bare_url(url)} refused the request ({status}) for {about}",
                        hint="give pip the credentials (netrc, or user and password in its index URL)",
                        about=_name(about),
                    )
                if status not in PASSING:
                    break
                pause = retry_after(response) or pause
                if pause > patience.longest_pause_s:
                    cause, hint = f"{cause}, asked to come back in {pause:g} s", f"run it again in {pause:g} s"
                    break
            if number < tries:
                notify(f"{bare_url(url)} ({about}): {cause}; retrying in {pause:g} s, try {number + 1} of {tries}")
                time.sleep(pause)
        raise HostError(
            f"{what} at {bare_url(url)}, asked for {about}, does not answer: {cause}", hint=hint, about=_name(about)
        )

    def _ca(self) -> str | bool:
        env = os.environ
        configured = self.cert or env.get("REQUESTS_CA_BUNDLE") or env.get("CURL_CA_BUNDLE")
        # pip trusts the system's certificate store. requests alone would not find a company's own CA in it.
        return configured or ssl.get_default_verify_paths().cafile or True

    def places(self, name: str) -> tuple[str, ...]:
        """Return pages and folders that may offer files of the project ``name``, local ones first."""
        pages = [url.rstrip("/") + f"/{name}/" for url in self.index_urls]
        return tuple(sorted((*self.find_links, *pages), key=lambda place: local_path(place) is None))

    def offers(self, session: requests.Session, place: str) -> tuple[Link, ...]:
        """Return the files that one place offers; none for an unknown project. HostError if it does not answer."""
        local = local_path(place)
        if local is not None:
            return folder(local)
        about = place.rstrip("/").rpartition("/")[2]
        with self._patient(session, place, about, what="the Python index", headers={"Accept": _ACCEPT}) as response:
            if response.status_code in ABSENT:
                return ()
            try:
                with requesting("primus", place, about, record=False):
                    text = response.text
                return parse_page(text, response.headers.get("Content-Type", ""), response.url)
            except (requests.RequestException, NotAPage) as error:
                cause = str(error) if isinstance(error, NotAPage) else short(error)
                raise HostError(
                    f"the Python index at {bare_url(place)} has no usable page of {about}: {cause}",
                    hint="open the address in a browser; sign in where it asks, or point pip or `indexes` at another",
                    about=about,
                ) from None

    def links(self, session: requests.Session, name: str) -> Iterator[Link]:
        """Yield every file offered for the project ``name``, place by place. Raises HostError as :meth:`offers`."""
        for place in self.places(name):
            yield from self.offers(session, place)

    def probe(self, name: str) -> None:
        """Raise HostError within seconds if an index does not answer a request for the page of ``name``.

        A temporary failure counts as an answer, because the later request for the page is retried.
        """
        session = self.session()
        for url in self.remote:
            page = url.rstrip("/") + f"/{name}/"
            headers = {"Accept": _ACCEPT}
            self._patient(session, page, name, what="the Python index", headers=headers, probe=True).close()

    @property
    def remote(self) -> tuple[str, ...]:
        """Return the indexes on the network."""
        return tuple(url for url in self.index_urls if local_path(url) is None)

    def probe_any(self, files: Sequence[LockedFile]) -> None:
        """Raise HostError if the files need an index that cannot be reached.

        This is the case if no local place has them, and none of the remote indexes answers.
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

    def measure(self, session: requests.Session, url: str, about: str = "") -> tuple[int, str | None]:
        """Return the length of the file at ``url``, and its sha256 if it had to be read in full for that.

        Raises HostError if there is no such file, or if the answer is a web page.
        """
        local = local_path(url)
        if local is not None:
            return local.stat().st_size, None
        about = about or url.rpartition("/")[2]
        try:
            with self.get(session, url, method="HEAD", headers=PLAIN, about=about) as response:
                if response.ok and (length := file_length(response)) is not None:
                    return length, None
        except requests.RequestException:
            pass  # Requested again below, with retries.
        # Some servers refuse HEAD, for example for signed addresses. The answer to a request for one byte has the total
        # length.
        headers = PLAIN | {"Range": "bytes=0-0"}
        with self._patient(session, url, about, what="the file", headers=headers) as response:
            self._must_be_file(response, url, about)
            total = response.headers.get("Content-Range", "").rpartition("/")[2]
            if response.status_code == 206 and total.isdigit():
                return int(total), None
            if response.status_code == 200 and (length := file_length(response)) is not None:
                return length, None
        return self.read(session, url, about)

    def read(self, session: requests.Session, url: str, about: str = "") -> tuple[int, str]:
        """Return length and sha256 of the file at ``url`` by reading all of it. An interrupted transfer is resumed."""
        local = local_path(url)
        if local is not None:
            with local.open("rb") as file:
                return local.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()
        about = about or url.rpartition("/")[2]
        size, most, faults, digest = 0, 0, 0, hashlib.sha256()
        while True:
            headers = PLAIN | ({"Range": f"bytes={size}-"} if size else {})
            cause = "it ended early"
            with self._patient(session, url, about, what="the file", headers=headers) as response:
                self._must_be_file(response, url, about)
                resumed = response.headers.get("Content-Range", "").startswith(f"bytes {size}-")
                if size and not (response.status_code == 206 and resumed):
                    size, digest = 0, hashlib.sha256()
                try:
                    response.raise_for_status()
                    with requesting("primus", url, about, record=False) as request:
                        for block in response.raw.stream(1 << 20, decode_content=False):
                            request.hear()
                            size += len(block)
                            digest.update(block)
                    return size, digest.hexdigest()
                except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
                    cause = short(error)
            # A server that restarts from the beginning each time makes no progress.
            faults = 1 if size > most else faults + 1
            most = max(most, size)
            if faults >= traffic.PATIENCE.tries:
                raise HostError(
                    f"the file at {bare_url(url)}, asked for {about}, cannot be read: {cause}, {faults} times",
                    hint="run it again",
                    about=_name(about),
                )
            notify(f"{bare_url(url)} ({about}): {cause} after {size:,} bytes; continuing from there")
            time.sleep(traffic.PATIENCE.pause_s)

    def _must_be_file(self, response: requests.Response, url: str, about: str) -> None:
        """Raise HostError for an address without such a file, or with a page instead."""
        kind = response.headers.get("Content-Type", "")
        if response.status_code in ABSENT:
            cause = f"HTTP status {response.status_code}"
        elif kind.startswith("text/html"):
            cause = "it sends a web page, such as a login"
        else:
            return
        raise HostError(
            f"the index lists {about}, but the file at {bare_url(url)} is not there: {cause}",
            hint="try again later, or pin another version",
            about=_name(about),
        )


def _name(about: str) -> str:
    """Return the package of ``NAME`` or ``NAME VERSION``."""
    return about.partition(" ")[0]


def parse_config(listing: str) -> dict[str, str]:
    """Return pip's settings for `install` from the output of `pip config list`. Variables override files."""
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


def pip_failure_hides_network(text: str) -> bool:
    """Return whether pip's error output is about a failed network, not a missing version."""
    marks = ("connection broken", "Could not fetch URL", "Max retries exceeded", "HTTPError", "SSLError")
    absent = tuple(f" {status} Client Error" for status in ABSENT)
    return any(mark in line for line in text.splitlines() for mark in marks if not any(a in line for a in absent))


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
    # pip has no command for this. Its constant has not changed since release 8.
    code = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise HostError("pip reports no default index", hint="set one: pip config set global.index-url URL")
    return done.stdout.strip()
