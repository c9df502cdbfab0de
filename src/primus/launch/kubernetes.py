"""Kubernetes jobs: manifests rendered from a plan and the cluster's options. kubectl sends them to the cluster."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, cast

from primus.errors import HostError, InputError, PrimusError
from primus.gpus.table import generation
from primus.launch.plan import EXAMPLE_IMAGE, REFERENCE, Plan, bash, refuse_secrets, refuse_unfit, vendor
from primus.recipes import load
from primus.recipes.recipe import Recipe
from primus.yamlfile import read_values

Manifest = dict[str, Any]
ACTIONS = ("status", "logs", "delete", "nodes")
LABEL = "app.kubernetes.io/name"
_COLUMNS = (
    r"NAME:.metadata.name,READY:.status.conditions[?(@.type=='Ready')].status,"
    r"AMD:.status.allocatable.amd\.com/gpu,NVIDIA:.status.allocatable.nvidia\.com/gpu,"
    r"PRODUCT:.metadata.labels.amd\.com/gpu\.product-name"
)
_RUNS = "/workspace/runs"
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
# A recipe file of the user is written to this folder of each pod.
_RECIPE = "/tmp/primus-recipe"
_DNS = re.compile(r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_TOKEN = re.compile(rf"({_NAME.pattern})(:[-._a-zA-Z0-9]+)?")
_QUANTITY = re.compile(r"(?=.*[1-9])\d+(\.\d+)?(m|[kMGTPE]i?)?")
_RESOURCE = re.compile(r"[a-z0-9][a-z0-9.-]*/[A-Za-z0-9._-]+(=[1-9]\d*)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
_LABEL = re.compile(r"[A-Za-z0-9./_-]+=[A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The options of the cluster. Sizes are Kubernetes quantities; an empty text leaves the choice to the cluster.

    ``restarts`` is how often all nodes start again after one is lost or fails; without a claim, they cannot continue.
    ``token_secret`` is ``NAME`` or ``NAME:KEY`` of the Secret with the Hugging Face token. ``rdma`` is the extended
    resource of the network devices, ``NAME`` or ``NAME=COUNT``. ``claim`` is a volume claim for the results.
    """

    image: str
    name: str = ""
    namespace: str = "default"
    queue: str = ""
    claim: str = ""
    token_secret: str = ""
    pull_secret: str = ""
    rdma: str = ""
    host_network: bool = False
    cpu: str = ""
    memory: str = ""
    shm: str = "64Gi"
    ttl: int = 86400
    restarts: int = 20
    selector: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    resume_from: str = ""

    def __post_init__(self) -> None:
        if not self.image:
            raise InputError("--image is missing", hint="--image rocm/primus:v26.11-mi300x")
        secrets = (*self.environment, self.image, self.token_secret, self.pull_secret)
        refuse_secrets(secrets, "create a Secret in the cluster, and pass its name: --hf-token-secret NAME")
        lower = "lower-case letters, digits, hyphens and dots"
        dns = "at most 42 lower-case letters, digits and hyphens, beginning with a letter"
        quantities = {"cpu": self.cpu, "memory": self.memory, "shm": self.shm}
        names = {"name": self.name, "namespace": self.namespace, "queue": self.queue}
        for options, pattern, what, hint in (
            ({"image": self.image}, REFERENCE, "the name of an image", EXAMPLE_IMAGE),
            ({"claim": self.claim, "pull-secret": self.pull_secret}, _NAME, "a name of Kubernetes", lower),
            ({"hf-token-secret": self.token_secret}, _TOKEN, "a Secret of Kubernetes", f"NAME or NAME:KEY, {lower}"),
            (names, _DNS, "a name of Kubernetes", dns),
            (quantities, _QUANTITY, "a quantity of Kubernetes", "for example 96 or 64Gi"),
            ({"rdma": self.rdma}, _RESOURCE, "a resource", "for example rdma/hca=8"),
            *(({"node-selector": word}, _LABEL, "LABEL=VALUE", "for example zone=a") for word in self.selector),
            *(({"env": word}, _VARIABLE, "NAME=VALUE", "secrets: --hf-token-secret NAME") for word in self.environment),
        ):
            refuse_unfit(options, pattern, what, hint)


def name_of(plan: Plan, cluster: Cluster) -> str:
    """Return the name of the job."""
    return cluster.name or default_name(plan.recipe.name)


def default_name(recipe: str) -> str:
    """Return the default name of a job of the recipe."""
    text = re.sub(r"[^a-z0-9]+", "-", recipe.rpartition("/")[2].removesuffix(".yaml").lower())
    return f"primus-{text}".strip("-")[:42].rstrip("-")


