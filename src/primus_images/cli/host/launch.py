"""The verb that runs a recipe on several machines."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from primus_images.cli.image.finetune import tuning_on
from primus_images.cli.image.request import RecipeOptions, Request
from primus_images.cli.image.train import PassedOptions, checked_recipe, passed_on
from primus_images.cli.verb import answer, note, parser_of, refuse_others
from primus_images.errors import InputError
from primus_images.gpus.detect import detect
from primus_images.gpus.table import arch_of, generation, load_table
from primus_images.launch import kubernetes, slurm
from primus_images.launch.merge import manifest_text
from primus_images.launch.plan import Plan
from primus_images.recipes.choose import CPU
from primus_images.recipes.mixture import is_mixture, parts_of
from primus_images.recipes.weights import HUB
from primus_images.terminal import say
from primus_images.training.run import machine


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(RecipeOptions, PassedOptions):
    """The options of ``launch``: of both systems, of Slurm, and of Kubernetes."""

    system: str
    image: str
    name: str
    environment: Sequence[str]
    resume_from: str
    restarts: int
    dry_run: bool

    output: Path | None
    container: slurm.Container | None
    mounts: Sequence[Path]
    partition: str
    account: str
    time: str
    port: int
    grace: int
    extra: Sequence[str]
    wait: bool

    namespace: str
    queue: str
    jobset: bool
    claim: str
    token_secret: str
    pull_secret: str
    rdma: str
    host_network: bool
    selector: Sequence[str]
    cpu: str
    memory: str
    shm: str
    ttl: int
    user: str
    groups: Sequence[str]
    service_account: str
    priority_class: str
    labels: Sequence[str]
    annotations: Sequence[str]
    tolerations: Sequence[str]
    pull_policy: str
    patch: Path | None


def launch(options: LaunchOptions) -> int:
    """Run a recipe on several machines: render the job, then hand it to Slurm or Kubernetes."""
    refuse_others(options, "launch", options.system, ("slurm", "k8s"))
    if options.recipe == "finetune":
        options, request = _fine_tuning(options)
    else:
        request = options.request_of(options.recipe)
    if options.system == "k8s":
        return _kubernetes(request, options)
    return _slurm(request, options)


def _fine_tuning(options: LaunchOptions) -> tuple[LaunchOptions, Request]:
    """Return the request for ``finetune WEIGHTS DATA``, and the options with both as mounts."""
    options = replace(options, gpu=options.gpu or _gpu_of_image(options))
    no_gpu = options.gpu is None and not detect().names
    if options.system == "k8s" or no_gpu or len(options.overrides) < 2:
        raise InputError(
            "fine-tuning on several nodes needs the weights that its settings are taken from",
            hint="primus launch slurm finetune WEIGHTS DATA --gpu NAME, both on a file system "
            "of all nodes; on Kubernetes, name a recipe and set weights=",
        )
    weights, data = (Path(word).absolute() for word in options.overrides[:2])
    mounts = [*options.mounts, weights, data]
    if is_mixture(str(data)):
        mounts += [Path(part.name) for part in parts_of(data) if not part.name.startswith(HUB)]
    options = replace(options, mounts=mounts, overrides=options.overrides[2:])
    request = tuning_on(options.request_of(""), str(weights), str(data), options)
    return options, request


def _kubernetes(request: Request, options: LaunchOptions) -> int:
    tuned = options.tuned_gemms
    if tuned and not tuned.is_absolute():
        raise InputError(
            f"--tuned-gemms {tuned}: name the absolute path that it has in the pods",
            hint=f"--claim NAME is at {kubernetes.RUNS} there",
        )
    site = kubernetes.Cluster(**_of_class(kubernetes.Cluster, options))
    plan = _plan(request, options)
    objects = kubernetes.manifests(plan, site)
    document: dict[str, object] = {"plan": plan.document()}
    shown = [*plan.lines(), f"security     Pod Security {site.security()}"]
    if options.dry_run:
        text = manifest_text(objects).rstrip("\n")
        lines = [*(f"# {line}" for line in shown), text]
        return answer(options, {**document, "manifests": objects}, lines)
    note(options, *shown)
    kubernetes.create(objects)
    name = kubernetes.name_of(plan, site)
    document |= {"name": name, "namespace": site.namespace}
    return answer(options, document, [f"applied job {name} in namespace {site.namespace}"])


def _of_class(cls: type, options: LaunchOptions) -> dict[str, Any]:
    """Return the fields of ``cls`` that are options."""
    values = {}
    for field in fields(cls):
        if hasattr(options, field.name):
            value = getattr(options, field.name)
            if isinstance(value, list):
                value = tuple(value)
            values[field.name] = value
    return values


def _plan(request: Request, options: LaunchOptions) -> Plan:
    here = options.system == "slurm"  # pods have other files than this machine
    request = _for_gpu(request, options, here=here)
    recipe = checked_recipe(request, options, resumed=bool(options.resume_from), here=here)
    _refuse_other_kind(options, recipe.gpu)
    plan = Plan(recipe=recipe, options=passed_on(options))
    if not options.force:
        machine.check_prediction(recipe, anyway="--force submits it anyway")
    for sentence in [plan.warning(), *_contradictions(options, recipe.gpu)]:
        if sentence:
            say(f"primus launch: {sentence}")
    return plan


def _for_gpu(request: Request, options: LaunchOptions, *, here: bool) -> Request:
    """Return the request for --gpu, or the GPU in the name of the image, or the table's first."""
    gpu = options.gpu or _gpu_of_image(options)
    if gpu is not None:
        return request.with_gpu(gpu)
    if detect().names:
        return request
    try:
        request.resolved(here=here)
    except InputError:
        gpu = load_table().generations[0].name
        request = request.with_gpu(gpu)
        request.resolved(here=here)
        say(f"primus launch: resolved for {gpu}; --gpu NAME names the GPU of the nodes")
    return request


