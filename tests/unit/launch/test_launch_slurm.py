import os
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from primus_images.cli.main import main
from primus_images.errors import InputError
from primus_images.launch import slurm
from primus_images.launch.plan import Plan, refuse_secrets
from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from tables import table_of

SITE = slurm.Site(
    container="docker", image="rocm/primus:v26.11-mi300x", output=Path("/shared/my runs")
)


def plan(*words: str, nodes: int = 8, gpu: str = "mi300x", recipe: str = "llama3.1-70b") -> Plan:
    return Plan(recipe=resolve(recipe, words, Choices(nodes=nodes, gpu=gpu)))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 30 * 60),
        ("1:30", 90),
        ("1:30:00", 90 * 60),
        ("1-0", 86_400),
        ("1-12", 36 * 3600),
        ("1-12:30", 36 * 3600 + 30 * 60),
        ("0", None),
        ("UNLIMITED", None),
    ],
)
def test_a_time_limit_is_read_as_slurm_reads_it(text: str, seconds: int | None) -> None:
    """As sbatch's manual has it: after days come hours, a number alone is minutes."""
    assert slurm.limit_of(text) == seconds


def test_the_warning_must_come_after_the_start() -> None:
    assert slurm.Site(time="10", grace=599).grace == 599
    assert slurm.Site(time="0", grace=600).grace == 600, "no limit"
    for grace in (600, 601):
        with pytest.raises(InputError, match="the job would be told to end at its start"):
            slurm.Site(time="10", grace=grace)


@pytest.mark.parametrize("container", slurm.CONTAINERS)
@pytest.mark.parametrize("gpu", ["mi300x", "h200"])
def test_every_script_is_one_that_bash_accepts(container: slurm.Container, gpu: str) -> None:
    site = slurm.Site(
        container=container,
        image="a/b:c",
        output=Path("/shared/my runs"),
        environment=("A=it's", "HF_TOKEN"),
    )
    text = slurm.script(plan(gpu=gpu, recipe="llama3.1-8b"), site)
    assert (
        subprocess.run(
            ["bash", "-n"], input=text, text=True, capture_output=True, check=False
        ).stderr
        == ""
    )
    assert ("--device /dev/kfd" in text) == (gpu == "mi300x" and container in ("docker", "podman"))
    # Comments of sbatch end at the first command.
    assert text.index("#SBATCH --nodes=8") < text.index("set -uo")


def test_the_script_names_the_plan_first_and_asks_for_what_the_job_needs() -> None:
    text = slurm.script(plan("lr=1e-4"), SITE)
    for line in (
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --requeue",
        "#SBATCH --signal=B:USR1@60",
        "# nodes        8 × 8 ranks = 64",
        "tokens",
        "--kill-on-bad-exit=0 --wait=60",
        "torchtitan.optimizer.lr=1e-4",
        "--gpu=mi300x",
        "scontrol show hostnames",
        "RDZV_ID=$SLURM_JOB_ID-$attempt",
    ):
        assert line in text, line
    assert str(Path.cwd()) not in text


def test_the_name_of_a_secret_is_passed_on() -> None:
    site = slurm.Site(container="docker", image="a", environment=("HF_TOKEN",))
    assert "-e HF_TOKEN" in slurm.script(plan(), site)


def test_a_recipe_file_of_the_user_is_mounted_and_named_by_its_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").write_text("uses: [llama3.1-8b.yaml]\nname: mine\n")
    monkeypatch.chdir(tmp_path)
    for name in ("mine.yaml", "./mine.yaml"):
        text = slurm.script(plan(recipe=name), SITE)
        assert f"train {tmp_path}/mine.yaml --backend" in text
        assert f"-v {tmp_path}:{tmp_path}" in text


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["steps=500"], "none: a restarted job begins at step 1"),
        (["steps=501"], "every 30 minutes"),
        (["steps=501", "checkpoint=0"], "none: a restarted job begins at step 1"),
        (["steps=501", "checkpoint=100"], "every 100 steps"),
        (["checkpoint=90s"], "every 1.5 minutes"),
    ],
)
def test_the_plan_says_when_checkpoints_are_saved(words: list[str], line: str) -> None:
    assert f"# checkpoints  {line}" in slurm.script(plan(*words), SITE)


