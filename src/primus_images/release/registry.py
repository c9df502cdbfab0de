"""A repository of a registry: its manifests and blobs, and the documents attached to its images.

skopeo copies images. This client does what skopeo cannot: it attaches documents as OCI 1.1
artifacts whose subject is the image, lists them, and sets tags. It uses the logins, certificates
and mirrors that skopeo uses. https://github.com/opencontainers/distribution-spec/blob/v1.1.0/spec.md#listing-referrers.
For a registry without the referrers API (distribution 2), the list is an index under the tag
``sha256-<digest>``, as the specification requires.
"""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Self, TypeVar
from urllib.parse import urljoin

from requests import Response

from primus_images.errors import CheckFailed, HostError, InputError, did_you_mean
from primus_images.oci.store import INDEX_TYPE, MANIFEST_TYPE, digest_of
from primus_images.release.artifact import (
    ANNOUNCED,
    DAMAGED,
    EMPTY,
    EMPTY_TYPE,
    WITHDRAWAL,
    Document,
    artifact,
    digest_tag,
    is_foreign,
    listed,
    predicate_of,
)
from primus_images.release.logins import login_for
from primus_images.release.mirrors import sources_of
from primus_images.release.transport import Transport
from primus_images.terminal import say, some
from primus_images.versions.traffic import bare_url

T = TypeVar("T")

# Images that others pushed may be of Docker's types.
_DOCKER = "application/vnd.docker.distribution.manifest"
_ANY_MANIFEST = {
    "Accept": f"{MANIFEST_TYPE}, {INDEX_TYPE}, {_DOCKER}.v2+json, {_DOCKER}.list.v2+json"
}
_LARGEST_DOCUMENT = 256 << 20
# Another publish, or a registry that copies between its servers, may lose a document from the list.
_LISTINGS = 3
_MOST_PAGES = 1000
# A digest that no image has. A registry with the referrers API answers for it with an empty list.
_NO_IMAGE = f"sha256:{'0' * 64}"
# Types in lists of registries that state that of the config, such as GitHub's, in place of the
# document's own.
_UNTYPED = (None, "", EMPTY_TYPE)
# Questions at a time, which are as many as the connections that the client keeps open.
_AT_ONCE = 10


class _Attached(NamedTuple):
    """A document, and the manifest of its artifact."""

    document: Document
    manifest: bytes

    @property
    def parts(self) -> set[str]:
        """The digests of all that the registry needs of it."""
        return {digest_of(self.manifest), digest_of(self.document.data), digest_of(EMPTY)}


