"""Access to a Kubernetes cluster through the official Python client (the extra ``k8s``)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from primus.errors import HostError, InputError
from primus.launch.kubernetes import KINDS, LABEL, Kind, Manifest

_TIMEOUT = 20.0


@contextmanager
def _client() -> Iterator[Any]:
    """Yield the client's module with its configuration loaded. HostError if either is missing."""
    try:
        from kubernetes import client, config
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError
    except ModuleNotFoundError as error:
        raise HostError(
            "the Kubernetes client is not installed",
            hint="pip install -e '.[k8s]' in a checkout, or: primus launch k8s … --dry-run | kubectl apply -f -",
        ) from error
    try:
        files = os.environ.get("KUBECONFIG") or "~/.kube/config"
        if any(Path(file).expanduser().is_file() for file in files.split(os.pathsep)):
            config.load_kube_config(config_file=files)
        else:
            config.load_incluster_config()
    # The client reads the file without checking its shape.
    except (config.ConfigException, yaml.YAMLError, TypeError, KeyError, ValueError, AttributeError) as error:
        raise HostError(
            f"no cluster is configured: {' '.join(str(error).split())[:300]}",
            hint="set KUBECONFIG to a valid file; --dry-run needs none",
        ) from error
    try:
        yield client
    except ApiException as error:
        raise _refused(error.status, error.reason, error.body) from error
    except HTTPError as error:
        raise HostError(
            f"the cluster does not answer: {' '.join(str(error).split())[:300]}",
            hint="`kubectl cluster-info` shows more",
        ) from error
    except ValueError as error:  # The client's models cover one version of the API only.
        told = " ".join(str(error).split())[:200]
        raise HostError(f"the client does not understand the cluster's answer: {told}", hint="use kubectl") from error


def _refused(code: int, reason: str, body: str | bytes | None) -> HostError | InputError:
    try:
        told = str(json.loads(body or "{}").get("message") or reason)
    except (ValueError, AttributeError):
        told = str(reason)
    told = " ".join(told.split())[:400]
    if code == 404:
        return InputError(f"the cluster has no such object: {told}", hint="--kind and --namespace name another")
    if code == 409:
        return InputError(f"the object cannot be created: {told}", hint="delete it first, or choose another --name")
    if code in (400, 422):
        return InputError(f"the cluster refuses the manifest: {told}")
    return HostError(f"the cluster refused the request: {told} (HTTP {code})")


def _custom(client: Any, kind: Kind, namespace: str) -> tuple[Any, dict[str, str]]:
    group, _, version = KINDS[kind][0].partition("/")
    place = {"group": group, "version": version, "namespace": namespace, "plural": KINDS[kind][2]}
    return client.CustomObjectsApi(), place


def apply(kind: Kind, objects: Sequence[Manifest]) -> None:
    """Create the objects. If one is refused, delete those that were created before it."""
    made: list[Callable[[], object]] = []
    with _client() as client:
        try:
            for one in objects:
                name, namespace = one["metadata"]["name"], one["metadata"]["namespace"]
                made.append(_create(client, kind, one, name, namespace))
        except BaseException:
            for undo in reversed(made):
                # The user needs the reason for which the job was refused.
                with suppress(Exception):
                    undo()
            raise


def _create(client: Any, kind: Kind, one: Manifest, name: str, namespace: str) -> Callable[[], object]:
    if one["kind"] == "Service":
        core = client.CoreV1Api()
        core.create_namespaced_service(namespace, one, _request_timeout=_TIMEOUT)
        return lambda: _delete_service(core, name, namespace)
    api, place = _custom(client, kind, namespace)
    api.create_namespaced_custom_object(**place, body=one, _request_timeout=_TIMEOUT)
    return lambda: api.delete_namespaced_custom_object(**place, name=name, _request_timeout=_TIMEOUT)


def _delete_service(core: Any, name: str, namespace: str) -> None:
    # Ignore the answer: older servers send a Status, newer ones the Service, and the client can read only the latter.
    core.delete_namespaced_service(name, namespace, _request_timeout=_TIMEOUT, _preload_content=False)


def status(kind: Kind, name: str, namespace: str) -> dict[str, Any]:
    """Return the job's own status, and name, phase, node and reason of each of its pods."""
    with _client() as client:
        api, place = _custom(client, kind, namespace)
        job = api.get_namespaced_custom_object(**place, name=name, _request_timeout=_TIMEOUT)
        pods = [
            {
                "name": pod.metadata.name,
                "phase": pod.status.phase,
                "node": pod.spec.node_name or "",
                "reason": pod.status.reason or _waiting(pod),
            }
            for pod in _pods(client, name, namespace)
        ]
    return {"name": name, "kind": KINDS[kind][1], "status": job.get("status", {}), "pods": pods}


def _waiting(pod: Any) -> str:
    for one in pod.status.container_statuses or ():
        if one.state and one.state.waiting:
            return str(one.state.waiting.reason or "")
        if one.state and one.state.terminated and one.state.terminated.exit_code:
            return f"exit code {one.state.terminated.exit_code}"
    return next((c.reason or "" for c in pod.status.conditions or () if c.status == "False" and c.reason), "")


def _pods(client: Any, name: str, namespace: str) -> list[Any]:
    found = client.CoreV1Api().list_namespaced_pod(
        namespace, label_selector=f"{LABEL}={name}", _request_timeout=_TIMEOUT
    )
    return sorted(found.items, key=lambda pod: str(pod.metadata.name))


def logs(name: str, namespace: str, lines: int = 100) -> Iterator[tuple[str, str]]:
    """Yield each pod of the job with its last lines."""
    with _client() as client:
        pods = _pods(client, name, namespace)
        if not pods:
            raise InputError(f"no pod belongs to {name}", hint="--namespace names another; `status` shows the job")
        for pod in pods:
            if pod.status.phase == "Pending":
                yield pod.metadata.name, f"(pending: {_waiting(pod) or 'no reason given'})"
                continue
            text = client.CoreV1Api().read_namespaced_pod_log(
                pod.metadata.name, namespace, tail_lines=lines, _request_timeout=_TIMEOUT
            )
            yield pod.metadata.name, str(text)


def delete(kind: Kind, name: str, namespace: str) -> None:
    """Delete the job with its pods and, for a Job, its Service."""
    with _client() as client:
        api, place = _custom(client, kind, namespace)
        api.delete_namespaced_custom_object(
            **place, name=name, propagation_policy="Foreground", _request_timeout=_TIMEOUT
        )
        if kind == "job":
            _delete_service(client.CoreV1Api(), name, namespace)


def nodes() -> list[dict[str, Any]]:
    """Return name, readiness, GPUs and GPU product of every node."""
    with _client() as client:
        from kubernetes.utils.quantity import parse_quantity

        found = client.CoreV1Api().list_node(_request_timeout=_TIMEOUT).items
    rows: list[dict[str, Any]] = []
    for node in found:
        labels, amounts = node.metadata.labels or {}, node.status.allocatable or {}
        ready = next((c.status for c in node.status.conditions or () if c.type == "Ready"), "Unknown")
        product = labels.get("amd.com/gpu.product-name") or labels.get("nvidia.com/gpu.product") or ""
        count = amounts.get("amd.com/gpu") or amounts.get("nvidia.com/gpu") or 0
        rows.append(
            {
                "name": node.metadata.name,
                "ready": ready == "True",
                "gpus": int(parse_quantity(count)),
                "product": product,
            }
        )
    return rows
