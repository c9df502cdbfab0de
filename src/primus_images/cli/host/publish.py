"""`primus publish`: images and their evidence in a registry."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from primus_images.cli.host.common import resolved_targets, warn_of_state
from primus_images.cli.host.sign import signer_of
from primus_images.cli.verb import answer, note
from primus_images.errors import InputError
from primus_images.plan.layers import plan_images
from primus_images.plan.resolve import ResolvedTarget
from primus_images.progress import choose_progress
from primus_images.release import policy
from primus_images.release.publish import Needs, Ready, prepare, publish as upload
from primus_images.release.reference import require_repository
from primus_images.release.statement import Signer
from primus_images.terminal import Screen, say


def publish(args: argparse.Namespace) -> int:
    """Publish a built image with its evidence, which it needs to be a release."""
    example = (args.target or ["TARGET"])[0]
    check_repository(args.to, f"nox -s publish-{example} -- --to docker.io/OWNER/NAME")
    targets, workspace = resolved_targets(args)
    for resolved in targets:
        warn_of_state(resolved)
    if not args.preview:
        _warn_of_previews(targets)
    signing = _signing(args)
    needs = _needs(args, targets[0].root)
    published = []
    with choose_progress(args.json) as progress:
        plans = plan_images(targets, workspace.stats)
        images = [prepare(plan, workspace, needs, progress) for plan in plans]
        refused = any(ready.objections for ready in images)
        if not refused and not args.dry_run:
            for ready in images:
                published.append(upload(ready, workspace.store, args.to, progress, signing))
    lines = []
    for row in published:
        lines += _sent(row, args.to)
        if row["to_sign"]:
            note(
                args, f"! not signed and not tagged: run `primus sign {args.sign_later} --key KEY`"
            )
    if not published:
        screen = Screen.of()
        for ready in images:
            lines += [screen.fit(line) for line in _judgement(ready, args.to)]
    document = {
        "published": published,
        "judged": [_judged(ready) for ready in images],
        "passed": not refused,
    }
    return answer(args, document, lines, passed=not refused)


def _signing(args: argparse.Namespace) -> Signer | Path | None:
    """Return who signs, or the folder for what is signed later."""
    if not args.sign_later:
        return signer_of(args)
    if args.key or args.keyless:
        raise InputError(
            "--sign-later leaves the signing to `primus sign`", hint="leave out --key and --keyless"
        )
    return Path(args.sign_later)


def _needs(args: argparse.Namespace, root: Path) -> Needs:
    return Needs(
        records=(args.records or root / "out" / "validation").absolute(),
        policy=policy.of_project(root, args.policy),
        preview=args.preview,
    )


def check_repository(name: str, example: str) -> None:
    """Raise InputError unless --to names a repository."""
    if not name:
        raise InputError("--to is missing: it names the repository to publish to", hint=example)
    require_repository(name, "--to")


def _warn_of_previews(targets: Sequence[ResolvedTarget]) -> None:
    for resolved in targets:
        choice = resolved.choice
        if choice.preview:
            sentence = f"{resolved.name} is a preview of channel {choice.channel}: {choice.preview}"
            say(f"! {sentence}")
            say(f"  → {choice.reason}; --preview publishes the preview")


def _judgement(ready: Ready, repository: str) -> Iterator[str]:
    sign = "✗" if ready.objections else "✓"
    size = f"{ready.image.size / 1e6:.1f} MB"
    yield f"{sign} {repository}:{ready.tag}  {ready.image.digest}  {size}"
    for objection in ready.objections:
        yield f"    ✗ {objection}"
    for document in ready.documents:
        yield f"    + {document.name}"
    licences = policy.licence_line(ready.documents)
    if licences:
        yield f"    {licences}"


def _judged(ready: Ready) -> dict[str, Any]:
    return {
        "tag": ready.tag,
        "digest": ready.image.digest,
        "objections": ready.objections,
        "documents": [document.name for document in ready.documents],
    }


def _sent(row: Mapping[str, Any], repository: str) -> list[str]:
    sent = "already published"
    if row["new"] or row["bytes_sent"]:
        sent = f"sent {row['bytes_sent'] / 1e6:.1f} of {row['bytes'] / 1e6:.1f} MB"
    documents = f"{len(row['attached'])} documents attached"
    return [f"{row['ref']}: {sent}, {documents}", f"{repository}@{row['digest']}"]
