import errno
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from primus_images.cli.main import main
from primus_images.recipes.load import entries
from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from primus_images.training.run import failure, processes, ranks, start
from primus_images.training.run.job import Job
from primus_images.training.run.processes import Watch
from project_kit import alive, until
from proof_kit import kept

SRC = Path(__file__).resolve().parents[3] / "src"


def run(code: str, tmp_path: Path, lines: list[str] | None = None) -> processes.Ended:
    seen: list[str] = [] if lines is None else lines
    return processes.run(
        [sys.executable, "-c", code],
        log=tmp_path / "log.txt",
        environment=os.environ,
        watch=Watch(on_line=seen.append),
    )


def written_pid(file: Path) -> int:
    """Wait for the process that writes its id to ``file``."""
    deadline = time.monotonic() + 20
    while not (file.exists() and file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return int(file.read_text())


def test_the_exit_code_is_the_processes_own_and_the_log_holds_both_streams(tmp_path: Path) -> None:
    lines: list[str] = []
    ended = run(
        "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)", tmp_path, lines
    )
    assert ended.exit_code == 7
    assert sorted((tmp_path / "log.txt").read_text().split()) == ["err", "out"]
    assert sorted(lines) == ["err\n", "out\n"]


def test_steps_are_in_the_metrics_before_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at an interrupt. Each step once, although each rank logs it; start-up is no silence of a
    step.
    """
    step = "step: {}  loss: {}  grad_norm: 1.0  memory: 1.0GiB(1%)  tps: 9  tflops: 1  mfu: N/A"
    code = (
        f"import time; time.sleep(2)\nfor n in (1, 1, 2, 1, 2, 3): print({step!r}.format(n, "
        "n), flush=True)\n"
    )
    monkeypatch.setattr(
        "primus_images.training.run.ranks.argv",
        lambda *_: [sys.executable, "-c", f"{code}time.sleep(60)"],
    )
    job, before = (
        Job(name="job", recipe=resolve("llama3-proxy", (), Choices(gpu="cpu")), output=tmp_path),
        list[int](),
    )

    def written() -> list[int]:
        file = job.output / "metrics.jsonl"
        return (
            [json.loads(line)["step"] for line in file.read_text().splitlines()]
            if file.exists()
            else []
        )

    def follow(line: str) -> None:
        if "step: 3" in line:
            before.extend(written())
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        start.start(job, follow, patience=1)
    assert (before, written()) == ([1, 2], [1, 2, 3])
    assert json.loads((tmp_path / "stopped.json").read_text()) == {"signal": "SIGINT"}


@pytest.mark.parametrize("back", [True, False], ids=["made again by a rank", "gone"])
def test_a_folder_that_was_removed_during_the_run_is_the_cause(
    *, back: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "run"
    output.mkdir()
    code = f"import os, shutil; shutil.rmtree({str(output)!r})"
    if back:
        code += f"; os.makedirs({str(output / 'checkpoint')!r})"
    monkeypatch.setattr(ranks, "argv", lambda *_: [sys.executable, "-c", code])
    recipe = resolve("llama3-proxy", (), Choices(gpu="cpu"))
    job = Job(name="job", recipe=recipe, output=output)
    result = start.start(job, lambda _line: None)
    assert result.exit_code == 1
    assert result.cause == "the folder of the run was removed while it ran"
    failed = [verdict for verdict in result.run.verdicts if not verdict.passed]
    assert [verdict.name for verdict in failed if not verdict.skipped] == ["exit code"]


def test_a_full_disk_ends_the_job_and_keeps_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "GRACE_SECONDS", 2.0)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", tmp_path],
        check=False,
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted: {mounted.stderr.strip()}")
    try:
        code = """
            import time
            try:
                open("DIR/data", "wb", buffering=0).write(bytes(8 << 20))
                open("DIR/data", "ab", buffering=0).write(bytes(8 << 20))
            except OSError as error:
                for number in range(3000):
                    print(number, flush=True)
                print(error, flush=True)
                time.sleep(600)
        """
        lines: list[str] = []
        ended = run(textwrap.dedent(code).replace("DIR", str(tmp_path)), tmp_path, lines)
        assert ended.exit_code == -signal.SIGTERM
        assert len(lines) == 3001
        text = (tmp_path / "log.txt").read_text()
        assert ended.disk_full
        assert text.endswith("\n2999\n[Errno 28] No space left on device\n")
        assert not (tmp_path / ".reserve").exists()
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_ranks_that_were_stopped_with_the_job_are_not_silent(tmp_path: Path) -> None:
    """`scontrol suspend` stops every process of a job, for longer than ranks may be silent."""
    code = """
        import os, sys
        from pathlib import Path
        from primus_images.training.run import processes
        processes._STOPPED_SECONDS = 1.5
        silent = []
        watch = processes.Watch(patience=lambda: 4, on_silence=silent.append)
        ranks = [sys.executable, "-c", "import time; [time.sleep(0.1) for _ in range(20)]"]
        processes.run(ranks, log=Path("log.txt"), environment=os.environ, watch=watch)
        print("silent" if silent else "ended")
    """
    job = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert until((tmp_path / "log.txt").exists)
    time.sleep(0.5)
    started = [job.pid, *processes._children(job.pid)]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in started:
            os.kill(pid, number)
        time.sleep(5 if number == signal.SIGSTOP else 0)
    assert job.communicate(timeout=60)[0] == "ended\n"


# More than a pipe holds, so that the process waits unless it is read.
TALK = "print(*range(50000), sep='\\n')"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_job_goes_on_when_its_lines_cannot_be_shown(tmp_path: Path) -> None:
    shown: list[str] = []

    def show(line: str) -> None:
        shown.append(line)
        raise BrokenPipeError(32, "Broken pipe")

    ended = processes.run(
        [sys.executable, "-c", TALK],
        log=tmp_path / "log.txt",
        environment=os.environ,
        watch=Watch(
            on_line=show, patience=lambda: 5, on_silence=lambda pid: os.kill(pid, signal.SIGKILL)
        ),
    )
    assert ended.exit_code == 0
    assert shown == ["0\n"]
    assert (tmp_path / "log.txt").read_text().splitlines()[-1] == "49999"


def test_the_progress_of_a_job_outlives_its_reader() -> None:
    read, write = os.pipe()
    os.close(read)
    code = (
        "from argparse import Namespace\n"
        "from primus_images.cli.image.train import _Progress\n"
        "progress = _Progress(Namespace(first_step=1, last_step=20), live=False)\n"
        "progress.line('primus: one')\n"
        "progress.line('primus: two')\n"
        "print('here')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=write, check=False
    )
    os.close(write)
    assert (done.returncode, done.stdout) == (0, b"here\n")


def test_a_job_goes_on_when_its_log_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(io.BytesIO):
        def flush(self) -> None:
            raise OSError(errno.EIO, "Input/output error")

        def fileno(self) -> int:
            return 1

    opened = Path.open

    def opening(path: Path, *words: str, **options: object) -> object:
        if path.name == "log.txt":
            return Failing()
        return opened(path, *words, **options)

    monkeypatch.setattr(Path, "open", opening)
    lines: list[str] = []
    ended = run(TALK, tmp_path, lines)
    assert (ended.exit_code, ended.disk_full, len(lines)) == (0, False, 50000)


def test_no_child_outlives_a_launcher_that_was_killed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = (
        "import subprocess, os, time\n"
        "child = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    assert run(code, tmp_path).exit_code == -9
    assert not alive(int(pid_file.read_text()))


def test_the_launcher_ends_when_the_command_is_killed(tmp_path: Path) -> None:
    launcher = (
        f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); "
        "time.sleep(60)"
    )
    code = f"""
        import os, sys
        from pathlib import Path
        from primus_images.training.run import failure, processes
        log = Path({str(tmp_path / "log")!r})
        command = [sys.executable, "-c", {launcher!r}]
        processes.run(command, log=log, environment=os.environ)
    """
    command = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], env=os.environ | {"PYTHONPATH": str(SRC)}
    )
    pid = written_pid(tmp_path / "pid")
    command.kill()
    command.wait()
    deadline = time.monotonic() + 20
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)


def test_ranks_that_wait_for_a_failed_node_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "GRACE_SECONDS", 1.0)
    monkeypatch.setattr(processes, "_LOOK_SECONDS", 0.2)
    started = time.monotonic()
    ended = processes.run(
        [sys.executable, "-c", "import time; time.sleep(60)"],
        log=tmp_path / "log.txt",
        environment=os.environ,
        watch=Watch(should_end=lambda: time.monotonic() - started > 1),
    )
    assert ended.exit_code == -signal.SIGTERM
    assert 2 < time.monotonic() - started < 20


@pytest.fixture
def with_hangup() -> Iterator[None]:
    """SIGHUP ends a process: under nohup, tests inherit that it is ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("with_hangup")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_ranks_and_then_the_command(
    tmp_path: Path, number: signal.Signals
) -> None:
    pid_file = tmp_path / "pid"
    inner = (
        "import os, subprocess, time, signal\n"
        "child = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    outer = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from primus_images.training.run import processes\n"
        "try:\n"
        f"    processes.run([sys.executable, '-c', {inner!r}], "
        f"log=Path({str(tmp_path / 'log.txt')!r}),"
        " environment=os.environ)\n"
        "except KeyboardInterrupt:\n"
        "    sys.exit(130)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", outer], env=os.environ | {"PYTHONPATH": str(SRC)}
    )
    pid = written_pid(pid_file)
    process.send_signal(number)
    assert process.wait(timeout=30) == 130
    assert not alive(pid)


