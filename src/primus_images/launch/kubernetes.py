"""Kubernetes jobs: manifests of a plan and the cluster's options, which kubectl sends."""

import json
import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, cast

from primus_images.errors import HostError, InputError
from primus_images.gpus.table import generation
from primus_images.launch.merge import patched
from primus_images.launch.plan import Plan, bash, refuse_secrets, refuse_unfit, vendor
from primus_images.programs import captured
from primus_images.recipes import load
from primus_images.recipes.recipe import Recipe
from primus_images.terminal import say
from primus_images.yamlfile import filled, read_values

Manifest = dict[str, Any]
_COMMON = cast("dict[str, Manifest]", read_values(Path(__file__).with_name("job.yaml")).data)
RUNS = "/workspace/runs"
_TRIAL = "--dry-run=server"
# Its pods have the id of their job as a label. A Job's policy for failed pods is older.
LEAST_VERSION = (1, 27)
PULL_POLICIES = ("", "Always", "IfNotPresent", "Never")
# A recipe file of the user is written to this folder of each pod.
_RECIPE = "/tmp/primus-recipe"
# The user of the pods, and its group, unless an option says more.
_USER = 1000


# AMD's devices belong to a group whose number differs between nodes.
_DEVICES = """\
if [ -e /dev/kfd ] && [ ! -w /dev/kfd ]; then
    group=$(stat -c %g /dev/kfd)
    echo "primus: user $(id -u) may not use the GPUs: launch with --group $group" >&2
    exit 2
fi
"""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The options of `primus launch k8s`. An empty text leaves the choice to the cluster.

    ``ttl`` is in seconds.
    """

    image: str
    name: str = ""
    namespace: str = "default"
    queue: str = ""
    jobset: bool = False
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
    user: str = ""
    groups: tuple[str, ...] = ()
    service_account: str = ""
    priority_class: str = ""
    labels: tuple[str, ...] = ()
    annotations: tuple[str, ...] = ()
    tolerations: tuple[str, ...] = ()
    pull_policy: str = ""
    patch: Path | None = None

    def __post_init__(self) -> None:
        if not self.image:
            raise InputError(
                "--image is missing", hint="--image NAME, as `primus publish` prints it"
            )
        secrets = (*self.environment, self.image, self.token_secret, self.pull_secret)
        secrets += (*self.labels, *self.annotations)
        refuse_secrets(
            secrets, "create a Secret in the cluster, and pass its name: --hf-token-secret NAME"
        )
        refuse_unfit(vars(self), "kubernetes")
        if self.resume_from and not self.claim:
            raise InputError(
                "--resume-from needs --claim NAME: without it, pods have no folder of earlier runs"
            )

    @property
    def uid(self) -> int:
        """The user of the pods. Only root can register memory with network devices."""
        user = self.user.partition(":")[0]
        if user:
            return int(user)
        if self.rdma:
            return 0
        return _USER

    @property
    def gid(self) -> int:
        """The group of the pods."""
        return int(self.user.partition(":")[2] or self.uid)

    def security(self) -> str:
        """Return a sentence about the Pod Security level that the pods need."""
        exceptions = []
        if self.patch:
            return f"that of the manifests with {self.patch}"
        if self.host_network:
            exceptions.append("the network of the host (--host-network)")
        if self.rdma and self.uid == 0:
            exceptions.append("the capability IPC_LOCK (--rdma)")
        user = f"user {self.uid}"
        if exceptions:
            refused = " and ".join(exceptions)
            return f"baseline, {user}, and {refused}: the namespace must allow privileged pods"
        if self.uid == 0:
            return f"baseline, {user}"
        if self.rdma:
            user += ", whose memory the container runtime must let RDMA lock (memlock)"
        return f"restricted, {user}"


def name_of(plan: Plan, cluster: Cluster) -> str:
    """Return the name of the job; the default is made from the recipe's name."""
    if cluster.name:
        return cluster.name
    recipe = plan.recipe.name.rpartition("/")[2].removesuffix(".yaml").lower()
    words = re.sub(r"[^a-z0-9]+", "-", recipe)
    return f"primus-{words}".strip("-")[:42].rstrip("-")


