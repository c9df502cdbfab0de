"""Build images: only what changed, the same bytes for the same input. The last line is the manifest digest.

Each image passes the gates of `primus check` before its name points to it. An image of a preview channel may fail one;
what it failed is said.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from primus.cli.host.common import add_planning_options, open_project, targets_of

if TYPE_CHECKING:
    from primus.images.action import ImagePlan
    from primus.images.build import Built
    from primus.images.channel import Choice
    from primus.images.project import Project

EXAMPLE = "primus build cpu"

__all__ = ["EXAMPLE", "add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus build``."""
    add_planning_options(parser)
    parser.add_argument("--dry-run", action="store_true", help="show the plan and stop, as `primus plan`")
    parser.add_argument("--rehash", action="store_true", help="read every blob again first; build damaged ones anew")
    parser.add_argument(
        "--engine", choices=("auto", "embedded", "docker"), default="auto", help="where sandboxed steps run"
    )


def run(args: argparse.Namespace) -> int:
    """Build what is missing; print a table and the digests."""
    if args.dry_run:
        from primus.cli.host import plan

        return plan.run(args)
    from primus.images.build import current

    begin, began_ns = time.monotonic(), time.time_ns()
    project = open_project(args)
    names = targets_of(project, args)
    for name in names:
        if len(project.target(name).channels) > 1:
            print(f"{name}: channel {project.choice(name).channel}, {project.choice(name).reason}", file=sys.stderr)

    from primus.gates.rules import rules
    from primus.images.builder import build_images, plan_images

    plans = plan_images(project, names, locked=args.locked, offline=args.offline, quiet=args.json)
    done = [] if args.rehash else [current(project.store, plan, rules()) for plan in plans]
    built = [image for image in done if image is not None]
    if len(built) < len(plans):
        from primus.gates.admit import Gatekeeper
        from primus.gates.pins import check_pins

        # Before gigabytes are fetched for an image that could not pass.
        for name in names:
            if not project.choice(name).preview:
                check_pins(project, name)
        built = build_images(
            project,
            plans,
            gates=Gatekeeper,
            locked=args.locked,
            offline=args.offline,
            rehash=args.rehash,
            engine=args.engine,
            quiet=args.json,
        )
    project.stats.save()
    seconds = time.monotonic() - begin
    if args.json:
        import json
        from dataclasses import asdict

        print(json.dumps({"images": [asdict(b) for b in built], "seconds": round(seconds, 3)}))
    else:
        for image in built:
            print(_table(image, project.choice(image.target)), file=sys.stderr)
        _remember(project, plans, built, began_ns)
        print(f"{_outcome(built)}, {seconds:.2f} s", file=sys.stderr)
        for image in built:
            print(image.digest)
    return 0


def _remember(project: Project, plans: Sequence[ImagePlan], built: Sequence[Built], began_ns: int) -> None:
    """Let the next build answer from a note as long as nothing is touched."""
    from dataclasses import replace

    from primus.images.unchanged import remember

    for plan, image in zip(plans, built, strict=True):
        cached = tuple(replace(line, built=False, seconds=0.0) for line in image.layers)
        remember(project, plan, image, _table(replace(image, layers=cached), project.choice(image.target)), began_ns)


def _outcome(built: Sequence[Built]) -> str:
    made = sum(line.built for image in built for line in image.layers)
    if not any(image.changed for image in built):
        return "nothing to do"
    return f"{made} layers built, {sum(len(image.layers) for image in built) - made} reused"


def _table(image: Built, choice: Choice) -> str:
    from primus.images.outline import bytes_text

    width = max((len(line.name) for line in image.layers), default=5)
    head = f"{image.ref}  (channel {choice.channel}: {choice.reason})"
    if choice.preview:
        head += f"\n  PREVIEW, no release: {choice.preview}"
    rows = [head, f"  {'layer':<{width}}  {'size':>9}  {'state':<6}  {'seconds':>7}  digest"]
    for line in image.layers:
        state, seconds = ("built", f"{line.seconds:.1f}") if line.built else ("cached", "")
        size = bytes_text(line.size)
        rows.append(f"  {line.name:<{width}}  {size:>9}  {state:<6}  {seconds:>7}  {line.digest[7:19]}")
        if text := line.left_out.text():
            rows.append(f"  {'':<{width}}  for other GPUs: {text} unpacked")
    rows.append(f"  {'':<{width}}  {bytes_text(image.size):>9}  {len(image.layers)} layers")
    rows += [f"  ✗ {sentence}" for sentence in image.failed]
    if image.failed:
        rows.append("  checks failed; primus check and primus validate say no to this image")
    return "\n".join(rows)