def test_a_signal_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    """As under nohup: the terminal closes, and the training goes on."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert (
            run(f"import os, signal; os.kill({os.getpid()}, signal.SIGHUP)", tmp_path).exit_code
            == 0
        )
    finally:
        signal.signal(signal.SIGHUP, before)


def test_train_dry_run_shows_values_with_their_origins(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--steps", "9", "--dry-run", "--output", str(tmp_path / "x"), "optimizer.lr=0.5"]
    assert main(["train", "llama3-proxy", *words]) == 0
    shown = capsys.readouterr().out
    assert all(
        part in shown
        for part in ("command line: optimizer.lr=0.5", "llama3-proxy.yaml:", "steps 1–9")
    )
    assert not (tmp_path / "x").exists()


def test_a_finished_checkpoint_cannot_be_resumed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    checkpoint = kept(tmp_path / "run/checkpoint/step-20", resolve("llama3-proxy"))
    assert main(["train", "llama3-proxy", "--resume-from", str(tmp_path / "run"), "--dry-run"]) == 2
    assert "already at step 20 of 20" in capsys.readouterr().err
    assert (
        main(
            [
                "train",
                "llama3-proxy",
                "--resume-from",
                str(checkpoint),
                "--steps",
                "30",
                "--dry-run",
            ]
        )
        == 0
    )
    assert "steps 21–30" in capsys.readouterr().out
    assert (
        main(
            [
                "train",
                "llama3-proxy",
                "--resume-from",
                str(checkpoint),
                "--steps=30",
                "--dry-run",
                "seed=9",
            ]
        )
        == 2
    )
    assert "the checkpoint belongs to another run: seed" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["", ".", "here", ":", "{cwd}", "{cwd}:/other", "sub/..:{cwd}/"])
def test_the_current_folder_is_never_on_the_module_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("primus", "torchtitan"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "torch.py").touch()
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "torch.py").touch()
    source = str(SRC)
    variables = processes.clean(
        {"PATH": os.defpath, "PYTHONPATH": f"{path.format(cwd=tmp_path)}:{source}"}
    )
    code = (
        "import importlib.util as u; print(*(u.find_spec(n) and u.find_spec(n).origin for n in "
        + ("('primus_images', 'torchtitan', 'torch')), sep='\\n')")
    )
    found = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True
    )
    assert str(tmp_path) not in found.stdout
    assert found.stdout.startswith(source)


def test_the_current_folder_stays_if_this_package_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SRC)
    assert processes.clean({"PYTHONPATH": f"{SRC}:."})["PYTHONPATH"] == str(SRC)
    assert "PYTHONPATH" not in processes.clean({"PYTHONPATH": f"{SRC}/."})


def test_variables_of_another_torchrun_are_dropped() -> None:
    theirs = {"PET_NNODES": "2", "PET_RDZV_ENDPOINT": "x:1", "TORCHELASTIC_RUN_ID": "1"}
    kept = {
        "NODE_RANK": "0",
        "MASTER_ADDR": "a",
        "PETS": "1",
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "x",
    }
    assert processes.dropped(theirs | kept) == sorted(theirs)
    assert processes.clean(theirs | kept | {"PYTHONOPTIMIZE": "2"}) == kept | {
        "PYTHONSAFEPATH": "1"
    }


# The first rank that fails, and the launcher.
@pytest.mark.parametrize(
    ("rank", "end", "cause"),
    [
        ("1", "os.getpid(), 9", "rank 1: ended by signal 9 (SIGKILL) ("),
        (
            "0",
            "int(os.environ['PRIMUS_LAUNCH']), 15",
            "the launcher of the ranks was ended by SIGTERM",
        ),
    ],
)
def test_what_is_ended_by_a_signal_is_named(
    tmp_path: Path, rank: str, end: str, cause: str
) -> None:
    code = f"import os, time; os.environ['RANK'] == '{rank}' and os.kill({end}); time.sleep(600)"
    words = [
        sys.executable,
        "-m",
        "primus_images.training.run.spawn",
        "3",
        sys.executable,
        "-c",
        code,
    ]
    assert (
        processes.run(
            words, log=tmp_path / "log.txt", environment={"PYTHONPATH": str(SRC)}
        ).exit_code
        == 1
    )
    assert str(failure.cause(tmp_path, 1)).startswith(cause)


@pytest.mark.parametrize("backend", ["torchtitan", "megatron", "finetune", "flux", "fsdp"])
def test_the_command_of_a_rank_names_a_module_that_exists(backend: str, tmp_path: Path) -> None:
    entry = next(entry for entry in entries() if entry.backend == backend)
    choices = Choices(backend=backend, mode=entry.mode, gpu="mi300x", proxy=True)
    job = Job(name="job", recipe=resolve(entry.recipe, [], choices), output=tmp_path)
    words = ranks.argv(job, "python3", {})
    assert words[-3] == "-m"
    assert importlib.util.find_spec(words[-2])


def test_a_resumed_run_evaluates_where_the_run_before_it_did(tmp_path: Path) -> None:
    def every(name: str, former: str | None, *words: str) -> int:
        recipe = resolve("llama3-proxy", ["eval.fraction=0.1", *words], Choices(gpu="cpu"))
        resumed = None
        if former:
            resumed = tmp_path / former / "checkpoint/step-10"
        job = Job(name="job", recipe=recipe, output=tmp_path / name, resume_from=resumed)
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.json").write_text(ranks.job_file(job))
        return int(json.loads(ranks.job_file(job))["evaluation"]["every"])

    assert every("first", None, "steps=20") == 2
    assert every("second", "first", "steps=300") == 2
    assert every("third", "second", "steps=900") == 2
    assert every("own", "first", "steps=300", "eval.every=50") == 50
    assert every("moved", "gone", "steps=300") == 30
