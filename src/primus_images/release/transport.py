"""Requests to one registry: its address, certificates and login, and a sentence for each failure.

A login goes to the registry, and to the token service that it names over TLS in its own domain. Any
other address that a registry names gets no login, and the error names that address.
"""

import http.client
import io
import ipaddress
import json
import re
import ssl
from collections.abc import Callable, Iterator, Mapping
from http.cookiejar import DefaultCookiePolicy
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit
from urllib.request import parse_http_list

import requests
import urllib3
from requests import PreparedRequest, Response
from requests.adapters import HTTPAdapter
from urllib3.exceptions import MaxRetryError, ResponseError
from urllib3.util import Retry

from primus_images.errors import HostError
from primus_images.release.artifact import DAMAGED
from primus_images.release.certificates import context_for, speaks_tls
from primus_images.release.logins import Login, login_for
from primus_images.release.mirrors import Endpoint, endpoint_of
from primus_images.release.reference import on_this_machine
from primus_images.terminal import say
from primus_images.versions.traffic import bare_url, within

# Seconds to connect, seconds of silence, and seconds of a whole answer besides the time that its
# bytes may take.
_TIMEOUT = (5.0, 60.0)
_PATIENCE = 120.0
_SLOWEST = 250_000  # bytes/s
_PASSING = (429, 500, 502, 503, 504)
_LONGEST_PAUSE = 10.0
# The most bytes of a manifest, a list or a token that are read. Registries accept manifests of up
# to 4 MiB.
_BUDGET = 4 << 20
_PORTS = {"http": 80, "https": 443}
# Domains in which each customer has a host: those beside a registry are of other owners.
_SHARED = ("amazonaws.com", "azurecr.cn", "azurecr.io", "azurecr.us", "github.io", "jfrog.io")
# Below a country's domain, such as co.uk, names are sold to anybody.
_SOLD = ("ac", "co", "com", "edu", "gob", "gov", "ne", "net", "nom", "or", "org")
_AGAIN = "run the command again: what was sent is kept"


class _Patience(Retry):
    """Tries again if the registry is overloaded, and obeys a short Retry-After.

    After a longer one, the answer stands. A registry that says nothing is not asked again: each try
    takes a minute.
    """

    def get_retry_after(self, response: Any) -> float | None:
        seconds = response.headers.get("Retry-After", "")
        return float(seconds) if re.fullmatch("[0-9]+", seconds) else None

    def increment(self, *request: Any, **outcome: Any) -> Self:
        response = outcome.get("response")
        if response is not None and (self.get_retry_after(response) or 0) > _LONGEST_PAUSE:
            raise MaxRetryError(outcome["_pool"], None, ResponseError("busy for long"))
        return super().increment(*request, **outcome)


class Origin(NamedTuple):
    """What an address is of: scheme, host and port decide whether it gets a login."""

    scheme: str
    host: str
    port: int | None

    @classmethod
    def of(cls, url: str) -> Self:
        """Return the origin of an address.

        Raises ValueError for an address that two readers may understand in different ways.
        """
        parts = urlsplit(url)
        if "\\" in url or "@" in parts.netloc:
            raise ValueError("a name or a backslash is before the host")
        port = parts.port or _PORTS.get(parts.scheme)
        return cls(parts.scheme, parts.hostname or "", port)

    def serves_logins_of(self, registry: "Origin") -> bool:
        """Whether it may be the token service of the registry: over TLS, in its domain.

        That of registry.gitlab.com is gitlab.com, that of registry-1.docker.io auth.docker.io. In
        a shared domain, only the registry's own host and those below it are its owner's.
        """
        if self == registry:
            return True
        if self.scheme != "https" or registry.scheme != "https":
            return False
        if not (_is_domain(self.host) and _is_domain(registry.host)):
            return False
        domain = registry.host
        _, _, parent = domain.partition(".")
        if "." in parent and not _is_shared(parent):
            domain = parent
        return self.host == domain or self.host.endswith(f".{domain}")


