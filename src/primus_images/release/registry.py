"""A repository of a registry: its manifests and blobs, and the documents attached to its images.

skopeo copies images. This client does what skopeo cannot: it attaches documents as OCI 1.1
artifacts whose subject is the image, lists them, and sets tags. It uses the logins of `docker
login`. https://github.com/opencontainers/distribution-spec/blob/v1.1.0/spec.md#listing-referrers.
For a registry without the referrers API (distribution 2), the list is an index under the tag
``sha256-<digest>``, as the specification requires.
"""

import io
import json
import os
import re
import tempfile
import time
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial, reduce
from pathlib import Path
from threading import Lock
from typing import IO, Any, Self
from urllib.parse import urljoin

import requests
from requests import PreparedRequest, Response
from requests.adapters import HTTPAdapter
from urllib3.exceptions import MaxRetryError, ResponseError
from urllib3.util import Retry

from primus_images.errors import CheckFailed, HostError, InputError, PrimusError, did_you_mean
from primus_images.files import require_readable
from primus_images.oci.store import INDEX_TYPE, MANIFEST_TYPE, canonical_json, digest_of
from primus_images.programs import captured
from primus_images.refusals import refusal
from primus_images.release.artifact import EMPTY, Document, artifact, digest_tag, listed
from primus_images.schema import read_json
from primus_images.versions.traffic import bare_url, within

_ANY_MANIFEST = {"Accept": f"{MANIFEST_TYPE}, {INDEX_TYPE}"}
# https://github.com/opencontainers/distribution-spec/blob/v1.1.0/spec.md#pulling-manifests
_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_REFERENCE = re.compile(
    r"(?P<name>[^@]+?)(?::(?P<tag>[^:/@]*))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_NAME = re.compile(
    rf"(?:localhost|[A-Za-z0-9.-]+\.[A-Za-z0-9-]+|[A-Za-z0-9.-]+(?=:))(?::[0-9]+)?(?:/{_PART})+"
)
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
_LARGEST_DOCUMENT = 256 << 20
# Another publish, or a registry that copies between its servers, may lose a document from the list.
_LISTINGS = 3
_MOST_PAGES = 1000
# Questions at a time, which are as many as the connections that the client keeps open.
_AT_ONCE = 10
# Docker's name of a user who logs in with an identity token.
_TOKEN = "<token>"


def require_repository(name: str, option: str) -> None:
    """Raise InputError if the value of an option does not name a repository."""
    port = name.partition("/")[0].partition(":")[2] or "443"
    if not _NAME.fullmatch(name) or len(name) > 255 or not 0 < int(port) < 65536:
        raise InputError(
            f"{option} {name!r} is not a repository of a registry",
            hint="HOST[:PORT]/PATH, e.g. docker.io/rocm/primus, of at most 255 characters, PORT "
            "at most 65535; by the OCI distribution specification, each part of PATH is "
            "lower-case letters and digits, with '.', '_', '__' or hyphens between them",
        )


def require_tag(tag: str, option: str) -> None:
    """Raise InputError if the value of an option cannot be a tag."""
    if not _TAG.fullmatch(tag):
        raise InputError(
            f"{option} {tag!r} cannot be a tag of a registry",
            hint="by the OCI distribution specification, a tag is at most 128 letters, digits, "
            "'_', '.' and '-', and begins with none of the last two",
        )


def reference(text: str, option: str) -> tuple[str, str, str]:
    """Return repository, tag and digest, one of them empty or neither, of the image that the value
    of an option names.

    Raises InputError for what cannot be an image's name.
    """
    match = _REFERENCE.fullmatch(text)
    name, tag, digest = (
        (match[part] or "" for part in ("name", "tag", "digest")) if match else ("", "", "")
    )
    if not (tag or digest):
        raise InputError(
            f"{option} {text!r} names no image",
            hint="HOST[:PORT]/PATH:TAG or HOST[:PORT]/PATH@sha256:…",
        )
    require_repository(name, option)
    if tag:
        require_tag(tag, option)
    return name, tag, digest


def plain_http(repository: str) -> bool:
    """Whether the registry is on this machine and therefore uses HTTP, as for Docker."""
    host = repository.partition("/")[0].partition(":")[0]
    return host == "localhost" or re.fullmatch(r"127(\.[0-9]{1,3}){3}", host) is not None


