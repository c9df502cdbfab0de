"""Client of the workload service of ``run_k8s_pretrain.sh --url``: create, get, delete, list workloads; list nodes."""

from __future__ import annotations

import getpass
import hashlib
import json
import shlex
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlsplit

from primus.compat.words import options
from primus.errors import CheckFailed, HostError, InputError

COMMANDS = ("create", "get", "delete", "list", "nodes")
# The script's documented defaults. There is none for the image, because the script's default is not one of ours.
_DEFAULTS = {"replica": "1", "cpu": "96", "gpu": "8", "backend": "megatron", "workspace": "primus-safe-pretrain"}
_OWN = (*_DEFAULTS, "exp", "data_path", "image", "hf_token", "nodelist", "url", "workload-id")
_TIMEOUT = 30.0


def payload(words: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the request body of ``create``. It may contain a token, so never print it.

    Raises InputError for a missing or invalid option.
    """
    given = {one.key: str(one.value) for one in options(words)}
    asked = {**_DEFAULTS, **{key: value for key, value in given.items() if key in _OWN}}
    for key in ("exp", "image"):
        if not asked.get(key):
            raise InputError(f"--{key} is missing", where="run_k8s_pretrain.sh create")
    for key in ("replica", "cpu", "gpu"):
        if not (asked[key].isascii() and asked[key].isdigit() and int(asked[key]) > 0):
            raise InputError(f"--{key} must be a whole number of at least 1, not {asked[key]!r}")
    more = shlex.join(f"--{key}={value}" for key, value in given.items() if key not in _OWN)
    ranks = {"EXP": asked["exp"], "BACKEND": asked["backend"], "GPUS_PER_NODE": asked["gpu"]}
    if data := asked.get("data_path"):
        ranks["DATA_PATH"] = data
    if token := asked.get("hf_token") or environment.get("HF_TOKEN"):
        ranks["HF_TOKEN"] = token
    hosts = [name.strip() for name in asked.get("nodelist", "").split(",") if name.strip()]
    return {
        "workspace": asked["workspace"],
        "displayName": "pretrain",
        "description": "pretrain",
        "groupVersionKind": {"kind": "PyTorchJob", "group": "kubeflow.org", "version": "v1"},
        # exec, without a pipe, so that the exit code is that of the training.
        "entryPoint": "cd /workspace/Primus && NNODES=$PET_NNODES NODE_RANK=$PET_NODE_RANK "
        f"exec bash ./examples/run_pretrain.sh {more}".strip(),
        "isSupervised": False,
        "image": asked["image"],
        "ttlSecondsAfterFinished": 36000,
        "maxRetry": 1,
        "customerLabels": {"kubernetes.io/hostname": ",".join(hosts)} if hosts else {},
        "resource": {
            "replica": int(asked["replica"]), "cpu": asked["cpu"], "gpu": asked["gpu"], "memory": "1024Gi",
            "ephemeralStorage": "100Gi",
        },
        "env": ranks,
    }  # fmt: skip


def ask(command: str, words: Sequence[str], environment: Mapping[str, str]) -> Any:
    """Send one of COMMANDS to the service and return its answer.

    Raises InputError for invalid options, CheckFailed if the service refuses, HostError if it does not answer.
    """
    given = {one.key: str(one.value) for one in options(words)}
    url = given.get("url", "")
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise InputError(
            f"--url: {url!r} is not the address of a service" if url else "--url is missing",
            where=f"run_k8s_pretrain.sh {command}", hint="--url https://HOST",
        )  # fmt: skip
    body, path, method = None, "/api/v1/workloads", "GET"
    if command == "create":
        body, method = json.dumps(payload(words, environment)).encode(), "POST"
    elif command == "nodes":
        path = "/api/v1/nodes"
    elif command in ("get", "delete"):
        if not (number := given.get("workload-id")):
            raise InputError("--workload-id is missing", where=f"run_k8s_pretrain.sh {command}")
        path += "/" + quote(number, safe="")
        method = "DELETE" if command == "delete" else "GET"
    headers = {"userId": _user(), "Content-Type": "application/json", "Accept": "application/json"}
    request = urllib.request.Request(url.rstrip("/") + path, data=body, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
            text = answer.read().decode("utf-8", errors="replace")
    except urllib.error.HTTPError as error:
        told = " ".join(error.read().decode("utf-8", errors="replace").split())[:300]
        raise CheckFailed(f"the service refuses {command}: HTTP {error.code} {told or error.reason}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        reason = getattr(reason, "strerror", None) or reason
        raise HostError(f"{urlsplit(url).netloc} does not answer: {reason}", hint="check --url") from error
    try:
        return json.loads(text) if text.strip() else {}
    except ValueError as error:
        raise HostError(f"the answer of {urlsplit(url).netloc} is not JSON", hint="check --url") from error


def _user() -> str:
    """Return the user id that the service expects: the MD5 of the user's name."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        name = "primus"
    return hashlib.md5(name.encode(), usedforsecurity=False).hexdigest()
