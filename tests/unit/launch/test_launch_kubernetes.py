import json
import os
import re
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
from tables import FIXTURES, table_of

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
    proxy = ("proxy=true",) if gpu == "cpu" else ()
    plan = Plan(recipe=resolve("llama3.1-8b", proxy, Choices(nodes=nodes, gpu=gpu)))
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
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert "privileged" not in json.dumps(objects)


ALLOWED_VOLUMES = {"emptyDir", "persistentVolumeClaim", "secret", "configMap", "projected"}


def faults(pod: dict[str, Any], level: str) -> list[str]:
    """What Pod Security of this level refuses, by its table of controls."""
    spec = pod["spec"]
    found = [name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]
    for volume in spec["volumes"]:
        found += set(volume) - {"name"} - ALLOWED_VOLUMES
    for container in spec["containers"]:
        context = {**spec.get("securityContext", {}), **container.get("securityContext", {})}
        capabilities = context.get("capabilities", {})
        found += capabilities.get("add", [])
        if context.get("privileged"):
            found.append("privileged")
        if level == "baseline":
            continue
        if context.get("allowPrivilegeEscalation") is not False:
            found.append("allowPrivilegeEscalation")
        if capabilities.get("drop") != ["ALL"]:
            found.append("drop")
        if context.get("runAsNonRoot") is not True or context.get("runAsUser") == 0:
            found.append("runAsNonRoot")
        if context.get("seccompProfile") != {"type": "RuntimeDefault"}:
            found.append("seccompProfile")
    return found


@pytest.mark.parametrize("gpu", ["mi300x", "mi355x", "h200"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"claim": "runs", "token_secret": "hf", "queue": "team"},
        {"user": "4321:99", "groups": ("109",), "service_account": "trainer"},
        {"rdma": "rdma/hca=8", "user": "1000"},
        {"priority_class": "high", "pull_policy": "Always", "environment": ("HOME=/x",)},
    ],
)
def test_pods_are_admitted_by_restricted(gpu: str, options: dict[str, Any]) -> None:
    pod = pod_of(made(gpu, **options))
    assert faults(pod, "restricted") == []
    assert Cluster(image="a", **options).security().startswith("restricted")


@pytest.mark.parametrize(
    ("options", "exceptions"),
    [
        ({"user": "0"}, []),
        ({"rdma": "rdma/hca"}, ["IPC_LOCK"]),
        ({"host_network": True}, ["hostNetwork"]),
        ({"rdma": "rdma/hca", "host_network": True}, ["hostNetwork", "IPC_LOCK"]),
        ({"host_network": True, "user": "7"}, ["hostNetwork"]),
    ],
)
def test_what_exceeds_baseline_is_named(options: dict[str, Any], exceptions: list[str]) -> None:
    assert faults(pod_of(made(**options)), "baseline") == exceptions
    sentence = Cluster(image="a", **options).security()
    assert sentence.startswith("baseline")
    assert ("must allow privileged pods" in sentence) == bool(exceptions)
    for word in exceptions:
        assert word.replace("hostNetwork", "--host-network") in sentence


LEVELS = ("privileged", "baseline", "restricted")
RULES: dict[str, Any] = yaml.safe_load((FIXTURES / "kube_manifests.yaml").read_text())