def _contradictions(options: LaunchOptions, gpu: str) -> Iterator[str]:
    named = _gpu_of_image(options)
    if named and gpu != CPU and arch_of(generation(gpu)) != arch_of(generation(named)):
        yield (
            f"the image is named for {named}, but the nodes have {gpu} (--gpu): use the image "
            f"for {gpu}"
        )
    if _tag_words(options).intersection(["preview"]):
        yield (
            f"{options.image} is named as a preview: it is made of other files than a release, and "
            "not proven"
        )
    if options.image and options.container == "none":
        yield (
            f"without a container, the nodes run their own primus, not {options.image}: "
            "--container names one"
        )
    if (
        options.system == "k8s"
        and not options.claim
        and options.restarts != parser_of("launch").get_default("restarts")
    ):
        yield "--restarts has no effect without --claim, where the checkpoints are"
    unset = [word for word in options.environment if "=" not in word and word not in os.environ]
    if unset:
        yield (
            f"--env {unset[0]}: it is not set here, so the ranks have it only where a node sets it"
        )


def _gpu_of_image(options: LaunchOptions) -> str | None:
    words = re.split(r"[-_.:/]", options.image)
    return next((gpu.name for gpu in load_table().generations if gpu.name in words), None)


def _tag_words(options: LaunchOptions) -> set[str]:
    """Return the words of the image's tag, such as v26.11, mi300x and preview."""
    name = options.image.partition("@")[0].rpartition("/")[2]
    return set(name.partition(":")[2].split("-"))


def _refuse_other_kind(options: LaunchOptions, gpu: str) -> None:
    """Raise InputError for an image without code for GPUs on nodes with GPUs."""
    if gpu != CPU and "cpu" in _tag_words(options):
        raise InputError(
            f"{options.image} is named for the CPU, but the nodes have GPUs ({gpu})",
            hint=f"name the image for {gpu}, or train on the CPU: --gpu cpu",
        )


def _slurm(request: Request, options: LaunchOptions) -> int:
    container = options.container
    if not container:
        container = slurm.container_here() if options.image else "none"
    mounts = [path.absolute() for path in options.mounts]
    tuned = options.tuned_gemms
    if tuned:
        tuned = tuned.absolute()
        mounts.append(tuned)
    options = replace(options, container=container, tuned_gemms=tuned)
    plan = _plan(request, options)
    values = _of_class(slurm.Site, options)
    values["output"] = (options.output or Path("runs")).absolute()
    values["mounts"] = tuple(mounts)
    if options.resume_from:
        values["resume_from"] = str(Path(options.resume_from).absolute())
    site = slurm.Site(**values)
    text = slurm.script(plan, site)
    document: dict[str, Any] = {
        "plan": plan.document(),
        "container": site.container,
        "script": text,
    }
    if options.dry_run:
        return answer(options, document, [text.rstrip("\n")])
    note(options, *plan.lines())
    code, number = slurm.submit(text, site.output, wait=options.wait)
    document["job"] = int(number)
    document["exit_code"] = None
    if options.wait:
        document["exit_code"] = code
    line = f"job {number} → {site.output / number}, log {site.output}/slurm-{number}.txt"
    answer(options, document, [line])
    return code
