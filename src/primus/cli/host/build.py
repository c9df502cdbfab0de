"""``primus build``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from primus.build.image import Built, Options, current
from primus.build.note import remember
from primus.build.unchanged import say_unchanged
from primus.cli.host.common import open_project, targets_of
from primus.cli.host.plan import print_plans
from primus.errors import PrimusError
from primus.gates.rules import rules
from primus.plan.action import ImagePlan
from primus.plan.channel import Choice
from primus.plan.locking import plan_images
from primus.plan.resolve import resolve_all
from primus.plan.target import Target
from primus.plan.workspace import Workspace
from primus.terminal import Screen, Styled, bytes_text, counted


def run(args: argparse.Namespace) -> int:
    """Build what is missing; print a table and the digests."""
    begin, began_ns = time.monotonic(), time.time_ns()
    project = open_project(args)
    workspace, names = project.workspace, targets_of(project, args)
    workspace.stats.trusted = not args.rehash
    try:
        targets = resolve_all(project, names)
        plans = plan_images(targets, workspace.stats, locked=args.locked, offline=args.offline, quiet=args.json)
    except PrimusError:
        # Which lock is stale depends on the channel.
        _say_channels((name, project.target(name), project.choice(name)) for name in names)
        raise
    if args.dry_run:
        workspace.stats.save()
        print_plans(plans, workspace.store, as_json=args.json)
        return 0
    options = Options(locked=args.locked, offline=args.offline, rehash=args.rehash, engine=args.engine, quiet=args.json)
    built = build_plans(plans, workspace, options)
    seconds = time.monotonic() - begin
    if args.json:
        print(json.dumps({"images": [asdict(b) for b in built], "seconds": round(seconds, 3)}))
    else:
        # While no input changes, the next build only reads this note.
        for plan, image in zip(plans, built, strict=True):
            remember(workspace, plan, image, _name(image), began_ns)
        if any(image.changed for image in built):
            screen = Screen.of(sys.stderr)
            for plan, image in zip(plans, built, strict=True):
                print(_table(image, plan.resolved.choice, screen), file=sys.stderr)
            print(f"{_outcome(built)}, {seconds:.2f} s", file=sys.stderr)
            for image in built:
                print(image.digest)
        else:
            say_unchanged([(_name(image), image.digest) for image in built], seconds)
    return 0


def _name(image: Built) -> str:
    """Return the image's name for a line of output, with the gates that a preview failed."""
    gates = ", ".join(sentence.partition(":")[0] for sentence in image.failed)
    return image.ref + (f" (fails {gates}; see primus check {image.target})" if gates else "")


def build_plans(plans: Sequence[ImagePlan], workspace: Workspace, options: Options) -> list[Built]:
    """Build the plans, run all gates and return the images. Prints the channel of each image to standard error."""
    done = [] if options.rehash else [current(workspace.store, plan, rules()) for plan in plans]
    built = [image for image in done if image is not None]
    if len(built) < len(plans):
        # Seam "work": importing the code that fetches, builds and checks takes 300 ms. A no-op build does not need it.
        from primus.gates.admit import build_gated

        _say_channels((plan.target, plan.resolved.target, plan.resolved.choice) for plan in plans)
        built = build_gated(plans, workspace, options)
    workspace.stats.save()
    return built


def _say_channels(targets: Iterable[tuple[str, Target, Choice]]) -> None:
    """For each target with several channels, print which one builds it, and why."""
    for name, target, choice in targets:
        if len(target.channels) > 1:
            print(f"{name}: channel {choice.channel}, {choice.reason}", file=sys.stderr)


def _outcome(built: Sequence[Built]) -> str:
    made = sum(line.built for image in built for line in image.layers)
    return f"{counted(made, 'layer')} built, {sum(len(image.layers) for image in built) - made} reused"


def _table(image: Built, choice: Choice, screen: Screen) -> str:
    lines = screen.wrap(f"{image.ref}  (channel {choice.channel}: {choice.reason})", hanging="  ")
    if choice.preview:
        lines += screen.wrap(Styled(f"PREVIEW, no release: {choice.preview}", "yellow"), "  ", "    ")
    rows = []
    for line in image.layers:
        state, seconds = (Styled("built", "green"), f"{line.seconds:.1f}") if line.built else ("cached", "")
        rows.append((line.name, bytes_text(line.size), state, seconds, line.digest[7:19]))
    rows.append(("", bytes_text(image.size), counted(len(image.layers), "layer"), "", ""))
    lines += screen.table(rows, head=("layer", "size", "state", "seconds", "digest"), right=(1, 3), indent="  ")
    for line in image.layers:
        if text := line.left_out.text():
            lines += screen.wrap(Styled(f"{line.name}, for other GPUs: {text} unpacked", "dim"), "  ", "    ")
    for sentence in image.failed:
        lines += screen.wrap(sentence, f"  {screen.paint('✗', 'red')} ", "    ")
    if image.failed:
        lines += screen.wrap("gates failed: primus check and primus validate will fail for this image", "  ")
    return "\n".join(lines)
