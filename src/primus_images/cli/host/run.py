"""Verbs that use a built image: run a command in it, load it into a Docker engine, validate it by
training.
"""

import argparse
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from primus_images.cli.host.common import resolved_target
from primus_images.cli.verb import answer, note
from primus_images.engine.pipeline import Options, build
from primus_images.engine.workshop import root_of_image
from primus_images.errors import InputError
from primus_images.oci.store import digest_of
from primus_images.plan.layers import plan_images
from primus_images.plan.resolve import ResolvedTarget
from primus_images.recipes.choose import CPU
from primus_images.release import golden
from primus_images.release.cells import Cell, cell_of, cells_of
from primus_images.release.hardware import NO_GPU, choose_gpus, cpu_model
from primus_images.release.summary import outcome_text, table
from primus_images.release.validation import validate as validate_cells
from primus_images.sandbox.container import GIB, Command, Mount, RootFs, gpus, listed
from primus_images.sandbox.docker import load_image
from primus_images.sandbox.engines import choose
from primus_images.terminal import Screen, counted, say
from primus_images.training.judge import suite

_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def load(args: argparse.Namespace) -> int:
    """Load an image as rocm/primus:RELEASE-TARGET into the Docker engine of DOCKER_HOST (or of the
    default socket).
    """
    root = _image_root(args)
    tag = f"rocm/primus:{root.name}"
    image_id, sent = load_image(root, tag)
    document = {
        "image_id": image_id,
        "tag": tag,
        "manifest": digest_of(root.manifest),
        "bytes_sent": sent,
    }
    note(
        args,
        f"{tag}: "
        + (f"sent {sent / 1e6:.1f} MB" if sent else "the engine already has it, nothing sent"),
    )
    return answer(args, document, [image_id])


def run(args: argparse.Namespace) -> int:
    """Run a command in an image, as it would run on a cluster."""
    if args.command and not args.command[0]:
        raise InputError("the command is empty", hint="leave it out to run the image's own command")
    if args.user == "":
        raise InputError("--user is empty")
    command = Command(
        argv=tuple(args.command),
        env={key: value for item in args.env for key, value in _variable(item).items()},
        mounts=tuple(_mount(item) for item in args.volume),
        devices=gpus(args.gpus) + listed(args.device),
        memory_bytes=_bytes("--memory", args.memory),
        network=args.network == "host",
        user=args.user,
        entrypoint=args.entrypoint,
        shm_bytes=_bytes("--shm-size", args.shm_size) or 8 * GIB,
    )
    return choose(args.engine).run(_image_root(args), command)


def _variable(item: str) -> dict[str, str]:
    key, equals, value = item.partition("=")
    if not key or "\0" in item:
        raise InputError(
            f"-e {item!r} is not a variable", hint="-e KEY=VALUE, or -e KEY to copy your own value"
        )
    if equals or key in os.environ:
        return {key: value if equals else os.environ[key]}
    say(
        f"primus run: -e {key}: your environment has no such variable, so the command has none, "
        "either"
    )
    return {}


def _mount(item: str) -> Mount:
    parts = item.split(":")
    mode = "rw"
    if len(parts) > 2 and parts[-1] in ("ro", "rw"):
        mode = parts.pop()
    if len(parts) != 2 or not parts[0] or not parts[1].startswith("/"):
        raise InputError(
            f"-v {item!r} is not a volume", hint="-v SOURCE:/path/inside; add :ro for read-only"
        )
    return Mount(source=Path(parts[0]).expanduser(), target=parts[1], read_only=mode == "ro")


