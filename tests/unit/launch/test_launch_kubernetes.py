import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from primus_images.cli.main import main
from primus_images.errors import InputError
from primus_images.launch.kubernetes import Cluster, manifests
from primus_images.launch.plan import Plan
from primus_images.recipes import load
from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from tables import table_of

FULL: dict[str, Any] = {
    "image": "rocm/primus:v26.11-mi300x",
    "queue": "team",
    "claim": "runs",
    "token_secret": "hf:key",
    "cpu": "96",
    "pull_secret": "pull",
    "rdma": "rdma/hca=8",
    "memory": "1024Gi",
    "selector": ("zone=a",),
    "environment": ("A=b",),
    "resume_from": "/workspace/runs/x",
}
WORDS = ["launch", "k8s", "llama3.1-8b", "--nodes", "2", "--image", "a:mi300x"]


def made(gpu: str = "mi300x", nodes: int = 2, **options: Any) -> list[dict[str, Any]]:
    plan = Plan(recipe=resolve("llama3.1-8b", (), Choices(nodes=nodes, gpu=gpu)))
    return manifests(plan, Cluster(**{"image": "a/b:c", **options}))


def pod_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    template: dict[str, Any] = objects[-1]["spec"]["template"]
    return template


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("gpu", ["mi300x", "mi355x", "h200"])
def test_manifests_hold_by_the_current_schemas(gpu: str, full: bool) -> None:
    import kubernetes_validate  # takes seconds

    objects = made(gpu, **(FULL if full else {}))
    for manifest in objects:
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    container = pod_of(objects)["spec"]["containers"][0]
    assert (
        container["resources"]["limits"]["nvidia.com/gpu" if gpu == "h200" else "amd.com/gpu"] == 8
    )
    assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert "privileged" not in json.dumps(objects)


def test_options_reach_the_job() -> None:
    objects = made(**FULL)
    text = json.dumps(objects)
    assert objects[-1]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    for part in (
        '"suspend": true',
        '"secretKeyRef": {"name": "hf", "key": "key"}',
        '"rdma/hca": 8',
        '"74a1"',
        '"claimName": "runs"',
        "resume=/workspace/runs/x",
    ):
        assert part in text


