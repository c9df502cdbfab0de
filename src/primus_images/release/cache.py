"""A registry as the cache of builds: the results of actions by their keys, each with a signed
statement.

An entry is an OCI artifact that contains a layer or a wheel. Its tag is the kind and the key of the
action. cosign signs a statement about it, which holds the record of the action; stock cosign
verifies it as it does that of an image.

An entry counts only if the user's key signed it for this very action. Its bytes are compared with
the signed digest before anything reads them, and what the store records of a layer is computed from
these bytes. What the gates see in it is in the statement, too, and counts for the same rules. An
entry that fails is named, and the action runs here: what a build makes never depends on the cache.
"""

import contextlib
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.pool import ThreadPool
from typing import NamedTuple, Self, TypeVar

from primus_images.engine.workshop import Wheel, Workshop, record_of, wheel_of
from primus_images.errors import CheckFailed, HostError, InputError
from primus_images.files import sha256_of
from primus_images.gates.examined import LayerFacts, examine_layer, save
from primus_images.gates.rules import rules_hash
from primus_images.oci.layer import adopt_layer
from primus_images.oci.store import MANIFEST_TYPE, Blob, Layer, digest_of
from primus_images.plan.action import Action, ImagePlan
from primus_images.plan.project import Workspace
from primus_images.progress import Progress
from primus_images.release.artifact import Document as Attached, artifact_of
from primus_images.release.registry import Repository, require_repository
from primus_images.release.statement import (
    BUNDLE,
    Signer,
    Trust,
    check_key,
    payload,
    statement_about,
)
from primus_images.schema import build_typed
from primus_images.terminal import bytes_text, counted
from primus_images.versions.lock import ARCHITECTURE

T = TypeVar("T")

RESULT = "urn:primus-images:result:1"
_PLATFORM = f"linux/{ARCHITECTURE}"
_WORKERS = 8
# How often an entry that does not arrive is requested, and the seconds between.
_TRIES = 3
_PAUSE_S = 1.0


class _Entry(NamedTuple):
    value: Layer | Wheel
    facts: LayerFacts | None