def body(
    tmp_path: Path,
    srun: str,
    *,
    restart: int = 0,
    steps: int = 50,
    resume_from: str = "",
    job: int = 7,
    port: int = 0,
) -> subprocess.CompletedProcess[str]:
    """Run a rendered script for real; Slurm's commands are small scripts that note how they were
    called.
    """
    tools = tmp_path / "bin"
    tools.mkdir(exist_ok=True)
    calls = tmp_path / "calls"
    for name, text in {
        "srun": srun,
        "scontrol": (
            'case "$*" in ping) if [[ -e $0.away ]]; then rm "$0.away"; echo "S at h is DOWN"; '
            'else echo "S at h is UP"; fi;; *job*) echo "JobId=7 StartTime=2026-11-30T05:00:04 '
            'PreemptTime=$(cat "$0.preempt" 2>/dev/null || echo None) SuspendTime=None";; '
            "*hostnames*) echo n1; echo n2;; "
            '*node*) echo "NodeName=n NodeAddr=127.0.0.2 BootTime=$(cat "$0.boot" 2>/dev/null) '
            'SlurmdStartTime=$(cat "$0.${@: -1}" 2>/dev/null) Y=1";; esac'
        ),
        # A second where the script gives the ranks 60 to end.
        "sleep": "[[ $1 != 60 ]] || exec /bin/sleep 1",
    }.items():
        (tools / name).write_text(f'#!/bin/bash\necho {name} "$@" >> {calls}\n{text}\n')
        (tools / name).chmod(0o755)
    site = slurm.Site(output=tmp_path / "runs", restarts=3, resume_from=resume_from, port=port)
    text = slurm.script(plan(f"steps={steps}", nodes=2), site)
    environment = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(job),
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_RESTART_COUNT": str(restart),
    }
    return subprocess.run(
        ["bash", "-c", text], env=environment, capture_output=True, text=True, check=False
    )


def checkpoint(tmp_path: Path, attempt: int, step: int, *, whole: bool = True) -> None:
    folder = tmp_path / f"runs/7/attempt-{attempt}/checkpoint/step-{step}"
    folder.mkdir(parents=True)
    (folder / ".metadata").touch()
    if whole:
        (folder / "recipe.json").touch()


def test_a_restarted_job_takes_the_newest_whole_checkpoint_before_the_last_step(
    tmp_path: Path,
) -> None:
    checkpoint(tmp_path, 0, 8)
    checkpoint(tmp_path, 1, 20)
    checkpoint(tmp_path, 1, 30, whole=False)
    checkpoint(tmp_path, 1, 50)
    done = body(
        tmp_path,
        'echo "from $RESUME_FROM to $OUTPUT at $MASTER_ADDR:$MASTER_PORT $RDZV_ID"',
        restart=2,
    )
    assert done.returncode == 0, done.stderr
    assert "attempt-1/checkpoint/step-20 to" in done.stdout
    assert re.search(r"7/attempt-2 at 127\.0\.0\.2:20009 7-2", done.stdout)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2"])
def test_ranks_do_not_meet_at_a_port_that_is_taken(tmp_path: Path, address: str) -> None:
    job = 1000 + os.getpid() % 10000
    with socket.create_server((address, 20000 + job)):
        done = body(tmp_path, 'echo "at $MASTER_PORT"', job=job)
    assert int(done.stdout.removeprefix("at ").split()[0]) > 20000 + job, done.stderr


