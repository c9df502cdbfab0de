"""Access to a Kubernetes cluster through kubectl, with the user's own configuration and login."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from primus.errors import HostError, InputError, PrimusError
from primus.launch.kubernetes import LABEL, Manifest


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


def _get(*words: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(_kubectl("get", *words, "--output=json"))
    return content


def apply(objects: Sequence[Manifest]) -> None:
    """Create the objects. If one is refused, delete those that were created before it."""
    created: list[Manifest] = []
    try:
        for manifest in objects:
            _kubectl("create", "--filename=-", stdin=json.dumps(manifest))
            created.append(manifest)
    except BaseException:
        for manifest in reversed(created):
            # The user needs the reason for which the job was refused.
            with suppress(PrimusError):
                _kubectl("delete", "--filename=-", "--wait=false", stdin=json.dumps(manifest))
        raise


def status(name: str, namespace: str) -> dict[str, Any]:
    """Return the job's own status, and name, phase, node and reason of each of its pods."""
    job = _get("job", name, f"--namespace={namespace}")
    pods = [
        {
            "name": pod["metadata"]["name"],
            "phase": pod["status"].get("phase", ""),
            "node": pod["spec"].get("nodeName", ""),
            "reason": pod["status"].get("reason") or _reason(pod["status"]),
        }
        for pod in _pods(name, namespace)
    ]
    return {"name": name, "kind": "Job", "status": job.get("status", {}), "pods": pods}


def _reason(status: dict[str, Any]) -> str:
    for container in status.get("containerStatuses", ()):
        state = container.get("state", {})
        if "waiting" in state:
            return str(state["waiting"].get("reason", ""))
        if code := state.get("terminated", {}).get("exitCode"):
            return f"exit code {code}"
    conditions = status.get("conditions", ())
    return next((c["reason"] for c in conditions if c.get("status") == "False" and c.get("reason")), "")


def _pods(name: str, namespace: str) -> list[dict[str, Any]]:
    pods = _get("pods", f"--namespace={namespace}", f"--selector={LABEL}={name}")["items"]
    return sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))


def logs(name: str, namespace: str, lines: int = 100) -> Iterator[tuple[str, str]]:
    """Yield each pod of the job with its last lines."""
    pods = _pods(name, namespace)
    if not pods:
        raise InputError(f"no pod belongs to {name}", hint="--namespace names another; `status` shows the job")
    for pod in pods:
        pod_name, phase = pod["metadata"]["name"], pod["status"].get("phase")
        if phase == "Pending":
            yield pod_name, f"(pending: {_reason(pod['status']) or 'no reason given'})"
        else:
            yield pod_name, _kubectl("logs", pod_name, f"--namespace={namespace}", f"--tail={lines}")


def delete(name: str, namespace: str) -> None:
    """Delete the job with its pods and its Service."""
    for kind in ("job", "service"):
        _kubectl("delete", kind, name, f"--namespace={namespace}", "--cascade=foreground", "--wait=false")


def nodes() -> list[dict[str, Any]]:
    """Return name, readiness, GPUs and GPU product of every node."""
    rows: list[dict[str, Any]] = []
    for node in _get("nodes")["items"]:
        labels, amounts = node["metadata"].get("labels", {}), node["status"].get("allocatable", {})
        conditions = node["status"].get("conditions", ())
        # Kubernetes writes 4000 as 4k.
        count = str(amounts.get("amd.com/gpu") or amounts.get("nvidia.com/gpu") or 0).replace("k", "000")
        ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
        product = labels.get("amd.com/gpu.product-name") or labels.get("nvidia.com/gpu.product") or ""
        rows.append({"name": node["metadata"]["name"], "ready": ready, "gpus": int(count), "product": product})
    return rows
