"""Kubernetes jobs: manifests rendered from a plan and the cluster's options. kubectl sends them to
the cluster.
"""

import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, cast

from primus_images.errors import HostError, InputError
from primus_images.gpus.table import generation
from primus_images.launch.plan import Plan, bash, refuse_secrets, refuse_unfit, vendor
from primus_images.programs import captured
from primus_images.recipes import load
from primus_images.recipes.recipe import Recipe
from primus_images.yamlfile import filled, read_values

Manifest = dict[str, Any]
_COMMON = cast("dict[str, Manifest]", read_values(Path(__file__).with_name("job.yaml")).data)
RUNS = "/workspace/runs"
# A recipe file of the user is written to this folder of each pod.
_RECIPE = "/tmp/primus-recipe"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The options of `primus launch k8s`. An empty text leaves the choice to the cluster. ``ttl``
    is in seconds.
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
        refuse_secrets(
            secrets, "create a Secret in the cluster, and pass its name: --hf-token-secret NAME"
        )
        refuse_unfit(vars(self), "kubernetes")
        if self.resume_from and not self.claim:
            raise InputError(
                "--resume-from needs --claim NAME: without it, pods have no folder of earlier runs"
            )


def name_of(plan: Plan, cluster: Cluster) -> str:
    """Return the name of the job; the default is made from the recipe's name."""
    text = re.sub(
        r"[^a-z0-9]+", "-", plan.recipe.name.rpartition("/")[2].removesuffix(".yaml").lower()
    )
    return cluster.name or f"primus-{text}".strip("-")[:42].rstrip("-")


def manifests(plan: Plan, cluster: Cluster) -> list[Manifest]:
    """Return the objects to create, in order: a headless Service, and the Indexed Job whose pods it
    names.

    Raises InputError for data, weights or files of the recipe that pods would not see.
    """
    _refuse_unseen(plan.recipe)
    name = name_of(plan, cluster)
    maker = vendor(plan.recipe.gpu)
    device, _, count = cluster.rdma.partition("=")
    secret, _, key = cluster.token_secret.partition(":")
    limits = {
        f"{maker}.com/gpu": plan.ranks if maker else 0,
        device: int(count or 1),
        "memory": cluster.memory,
    }
    requests = {"cpu": cluster.cpu, "memory": cluster.memory}
    values: dict[str, Any] = {
        option: None if text == "" else text for option, text in vars(cluster).items()
    } | {
        "name": name,
        "nodes": plan.nodes,
        "script": _script(plan, cluster, name),
        "address": f"{name}-0.{name}",
        # The pods of all nodes end together, and each counts.
        "failures": plan.nodes * cluster.restarts if cluster.claim else 0,
        "limits": {resource: amount for resource, amount in limits.items() if resource and amount},
        "requests": {resource: amount for resource, amount in requests.items() if amount},
        "maker": maker,
        "secret": secret,
        "secret_key": key or "token",
        "selector": dict(word.split("=", 1) for word in cluster.selector) or None,
    }
    if maker:
        gpu = generation(plan.recipe.gpu)
        if maker == "amd":
            products = [number.removeprefix("0x") for number in gpu.device_ids]
        else:
            products = gpu.names
        values |= {"gpu": f"{maker}.com/gpu", "label": _COMMON["labels"][maker]}
        values["products"] = [product.replace(" ", "-") for product in products]
    for option, parts in _COMMON["parts"].items():
        values |= {
            part: filled(form, values) if values[option] else None for part, form in parts.items()
        }
    variables = dict(word.split("=", 1) for word in cluster.environment)
    values["env"] = [row for row in filled(_COMMON["env"], values) if row["name"] not in variables]
    values["env"] += [{"name": variable, "value": text} for variable, text in variables.items()]
    values["env"] += [values["token"]] if cluster.token_secret else []
    return [filled(_COMMON[kind], values) for kind in ("service", "job")]


def _script(plan: Plan, cluster: Cluster, name: str) -> str:
    files = _own_files(plan.recipe)
    verb, recipe, *others = plan.command
    if plan.recipe.by_path:
        path = plan.recipe.path
        if files:
            recipe = f"{_RECIPE}/{path.name}"
        else:
            recipe = path.stem
    words = shlex.join([verb, recipe, *others])
    resume = ""
    if cluster.resume_from:
        resume = f" --resume-from {shlex.quote(cluster.resume_from)}"
    # A job that is applied again has a new id, so neither its folder nor its ranks collide with
    # those of the earlier one.
    run = f"{name}-$RUN_ID"
    written = []
    for file_name, text in files.items():
        target = PurePosixPath(_RECIPE, file_name)
        parent = shlex.quote(str(target.parent))
        file = shlex.quote(str(target))
        written.append(f"mkdir -p {parent} && printf %s {shlex.quote(text)} > {file} || exit\n")
    script = f'export RDZV_ID="{run}"; exec primus {words} --output "{RUNS}/{run}"{resume}'
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
    # Kubernetes replaces $(NAME) by a variable of the pod, and $$( by $(.
    return "".join([*written, script]).replace("$(", "$$(")


def _own_files(recipe: Recipe) -> dict[str, str]:
    """Return name → text of the recipe's files that are not in the image, relative to the folder of
    the recipe.

    Raises InputError if such a file is outside of this folder or contains what looks like a secret.
    """
    files: dict[str, str] = {}
    for path in recipe.files:
        if path.resolve().is_relative_to(load.folder().resolve()):
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
    key = f"{recipe.backend}.weights"
    places = {f"assets.{name}": recipe.asset(name) for name in recipe.section("assets")} | {
        key: recipe.weights
    }
    for key, path in places.items():
        if path is None or str(recipe.settings[key].value).startswith("/"):
            continue
        if not path.resolve().is_relative_to(load.folder().resolve()):
            raise InputError(
                f"{key}: pods do not see {path}",
                where=recipe.settings[key].origin,
                hint=f"name the absolute path that it has in the pods; --claim NAME is at {RUNS} "
                "there",
            )


def _kubectl(*words: str, stdin: str) -> None:
    try:
        ended = captured(
            ["kubectl", "--request-timeout=20s", *words], f"kubectl {words[0]}", text=stdin
        )
    except FileNotFoundError:
        raise HostError(
            "kubectl is not installed",
            hint="install it, or run: primus launch k8s … --dry-run, which prints the manifests",
        ) from None
    if ended.returncode:
        sentence = (
            " ".join(ended.stderr.split())[:400] or f"no reason, exit code {ended.returncode}"
        )
        # Any other error is the cluster's or the machine's.
        bad = next((words for words in _COMMON["bad_input"] if words in sentence), None)
        if bad:
            raise InputError(f"kubectl: {sentence}", hint=_COMMON["bad_input"][bad])
        raise HostError(
            f"kubectl: {sentence}", hint="check KUBECONFIG; `kubectl cluster-info` shows more"
        )


def create(objects: Sequence[Manifest]) -> None:
    """Create the objects. The server first judges all of them, so that none stays behind when one
    is refused.
    """
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
    _kubectl("create", "--filename=-", "--dry-run=server", stdin=text)
    _kubectl("create", "--filename=-", stdin=text)
