"""`primus train` from its options to its last line, with a stand-in for the ranks."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from primus_images.cli.image import finetune as of_finetune, train as module
from primus_images.cli.main import main
from primus_images.gpus.detect import DetectedGpus
from primus_images.training.judge.checks import Verdict
from primus_images.training.run.job import Job
from primus_images.training.run.logs import Series, Step
from primus_images.training.run.outcome import Outcome, RunResult

PASSED = RunResult(exit_code=0, seconds=8.4, passed=True)


def step(number: int, loss: float, seconds: float | None = None) -> Step:
    return Step(
        step=number,
        loss=loss,
        grad_norm=1.0,
        tokens_per_second=1000.0,
        memory_gib=1.0,
        seconds=seconds,
        tokens=1000.0,
    )


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Job]:
    """The jobs that were started, in a folder of their own, on a machine without a GPU."""
    found: list[Job] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("primus_images.gpus.detect.detect", DetectedGpus)
    monkeypatch.setattr(module.start, "check_backend", lambda job: None)
    monkeypatch.setattr(module.encoder, "without_torch", lambda: None)

    def prepare(job: Job, say: Callable[[str], None]) -> Job:
        say("self-test: fine")
        job.output.mkdir(parents=True)
        return job

    monkeypatch.setattr(module.start, "prepare", prepare)
    return found


@pytest.fixture
def ended(jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the ranks end so."""

    def act(run: RunResult = PASSED, log: bool = True, **facts: Any) -> None:
        def start(job: Job, show: Callable[[str], None], timeout: int) -> Outcome:
            jobs.append(job)
            if log:
                (job.output / "log.txt").touch()
            series = Series(steps=(step(1, 7.0), step(2, 3.5)))
            return Outcome(job=job, exit_code=run.exit_code, series=series, run=run, facts=facts)

        monkeypatch.setattr(module.start, "start", start)

    act()
    return act


def train(*words: str) -> int:
    return main(["train", "llama3-proxy", "--gpu", "cpu", "--output", "out", *words])


