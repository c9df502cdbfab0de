"""The verb that runs a recipe on several machines."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import yaml

from primus.cli.image.common import RECIPE, choices, refuse_tuning, resolved
from primus.cli.verb import JSON, Option, flag, folder, group, option, path, print_json, verb, whole
from primus.errors import InputError
from primus.gpus.detect import detect
from primus.gpus.table import load_table
from primus.launch import kubernetes, slurm
from primus.launch.plan import Plan, seconds_of
from primus.recipes.load import names
from primus.recipes.recipe import Recipe

_EXAMPLE = "primus launch slurm llama3.1-70b --nodes 8 --gpu mi300x --image rocm/primus:v26.11-mi300x --dry-run"


def _duration(text: str) -> float:
    try:
        return seconds_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _rate(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text) or not float(text):
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text[:40]!r}")
    return float(text)


# Of every scheduler.
_COMMON = (
    *RECIPE,
    *choices(gpu="generation of the nodes (default: the one in the image's name, otherwise the machine's)"),
    option("--image", default="", help="image that the nodes run"),
    option("--name", default="", help="name of the job (default: from the recipe)"),
    option("--env", action="append", default=[], metavar="NAME[=VALUE]", help="variable for the ranks; repeatable"),
    option(
        "--mount", action="append", default=[], type=path("--mount"), metavar="DIR", help="folder to mount; repeatable"
    ),
    option("--resume-from", default="", metavar="DIR", help="checkpoint or run, as the nodes see it"),
    option("--train-for", type=_duration, metavar="TIME", help="steps for this long at the measured rate, such as 12h"),
    option("--rate", type=_rate, default=0.0, metavar="N", help="tokens (or images) per second and GPU, as measured"),
    option("--stall-timeout", type=whole(least=0), default=1800, metavar="S", help="as for `train` (default: 1800)"),
    flag("--dry-run", "print what would be submitted or deleted, and do nothing"),
    JSON,
)


def _text(name: str, meaning: str, metavar: str | None = None, default: str = "") -> Option:
    return option(name, default=default, metavar=metavar, help=meaning)


def _number(name: str, meaning: str, default: int, metavar: str | None = None) -> Option:
    return option(name, type=whole(least=0), default=default, metavar=metavar, help=meaning)


def _several(name: str, meaning: str, metavar: str) -> Option:
    return option(name, action="append", default=[], metavar=metavar, help=meaning)


_SLURM = group(
    "Slurm",
    option(
        "--output",
        type=folder("--output"),
        default=Path("runs"),
        metavar="DIR",
        help="folder that all nodes share (default: runs)",
    ),
    option("--container", choices=slurm.CONTAINERS, help="default: pyxis, or the first installed engine"),
    _text("--partition", "partition to run in"),
    _text("--account", "account to charge"),
    _text("--qos", "quality of service"),
    _text("--time", "time limit, for example 12:00:00", "LIMIT"),
    _text("--exclude", "nodes to leave out, for example node[3,7]", "NODES"),
    _text("--interface", "network interface (default: the route's)", "NAME"),
    _number("--port", "port of the rendezvous (default: from the job's number)", 0),
    _number("--grace", "seconds of warning before preemption or the limit (default: 60)", 60, "S"),
    _number("--restarts", "times to requeue (default: 20)", 20, "N"),
    _several("--sbatch", "option for sbatch; repeatable", "OPTION"),
    flag("--wait", "wait for the job, and exit with its exit code"),
)
_KUBERNETES = group(
    "Kubernetes",
    _text("--namespace", "namespace (default: default)", default="default"),
    _text("--queue", "local queue of Kueue", "NAME"),
    _text("--claim", "volume claim for results, shared by all nodes", "NAME"),
    _text("--hf-token-secret", "Secret with the Hugging Face token", "NAME[:KEY]"),
    _text("--pull-secret", "Secret to pull the image with", "NAME"),
    _text("--rdma", "network devices, for example rdma/hca=8", "RESOURCE[=N]"),
    flag("--host-network", "use the node's network"),
    _several("--node-selector", "nodes to run on", "LABEL=VALUE"),
    _text("--cpu", "CPUs of each node, for example 96"),
    _text("--memory", "memory of each node, for example 1024Gi"),
    _text("--shm", "size of /dev/shm (default: 64Gi)", default="64Gi"),
    _number("--restarts", "times to start again; needs --claim (default: 20)", 20, "N"),
    _number("--ttl", "seconds to keep a finished job (default: 86400)", 86400, "S"),
)


class _Words(argparse.ArgumentParser):
    """A parser that also accepts key=value arguments after options."""

    _inside = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._inside:
            return super().parse_known_args(args, namespace)
        self._inside = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._inside = False


def _systems(parser: argparse.ArgumentParser) -> None:
    systems = parser.add_subparsers(dest="system", metavar="SYSTEM", required=True, parser_class=_Words)
    for name, line, about, example, of_system in (
        ("slurm", "a batch job of Slurm", "Run a recipe as a job of Slurm.", _EXAMPLE, _SLURM),
        (
            "k8s",
            "a job of Kubernetes",
            "Run a recipe as a job of Kubernetes. To manage a job, write `status NAME`, `logs NAME` or `delete NAME` "
            "in place of RECIPE; `nodes` lists the nodes of the cluster with their GPUs.",
            "primus launch k8s llama3.1-8b --nodes 2 --image rocm/primus:v26.11-mi300x --claim runs --dry-run",
            _KUBERNETES,
        ),
    ):
        system = systems.add_parser(name, help=line, description=about, epilog=f"example: {example}")
        for declare in (*_COMMON, of_system):
            declare(system)


@verb(_systems, example=_EXAMPLE)
def launch(args: argparse.Namespace) -> int:
    """Run a recipe on several machines: render the job first, then hand it to Slurm or Kubernetes.

    `slurm` renders a batch script and submits it. One task per node runs `primus train`; the first node hosts the
    rendezvous. A job that is preempted or loses a node returns to the queue and continues from its newest checkpoint.
    `k8s` renders a Job and its Service, and creates them with kubectl. With --claim, it continues in the same way.
    `k8s status|logs|delete NAME` and `k8s nodes` show or change the cluster with kubectl.
    The plan is shown before anything is submitted: nodes, mesh, tokens per step. --dry-run prints what would be
    submitted, --json prints one JSON document. With --wait, the exit code is that of the job.
    """
    return _kubernetes(args) if args.system == "k8s" else _slurm(args)


def _kubernetes(args: argparse.Namespace) -> int:
    # Both `k8s status NAME` and `k8s NAME status` work.
    words = [args.recipe, *args.overrides]
    action = next((word for word in words if word in kubernetes.ACTIONS), "")
    words = [word for word in words if word != action]
    if action:
        if action != "nodes" and not words:
            raise InputError(f"k8s {action}: no name is given")
        job = args.name or next(iter(words), "")
        job = kubernetes.default_name(job) if job in names() else job
        print(kubernetes.manage(action, job, args.namespace, as_json=args.json, dry_run=args.dry_run), end="")
        return 0
    site = kubernetes.Cluster(
        image=args.image, name=args.name, namespace=args.namespace, queue=args.queue,
        claim=args.claim, token_secret=args.hf_token_secret, pull_secret=args.pull_secret, rdma=args.rdma,
        host_network=args.host_network, cpu=args.cpu, memory=args.memory, shm=args.shm, ttl=args.ttl,
        restarts=args.restarts,
        selector=tuple(args.node_selector), environment=tuple(args.env), resume_from=args.resume_from,
    )  # fmt: skip
    if args.mount:
        raise InputError(
            "--mount: a node's folders are not mounted into pods", hint="--claim NAME mounts a volume claim"
        )
    plan = _plan(args, here=False)
    objects = kubernetes.manifests(plan, site)
    if args.dry_run:
        if args.json:
            print_json({"plan": plan.document(), "manifests": objects})
        else:
            print("\n".join(f"# {line}" for line in plan.lines()))
            print(yaml.safe_dump_all(objects, sort_keys=False, explicit_start=True), end="")
        return 0
    if not args.json:
        print("\n".join(plan.lines()), file=sys.stderr)
    kubernetes.create(objects)
    name = kubernetes.name_of(plan, site)
    if args.json:
        print_json({"plan": plan.document(), "name": name, "namespace": site.namespace})
    else:
        print(f"applied job {name} in namespace {site.namespace}")
    return 0


def _plan(args: argparse.Namespace, *, here: bool = True) -> Plan:
    """Plan the job. With --train-for, its steps are those that the time holds."""

    def plan() -> Plan:
        return Plan(recipe=_recipe(args, here=here), stall_timeout=args.stall_timeout, rate=args.rate)

    planned = plan()
    refuse_tuning(planned.recipe, args.env)
    limit = slurm.limit_of(args.time) if args.system == "slurm" else None
    if args.train_for is not None:
        if args.steps is not None:
            raise InputError("--train-for and --steps both set the steps", hint="leave one out")
        if planned.step_seconds is None:
            hint = f"--rate N; primus train {planned.recipe.name} --steps 20 prints it on a node"
            raise InputError(f"--train-for: no rate is measured for {planned.recipe.name} there", hint=hint)
        args.steps = max(1, int(args.train_for / planned.step_seconds))
        planned = plan()
    for sentence in planned.warnings(limit):
        print(f"primus launch: {sentence}", file=sys.stderr)
    return planned


def _recipe(args: argparse.Namespace, *, here: bool = True) -> Recipe:
    """Resolve the recipe for the nodes' GPU: --gpu, or the GPU that the image's name contains.

    This machine does not need that GPU. If neither names one, the first GPU of the table is used, with a message.
    ``here``: the nodes see the files of this machine.
    """
    if args.gpu is None:
        words = re.split(r"[-_.:/]", args.image)
        args.gpu = next((gpu.name for gpu in load_table().generations if gpu.name in words), None)
    try:
        return resolved(args, here=here)
    except InputError:
        if args.gpu is not None or detect().names:
            raise
    args.gpu = load_table().generations[0].name
    recipe = resolved(args, here=here)
    print(f"primus launch: resolved for {args.gpu}; --gpu NAME names the GPU of the nodes", file=sys.stderr)
    return recipe


def _slurm(args: argparse.Namespace) -> int:
    plan = _plan(args)
    site = slurm.Site(
        container=args.container or (slurm.container_here() if args.image else "none"),
        image=args.image, output=args.output.absolute(), name=args.name, partition=args.partition,
        account=args.account, qos=args.qos, time=args.time, exclude=args.exclude,
        interface=args.interface, grace=args.grace, restarts=args.restarts, port=args.port,
        environment=tuple(args.env), mounts=tuple(path.absolute() for path in args.mount),
        extra=tuple(args.sbatch), resume_from=args.resume_from and str(Path(args.resume_from).absolute()),
    )  # fmt: skip
    text = slurm.script(plan, site)
    document: dict[str, Any] = {"plan": plan.document(), "container": site.container, "script": text}
    if args.dry_run:
        if args.json:
            print_json(document)
        else:
            print(text, end="")
        return 0
    if not args.json:
        print("\n".join(plan.lines()), file=sys.stderr)
    code, number = slurm.submit(text, site.output, wait=args.wait)
    if args.json:
        print_json({**document, "job": int(number), "exit_code": code if args.wait else None})
    else:
        print(f"job {number} → {site.output / number}, log {site.output}/slurm-{number}.txt")
    return code
