"""Verbs about building: what a build would do and why, and the build itself."""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from primus_images.cli.host.common import resolved_targets
from primus_images.cli.verb import answer, note
from primus_images.gates.rules import rules_hash
from primus_images.oci.store import Store
from primus_images.plan.action import Built, ImagePlan, finished
from primus_images.plan.explain import changes, explain_text, lost, outline, outline_text
from primus_images.plan.layers import plan_images
from primus_images.plan.project import Workspace
from primus_images.terminal import Screen, Styled, bytes_text, counted


def _planned(args: argparse.Namespace) -> tuple[list[ImagePlan], Workspace]:
    targets, workspace = resolved_targets(args)
    plans = plan_images(targets, workspace.stats)
    workspace.stats.save()
    return plans, workspace


def plan(args: argparse.Namespace) -> int:
    """Show what a build would do, layer by layer: + build, = reuse."""
    plans, workspace = _planned(args)
    return _print_plans(plans, workspace.store, args, full=args.full)


def explain(args: argparse.Namespace) -> int:
    """Show the inputs that changed since the last build, old → new, with their lines."""
    plans, workspace = _planned(args)
    store = workspace.store
    changed = {
        p.resolved.name: changes(store.record("targets", p.state), p) or lost(store, p)
        for p in plans
    }
    document = {target: [change._asdict() for change in rows] for target, rows in changed.items()}
    texts = (explain_text(p, changed[p.resolved.name], store, Screen.of()) for p in plans)
    return answer(args, document, texts, passed=not any(changed.values()))


def build(args: argparse.Namespace) -> int:
    """Build images. Rebuilds only what changed; the last line is the manifest digest."""
    begin = time.monotonic()
    targets, workspace = resolved_targets(args)
    workspace.stats.trusted = not args.rehash
    for target in targets:
        if len(target.target.channels) > 1 and not args.dry_run:
            print(
                f"{target.name}: channel {target.choice.channel}, {target.choice.reason}",
                file=sys.stderr,
            )
    plans = plan_images(targets, workspace.stats)
    if args.dry_run:
        return _print_plans(plans, workspace.store, args)
    rules = rules_hash()
    spent = dict[str, float]()
    # With --rehash, the store may be damaged, and is mended first.
    if args.rehash:
        trusted = ()
    else:
        trusted = plans
    images = [image for plan in trusted if (image := finished(workspace.store, plan, rules))]
    if len(images) < len(plans):
        # Seam "pipeline": a build with nothing to do needs none of it, and would take twice the
        # time.
        from primus_images.engine.pipeline import Options, build as build_images

        options = Options(
            offline=args.offline,
            rehash=args.rehash,
            engine=args.engine,
            quiet=args.json,
            spent=spent,
        )
        images = build_images(plans, workspace, options)
    workspace.stats.save()
    seconds = time.monotonic() - begin
    note(args, _summary(images, seconds, spent))
    document = {"images": [built.as_json() for built in images], "seconds": round(seconds, 3)}
    return answer(args, document, [built.image.digest for built in images])


def _print_plans(
    plans: Sequence[ImagePlan], store: Store, args: argparse.Namespace, *, full: bool = False
) -> int:
    outlines = [(plan, outline(store, plan)) for plan in plans]
    document = [
        {"target": p.resolved.name, "ref": p.ref, "key": p.key, "layers": rows}
        | {"known_issues": [asdict(issue) for issue in p.resolved.known_issues]}
        for p, rows in outlines
    ]
    screen = Screen.of()
    full = full or len(plans) == 1
    texts = []
    for plan, rows in outlines:
        state = store.record("targets", plan.state)
        issues = [
            screen.wrap(f"known issue: {i}", "  ! ", "    ")
            for i in plan.resolved.known_issues
            if full
        ]
        shown = outline_text(plan, rows, changes(state, plan) if state else None, screen, full=full)
        texts.append("\n".join([shown, *(line for lines in issues for line in lines)]))
    return answer(args, document, [("\n\n" if full else "\n").join(texts)])


def _summary(images: Sequence[Built], seconds: float, spent: Mapping[str, float]) -> str:
    if not any(built.changed for built in images):
        return "\n".join(f"{_named(built)}: nothing to do, {seconds:.2f} s" for built in images)
    tables = [_table(built, Screen.of(sys.stderr)) for built in images]
    number = sum(len(built.image.layers) for built in images)
    ran = sum(action.key in built.ran for built in images for action in built.image.plan.layers)
    stages = ", ".join(f"{stage} {part:.1f}" for stage, part in spent.items() if part >= 0.05)
    total = f"{seconds:.2f} s" + (f" ({stages})" if stages else "")
    return "\n".join([*tables, f"{counted(ran, 'layer')} built, {number - ran} reused, {total}"])


def _named(built: Built) -> str:
    plan = built.image.plan
    gates = ", ".join(sentence.partition(":")[0] for sentence in built.failed)
    return plan.ref + (f" (fails {gates}; see primus check {plan.resolved.name})" if gates else "")


def _table(built: Built, screen: Screen) -> str:
    image = built.image
    choice = built.image.plan.resolved.choice
    lines = screen.wrap(
        f"{image.plan.ref}  (channel {choice.channel}: {choice.reason})", hanging="  "
    )
    if choice.preview:
        lines += screen.wrap(
            Styled(f"PREVIEW, no release: {choice.preview}", "yellow"), "  ", "    "
        )
    rows = []
    for action, layer in image.rows:
        ran = action.key in built.ran
        state, seconds = (
            (Styled("built", "green"), f"{built.ran[action.key]:.1f}") if ran else ("cached", "")
        )
        rows.append(
            (action.name, bytes_text(layer.blob.size), state, seconds, layer.blob.digest[7:19])
        )
    rows.append(("", bytes_text(image.size), counted(len(image.layers), "layer"), "", ""))
    lines += screen.table(
        rows, head=("layer", "size", "state", "seconds", "digest"), right=(1, 3), indent="  "
    )
    for sentence in built.failed:
        lines += screen.wrap(sentence, f"  {screen.paint('✗', 'red')} ", "    ")
    if built.failed:
        lines += screen.wrap(
            "gates failed: primus check and primus validate will fail for this image", "  "
        )
    return "\n".join(lines)
