"""A repository of a registry: its manifests and blobs, and the documents attached to its images.

skopeo copies images. This client does what skopeo cannot: it attaches documents as OCI 1.1
artifacts whose subject is the image, lists them, and sets tags. It uses the logins of `docker
login`. https://github.com/opencontainers/distribution-spec/blob/v1.1.0/spec.md#listing-referrers.
For a registry without the referrers API (distribution 2), the list is an index under the tag
``sha256-<digest>``, as the specification requires.
"""

import io
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Self
from urllib.parse import urljoin

import requests
from requests import PreparedRequest, Response
from requests.adapters import HTTPAdapter
from urllib3.exceptions import MaxRetryError, ResponseError
from urllib3.util import Retry

from primus_images.errors import CheckFailed, HostError, InputError, did_you_mean
from primus_images.oci.store import INDEX_TYPE, MANIFEST_TYPE, digest_of
from primus_images.release.artifact import EMPTY, Document, artifact, digest_tag, listed
from primus_images.release.logins import host_of, login_for
from primus_images.release.reference import plain_http
from primus_images.versions.traffic import bare_url, within

_ANY_MANIFEST = {"Accept": f"{MANIFEST_TYPE}, {INDEX_TYPE}"}
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


class _Attached(NamedTuple):
    """A document, and the manifest of its artifact."""

    document: Document
    manifest: bytes

    @property
    def parts(self) -> set[str]:
        """The digests of all that the registry needs of it."""
        return {digest_of(self.manifest), digest_of(self.document.data), digest_of(EMPTY)}


