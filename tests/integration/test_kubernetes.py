"""``primus launch k8s`` against a real API server: what it makes, refuses and removes. Nothing runs
the pods.

PRIMUS_TEST_POD_SECURITY is Kubernetes' own program for Pod Security admission on older servers
(``go build ./cmd/webhook`` in kubernetes/pod-security-admission). Without it, the tests of
namespaces with rules are skipped.
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

import kube_kit
from primus_images.cli.main import main
from project_kit import free_port, until
from tables import FIXTURES

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
    server.until_accounts("ruled")
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


RULES: dict[str, Any] = yaml.safe_load((FIXTURES / "kube_manifests.yaml").read_text())
needs_pod_security = pytest.mark.skipif(
    not kube_kit.POD_SECURITY, reason="PRIMUS_TEST_POD_SECURITY names no program"
)


@pytest.fixture(scope="module")
def rules(server: kube_kit.Kubernetes) -> kube_kit.Kubernetes:
    """The server, with namespaces that have rules."""
    objects = {"apiVersion": "v1", "kind": "List", "items": RULES["objects"]}
    server.kubectl("create", "--filename=-", stdin=json.dumps(objects))
    spaces = [one["metadata"]["name"] for one in RULES["objects"] if one["kind"] == "Namespace"]
    server.until_accounts(*spaces)
    quotas = ("get", "resourcequota", "all", "--namespace=restricted", "--output=json")
    known = until(lambda: json.loads(server.kubectl(*quotas))["status"].get("hard"))
    assert known, "the controller has not counted yet"
    return server


def with_patch(words: list[str], folder: Path) -> list[str]:
    """The options, with a file in place of a patch's name."""
    if "--patch" not in words:
        return words
    name = words[words.index("--patch") + 1]
    path = folder / "patch.yaml"
    path.write_text(RULES["patches"][name])
    return [str(path) if word == name else word for word in words]


def pods_in(server: kube_kit.Kubernetes, namespace: str) -> list[dict[str, Any]]:
    told = server.kubectl("get", "pods", f"--namespace={namespace}", "--output=json")
    return list(json.loads(told)["items"])


def refusals(server: kube_kit.Kubernetes, namespace: str) -> str:
    """Why the controller could not make pods."""
    words = ("get", "events", f"--namespace={namespace}", "--output=json")
    events = json.loads(server.kubectl(*words))["items"]
    return "\n".join(one["message"] for one in events if one["reason"] == "FailedCreate")


@needs_pod_security
@pytest.mark.parametrize("name", RULES["admitted"])
def test_a_namespace_with_rules_admits_the_pods(
    name: str, launch: Launch, rules: kube_kit.Kubernetes, tmp_path: Path
) -> None:
    level, words = RULES["admitted"][name]
    launched = launch(
        *TWO_NODES, "--namespace", level, "--name", "made", *with_patch(words, tmp_path)
    )
    try:
        assert launched.code == 0, launched.err
        assert "the pods wait" not in launched.err
        assert until(lambda: len(pods_in(rules, level)) == 2, 20), refusals(rules, level)
        for pod in pods_in(rules, level):
            assert pod["metadata"]["labels"]["app.kubernetes.io/name"] == "made"
    finally:
        rules.kubectl("delete", "job,service", f"--namespace={level}", "--all")
        # Nobody runs them, so nobody says that they have ended.
        rules.kubectl(
            "delete", "pods", f"--namespace={level}", "--all", "--force", "--grace-period=0"
        )
        assert until(lambda: not pods_in(rules, level))


@needs_pod_security
@pytest.mark.parametrize("name", RULES["refused"])
def test_pods_that_a_namespace_refuses_are_not_submitted(
    name: str, launch: Launch, rules: kube_kit.Kubernetes, tmp_path: Path
) -> None:
    namespace, words, reason = RULES["refused"][name]
    refused = launch(*TWO_NODES, "--namespace", namespace, *with_patch(words, tmp_path))
    assert refused.code == 2, refused
    assert "the cluster does not take the job's pods: kubectl: " in refused.err
    assert re.search(reason, refused.err), refused.err
    assert "\n  → " in refused.err
    left = rules.kubectl("get", "job,service,pod", f"--namespace={namespace}", "--output=name")
    assert left == ""


NODE = """
apiVersion: v1
kind: Node
metadata: {name: %s}
status: {conditions: [{type: Ready, status: "True", lastHeartbeatTime: "%s"}]}
"""


def test_a_pod_on_a_lost_node_is_replaced(launch: Launch, server: kube_kit.Kubernetes) -> None:
    """The nodes are entries of the API, and this test gives them pods and signs of life."""
    names = ("here", "there", "spare")
    alive = set(names)
    for name in names:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        server.kubectl("create", "--filename=-", stdin=NODE % (name, now))

    def pods() -> dict[str, dict[str, Any]]:
        label = "--selector=app.kubernetes.io/name=lost"
        told = json.loads(server.kubectl("get", "pods", label, "--output=json"))
        made = {one["metadata"]["name"]: one for one in told["items"]}
        return {k: v for k, v in made.items() if "deletionTimestamp" not in v["metadata"]}

    def live() -> None:
        for name in alive:
            place = f"/api/v1/nodes/{name}"
            node = json.loads(server.kubectl("get", "--raw", place))
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            for condition in node["status"]["conditions"]:
                if condition["type"] == "Ready":
                    condition |= {"status": "True", "lastHeartbeatTime": now}
            # The controller may have changed the node meanwhile.
            del node["metadata"]["resourceVersion"]
            raw = ("replace", "--raw", f"{place}/status", "--filename=-")
            server.kubectl(*raw, stdin=json.dumps(node))

    def place(pod: str, node: str) -> None:
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod}}
        server.kubectl(
            "create",
            "--raw",
            f"/api/v1/namespaces/default/pods/{pod}/binding",
            "--filename=-",
            stdin=json.dumps({**binding, "target": target}),
        )

    live()
    assert launch(*TWO_NODES, "--name", "lost", "--claim", "runs").code == 0
    assert until(lambda: len(pods()) == 2)
    first, second = sorted(pods())
    place(first, "here")
    place(second, "there")
    alive.remove("here")
    replaced = until(lambda: live() or (len(pods()) == 2 and first not in pods()), 60)
    assert replaced, sorted(pods())
    assert second in pods(), "the pod of the other node goes on"
    job = json.loads(server.kubectl("get", "job", "lost", "--output=json"))
    assert not job["status"].get("failed"), "a lost node does not count as a failure"
    server.kubectl("delete", "job,service", "--selector=app.kubernetes.io/name=lost")


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
