"""Verbs about building: what a build would do and why, and the build itself."""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from primus_images.cli.host.common import (
    SeveralOptions,
    resolved_targets,
    state_of,
    sweep_containers,
)
from primus_images.cli.verb import answer, note
from primus_images.gates.rules import rules_hash
from primus_images.oci.store import Store
from primus_images.plan.action import Built, ImagePlan, finished
from primus_images.plan.explain import changes, explain_text, lost, outline, outline_text
from primus_images.plan.layers import plan_images
from primus_images.plan.project import Workspace
from primus_images.plan.resolve import ResolvedTarget
from primus_images.terminal import Screen, Styled, bytes_text, counted, say


@dataclass(frozen=True, kw_only=True)
class PlanOptions(SeveralOptions):
    """The options of ``plan``."""

    full: bool


@dataclass(frozen=True, kw_only=True)
class BuildOptions(SeveralOptions):
    """The options of ``build``."""

    offline: bool
    dry_run: bool
    rehash: bool
    engine: str


def _planned(options: SeveralOptions) -> tuple[list[ImagePlan], Workspace]:
    targets, workspace = resolved_targets(options)
    plans = plan_images(targets, workspace.stats)
    workspace.stats.save()
    return plans, workspace


def plan(options: PlanOptions) -> int:
    """Show what a build would do, layer by layer: + build, = reuse."""
    plans, workspace = _planned(options)
    return _print_plans(plans, workspace.store, options, full=options.full)


def explain(options: SeveralOptions) -> int:
    """Show the inputs that changed since the last build, old → new, with their lines."""
    plans, workspace = _planned(options)
    store = workspace.store
    document = {}
    texts = []
    for plan in plans:
        changed = changes(store.record("targets", plan.state), plan) or lost(store, plan)
        document[plan.resolved.name] = [change._asdict() for change in changed]
        texts.append(explain_text(plan, changed, store, Screen.of()))
    return answer(options, document, texts, passed=not any(document.values()))


def build(options: BuildOptions) -> int:
    """Build images. Rebuilds only what changed; the last line is the manifest digest."""
    begin = time.monotonic()
    targets, workspace = resolved_targets(options)
    workspace.stats.trusted = not options.rehash
    if not options.dry_run:
        sweep_containers(workspace)
        _print_channels(targets)
    plans = plan_images(targets, workspace.stats)
    if options.dry_run:
        return _print_plans(plans, workspace.store, options)
    spent = dict[str, float]()
    images = []
    # With --rehash, the store may be damaged, and is mended first.
    if not options.rehash:
        images = _finished(plans, workspace.store)
    if len(images) < len(plans):
        # Seam "pipeline": a build with nothing to do needs none of it, and would take twice the
        # time.
        from primus_images.engine.pipeline import Options, build as build_images

        build_options = Options(
            offline=options.offline,
            rehash=options.rehash,
            engine=options.engine,
            quiet=options.json,
            spent=spent,
        )
        images = build_images(plans, workspace, build_options)
    workspace.stats.save()
    seconds = time.monotonic() - begin
    note(options, _summary(images, seconds, spent))
    document = {"images": [built.as_json() for built in images], "seconds": round(seconds, 3)}
    return answer(options, document, [built.image.digest for built in images])


def _print_channels(targets: Sequence[ResolvedTarget]) -> None:
    for target in targets:
        if len(target.target.channels) > 1:
            channel = f"channel {target.choice.channel}, {target.choice.reason}"
            say(f"{target.name}: {channel}")


def _finished(plans: Sequence[ImagePlan], store: Store) -> list[Built]:
    rules = rules_hash()
    images = [finished(store, plan, rules) for plan in plans]
    return [image for image in images if image]


def _print_plans(
    plans: Sequence[ImagePlan], store: Store, options: SeveralOptions, *, full: bool = False
) -> int:
    screen = Screen.of()
    full = full or len(plans) == 1
    document = []
    texts = []
    for plan in plans:
        rows = outline(store, plan)
        issues = plan.resolved.known_issues
        document.append(
            {
                "target": plan.resolved.name,
                "ref": plan.ref,
                "key": plan.key,
                "layers": rows,
                "supported_until": plan.resolved.versions.supported_until,
                "known_issues": [asdict(issue) for issue in issues],
            }
        )
        state = store.record("targets", plan.state)
        changed = changes(state, plan) if state else None
        lines = [outline_text(plan, rows, changed, screen, full=full)]
        for sentence in state_of(plan.resolved) if full else ():
            lines += screen.wrap(sentence, "  ", "    ")
        for issue in issues if full else ():
            lines += screen.wrap(f"known issue: {issue}", "  ! ", "    ")
        texts.append("\n".join(lines))
    separator = "\n\n" if full else "\n"
    return answer(options, document, [separator.join(texts)])


def _summary(images: Sequence[Built], seconds: float, spent: Mapping[str, float]) -> str:
    if not any(built.changed for built in images):
        return "\n".join(f"{_named(built)}: nothing to do, {seconds:.2f} s" for built in images)
    lines = []
    layers = 0
    ran = 0
    for built in images:
        lines.append(_table(built, Screen.of(sys.stderr)))
        layers += len(built.image.layers)
        ran += sum(action.key in built.ran for action in built.image.plan.layers)
    stages = ", ".join(f"{stage} {part:.1f}" for stage, part in spent.items() if part >= 0.05)
    total = f"{seconds:.2f} s"
    if stages:
        total += f" ({stages})"
    return "\n".join([*lines, f"{counted(ran, 'layer')} built, {layers - ran} reused, {total}"])


def _named(built: Built) -> str:
    plan = built.image.plan
    gates = ", ".join(sentence.partition(":")[0] for sentence in built.failed)
    if gates:
        return f"{plan.ref} (fails {gates}; see primus check {plan.resolved.name})"
    return plan.ref


def _table(built: Built, screen: Screen) -> str:
    image = built.image
    choice = image.plan.resolved.choice
    lines = screen.wrap(
        f"{image.plan.ref}  (channel {choice.channel}: {choice.reason})", hanging="  "
    )
    if choice.preview:
        preview = Styled(f"PREVIEW, no release: {choice.preview}", "yellow")
        lines += screen.wrap(preview, "  ", "    ")
    rows: list[tuple[str, ...]] = []
    for action, layer in image.rows:
        state: str = "cached"
        seconds = ""
        if action.key in built.ran:
            state = Styled("built", "green")
            seconds = f"{built.ran[action.key]:.1f}"
        size = bytes_text(layer.blob.size)
        rows.append((action.name, size, state, seconds, layer.blob.digest[7:19]))
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