def _is_domain(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return "." in host
    return False


def _is_shared(domain: str) -> bool:
    """Whether hosts in the domain may be of different owners."""
    name, _, country = domain.partition(".")
    if len(country) == 2 and name in _SOLD:
        return True
    return any(domain == shared or domain.endswith(f".{shared}") for shared in _SHARED)


class _Session(requests.Session):
    """A session that shows a login to nobody whom a redirection names."""

    registry: Origin

    def merge_environment_settings(self, url: Any, *settings: Any, **others: Any) -> Any:
        merged = super().merge_environment_settings(url, *settings, **others)
        if _is_near(url):
            merged["proxies"] = {}
        if not self.verify:  # REQUESTS_CA_BUNDLE would count more
            merged["verify"] = False
        return merged

    def rebuild_proxies(self, prepared_request: PreparedRequest, proxies: Any) -> Any:
        if _is_near(prepared_request.url or ""):
            return {}
        return super().rebuild_proxies(prepared_request, proxies)  # type: ignore[no-untyped-call]

    def rebuild_auth(self, prepared_request: PreparedRequest, response: Response) -> None:
        target = Origin.of(prepared_request.url or "")
        if target.scheme != "https" and target.scheme != Origin.of(response.url).scheme:
            raise _Weaker(prepared_request.url)
        if target != self.registry:
            prepared_request.headers.pop("Authorization", None)


def _is_near(url: str) -> bool:
    """Whether an address is on this machine, before which no proxy stands, as for skopeo."""
    return on_this_machine(urlsplit(url).netloc)


class _Weaker(requests.RequestException):
    """A redirection from TLS to an address without it."""


class Transport:
    """Requests about one repository, ``name`` (``host[:port]/path``), of a registry.

    ``endpoint`` is where it is; registries.conf says so without one. A registry on this machine is
    asked without TLS, unless it speaks TLS. Every method raises HostError if the registry refuses
    the request or does not answer.
    """

    def __init__(self, name: str, endpoint: Endpoint | None = None) -> None:
        self.name = name
        self.endpoint = endpoint or endpoint_of(name)
        self._location = self.endpoint.location
        self._host, _, self._path = self._location.partition("/")
        self._authorization = ""
        self._service: Origin | None = None
        self._session = _Session()
        self._session.hooks["response"].append(_read)
        # A cookie would go to other ports and hosts of its domain. skopeo keeps none, either.
        self._session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=()))
        self._mount("http://")
        if self.endpoint.insecure:
            self._session.verify = False
            urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
        in_clear = self.endpoint.insecure and not speaks_tls(self._host)
        self._direct("http" if in_clear or on_this_machine(self._location) else "https")

    @property
    def plain(self) -> bool:
        """Whether the registry is asked without TLS. Known after the first request."""
        return self._server.startswith("http:")

    def _direct(self, scheme: str) -> None:
        """Ask the registry by this scheme."""
        host = "registry-1.docker.io" if self._host == "docker.io" else self._host
        self._server = f"{scheme}://{host}/"
        self._session.registry = Origin.of(self._server)
        if scheme == "https":
            context = context_for(self._host, verify=not self.endpoint.insecure)
            self._mount("https://", context)

    def _mount(self, prefix: str, context: ssl.SSLContext | None = None) -> None:
        retry = _Patience(
            total=2,
            read=0,
            status_forcelist=_PASSING,
            allowed_methods=None,
            backoff_factor=0.3,
            raise_on_status=False,
        )
        adapter = HTTPAdapter(max_retries=retry)
        if context:
            pool = adapter.poolmanager.connection_pool_kw
            pool["ssl_context"] = context
        self._session.mount(prefix, adapter)

    # -- requests

    def find(self, method: str, path: str, size: int = 0, **options: Any) -> Response | None:
        """Send a request as :meth:`request`. Returns None for what does not exist (status 404)."""
        answer = self._answer(method, path, options, size)
        if answer.status_code == 404:
            return None
        return self._accepted(answer, path)

    def request(self, method: str, path: str, size: int = 0, **options: Any) -> Response:
        """Send one request to a path below the repository, or to a URL that the registry returned.

        ``options`` are those of :mod:`requests`, and ``size``, the bytes that are sent or expected.
        """
        return self._accepted(self._answer(method, path, options, size), path)

    def is_ours(self, url: str) -> bool:
        """Whether an address is of the registry itself. Raises HostError for what is none."""
        try:
            return Origin.of(url) == self._session.registry
        except ValueError:
            raise self._odd("it names an address that is none") from None

    def _answer(
        self, method: str, path: str, options: Mapping[str, Any], size: int = 0
    ) -> Response:
        seconds = _PATIENCE + size / _SLOWEST

        def exchange() -> Response:
            return self._session.request(
                method, self._url(path), timeout=_TIMEOUT, auth=self._authorize, **options
            )

        def send() -> Response:
            return self._sent(exchange, seconds, self._url(path))

        try:
            answer = send()
        except HostError:
            if not self._turns_to_tls():
                raise
            answer = send()
        if answer.status_code == 400 and self._turns_to_tls():
            answer = send()
        denied = answer.status_code == 401 and self.is_ours(answer.url)
        if denied and self._log_in(answer):
            answer = send()
        return answer

    def _url(self, path: str) -> str:
        if "://" in path:
            return path
        return f"{self._server}v2/{self._path}/{path}"

    def _turns_to_tls(self) -> bool:
        """Ask by TLS from now on if a registry that was asked without it speaks it."""
        if self.plain and not self._authorization and speaks_tls(self._host):
            self._direct("https")
            return True
        return False

    def _sent(self, exchange: Callable[[], Response], seconds: float, url: str) -> Response:
        try:
            return within(seconds, url, exchange)
        except _Weaker as error:
            raise self._elsewhere(str(error), "is not encrypted") from None
        except requests.exceptions.InvalidHeader:
            raise self._odd("its headers state two lengths") from None
        except ValueError:  # requests' errors about addresses are also of this class
            raise self._odd("it names an address that is none") from None
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
            raise self._failure(error, url) from None

    def _accepted(self, answer: Response, path: str) -> Response:
        if answer.status_code < 400:
            return answer
        if not self.is_ours(answer.url):
            status = f"refuses with status {answer.status_code}"
            raise self._elsewhere(answer.url, status, about=bare_url(path))
        if answer.status_code in (401, 403):
            raise HostError(
                f"the registry of {self.name} denied access",
                hint=f"log in: skopeo login {self._host}",
            )
        reason = f"status {answer.status_code}"
        if re.search(r'"Err": ?28\b|no space left', answer.text):
            reason += "; its disk is full"
        elif _words(answer.text):
            reason += f"; {_words(answer.text)}"
        hint = "check its name, and that it accepts OCI images and lets this tag move"
        if answer.status_code in _PASSING:
            hint = "run the command again later; what was sent is kept"
        raise HostError(
            f"the registry of {self.name} refuses {bare_url(path)}: {reason}", hint=hint
        )

    # -- logins

    def _authorize(self, request: PreparedRequest) -> PreparedRequest:
        # A URL that the registry returned may be on another host, which must not receive the login.
        if self._authorization and self.is_ours(request.url or ""):
            request.headers["Authorization"] = self._authorization
        return request

    def require_login_stays(self) -> None:
        """Raise HostError if the registry would have a login sent to another address.

        Other programs ask the registry for it at ``/v2/``, and obey.
        """
        url = f"{self._server}v2/"

        def exchange() -> Response:
            return self._session.get(url, timeout=_TIMEOUT, auth=_nobody)

        answer = self._sent(exchange, _PATIENCE, url)
        for challenge in _challenges(answer):
            if challenge.kind == "bearer" and login_for(self._location).username:
                self._require_token_service(challenge.words.get("realm", ""))

    def _log_in(self, answer: Response) -> bool:
        """Answer the registry's challenge. Returns False if there is no login that it accepts."""
        challenges = _challenges(answer)
        login = login_for(self._location)
        tokens = []
        for challenge in challenges:
            if challenge.kind == "bearer" and "realm" in challenge.words:
                tokens.append(challenge.words)
        if not tokens:
            if any(challenge.kind == "basic" for challenge in challenges):
                self._authorization = login.basic
                return bool(login.basic)
            return False
        service = tokens[0]
        realm = service["realm"]
        if login.username:
            self._require_token_service(realm)
        grant = self._sent(lambda: self._ask_token(service, login), _PATIENCE, realm)
        if grant.is_redirect:
            raise self._elsewhere(grant.headers["Location"], "is not what the registry named")
        if grant.status_code in (401, 403):
            raise HostError(
                f"the registry of {self.name} denied access",
                hint=f"log in: skopeo login {self._host}",
            )
        if grant.status_code >= 400:
            raise self._odd(f"{bare_url(realm)} answers with status {grant.status_code}")
        content = self._json(grant.content, bare_url(realm))
        token = content.get("token") or content.get("access_token")
        if not isinstance(token, str) or re.fullmatch("[!-~]+", token) is None:
            raise self._odd(f"{bare_url(realm)} returns a token that is not one line of text")
        self._authorization = f"Bearer {token}"
        return True

    def _ask_token(self, challenge: Mapping[str, str], login: Login) -> Response:
        realm = challenge["realm"]
        fields = {
            "service": challenge.get("service", ""),
            "scope": f"repository:{self._path}:pull,push",
        }
        # A redirection would show the login to whom it names.
        options: dict[str, Any] = {
            "timeout": _TIMEOUT,
            "auth": _nobody,
            "allow_redirects": False,
        }
        if login.refresh_token:
            form = {
                **fields,
                "grant_type": "refresh_token",
                "refresh_token": login.refresh_token,
                "client_id": "primus",
            }
            return self._session.post(realm, data=form, **options)
        headers = {}
        if login.basic:
            headers["Authorization"] = login.basic
        return self._session.get(realm, params=fields, headers=headers, **options)

    def _require_token_service(self, realm: str) -> None:
        """Raise HostError unless the login may go to ``realm``, which is named at its first use."""
        registry = self._session.registry
        try:
            service = Origin.of(realm)
        except ValueError:
            raise self._odd(f"it wants logins at {realm!r}, which is no address") from None
        if service == registry:
            return
        if not service.serves_logins_of(registry):
            reason = "is not the registry"
            if service.host == registry.host and service.scheme != "https":
                reason = "is not encrypted"
            raise self._elsewhere(realm, reason, about="the login")
        if self._service is None:
            self._service = service
            say(f"the login for {self._host} goes to its token service, {bare_url(realm)}")
        if self._service != service:
            raise self._elsewhere(realm, "is not the token service that it named first")

    # -- sentences

    def _elsewhere(self, url: str, reason: str, about: str = "this") -> HostError:
        return HostError(
            f"the registry of {self.name} directs {about} to {bare_url(url)}, which {reason}",
            hint="no login was sent there; check that no proxy answers in place of the registry, "
            "and what it has as its address",
        )

    def _failure(self, error: Exception, url: str) -> HostError:
        """Return the sentence for a request that got no whole answer."""
        host = urlsplit(url).netloc.rpartition("@")[2]
        reason, hint = _reason(error, host)
        return HostError(f"the registry of {self.name} {reason}", hint=hint)

    def _json(self, data: bytes, what: str) -> dict[str, Any]:
        try:
            content = json.loads(data)
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            raise self._odd(f"{what} is not a JSON object")
        return content

    def _odd(self, what: str) -> HostError:
        return HostError(
            f"{self.name} does not answer like a registry: {what}",
            hint="check its name, and HTTPS_PROXY; a login page or a proxy may answer instead of "
            "the registry",
        )


