"""Build images. Rebuilds only what changed; the last line is the manifest digest.

Each image must pass the gates of `primus check` before it is named. An image of a preview channel may fail a gate; the
summary names the gates that failed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from primus.cli.host.common import add_planning_options, open_project, targets_of
from primus.errors import PrimusError

if TYPE_CHECKING:
    from primus.images.action import ImagePlan
    from primus.images.build import Built
    from primus.images.channel import Choice
    from primus.images.project import Project
    from primus.terminal import Screen

EXAMPLE = "primus build cpu"

__all__ = ["EXAMPLE", "add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus build``."""
    add_planning_options(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop, like `primus plan`")
    parser.add_argument("--rehash", action="store_true", help="verify every blob first and rebuild damaged ones")
    parser.add_argument("--engine", choices=("auto", "embedded", "docker"), default="auto", help="sandbox engine")


def run(args: argparse.Namespace) -> int:
    """Build what is missing; print a table and the digests."""
    if args.dry_run:
        from primus.cli.host import plan

        return plan.run(args)
    from primus.images.build import current
    from primus.images.unchanged import say_unchanged
    from primus.terminal import Screen

    begin, began_ns = time.monotonic(), time.time_ns()
    project = open_project(args)
    names = targets_of(project, args)
    from primus.gates.rules import rules
    from primus.images.builder import build_images, plan_images

    try:
        plans = plan_images(project, names, locked=args.locked, offline=args.offline, quiet=args.json)
    except PrimusError:
        # Which lock is stale depends on the channel.
        _say_channels(project, names)
        raise
    done = [] if args.rehash else [current(project.store, plan, rules()) for plan in plans]
    built = [image for image in done if image is not None]
    if len(built) < len(plans):
        from primus.gates.admit import Gatekeeper
        from primus.gates.pins import check_pins

        _say_channels(project, names)
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
        _remember(project, plans, built, began_ns)
        if any(image.changed for image in built):
            screen = Screen.of(sys.stderr)
            for image in built:
                print(_table(image, project.choice(image.target), screen), file=sys.stderr)
            print(f"{_outcome(built)}, {seconds:.2f} s", file=sys.stderr)
            for image in built:
                print(image.digest)
        else:
            say_unchanged([(_name(image), image.digest) for image in built], seconds)
    return 0


def _name(image: Built) -> str:
    """The image's name in a line; a preview that failed gates says so each time."""
    gates = ", ".join(sentence.partition(":")[0] for sentence in image.failed)
    return image.ref + (f" (fails {gates}; see primus check {image.target})" if gates else "")


def _remember(project: Project, plans: Sequence[ImagePlan], built: Sequence[Built], began_ns: int) -> None:
    """Let the next build answer from a note as long as nothing is touched."""
    from primus.images.unchanged import remember

    for plan, image in zip(plans, built, strict=True):
        remember(project, plan, image, _name(image), began_ns)


def _say_channels(project: Project, names: Sequence[str]) -> None:
    """Say which channel builds each target that has several, and why."""
    for name in names:
        if len(project.target(name).channels) > 1:
            print(f"{name}: channel {project.choice(name).channel}, {project.choice(name).reason}", file=sys.stderr)


def _outcome(built: Sequence[Built]) -> str:
    made = sum(line.built for image in built for line in image.layers)
    return f"{made} layers built, {sum(len(image.layers) for image in built) - made} reused"


def _table(image: Built, choice: Choice, screen: Screen) -> str:
    from primus.images.outline import bytes_text
    from primus.terminal import Styled

    lines = screen.wrap(f"{image.ref}  (channel {choice.channel}: {choice.reason})", hanging="  ")
    if choice.preview:
        lines += screen.wrap(Styled(f"PREVIEW, no release: {choice.preview}", "yellow"), "  ", "    ")
    rows = []
    for line in image.layers:
        state, seconds = (Styled("built", "green"), f"{line.seconds:.1f}") if line.built else ("cached", "")
        rows.append((line.name, bytes_text(line.size), state, seconds, line.digest[7:19]))
    rows.append(("", bytes_text(image.size), f"{len(image.layers)} layers", "", ""))
    lines += screen.table(rows, head=("layer", "size", "state", "seconds", "digest"), right=(1, 3), indent="  ")
    for line in image.layers:
        if text := line.left_out.text():
            lines += screen.wrap(Styled(f"{line.name}, for other GPUs: {text} unpacked", "dim"), "  ", "    ")
    for sentence in image.failed:
        lines += screen.wrap(sentence, f"  {screen.paint('✗', 'red')} ", "    ")
    if image.failed:
        lines += screen.wrap("checks failed; primus check and primus validate say no to this image", "  ")
    return "\n".join(lines)
