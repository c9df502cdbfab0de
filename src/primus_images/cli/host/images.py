"""Verbs about images of the store: gates, size, a second build, evidence, publishing; and what of
the store can go.
"""

import argparse
import hashlib
import json
import re
import shutil
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path, PurePosixPath
from typing import Any

import zstandard

from primus_images.cli.host.common import open_project, resolved_target, resolved_targets
from primus_images.cli.verb import answer, note
from primus_images.errors import InputError, did_you_mean
from primus_images.gates.check import judge, outcome_text
from primus_images.gates.examined import Examined, examine
from primus_images.oci.store import Store
from primus_images.plan.action import Composed
from primus_images.plan.layers import plan_images
from primus_images.plan.project import Workspace
from primus_images.plan.resolve import ResolvedTarget
from primus_images.progress import choose_progress
from primus_images.release import policy
from primus_images.release.documents import bill, checkout, cyclonedx, licences, listing
from primus_images.release.policy import audit as look_up, load_accepted, openvex
from primus_images.release.publish import Ready, finish, move_tag, prepare, publish as upload
from primus_images.release.registry import Repository, require_repository
from primus_images.release.statement import Signer, Trust, check_key, requests
from primus_images.schema import read_json
from primus_images.terminal import Screen, Styled, bytes_text, counted

# Folders below this fraction of the image are left out.
_SHARE = 0.005
# A folder that contains this fraction of its parent is shown in its place.
_NEARLY_ALL = 0.99


def check(args: argparse.Namespace) -> int:
    """Run every gate on a built image, using the contents of its layers."""
    targets, workspace = resolved_targets(args)
    with choose_progress(args.json) as progress:
        plans = plan_images(targets, workspace.stats)
        outcomes = [judge(examine(plan, workspace, progress)) for plan in plans]
    passed = all(outcome.passed for outcome in outcomes)
    document = {"images": [outcome.as_json() for outcome in outcomes], "passed": passed}
    text = "\n\n".join(outcome_text(outcome, Screen.of()) for outcome in outcomes)
    return answer(args, document, [text], passed=passed)


def sbom(args: argparse.Namespace) -> int:
    """List the files that a built image is made of, as in its lock, with the licences that they
    declare.
    """
    resolved, examined = _examined_target(args)
    document = bill(examined.image, *checkout(resolved.root), licences(examined.facts))
    # As in the registry: every character that is not ASCII is escaped.
    if args.cyclonedx:
        shown = cyclonedx(document)
    else:
        shown = document
    print(json.dumps(shown, indent=1) if args.json or args.cyclonedx else listing(document))
    return 0


def verify(args: argparse.Namespace) -> int:
    """Rebuild into an empty store from the same downloaded files; compare the digests and run every
    gate.
    """
    if args.image or args.key or args.identity or args.issuer or args.policy:
        return _verify_published(args)
    # A fifth of the time of a publish that changes nothing.
    from primus_images.engine.pipeline import Options, build
    from primus_images.engine.workshop import digest_of_image

    targets, workspace = resolved_targets(args)
    plans = plan_images(targets, workspace.stats)
    for resolved in targets:
        digest_of_image(workspace.store, resolved.name, ref=resolved.ref)
    first = [
        built.image for built in build(plans, workspace, Options(rehash=True, quiet=args.json))
    ]
    workspace.folder.mkdir(exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="verify-", dir=workspace.folder))
    failed: dict[str, str] = {}
    try:
        # The second build has its own store but shares downloads and unpacked layers. It hashes
        # local files again.
        twin = Workspace(Store(scratch / "store"), workspace.folder)
        plans = plan_images(targets, twin.stats)
        second = [
            built.image for built in build(plans, twin, Options(quiet=args.json, judge=False))
        ]
        for image, rebuilt in zip(first, second, strict=True):
            if image.digest != rebuilt.digest:
                failed[image.plan.resolved.name] = _difference(
                    (workspace.store, image), (twin.store, rebuilt)
                )
    finally:
        if not failed:
            shutil.rmtree(scratch, ignore_errors=True)
    with choose_progress(args.json) as progress:
        outcomes = [judge(examine(image.plan, workspace, progress)) for image in first]
    passed = not failed and all(outcome.passed for outcome in outcomes)
    rows = []
    lines = []
    for image, outcome in zip(first, outcomes, strict=True):
        target = image.plan.resolved.name
        difference = failed.get(image.plan.resolved.name)
        row = {"target": target, "digest": image.digest, "difference": difference}
        rows.append(row | {"gates": outcome.as_json()["gates"]})
        verdict = "both builds are identical"
        if difference:
            verdict = f"differs: {difference}"
        lines += [
            f"{image.plan.ref} {image.digest}: {verdict}",
            outcome_text(outcome, Screen.of()).partition("\n")[2],
        ]
    if failed:
        note(args, f"the second store is {scratch}")
    return answer(args, {"images": rows, "passed": passed}, lines, passed=passed)