def manifests(plan: Plan, cluster: Cluster) -> list[Manifest]:
    """Return the objects to create: a headless Service, and the Indexed Job whose pods it names.

    Or the JobSet of this Job.

    Raises InputError for data, weights or files of the recipe that pods would not see.
    """
    _refuse_unseen(plan.recipe)
    values = _values(plan, cluster)
    for option, parts in _COMMON["parts"].items():
        for part, form in parts.items():
            values[part] = None
            if values[option]:
                values[part] = filled(form, values)
    for part in ("pod_security", "container_security"):
        values[part] = values[part] or values[f"root_{part}"]
    values["env"] = _environment(cluster, values)
    objects = [filled(_COMMON["service"], values), filled(_COMMON["job"], values)]
    if cluster.patch:
        objects = patched(objects, cluster.patch)
    if cluster.jobset:
        return [_job_set(objects, values)]
    return objects


def _job_set(objects: Sequence[Manifest], values: Mapping[str, Any]) -> Manifest:
    """Return the JobSet of the Job. It makes the Service itself."""
    (job,) = [made for made in objects if made["kind"] == "Job"]
    spec = dict(job["spec"])
    # A JobSet suspends and removes its jobs itself.
    for name in ("suspend", "ttlSecondsAfterFinished"):
        spec.pop(name, None)
    return cast("Manifest", filled(_COMMON["jobset"], {**values, "job_spec": spec}))


def _values(plan: Plan, cluster: Cluster) -> dict[str, Any]:
    """Return what ``job.yaml`` names with $."""
    name = name_of(plan, cluster)
    values: dict[str, Any] = {}
    for option, value in vars(cluster).items():
        values[option] = None if value == "" else value
    values["name"] = name
    values["address"] = f"{name}-0.{name}"
    if cluster.jobset:
        values["address"] = f"{name}-node-0-0.{name}"
    values["nodes"] = plan.nodes
    values["script"] = _script(plan, cluster, name)
    values["failures"] = 0
    if cluster.claim:
        # The pods of all nodes end together, and each counts.
        values["failures"] = plan.nodes * cluster.restarts
    values["limits"] = _limits(plan, cluster)
    values["requests"] = _requests(plan, cluster)
    values |= _rights(cluster)
    labels = filled(_COMMON["labels_of_all"], values)
    values["labels"] = {**_pairs(cluster.labels), **labels}
    values["job_labels"] = dict(values["labels"])
    if cluster.queue:
        values["job_labels"]["kueue.x-k8s.io/queue-name"] = cluster.queue
    values["annotations"] = _pairs(cluster.annotations) or None
    secret, _, key = cluster.token_secret.partition(":")
    values["secret"] = secret
    values["secret_key"] = key or "token"
    values["selector"] = _pairs(cluster.selector) or None
    values["maker"] = vendor(plan.recipe.gpu)
    if values["maker"]:
        values["gpu"] = f"{values['maker']}.com/gpu"
        values["label"] = _COMMON["labels"][values["maker"]]
        values["products"] = _products(plan.recipe.gpu)
    values["tolerations"] = _tolerations(cluster, values.get("gpu")) or None
    return values


def _rights(cluster: Cluster) -> dict[str, Any]:
    """Return what ``job.yaml`` needs to know about the user of the pods and its rights."""
    return {
        "uid": cluster.uid,
        "gid": cluster.gid,
        "groups": [int(group) for group in cluster.groups] or None,
        "root": cluster.uid == 0,
        "other_user": cluster.uid != 0,
        "locks_memory": cluster.uid == 0 and bool(cluster.rdma),
        "no_claim": not cluster.claim,
        # A token of the cluster is for pods that call it.
        "mounts_token": None if cluster.service_account else False,
    }


def _requests(plan: Plan, cluster: Cluster) -> dict[str, object]:
    """Return what each pod requests: a pod without requests is the first to be evicted."""
    kind = "gpu" if vendor(plan.recipe.gpu) else "cpu"
    usual = _COMMON["requests"][kind]
    return {
        "cpu": cluster.cpu or str(usual["cpu"] * plan.ranks),
        "memory": cluster.memory or f"{usual['memory_gib'] * plan.ranks}Gi",
    }


def _tolerations(cluster: Cluster, gpu: str | None) -> list[dict[str, str]]:
    """Return the tolerations: of the taint that nodes with GPUs have, and those of the options."""
    tolerations = []
    if gpu:
        tolerations.append({"key": gpu, "operator": "Exists", "effect": "NoSchedule"})
    for word in cluster.tolerations:
        taint, _, effect = word.partition(":")
        key, equals, value = taint.partition("=")
        toleration = {"key": key, "operator": "Exists"}
        if equals:
            toleration |= {"operator": "Equal", "value": value}
        if effect:
            toleration["effect"] = effect
        tolerations.append(toleration)
    return tolerations