@pytest.mark.parametrize("name", RULES["admitted"])
def test_the_plan_names_the_strictest_level_that_admits_the_pods(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kubernetes' own library judges the same: pod-security-admission 0.32 did so once, by hand."""
    level, words = RULES["admitted"][name]
    words = list(words)
    if "--patch" in words:
        place = words.index("--patch") + 1
        (tmp_path / "patch.yaml").write_text(RULES["patches"][words[place]])
        words[place] = str(tmp_path / "patch.yaml")
    assert main([*WORDS, "--dry-run", *words]) == 0
    out = capsys.readouterr().out
    *_, job = yaml.safe_load_all(out)
    for stricter in LEVELS[1:]:
        admitted = LEVELS.index(stricter) <= LEVELS.index(level)
        assert (faults(job["spec"]["template"], stricter) == []) == admitted, stricter
    if "--patch" not in words:
        shown = "baseline" if level == "privileged" else level
        assert f"Pod Security {shown}" in out
        assert ("must allow privileged pods" in out) == (level == "privileged")


@pytest.mark.parametrize(
    ("gpu", "options", "requests"),
    [
        ("mi300x", {}, {"cpu": "64", "memory": "512Gi"}),
        ("h200", {"cpu": "96", "memory": "1Ti"}, {"cpu": "96", "memory": "1Ti"}),
        ("mi355x", {"cpu": "500m"}, {"cpu": "500m", "memory": "512Gi"}),
        ("cpu", {}, {"cpu": "4", "memory": "16Gi"}),
    ],
)
def test_pods_request_cpus_and_memory(
    gpu: str, options: dict[str, Any], requests: dict[str, str]
) -> None:
    resources = pod_of(made(gpu, **options))["spec"]["containers"][0]["resources"]
    assert resources["requests"] == requests
    assert resources.get("limits", {}).get("memory") == options.get("memory")


def test_a_user_without_a_name_has_a_home_and_a_login() -> None:
    def environment(**options: Any) -> dict[str, str]:
        rows = pod_of(made(**options))["spec"]["containers"][0]["env"]
        return {row["name"]: row["value"] for row in rows if "value" in row}

    assert environment()["HOME"] == "/tmp"
    assert environment()["USER"] == "primus"
    assert pod_of(made())["spec"]["securityContext"]["runAsUser"] == 1000
    assert environment(environment=("HOME=/x",))["HOME"] == "/x"
    assert "HOME" not in environment(user="0")


def test_the_results_of_a_pod_without_a_claim_have_a_place() -> None:
    volumes = pod_of(made())["spec"]["volumes"]
    assert volumes[1:] == [{"name": "runs", "emptyDir": {}}]
    claimed = pod_of(made(claim="a"))["spec"]["volumes"]
    assert claimed[1:] == [{"name": "runs", "persistentVolumeClaim": {"claimName": "a"}}]


def test_pods_get_a_token_of_the_cluster_only_with_an_account_that_calls_it() -> None:
    assert pod_of(made())["spec"]["automountServiceAccountToken"] is False
    called = pod_of(made(service_account="trainer"))["spec"]
    assert called["serviceAccountName"] == "trainer"
    assert "automountServiceAccountToken" not in called


def test_more_options_reach_the_job() -> None:
    service, job = made(
        user="5:6",
        groups=("109",),
        service_account="trainer",
        priority_class="high",
        labels=("team=a",),
        annotations=("example.com/owner=b c",),
        tolerations=("dedicated=train:NoSchedule", "spot", "x:NoExecute"),
        pull_policy="Always",
    )
    pod = job["spec"]["template"]
    spec = pod["spec"]
    for item in (service, job, pod):
        assert item["metadata"]["labels"]["team"] == "a"
        assert item["metadata"]["annotations"] == {"example.com/owner": "b c"}
    assert service["spec"]["selector"] == {"app.kubernetes.io/name": "primus-llama3-1-8b"}
    assert spec["securityContext"]["runAsUser"] == 5
    assert spec["securityContext"]["fsGroup"] == 6
    assert spec["securityContext"]["supplementalGroups"] == [109]
    assert (spec["serviceAccountName"], spec["priorityClassName"]) == ("trainer", "high")
    assert "automountServiceAccountToken" not in spec
    assert spec["containers"][0]["imagePullPolicy"] == "Always"
    assert spec["tolerations"] == [
        {"key": "amd.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "dedicated", "operator": "Equal", "value": "train", "effect": "NoSchedule"},
        {"key": "spot", "operator": "Exists"},
        {"key": "x", "operator": "Exists", "effect": "NoExecute"},
    ]


@pytest.mark.parametrize(
    "words",
    [
        ["--user=me"],
        ["--user=1:2:3"],
        ["--group=render"],
        ["--label=team"],
        ["--label=app.kubernetes.io/name=x"],
        ["--annotation=x"],
        ["--toleration=a=b:Never"],
        ["--service-account=A_b"],
        ["--priority-class=High"],
        ["--pull-policy=Often"],
        ["--label=token=hf_aaaaaaaaaaaaaaaaaaaaaaaaa"],
    ],
)
def test_bad_options_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--dry-run", *words]) == 2
    assert words[0].partition("=")[0] in capsys.readouterr().err.replace("token", "--label")


def test_a_script_is_printed_as_a_literal_block(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--claim", "runs", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "        - |\n          if [ -e /dev/kfd ]" in out
    assert "\n          run_ranks() {" in out
    _, job = yaml.safe_load_all(out)
    assert job == made(image="a:mi300x", claim="runs")[1]


PATCH = """\
spec:
  ttlSecondsAfterFinished: null
  template:
    spec:
      schedulerName: volcano
      containers:
      - name: node
        env: [{name: A, value: b}, {name: NODE_NAME, $patch: delete}]
        resources: {limits: {cpu: 4}}
      - {name: side, image: log:1}
      tolerations: [{operator: Exists}]
---
kind: Service
metadata: {labels: {x: y}}
"""


def test_a_patch_is_merged_as_kubernetes_does(tmp_path: Path) -> None:
    (tmp_path / "patch.yaml").write_text(PATCH)
    before = made()[1]
    service, job = made(patch=tmp_path / "patch.yaml")
    assert service["metadata"]["labels"]["x"] == "y"
    assert "ttlSecondsAfterFinished" not in job["spec"]
    spec = job["spec"]["template"]["spec"]
    node, side = spec["containers"]
    assert spec["schedulerName"] == "volcano"
    assert side == {"name": "side", "image": "log:1"}
    assert spec["tolerations"] == [{"operator": "Exists"}]
    names = [row["name"] for row in node["env"]]
    assert "A" in names
    assert "NODE_NAME" not in names
    assert "MASTER_ADDR" in names
    assert node["resources"]["limits"] == {"amd.com/gpu": 8, "cpu": 4}
    assert node["command"] == before["spec"]["template"]["spec"]["containers"][0]["command"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kind: Jobs\n", "no object of kind 'Jobs'\n  → did you mean 'Job'?"),
        ("kind: Pod\n", "no object of kind 'Pod'\n  → kinds: Service, Job"),
        ("- a\n", "a patch is a mapping"),
        ("spec: {template: {spec: {containers: [{image: a}]}}}", "needs name"),
        ("spec: {template: {spec: {containers: [a]}}}", "needs name"),
        ("a: b: c\n", "not YAML"),
        (f"metadata: {{labels: {{a: hf_{'a' * 30}}}}}\n", "looks like a secret"),
    ],
)
def test_a_bad_patch_is_a_sentence(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "patch.yaml").write_text(text)
    with pytest.raises(InputError, match=re.escape(said)):
        made(patch=tmp_path / "patch.yaml")


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


def test_a_job_without_restarts_resumes_where_it_is_told() -> None:
    told = made(**{**FULL, "restarts": 0, "resume_from": "/workspace/runs/my x"})
    assert "--resume-from '/workspace/runs/my x'" in json.dumps(told)
    assert "--resume-from" not in json.dumps(made(**{**FULL, "restarts": 0, "resume_from": ""}))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"image": ""}, "--image is missing"),
        ({"resume_from": "/workspace/runs/x"}, "--resume-from needs --claim NAME"),
    ],
)
def test_a_job_without_what_it_needs_is_refused(options: dict[str, str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Cluster(**{"image": "a/b:c", **options})


def test_a_jobset_has_the_job_in_it() -> None:
    _, job = made(queue="team", claim="runs")
    (jobset,) = made(queue="team", claim="runs", jobset=True)
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert jobset["metadata"]["labels"] == job["metadata"]["labels"]
    assert jobset["spec"]["suspend"] is True
    assert jobset["spec"]["ttlSecondsAfterFinished"] == 86400
    name = jobset["metadata"]["name"]
    assert jobset["spec"]["network"]["subdomain"] == name
    (one,) = jobset["spec"]["replicatedJobs"]
    inner = one["template"]["spec"]
    assert set(job["spec"]) - set(inner) == {"suspend", "ttlSecondsAfterFinished"}
    spec = inner["template"]["spec"]
    # The host of a pod is named JOBSET-JOB-NUMBER-INDEX.
    address = {"name": "MASTER_ADDR", "value": f"{name}-{one['name']}-0-0.{name}"}
    assert address in spec["containers"][0]["env"]
    assert spec["volumes"] == job["spec"]["template"]["spec"]["volumes"]


def test_a_patch_of_the_job_reaches_the_jobset(tmp_path: Path) -> None:
    (tmp_path / "patch.yaml").write_text("spec: {template: {spec: {schedulerName: volcano}}}\n")
    (jobset,) = made(jobset=True, patch=tmp_path / "patch.yaml")
    (one,) = jobset["spec"]["replicatedJobs"]
    assert one["template"]["spec"]["template"]["spec"]["schedulerName"] == "volcano"


def test_the_pods_of_a_jobset_are_judged(
    objects: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REFUSED_POD", "(Forbidden): violates PodSecurity")
    assert main([*WORDS, "--jobset"]) == 2
    assert "does not take the job's pods" in capsys.readouterr().err
    monkeypatch.delenv("REFUSED_POD")
    assert main([*WORDS, "--jobset"]) == 0
    assert names_in(objects) == {"jobset-primus-llama3-1-8b"}


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
if words[0] == "version":
    print('{"clientVersion": {"gitVersion": "v1.20.2"}, "serverVersion": {"gitVersion": "%%s"}}'
          %% os.environ.get("VERSION", "v1.36.0-gke.1"))
if broken := os.environ.get("BROKEN"):
    sys.exit(broken)
if words[0] == "create":
    for item in json.load(sys.stdin)["items"]:
        file = folder / f"{item['kind'].lower()}-{item['metadata']['name']}"
        if item["kind"] == "Pod" and (refusal := os.environ.get("REFUSED_POD")):
            sys.exit(f"Error from server {refusal}")
        if item["kind"].lower() == os.environ.get("REFUSE"):
            sys.exit("Error from server (Forbidden): jobs is forbidden")
        if file.exists():
            sys.exit("Error from server (AlreadyExists): there is one")
        if warning := os.environ.get("WARNING"):
            print("Warning:", warning, file=sys.stderr)
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


@pytest.mark.parametrize(
    ("version", "code"), [("v1.26.15", 3), ("v1.20.2", 3), ("v1.27.0", 0), ("v2.0.1+k3s1", 0)]
)
def test_an_old_server_is_refused(
    version: str,
    code: int,
    objects: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("VERSION", version)
    assert main(WORDS) == code
    assert ("Kubernetes 1.27 or newer is needed" in capsys.readouterr().err) == bool(code)
    assert bool(names_in(objects)) is not bool(code)


def test_a_warning_of_the_cluster_is_shown_once(
    objects: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "would violate PodSecurity restricted:latest"
    monkeypatch.setenv("WARNING", text)
    assert main(WORDS) == 0
    shown = capsys.readouterr().err
    # It comes with each of the two objects.
    assert shown.count(f"the cluster warns: {text}") == 2


@pytest.mark.parametrize(
    ("refusal", "hint"),
    [
        (
            '(Forbidden): violates PodSecurity "restricted:latest": runAsNonRoot',
            "--namespace names",
        ),
        ("(Forbidden): failed quota: all: must specify limits.cpu", "--patch FILE that of CPUs"),
        ("(Forbidden): no PriorityClass with name high was found", "--priority-class names"),
        ("(Forbidden): maximum cpu usage per Container is 32, but limit is 64", "--cpu and"),
        ("(Forbidden): a policy of this cluster says no", "`kubectl describe namespace`"),
    ],
)
def test_a_job_whose_pods_are_refused_is_not_submitted(
    refusal: str,
    hint: str,
    objects: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("REFUSED_POD", refusal)
    assert main(WORDS) == 2
    err = capsys.readouterr().err
    assert f"does not take the job's pods: kubectl: Error from server {refusal}\n  → " in err
    assert hint in err
    assert names_in(objects) == set()


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        ("(Forbidden): exceeded quota: all, requested: pods=2", "the pods wait for room"),
        ('(Forbidden): User "me" cannot create resource "pods"', ""),
        ("(BadRequest): admission webhook does not support dry run", ""),
    ],
)
def test_pods_that_may_be_admitted_later_do_not_stop_a_job(
    refusal: str,
    said: str,
    objects: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("REFUSED_POD", refusal)
    assert main(WORDS) == 0
    err = capsys.readouterr().err
    assert said in err
    assert bool(said) == ("kubectl" in err)
    assert len(names_in(objects)) == 2


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


@pytest.mark.parametrize(("rdma", "count"), [("rdma/hca", 1), ("rdma/hca=1", 1), ("rdma/hca=8", 8)])
def test_a_pod_asks_for_as_many_devices_as_named_or_for_one(rdma: str, count: int) -> None:
    limits = pod_of(made(rdma=rdma))["spec"]["containers"][0]["resources"]["limits"]
    assert limits["rdma/hca"] == count


@pytest.mark.parametrize(
    ("claim", "restarts", "again"), [("", 20, False), ("runs", 0, False), ("runs", 1, True)]
)
def test_a_pod_starts_its_ranks_again_only_with_a_claim_and_restarts(
    claim: str, restarts: int, again: bool
) -> None:
    pod = pod_of(made(claim=claim, restarts=restarts))["spec"]
    script = json.dumps(pod["containers"])
    assert ("run_ranks" in script) is again


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
