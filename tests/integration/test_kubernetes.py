"""``primus launch k8s`` against a real API server: what it makes, refuses and removes. Nothing runs
the pods.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import kube_kit
from primus_images.cli.main import main
from project_kit import free_port, until

WHY = kube_kit.missing()
pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.skipif(bool(WHY), reason=WHY)]
IMAGE = "rocm/primus:v26.11-mi300x"
TWO_NODES = ("llama3.1-8b", "--nodes", "2", "--image", IMAGE)


class Answer(NamedTuple):
    """What a command answered."""

    code: int
    out: str
    err: str


Launch = Callable[..., Answer]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kube_kit.Kubernetes]:
    running = kube_kit.Kubernetes(tmp_path_factory.mktemp("kubernetes"))
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture
def launch(
    server: kube_kit.Kubernetes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Launch:
    monkeypatch.setenv("KUBECONFIG", str(server.config))
    monkeypatch.setenv("PATH", f"{server.folder}/bin:{os.environ['PATH']}")

    def call(*words: str) -> Answer:
        return Answer(main(["launch", "k8s", *words]), *capsys.readouterr())

    return call


def test_a_job_is_made_watched_and_deleted(launch: Launch, server: kube_kit.Kubernetes) -> None:
    def pods() -> list[dict[str, object]]:
        label = "--selector=app.kubernetes.io/name=watched"
        return list(json.loads(server.kubectl("get", "pods", label, "--output=json"))["items"])

    created = launch(
        *TWO_NODES, "--name", "watched", "--shm", "32Gi", "--claim", "runs", "--restarts", "3"
    )
    assert created.code == 0, created.err
    assert "applied job watched in namespace default" in created.out
    spec = json.loads(server.kubectl("get", "job", "watched", "--output=json"))["spec"]
    assert (spec["completions"], spec["parallelism"], spec["backoffLimit"]) == (2, 2, 6)
    assert until(lambda: len(pods()) == 2)
    lost = pods()[0]
    lost["status"]["phase"] = "Failed"  # type: ignore[index]
    place = f"/api/v1/namespaces/default/pods/{lost['metadata']['name']}/status"  # type: ignore[index]
    server.kubectl("replace", "--raw", place, "--filename=-", stdin=json.dumps(lost))
    assert until(lambda: len(pods()) == 3)
    server.kubectl("delete", "pod", lost["metadata"]["name"])  # type: ignore[index]
    assert until(lambda: len(pods()) == 2)
    container = pods()[0]["spec"]["containers"][0]  # type: ignore[index]
    assert container["resources"]["limits"]["amd.com/gpu"] == "8"
    assert container["image"] == IMAGE
    assert "watched" in server.names("service")
    assert [row["status"]["phase"] for row in pods()] == ["Pending", "Pending"]  # type: ignore[index]
    again = launch(*TWO_NODES, "--name", "watched")
    assert again.code == 2
    assert "(AlreadyExists)" in again.err
    assert "watched" in server.names("job") & server.names("service")
    server.kubectl("delete", "job,service", "--selector=app.kubernetes.io/name=watched")
    assert until(lambda: "watched" not in server.names("job"))
    assert until(lambda: not pods())
    assert "watched" not in server.names("service")


QUOTA = """
apiVersion: v1
kind: Namespace
metadata: {name: ruled}
---
apiVersion: v1
kind: ResourceQuota
metadata: {name: all, namespace: ruled}
spec: {hard: {requests.cpu: 200, requests.memory: 2Ti}}
"""


def test_a_quota_of_cpus_and_memory_admits_the_pods(
    launch: Launch, server: kube_kit.Kubernetes, tmp_path: Path
) -> None:
    server.kubectl("create", "--filename=-", stdin=QUOTA)
    patch = tmp_path / "patch.yaml"
    patch.write_text("spec: {template: {spec: {schedulerName: volcano}}}\n")
    words = ("--namespace", "ruled", "--label", "team=a", "--patch", str(patch))
    assert launch(*TWO_NODES, "--name", "small", *words).code == 0

    def pods() -> list[dict[str, Any]]:
        told = server.kubectl("get", "pods", "--namespace=ruled", "--output=json")
        return list(json.loads(told)["items"])

    assert until(lambda: len(pods()) == 2)
    for pod in pods():
        spec = pod["spec"]
        assert pod["metadata"]["labels"]["team"] == "a"
        assert spec["schedulerName"] == "volcano"
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["containers"][0]["resources"]["requests"]["cpu"] == "64"
    # What exceeds the quota has no pods.
    assert launch(*TWO_NODES, "--name", "large", "--namespace", "ruled", "--cpu", "150").code == 0
    assert "large" in server.kubectl("get", "jobs", "--namespace=ruled", "--output=name")
    assert not until(lambda: len(pods()) > 2, 5)


def test_a_missing_namespace_is_a_sentence(launch: Launch, server: kube_kit.Kubernetes) -> None:
    before = server.names("service")
    refused = launch(*TWO_NODES, "--namespace", "nowhere")
    assert refused.code == 2, refused
    assert "(NotFound)" in refused.err
    assert server.names("service") == before


def test_what_the_server_refuses_leaves_nothing_behind(
    launch: Launch, server: kube_kit.Kubernetes
) -> None:
    refused = launch(*TWO_NODES, "--name", "bad", "--rdma", "a..b/hca=1")
    assert refused.code == 2, refused
    assert "kubectl: " in refused.err
    assert "bad" not in server.names("service") | server.names("job")


def test_a_wrong_token_and_a_silent_server_are_sentences(
    server: kube_kit.Kubernetes, launch: Launch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong"
    monkeypatch.setenv("KUBECONFIG", str(wrong))
    for port in (server.port, free_port()):
        server.write_config(wrong, port, "other")
        refused = launch(*TWO_NODES)
        assert refused.code == 3
        assert "check KUBECONFIG" in refused.err
