"""Client of the workload service of ``run_k8s_pretrain.sh --url``, which is AMD's Primus-SaFE."""

import getpass
import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote, urlsplit
from urllib.request import Request, urlopen

from primus_images.cli.verb import parser_of_shared
from primus_images.errors import CheckFailed, HostError, InputError

NAME = "run_k8s_pretrain.sh"
_WORKLOADS = "/api/v1/workloads"
_NODES = "/api/v1/nodes"
_METHODS = {"create": "POST", "delete": "DELETE"}
_SECONDS = 30.0
_LONGEST = 16 << 20


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """The options of the command, those that ``verbs.yaml`` shares under its name."""

    command: str
    url: str
    workload_id: str
    replica: int
    cpu: int
    gpu: int
    backend: str
    exp: str
    data_path: str
    image: str
    hf_token: str
    workspace: str
    nodelist: str


@dataclass(frozen=True, kw_only=True)
class Query:
    """One request to the service. ``body`` may contain a token: it is never printed."""

    command: str
    method: str
    url: str
    body: Mapping[str, Any] | None = None

    def shown(self) -> str:
        """Return the request as text, without tokens."""
        lines = [f"{self.method} {self.url}"]
        if self.body is not None:
            variables = {**self.body["env"]}
            if "HF_TOKEN" in variables:
                variables["HF_TOKEN"] = "…"
            lines.append(json.dumps({**self.body, "env": variables}, indent=2, ensure_ascii=False))
        return "\n".join(lines)


def query(words: Sequence[str], environment: Mapping[str, str]) -> Query:
    """Translate the words of the command. Raises InputError for wrong ones."""
    namespace, more = parser_of_shared(NAME).parse_known_args(words)
    chosen = WorkloadOptions(**vars(namespace))
    address = urlsplit(chosen.url)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise InputError(
            f"--url: {chosen.url!r} is not the address of a service",
            where=NAME,
            hint="--url https://HOST",
        )
    path = _WORKLOADS
    body = None
    if chosen.command == "create":
        body = _workload(chosen, more, environment)
    elif more:
        raise InputError(f"{chosen.command} has no option {more[0]!r}", where=NAME)
    elif chosen.command == "nodes":
        path = _NODES
    elif chosen.command in ("get", "delete"):
        if not chosen.workload_id:
            raise InputError(
                "--workload-id is missing", where=NAME, hint="`list` shows those of the service"
            )
        path += f"/{quote(chosen.workload_id, safe='')}"
    return Query(
        command=chosen.command,
        method=_METHODS.get(chosen.command, "GET"),
        url=chosen.url.rstrip("/") + path,
        body=body,
    )


def _workload(
    chosen: WorkloadOptions, more: Sequence[str], environment: Mapping[str, str]
) -> dict[str, Any]:
    """Return the body of ``create``. ``more`` are options of the training script."""
    if not chosen.exp:
        raise InputError("--exp is missing", where=NAME, hint="--exp FILE, as EXP elsewhere")
    if not chosen.image:
        raise InputError(
            "--image is missing",
            where=NAME,
            hint="name an image of this project, as `primus publish` prints it",
        )
    variables = {"EXP": chosen.exp, "BACKEND": chosen.backend, "GPUS_PER_NODE": str(chosen.gpu)}
    if chosen.data_path:
        variables["DATA_PATH"] = chosen.data_path
    token = chosen.hf_token or environment.get("HF_TOKEN")
    if token:
        variables["HF_TOKEN"] = token
    labels = {}
    if chosen.nodelist:
        labels["kubernetes.io/hostname"] = chosen.nodelist
    # exec, without a pipe: the exit code is that of the training.
    script = "cd /workspace/Primus && NNODES=$PET_NNODES NODE_RANK=$PET_NODE_RANK exec bash "
    script += shlex.join(["./examples/run_pretrain.sh", *more])
    return {
        "workspace": chosen.workspace,
        "displayName": "pretrain",
        "description": "pretrain",
        "groupVersionKind": {"kind": "PyTorchJob", "group": "kubeflow.org", "version": "v1"},
        "entryPoint": script,
        "isSupervised": False,
        "image": chosen.image,
        "ttlSecondsAfterFinished": 36000,
        "maxRetry": 1,
        "customerLabels": labels,
        "resource": {
            "replica": chosen.replica,
            "cpu": str(chosen.cpu),
            "gpu": str(chosen.gpu),
            "memory": "1024Gi",
            "ephemeralStorage": "100Gi",
        },
        "env": variables,
    }


def answer_of(asked: Query) -> Any:
    """Send the query and return the service's answer, an empty mapping if it has no text.

    Raises CheckFailed if the service refuses, HostError if it does not answer with JSON.
    """
    body = None
    if asked.body is not None:
        body = json.dumps(asked.body).encode()
    headers = {"userId": _user(), "Content-Type": "application/json", "Accept": "application/json"}
    request = Request(asked.url, data=body, method=asked.method, headers=headers)
    host = urlsplit(asked.url).netloc.rpartition("@")[2]
    try:
        with urlopen(request, timeout=_SECONDS) as answer:
            text = answer.read(_LONGEST).decode("utf-8", errors="replace")
    except HTTPError as error:
        reason = " ".join(error.read(_LONGEST).decode("utf-8", errors="replace").split())[:300]
        raise CheckFailed(
            f"the service refuses {asked.command}: HTTP {error.code} {reason or error.reason}"
        ) from error
    except (OSError, ValueError) as error:
        reason = str(getattr(error, "reason", error))
        raise HostError(f"{host} does not answer: {reason}", hint="check --url") from error
    if not text.strip():
        return {}
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise HostError(f"the answer of {host} is not JSON", hint="check --url") from error


def _user() -> str:
    """Return the user's id for the service: the MD5 of the name, as the script computes it."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        name = "primus"
    return hashlib.md5(name.encode(), usedforsecurity=False).hexdigest()