def test_a_token_of_the_environment_is_not_rendered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_verysecretverysecretvery")
    assert main([*WORDS, "--hf-token-secret", "hf", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "verysecret" not in out
    assert [one["kind"] for one in yaml.safe_load_all(out)] == ["Service", "Job"]


# Keeps objects as files. REFUSE is the kind whose creation fails, BROKEN fails everything.
KUBECTL = """\
#!%s
import json, os, pathlib, sys
folder = pathlib.Path(os.environ["KUBE_OBJECTS"])
words = [word for word in sys.argv[1:] if not word.startswith("--")]
if broken := os.environ.get("BROKEN"):
    sys.exit(broken)
if words[0] == "create":
    for item in json.load(sys.stdin)["items"]:
        file = folder / f"{item['kind'].lower()}-{item['metadata']['name']}"
        if item["kind"].lower() == os.environ.get("REFUSE"):
            sys.exit("Error from server (Forbidden): jobs is forbidden")
        if file.exists():
            sys.exit("Error from server (AlreadyExists): there is one")
        if "--dry-run=server" not in sys.argv:
            file.write_text(json.dumps(item))
"""


@pytest.fixture
def objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a cluster's objects, which a stand-in for kubectl creates."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "objects").mkdir()
    program = tmp_path / "bin/kubectl"
    program.write_text(KUBECTL % sys.executable)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("KUBE_OBJECTS", str(tmp_path / "objects"))
    return tmp_path / "objects"


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_job_is_applied_once(objects: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "primus-llama3-1-8b"
    assert main(WORDS) == 0
    assert names_in(objects) == {f"job-{name}", f"service-{name}"}
    assert main(WORDS) == 2
    assert "(AlreadyExists): there is one\n  → delete it first" in capsys.readouterr().err


def test_a_refused_job_leaves_no_service_behind(
    objects: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REFUSE", "job")
    assert main(WORDS) == 3
    assert "jobs is forbidden" in capsys.readouterr().err
    assert names_in(objects) == set()


@pytest.mark.parametrize(
    ("error", "code"), table_of("launch_kubernetes.an_error_of_kubectl_is_shown")
)
def test_an_error_of_kubectl_is_shown(
    error: str,
    code: int,
    objects: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("BROKEN", error)
    assert main(WORDS) == code
    assert f"kubectl: {error}\n" in capsys.readouterr().err


def test_without_kubectl_the_manifests_can_still_be_printed(
    objects: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(objects))
    assert main(WORDS) == 3
    assert "kubectl is not installed" in capsys.readouterr().err
    assert main([*WORDS, "--dry-run"]) == 0


@pytest.mark.parametrize(
    "image",
    [
        "a",
        "localhost:5000/a/b-c:v1",
        "r.io/a__b@sha256:" + "0" * 64,
        "docker.io/rocm/primus:v26.11-mi300x",
    ],
)
def test_names_of_images_that_engines_take(image: str) -> None:
    assert pod_of(made(image=image))["spec"]["containers"][0]["image"] == image


def test_a_recipe_of_the_user_reaches_the_pods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script writes it, with the files that it uses from its folder, and names it to primus."""
    text = (
        "uses: [../../{}/llama3.1-8b.yaml, mine/lr.yaml]\nname: mine\ndescription: it's "
        "$(HOME) and $HOME\n"
    )
    (tmp_path / "team/mine").mkdir(parents=True)
    own = load.folder()
    (tmp_path / "team/mine.yaml").write_text(text.replace("../../{}/", f"{own}/"))
    (tmp_path / "team/mine/lr.yaml").write_text("torchtitan.optimizer.lr: 0.125\n")
    monkeypatch.chdir(tmp_path / "team")
    plan = Plan(recipe=resolve("mine.yaml", (), Choices(gpu="mi300x")))
    pod = pod_of(manifests(plan, Cluster(image="a/b:c", name="x")))
    command = pod["spec"]["containers"][0]["command"]
    assert command[:2] == ["bash", "-c"]
    # What Kubernetes does with a command: $$( becomes $(.
    script = command[2].replace("$$(", "$(")
    script = script.replace("/tmp/primus-recipe", f"{tmp_path}/pod").replace("exec primus", "echo")
    said = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
    assert said.startswith(f"train {tmp_path}/pod/mine.yaml --backend=torchtitan")
    there = resolve(f"{tmp_path}/pod/mine.yaml", (), Choices(gpu="mi300x"))
    assert there.settings["torchtitan.optimizer.lr"].value == 0.125
    assert there.settings["description"].value == "it's $(HOME) and $HOME"


# Trains as a rank does: meets the others, takes 20 steps with them, saves every fifth, and ends on
# a noted failure.
TRAIN = """\
#!%s
import os, sys, time
from pathlib import Path
words = sys.argv
out, node = Path(words[words.index("--output") + 1]), os.environ["JOB_COMPLETION_INDEX"]
start = 0
if "--resume-from" in words:
    start = int(words[words.index("--resume-from") + 1].rpartition("-")[2])
if os.environ.get("BROKEN"):
    sys.exit(1)
for step in range(start, 21):
    here = out / f"node-{node}" / f"step-{step}"
    here.parent.mkdir(parents=True, exist_ok=True)
    here.touch(exist_ok=False)
    while len([*out.glob(f"node-*/step-{step}")]) < 2:
        if [*out.glob("cache/failures/*.json")]:
            sys.exit(1)
        time.sleep(0.01)
    time.sleep(0.03)
    if step %% 5 == 0 and step > start and node == "0":
        (out / f"checkpoint/step-{step}").mkdir(parents=True)
        for name in ("recipe.json", ".metadata"):
            (out / f"checkpoint/step-{step}" / name).touch()
"""


class Pods:
    """The pods of a job of two nodes as Kubernetes runs them: each that fails is started again."""

    def __init__(self, folder: Path) -> None:
        plan = Plan(recipe=resolve("llama3.1-8b", ("steps=20",), Choices(nodes=2, gpu="mi300x")))
        pod = pod_of(manifests(plan, Cluster(image="a/b:c", name="x", claim="runs")))
        script = pod["spec"]["containers"][0]["command"][2].replace("$$(", "$(")
        self.script = script.replace("/workspace/runs", str(folder)).replace("sleep 2", "sleep 0.1")
        self.run = folder / "x-1"
        (folder / "bin").mkdir()
        (folder / "bin/primus").write_text(TRAIN % sys.executable)
        (folder / "bin/primus").chmod(0o755)
        self.environment = {
            **os.environ,
            "RUN_ID": "1",
            "PATH": f"{folder}/bin:{os.environ['PATH']}",
        }

    def start(self, node: int) -> subprocess.Popen[bytes]:
        environment = {**self.environment, "JOB_COMPLETION_INDEX": str(node)}
        return subprocess.Popen(
            ["bash", "-c", self.script], env=environment, start_new_session=True
        )

    def ended(self, kills: list[tuple[int, int, str]]) -> list[int]:
        """Run until both have succeeded; (node, signal, file) kills the pod of a node when the file
        exists.
        """
        pods, codes, deadline = (
            {node: self.start(node) for node in (0, 1)},
            [],
            time.monotonic() + 60,
        )
        while pods:
            assert time.monotonic() < deadline, "the pods wait for each other"
            for node, pod in list(pods.items()):
                if (code := pod.poll()) is not None:
                    codes.append(code)
                    pods.pop(node)
                    if code:
                        pods[node] = self.start(node)
            if kills and (self.run / kills[0][2]).exists():
                node, number, _ = kills.pop(0)
                os.killpg(pods[node].pid, number)
            time.sleep(0.02)
        return codes


def test_a_job_whose_pods_are_killed_continues_from_its_newest_checkpoint(tmp_path: Path) -> None:
    pods = Pods(tmp_path)
    kills = [
        (1, signal.SIGKILL, "attempt-0/node-1/step-12"),
        (0, signal.SIGKILL, "attempt-1/node-0/step-16"),
        (0, signal.SIGTERM, "attempt-2/node-0/step-17"),
    ]
    codes = pods.ended(kills)
    assert not kills
    assert codes.count(0) == 2
    assert 2 not in codes
    text = [
        (pods.run / f"turn-{turn}/resume").read_text().rpartition("/x-1/")[2].strip()
        for turn in range(4)
    ]
    assert text == [
        "from",
        *(f"attempt-{n}/checkpoint/step-{step}" for n, step in ((0, 10), (1, 15), (1, 15))),
    ]
    # A pod that comes back after the end has nothing to do.
    assert pods.start(1).wait(10) == pods.start(0).wait(10) == 0


def test_a_job_without_progress_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROKEN", "1")
    pods = Pods(tmp_path)
    codes = []
    for _ in range(4):
        both = [pods.start(1), pods.start(0)]
        codes.append(both[1].wait(10))
        if codes[-1] == 2:
            os.killpg(both[0].pid, signal.SIGKILL)
        both[0].wait(10)
    assert codes == [1, 1, 1, 2]


def test_without_a_claim_nothing_starts_again() -> None:
    assert [made(**options)[-1]["spec"]["backoffLimit"] for options in ({}, {"claim": "runs"})] == [
        0,
        40,
    ]


def test_a_recipe_of_the_image_given_by_path_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(load.folder())
    plan = Plan(recipe=resolve("./llama3.1-8b.yaml", (), Choices(gpu="mi300x")))
    pod = pod_of(manifests(plan, Cluster(image="a/b:c")))
    assert "exec primus train llama3.1-8b --backend" in pod["spec"]["containers"][0]["command"][2]


@pytest.mark.parametrize(
    ("words", "said"), table_of("launch_kubernetes.data_and_weights_are_those_of_the_pods")
)
def test_data_and_weights_are_those_of_the_pods(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "c.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "w").mkdir()
    monkeypatch.chdir(tmp_path)
    command = [
        "launch",
        "k8s",
        "llama3.1-8b",
        "--gpu=mi300x",
        "--image=a/b:c",
        "--claim=runs",
        "--dry-run",
        *words,
    ]
    assert main(command) == (2 if said else 0)
    shown = capsys.readouterr()
    assert said in shown.err
    assert said or words[-1] in shown.out


def test_recipes_that_pods_cannot_get_are_refused(tmp_path: Path) -> None:
    (tmp_path / "team").mkdir()
    (tmp_path / "far.yaml").write_text("torchtitan.optimizer.lr: 0.125\n")
    file, base = tmp_path / "team/mine.yaml", f"{load.folder()}/llama3.1-8b.yaml"
    for text, said in (
        (f"uses: [{base}, ../far.yaml]\nname: mine\n", "own folder only"),
        (f"uses: [{base}]\nname: mine\n# hf_{'a' * 30}\n", "looks like a secret"),
    ):
        file.write_text(text)
        with pytest.raises(InputError, match=said):
            manifests(
                Plan(recipe=resolve(str(file), (), Choices(gpu="mi300x"))), Cluster(image="a/b:c")
            )
