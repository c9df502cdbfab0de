"""Run a recipe on several machines: render the job first, then hand it to Slurm or Kubernetes.

`slurm` renders a batch script and submits it. One task per node runs `primus train`; the first node hosts the
rendezvous. A job that is preempted or loses a node returns to the queue and continues from its newest checkpoint.
`k8s` renders a Job and its Service, and creates them with kubectl.
`k8s status|logs|delete NAME` and `k8s nodes` query or change the cluster.
The plan is shown before anything is submitted: nodes, mesh, tokens per step. --dry-run prints what would be submitted,
--json prints one JSON document.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

from primus.cli.arguments import folder, path, whole
from primus.cli.image.common import add_choices, add_recipe, resolved
from primus.errors import InputError
from primus.gpus.detect import detect
from primus.gpus.table import load_table
from primus.launch import cluster, kubernetes, slurm
from primus.launch.plan import Plan
from primus.recipes.load import names
from primus.recipes.recipe import Recipe
from primus.terminal import Screen

_ACTIONS = ("apply", "status", "logs", "delete", "nodes")
_GPU = "generation of the nodes (default: the one in the image's name, otherwise the machine's)"
EXAMPLE = "primus launch slurm llama3.1-70b --nodes 8 --gpu mi300x --image rocm/primus:v26.11-mi300x --dry-run"


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    systems = parser.add_subparsers(dest="system", metavar="SYSTEM", required=True, parser_class=_Words)
    about = "Run a recipe as a job of Slurm."
    epilog = f"example: {EXAMPLE}"
    add_slurm(systems.add_parser("slurm", help="a batch job of Slurm", description=about, epilog=epilog))
    about = (
        "Run a recipe as a job of Kubernetes. To manage a job, write `status NAME`, `logs NAME` or `delete NAME` in "
        "place of RECIPE; `nodes` lists the nodes of the cluster with their GPUs."
    )
    epilog = "example: primus launch k8s llama3.1-8b --nodes 2 --image rocm/primus:v26.11-mi300x --claim runs --dry-run"
    add_kubernetes(systems.add_parser("k8s", help="a job of Kubernetes", description=about, epilog=epilog))


def add_slurm(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `launch slurm`."""
    add_recipe(parser)
    add_choices(parser, gpu=_GPU)
    add_common(parser)
    site = parser.add_argument_group("Slurm")
    site.add_argument(
        "--output",
        type=folder("--output"),
        default=Path("runs"),
        metavar="DIR",
        help="folder that all nodes share (default: runs)",
    )
    site.add_argument("--container", choices=slurm.CONTAINERS, help="default: pyxis, or the first installed engine")
    site.add_argument("--partition", default="", help="partition to run in")
    site.add_argument("--account", default="", help="account to charge")
    site.add_argument("--qos", default="", help="quality of service")
    site.add_argument("--time", default="", metavar="LIMIT", help="time limit, for example 12:00:00")
    site.add_argument("--exclude", default="", metavar="NODES", help="nodes to leave out, for example node[3,7]")
    site.add_argument("--interface", default="", metavar="NAME", help="network interface (default: the route's)")
    site.add_argument(
        "--port", type=whole(least=0), default=0, help="port of the rendezvous (default: from the job's number)"
    )
    site.add_argument(
        "--grace",
        type=whole(least=0),
        default=60,
        metavar="S",
        help="seconds of warning before preemption or the limit (default: 60)",
    )
    site.add_argument("--restarts", type=whole(least=0), default=20, metavar="N", help="times to requeue (default: 20)")
    site.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help="option for sbatch; repeatable")
    site.add_argument("--wait", action="store_true", help="wait for the job, and exit with its exit code")


