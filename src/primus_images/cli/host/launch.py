"""The verb that runs a recipe on several machines."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from primus_images.cli.image.finetune import tuned
from primus_images.cli.image.recipes import resolved
from primus_images.cli.image.train import passed_on, recipe_of
from primus_images.cli.verb import answer, note, parser_of, refuse_others
from primus_images.errors import InputError
from primus_images.gpus.detect import detect
from primus_images.gpus.table import arch_of, generation, load_table
from primus_images.launch import kubernetes, slurm
from primus_images.launch.plan import Plan
from primus_images.recipes.choose import CPU
from primus_images.recipes.recipe import Recipe
from primus_images.training.run import machine


def launch(args: argparse.Namespace) -> int:
    """Run a recipe on several machines: render the job first, then hand it to Slurm or Kubernetes."""
    refuse_others(args, "launch", args.system, ("slurm", "k8s"))
    if args.recipe == "finetune":
        if args.system == "k8s" or args.gpu is None or len(args.overrides) < 2:
            raise InputError(
                "fine-tuning on several nodes needs the weights that its settings are taken from",
                hint="primus launch slurm finetune WEIGHTS DATA --gpu NAME, both on a file system "
                "of all nodes; on Kubernetes, name a recipe and set weights=",
            )
        files = [Path(word).absolute() for word in args.overrides[:2]]
        args.mounts, args.overrides = [*args.mounts, *files], args.overrides[2:]
        tuned(args, *map(str, files))
    return (_kubernetes if args.system == "k8s" else _slurm)(args)


def _kubernetes(args: argparse.Namespace) -> int:
    site = kubernetes.Cluster(**_of_class(kubernetes.Cluster, args))
    plan = _plan(args)
    objects = kubernetes.manifests(plan, site)
    document = {"plan": plan.document()}
    if args.dry_run:
        text = yaml.safe_dump_all(objects, sort_keys=False, explicit_start=True).rstrip("\n")
        return answer(
            args,
            {**document, "manifests": objects},
            [*(f"# {line}" for line in plan.lines()), text],
        )
    note(args, *plan.lines())
    kubernetes.create(objects)
    job = {"name": kubernetes.name_of(plan, site), "namespace": site.namespace}
    return answer(
        args, document | job, ["applied job {name} in namespace {namespace}".format(**job)]
    )


def _of_class(cls: type, args: argparse.Namespace) -> dict[str, Any]:
    options = {field.name: getattr(args, field.name) for field in fields(cls) if field.name in args}
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in options.items()
    }


def _plan(args: argparse.Namespace) -> Plan:
    limit = None
    if args.system == "slurm":
        limit = slurm.limit_of(args.time)
    if args.train_for is not None:
        if args.steps is not None:
            raise InputError("--train-for and --steps both set the steps", hint="leave one out")
        # Options such as --verify-steps are judged by the steps that this sets.
        rated = Plan(recipe=_recipe(args, resolved), rate=args.rate)
        if rated.step_seconds is None:
            raise InputError(
                f"--train-for: no rate is measured for {rated.recipe.name} there",
                hint=f"--rate N; primus train {rated.recipe.name} --steps 20 prints it on a node",
            )
        args.steps = int(args.train_for / rated.step_seconds)
        if not args.steps:
            raise InputError(
                f"--train-for: one step takes {rated.step_seconds:,.0f} s at this rate"
            )
    planned = Plan(recipe=_recipe(args, recipe_of), options=passed_on(args), rate=args.rate)
    if not args.force:
        machine.check_prediction(planned.recipe)
    for sentence in [*planned.warnings(limit), *_contradictions(args, planned.recipe.gpu)]:
        print(f"primus launch: {sentence}", file=sys.stderr)
    return planned


def _contradictions(args: argparse.Namespace, gpu: str) -> Iterator[str]:
    named = _gpu_of_image(args)
    if named and gpu != CPU and arch_of(generation(gpu)) != arch_of(generation(named)):
        yield (
            f"the image is named for {named}, but the nodes have {gpu} (--gpu): use the image "
            f"for {gpu}"
        )
    if args.image and args.container == "none":
        yield (
            f"without a container, the nodes run their own primus, not {args.image}: "
            "--container names one"
        )
    if (
        args.system == "k8s"
        and not args.claim
        and args.restarts != parser_of("launch").get_default("restarts")
    ):
        yield "--restarts has no effect without --claim, where the checkpoints are"
    unset = [word for word in args.environment if "=" not in word and word not in os.environ]
    if unset:
        yield (
            f"--env {unset[0]}: it is not set here, so the ranks have it only where a node sets it"
        )


def _gpu_of_image(args: argparse.Namespace) -> str | None:
    words = re.split(r"[-_.:/]", args.image)
    return next((gpu.name for gpu in load_table().generations if gpu.name in words), None)


def _recipe(args: argparse.Namespace, resolve: Callable[..., Recipe]) -> Recipe:
    """Resolve the recipe by ``resolve`` for --gpu, or the GPU in the name of the image, or else the
    table's first.
    """
    here = args.system == "slurm"  # pods have other files than this machine
    args.gpu = args.gpu or _gpu_of_image(args)
    try:
        return resolve(args, here=here)
    except InputError:
        if args.gpu is not None or detect().names:
            raise
    args.gpu = load_table().generations[0].name
    recipe = resolve(args, here=here)
    print(
        f"primus launch: resolved for {args.gpu}; --gpu NAME names the GPU of the nodes",
        file=sys.stderr,
    )
    return recipe


def _slurm(args: argparse.Namespace) -> int:
    args.container = args.container or (slurm.container_here() if args.image else "none")
    plan = _plan(args)
    options = _of_class(slurm.Site, args) | {
        "output": (args.output or Path("runs")).absolute(),
        "mounts": tuple(path.absolute() for path in args.mounts),
        "resume_from": args.resume_from and str(Path(args.resume_from).absolute()),
    }
    site = slurm.Site(**options)
    text = slurm.script(plan, site)
    document: dict[str, Any] = {
        "plan": plan.document(),
        "container": site.container,
        "script": text,
    }
    if args.dry_run:
        return answer(args, document, [text.rstrip("\n")])
    note(args, *plan.lines())
    code, number = slurm.submit(text, site.output, wait=args.wait)
    document |= {"job": int(number), "exit_code": code if args.wait else None}
    answer(
        args,
        document,
        [f"job {number} → {site.output / number}, log {site.output}/slurm-{number}.txt"],
    )
    return code
