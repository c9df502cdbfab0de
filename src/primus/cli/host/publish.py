"""``primus publish``."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence

from primus.cli.host.common import resolved_targets
from primus.display import choose_progress
from primus.errors import InputError
from primus.plan.layers import plan_image
from primus.release.publish import Ready, prepare, publish

_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_NAME = re.compile(rf"^(?:localhost|[A-Za-z0-9.-]+\.[A-Za-z0-9-]+|[A-Za-z0-9.-]+(?=:))(?::[0-9]+)?(?:/{_PART})+$")


def run(args: argparse.Namespace) -> int:
    """Check all images; if none has an objection, publish them. Returns 0, or 1 if one was refused."""
    if not args.to:
        hint = f"nox -s publish-{args.target[0] if args.target else 'TARGET'} -- --to docker.io/rocm/primus"
        raise InputError("--to is missing: it names the repository to publish to", hint=hint)
    if not _NAME.match(args.to):
        raise InputError(
            f"--to {args.to!r} is not a repository of a registry", hint="HOST[:PORT]/PATH, e.g. docker.io/rocm/primus"
        )
    targets, workspace = resolved_targets(args)
    for resolved in targets:
        if resolved.choice.preview and not args.preview:
            chosen = resolved.choice
            print(f"! {resolved.name} is a preview of channel {chosen.channel}: {chosen.preview}", file=sys.stderr)
            print(f"  → {chosen.reason}; --preview publishes the preview", file=sys.stderr)
    records = (args.records or targets[0].root / "out" / "validation").absolute()
    plans = [plan_image(resolved, workspace.stats) for resolved in targets]
    with choose_progress(args.json) as progress:
        every = [prepare(plan, workspace, records=records, preview=args.preview, progress=progress) for plan in plans]
        refused = any(ready.objections for ready in every)
        done = []
        if not refused and not args.dry_run:
            done = [publish(ready, workspace.store, args.to, progress, key=args.key) for ready in every]
    if args.json:
        print(json.dumps({"published": done, "judged": [_row(r) for r in every], "passed": not refused}))
        return 1 if refused else 0
    for line in _judgement(every, args.to) if refused or args.dry_run else ():
        print(line)
    for one in done:
        sent = (
            f"sent {one['bytes_sent'] / 1e6:.1f} of {one['bytes'] / 1e6:.1f} MB" if one["new"] else "already published"
        )
        print(f"{one['ref']}: {sent}, {len(one['attached'])} documents attached")
        print(f"{args.to}@{one['digest']}")
    return 1 if refused else 0


def _row(ready: Ready) -> dict[str, object]:
    return {
        "tag": ready.tag,
        "digest": ready.image.digest,
        "documents": [document.name for document in ready.documents],
        "objections": list(ready.objections),
    }


def _judgement(every: Sequence[Ready], repository: str) -> list[str]:
    lines = []
    for ready in every:
        sign = "✗" if ready.objections else "✓"
        lines.append(f"{sign} {repository}:{ready.tag}  {ready.image.digest}  {ready.image.size / 1e6:.1f} MB")
        lines += [f"    ✗ {objection}" for objection in ready.objections]
        lines += [f"    + {document.name}" for document in ready.documents]
    return lines
