"""A client for the OCI distribution API that uses the logins of `docker login`.

skopeo copies images. This client does what skopeo cannot: it pushes artifacts and lists them.
"""

from __future__ import annotations

import json
import re
import time
from base64 import b64encode
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import requests
from requests import RequestException
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from primus.errors import HostError
from primus.versions.traffic import PATIENCE, bare_url, notify, requesting

if TYPE_CHECKING:
    from requests import PreparedRequest, Response, Session

_WAIT_S = (5.0, 60.0)
_PASSING = (429, 500, 502, 503, 504)
_WORD = re.compile(r'([a-z]+)="([^"]*)"')
_HUB = {"docker.io": "registry-1.docker.io"}


def plain_http(repository: str) -> bool:
    """Whether the registry is on this machine and therefore uses HTTP, as for Docker."""
    host = repository.partition("/")[0].partition(":")[0]
    return host == "localhost" or re.fullmatch(r"127(\.[0-9]{1,3}){3}", host) is not None


class Registry:
    """The ``/v2/`` API of one repository. ``name`` is ``host[:port]/path``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._host, _, self._path = name.partition("/")
        scheme = "http" if plain_http(name) else "https"
        self._server = f"{scheme}://{_HUB.get(self._host, self._host)}/"
        self._session = _session()
        self._authorization = ""

    def request(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, str] | None = None,
        data: bytes | None = None,
        absent: bool = False,
    ) -> Response:
        """Send one request to a path below the repository (``manifests/v1``), or to a URL that the registry returned.

        Raises HostError if the registry does not answer or refuses. With ``absent``, status 404 is returned instead.
        """
        url = path if "://" in path else f"{self._server}v2/{self._path}/{path}"

        def send() -> Response:
            return self._session.request(
                method, url, headers=headers, params=params, data=data, timeout=_WAIT_S, auth=self._signed
            )

        with requesting("publish", url, self.name, method):
            try:
                answer = self._patiently(send)
                if answer.status_code == 401 and answer.url.startswith(self._server) and self._log_in(answer):
                    answer = self._patiently(send)
            except (requests.ConnectionError, requests.Timeout) as error:
                raise HostError(
                    f"the registry of {self.name} does not answer: {type(error).__name__}",
                    hint="check name and network, and run the command again",
                ) from None
            except RequestException as error:
                raise self.odd(f"{type(error).__name__} for {bare_url(url)}") from None
        if answer.status_code in (401, 403):
            raise HostError(f"the registry of {self.name} denied access", hint=f"docker login {self._host}")
        if answer.status_code >= 400 and not (absent and answer.status_code == 404):
            said = " ".join(answer.text.split())[:200]
            raise HostError(
                f"the registry of {self.name} refuses {bare_url(path)}: status {answer.status_code}"
                + (f"; {said}" if said else ""),
                hint="run the command again later; what was sent is kept"
                if answer.status_code in _PASSING
                else "check --to, and that the registry accepts OCI images",
            )
        return answer

    def json(self, answer: Response) -> dict[str, Any]:
        """Return the JSON object in ``answer``. Raises HostError if there is none."""
        try:
            content = json.loads(answer.content)
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            raise self.odd(f"{bare_url(answer.url)} is not a JSON object")
        return content

    def odd(self, what: str) -> HostError:
        """Return the error for an answer that no registry gives."""
        return HostError(
            f"{self.name} does not answer like a registry: {what}",
            hint="check --to; a login page or a proxy may answer instead of the registry",
        )

    def _patiently(self, send: Callable[[], Response]) -> Response:
        """Send again if the registry is overloaded; a short Retry-After is obeyed."""
        for number in range(PATIENCE.tries - 1):
            answer = send()
            if answer.status_code not in _PASSING:
                return answer
            asked = answer.headers.get("Retry-After", "")
            pause = float(asked) if asked.isascii() and asked.isdigit() else PATIENCE.pause_s * 2**number
            if pause > PATIENCE.longest_pause_s:
                return answer
            notify(f"{bare_url(answer.url)} ({self.name}): status {answer.status_code}; retrying")
            time.sleep(pause)
        return send()

    def _signed(self, request: PreparedRequest) -> PreparedRequest:
        # A URL that the registry returned may be on another host, which must not receive the login.
        if self._authorization and (request.url or "").startswith(self._server):
            request.headers["Authorization"] = self._authorization
        return request

    def _log_in(self, answer: Response) -> bool:
        """Answer the registry's authentication challenge. Returns False if that is not possible."""
        kind, _, rest = answer.headers.get("WWW-Authenticate", "").partition(" ")
        login = _login(self._host)
        basic = _basic(login)
        if kind.lower() == "basic":
            self._authorization = basic
            return bool(basic)
        asked = dict(_WORD.findall(rest))
        if kind.lower() != "bearer" or "realm" not in asked:
            return False
        wants = {"service": asked.get("service", ""), "scope": f"repository:{self._path}:pull,push"}
        if refresh := login.get("identitytoken"):
            form = {**wants, "grant_type": "refresh_token", "refresh_token": refresh, "client_id": "primus"}
            given = self._session.post(asked["realm"], data=form, timeout=_WAIT_S, auth=_nobody)
        else:
            headers = {"Authorization": basic} if basic else {}
            given = self._session.get(asked["realm"], params=wants, headers=headers, timeout=_WAIT_S, auth=_nobody)
        if given.status_code != 200:
            return False
        content = self.json(given)
        token = content.get("token") or content.get("access_token")
        self._authorization = f"Bearer {token}"
        return bool(token)


def _basic(login: Mapping[str, Any]) -> str:
    words = f"{login['username']}:{login['password']}" if login.get("username") else ""
    return f"Basic {b64encode(words.encode()).decode()}" if words else ""


def _nobody(request: PreparedRequest) -> PreparedRequest:
    """Send no login. Without this, requests would take one from ~/.netrc."""
    return request


def _session() -> Session:
    session = requests.Session()
    # A registry that says nothing is not asked again: each try takes a minute.
    retry = Retry(total=2, read=0, status=0, backoff_factor=0.3, respect_retry_after_header=False)
    for scheme in ("https://", "http://"):
        session.mount(scheme, HTTPAdapter(max_retries=retry))
    return session


def _login(host: str) -> dict[str, Any]:
    """Return the login that `docker login` stored for the host, also by credential helpers; empty if there is none."""
    from docker.auth import load_config
    from docker.errors import DockerException

    try:
        # The keys of a credential helper's answer are capitalized; those of the file are not.
        return {key.lower(): value for key, value in (load_config().resolve_authconfig(host) or {}).items()}
    except DockerException as error:
        raise HostError(f"Docker's logins cannot be read: {error}", hint=f"docker login {host}") from None