def _bytes(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    match = _SIZE.fullmatch(text.strip())
    amount = 0
    if match:
        amount = int(float(match[1]) * _UNITS[match[2].lower()])
    if not 1 << 20 <= amount <= 1 << 50:
        raise InputError(
            f"{option} {text[:40]!r} is not a size from 1m to 1024t",
            hint=f"{option} 512m, {option} 2g",
        )
    return amount


def _image_root(args: argparse.Namespace) -> RootFs:
    """Return the root file system of the image of ``args.target``. Raises InputError if the store
    has no such image.
    """
    resolved, workspace = resolved_target(args)
    return root_of_image(workspace.store, workspace.unpacked, args.target, ref=resolved.ref)


def validate(args: argparse.Namespace) -> int:
    """Build the image, train in it and check the results. Each job of the suite runs in its own
    container.
    """
    if args.record_golden and not args.suite:
        raise InputError(
            "--record-golden records every backend and mode of a recipe", hint="add --suite quick"
        )
    resolved, workspace = resolved_target(args)
    if args.record_golden and args.recipe:
        golden.check_locked(
            resolved.root, resolved.ref, resolved.lock.files if resolved.lock else ()
        )
    hardware = choose_gpus(args.gpus, resolved.gpu)
    if hardware.names or hardware.why:
        note(args, f"GPUs: {', '.join(hardware.names) or f'none ({hardware.why})'}")
    cells = _cells(resolved, hardware.gpu, recipe=args.recipe, level=args.suite)
    if args.dry_run:
        return _show(cells, resolved, args)
    options = Options(offline=args.offline, engine=args.engine, quiet=args.json)
    (built,) = build(plan_images([resolved], workspace.stats), workspace, options)
    workspace.stats.save()
    validated = validate_cells(
        built.image.plan,
        workspace,
        cells,
        output=(args.output or resolved.root / "out" / "validation").absolute(),
        engine=args.engine,
        quiet=args.json,
        again=args.again,
        recording=args.record_golden,
        hardware=hardware,
        wrap=tuple(args.wrap),
    )
    records = [cell.record for cell in validated]
    if args.record_golden:
        today = time.strftime("%Y-%m-%d", time.gmtime())
        cpu = cpu_model()
        count = golden.record(
            resolved.root, resolved.ref, records, date=today, cpu=cpu, keep=args.recipe is not None
        )
        print(f"{count} golden curves of {resolved.ref} recorded", file=sys.stderr)
    if len(validated) == 1:
        text = outcome_text(records[0], validated[0].folder)
    else:
        text = table(validated)
    if len(cells) > 1 or args.suite:
        document = records
    else:
        document = records[0]
    return answer(
        args, document, [Screen.of().fit(text)], passed=all(record["passed"] for record in records)
    )


def _show(
    cells: Sequence[tuple[Cell, str]], resolved: ResolvedTarget, args: argparse.Namespace
) -> int:
    recipes = resolved.root / "recipes"
    planned = [
        (
            str(cell),
            level,
            suite.plan(
                suite.Request(
                    recipe=cell.recipe,
                    choices=cell.choices,
                    among=recipes,
                    wrap=tuple(args.wrap),
                ),
                Path("/out"),
                level,
            ),
        )
        for cell, level in cells
    ]
    rows = [
        {
            "cell": cell,
            "suite": level,
            "jobs": [shlex.join(["primus", *job.arguments()]) for job in jobs],
        }
        for cell, level, jobs in planned
    ]
    counts = [(cell, level, str(len(jobs))) for cell, level, jobs in planned]
    lines = Screen.of().table(counts, head=("recipe", "suite", "jobs"), right=(2,))
    return answer(
        args,
        rows,
        [*lines, f"{counted(sum(len(jobs) for *_, jobs in planned), 'job')} in {resolved.ref}"],
    )


def _cells(
    resolved: ResolvedTarget, gpu: str, *, recipe: str | None, level: str | None
) -> tuple[tuple[Cell, str], ...]:
    target = resolved.target
    if not target.recipes and not recipe:
        raise InputError(
            f"target {resolved.name} names no recipe",
            where=resolved.place(),
            hint="primus validate --recipe NAME",
        )
    if recipe:
        names = (recipe,)
    else:
        names = target.recipes
    if gpu == NO_GPU:
        device = CPU
    else:
        device = gpu
    # The folder from which the image's recipes layer is made; this code may be installed elsewhere.
    every = cells_of(names, device, target.trained_in, resolved.root / "recipes")
    if level:
        return tuple((cell, level) for cell in every)
    # One recipe is enough to check that runs repeat and resume. The others only have to train.
    rest = ()
    if target.trained_in and not recipe:
        rest = every
    return (cell_of(names[0], device), "standard"), *((cell, "quick") for cell in rest)