def test_a_run_that_passed_says_its_losses_and_where_its_figures_are(
    ended: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("steps=2") == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[0].startswith("✓ 2 steps in 8 s, loss 7.0000 → 3.5000, 1,000 tokens/s/rank")
    assert lines[1] == f"  → {tmp_path}/out/metrics.jsonl"
    assert lines[-1] == f"  → `primus report {tmp_path}/out` draws its curves"
    assert "primus: self-test: fine" in said.err
    headline = next(line for line in said.err.splitlines() if "llama3-proxy: torchtitan" in line)
    assert "pretrain, fp32, cpu, 2 ranks · steps 1–2 · batch" in headline
    assert f"→ {tmp_path}/out" in said.err
    assert "judged" not in said.out


def test_figures_of_a_gpu_are_called_so(
    ended: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    ended(device="cuda")
    assert train("steps=2") == 0
    assert "1,000 tokens/s/GPU" in capsys.readouterr().out


def verdict(name: str, passed: bool, **fields: Any) -> Verdict:
    return Verdict(name=name, passed=passed, reason=f"why {name}", **fields)


def test_a_run_that_failed_says_why_and_where_its_log_is(
    ended: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verdicts = (
        verdict("exit code", False),
        verdict("loss falls", False, measured="7.1", limit="7.0"),
        verdict("finite", False, limit="finite"),
        verdict("fine", True),
        verdict("resume", False, skipped=True),
        verdict("repeat", False, skipped=True),
    )
    ended(RunResult(exit_code=1, seconds=2.6, passed=False, verdicts=verdicts, cause="c"))
    assert train("steps=2") == 1
    assert capsys.readouterr().out.splitlines() == [
        "✗ the job failed: why exit code",
        "✗ loss falls: why loss falls (measured 7.1, limit 7.0)",
        "✗ finite: why finite (measured nothing, limit finite)",
        "– skipped: resume, repeat",
        "failed after 3 s",
        f"  → the log is {tmp_path}/out/log.txt",
    ]


def test_a_log_that_was_deleted_is_said(
    ended: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended(RunResult(exit_code=1, passed=False), log=False)
    assert train("steps=2") == 1
    where = f"there is no log: {tmp_path}/out/log.txt was deleted while the job ran"
    assert f"  → {where}" in capsys.readouterr().out


def test_the_result_as_json(
    ended: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunResult(
        exit_code=1, seconds=2.5, passed=False, verdicts=(verdict("finite", False),), cause="c"
    )
    ended(run)
    assert train("steps=2", "--json") == 1
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert (document["passed"], document["exit_code"], document["cause"]) == (False, 1, "c")
    assert (document["output"], document["seconds"]) == (f"{tmp_path}/out", 2.5)
    assert document["optimizations"]["off"] == {}
    assert document["summary"]["last_loss"] == 3.5
    assert [row["name"] for row in document["verdicts"]] == ["finite"]
    assert "not_judged" not in document
    assert "llama3-proxy: torchtitan" not in said.err
    ended()
    assert main(["train", "llama3-proxy", "--gpu", "cpu", "--output", "two", "--json"]) == 0
    assert "cause" not in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("adapter", "name"), [(False, "AutoModelForCausalLM"), (True, "AutoPeftModelForCausalLM")]
)
def test_exported_weights_say_what_loads_them(
    jobs: list[Job],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    adapter: bool,
    name: str,
) -> None:
    def start(job: Job, *_: object) -> Outcome:
        (job.output / "weights").mkdir()
        if adapter:
            (job.output / "weights/adapter_config.json").touch()
        return Outcome(job=job, exit_code=0, series=Series(steps=(step(1, 7.0),)), run=PASSED)

    monkeypatch.setattr(module.start, "start", start)
    assert train("steps=2") == 0
    out = tmp_path / "out"
    said = capsys.readouterr().out
    assert f'  → {out}/weights: {name}.from_pretrained("{out}/weights") loads it' in said
    assert f"  → `primus chat {out}` talks to it" in said


def saved(output: Path, *numbers: int) -> None:
    for number in numbers:
        folder = output / f"checkpoint/step-{number}"
        folder.mkdir(parents=True)
        (folder / ".metadata").touch()


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The steps whose checkpoints count as complete."""
    numbers: set[int] = set()

    def is_complete(folder: Path) -> bool:
        return int(folder.name.partition("-")[2]) in numbers

    monkeypatch.setattr(module.identity, "complete", is_complete)
    monkeypatch.setattr(module.identity, "check", lambda *_: None)
    return numbers


def test_a_kept_checkpoint_says_how_to_go_on(
    jobs: list[Job],
    complete: set[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = RunResult(exit_code=1, passed=False)

    def start(job: Job, *_: object) -> Outcome:
        if run.cause == "interrupt":
            raise KeyboardInterrupt
        if not (job.output / "checkpoint").exists():
            saved(job.output, 1, 2)
        return Outcome(
            job=job, exit_code=run.exit_code, series=Series(steps=(step(1, 7.0),)), run=run
        )

    monkeypatch.setattr(module.start, "start", start)
    complete |= {1, 2}
    out = tmp_path / "out"
    assert train("steps=3") == 1
    assert f"  → --resume-from {out} continues after step 2" in capsys.readouterr().out
    # The last step's checkpoint is nothing to go on from.
    assert train("steps=2", "--output", "two") == 1
    assert "--resume-from" not in capsys.readouterr().out
    run = PASSED
    assert train("steps=2", "--output", "three") == 0
    said = capsys.readouterr().out
    checkpoint = tmp_path / "three/checkpoint/step-2"
    assert f"  → {checkpoint}: --resume-from {tmp_path}/three continues with more steps" in said
    assert f"  → `primus export {tmp_path}/three DIR` writes its weights" in said
    run = RunResult(exit_code=1, cause="interrupt")
    assert train("steps=3", "--output", "four") == 130
    assert "the run saved no checkpoint; checkpoint=500" in capsys.readouterr().err
    assert train("steps=3", "checkpoint=2", "--output", "five") == 130
    assert "no checkpoint: the first was due after 2 steps" in capsys.readouterr().err
    assert train("steps=3", "checkpoint=5m", "--output", "six") == 130
    assert "no checkpoint: the first was due after 5 minutes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "seconds", "said"),
    [
        (
            ["eval.fraction=0.1", "checkpoint=5"],
            100.0,
            "raise eval.every (now 3) or checkpoint (now 5)",
        ),
        (
            ["eval.fraction=0.1", "eval.every=7"],
            100.0,
            "99% of the time: raise eval.every (now 7)\n",
        ),
        (["checkpoint=30m"], 100.0, "raise checkpoint (now 30m)"),
        ([], 100.0, ""),
        (["eval.fraction=0.1"], 1.05, ""),
        (["eval.fraction=0.1"], 50.0, ""),
    ],
)
def test_much_time_between_steps_is_said_with_its_remedy(
    words: list[str],
    seconds: float,
    said: str,
    ended: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def start(job: Job, *_: object) -> Outcome:
        (job.output / "log.txt").touch()
        series = Series(steps=(step(1, 7.0, 9.0), step(2, 3.5, 9.0 + seconds)))
        return Outcome(job=job, exit_code=0, series=series, run=PASSED)

    monkeypatch.setattr(module.start, "start", start)
    assert train("steps=30", *words) == 0
    lines = capsys.readouterr().out
    assert said in lines
    assert ("of the time" in lines) == bool(said)


@pytest.mark.parametrize(
    ("numbers", "whole", "taken", "incomplete"),
    [
        ((1, 2, 10), {1, 2, 10}, "step-10", ""),
        ((1, 2, 10), {1, 2}, "step-2", "step-10"),
        ((1, 2, 10), {1}, "step-1", "step-2, step-10"),
        # Of none that is complete, the newest.
        ((1, 2), set(), "step-2", ""),
    ],
)
def test_the_newest_complete_checkpoint_of_a_run_is_taken(
    complete: set[int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    numbers: tuple[int, ...],
    whole: set[int],
    taken: str,
    incomplete: str,
) -> None:
    complete |= whole
    saved(tmp_path, *numbers)
    assert module.newest_checkpoint(tmp_path) == tmp_path / "checkpoint" / taken
    said = f"primus: {taken} is used; incomplete: {incomplete}\n" if incomplete else ""
    assert capsys.readouterr().err == said
    named = tmp_path / "checkpoint/step-1"
    assert module.newest_checkpoint(named) == named


def test_weights_are_exported_to_an_empty_folder_where_pytorch_is(
    complete: set[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    saved(tmp_path / "run", 2)
    complete.add(2)
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    run = str(tmp_path / "run")
    for missing in ("torch", "transformers"):
        with monkeypatch.context() as patched:
            patched.setattr(of_finetune, "importable", lambda name: name != missing)  # noqa: B023 - called in this turn
            assert main(["export", run, str(tmp_path / "empty")]) == 3
        assert f"{missing} is not installed" in capsys.readouterr().err
    assert main(["export", run, str(tmp_path / "full")]) == 2
    assert "full is not empty" in capsys.readouterr().err
    words = ["--tokenizer", str(tmp_path / "full/file")]
    assert main(["export", run, str(tmp_path / "empty"), *words]) == 2
    assert "full/file is not a folder" in capsys.readouterr().err


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/.metadata").touch()
    for path, said in (
        (tmp_path / "absent", "there is no checkpoint folder"),
        (tmp_path, "contains no checkpoint"),
        (tmp_path / "other", "is not named step-N"),
    ):
        with pytest.raises(module.InputError, match=said) as caught:
            module.newest_checkpoint(path)
        assert caught.value.hint == "name a folder …/checkpoint/step-N, or the folder of a run"


def test_a_run_that_is_at_its_end_is_not_resumed(
    ended: Callable[..., None],
    jobs: list[Job],
    complete: set[int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    complete |= {4}
    saved(tmp_path / "run", 4)
    assert train("steps=4", "--resume-from", "run") == 2
    assert "is already at step 4 of 4" in capsys.readouterr().err
    assert train("steps=5", "--resume-from", "run") == 0
    assert (jobs[0].first_step, jobs[0].last_step) == (5, 5)
    assert f"  from {tmp_path}/run/checkpoint/step-4\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--accept-change", "seed"], "--accept-change needs --resume-from"),
        (["--judge", "--resume-from", "run"], "--judge: it needs a run from step 1"),
        (["--burn-in", "1m"], "the recipe is resolved for a CPU"),
        (["--burn-in", "1m", "--no-preflight"], "and --no-preflight leaves it out"),
        (["--judge-every", "3", "steps=2"], "--judge-every 3 verifies nothing in 2 steps"),
        (["--judge-every", "1", "--judge"], "--judge-every and --judge exclude each other"),
    ],
)
def test_options_that_exclude_each_other_are_refused(
    ended: Callable[..., None],
    jobs: list[Job],
    complete: set[int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    said: str,
) -> None:
    complete |= {1}
    saved(tmp_path / "run", 1)
    assert train(*words) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert jobs == []


def test_a_run_does_not_write_into_what_it_reads(
    ended: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/a.jsonl").write_text('{"text": "a"}\n')
    assert train("corpus=out") == 2
    assert "--output out holds the corpus of the run" in capsys.readouterr().err


def test_a_dry_run_shows_the_settings_and_starts_nothing(
    ended: Callable[..., None], jobs: list[Job], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("steps=2", "--dry-run") == 0
    said = capsys.readouterr().out
    assert said.startswith("llama3-proxy: torchtitan, pretrain, fp32, cpu, 2 ranks · steps 1–2")
    rows = [line.split() for line in said.splitlines()]
    assert ["torchtitan.training.steps", "2", "command", "line:", "steps=2"] in rows
    assert "python3 -m" in said.splitlines()[-1] or "torchrun" in said.splitlines()[-1]
    assert train("steps=2", "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out)
    assert jobs == []
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "compiled"),
    [
        ([], None),
        (["--compile-cache", "cache"], "cache"),
    ],
)
def test_a_run_keeps_compiled_code_where_it_is_told(
    ended: Callable[..., None],
    jobs: list[Job],
    tmp_path: Path,
    words: list[str],
    compiled: str | None,
) -> None:
    assert train("steps=2", *words) == 0
    assert jobs[0].compiled == (tmp_path / compiled if compiled else None)
    assert main(["train", "llama3-proxy", "--gpu", "cpu", "steps=2"]) == 0
    assert jobs[1].compiled == tmp_path / "runs/.compile-cache"
    assert jobs[1].output.parent == tmp_path / "runs"
    assert jobs[1].output.name.startswith("llama3-proxy-20")


def test_variables_of_another_torchrun_are_not_passed_on(
    ended: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train("steps=2") == 0
    assert "not passed to the ranks" not in capsys.readouterr().err
    monkeypatch.setitem(os.environ, "TORCHELASTIC_RUN_ID", "x")
    assert train("steps=2", "--output", "two") == 0
    said = capsys.readouterr().err
    assert "primus: not passed to the ranks: TORCHELASTIC_RUN_ID (of another torchrun)" in said


def test_results_that_would_go_with_the_container_are_warned_of(
    ended: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def warning(folder: Path) -> str:
        return f"{folder} goes with the container" if folder.name == "out" else ""

    monkeypatch.setattr(module, "lost_warning", warning)
    assert train("steps=2") == 0
    assert f"primus: {Path('out').absolute()} goes with the container\n" in capsys.readouterr().err
    assert train("steps=2", "--output", "elsewhere") == 0
    assert "primus: \n" not in capsys.readouterr().err


def test_checkpoints_after_minutes_are_announced_with_their_space(
    ended: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    for word, interval in (("30m", "30 minutes"), ("1m", "1 minute"), ("30s", "30 seconds")):
        assert train("steps=2", f"checkpoint={word}", "--output", word) == 0
        said = " ".join(capsys.readouterr().err.split())
        assert f"a checkpoint every {interval}, and one after the last step" in said


@pytest.mark.parametrize("live", [False, True])
def test_steps_are_shown_on_one_line_of_a_terminal_and_at_fifths_in_a_log(
    live: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job: Any = type("Job", (), {"first_step": 3, "last_step": 22})
    progress = module._Progress(job, live=live)
    monkeypatch.setattr(
        module.logs, "step_in", lambda text: step(int(text), 2.0) if text.isdigit() else None
    )
    for number in (3, 4, 5, 4, 8, 9, 22):
        progress.line(str(number))
    progress.line("primus: a workaround\n")
    progress.line("noise")
    progress.end()
    said = capsys.readouterr().err
    shown = "step {}/22  loss 2.0000  gradient norm 1.000  1,000 tokens/s/rank"
    if live:
        rows = [f"\r\x1b[K  {shown.format(number)}" for number in (3, 4, 5, 8, 9, 22)]
        start = "  starting the ranks …"
        end = "\r\x1b[K  primus: a workaround\n\r\x1b[K"
        assert said == start + "".join(rows) + end
    else:
        rows = [f"  {shown.format(number)}\n" for number in (3, 4, 8, 22)]
        assert said == "".join(rows) + "  primus: a workaround\n"