def _words(text: str) -> str:
    """Return what a registry says of an error: its messages, or its plain text.

    A page of HTML says nothing of it.
    """
    try:
        errors = json.loads(text)["errors"]
        words = "; ".join(str(error["message"]) for error in errors)
    except DAMAGED:
        words = "" if text.lstrip().startswith("<") else text
    return " ".join(words.split())[:200]


class _Challenge(NamedTuple):
    """One way to log in: its ``kind`` (``basic``, ``bearer``), and its words by name.

    Kind and names are in small letters.
    """

    kind: str
    words: dict[str, str]


def _challenges(answer: Response) -> list[_Challenge]:
    """Return the ways to log in that a registry offers, in their order.

    requests joins several headers by commas, so a new one begins where two words stand.
    """
    challenges: list[_Challenge] = []
    for part in parse_http_list(answer.headers.get("WWW-Authenticate", "")):
        begun = re.fullmatch(r"([A-Za-z0-9-]+)(?:\s+([^=\s].*))?", part, re.S)
        if begun:
            challenges.append(_Challenge(begun[1].lower(), {}))
        name, _, value = (begun[2] or "" if begun else part).partition("=")
        if challenges and name.strip():
            challenges[-1].words[name.strip().lower()] = value.strip().strip('"')
    return challenges


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and those that it was made of."""
    seen: list[BaseException] = []
    waiting: list[object] = [error]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, BaseException) or part in seen:
            continue
        seen.append(part)
        yield part
        waiting += [*part.args, getattr(part, "reason", None), part.__cause__, part.__context__]


# What can end a request, the special before the general: classes, what is said of HOST, and what
# to do.
_FAILURES: tuple[tuple[tuple[type[BaseException], ...], str, str], ...] = (
    (
        (urllib3.exceptions.ProxyError, requests.exceptions.ProxyError),
        "is behind a proxy that does not answer",
        "check HTTPS_PROXY and NO_PROXY",
    ),
    (
        (urllib3.exceptions.NameResolutionError,),
        "is not to be found: no address is known of HOST",
        "check its name, and DNS",
    ),
    (
        (TimeoutError, requests.Timeout),
        "does not answer in time at HOST",
        "check network and HTTPS_PROXY, and run the command again",
    ),
    (
        (ConnectionRefusedError,),
        "does not answer: HOST refuses connections",
        "check name and port, and that the registry runs",
    ),
    (
        (requests.exceptions.TooManyRedirects,),
        "leads in a circle of redirections at HOST",
        "ask who runs the registry",
    ),
    (
        (requests.exceptions.ContentDecodingError, urllib3.exceptions.DecodeError),
        "sends at HOST what cannot be read",
        "check that no proxy changes the answers",
    ),
    (
        (
            requests.exceptions.ChunkedEncodingError,
            urllib3.exceptions.IncompleteRead,
            http.client.IncompleteRead,
        ),
        "breaks off its answer at HOST",
        _AGAIN,
    ),
    (
        (ResponseError,),
        "is busy for long at HOST",
        "run the command again later; what was sent is kept",
    ),
    (
        (ConnectionError,),
        "does not answer: HOST ends the connection",
        _AGAIN,
    ),
    (
        (http.client.HTTPException,),
        "does not speak HTTP at HOST",
        "check name and port, and that no proxy changes the answers",
    ),
    (
        (urllib3.exceptions.ProtocolError,),
        "does not answer: HOST ends the connection",
        _AGAIN,
    ),
)


def _reason(error: Exception, host: str) -> tuple[str, str]:
    """Return what ended a request to a host, and what to do."""
    causes = list(_causes(error))
    for part in causes:
        if isinstance(part, ssl.SSLCertVerificationError):
            return _untrusted(part, host)
        if isinstance(part, ssl.SSLError):
            what = (part.reason or "an unknown reason").replace("_", " ").lower()
            return (
                f"does not speak TLS at {host}: {what}",
                f"check name and port; openssl s_client -connect {host} shows what answers",
            )
    for kinds, reason, hint in _FAILURES:
        if any(isinstance(part, kinds) for part in causes):
            return reason.replace("HOST", host), hint
    words = [part.strerror for part in causes if isinstance(part, OSError) and part.strerror]
    words.append("the request failed")
    return f"does not answer: {host}: {words[0]}", "check name and network, and try again"


def _untrusted(error: ssl.SSLCertVerificationError, host: str) -> tuple[str, str]:
    reason = f"has a certificate at {host} that is not trusted: {error.verify_message}"
    hint = f"put the certificate of its authority into /etc/containers/certs.d/{host}/ca.crt"
    if "expired" in error.verify_message or "not yet valid" in error.verify_message:
        hint = "renew the certificate, or set the clock of this machine"
    elif "match" in error.verify_message:
        hint = "use a name that the certificate is for"
    return reason, hint


def _read(answer: Response, **_: object) -> None:
    body = io.BytesIO()
    for chunk in answer.iter_content(1 << 16):
        body.write(chunk)
        if body.tell() > _BUDGET:
            answer.close()
            raise requests.exceptions.ContentDecodingError("an answer without end")
    answer._content = body.getvalue()


def _nobody(request: PreparedRequest) -> PreparedRequest:
    """Send no login. Without this, requests would take one from ~/.netrc."""
    return request
