"""``primus launch k8s`` against a real API server: what it makes, refuses and removes. Nothing runs the pods."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import kube_kit
from primus.cli.main import main
from primus.launch.kubernetes import KINDS

WHY = kube_kit.missing()
pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif(bool(WHY), reason=WHY),
    # The server makes its certificate itself.
    pytest.mark.filterwarnings("ignore::urllib3.exceptions.InsecureRequestWarning"),
]
IMAGE = "rocm/primus:v26.11-mi300x"


class Said(NamedTuple):
    """What a command answered."""

    code: int
    out: str
    err: str


Launch = Callable[..., Said]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kube_kit.Kubernetes]:
    running = kube_kit.Kubernetes(tmp_path_factory.mktemp("kubernetes"))
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture
def launch(server: kube_kit.Kubernetes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Launch:
    monkeypatch.setenv("KUBECONFIG", str(server.config))

    def call(*words: str) -> Said:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            code = main(["launch", "k8s", *words])
        return Said(code, *capsys.readouterr())

    return call


@pytest.fixture(scope="module")
def api(server: kube_kit.Kubernetes) -> Any:
    from kubernetes import config

    return config.new_client_from_config(str(server.config))


@pytest.fixture(scope="module")
def definitions(api: Any) -> None:
    """The kinds of JobSet, Kubeflow Trainer, Training Operator and Volcano, without their controllers and schemas."""
    from kubernetes import client

    extensions = client.ApiextensionsV1Api(api)
    for version, kind, plural in KINDS.values():
        group, _, name = version.partition("/")
        if group == "batch":
            continue
        schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        served = {"name": name, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
        extensions.create_custom_resource_definition(
            {
                "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
                "metadata": {"name": f"{plural}.{group}"},
                "spec": {
                    "group": group, "scope": "Namespaced", "versions": [served],
                    "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
                },
            }
        )  # fmt: skip
        until(lambda group=group, name=name, plural=plural: served_now(api, group, name, plural))


def served_now(api: Any, group: str, version: str, plural: str) -> bool:
    from kubernetes import client
    from kubernetes.client.exceptions import ApiException

    try:
        client.CustomObjectsApi(api).list_namespaced_custom_object(group, version, "default", plural)
    except ApiException:
        return False
    return True


def until(true: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.3)


def names(found: Any) -> set[str]:
    return {one.metadata.name for one in found.items}


def test_a_job_is_made_watched_and_deleted(launch: Launch, api: Any) -> None:
    from kubernetes import client

    core, batch = client.CoreV1Api(api), client.BatchV1Api(api)
    said = launch("llama3.1-8b", "--nodes", "2", "--image", IMAGE, "--name", "watched", "--shm", "32Gi")
    assert said.code == 0, said.err
    assert "applied job watched in namespace default" in said.out
    job = batch.read_namespaced_job("watched", "default")
    assert (job.spec.completions, job.spec.parallelism, job.spec.backoff_limit) == (2, 2, 0)
    pod = lambda: core.list_namespaced_pod("default", label_selector="app.kubernetes.io/name=watched")  # noqa: E731
    until(lambda: len(pod().items) == 2)
    made = pod().items[0]
    assert made.spec.containers[0].resources.limits["amd.com/gpu"] == "8"
    assert made.spec.containers[0].image == IMAGE
    assert "watched" in names(core.list_namespaced_service("default"))
    told = launch("status", "watched", "--json")
    assert told.code == 0, told.err
    assert [row["phase"] for row in json.loads(told.out)["pods"]] == ["Pending", "Pending"]
    assert launch("logs", "watched").out.count("(pending: ") == 2
    again = launch("llama3.1-8b", "--nodes", "2", "--image", IMAGE, "--name", "watched")
    assert again.code == 2
    assert "there is such an object already" in again.err
    assert "watched" in names(batch.list_namespaced_job("default"))
    assert "watched" in names(core.list_namespaced_service("default"))
    gone = launch("delete", "watched")
    assert (gone.code, gone.out) == (0, "deleted job watched\n"), gone.err
    until(lambda: "watched" not in names(batch.list_namespaced_job("default")))
    until(lambda: not pod().items)
    assert "watched" not in names(core.list_namespaced_service("default"))


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_is_taken_by_the_server(kind: str, launch: Launch, definitions: None) -> None:
    words = ("--kind", kind, "--name", f"one-{kind}")
    said = launch("mixtral-8x7b", "--nodes", "4", "--image", IMAGE, "--queue", "team", *words)
    assert said.code == 0, said.err
    assert launch("status", f"one-{kind}", *words[:2], "--json").code == 0
    assert launch("delete", f"one-{kind}", *words[:2]).code == 0


def test_a_kind_that_is_not_served_and_a_missing_namespace_are_sentences(launch: Launch, api: Any) -> None:
    from kubernetes import client

    before = names(client.CoreV1Api(api).list_namespaced_service("default"))
    for words in (("--namespace", "nowhere"), ("--namespace", "nowhere", "--kind", "jobset")):
        said = launch("llama3.1-8b", "--nodes", "2", "--image", IMAGE, *words)
        assert said.code == 2, said
        assert "the cluster has no such object" in said.err
        assert "Traceback" not in said.err
    for verb in ("status", "logs", "delete"):
        assert launch(verb, "nobody").code == 2
    assert names(client.CoreV1Api(api).list_namespaced_service("default")) == before


def test_what_the_server_refuses_leaves_nothing_behind(launch: Launch, api: Any) -> None:
    from kubernetes import client

    said = launch("llama3.1-8b", "--nodes", "2", "--image", IMAGE, "--name", "bad", "--rdma", "a..b/hca=1")
    assert said.code == 2, said
    assert "the cluster refuses the manifest" in said.err
    assert "bad" not in names(client.CoreV1Api(api).list_namespaced_service("default"))
    assert "bad" not in names(client.BatchV1Api(api).list_namespaced_job("default"))


def test_nodes_with_their_gpus(launch: Launch, api: Any) -> None:
    from kubernetes import client

    core = client.CoreV1Api(api)
    for name, amount in (("left", "8"), ("right", "4k")):
        labels = {"amd.com/gpu.product-name": "AMD_Instinct_MI300X"}
        core.create_node({"metadata": {"name": name, "labels": labels}})
        state = {"allocatable": {"amd.com/gpu": amount}, "conditions": [{"type": "Ready", "status": "True"}]}
        core.patch_node_status(name, {"status": state})
    said = launch("nodes", "--json")
    assert said.code == 0, said.err
    rows = {row["name"]: row for row in json.loads(said.out)["nodes"]}
    assert rows["left"] == {"name": "left", "ready": True, "gpus": 8, "product": "AMD_Instinct_MI300X"}
    assert rows["right"]["gpus"] == 4000


def test_a_wrong_token_and_a_silent_server_are_sentences(
    server: kube_kit.Kubernetes, launch: Launch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong"
    server.write_config(wrong, server.port, "other")
    monkeypatch.setenv("KUBECONFIG", str(wrong))
    said = launch("nodes")
    assert said.code == 3
    assert "HTTP 401" in said.err
    server.write_config(wrong, kube_kit._free_port(), "other")
    said = launch("nodes")
    assert said.code == 3
    assert "the cluster does not answer" in said.err
