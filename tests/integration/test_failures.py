"""Real jobs that fail: the user is told the first cause, once; what was not judged is skipped; an
interrupt is none.
"""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from training_kit import Python, started, train

from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from primus_images.training.run import outcome
from primus_images.training.run.job import Job
from project_kit import Kit, until
from tables import table_of

pytestmark = pytest.mark.integration


def proxy(
    output: Path,
    *words: str,
    backend: str = "fsdp",
    steps: int = 4,
    resume_from: Path | None = None,
) -> Job:
    recipe = resolve(
        "llama3.1-8b",
        [f"steps={steps}", "seq_len=32", *words],
        Choices(backend=backend, gpu="cpu", proxy=True),
    )
    return Job(name="job", recipe=recipe, output=output, resume_from=resume_from)


@pytest.mark.parametrize(("fault", "told"), table_of("failures.the_first_cause_is_told"))
def test_the_first_cause_is_told(python: Python, tmp_path: Path, fault: str, told: str) -> None:
    job = proxy(tmp_path / "job")
    left = train(python, job, fault)
    first, *others = outcome.basic_verdicts(left)
    assert first.reason.startswith(told)
    assert all(verdict.skipped for verdict in others), others


# The ranks import for some seconds in silence, more on a busy machine.
@pytest.mark.slow
def test_a_hung_rank_is_named_and_every_rank_leaves_its_stack(
    python: Python, tmp_path: Path
) -> None:
    job = proxy(tmp_path / "job")
    # Executed, because /proc does not show the rank of a fork.
    execute = "os.execv(sys.executable, sys.orig_argv[:1] + sys.argv[1:])"
    code = f"import os, sys; os.putenv('PRIMUS_FAULT', 'loop_hangs'); {execute}"
    words = [
        *python.command,
        "-c",
        code,
        "-m",
        "primus_images.cli.main",
        *job.arguments(),
        "--stall-timeout",
        "30",
    ]
    assert subprocess.run(words, check=False).returncode == 1
    left = outcome.read(job, 1)
    assert re.match(
        r"rank 1: hung: no progress for 30 s; it is in hanging \(sitecustomize.py:\d+\)", left.cause
    ), left
    log = (job.output / "log.txt").read_text()
    assert re.search(r"^\[rank0\]: .*distributed_c10d.py", log, re.MULTILINE), log
    assert re.search(r"^\[rank1\]: .*sitecustomize.py", log, re.MULTILINE), log


# All refuse checkpoints by the same code as our own loop.
@pytest.mark.parametrize(
    "backend",
    ["fsdp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("torchtitan", "megatron"))],
)
def test_a_run_goes_on_from_its_own_checkpoint_alone(
    python: Python, tmp_path: Path, backend: str
) -> None:
    base = proxy(tmp_path / "base", "checkpoint=2", backend=backend)
    whole = train(python, base)
    kept = base.output / "checkpoint" / "step-2"
    again = proxy(tmp_path / "again", "checkpoint=2", backend=backend, resume_from=kept)
    assert train(python, again).series.losses == whole.series.losses[2:]
    assert (again.output / "checkpoint" / "step-4" / "recipe.json").is_file(), (
        "a resumed run saves checkpoints, too"
    )
    if backend == "megatron":
        return
    other = proxy(tmp_path / "other", "model.rope_theta=7.0", backend=backend, resume_from=kept)
    refused = started(python, other)
    assert refused.returncode == 2
    assert "model.rope_theta was 500000" in refused.stderr
    largest = max(kept.glob("*.distcp"), key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    damaged = proxy(tmp_path / "damaged", backend=backend, resume_from=kept)
    cause = train(python, damaged).cause
    assert re.search(
        rf"{re.escape(str(kept))}: the checkpoint is damaged: .* in {largest.name} does not match",
        cause,
    )


@pytest.mark.slow
def test_a_resumed_run_of_torchtitan_follows_its_own_settings(
    python: Python, tmp_path: Path
) -> None:
    """torchtitan's checkpoint brings the learning rate, its schedule and the weight decay of the
    run that saved it.
    """
    base = proxy(tmp_path / "base", "checkpoint=2", backend="torchtitan")
    train(python, base)
    kept = base.output / "checkpoint" / "step-2"
    settings = ["lr=0.02", "optimizer.weight_decay=0.7", "lr_scheduler.warmup_steps=3", "ranks=1"]
    job = proxy(
        tmp_path / "again", *settings, "checkpoint=1", backend="torchtitan", resume_from=kept
    )
    ended = started(python, job)
    assert ended.returncode == 0, ended.stderr
    read = (
        "import sys, torch.distributed.checkpoint as dcp; metadata = "
        "dcp.FileSystemReader(sys.argv[1]).read_metadata();"
        "names = [n for n in metadata.state_dict_metadata if n.rsplit('.', 1)[-1] in ('lr', "
        "'weight_decay')][:2];"
        "state = dict.fromkeys(names, 0.0); dcp.load(state, checkpoint_id=sys.argv[1], "
        "no_dist=True);"
        "print(sorted({round(value, 6) for value in state.values()}))"
    )
    shown = python.run("-c", read, str(job.output / "checkpoint" / "step-3"))
    assert shown.returncode == 0, shown.stderr
    # The rate of step 4, after 3 steps of warm-up: the whole one.
    assert shown.stdout.splitlines()[-1] == "[0.02, 0.7]"


# tests/unit/release/test_validation.py interrupts the cells of one.
@pytest.mark.slow
def test_an_interrupted_validation_leaves_no_record(cpu_image: Kit, tmp_path: Path) -> None:
    command = cpu_image.command("validate", "cpu", "--suite", "quick", "--output", str(tmp_path))
    command += ["--recipe", "llama3-proxy", "--again"]
    process = subprocess.Popen(
        command,
        cwd=cpu_image.root,
        env=cpu_image.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    until(lambda: [*tmp_path.rglob("log.txt")] or process.poll() is not None, 300)
    # As a terminal does it: to every process of the group.
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "FAILED" not in said
    assert list(tmp_path.rglob("record.json")) == []