def test_a_port_that_the_user_chose_is_not_another_programs(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.2", 0)) as other:
        port = other.getsockname()[1]
        done = body(tmp_path, "exit", port=port)
    assert done.returncode == 3
    assert f"--port {port} is taken on node n1: choose another one" in done.stderr
    assert "srun" not in (tmp_path / "calls").read_text()
    assert body(tmp_path, "exit", port=port).returncode == 0


@pytest.mark.parametrize(("port", "requeued"), [(0, True), (29999, False)])
def test_a_port_that_was_taken_before_the_ranks_opened_it_requeues(
    port: int, requeued: bool, tmp_path: Path
) -> None:
    """The next attempt chooses another one, but for that of --port."""
    text = 'mkdir -p "$OUTPUT"; echo "code: -98, name: EADDRINUSE" > "$OUTPUT/log.txt"; exit 1'
    done = body(tmp_path, f"[[ $* == *--overlap* ]] || {{ {text}; }}", port=port)
    assert ("was taken meanwhile; requeued" in done.stderr) is requeued
    assert ("failed with exit code 1" in done.stderr) is not requeued


def test_a_folder_that_a_node_does_not_see_is_named(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere/7"
    task = 'export OUTPUT=FOLDER/attempt-0 SLURMD_NODENAME=n2; exec "${@: -3}"'
    done = body(
        tmp_path, f"[[ $* == *--overlap* ]] || {{ {task.replace('FOLDER', str(elsewhere))}; }}"
    )
    assert done.returncode == 3
    assert f"node n2 has no {elsewhere}, which the first node made: --output must be" in done.stderr


def test_a_job_continues_another_run_until_it_has_checkpoints_of_its_own(tmp_path: Path) -> None:
    earlier = str(tmp_path / "an earlier run")
    done = body(tmp_path, 'echo "from $RESUME_FROM"', resume_from=earlier)
    assert f"from {earlier}\n" in done.stdout, done.stderr
    assert f"continuing from {earlier}" in done.stderr
    checkpoint(tmp_path, 0, 8)
    done = body(tmp_path, 'echo "from $RESUME_FROM"', resume_from=earlier, restart=1)
    assert "attempt-0/checkpoint/step-8\n" in done.stdout


@pytest.mark.parametrize(
    ("image", "imported"),
    {
        "rocm/primus:v1": "rocm/primus:v1",
        "docker.io/rocm/primus:v1": "rocm/primus:v1",
        "/data/a.sqsh": "/data/a.sqsh",
        "registry.site/team/primus:v1": "registry.site#team/primus:v1",
        "node7:5000/primus": "node7:5000#primus",
        "docker://ghcr.io/a/b:c": "docker://ghcr.io#a/b:c",
        "nvcr.io#nvidia/pytorch:1": "nvcr.io#nvidia/pytorch:1",
        "me@ghcr.io#a/b": "me@ghcr.io#a/b",
    }.items(),
)
def test_pyxis_imports_an_image_from_its_registry(image: str, imported: str) -> None:
    text = slurm.script(plan(), slurm.Site(container="pyxis", image=image))
    assert re.search(r"--container-image=(\S+)", text)[1].strip("'") == imported  # type: ignore[index]


@pytest.mark.parametrize(
    ("container", "image", "run"),
    [
        ("docker", "a/b:c", "a/b:c"),
        ("podman", "a/b:c", "a/b:c"),
        ("apptainer", "a/b:c", "docker://a/b:c"),
        ("apptainer", "docker://a/b:c", "docker://a/b:c"),
        ("apptainer", "/data/a.sif", "/data/a.sif"),
    ],
)
def test_the_engine_runs_the_image_with_the_folders_and_variables_of_the_run(
    container: slurm.Container, image: str, run: str
) -> None:
    site = slurm.Site(container=container, image=image, output=Path("/shared/runs"))
    (line,) = [
        line
        for line in slurm.script(plan(), site).splitlines()
        if re.search(rf"\b{container} (run|exec) ", line)
    ]
    words = line.split()
    assert run in words
    before = " ".join(words[: words.index(run)])
    assert "/shared/runs" in before
    # apptainer passes on all variables.
    assert ("MASTER_ADDR" in before) == (container != "apptainer")


_HUB = "hf_" + "a" * 20
_GITHUB = "ghp_" + "a" * 20
_WANDB = "0123456789" * 4


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        # By its form, whatever its name.
        (_HUB, "hf_aaa…"),
        (f"A={_HUB}", "A"),
        (f"--auth={_GITHUB}", "--auth"),
        (f"key {_WANDB}", "key 01…"),
        ("X=Bearer abc", "X"),
        # By its name, whatever its form.
        ("HF_TOKEN=hunter2", "HF_TOKEN"),
        ("api_key=hunter2", "api_key"),
        ("PASSWORD=hunter2", "PASSWORD"),
    ],
)
def test_a_secret_is_refused_and_not_shown(word: str, shown: str) -> None:
    with pytest.raises(InputError) as caught:
        refuse_secrets(["A=b", word], "export it")
    assert caught.value.message.startswith(f"{shown}: this looks like a secret")
    for secret in (_HUB, _GITHUB, _WANDB, "hunter2"):
        assert secret not in str(caught.value)


@pytest.mark.parametrize("word", ["HF_TOKEN", "HF_TOKEN=", "TOKENIZER=a", "KEYS=b", "hf_short", ""])
def test_what_only_names_a_secret_is_accepted(word: str) -> None:
    refuse_secrets([word], "export it")