@dataclass
class Cache:
    """The cache in a repository. Entries count if ``trust`` accepts their signatures; ``signer``
    signs new ones.
    """

    there: Repository
    trust: Trust
    signer: Signer | None = None
    answers: bool = True

    @classmethod
    def of_options(cls, args: Namespace) -> Self:
        """Return the cache of the options ``--cache…``. Raises InputError, and HostError without
        cosign.
        """
        if not (args.cache and args.cache_key):
            raise InputError(
                "--cache and --cache-key belong together: where results are, and who must have "
                "signed them",
                hint="--cache HOST/PATH --cache-key cosign.pub",
            )
        require_repository(args.cache, "--cache")
        trust = Trust(key=args.cache_key)
        check_key(args.cache_key, "--cache-key")
        signer = None
        if args.cache_sign:
            signer = Signer(key=args.cache_sign)
        if signer:
            signer.check("--cache-sign")
        return cls(Repository(args.cache), trust, signer)

    def look_up(self, actions: Iterable[Action]) -> dict[str, Blob]:
        """Return action key → blob of the entries that count. What does not count is named on
        standard error.
        """
        entries: dict[str, _Entry] = _each(actions, partial(self._excused, call=self._find))
        return {key: _blob(entry.value) for key, entry in entries.items()}

    def pull(self, actions: Iterable[Action], shop: Workshop) -> None:
        """Get the results of ``actions`` that the cache has into the store. What does not count is
        named.
        """
        _each(actions, partial(self._excused, call=partial(self._download, shop=shop)))

    def push(self, plans: Iterable[ImagePlan], workspace: Workspace) -> None:
        """Sign and send the results that the store has and the cache lacks, if there is a signer.
        Prints their number.

        Raises HostError if the registry or cosign refuses, or a blob of the store is damaged.
        """
        if self.signer:
            actions = {action.key: action for plan in plans for action in plan.actions()}.values()
            sent = _each(actions, partial(self._upload, workspace=workspace, signer=self.signer))
            print(f"{counted(len(sent), 'result')} sent to {self.there.name}", file=sys.stderr)

    def _excused(self, action: Action, call: Callable[[Action], _Entry | None]) -> _Entry | None:
        """Return ``call(action)``; None and a sentence if it fails. A registry that does not answer
        is left alone.
        """
        for tries in range(1, _TRIES + 1):
            try:
                return call(action)
            except (CheckFailed, InputError) as error:
                print(
                    f"! the cache's entry of {action.name} is not used: {error.message}",
                    file=sys.stderr,
                )
                break
            except (HostError, OSError) as error:  # OSError: the disk is full
                if tries == _TRIES and self.answers:
                    self.answers = False
                    print(
                        f"! the cache is not used: {str(error).partition(chr(10))[0]}",
                        file=sys.stderr,
                    )
                time.sleep(_PAUSE_S)
        return None

    def _find(self, action: Action) -> _Entry | None:
        """Return the action's entry. Raises CheckFailed if the entry does not count."""
        manifest = None
        if self.answers:
            manifest = self.there.manifest(f"{action.kind}-{action.key}")
        if manifest is None:
            return None
        digest = digest_of(manifest)
        reasons = []
        for descriptor in self.there.referrers(digest):
            if descriptor.get("artifactType") == BUNDLE:
                try:
                    return self._signed(action, digest, self.there.document(descriptor).data)
                except CheckFailed as error:
                    reasons.append(error.message)
        raise CheckFailed("; ".join(dict.fromkeys(reasons)) or "it is not signed")

    def _signed(self, action: Action, digest: str, bundle: bytes) -> _Entry:
        problem = self.trust.rejects(bundle, RESULT)
        if problem:
            raise CheckFailed(problem)
        shape: type[Layer | Wheel] = Wheel if action.kind == "build" else Layer
        try:
            statement = payload(bundle)
            about = f"sha256:{statement['subject'][0]['digest']['sha256']}"
            predicate = statement["predicate"]
            key = predicate["key"]
            platform = predicate["platform"]
            value = build_typed(shape, predicate["record"][shape.__name__.lower()], "statement")
            same_rules = predicate["rules"] == rules_hash()
            facts = None
            if same_rules:
                facts = build_typed(LayerFacts, predicate["facts"], "statement")
        except (ValueError, KeyError, TypeError, IndexError, InputError) as error:
            raise CheckFailed(
                f"its statement is damaged ({type(error).__name__}: {error})"
            ) from None
        if (about, key, platform) != (digest, action.key, _PLATFORM):
            raise CheckFailed(
                f"its statement is about {key} for {platform} in {about}, not about this entry"
            )
        return _Entry(value, facts)

    def _download(self, action: Action, shop: Workshop) -> _Entry | None:
        store = shop.workspace.store
        with (
            store.lock(action.key, f"another build of {action.name}"),
            store.folder("cache") as folder,
        ):
            if shop.done(action):
                entry = None
            else:
                entry = self._find(action)
            if entry is None:
                return None
            value = entry.value
            blob = _blob(entry.value)
            path = folder / "blob"
            shop.progress.start(action.key, f"{action.name} from the cache")
            if not self.there.blob(blob.digest, path, blob.size):
                raise CheckFailed("its contents are missing")
            digest = f"sha256:{sha256_of(path)}"
            if digest != blob.digest:
                size = path.stat().st_size
                raise CheckFailed(
                    f"{size:,} of {blob.size:,} bytes were sent, which hash to {digest}"
                )
            if isinstance(value, Wheel):
                shop.workspace.files.put(path, value.sha256)
            elif (
                adopt_layer(store, path, blob.digest.removeprefix("sha256:"), blob.media_type)
                != value
            ):
                raise CheckFailed("its statement describes another layer than its bytes are")
            elif entry.facts:
                save(shop.workspace, value, entry.facts)
            store.save("actions", action.key, record_of(action, value))
        shop.progress.finish(action.key, bytes_text(blob.size))
        return entry

    def _upload(self, action: Action, workspace: Workspace, signer: Signer) -> bool:
        store = workspace.store
        if action.kind == "build":
            value = wheel_of(store, action.key)
        else:
            value = store.layer(action.key)
        if value is None:
            return False
        with contextlib.suppress(CheckFailed):  # what does not count is replaced
            entry = self._find(action)
            if entry and entry.value == value:
                return False
        blob = _blob(value)
        if isinstance(value, Wheel):
            path = workspace.files.path(value.sha256)
        else:
            path = store.blob_path(blob.digest)
        if f"sha256:{sha256_of(path)}" != blob.digest:
            raise HostError(f"{path} is damaged", hint="primus build --rehash makes it again")
        with path.open("rb") as data:
            self.there.upload(blob.digest, data)
        self.there.upload_config()
        manifest = artifact_of(RESULT, blob.descriptor)
        subject = Blob.of(manifest, MANIFEST_TYPE)
        if isinstance(value, Layer):
            facts = examine_layer(workspace, action.name, value, Progress())
        else:
            facts = LayerFacts()
        predicate = {"key": action.key, "platform": _PLATFORM, "record": record_of(action, value)}
        predicate |= {"rules": rules_hash(), "facts": asdict(facts)}
        statement = statement_about(action.name, subject.digest, RESULT, predicate)
        self.there.tag(subject.digest, manifest)
        bundle = Attached(media_type=BUNDLE, name="", data=signer.bundle(statement))
        self.there.attach([bundle], subject.descriptor)
        self.there.tag(
            f"{action.kind}-{action.key}", manifest
        )  # last, so that no tag lacks its statement
        return True


def _each(actions: Iterable[Action], call: Callable[[Action], T | None]) -> dict[str, T]:
    """Call it for several actions at once. Returns action key → result, without empty ones."""
    todo = list(actions)
    with ThreadPool(_WORKERS) as pool:
        return {
            action.key: result
            for action, result in zip(todo, pool.map(call, todo), strict=True)
            if result
        }


def _blob(value: Layer | Wheel) -> Blob:
    if isinstance(value, Layer):
        return value.blob
    return Blob(digest=f"sha256:{value.sha256}", media_type="application/zip", size=value.size)
