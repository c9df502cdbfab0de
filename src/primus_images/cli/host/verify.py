"""`primus verify`: a second build of an image, or the evidence of a published one."""

import hashlib
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import zstandard

from primus_images.cli.host.common import SeveralOptions, TrustedOptions, resolved_targets
from primus_images.cli.host.sign import trust_of
from primus_images.cli.verb import answer, note
from primus_images.errors import InputError
from primus_images.gates.check import judge, outcome_text
from primus_images.gates.examined import examine
from primus_images.oci.store import Store
from primus_images.plan.action import Composed
from primus_images.plan.layers import plan_images
from primus_images.plan.project import Workspace
from primus_images.plan.resolve import ResolvedTarget
from primus_images.progress import choose_progress
from primus_images.release import policy
from primus_images.release.statement import Trust
from primus_images.terminal import Screen


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(SeveralOptions, TrustedOptions):
    """The options of ``verify``."""

    image: str | None
    policy: Path | None


def verify(options: VerifyOptions) -> int:
    """Build again into an empty store, compare the digests, and run every gate."""
    if options.image:
        return _verify_published(options.image, options)
    _refuse_those_of_published(options)
    return _verify_built(options)


@dataclass(frozen=True)
class _Twin:
    """An image, and why its second build differs from it; empty if it does not."""

    image: Composed
    difference: str


def _verify_built(options: VerifyOptions) -> int:
    targets, workspace = resolved_targets(options)
    workspace.folder.mkdir(exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="verify-", dir=workspace.folder))
    twins = []
    try:
        twins = _build_twice(targets, workspace, scratch, quiet=options.json)
    finally:
        equal = not any(twin.difference for twin in twins)
        if equal:
            shutil.rmtree(scratch, ignore_errors=True)
    with choose_progress(options.json) as progress:
        outcomes = [judge(examine(twin.image.plan, workspace, progress)) for twin in twins]
    rows = []
    lines = []
    for twin, outcome in zip(twins, outcomes, strict=True):
        image = twin.image
        rows.append(
            {
                "target": image.plan.resolved.name,
                "digest": image.digest,
                "difference": twin.difference or None,
                "gates": outcome.as_json()["gates"],
            }
        )
        verdict = "both builds are identical"
        if twin.difference:
            verdict = f"differs: {twin.difference}"
        _, _, gates = outcome_text(outcome, Screen.of()).partition("\n")
        lines += [f"{image.plan.ref} {image.digest}: {verdict}", gates]
    if not equal:
        note(options, f"the second store is {scratch}")
    passed = equal and all(outcome.passed for outcome in outcomes)
    return answer(options, {"images": rows, "passed": passed}, lines, passed=passed)


def _build_twice(
    targets: Sequence[ResolvedTarget], workspace: Workspace, scratch: Path, *, quiet: bool
) -> list[_Twin]:
    # Seam "pipeline": a fifth of the time of a publish that changes nothing.
    from primus_images.engine.pipeline import Options, build
    from primus_images.engine.workshop import digest_of_image

    plans = plan_images(targets, workspace.stats)
    for resolved in targets:
        digest_of_image(workspace.store, resolved.name, ref=resolved.ref)
    first = build(plans, workspace, Options(rehash=True, quiet=quiet))
    # The second build has its own store, and shares downloads and unpacked layers. It hashes local
    # files again.
    second_workspace = Workspace(Store(scratch / "store"), workspace.folder)
    plans = plan_images(targets, second_workspace.stats)
    second = build(plans, second_workspace, Options(quiet=quiet, judge=False))
    twins = []
    for one, other in zip(first, second, strict=True):
        difference = ""
        if one.image.digest != other.image.digest:
            stores = (workspace.store, second_workspace.store)
            difference = _difference(stores, one.image, other.image)
        twins.append(_Twin(one.image, difference))
    return twins


def _difference(stores: tuple[Store, Store], first: Composed, second: Composed) -> str:
    """Return the first file that differs between two builds of one plan."""
    for (action, layer), (_, rebuilt) in zip(first.rows, second.rows, strict=True):
        if layer.blob.digest == rebuilt.blob.digest:
            continue
        old_members = _members(stores[0], layer.blob.digest)
        new_members = _members(stores[1], rebuilt.blob.digest)
        for old, new in zip_longest(old_members, new_members, fillvalue=dict[str, object]()):
            changes = []
            for key in {**old, **new}:
                if old.get(key) != new.get(key):
                    changes.append(f"{key} {old.get(key)} against {new.get(key)}")
            if changes:
                name = old.get("name") or new["name"]
                return f"layer {action.name}: /{name}: {', '.join(changes)}"
        return f"layer {action.name}: the same files, compressed to other bytes"
    return "the layers are the same, config or manifest differ"


def _members(store: Store, digest: str) -> Iterator[dict[str, object]]:
    """Yield the header of each member of a layer, with the hash of its contents."""
    with (
        store.blob_path(digest).open("rb") as raw,
        zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True) as stream,
        tarfile.open(fileobj=stream, mode="r|") as archive,
    ):
        for member in archive:
            header: dict[str, object] = dict(member.get_info())
            data: Any = archive.extractfile(member) if member.isreg() else None
            if data:
                header["sha256"] = hashlib.file_digest(data, "sha256").hexdigest()
            yield header


def _verify_published(image: str, options: VerifyOptions) -> int:
    trust = _trust(options)
    # Seam "verification": only this way needs it.
    from primus_images.release.verification import verified_text, verify_image

    rules = policy.load(options.policy) if options.policy else None
    with choose_progress(options.json) as progress:
        result = verify_image(image, trust, policy=rules, say=progress.say)
    document = {**asdict(result), "passed": result.passed}
    return answer(options, document, [verified_text(image, result)], passed=result.passed)


def _trust(options: VerifyOptions) -> Trust:
    """Return whose signatures count. Raises InputError for options that do not fit together."""
    if options.target or options.all:
        raise InputError(
            "--image names a published image; a target is built here",
            hint="name a target or --image REF",
        )
    return trust_of(options)


def _refuse_those_of_published(options: VerifyOptions) -> None:
    """Raise InputError for options about a published image, which no option names."""
    values = {
        "--key": options.key,
        "--identity": options.identity,
        "--issuer": options.issuer,
        "--policy": options.policy,
    }
    names = " and ".join(name for name, value in values.items() if value)
    if names:
        raise InputError(
            f"{names} without --image: signatures and policies are about a published image",
            hint="add --image REF; without these options, a target is built again here",
        )