class _Patience(Retry):
    """Tries again if the registry is overloaded, and obeys a short Retry-After. After a longer one,
    the answer stands.

    A registry that says nothing is not asked again: each try takes a minute.
    """

    def get_retry_after(self, response: Any) -> float | None:
        seconds = response.headers.get("Retry-After", "")
        if re.fullmatch("[0-9]+", seconds):
            return float(seconds)
        return None

    def increment(self, *request: Any, **outcome: Any) -> Self:
        response = outcome.get("response")
        if response is not None and (self.get_retry_after(response) or 0) > _LONGEST_PAUSE:
            raise MaxRetryError(outcome["_pool"], None, ResponseError("busy for long"))
        return super().increment(*request, **outcome)


class Repository:
    """One repository. ``name`` is ``host[:port]/path``.

    Every method raises HostError if the registry refuses the request or does not answer.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._host, _, self._path = name.partition("/")
        scheme = "https"
        if plain_http(name):
            scheme = "http"
        self._server = (
            f"{scheme}://{'registry-1.docker.io' if self._host == 'docker.io' else self._host}/"
        )
        self._authorization = ""
        self._config = Lock()
        self._config_sent = False
        self._session = requests.Session()
        self._session.hooks["response"].append(_read)
        retry = _Patience(
            total=2,
            read=0,
            status_forcelist=_PASSING,
            allowed_methods=None,
            backoff_factor=0.3,
            raise_on_status=False,
        )
        for prefix in ("https://", "http://"):
            self._session.mount(prefix, HTTPAdapter(max_retries=retry))

    def digest(self, reference: str) -> str | None:
        """Return the digest of the manifest that a tag or digest names, or None."""
        manifest = self.manifest(reference)
        if manifest is None:
            return None
        self._json(manifest, f"manifests/{reference}")  # a login page is no manifest
        return digest_of(manifest)

    def check_uploads(self) -> None:
        """Raise HostError if the registry directs uploads to another host, to which skopeo would
        send the login.
        """
        url = self._upload()
        if self._authorization and not url.startswith(self._server):
            raise HostError(
                f"the registry of {self.name} directs uploads to {_host_of(url)}, which the "
                "login is not for",
                hint="publish to a registry that takes uploads itself",
            )

    def missing(self, kind: str, digests: Sequence[str]) -> list[str]:
        """Return those of the ``kind`` (``blobs`` or ``manifests``) that the repository lacks."""

        def absent(digest: str) -> bool:
            return self.find("HEAD", f"{kind}/{digest}", headers=_ANY_MANIFEST) is None

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return [
                digest
                for digest, lost in zip(digests, pool.map(absent, digests), strict=True)
                if lost
            ]

    def tags(self, beginning: str = "") -> list[str]:
        """Return the tags of the repository that begin so, sorted."""
        result: set[str] = set()
        for page in self._pages("tags/list", params={"n": "1000", "last": beginning}):
            if not isinstance(tags := page.get("tags"), list | None):
                raise self._odd("tags/list is not a list of tags")
            result |= {
                tag for tag in tags or () if isinstance(tag, str) and tag.startswith(beginning)
            }
        return sorted(result)

    def lacks(self, tag: str) -> InputError:
        """Return the error for an image that the repository does not have: it names similar tags,
        or the last ones.
        """
        tags = [other for other in self.tags() if not other.startswith("sha256-")]
        hint = did_you_mean(tag, tags, most=3) or f"its tags: {', '.join(tags[-9:]) or 'none'}"
        return InputError(f"{self.name} has no image {tag}", hint=hint)

    def tag(self, tag: str, manifest: bytes) -> None:
        """Set ``tag`` to the manifest, whose blobs must already be in the repository."""
        self._put(tag, manifest, MANIFEST_TYPE)

    def manifest(self, reference: str) -> bytes | None:
        """Return the manifest that a tag or digest names, or None. Its bytes are not compared with
        a digest.
        """
        answer = self.find("GET", f"manifests/{reference}", headers=_ANY_MANIFEST)
        if answer:
            return answer.content
        return None

    def blob(self, digest: str, path: Path, most: int = _LARGEST_DOCUMENT) -> bool:
        """Write the blob, at most ``most`` bytes and one more, to ``path``. Returns False if there
        is none.

        Its bytes are not compared with the digest.
        """

        def save(answer: Response, **_: object) -> None:
            with path.open("wb") as file:
                for chunk in answer.iter_content(1 << 18):
                    file.write(chunk[: most + 1 - file.tell()])
                    if file.tell() > most:
                        break
            answer.close()
            answer._content = b""

        return self.find("GET", f"blobs/{digest}", most, hooks={"response": save}) is not None

    def documents(self, digest: str, media_type: str = "") -> list[Document]:
        """Return the documents attached to the image ``digest``, or those of one type.

        Raises CheckFailed for one whose bytes do not have its digest.
        """
        return [
            self.document(row)
            for row in self.referrers(digest)
            if media_type in ("", row.get("artifactType"))
        ]

    def document(self, descriptor: Mapping[str, Any]) -> Document:
        """Return the document that an entry of the list of referrers names. Raises CheckFailed as
        above.
        """
        what = (
            f"the {descriptor.get('artifactType', 'document')} with digest {descriptor['digest']}"
        )
        manifest = self.manifest(descriptor["digest"])
        if manifest is None:
            raise CheckFailed(f"{what} is listed for the image, but missing")
        if digest_of(manifest) != descriptor["digest"]:
            raise CheckFailed(f"{what} was changed: its manifest has other bytes")
        try:
            (layer,) = json.loads(manifest)["layers"]
            content = str(layer["digest"])
            media_type = str(layer["mediaType"])
            name = str(layer.get("annotations", {}).get("org.opencontainers.image.title", ""))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise CheckFailed(f"{what} is not a manifest with one file") from None
        with tempfile.TemporaryDirectory(prefix="primus-document-") as folder:
            path = Path(folder) / "data"
            if not self.blob(content, path):
                raise CheckFailed(f"{what} ({name}) has lost its contents")
            data = path.read_bytes()
        if digest_of(data) != content:
            raise CheckFailed(f"{what} ({name}) was changed: its contents have other bytes")
        return Document(media_type=media_type, name=name, data=data)

    def referrers(self, digest: str) -> list[dict[str, Any]]:
        """Return the descriptors of the artifacts attached to the image ``digest``."""
        rows = self._listed(f"referrers/{digest}")
        if rows is None:
            return self._listed(f"manifests/{digest_tag(digest)}") or []
        return rows

    def attach(self, documents: Sequence[Document], subject: Mapping[str, Any]) -> None:
        """Attach ``documents`` to the image ``subject``, unless they already are.

        Raises HostError if the registry does not have and list them afterwards.
        """
        about = str(subject["digest"])
        manifests = {digest_of(manifest := artifact(d, subject)): (d, manifest) for d in documents}
        for number in range(_LISTINGS + 1):
            there = {descriptor["digest"] for descriptor in self.referrers(about)}
            # A registry may list a document that it has lost.
            if there:
                parts = [digest_of(EMPTY), *(digest_of(document.data) for document in documents)]
            else:
                parts = []
            lost = {
                *self.missing("manifests", [*there & {*manifests}]),
                *self.missing("blobs", parts),
            }
            absent = [
                (document, manifest)
                for digest, (document, manifest) in manifests.items()
                if digest not in there
                or lost & {digest, digest_of(document.data), digest_of(EMPTY)}
            ]
            if not absent:
                return
            if number < _LISTINGS:
                time.sleep(number * 0.5)
                self._add(absent, about)
        raise HostError(
            f"{self.name} accepts documents for {about}, but does not list them",
            hint="run the command again",
        )

    def _add(self, absent: Sequence[tuple[Document, bytes]], about: str) -> None:
        unlisted = []
        for document, manifest in absent:
            self.upload_config()
            self.upload(digest_of(document.data), io.BytesIO(document.data))
            if "OCI-Subject" not in self._put(digest_of(manifest), manifest, MANIFEST_TYPE).headers:
                unlisted.append(manifest)
        if unlisted:
            # This registry has no referrers API, so the client maintains the list. Another one may
            # do so now, too.
            index: dict[str, Any] = {
                "manifests": self._listed(f"manifests/{digest_tag(about)}") or []
            }
            self._put(
                digest_tag(about), canonical_json(reduce(listed, unlisted, index)), INDEX_TYPE
            )

    def _listed(self, path: str) -> list[dict[str, Any]] | None:
        manifests: list[dict[str, Any]] | None = None
        for page in self._pages(path, headers={"Accept": INDEX_TYPE}):
            rows = page.get("manifests")
            if not isinstance(rows, list) or not all(
                isinstance(m, dict) and isinstance(m.get("digest"), str) for m in rows
            ):
                raise self._odd(f"{path} is not a list of manifests")
            manifests = [*(manifests or ()), *rows]
        return manifests

    def _pages(self, path: str, **options: Any) -> Iterator[dict[str, Any]]:
        """Yield a list, page by page: each answer names the next one in its header ``Link``.
        Nothing for status 404.
        """
        url = path
        for _ in range(_MOST_PAGES):
            answer = self.find("GET", url, **options)
            if answer is None:
                return
            yield self._json(answer.content, path)
            rest = answer.links.get("next", {}).get("url")
            if rest is None:
                return
            url = urljoin(answer.url, rest)
            options["params"] = None
            if not url.startswith(self._server):
                raise self._odd(f"{path} goes on at {_host_of(url)}")
        raise self._odd(f"{path} has no end")

    def upload(self, digest: str, data: IO[bytes]) -> None:
        """Send a blob unless the repository has it. The registry compares its bytes with the
        digest.
        """
        if self.find("HEAD", f"blobs/{digest}") is None:
            size = data.seek(0, os.SEEK_END)
            headers = {"Content-Type": "application/octet-stream"}
            self.request(
                "PUT", self._upload(), size, params={"digest": digest}, data=data, headers=headers
            )

    def upload_config(self) -> None:
        """Send :data:`EMPTY`, once: distribution 2 may deny that it has a blob while the same one
        is sent again.
        """
        with self._config:
            if not self._config_sent:
                self.upload(digest_of(EMPTY), io.BytesIO(EMPTY))
                self._config_sent = True

    def _upload(self) -> str:
        upload = self.request("POST", "blobs/uploads/")
        try:
            return urljoin(upload.url, upload.headers["Location"])
        except (KeyError, ValueError):
            raise self._odd("blobs/uploads/ names no address for the upload") from None

    def _put(self, reference: str, data: bytes, media_type: str) -> Response:
        return self.request(
            "PUT", f"manifests/{reference}", data=data, headers={"Content-Type": media_type}
        )

    def find(self, method: str, path: str, size: int = 0, **options: Any) -> Response | None:
        """Send a request as :meth:`request`. Returns None for what does not exist (status 404)."""
        answer = self._answer(method, path, options, size)
        if answer.status_code == 404:
            return None
        return self._accepted(answer, path)

    def request(self, method: str, path: str, size: int = 0, **options: Any) -> Response:
        """Send one request to a path below the repository (``manifests/v1``), or to a URL that the
        registry returned.

        ``options`` are those of :mod:`requests`, and ``size``, the bytes that are sent or expected.
        Raises HostError if the registry does not answer or refuses.
        """
        return self._accepted(self._answer(method, path, options, size), path)

    def _answer(
        self, method: str, path: str, options: Mapping[str, Any], size: int = 0
    ) -> Response:
        if "://" in path:
            url = path
        else:
            url = f"{self._server}v2/{self._path}/{path}"

        def exchange() -> Response:
            if isinstance(body := options.get("data"), io.IOBase):
                body.seek(0)
            return self._session.request(
                method, url, timeout=_TIMEOUT, auth=self._signed, **options
            )

        send = partial(within, _PATIENCE + size / _SLOWEST, url, exchange)
        try:
            answer = send()
            if (
                answer.status_code == 401
                and answer.url.startswith(self._server)
                and self._log_in(answer)
            ):
                answer = send()
        except (requests.ConnectionError, requests.Timeout, TimeoutError) as error:
            error_text = type(error).__name__
            raise HostError(
                f"the registry of {self.name} does not answer: {error_text}",
                hint="check name and network, and run the command again",
            ) from None
        except (
            requests.RequestException,
            ValueError,
        ) as error:  # ValueError: an address that is none
            raise self._odd(f"{type(error).__name__} for {bare_url(url)}") from None
        return answer

    def _accepted(self, answer: Response, path: str) -> Response:
        if answer.status_code in (401, 403):
            raise HostError(
                f"the registry of {self.name} denied access", hint=f"docker login {self._host}"
            )
        if answer.status_code >= 400:
            full = re.search(r'"Err": ?28\b|no space left', answer.text)
            if full:
                text = "its disk is full"
            else:
                text = " ".join(answer.text.split())[:200]
            reason = "; ".join(filter(None, (f"status {answer.status_code}", text)))
            values = {"name": self.name, "path": bare_url(path), "reason": reason}
            if answer.status_code in _PASSING:
                raise refusal(
                    "busy_registry",
                    **values,
                )
            raise refusal(
                "refused_by_registry",
                **values,
            )
        return answer

    def _signed(self, request: PreparedRequest) -> PreparedRequest:
        # A URL that the registry returned may be on another host, which must not receive the login.
        if self._authorization and (request.url or "").startswith(self._server):
            request.headers["Authorization"] = self._authorization
        return request

    def _log_in(self, answer: Response) -> bool:
        kind, _, rest = answer.headers.get("WWW-Authenticate", "").partition(" ")
        username, password = _login(self._host)
        basic = ""
        if username:
            basic = f"Basic {b64encode(f'{username}:{password}'.encode()).decode()}"
        if kind.lower() == "basic":
            self._authorization = basic
            return bool(basic)
        challenge = dict(re.findall(r'([a-z]+)="([^"]*)"', rest))
        if kind.lower() != "bearer" or "realm" not in challenge:
            return False
        realm = challenge["realm"]
        scope = {
            "service": challenge.get("service", ""),
            "scope": f"repository:{self._path}:pull,push",
        }

        def exchange() -> Response:
            if username == _TOKEN:
                form = {
                    **scope,
                    "grant_type": "refresh_token",
                    "refresh_token": password,
                    "client_id": "primus",
                }
                return self._session.post(realm, data=form, timeout=_TIMEOUT, auth=_nobody)
            if basic:
                headers = {"Authorization": basic}
            else:
                headers = {}
            return self._session.get(
                realm, params=scope, headers=headers, timeout=_TIMEOUT, auth=_nobody
            )

        grant = within(_PATIENCE, realm, exchange)
        content = self._json(self._accepted(grant, realm).content, bare_url(realm))
        token = content.get("token") or content.get("access_token")
        if not isinstance(token, str) or re.fullmatch("[!-~]+", token) is None:
            raise self._odd(f"{bare_url(realm)} returns a token that is not one line of text")
        self._authorization = f"Bearer {token}"
        return True

    def _json(self, data: bytes, what: str) -> dict[str, Any]:
        try:
            content = json.loads(data)
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            raise self._odd(f"{what} is not a JSON object")
        return content

    def _odd(self, what: str) -> PrimusError:
        return HostError(
            f"{self.name} does not answer like a registry: {what}", hint="check its name"
        )


def _read(answer: Response, **_: object) -> None:
    body = b""
    for chunk in answer.iter_content(1 << 16):
        body += chunk
        if len(body) > _BUDGET:
            answer.close()
            raise requests.exceptions.ContentDecodingError("an answer without end")
    answer._content = body


def _nobody(request: PreparedRequest) -> PreparedRequest:
    """Send no login. Without this, requests would take one from ~/.netrc."""
    return request


def _login(host: str) -> tuple[str, str]:
    """Return what `docker login` stored for the host: username and password, _TOKEN and a token, or
    two empty texts.
    """
    path = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json"
    if not path.exists():
        return "", ""
    require_readable(path)
    try:
        config: Any = read_json(path).data
        if host == "docker.io":
            server = "https://index.docker.io/v1/"
        else:
            server = host
        helper = config.get("credHelpers", {}).get(server) or config.get("credsStore")
        if helper:
            words = [f"docker-credential-{helper}", "get"]
            answer = captured(words, words[0], text=server)
            if answer.returncode:
                login = {"Username": "", "Secret": ""}
            else:
                login = json.loads(answer.stdout)
            return login["Username"], login["Secret"]
        logins = {_host_of(name): entry for name, entry in config.get("auths", {}).items()}
        entry = logins.get(_host_of(server), {})
        token = entry.get("identitytoken")
        if token:
            return _TOKEN, token
        username, _, password = b64decode(entry.get("auth", "")).decode().partition(":")
    except (InputError, OSError) as error:
        reason = re.sub(r"^\[Errno \d+\] ", "", str(error))
        raise HostError(
            f"Docker's logins cannot be read: {reason}", hint=f"docker login {host}"
        ) from None
    except (ValueError, TypeError, KeyError, AttributeError):
        reason = f"what {path} names for it is not a login"
        raise HostError(
            f"Docker's logins cannot be read: {reason}", hint=f"docker login {host}"
        ) from None
    return username, password


def _host_of(server: str) -> str:
    return re.sub(r"^https?://", "", server).partition("/")[0]