class Repository:
    """One repository. ``name`` is ``host[:port]/path``.

    Every method raises HostError if the registry refuses the request or does not answer.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._host, _, self._path = name.partition("/")
        scheme = "http" if plain_http(name) else "https"
        host = "registry-1.docker.io" if self._host == "docker.io" else self._host
        self._server = f"{scheme}://{host}/"
        self._authorization = ""
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

    # -- images and tags

    def digest(self, reference: str) -> str | None:
        """Return the digest of the manifest that a tag or digest names, or None."""
        manifest = self.manifest(reference)
        if manifest is None:
            return None
        self._json(manifest, f"manifests/{reference}")  # a login page is no manifest
        return digest_of(manifest)

    def manifest(self, reference: str) -> bytes | None:
        """Return the manifest that a tag or digest names, or None.

        Its bytes are not compared with a digest.
        """
        answer = self.find("GET", f"manifests/{reference}", headers=_ANY_MANIFEST)
        return answer.content if answer else None

    def blob(self, digest: str, path: Path, most: int = _LARGEST_DOCUMENT) -> bool:
        """Write the blob, at most ``most`` bytes and one more, to ``path``.

        Returns False if there is none. Its bytes are not compared with the digest.
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

    def missing(self, kind: str, digests: Sequence[str]) -> list[str]:
        """Return those of the ``kind`` (``blobs`` or ``manifests``) that the repository lacks."""

        def is_there(digest: str) -> bool:
            return self.find("HEAD", f"{kind}/{digest}", headers=_ANY_MANIFEST) is not None

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            answers = list(pool.map(is_there, digests))
        return [digest for digest, there in zip(digests, answers, strict=True) if not there]

    def tags(self, beginning: str = "") -> list[str]:
        """Return the tags of the repository that begin so, sorted."""
        result: set[str] = set()
        for page in self._pages("tags/list", params={"n": "1000", "last": beginning}):
            tags = page.get("tags") or []
            if not isinstance(tags, list):
                raise self._odd("tags/list is not a list of tags")
            for tag in tags:
                if isinstance(tag, str) and tag.startswith(beginning):
                    result.add(tag)
        return sorted(result)

    def lacks(self, tag: str) -> InputError:
        """Return the error for an image that the repository does not have.

        It names similar tags, or the last ones.
        """
        tags = [other for other in self.tags() if not other.startswith("sha256-")]
        hint = did_you_mean(tag, tags, most=3) or f"its tags: {', '.join(tags[-9:]) or 'none'}"
        return InputError(f"{self.name} has no image {tag}", hint=hint)

    def tag(self, tag: str, manifest: bytes) -> None:
        """Set ``tag`` to the manifest, whose blobs must already be in the repository."""
        self._put(tag, manifest, MANIFEST_TYPE)

    def check_uploads(self) -> None:
        """Raise HostError if the registry directs uploads to another host.

        skopeo would send the login there.
        """
        url = self._upload_address()
        if self._authorization and not url.startswith(self._server):
            raise HostError(
                f"the registry of {self.name} directs uploads to {host_of(url)}, which the "
                "login is not for",
                hint="publish to a registry that takes uploads itself",
            )

    def upload(self, digest: str, data: bytes) -> None:
        """Send a blob unless the repository has it.

        The registry compares its bytes with the digest.
        """
        if self.find("HEAD", f"blobs/{digest}") is None:
            self.request(
                "PUT",
                self._upload_address(),
                len(data),
                params={"digest": digest},
                data=data,
                headers={"Content-Type": "application/octet-stream"},
            )

    def _upload_address(self) -> str:
        upload = self.request("POST", "blobs/uploads/")
        try:
            return urljoin(upload.url, upload.headers["Location"])
        except (KeyError, ValueError):
            raise self._odd("blobs/uploads/ names no address for the upload") from None

    def _put(self, reference: str, data: bytes, media_type: str) -> Response:
        headers = {"Content-Type": media_type}
        return self.request("PUT", f"manifests/{reference}", data=data, headers=headers)

    # -- documents about images

    def documents(self, digest: str, media_type: str = "") -> list[Document]:
        """Return the documents attached to the image ``digest``, or those of one type.

        Raises CheckFailed for one whose bytes do not have its digest.
        """
        documents = []
        for entry in self.referrers(digest):
            if media_type in ("", entry.get("artifactType")):
                documents.append(self.document(entry))
        return documents

    def document(self, descriptor: Mapping[str, Any]) -> Document:
        """Return the document that an entry of the list of referrers names.

        Raises CheckFailed as :meth:`documents`.
        """
        digest = descriptor["digest"]
        what = f"the {descriptor.get('artifactType', 'document')} with digest {digest}"
        manifest = self.manifest(digest)
        if manifest is None:
            raise CheckFailed(f"{what} is listed for the image, but missing")
        if digest_of(manifest) != digest:
            raise CheckFailed(f"{what} was changed: its manifest has other bytes")
        try:
            (layer,) = json.loads(manifest)["layers"]
            content = str(layer["digest"])
            media_type = str(layer["mediaType"])
            name = str(layer.get("annotations", {}).get("org.opencontainers.image.title", ""))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise CheckFailed(f"{what} is not a manifest with one file") from None
        with TemporaryDirectory(prefix="primus-document-") as folder:
            path = Path(folder) / "data"
            if not self.blob(content, path):
                raise CheckFailed(f"{what} ({name}) has lost its contents")
            data = path.read_bytes()
        if digest_of(data) != content:
            raise CheckFailed(f"{what} ({name}) was changed: its contents have other bytes")
        return Document(media_type=media_type, name=name, data=data)

    def referrers(self, digest: str) -> list[dict[str, Any]]:
        """Return the descriptors of the artifacts attached to the image ``digest``."""
        entries = self._entries(f"referrers/{digest}")
        if entries is None:
            entries = self._entries(f"manifests/{digest_tag(digest)}")
        return entries or []

    def attach(self, documents: Sequence[Document], subject: Mapping[str, Any]) -> None:
        """Attach ``documents`` to the image ``subject``, unless they already are.

        Raises HostError if the registry does not have and list them afterwards.
        """
        image = str(subject["digest"])
        wanted = [_Attached(document, artifact(document, subject)) for document in documents]
        for number in range(_LISTINGS + 1):
            absent = self._absent(wanted, image)
            if not absent:
                return
            if number < _LISTINGS:
                time.sleep(number * 0.5)
                self._add(absent, image)
        raise HostError(
            f"{self.name} accepts documents for {image}, but does not list them",
            hint="run the command again",
        )

    def _absent(self, wanted: Sequence[_Attached], image: str) -> list[_Attached]:
        """Return those that the registry does not list, or has lost although it lists them."""
        there = {entry["digest"] for entry in self.referrers(image)}
        if not there:
            return list(wanted)
        manifests = [digest_of(attached.manifest) for attached in wanted]
        blobs = [digest_of(EMPTY), *(digest_of(attached.document.data) for attached in wanted)]
        lost = {
            *self.missing("manifests", [digest for digest in manifests if digest in there]),
            *self.missing("blobs", blobs),
        }
        absent = []
        for attached, digest in zip(wanted, manifests, strict=True):
            if digest not in there or lost & attached.parts:
                absent.append(attached)
        return absent

    def _add(self, absent: Sequence[_Attached], image: str) -> None:
        # Distribution 2 may deny that it has a blob while the same one is sent again.
        self.upload(digest_of(EMPTY), EMPTY)
        unlisted = []
        for document, manifest in absent:
            self.upload(digest_of(document.data), document.data)
            answer = self._put(digest_of(manifest), manifest, MANIFEST_TYPE)
            if "OCI-Subject" not in answer.headers:
                unlisted.append(manifest)
        if unlisted:
            # This registry has no referrers API, so the client maintains the list. Another one may
            # do so now, too.
            entries = self._entries(f"manifests/{digest_tag(image)}") or []
            self._put(digest_tag(image), listed(entries, unlisted), INDEX_TYPE)

    def _entries(self, path: str) -> list[dict[str, Any]] | None:
        """Return the entries of an index of manifests; None if it does not exist."""
        entries: list[dict[str, Any]] | None = None
        for page in self._pages(path, headers={"Accept": INDEX_TYPE}):
            rows = page.get("manifests")
            if not isinstance(rows, list) or not all(map(_is_entry, rows)):
                raise self._odd(f"{path} is not a list of manifests")
            entries = [*(entries or ()), *rows]
        return entries

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
                raise self._odd(f"{path} goes on at {host_of(url)}")
        raise self._odd(f"{path} has no end")

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
        Raises HostError if the registry does not answer or refuses.
        """
        return self._accepted(self._answer(method, path, options, size), path)

    def _answer(
        self, method: str, path: str, options: Mapping[str, Any], size: int = 0
    ) -> Response:
        url = path if "://" in path else f"{self._server}v2/{self._path}/{path}"
        seconds = _PATIENCE + size / _SLOWEST

        def exchange() -> Response:
            return self._session.request(
                method, url, timeout=_TIMEOUT, auth=self._authorize, **options
            )

        try:
            answer = within(seconds, url, exchange)
            denied = answer.status_code == 401 and answer.url.startswith(self._server)
            if denied and self._log_in(answer):
                answer = within(seconds, url, exchange)
        except (requests.ConnectionError, requests.Timeout, TimeoutError) as error:
            raise HostError(
                f"the registry of {self.name} does not answer: {type(error).__name__}",
                hint="check name and network, and run the command again",
            ) from None
        except (requests.RequestException, ValueError) as error:
            # ValueError: an address that is none
            raise self._odd(f"{type(error).__name__} for {bare_url(url)}") from None
        return answer

    def _accepted(self, answer: Response, path: str) -> Response:
        if answer.status_code < 400:
            return answer
        if answer.status_code in (401, 403):
            raise HostError(
                f"the registry of {self.name} denied access", hint=f"docker login {self._host}"
            )
        reason = f"status {answer.status_code}"
        if re.search(r'"Err": ?28\b|no space left', answer.text):
            reason += "; its disk is full"
        elif answer.text:
            reason += f"; {' '.join(answer.text.split())[:200]}"
        hint = "check its name, and that it accepts OCI images and lets this tag move"
        if answer.status_code in _PASSING:
            hint = "run the command again later; what was sent is kept"
        raise HostError(
            f"the registry of {self.name} refuses {bare_url(path)}: {reason}", hint=hint
        )

    def _authorize(self, request: PreparedRequest) -> PreparedRequest:
        # A URL that the registry returned may be on another host, which must not receive the login.
        if self._authorization and (request.url or "").startswith(self._server):
            request.headers["Authorization"] = self._authorization
        return request

    def _log_in(self, answer: Response) -> bool:
        """Answer the registry's challenge. Returns False if there is no login that it accepts."""
        kind, _, rest = answer.headers.get("WWW-Authenticate", "").partition(" ")
        login = login_for(self._host)
        if kind.lower() == "basic":
            self._authorization = login.basic
            return bool(login.basic)
        challenge = dict(re.findall(r'([a-z]+)="([^"]*)"', rest))
        if kind.lower() != "bearer" or "realm" not in challenge:
            return False
        realm = challenge["realm"]
        fields = {
            "service": challenge.get("service", ""),
            "scope": f"repository:{self._path}:pull,push",
        }
        send: Callable[[], Response]
        if login.refresh_token:
            form = {
                **fields,
                "grant_type": "refresh_token",
                "refresh_token": login.refresh_token,
                "client_id": "primus",
            }

            def send() -> Response:
                return self._session.post(realm, data=form, timeout=_TIMEOUT, auth=_nobody)
        else:
            headers = {"Authorization": login.basic} if login.basic else {}

            def send() -> Response:
                return self._session.get(
                    realm, params=fields, headers=headers, timeout=_TIMEOUT, auth=_nobody
                )

        grant = self._accepted(within(_PATIENCE, realm, send), realm)
        content = self._json(grant.content, bare_url(realm))
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

    def _odd(self, what: str) -> HostError:
        return HostError(
            f"{self.name} does not answer like a registry: {what}",
            hint="check its name, and HTTPS_PROXY; a login page or a proxy may answer instead of "
            "the registry",
        )


def _is_entry(row: Any) -> bool:
    return isinstance(row, dict) and isinstance(row.get("digest"), str)


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