def _limits(plan: Plan, cluster: Cluster) -> dict[str, object]:
    limits: dict[str, object] = {}
    maker = vendor(plan.recipe.gpu)
    if maker:
        limits[f"{maker}.com/gpu"] = plan.ranks
    if cluster.rdma:
        device, _, count = cluster.rdma.partition("=")
        limits[device] = int(count or 1)
    limits["memory"] = cluster.memory
    return _known(limits)


def _known(amounts: Mapping[str, object]) -> dict[str, object]:
    return {resource: amount for resource, amount in amounts.items() if amount}


def _products(gpu: str) -> list[str]:
    """Return the values of the label that names a GPU's generation."""
    generation_of_gpu = generation(gpu)
    if vendor(gpu) == "amd":
        return [number.removeprefix("0x") for number in generation_of_gpu.device_ids]
    return [name.replace(" ", "-") for name in generation_of_gpu.names]


def _pairs(words: Sequence[str]) -> dict[str, str]:
    """Return the pairs of KEY=VALUE."""
    pairs = {}
    for word in words:
        key, _, value = word.partition("=")
        pairs[key] = value
    return pairs


def _environment(cluster: Cluster, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    variables = _pairs(cluster.environment)
    rows = [row for row in filled(_COMMON["env"], values) if row["name"] not in variables]
    for name, value in variables.items():
        rows.append({"name": name, "value": value})
    if cluster.token_secret:
        rows.append(values["token"])
    return rows


def _script(plan: Plan, cluster: Cluster, name: str) -> str:
    """Return what the shell of each pod runs."""
    files = _own_files(plan.recipe)
    verb, recipe, *options = plan.command
    if plan.recipe.by_path:
        recipe = plan.recipe.path.stem
        if files:
            recipe = f"{_RECIPE}/{plan.recipe.path.name}"
    words = shlex.join([verb, recipe, *options])
    # A job that is applied again has a new id, so neither its folder nor its ranks collide with
    # those of the earlier one.
    run = f"{name}-$RUN_ID"
    if cluster.claim and cluster.restarts:
        variables = {
            "name": run,
            "run": f"{RUNS}/{run}",
            "nodes": plan.nodes,
            "ranks": plan.ranks,
            "steps": plan.resumable,
            "resume": shlex.quote(cluster.resume_from),
        }
        script = bash("pods", variables, f'primus {words} "$@"')
    else:
        script = f'export RDZV_ID="{run}"; exec primus {words} --output "{RUNS}/{run}"'
        if cluster.resume_from:
            script += f" --resume-from {shlex.quote(cluster.resume_from)}"
    script = _writing(files) + script
    if vendor(plan.recipe.gpu) == "amd":
        script = _DEVICES + script
    # Kubernetes replaces $(NAME) by a variable of the pod, and $$( by $(.
    return script.replace("$(", "$$(")


def _writing(files: Mapping[str, str]) -> str:
    """Return the commands that write the recipe's files."""
    commands = []
    for name, text in files.items():
        file = PurePosixPath(_RECIPE, name)
        folder = shlex.quote(str(file.parent))
        commands.append(
            f"mkdir -p {folder} && printf %s {shlex.quote(text)} > {shlex.quote(str(file))} "
            "|| exit\n"
        )
    return "".join(commands)


def _own_files(recipe: Recipe) -> dict[str, str]:
    """Return name → text of the recipe's files that are not in the image.

    Names are relative to the folder of the recipe. Raises InputError if a file is outside of this
    folder, or contains what looks like a secret.
    """
    files: dict[str, str] = {}
    for path in recipe.files:
        if _in_image(path):
            continue
        name = os.path.relpath(path.absolute(), recipe.path.parent)
        if name.startswith("../"):
            raise InputError(
                f"{name}: pods get files of the recipe's own folder only", where=str(recipe.path)
            )
        files[name] = path.read_text(encoding="utf-8")
        refuse_secrets(
            files[name].split(), f"remove it from {path}: --hf-token-secret NAME passes a token"
        )
    return files


def _refuse_unseen(recipe: Recipe) -> None:
    """Raise InputError for data or weights at a relative path that the image does not contain."""
    paths = {f"assets.{name}": recipe.asset(name) for name in recipe.section("assets")}
    paths[f"{recipe.backend}.weights"] = recipe.weights
    for key, path in paths.items():
        if path is None or _in_image(path) or str(recipe.settings[key].value).startswith("/"):
            continue
        raise InputError(
            f"{key}: pods do not see {path}",
            where=recipe.settings[key].origin,
            hint=f"name the absolute path that it has in the pods; --claim NAME is at {RUNS} there",
        )


def _in_image(path: Path) -> bool:
    return path.resolve().is_relative_to(load.folder().resolve())


def _kubectl(*words: str, stdin: str = "") -> str:
    """Return what kubectl prints. Raises InputError or HostError if it fails."""
    ended = _ended(*words, stdin=stdin)
    if ended.returncode == 0:
        # Such as that pods would violate the namespace's Pod Security. The trial shows them once.
        warnings = re.findall("(?m)^Warning: (.*)", ended.stderr)
        for warning in warnings if _TRIAL in words else ():
            say(f"primus launch: the cluster warns: {warning}")
        return ended.stdout
    reason = _reason(ended)
    for words_of_bad_input, hint in _COMMON["bad_input"].items():
        if words_of_bad_input in reason:
            raise InputError(f"the cluster does not take the job: kubectl: {reason}", hint=hint)
    # Any other error is the cluster's or the machine's.
    raise HostError(
        f"the job cannot be created: kubectl: {reason}",
        hint="check KUBECONFIG; `kubectl cluster-info` shows more",
    )


def _ended(*words: str, stdin: str) -> "subprocess.CompletedProcess[str]":
    command = ["kubectl", "--request-timeout=20s", *words]
    try:
        return captured(command, f"kubectl {words[0]}", text=stdin)
    except FileNotFoundError:
        raise HostError(
            "kubectl is not installed",
            hint="install it, or run: primus launch k8s … --dry-run, which prints the manifests",
        ) from None


def _reason(ended: "subprocess.CompletedProcess[str]") -> str:
    return " ".join(ended.stderr.split())[:600] or f"no reason, exit code {ended.returncode}"


def _require_version() -> None:
    """Raise HostError if the server lacks what the manifests use.

    An unknown version is accepted.
    """
    text = _kubectl("version", "--output=json")
    version = re.search(r'"serverVersion".*?"gitVersion": *"v(\d+)\.(\d+)', text, re.DOTALL)
    if version and (int(version[1]), int(version[2])) < LEAST_VERSION:
        raise HostError(
            f"the server is Kubernetes {version[1]}.{version[2]}, whose pods lack the id of their "
            "job",
            hint="Kubernetes 1.27 or newer is needed",
        )


def create(objects: Sequence[Manifest]) -> None:
    """Create the objects.

    The server first judges all of them and a pod, so that none stays behind when one is refused.
    """
    _require_version()
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
    _kubectl("create", "--filename=-", _TRIAL, stdin=text)
    for made in objects:
        if made["kind"] != "Service":
            _try_pod(made)
    _kubectl("create", "--filename=-", stdin=text)


def _try_pod(job: Manifest) -> None:
    """Let the server judge a pod of the job.

    It takes a job whose pods the rules of the namespace refuse, and such a job waits for ever.
    Raises InputError if they are refused.
    """
    spec = job["spec"]
    if job["kind"] == "JobSet":
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    template = spec["template"]
    place = {"name": f"{job['metadata']['name']}-trial", "namespace": job["metadata"]["namespace"]}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**template["metadata"], **place},
        "spec": template["spec"],
    }
    items = {"apiVersion": "v1", "kind": "List", "items": [pod]}
    ended = _ended("create", "--filename=-", _TRIAL, stdin=json.dumps(items))
    reason = _reason(ended)
    # A user may be allowed to create jobs, but no pods.
    if ended.returncode == 0 or "(Forbidden)" not in reason or "cannot create resource" in reason:
        return
    if "exceeded quota" in reason:
        say(f"primus launch: the pods wait for room in the namespace's quota: kubectl: {reason}")
        return
    hint = "`kubectl describe namespace` shows the rules; --patch FILE changes the pods"
    for words, remedy in _COMMON["refused_pod"].items():
        if words in reason:
            hint = remedy
            break
    raise InputError(f"the cluster does not take the job's pods: kubectl: {reason}", hint=hint)