def why_size(args: argparse.Namespace) -> int:
    """Show what makes an image large: unpacked bytes per layer and folder, largest first."""
    resolved, examined = _examined_target(args)
    rows = largest({layer: facts.folders for layer, facts in examined.facts.items()})
    names = ("layer", "folder", "bytes")
    document = {
        "image": resolved.ref,
        "largest": [dict(zip(names, row, strict=True)) for row in rows],
    }
    total = sum(size for _, folder, size in rows if not folder)
    table = [
        (
            bytes_text(size),
            f"{100 * size / max(total, 1):.1f} %",
            f"  {folder}" if folder else Styled(layer, "bold"),
        )
        for layer, folder, size in rows
    ]
    return answer(
        args,
        document,
        Screen.of().table([(bytes_text(total), "", resolved.ref), *table], right=(0, 1)),
    )


def clean(args: argparse.Namespace) -> int:
    """Free disk space: remove what no image, lock or last build needs."""
    from primus_images.engine.upkeep import find_waste, remove  # not for other verbs, as in verify

    project = open_project(args)
    store = project.workspace.store
    with project.workspace.alone():
        names = store.images()
        for name in args.image:
            if name not in names:
                hint = did_you_mean(name, names) or "images: " + (
                    ", ".join(sorted(names)) or "none"
                )
                raise InputError(f"the store has no image called {name!r}", hint=hint)
        locks = map(project.lock, sorted((project.root / "images" / "locks").glob("*/*.json")))
        needed = {file.sha256 for lock in locks if lock for file in lock.files}
        waste = find_waste(project.workspace, needed, without=args.image, caches=args.caches)
        if not args.dry_run:
            for name in set(args.image):
                store.untag(name)
            remove(waste)
    size = sum(item.size for item in waste)
    rows = [{"kind": item.kind, "number": len(item.paths), "bytes": item.size} for item in waste]
    document = {
        "removed": not args.dry_run,
        "images": sorted(set(args.image)),
        "waste": rows,
        "bytes": size,
    }
    table = [(item.kind, f"{len(item.paths):,}", bytes_text(item.size)) for item in waste]
    total = "nothing to remove"
    if waste:
        total = f"{'would free' if args.dry_run else 'freed'} {bytes_text(size)}"
    head = ()
    if waste:
        head = ("what", "number", "size")
    return answer(args, document, [*Screen.of().table(table, head=head, right=(1, 2)), total])


def _difference(first: tuple[Store, Composed], second: tuple[Store, Composed]) -> str:
    (store_a, a), (store_b, b) = first, second
    for (action, layer), (_, rebuilt) in zip(a.rows, b.rows, strict=True):
        if layer.blob.digest != rebuilt.blob.digest:
            members = (_members(store_a, layer.blob.digest), _members(store_b, rebuilt.blob.digest))
            for old, new in zip_longest(*members, fillvalue=dict[str, object]()):
                keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
                if keys:
                    changed = ", ".join(
                        f"{key} {old.get(key)} against {new.get(key)}" for key in keys
                    )
                    return f"layer {action.name}: /{old.get('name') or new['name']}: {changed}"
            return f"layer {action.name}: the same files, compressed to other bytes"
    return "the layers are the same, config or manifest differ"


def _members(store: Store, digest: str) -> Iterator[dict[str, object]]:
    with (
        store.blob_path(digest).open("rb") as raw,
        zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True) as stream,
        tarfile.open(fileobj=stream, mode="r|") as archive,
    ):
        for member in archive:
            data = None
            if member.isreg():
                data = archive.extractfile(member)
            if data:
                content = {"sha256": hashlib.file_digest(data, "sha256").hexdigest()}
            else:
                content = {}
            yield {**member.get_info(), **content}