def manifests(plan: Plan, cluster: Cluster) -> list[Manifest]:
    """Return the objects to create, in order: a headless Service, and the Indexed Job whose pods it names.

    Raises InputError for data, weights or files of the recipe that pods would not see.
    """
    _refuse_unseen(plan.recipe)
    name = name_of(plan, cluster)
    labels = {LABEL: name, "app.kubernetes.io/managed-by": "primus"}
    common = cast("dict[str, Manifest]", read_values(Path(__file__).with_name("job.yaml")).data)
    service, job = common["service"], common["job"]
    for manifest in (service, job):
        manifest["metadata"] = {"name": name, "namespace": cluster.namespace, "labels": dict(labels)}
    service["spec"]["selector"] = {LABEL: name}
    job["spec"] |= {
        "completions": plan.nodes, "parallelism": plan.nodes, "ttlSecondsAfterFinished": cluster.ttl,
        # The pods of all nodes end together, and each counts.
        "backoffLimit": plan.nodes * cluster.restarts if cluster.claim else 0,
        "template": {"metadata": {"labels": {LABEL: name}}, "spec": _pod(plan, cluster, name, common)},
    }  # fmt: skip
    if cluster.queue:
        # Kueue starts the job when its quota allows.
        job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = cluster.queue
        job["spec"]["suspend"] = True
    return [service, job]