@pytest.mark.parametrize(("gpu", "gpus"), [("cpu", None), ("mi300x", "8")])
def test_a_node_is_asked_for_the_gpus_that_the_ranks_use(gpu: str, gpus: str | None) -> None:
    words = ("proxy=true",) if gpu == "cpu" else ()
    made = plan(*words, nodes=1, gpu=gpu, recipe="llama3.1-8b")
    text = slurm.script(made, slurm.Site(container="none"))
    asked = dict(re.findall(r"#SBATCH --(\S+)=(\S+)", text))
    assert asked.get("gpus-per-node") == gpus
    assert (asked["nodes"], asked["ntasks-per-node"]) == ("1", "1")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"image": "Not An Image"}, "'Not An Image' is not the name of an image"),
        ({"output": Path("/shared/a:b")}, "--output: /shared/a:b contains : or ,"),
        ({"resume_from": "/shared/a,b"}, "--resume-from: /shared/a,b contains : or ,"),
    ],
)
def test_what_containers_cannot_take_is_refused_for_them_alone(
    options: dict[str, Any], says: str
) -> None:
    with pytest.raises(InputError, match=re.escape(says)):
        slurm.Site(**{"container": "podman", "image": "a/b:c", **options})
    if "image" not in options:
        slurm.Site(container="none", **options)


def test_the_exit_code_of_the_ranks_is_the_jobs(tmp_path: Path) -> None:
    done = body(tmp_path, "[[ $* == *--overlap* ]] || exit 9")
    assert done.returncode == 9
    assert "failed with exit code 9" in done.stderr
    assert "requeue" not in (tmp_path / "calls").read_text()


def test_a_node_that_does_not_answer_requeues_until_the_limit(tmp_path: Path) -> None:
    lost = "[[ $* == *--nodelist=n2* ]] && exit 1; [[ $* == *--overlap* ]] || exit 9"
    done = body(tmp_path, lost)
    assert "node n2 does not answer; requeued" in done.stderr
    assert "scontrol requeue 7" in (tmp_path / "calls").read_text()
    (tmp_path / "calls").unlink()
    assert "not requeued" in body(tmp_path, lost, restart=3).stderr
    assert "scontrol requeue" not in (tmp_path / "calls").read_text()


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_a_node_that_is_back_before_slurm_missed_it_requeues(tmp_path: Path, node: str) -> None:
    again = f"[[ $* == *--overlap* ]] && exit; echo later > {tmp_path}/bin/scontrol.{node}; exit 1"
    done = body(tmp_path, again)
    assert f"node {node} was restarted; requeued" in done.stderr
    assert "scontrol requeue 7" in (tmp_path / "calls").read_text()
    # A node that was restarted before this attempt is none that was lost in it.
    (tmp_path / "calls").unlink()
    assert "failed with exit code 1" in body(tmp_path, again).stderr
    assert "scontrol requeue" not in (tmp_path / "calls").read_text()


@pytest.mark.parametrize(
    ("boot", "ends"), [("2026-11-30T05:04:12", True), ("2026-11-30T05:00:09", False)]
)
def test_a_node_that_boots_ends_ranks_that_wait_for_it(
    boot: str, ends: bool, tmp_path: Path
) -> None:
    """The time of the same boot varies by some seconds."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "scontrol.boot").write_text("2026-11-30T05:00:04")
    waits = 'trap "echo ended; exit 143" TERM; for i in {1..30}; do /bin/sleep 0.1; done'
    again = f"echo {boot} > {tools}/scontrol.boot; echo later > {tools}/scontrol.n2"
    done = body(tmp_path, f"[[ $* == *--overlap* ]] || {{ {again}; {waits}; exit 0; }}")
    assert ("ended" in done.stdout) is ends
    assert ("node n2 was restarted; requeued" in done.stderr) is ends
    assert done.returncode == int(ends)


def test_a_job_that_failed_waits_for_the_controller_to_ask_for_its_nodes(tmp_path: Path) -> None:
    away = tmp_path / "bin/scontrol.away"
    done = body(tmp_path, f"[[ $* == *--overlap* ]] && exec [ ! -e {away} ]; touch {away}; exit 9")
    assert done.returncode == 9
    assert "requeue" not in (tmp_path / "calls").read_text()


def test_a_node_whose_ranks_slurm_still_counts_is_asked_again(tmp_path: Path) -> None:
    refused = f"[[ -e {tmp_path}/asked ]] || {{ touch {tmp_path}/asked; exit 1; }}"
    done = body(tmp_path, f"[[ $* == *--overlap* ]] || exit 9; {refused}")
    assert done.returncode == 9
    assert "requeue" not in (tmp_path / "calls").read_text()


@pytest.mark.parametrize(
    ("time", "requeued"), [("2026-11-30T05:00:04", True), ("2026-11-30T04:59:00", False)]
)
def test_a_preemption_of_which_only_the_ranks_were_told_requeues(
    time: str, requeued: bool, tmp_path: Path
) -> None:
    """Without send_user_signal, Slurm ends the steps, and lets the script go on."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "scontrol.preempt").write_text(time)
    done = body(tmp_path, "[[ $* == *--overlap* ]] || exit 143")
    assert ("the job was preempted; requeued" in done.stderr) is requeued
    assert ("failed with exit code 143" in done.stderr) is not requeued


