"""`primus prove`: what one hour on a GPU shows, in a folder to send back."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primus_images.cli.host.common import (
    SignerOptions,
    SourceOptions,
    TrustedOptions,
    open_project,
)
from primus_images.cli.verb import Options, answer, note
from primus_images.errors import InputError
from primus_images.gpus.detect import detect, visible
from primus_images.plan.project import Project
from primus_images.plan.resolve import ResolvedTarget, resolve
from primus_images.release.prove.folder import PAGE, Proof, write
from primus_images.release.prove.run import Outcome, run_all
from primus_images.release.prove.steps import Setting, Step, chosen, steps_of
from primus_images.terminal import Screen, counted


@dataclass(frozen=True, kw_only=True)
class ProveOptions(SourceOptions, SignerOptions, TrustedOptions, Options):
    """The options of ``prove``."""

    target: str | None
    minutes: int
    dry_run: bool
    here: bool
    root: Path
    output: Path | None
    read: Path | None
    engine: str


def prove(options: ProveOptions) -> int:
    """Check, build, test and measure on this machine's GPUs, and write a folder to send back.

    No step stops the others. The same command continues after an interruption, and runs again what
    did not pass.
    """
    if options.read is not None:
        return _read(options.read, options)
    if options.target is None:
        raise InputError("name a target, or a folder with --read", hint="primus prove mi300x")
    sign = _signer(options)
    project = open_project(options)
    resolved = resolve(project, options.target)
    setting = _setting(project, resolved, options)
    steps = steps_of(setting)
    if options.dry_run:
        return _show(steps, options)
    folder = setting.work.parent / "record"
    outcomes: Mapping[str, Outcome] = {}
    content: dict[str, Any] = {}
    for outcomes in run_all(steps, setting, options.minutes, lambda line: note(options, line)):
        # A machine may be taken away at any time; what was shown by then must not be lost.
        proof = Proof(steps=steps, outcomes=outcomes, setting=setting, resolved=resolved)
        content = write(folder, proof, sign)
    passed = [outcome for outcome in outcomes.values() if outcome.passed]
    lines = [
        f"{len(passed)} of {counted(len(steps), 'step')} passed",
        f"→ {folder / PAGE}",
        f"send the folder {folder}",
    ]
    return answer(options, content, lines, passed=len(passed) == len(steps))


def _signer(options: ProveOptions) -> Callable[[Mapping[str, Any]], bytes] | None:
    if not options.key and not options.keyless:
        return None
    # Seam "signing": with --here, a machine may have little more than PyTorch.
    from primus_images.cli.host.sign import signer_of

    signer = signer_of(options)
    if signer is None:
        return None
    return signer.bundle


def _setting(project: Project, resolved: ResolvedTarget, options: ProveOptions) -> Setting:
    if resolved.gpu is None:
        raise InputError(
            f"target {resolved.name} is for no GPU", hint="primus validate checks it on the CPU"
        )
    best = resolve(
        Project(project.root, channel=options.channel or resolved.target.channels[0]), resolved.name
    )
    gpus = 0
    machine = detect(options.root)
    if machine.generation == resolved.gpu.name:
        gpus = len(visible(len(machine.names), os.environ))
    work = (options.output or project.root / "out" / "prove" / resolved.name).absolute() / "work"
    return Setting(
        project=project.root.absolute(),
        target=resolved.name,
        gpu=resolved.gpu.name,
        channel=best.choice.channel,
        locked=best.lock is not None and not best.stale,
        gpus=gpus,
        here=options.here,
        root=options.root.absolute(),
        work=work,
        engine=options.engine,
    )


def _show(steps: list[Step], options: ProveOptions) -> int:
    taken = chosen(steps, options.minutes)
    rows = []
    for step in steps:
        remark = ""
        if step not in taken:
            remark = "only if time is left"
        rows.append((f"{step.minutes:g}", step.title, remark))
    total = sum(step.minutes for step in taken)
    lines = Screen.of().table(rows, head=("minutes", "step", ""), right=(0,))
    lines.append(f"{len(taken)} of {counted(len(steps), 'step')} in about {total:.0f} min")
    document = []
    for step in steps:
        row = {"name": step.name, "title": step.title, "minutes": step.minutes}
        document.append(row | {"command": list(step.command), "planned": step in taken})
    return answer(options, document, lines)


def _read(folder: Path, options: ProveOptions) -> int:
    # Seam "signing": a proof without a signature needs neither.
    from primus_images.cli.host.sign import trust_of
    from primus_images.release.prove.read import kept, verified

    if not folder.is_dir():
        raise InputError(f"--read: {folder} is not a folder")
    trust = None
    if options.key or options.identity or options.issuer:
        trust = trust_of(options)
    signed = verified(folder, trust)
    content = {"signature": signed, **kept(folder)}
    support = content["support"]
    lines = [
        f"{support['target']} on {support['gpus']}, {support['driver']}: {support['passed']} of "
        f"{counted(support['steps'], 'step')} passed on {support['date']}",
        signed,
    ]
    for row in content["speeds"]:
        lines.append(f"{row['cell']}: {_shown(row['tokens_per_second'])} tokens/s per GPU")
    for row in content["memory"]:
        measured = _shown(row["measured_gib"])
        lines.append(f"{row['cell']}: {measured} GiB, {_shown(row['predicted_gib'])} predicted")
    for row in content["first_steps"]:
        kernels = f"{_shown(row['kernels'])} kernels compiled"
        lines.append(f"{row['step']}: {_shown(row['seconds'])} s, {kernels}")
    for row in content["problems"]:
        lines.append(f"{row['step']} {row['state']}: {row['what']}")
    return answer(options, content, lines)


def _shown(figure: float | None) -> str:
    if figure is None:
        return "–"
    return f"{figure:,.4g}"