def largest(layers: Mapping[str, Mapping[str, int]]) -> list[tuple[str, str, int]]:
    """Return layer, folder and bytes of each layer (folder ``""``) and each large folder, largest
    first.

    ``layers`` map each folder to the bytes of its own files; the result includes those below it.
    Folders with nearly everything in one subfolder are left out.
    """
    least = max(1, _SHARE * sum(sum(folders.values()) for folders in layers.values()))
    blocks = []
    for layer, folders in layers.items():
        sums = Counter[str]()
        for name, size in folders.items():
            sums.update(
                {str(above): size for above in (PurePosixPath(name), *PurePosixPath(name).parents)}
            )
        parents = {name: str(PurePosixPath(name).parent) for name in sums if name != "."}
        lone = {above for name, above in parents.items() if sums[name] >= _NEARLY_ALL * sums[above]}
        rows = [
            (layer, name, sums[name])
            for name in parents
            if sums[name] >= least and name not in lone
        ]
        blocks.append([(layer, "", sums["."]), *sorted(rows, key=lambda row: (-row[2], row[1]))])
    return [row for block in sorted(blocks, key=lambda block: -block[0][2]) for row in block]


def publish(args: argparse.Namespace) -> int:
    """Publish a built image with its evidence: bill of materials, provenance, gates, lock and
    validations.
    """
    _check_repository(
        args.to, f"nox -s publish-{(args.target or ['TARGET'])[0]} -- --to docker.io/rocm/primus"
    )
    targets, workspace = resolved_targets(args)
    for resolved in targets:
        if (chosen := resolved.choice).preview and not args.preview:
            print(
                f"! {resolved.name} is a preview of channel {chosen.channel}: {chosen.preview}",
                file=sys.stderr,
            )
            print(f"  → {chosen.reason}; --preview publishes the preview", file=sys.stderr)
    if args.sign_later and (args.key or args.keyless):
        raise InputError(
            "--sign-later leaves the signing to `primus sign`", hint="leave out --key and --keyless"
        )
    signer = _signer(args)
    file = args.policy or targets[0].root / "policy.yaml"
    if args.policy or file.exists():
        rules = policy.load(file)
    else:
        rules = policy.Policy()
    records = (args.records or targets[0].root / "out" / "validation").absolute()
    done: list[dict[str, Any]] = []
    with choose_progress(args.json) as progress:
        plans = plan_images(targets, workspace.stats)
        every = [
            prepare(
                plan,
                workspace,
                records=records,
                policy=rules,
                preview=args.preview,
                progress=progress,
            )
            for plan in plans
        ]
        refused = any(ready.objections for ready in every)
        if not refused and not args.dry_run:
            later = args.sign_later
            done = [
                upload(r, workspace.store, args.to, progress, signer=signer, later=later)
                for r in every
            ]
    if refused or args.dry_run:
        shown = every
    else:
        shown = []
    screen = Screen.of()
    lines = [screen.fit(line) for ready in shown for line in _judgement(ready, args.to)]
    for image in done:
        sizes = f"{image['bytes_sent'] / 1e6:.1f} of {image['bytes'] / 1e6:.1f} MB"
        sent = "already published"
        if image["new"] or image["bytes_sent"]:
            sent = f"sent {sizes}"
        lines.append(f"{image['ref']}: {sent}, {len(image['attached'])} documents attached")
        if image["to_sign"]:
            note(
                args, f"! not signed and not tagged: run `primus sign {args.sign_later} --key KEY`"
            )
        lines.append(f"{args.to}@{image['digest']}")
    judged = []
    for ready in every:
        row = {"tag": ready.tag, "digest": ready.image.digest, "objections": ready.objections}
        judged.append({**row, "documents": [document.name for document in ready.documents]})
    return answer(
        args,
        {"published": done, "judged": judged, "passed": not refused},
        lines,
        passed=not refused,
    )


def tag(args: argparse.Namespace) -> int:
    """Move a tag to a published release, forwards after a publish or back to an earlier one."""
    _check_repository(args.to, "primus tag latest-cpu v26.11-cpu --to docker.io/rocm/primus")
    before, digest = move_tag(Repository(args.to), args.tag, args.release)
    line = f"{args.to}:{args.tag}: {before or 'new'} → {digest} ({args.release})"
    return answer(args, {"tag": f"{args.to}:{args.tag}", "old": before, "new": digest}, [line])


def _check_repository(name: str, example: str) -> None:
    if not name:
        raise InputError("--to is missing: it names the repository to publish to", hint=example)
    require_repository(name, "--to")