@pytest.mark.parametrize(
    ("version", "code"),
    [
        ("slurm 20.02.7", 3),
        ("slurm-wlm 19.05.5", 3),
        ("slurm 20.11.0", 0),
        ("slurm-wlm 22.05.8", 0),
        ("slurm 25.11.0-0rc1", 0),
        ("something else", 0),
    ],
)
def test_an_old_slurm_is_refused(
    version: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    program = tmp_path / "sbatch"
    program.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "{version}" || echo 5\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    words = ["launch", "slurm", "llama3.1-8b", "--gpu", "mi300x", "--output", str(tmp_path / "out")]
    assert main(words) == code
    if code:
        assert "Slurm 20.11 or newer is needed" in capsys.readouterr().err


def test_docker_runs_as_the_user_of_the_job(tmp_path: Path) -> None:
    site = slurm.Site(container="docker", image="a/b:c", output=Path("/shared"))
    text = slurm.script(plan(), site)
    command = re.search(r"exec (docker run .*?) -v ", text)
    assert command is not None
    for rootless, expected in (
        (False, f"--user {os.getuid()}:{os.getgid()} -e HOME=/tmp"),
        (True, ""),
    ):
        docker = tmp_path / "docker"
        docker.write_text(f"#!/bin/sh\n[ $1 = run ] || echo {'rootless' if rootless else ''}\n")
        docker.chmod(0o755)
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        script = f"set -x; {command[1]}"
        traced = subprocess.run(
            ["bash", "-c", script], env=environment, capture_output=True, text=True, check=False
        ).stderr
        started = traced.strip().splitlines()[-1]
        assert started.startswith("+ docker run")
        assert expected in started
        assert ("--user" in started) is not rootless


def test_a_warning_ends_the_ranks_and_requeues(tmp_path: Path) -> None:
    said = body(
        tmp_path,
        'trap "echo ended; exit 143" TERM; kill -USR1 $PPID; for i in {1..100}; do /bin/sleep '
        "0.1; done",
    )
    assert "ended" in said.stdout
    assert "the job was told to end; requeued" in said.stderr


@pytest.mark.parametrize(
    ("sbatch", "srun", "code", "says"), table_of("launch_slurm.what_sbatch_and_srun_print_is_read")
)
def test_what_sbatch_and_srun_print_is_read(
    sbatch: str,
    srun: str,
    code: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, text in (("sbatch", sbatch), ("srun", srun)):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.chdir(tmp_path)
    assert (
        main(["launch", "slurm", "llama3.1-8b", "--gpu", "mi300x", "--nodes", "2", "--image", "a"])
        == code
    )
    out, err = capfd.readouterr()
    assert says in out + err
    assert len(out + err) < 2000


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("checkpoint_interval=500", "due every 500 steps, and the job ends at step 50"),
        ("checkpoint_interval=50", "due every 50 steps, and the job ends at step 50"),
        ("checkpoint_interval=49", ""),
        ("checkpoint_interval=500 epochs=1", ""),
        ("--image a/b:c-mi325x --container docker", ""),
        (
            "--image a/b:c-mi355x --container docker",
            "the image is named for mi355x, but the nodes have",
        ),
        ("--env PRIMUS_NOT_SET", "--env PRIMUS_NOT_SET: it is not set here"),
        ("--image a/b:c-mi300x --container none", "the nodes run their own primus"),
    ],
)
def test_options_that_contradict_each_other_are_told(
    words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    start = ["launch", "slurm", "llama3.1-8b", "--gpu", "mi300x", "--backend", "fsdp", "--dry-run"]
    added = [
        word.replace("checkpoint_interval", "training.checkpoint_interval")
        for word in words.split()
    ]
    assert main([*start, *added]) == 0
    _, err = capsys.readouterr()
    assert says in err
    assert bool(err) == bool(says)