def _pod(plan: Plan, cluster: Cluster, name: str, common: dict[str, Manifest]) -> Manifest:
    container, maker = common["container"], vendor(plan.recipe.gpu)
    limits: Manifest = {}
    volumes: list[Manifest] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": cluster.shm}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    apart = {"labelSelector": {"matchLabels": {LABEL: name}}, "topologyKey": "kubernetes.io/hostname"}
    affinity: Manifest = {"podAntiAffinity": {_REQUIRED: [apart]}}
    pod: Manifest = {**common["pod"], "containers": [container], "subdomain": name, "affinity": affinity}
    if cluster.claim:
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": cluster.claim}})
        mounts.append({"name": "runs", "mountPath": _RUNS})
    if maker:
        gpu, resource = generation(plan.recipe.gpu), common["makers"][maker]["resource"]
        limits[resource] = plan.gpus
        pod["tolerations"] = [{"key": resource, "operator": "Exists", "effect": "NoSchedule"}]
        # AMD's node labeller names the device id, NVIDIA's feature discovery the product.
        ids = [number.removeprefix("0x") for number in gpu.device_ids]
        values = ids if maker == "amd" else [product.replace(" ", "-") for product in gpu.names]
        match = {"key": common["makers"][maker]["label"], "operator": "In", "values": values}
        affinity["nodeAffinity"] = {_REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": [match]}]}}
    if cluster.rdma:
        resource, _, count = cluster.rdma.partition("=")
        limits[resource] = int(count or 1)
    requests = {key: value for key, value in (("cpu", cluster.cpu), ("memory", cluster.memory)) if value}
    if cluster.memory:
        limits["memory"] = cluster.memory
    variables = {"MASTER_ADDR": f"{name}-0.{name}", **dict(word.split("=", 1) for word in cluster.environment)}
    environment = [*container["env"], *({"name": key, "value": value} for key, value in variables.items())]
    if cluster.token_secret:
        secret, _, key = cluster.token_secret.partition(":")
        environment.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": secret, "key": key or "token"}}})
    container |= {
        "image": cluster.image, "command": ["bash", "-c", _script(plan, cluster, name)], "env": environment,
        "resources": {"limits": limits, **({"requests": requests} if requests else {})}, "volumeMounts": mounts,
    }  # fmt: skip
    if cluster.selector:
        pod["nodeSelector"] = dict(word.split("=", 1) for word in cluster.selector)
    if cluster.pull_secret:
        pod["imagePullSecrets"] = [{"name": cluster.pull_secret}]
    if cluster.host_network:
        pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    return pod | {"volumes": volumes}


def _script(plan: Plan, cluster: Cluster, name: str) -> str:
    files = _own_files(plan.recipe)
    verb, recipe, *others = plan.command
    if plan.recipe.by_path:
        path = plan.recipe.path
        recipe = f"{_RECIPE}/{path.name}" if files else path.stem
    words = shlex.join([verb, recipe, *others])
    resume = f" --resume-from {shlex.quote(cluster.resume_from)}" if cluster.resume_from else ""
    # A job that is applied again has a new id, so neither its folder nor its ranks collide with those of the earlier
    # one.
    run = f"{name}-$RUN_ID"
    written = []
    for file_name, text in files.items():
        target = PurePosixPath(_RECIPE, file_name)
        parent, file = shlex.quote(str(target.parent)), shlex.quote(str(target))
        written.append(f"mkdir -p {parent} && printf %s {shlex.quote(text)} > {file} || exit\n")
    script = f'export RDZV_ID="{run}"; exec primus {words} --output "{_RUNS}/{run}"{resume}'
    if cluster.claim and cluster.restarts:
        variables = {
            "name": run, "run": f"{_RUNS}/{run}", "nodes": plan.nodes, "ranks": plan.ranks, "steps": plan.recipe.steps,
            "resume": shlex.quote(cluster.resume_from),
        }  # fmt: skip
        script = bash("pods", variables, f'primus {words} "$@"')
    # Kubernetes replaces $(NAME) by a variable of the pod, and $$( by $(.
    return "".join([*written, script]).replace("$(", "$$(")


def _own_files(recipe: Recipe) -> dict[str, str]:
    """Return name → text of the recipe's files that are not in the image, relative to the folder of the recipe.

    Raises InputError if such a file is outside of this folder or contains what looks like a secret.
    """
    files: dict[str, str] = {}
    for path in recipe.files:
        if path.resolve().is_relative_to(load.folder().resolve()):
            continue
        name = os.path.relpath(path.absolute(), recipe.path.parent)
        if name.startswith("../"):
            raise InputError(f"{name}: pods get files of the recipe's own folder only", where=str(recipe.path))
        files[name] = path.read_text(encoding="utf-8")
        refuse_secrets(files[name].split(), f"remove it from {path}: --hf-token-secret NAME passes a token")
    return files


def _refuse_unseen(recipe: Recipe) -> None:
    """Raise InputError for data or weights at a relative path that the image does not contain."""
    key = f"{recipe.backend}.weights"
    places = {f"assets.{name}": recipe.asset(name) for name in recipe.section("assets")} | {key: recipe.weights}
    for key, path in places.items():
        if path is None or str(recipe.settings[key].value).startswith("/"):
            continue
        if not path.resolve().is_relative_to(load.folder().resolve()):
            raise InputError(
                f"{key}: pods do not see {path}", where=recipe.settings[key].origin,
                hint=f"name the absolute path that it has in the pods; --claim NAME is at {_RUNS} there",
            )  # fmt: skip


def _kubectl(*words: str, stdin: str | None = None) -> str:
    program = shutil.which("kubectl")
    if program is None:
        hint = "install it, or run: primus launch k8s … --dry-run, which prints the manifests"
        raise HostError("kubectl is not installed", hint=hint)
    command = [program, "--request-timeout=20s", *words]
    ended = subprocess.run(command, input=stdin or "", capture_output=True, text=True, check=False)
    if ended.returncode:
        raise _refused(ended.stderr)
    return ended.stdout


def _refused(errors: str) -> PrimusError:
    text = " ".join(errors.split())[:400]
    match = re.search(r"Error from server \((\w+)\): (.*)", text)
    reason, sentence = match.groups() if match else ("", text)
    if reason == "NotFound":
        return InputError(f"the cluster has no such object: {sentence}", hint="--namespace names another")
    if reason == "AlreadyExists":
        return InputError(f"the object cannot be created: {sentence}", hint="delete it first, or choose another --name")
    if reason in ("BadRequest", "Invalid") or " is invalid: " in text or "error validating" in text:
        return InputError(f"the cluster refuses the manifest: {sentence}")
    if reason:
        return HostError(f"the cluster refused the request: {sentence} ({reason})")
    hint = "check KUBECONFIG; `kubectl cluster-info` shows more"
    return HostError(f"kubectl cannot use the cluster: {sentence}", hint=hint)


def create(objects: Sequence[Manifest]) -> None:
    """Create the objects. The server first judges all of them, so that none stays behind when one is refused."""
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
    _kubectl("create", "--filename=-", "--dry-run=server", stdin=text)
    _kubectl("create", "--filename=-", stdin=text)


def manage(action: str, job: str, namespace: str, *, as_json: bool = False, dry_run: bool = False) -> str:
    """Return kubectl's output for one of ``ACTIONS`` on ``job``, or on the cluster: text, or JSON where it has it.

    Raises InputError for a job that does not exist, and HostError if the cluster does not answer.
    """
    pods, of = f"--selector={LABEL}={job}", f"--namespace={namespace}"
    if action == "nodes":
        return _kubectl("get", "nodes", "--output=json" if as_json else f"--output=custom-columns={_COLUMNS}")
    shown = _kubectl("get", "job", job, of)
    if action == "delete":
        dry = ["--dry-run=client"] if dry_run else []
        return _kubectl("delete", f"job/{job}", f"service/{job}", of, "--cascade=foreground", "--wait=false", *dry)
    if action == "logs":
        return _kubectl("logs", pods, of, "--prefix", "--tail=100", "--ignore-errors")
    if as_json:
        return _kubectl("get", "job,pods", pods, of, "--output=json")
    return f"{shown}\n{_kubectl('get', 'pods', pods, of, '--output=wide')}"
