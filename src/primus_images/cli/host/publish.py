"""`primus publish`: images and their evidence in a registry."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primus_images.cli.host.common import (
    SeveralOptions,
    SignerOptions,
    resolved_targets,
    warn_of_state,
)
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


@dataclass(frozen=True, kw_only=True)
class PublishOptions(SeveralOptions, SignerOptions):
    """The options of ``publish``."""

    to: str
    preview: bool
    records: Path | None
    policy: Path | None
    sign_later: Path | None
    dry_run: bool


def publish(options: PublishOptions) -> int:
    """Publish a built image with its evidence, which it needs to be a release."""
    example = (options.target or ["TARGET"])[0]
    check_repository(options.to, f"nox -s publish-{example} -- --to docker.io/OWNER/NAME")
    targets, workspace = resolved_targets(options)
    for resolved in targets:
        warn_of_state(resolved)
    if not options.preview:
        _warn_of_previews(targets)
    signing = _signing(options)
    needs = _needs(options, targets[0].root)
    published = []
    with choose_progress(options.json) as progress:
        plans = plan_images(targets, workspace.stats)
        images = [prepare(plan, workspace, needs, progress) for plan in plans]
        refused = any(ready.objections for ready in images)
        if not refused and not options.dry_run:
            for ready in images:
                published.append(upload(ready, workspace.store, options.to, progress, signing))
    lines = []
    for row in published:
        lines += _sent(row, options.to)
        if row["to_sign"]:
            note(
                options,
                f"! not signed and not tagged: run `primus sign {options.sign_later} --key KEY`",
            )
    if not published:
        screen = Screen.of()
        for ready in images:
            lines += [screen.fit(line) for line in _judgement(ready, options.to)]
    document = {
        "published": published,
        "judged": [_judged(ready) for ready in images],
        "passed": not refused,
    }
    return answer(options, document, lines, passed=not refused)


def _signing(options: PublishOptions) -> Signer | Path | None:
    """Return who signs, or the folder for what is signed later."""
    if not options.sign_later:
        return signer_of(options)
    if options.key or options.keyless:
        raise InputError(
            "--sign-later leaves the signing to `primus sign`", hint="leave out --key and --keyless"
        )
    return options.sign_later


def _needs(options: PublishOptions, root: Path) -> Needs:
    return Needs(
        records=(options.records or root / "out" / "validation").absolute(),
        policy=policy.of_project(root, options.policy),
        preview=options.preview,
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
