"""Kubernetes jobs: manifests rendered from a plan and the cluster's options. kubectl sends them to the cluster."""

import json
import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, cast

from primus.errors import HostError, InputError
from primus.gpus.table import generation
from primus.launch.plan import EXAMPLE_IMAGE, REFERENCE, Plan, bash, refuse_secrets, refuse_unfit, vendor
from primus.recipes import load
from primus.recipes.recipe import Recipe
from primus.waits import answer_of
from primus.yamlfile import filled, read_values

Manifest = dict[str, Any]
_COMMON = cast("dict[str, Manifest]", read_values(Path(__file__).with_name("job.yaml")).data)
RUNS = "/workspace/runs"
# A recipe file of the user is written to this folder of each pod.
_RECIPE = "/tmp/primus-recipe"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The options of `primus launch k8s`. An empty text leaves the choice to the cluster. ``ttl`` is in seconds."""

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
        refuse_unfit("image", self.image, REFERENCE, "the name of an image", EXAMPLE_IMAGE)
        for field, (option, pattern, what, hint) in _COMMON["options"].items():
            value = getattr(self, field)
            for word in (value,) if isinstance(value, str) else value:
                refuse_unfit(option, word, re.compile(pattern), what, hint)


def name_of(plan: Plan, cluster: Cluster) -> str:
    """Return the name of the job; the default is made from the recipe's name."""
    text = re.sub(r"[^a-z0-9]+", "-", plan.recipe.name.rpartition("/")[2].removesuffix(".yaml").lower())
    return cluster.name or f"primus-{text}".strip("-")[:42].rstrip("-")


def manifests(plan: Plan, cluster: Cluster) -> list[Manifest]:
    """Return the objects to create, in order: a headless Service, and the Indexed Job whose pods it names.

    Raises InputError for data, weights or files of the recipe that pods would not see.
    """
    _refuse_unseen(plan.recipe)
    name = name_of(plan, cluster)
    values = {
        "name": name, "namespace": cluster.namespace, "nodes": plan.nodes, "ttl": cluster.ttl, "shm": cluster.shm,
        # The pods of all nodes end together, and each counts.
        "failures": plan.nodes * cluster.restarts if cluster.claim else 0,
        "image": cluster.image, "script": _script(plan, cluster, name), "address": f"{name}-0.{name}",
    }  # fmt: skip
    service, job = filled(_COMMON["service"], values), filled(_COMMON["job"], values)
    if cluster.queue:
        # Kueue starts the job when its quota allows.
        job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = cluster.queue
        job["spec"]["suspend"] = True
    _add_options(job["spec"]["template"]["spec"], plan, cluster)
    return [service, job]


def _add_options(pod: Manifest, plan: Plan, cluster: Cluster) -> None:
    (container,) = pod["containers"]
    limits, requests = container["resources"]["limits"], container["resources"]["requests"]
    if cluster.claim:
        pod["volumes"].append({"name": "runs", "persistentVolumeClaim": {"claimName": cluster.claim}})
        container["volumeMounts"].append({"name": "runs", "mountPath": RUNS})
    if maker := vendor(plan.recipe.gpu):
        gpu, resource = generation(plan.recipe.gpu), _COMMON["makers"][maker]["resource"]
        limits[resource] = plan.ranks
        pod["tolerations"] = [{"key": resource, "operator": "Exists", "effect": "NoSchedule"}]
        # AMD's node labeller names the device id, NVIDIA's feature discovery the product.
        ids = [number.removeprefix("0x") for number in gpu.device_ids]
        values = ids if maker == "amd" else [product.replace(" ", "-") for product in gpu.names]
        match = {"key": _COMMON["makers"][maker]["label"], "operator": "In", "values": values}
        terms = {"nodeSelectorTerms": [{"matchExpressions": [match]}]}
        pod["affinity"]["nodeAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
    if cluster.rdma:
        resource, _, count = cluster.rdma.partition("=")
        limits[resource] = int(count or 1)
    if cluster.cpu:
        requests["cpu"] = cluster.cpu
    if cluster.memory:
        requests["memory"] = limits["memory"] = cluster.memory
    variables = dict(word.split("=", 1) for word in cluster.environment)
    container["env"] = [row for row in container["env"] if row["name"] not in variables]
    container["env"] += [{"name": name, "value": value} for name, value in variables.items()]
    if cluster.token_secret:
        secret, _, key = cluster.token_secret.partition(":")
        source = {"secretKeyRef": {"name": secret, "key": key or "token"}}
        container["env"].append({"name": "HF_TOKEN", "valueFrom": source})
    if cluster.selector:
        pod["nodeSelector"] = dict(word.split("=", 1) for word in cluster.selector)
    if cluster.pull_secret:
        pod["imagePullSecrets"] = [{"name": cluster.pull_secret}]
    if cluster.host_network:
        pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}


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
    script = f'export RDZV_ID="{run}"; exec primus {words} --output "{RUNS}/{run}"{resume}'
    if cluster.claim and cluster.restarts:
        variables = {
            "name": run, "run": f"{RUNS}/{run}", "nodes": plan.nodes, "ranks": plan.ranks, "steps": plan.resumable,
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
                hint=f"name the absolute path that it has in the pods; --claim NAME is at {RUNS} there",
            )  # fmt: skip


def _kubectl(*words: str, stdin: str) -> None:
    command = ["kubectl", "--request-timeout=20s", *words]
    try:
        with answer_of(f"kubectl {words[0]}"):
            ended = subprocess.run(command, input=stdin, capture_output=True, errors="replace", check=False)
    except FileNotFoundError:
        hint = "install it, or run: primus launch k8s … --dry-run, which prints the manifests"
        raise HostError("kubectl is not installed", hint=hint) from None
    if ended.returncode:
        sentence = " ".join(ended.stderr.split())[:400]
        # Any other error is the cluster's or the machine's.
        if bad := next((words for words in _COMMON["bad_input"] if words in sentence), None):
            raise InputError(f"kubectl: {sentence}", hint=_COMMON["bad_input"][bad])
        raise HostError(f"kubectl: {sentence}", hint="check KUBECONFIG; `kubectl cluster-info` shows more")


def create(objects: Sequence[Manifest]) -> None:
    """Create the objects. The server first judges all of them, so that none stays behind when one is refused."""
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
    _kubectl("create", "--filename=-", "--dry-run=server", stdin=text)
    _kubectl("create", "--filename=-", stdin=text)