def sign(args: argparse.Namespace) -> int:
    """Sign the evidence of published images, attach it to them in the registry, and set their tags."""
    signer = _signer(args)
    if signer is None:
        raise InputError("--key or --keyless is missing: who signs?", hint="--key cosign.key")
    done = []
    lines = list[str]()
    for ref, subject, about in requests(args.folder):
        name, _, tag = ref.rpartition(":")
        there = Repository(name)
        done.append(
            {
                "ref": ref,
                "digest": subject["digest"],
                "signed": finish(there, tag, subject, about, signer),
            }
        )
        lines += [f"{ref}: {done[-1]['signed']} statements signed", f"{name}@{subject['digest']}"]
    return answer(args, {"signed": done}, lines)


def _verify_published(args: argparse.Namespace) -> int:
    if args.target or args.all or not args.image:
        raise InputError(
            "--key, --identity, --issuer and --policy are about the published image of "
            "--image; a target is built here",
            hint="name a target or --image REF",
        )
    if bool(args.key) == bool(args.identity and args.issuer):
        raise InputError(
            "who must have signed it? Name either --key, or --identity and --issuer, and not both",
            hint="--key cosign.pub",
        )
    from primus_images.release.verification import (
        verified_text,
        verify_image,
    )  # not for other verbs, as above

    trust = Trust(key=args.key, identity=args.identity, issuer=args.issuer)
    check_key(args.key, "--key")
    rules = None
    if args.policy:
        rules = policy.load(args.policy)
    with choose_progress(args.json) as progress:
        result = verify_image(args.image, trust, policy=rules, say=progress.say)
    document = {**asdict(result), "passed": result.passed}
    return answer(args, document, [verified_text(args.image, result)], passed=result.passed)


def audit(args: argparse.Namespace) -> int:
    """Look up the packages of an image in OSV data of PyPI and Debian, without a network."""
    file = Path(args.what)
    if file.is_file():
        try:
            bom: Any = read_json(file).data
        except InputError as error:
            why = f": {error.message}"
            raise InputError(
                f"not an SPDX document in JSON{why}",
                where=error.where,
                hint="name a target, or a file that `primus sbom TARGET --json` wrote",
            ) from None
    else:
        args.target = args.what
        resolved, examined = _examined_target(args)
        bom = bill(examined.image, *checkout(resolved.root), licences(examined.facts))
    (findings, unseen), today = (
        look_up(bom, args.osv, load_accepted(args.accepted)),
        datetime.now(tz=UTC),
    )
    if file.is_file() and not re.search('"pkg:(pypi|deb)/', json.dumps(bom).lower()):
        unseen.append("no package of PyPI or Debian is named by its purl, so nothing was looked up")
    for sentence in unseen:
        note(args, f"! {args.osv}: {sentence}")
    if args.vex and not findings:
        print(
            "! no vulnerability, so no VEX is written: OpenVEX needs a statement", file=sys.stderr
        )
    elif args.vex:
        vex = openvex(findings, str(bom.get("name", "image")), today.strftime("%Y-%m-%dT%H:%M:%SZ"))
        args.vex.write_text(json.dumps(vex, indent=1) + "\n", encoding="utf-8")
    unsafe = [finding for finding in findings if finding.is_open(today.date())]
    lines = [
        f"{'✗' if finding in unsafe else '–'} {finding.sentence(today.date())}"
        for finding in findings
    ]
    verdict = f"{'FAILED' if unsafe else 'passed'}: {counted(len(unsafe), 'finding')} to act on"
    document = {
        "findings": [asdict(finding) for finding in findings],
        "passed": not unsafe,
        "not_looked_up": unseen,
    }
    return answer(
        args,
        document,
        [*lines, f"{verdict}, {len(findings) - len(unsafe)} accepted"],
        passed=not unsafe,
    )


def _examined_target(args: argparse.Namespace) -> tuple[ResolvedTarget, Examined]:
    """Resolve the requested target, and examine the layers of its image. Raises InputError if it is
    not built.
    """
    resolved, workspace = resolved_target(args)
    with choose_progress(args.json) as progress:
        return resolved, examine(plan_images([resolved], workspace.stats)[0], workspace, progress)


def _signer(args: argparse.Namespace) -> Signer | None:
    if args.key and args.keyless:
        raise InputError("--key and --keyless exclude each other")
    signer = None
    if args.key or args.keyless:
        signer = Signer(key=args.key)
    if signer:
        signer.check("--key")
    return signer


def _judgement(ready: Ready, repository: str) -> Iterator[str]:
    sign = "✓"
    if ready.objections:
        sign = "✗"
    yield f"{sign} {repository}:{ready.tag}  {ready.image.digest}  {ready.image.size / 1e6:.1f} MB"
    yield from (f"    ✗ {objection}" for objection in ready.objections)
    yield from (f"    + {document.name}" for document in ready.documents)