class Repository(Transport):
    """One repository. ``name`` is ``host[:port]/path``.

    One that is made by :meth:`to_read` has mirrors. What a digest or a tag names comes from them
    first, as for skopeo and podman. A list comes from them only if the registry does not answer: a
    mirror may not know yet of a withdrawal.

    Every method raises HostError if the registry refuses the request or does not answer.
    """

    _mirrors: Sequence[Self] = ()

    @classmethod
    def to_read(cls, name: str) -> Self:
        """Return the repository with the mirrors that registries.conf names for it."""
        *mirrors, origin = sources_of(name)
        there = cls(name, origin)
        there._mirrors = [cls(mirror.location, mirror) for mirror in mirrors]
        return there

    def _in_mirrors(self, ask: Callable[[Self], T | None], *, by_digest: bool) -> T | None:
        """Return what the first mirror answers that has it. One that fails is not asked again."""
        for mirror in tuple(self._mirrors):
            serves = mirror.endpoint.digests if by_digest else mirror.endpoint.tags
            if not serves:
                continue
            try:
                answer = ask(mirror)
            except HostError as error:
                say(f"! mirror: {error.message}")
                self._mirrors = [other for other in self._mirrors if other is not mirror]
                continue
            if answer:
                return answer
        return None

    def _in_lists(self, ask: Callable[[Self], T]) -> T:
        """Return what the registry lists, or one of its mirrors in its place."""
        try:
            return ask(self)
        except HostError as error:
            for mirror in self._mirrors:
                with suppress(HostError):
                    answer = ask(mirror)
                    say(f"! {error.message}; its mirror {mirror.name} lists what it knows")
                    return answer
            raise

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

        Its bytes are not compared with a digest, except those of a mirror.
        """
        by_digest = reference.startswith("sha256:")

        def ask(mirror: Repository) -> bytes | None:
            content = mirror.manifest(reference)
            if content is not None:
                mirror._json(content, f"manifests/{reference}")
                if by_digest and digest_of(content) != reference:
                    raise mirror._odd(f"manifests/{reference} has other bytes")
            return content

        mirrored = self._in_mirrors(ask, by_digest=by_digest)
        if mirrored is not None:
            return mirrored
        answer = self.find("GET", f"manifests/{reference}", headers=_ANY_MANIFEST)
        return answer.content if answer else None

    def image(self, digest: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return manifest and config of an image, of x86-64 where it is one of several.

        Raises CheckFailed if it is incomplete.
        """
        manifest = self._json(self.manifest(digest) or b"", f"manifests/{digest}")
        incomplete = _damaged(f"{self.name}@{digest} is not an image with a config")
        try:
            for entry in manifest.get("manifests") or ():
                platform = entry.get("platform") or {}
                if (platform.get("os"), platform.get("architecture")) == ("linux", "amd64"):
                    return self.image(str(entry["digest"]))
            config = self._contents(manifest["config"])
        except DAMAGED:
            raise incomplete from None
        if config is None:
            raise incomplete
        return manifest, self._json(config, f"the config of {digest}")

    def _contents(self, descriptor: Mapping[str, Any]) -> bytes | None:
        """Return the bytes of a small blob, or None if there is none.

        Its size says how long a registry may take: one that drips would hold a reader for long.
        """
        size = descriptor.get("size")
        most = _LARGEST_DOCUMENT
        if isinstance(size, int):
            most = min(max(size, 0), most)
        with TemporaryDirectory(prefix="primus-document-") as folder:
            path = Path(folder) / "data"
            if not self.blob(str(descriptor.get("digest")), path, most):
                return None
            return path.read_bytes()

    def blob(self, digest: str, path: Path, most: int) -> bool:
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

        if self._in_mirrors(lambda mirror: mirror.blob(digest, path, most), by_digest=True):
            return True
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
        return self._in_lists(lambda there: there._tags(beginning))

    def tags_with(self, tag: str, beginning: str = "") -> list[str]:
        """Return the tags as :meth:`tags`, where ``tag``, which was just set or read, must be.

        Raises HostError for a list without it: others may be missing, too.
        """
        for pause in range(_LISTINGS):
            time.sleep(pause * 0.5)
            tags = self._tags(beginning)
            if tag in tags:
                return tags
        raise HostError(
            f"{self.name} has the tag {tag}, and does not list it among its tags",
            hint="run the command again; if it stays so, ask who runs the registry, or a proxy "
            "before it",
        )

    def _tags(self, beginning: str) -> list[str]:
        result: set[str] = set()
        # A page begins after ``last``, so that one letter less finds the tag that is ``beginning``.
        for page in self._pages("tags/list", params={"n": "1000", "last": beginning[:-1]}):
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
        tags = []
        for other in self.tags():
            if not other.startswith("sha256-") and ANNOUNCED not in other:
                tags.append(other)
        hint = did_you_mean(tag, tags, most=3) or f"its tags: {', '.join(tags[-9:]) or 'none'}"
        return InputError(f"{self.name} has no image {tag}", hint=hint)

    def tag(self, tag: str, manifest: bytes) -> None:
        """Set ``tag`` to the manifest, whose blobs must already be in the repository."""
        self._put(tag, manifest, MANIFEST_TYPE)

    def check_uploads(self) -> None:
        """Raise HostError if a program that pushes would show the login to another address.

        It follows each address that the registry names in the steps of an upload.
        """
        self.require_login_stays()
        try:
            self._try_upload()
        except HostError:  # such as a connection that was cut
            self._try_upload()

    def _try_upload(self) -> None:
        url = self._upload_address(self.request("POST", "blobs/uploads/"))
        headers = {"Content-Type": "application/octet-stream"}
        url = self._upload_address(self.request("PATCH", url, data=EMPTY, headers=headers))
        self.request("PUT", url, params={"digest": digest_of(EMPTY)})

    def upload(self, digest: str, data: bytes) -> None:
        """Send a blob unless the repository has it.

        The registry compares its bytes with the digest.
        """
        if self.find("HEAD", f"blobs/{digest}") is None:
            self.request(
                "PUT",
                self._upload_address(self.request("POST", "blobs/uploads/")),
                len(data),
                params={"digest": digest},
                data=data,
                headers={"Content-Type": "application/octet-stream"},
            )

    def _upload_address(self, step: Response) -> str:
        """Return where an upload goes on after a step of it."""
        try:
            url = urljoin(step.url, step.headers["Location"])
        except (KeyError, ValueError):
            raise self._odd(f"{bare_url(step.url)} names no address for the upload") from None
        if not self.is_ours(url) and login_for(self._location).username:
            raise HostError(
                f"the registry of {self.name} directs uploads to {bare_url(url)}, which the "
                "login is not for",
                hint="publish to a registry that takes uploads itself",
            )
        return url

    def _put(self, reference: str, data: bytes, media_type: str) -> Response:
        headers = {"Content-Type": media_type}
        return self.request("PUT", f"manifests/{reference}", data=data, headers=headers)

    # -- documents about images

    def documents(self, digest: str, media_type: str = "") -> list[Document]:
        """Return the documents attached to the image ``digest``, or those of one type.

        Raises CheckFailed for one that is lost or whose bytes do not have its digest, unless it is
        of another program.
        """
        documents = []
        for entry in self._of_type(digest, media_type):
            try:
                document = self.document(entry)
            except CheckFailed:
                if is_foreign(entry):
                    continue
                raise
            if media_type in ("", document.media_type):
                documents.append(document)
        return documents

    def whole_documents(self, digest: str, media_type: str) -> list[Document]:
        """Return the documents of a type, without those that are lost or damaged."""
        documents = []
        for entry in self._of_type(digest, media_type):
            with suppress(CheckFailed):
                document = self.document(entry)
                if document.media_type == media_type:
                    documents.append(document)
        return documents

    def _of_type(self, digest: str, media_type: str) -> list[dict[str, Any]]:
        """Return the entries of the documents that may be of the type."""
        entries = self.referrers(digest)
        if not media_type:
            return entries
        return [row for row in entries if row.get("artifactType") in (media_type, *_UNTYPED)]

    def document(self, descriptor: Mapping[str, Any]) -> Document:
        """Return the document that an entry of the list of referrers names.

        Raises CheckFailed as :meth:`documents`, and for an artifact of several files.
        """
        digest = descriptor["digest"]
        kind = f"the {descriptor.get('artifactType', 'document')}"
        if predicate_of(descriptor):
            kind = f"the statement of type {predicate_of(descriptor)}"
        what = f"{kind} with digest {digest}"
        manifest = self.manifest(digest)
        if manifest is None:
            raise _damaged(f"{what} is listed for the image, but missing")
        if digest_of(manifest) != digest:
            raise _damaged(f"{what} was changed: its manifest has other bytes")
        try:
            parts = json.loads(manifest)
            (layer,) = parts["layers"]
            content = str(layer["digest"])
            size = layer["size"]
            media_type = str(layer["mediaType"])
            predicate = predicate_of(parts)
            name = str(layer.get("annotations", {}).get("org.opencontainers.image.title", ""))
        except DAMAGED:
            raise _damaged(f"{what} is not a manifest with one file") from None
        if name:
            what += f" ({name})"
        data = self._contents(layer)
        if data is None:
            raise _damaged(f"{what} has lost its contents")
        if digest_of(data) != content:
            raise _damaged(f"{what} was changed: its contents have other bytes")
        if size != len(data):
            raise _damaged(f"{what} was changed: its manifest states another size")
        return Document(media_type=media_type, name=name, data=data, predicate=predicate)

    def referrers(self, digest: str) -> list[dict[str, Any]]:
        """Return the descriptors of the artifacts attached to the image ``digest``.

        Beside those of the referrers API stand those of the list under the tag: a registry may have
        got the API after they were attached. Raises HostError for a list that the registry denies
        here, and shows elsewhere: what it names must not vanish.
        """
        return self._in_lists(lambda there: there._referrers(digest))

    def _referrers(self, digest: str) -> list[dict[str, Any]]:
        entries = {entry["digest"]: entry for entry in self._in_tag(digest)}
        for entry in self._in_api(digest) or ():
            entries[entry["digest"]] = entry
        return [*entries.values()]

    def _in_api(self, digest: str) -> list[dict[str, Any]] | None:
        """Return what the referrers API lists; None if the registry does not have it."""
        entries = self._entries(f"referrers/{digest}")
        if entries is None and self._entries(f"referrers/{_NO_IMAGE}") is not None:
            raise self._denied(f"what is attached to {digest}", "the list for another digest")
        return entries

    def _in_tag(self, digest: str) -> list[dict[str, Any]]:
        """Return the entries of the list under the tag; none without this tag."""
        tag = digest_tag(digest)
        entries = self._entries(f"manifests/{tag}")
        if entries is None and tag in self._tags(tag):
            raise self._denied(f"the tag {tag}", "it among its tags")
        return entries or []

    def _denied(self, what: str, shown: str) -> HostError:
        return HostError(
            f"{self.name} says that {what} does not exist, and shows {shown}",
            hint="run the command again; if it stays so, ask who runs the registry, or a proxy "
            "before it, where the list is",
        )

    def attach(self, documents: Sequence[Document], subject: Mapping[str, Any]) -> None:
        """Attach ``documents`` to the image ``subject``, unless they already are.

        Raises HostError if the registry does not have and list them afterwards.
        """
        image = str(subject["digest"])
        wanted = [_Attached(document, artifact(document, subject)) for document in documents]
        for number in range(_LISTINGS + 1):
            absent = self._absent(wanted, image, heal=number == 0)
            if not absent:
                return
            if number < _LISTINGS:
                time.sleep(number * 0.5)
                self._add(absent, image)
        raise HostError(
            f"{self.name} accepts documents for {image}, but does not list them",
            hint="run the command again",
        )

    def _absent(self, wanted: Sequence[_Attached], image: str, *, heal: bool) -> list[_Attached]:
        """Return those that the registry does not list, or has lost although it lists them.

        To ``heal`` a list that names others which are lost, all are absent.
        """
        listed_now = self._in_api(image)
        if listed_now is None:
            listed_now = self._in_tag(image)
        there = {entry["digest"] for entry in listed_now}
        manifests = [digest_of(attached.manifest) for attached in wanted]
        # After a registry's clean-up, a list may name what is gone. Adding writes it anew.
        others = sorted(there.difference(manifests))
        if not there or (heal and self.missing("manifests", others)):
            return list(wanted)
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
            # do so now, too. What the registry has lost since leaves the list.
            self._list(image, unlisted)

    def _list(self, image: str, manifests: Sequence[bytes]) -> None:
        """Add artifacts to the list under the tag.

        What seems to be gone stays in the list as long as the registry accepts it, because the
        answer may be wrong. A registry that compares refuses a list of what it has lost.
        """
        coming = {predicate_of(json.loads(manifest)) for manifest in manifests}
        entries = []
        for entry in self._in_tag(image):
            replaced = predicate_of(entry) in coming - {""}
            if not (replaced and self._is_empty(entry)):
                entries.append(entry)
        try:
            self._put(digest_tag(image), listed(entries, manifests), INDEX_TYPE)
        except HostError:
            gone = [entry for entry in entries if self.manifest(entry["digest"]) is None]
            if not gone:
                raise
            if WITHDRAWAL in {predicate_of(entry) for entry in gone} - coming:
                raise HostError(
                    f"{self.name} has lost the signed withdrawal of this image, which it lists",
                    hint="withdraw it again: primus withdraw",
                ) from None
            digests = some([str(entry["digest"]) for entry in gone], 3)
            say(f"! {self.name} has lost {digests}, which leaves its list")
            kept = [entry for entry in entries if entry not in gone]
            self._put(digest_tag(image), listed(kept, manifests), INDEX_TYPE)

    def _is_empty(self, entry: Mapping[str, Any]) -> bool:
        """Whether the registry has an entry of the list, and lacks its contents."""
        manifest = self.manifest(entry["digest"])
        if manifest is None or digest_of(manifest) != entry["digest"]:
            return False
        try:
            contents = [str(layer["digest"]) for layer in json.loads(manifest)["layers"]]
        except DAMAGED:
            return False
        return bool(self.missing("blobs", contents))

    def _entries(self, path: str) -> list[dict[str, Any]] | None:
        """Return the entries of an index of manifests; None if it does not exist."""
        entries: list[dict[str, Any]] | None = None
        for page in self._pages(path, headers=_ANY_MANIFEST):
            rows = page.get("manifests")
            if not isinstance(rows, list) or not all(map(_is_entry, rows)):
                raise self._odd(f"{path} is not a list of manifests")
            entries = [*(entries or ()), *rows]
        return entries

    def _pages(self, path: str, **options: Any) -> Iterator[dict[str, Any]]:
        """Yield a list, page by page: each answer names the next one in its header ``Link``.

        Nothing if the first one does not exist (status 404).
        """
        url = path
        for _ in range(_MOST_PAGES):
            answer = self.find("GET", url, **options)
            if answer is None and url != path:
                raise self._odd(f"the next page of {path} does not exist")
            if answer is None:
                return
            yield self._json(answer.content, path)
            rest = answer.links.get("next", {}).get("url")
            if rest is None:
                return
            url = urljoin(answer.url, rest)
            options["params"] = None
            if not self.is_ours(url):
                raise self._odd(f"{path} goes on at {bare_url(url)}")
        raise self._odd(f"{path} has no end")


def _damaged(what: str) -> CheckFailed:
    return CheckFailed(
        what,
        hint="publish the image again, which sends what is lost; if other bytes come back then, "
        "ask who runs the registry, or a proxy before it",
    )


def _is_entry(row: Any) -> bool:
    digest = row.get("digest") if isinstance(row, dict) else None
    return (
        isinstance(digest, str)
        and re.fullmatch(r"[a-z0-9+._-]+:[A-Za-z0-9=_-]+", digest) is not None
    )
