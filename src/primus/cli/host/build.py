"""Build images. Rebuilds only what changed; the last line is the manifest digest.

Each image must pass the gates of `primus check` before it is named. An image of a preview channel may fail a gate; the
summary names the gates that failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

from primus.cli.host.common import (
    add_engine,
    add_offline,
    add_project_options,
    add_targets,
    open_project,
    print_plans,
    targets_of,
)
from primus.engine.image import Built
from primus.engine.pipeline import Options, build, say_channel
from primus.errors import PrimusError
from primus.gates.check import Gatekeeper
from primus.gates.examined import rules_hash
from primus.plan.layers import plan_images
from primus.plan.project import Choice
from primus.plan.resolve import resolve_all
from primus.terminal import Screen, Styled, bytes_text, counted

EXAMPLE = "primus build cpu"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus build``."""
    add_targets(parser)
    add_project_options(parser)
    add_offline(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop, like `primus plan`")
    parser.add_argument("--rehash", action="store_true", help="verify every blob first and rebuild damaged ones")
    add_engine(parser)


def run(args: argparse.Namespace) -> int:
    """Build what is missing; print a table and the digests."""
    begin = time.monotonic()
    project = open_project(args)
    workspace, names = project.workspace, targets_of(project, args)
    workspace.stats.trusted = not args.rehash
    options = Options(offline=args.offline, rehash=args.rehash, engine=args.engine, quiet=args.json)
    try:
        targets = resolve_all(project, names)
        if args.dry_run:
            print_plans(plan_images(targets, workspace.stats), workspace.store, as_json=args.json)
            return 0
    except PrimusError:
        # Which file is wrong may depend on the channel.
        for name in names:
            say_channel(name, project.choice(name), project.target(name).channels)
        raise
    images = build(targets, workspace, options, gates=Gatekeeper, rules=rules_hash())
    workspace.stats.save()
    seconds = time.monotonic() - begin
    if args.json:
        print(json.dumps({"images": [asdict(image) for _, image in images], "seconds": round(seconds, 3)}))
    else:
        _summarize([(image, plan.resolved.choice) for plan, image in images], seconds)
    return 0


def _summarize(images: Sequence[tuple[Built, Choice]], seconds: float) -> None:
    if not any(image.changed for image, _ in images):
        _say_unchanged([image for image, _ in images], seconds)
        return
    screen = Screen.of(sys.stderr)
    for image, choice in images:
        print(_table(image, choice, screen), file=sys.stderr)
    layers = [line for image, _ in images for line in image.layers]
    built = sum(line.built for line in layers)
    print(f"{counted(built, 'layer')} built, {len(layers) - built} reused, {seconds:.2f} s", file=sys.stderr)
    for image, _ in images:
        print(image.digest)


def _say_unchanged(images: Sequence[Built], seconds: float) -> None:
    """Print one line per image. Its digest alone goes to standard output: if both streams are one, on the same line."""
    end = "  " if _one_stream() else "\n"
    for image in images:
        gates = ", ".join(sentence.partition(":")[0] for sentence in image.failed)
        name = image.ref + (f" (fails {gates}; see primus check {image.target})" if gates else "")
        print(f"{name}: nothing to do, {seconds:.2f} s", end=end, file=sys.stderr, flush=True)
        print(image.digest, flush=True)


def _one_stream() -> bool:
    try:
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except (OSError, ValueError):
        return False


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