def add_kubernetes(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `launch k8s`."""
    add_recipe(parser)
    add_choices(parser, gpu=_GPU)
    add_common(parser)
    site = parser.add_argument_group("Kubernetes")
    site.add_argument("--namespace", default="default", help="namespace (default: default)")
    site.add_argument("--queue", default="", metavar="NAME", help="local queue of Kueue")
    site.add_argument("--claim", default="", metavar="NAME", help="volume claim for results, shared by all nodes")
    site.add_argument("--hf-token-secret", default="", metavar="NAME[:KEY]", help="Secret with the Hugging Face token")
    site.add_argument("--pull-secret", default="", metavar="NAME", help="Secret to pull the image with")
    site.add_argument("--rdma", default="", metavar="RESOURCE[=N]", help="network devices, for example rdma/hca=8")
    site.add_argument("--host-network", action="store_true", help="use the node's network")
    site.add_argument("--node-selector", action="append", default=[], metavar="LABEL=VALUE", help="nodes to run on")
    site.add_argument("--cpu", default="", help="CPUs of each node, for example 96")
    site.add_argument("--memory", default="", help="memory of each node, for example 1024Gi")
    site.add_argument("--shm", default="64Gi", help="size of /dev/shm (default: 64Gi)")
    site.add_argument(
        "--ttl", type=whole(least=0), default=86400, metavar="S", help="seconds to keep a finished job (default: 86400)"
    )


def add_common(parser: argparse.ArgumentParser) -> None:
    """Declare the options of every scheduler."""
    parser.add_argument("--image", default="", help="image that the nodes run")
    parser.add_argument("--name", default="", help="name of the job (default: from the recipe)")
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME[=VALUE]", help="variable for the ranks; repeatable"
    )
    parser.add_argument(
        "--mount", action="append", default=[], type=path("--mount"), metavar="DIR", help="folder to mount; repeatable"
    )
    parser.add_argument("--resume-from", default="", metavar="DIR", help="checkpoint or run, as the nodes see it")
    parser.add_argument(
        "--stall-timeout", type=whole(least=0), default=1800, metavar="S", help="as for `train` (default: 1800)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be submitted or deleted, and do nothing"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    """Render, show, submit. Returns 0, or the job's exit code with --wait; raises InputError and HostError."""
    if options.system == "k8s":
        return _kubernetes(options)
    plan = Plan(recipe=_recipe(options), stall_timeout=options.stall_timeout)
    return _slurm(options, plan)


def _kubernetes(options: argparse.Namespace) -> int:
    # Both `k8s status NAME` and `k8s NAME status` work.
    words = [options.recipe, *options.overrides]
    action = next((word for word in words if word in _ACTIONS), "apply")
    words = [word for word in words if word != action]
    if action == "nodes":
        return _show(options, {"nodes": cluster.nodes()}, "nodes")
    if not words:
        raise InputError(f"k8s {action}: no {'recipe' if action == 'apply' else 'name'} is given")
    options.recipe, *options.overrides = words
    if action != "apply":
        name = options.name or (words[0] if words[0] not in names() else kubernetes.default_name(words[0]))
        return _ask(options, action, name)
    site = kubernetes.Cluster(
        image=options.image, name=options.name, namespace=options.namespace, queue=options.queue,
        claim=options.claim, token_secret=options.hf_token_secret, pull_secret=options.pull_secret, rdma=options.rdma,
        host_network=options.host_network, cpu=options.cpu, memory=options.memory, shm=options.shm, ttl=options.ttl,
        selector=tuple(options.node_selector), environment=tuple(options.env), resume_from=options.resume_from,
    )  # fmt: skip
    if options.mount:
        raise InputError(
            "--mount: a node's folders are not mounted into pods", hint="--claim NAME mounts a volume claim"
        )
    plan = Plan(recipe=_recipe(options, here=False), stall_timeout=options.stall_timeout)
    objects = kubernetes.manifests(plan, site)
    if options.dry_run:
        if options.json:
            print(json.dumps({"plan": plan.document(), "manifests": objects}, indent=2))
        else:
            print("\n".join(f"# {line}" for line in plan.lines()))
            print(yaml.safe_dump_all(objects, sort_keys=False, explicit_start=True), end="")
        return 0
    if not options.json:
        print("\n".join(plan.lines()), file=sys.stderr)
    cluster.apply(objects)
    name = kubernetes.name_of(plan, site)
    if options.json:
        print(json.dumps({"plan": plan.document(), "name": name, "namespace": site.namespace}, indent=2))
    else:
        print(f"applied job {name} in namespace {site.namespace}")
    return 0


def _ask(options: argparse.Namespace, action: str, name: str) -> int:
    if action == "status":
        return _show(options, cluster.status(name, options.namespace), "pods")
    if action == "logs":
        by_pod = list(cluster.logs(name, options.namespace))
        if options.json:
            print(json.dumps(dict(by_pod), indent=2, ensure_ascii=False))
        else:
            print("\n".join(f"[{pod}] {line}" for pod, text in by_pod for line in text.splitlines()))
        return 0
    if not options.dry_run:
        cluster.delete(name, options.namespace)
    if options.json:
        print(json.dumps({"would delete" if options.dry_run else "deleted": name}))
    else:
        print(f"{'would delete' if options.dry_run else 'deleted'} job {name}")
    return 0


def _show(options: argparse.Namespace, document: dict[str, Any], rows: str) -> int:
    if options.json:
        print(json.dumps(document, indent=2, ensure_ascii=False, default=str))
        return 0
    for condition in document.get("status", {}).get("conditions", []):
        if condition.get("status") == "True":
            print(f"{document['name']}: {condition.get('type')} {condition.get('message', '')}".rstrip())
    table = [tuple(str(value) for value in row.values()) for row in document[rows]]
    print("\n".join(Screen.of().table(table)) if table else f"no {rows}")
    return 0


def _recipe(options: argparse.Namespace, *, here: bool = True) -> Recipe:
    """Resolve the recipe for the nodes' GPU: --gpu, or the GPU that the image's name contains.

    This machine does not need that GPU. If neither names one, the first GPU of the table is used, with a message.
    ``here``: the nodes see the files of this machine.
    """
    if options.gpu is None:
        words = re.split(r"[-_.:/]", options.image)
        options.gpu = next((gpu.name for gpu in load_table().generations if gpu.name in words), None)
    try:
        return resolved(options, here=here)
    except InputError:
        if options.gpu is not None or detect().names:
            raise
    options.gpu = load_table().generations[0].name
    recipe = resolved(options, here=here)
    print(f"primus launch: resolved for {options.gpu}; --gpu NAME names the GPU of the nodes", file=sys.stderr)
    return recipe


def _slurm(options: argparse.Namespace, plan: Plan) -> int:
    site = slurm.Site(
        container=options.container or (slurm.container_here() if options.image else "none"),
        image=options.image, output=options.output.absolute(), name=options.name, partition=options.partition,
        account=options.account, qos=options.qos, time=options.time, exclude=options.exclude,
        interface=options.interface, grace=options.grace, restarts=options.restarts, port=options.port,
        environment=tuple(options.env), mounts=tuple(path.absolute() for path in options.mount),
        extra=tuple(options.sbatch), resume_from=options.resume_from and str(Path(options.resume_from).absolute()),
    )  # fmt: skip
    text = slurm.script(plan, site)
    document: dict[str, Any] = {"plan": plan.document(), "container": site.container, "script": text}
    if options.dry_run:
        print(json.dumps(document, indent=2, ensure_ascii=False) if options.json else text, end="")
        if options.json:
            print()
        return 0
    if not options.json:
        print("\n".join(plan.lines()), file=sys.stderr)
    code, number = slurm.submit(text, site.output, wait=options.wait)
    if options.json:
        print(json.dumps({**document, "job": int(number), "exit_code": code if options.wait else None}, indent=2))
    else:
        print(f"job {number} → {site.output / number}, log {site.output}/slurm-{number}.txt")
    return code
