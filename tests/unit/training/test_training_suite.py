import json
import math
import os
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from primus_images.cli.image import train
from primus_images.cli.image.request import Request
from primus_images.cli.verb import parser_of
from primus_images.errors import InputError
from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from primus_images.release import statement
from primus_images.release.summary import outcome_text
from primus_images.report.html import page
from primus_images.training.judge import suite
from primus_images.training.judge.checks import Verdict
from primus_images.training.judge.record import RecordedImage
from primus_images.training.run import outcome, ranks, start
from primus_images.training.run.job import Job
from primus_images.training.run.logs import Series
from primus_images.training.run.outcome import Outcome
from proof_kit import FLOPS, evidence

PROXY = suite.Request(recipe="llama3-proxy")
LLAMA = suite.Request(recipe="llama3.1-8b", choices=Choices(proxy=True, gpu="cpu"))

LINEARS: dict[str, Any] = {
    "converted": {},
    "plain": [],
    "listened": True,
    **{f"{side}_dtypes": {"torch.float32": 22} for side in ("weight", "input", "output")},
}


def losses(job: Job) -> dict[int, tuple[float, float]]:
    return {
        n: (7.3 - 0.2 * n, 0.5 + 0.01 * (n % 3)) for n in range(job.first_step, job.last_step + 1)
    }


def leave(
    job: Job, *, exit_code: int = 0, values: dict[int, tuple[float, float]] | None = None
) -> Outcome:
    """What a healthy run leaves in its folder."""
    values = losses(job) if values is None else values
    start.prepare(job)
    log = "".join(
        f"[titan] - INFO - step: {n:2}  loss: {loss:8.5f}  grad_norm: {norm:7.4f}  memory:  "
        "0.59GiB(2.49%)  "
        "tps: 5,000  tflops: 0.01  mfu: 0.00%\n" * 2
        for n, (loss, norm) in values.items()
    )
    (job.output / "log.txt").write_text(log)
    exact = [
        {"step": n, "loss": repr(loss), "grad_norm": repr(norm)}
        for n, (loss, norm) in values.items()
    ]
    (job.output / "exact.jsonl").write_text("".join(json.dumps(line) + "\n" for line in exact))
    facts = ranks.expected_facts(job) | {
        "linears": LINEARS,
        "float32_matmul_precision": "highest",
        "weights_sha256": "ab" * 32,
        "versions": {"torch": "2.13.0+cpu"},
        "parameters": 10,
        "trainable_parameters": 10,
        "device": "cpu",
        "backend": "gloo",
        "flops_per_unit": FLOPS,
    }
    (job.output / "facts.json").write_text(json.dumps(facts))
    (job.output / "result.json").write_text(
        json.dumps({"exit_code": exit_code, "seconds": 8.5, "argv": ["x"]})
    )
    if job.judged:
        tokens = job.recipe.global_batch * job.recipe.seq_len / job.recipe.world_size
        found = evidence(values) | {"tokens": tokens}
        (job.output / "proof.json").write_text(json.dumps(found))
        seconds = tokens / 5000
        (job.output / "clock.json").write_text(
            json.dumps({step: step * seconds for step in values})
        )
        (job.output / "witness").mkdir()
        (job.output / "witness/clock-0.json").write_text(json.dumps(dict.fromkeys(values, seconds)))
    return outcome.read(job, min(exit_code, 1))


PLACE = suite.Place(target="cpu", image=RecordedImage(), gpu="none", made="")


def judged(jobs: tuple[Job, ...], run: Any = leave) -> tuple[dict[str, outcome.Outcome], list[str]]:
    outcomes = suite.run(jobs, run)
    return outcomes, [verdict.name for verdict in suite.judge(jobs, outcomes) if not verdict.passed]


FALLS_LITTLE = {step: (6.9 if step > 15 else 7.0, 0.5) for step in range(1, 21)}
JUMPS = {step: (7.3 - 0.2 * step, 30.0 if step == 9 else 0.5) for step in range(1, 21)}


@pytest.mark.parametrize(
    ("values", "changed", "failed"),
    [
        (JUMPS, {}, []),
        (JUMPS, {"grad_norm": 0.4}, ["base: reference gradient norm", "gradient norm steady"]),
        # As LoRA of Llama 3 8B with seed 502, whose loss jumps in the last fifth.
        (FALLS_LITTLE, {}, []),
        (FALLS_LITTLE, {"loss": 5.5}, ["base: reference loss", "loss falls"]),
        (FALLS_LITTLE, {"data": ["rank 0: other tokens"]}, ["base: reference data", "loss falls"]),
        (
            FALLS_LITTLE,
            {"update": {"gap": 1.0, "name": "x"}},
            ["base: reference update", "loss falls"],
        ),
    ],
)
def test_what_the_reference_repeated_is_healthy(
    tmp_path: Path,
    values: dict[int, tuple[float, float]],
    changed: dict[str, Any],
    failed: list[str],
) -> None:
    def run(job: Job) -> Outcome:
        leave(job, values=values)
        findings = json.loads((job.output / "proof.json").read_text()) | {"max_norm": 0.0}
        findings["steps"][17] |= changed
        (job.output / "proof.json").write_text(json.dumps(findings))
        return outcome.read(job, 0)

    assert judged(suite.plan(PROXY, tmp_path / "suite", "quick"), run)[1] == failed


@pytest.fixture(autouse=True)
def no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenize nothing, because transformers is not installed here."""
    monkeypatch.setattr(start, "backend_of", lambda _: SimpleNamespace(tokenize=lambda *_: None))


@pytest.fixture
def jobs(tmp_path: Path) -> tuple[Job, ...]:
    return suite.plan(PROXY, tmp_path / "suite")


def test_six_jobs_serve_all_comparisons(jobs: tuple[Job, ...]) -> None:
    base, repeat, resume, split, epoch, rest = jobs
    assert (base.first_step, base.last_step, resume.first_step, resume.last_step) == (1, 20, 11, 20)
    assert resume.resume_from == base.output / "checkpoint" / "step-10"
    assert "checkpoint" not in " ".join(repeat.arguments())
    facts = [ranks.expected_facts(job) for job in (base, split)]
    assert [(of["local_batch_size"], of["accumulation_steps"]) for of in facts] == [(4, 1), (2, 2)]
    # The small text has fewer than 3,600 tokens, of which a step reads 1,024.
    assert (epoch.last_step, rest.first_step, rest.resume_from) == (
        9,
        8,
        epoch.output / "checkpoint" / "step-7",
    )
    assert [job.judged for job in jobs] == [True, False, False, True, True, False]


@pytest.mark.parametrize(
    ("words", "names", "reasons"),
    [
        (
            (),
            ["accumulation", "base", "repeat", "resume", "second-epoch", "second-epoch-resumed"],
            [],
        ),
        (
            ("eval.fraction=0.1", "eval.every=5", "training.warmup_steps=6"),
            ["accumulation", "base", "repeat", "resume", "second-epoch", "second-epoch-resumed"],
            [],
        ),
        (
            ("eval.fraction=0.1", "eval.patience=2"),
            ["accumulation", "base", "repeat"],
            ["resuming: eval.patience may end the run before its checkpoint"],
        ),
        (
            ("assets.corpus=mock",),
            ["accumulation", "base", "repeat", "resume"],
            ["a second epoch: its text or its tokenizer is no file"],
        ),
        (
            ("lora.dropout=0.1",),
            ["accumulation", "base", "repeat", "resume", "second-epoch", "second-epoch-resumed"],
            ["base with accumulation: other micro-batches have other masks of dropout"],
        ),
    ],
)
def test_derived_jobs_fit_the_recipe_or_are_left_out_with_a_reason(
    tmp_path: Path, words: tuple[str, ...], names: list[str], reasons: list[str]
) -> None:
    choices = Choices(backend="finetune", mode="lora", proxy=True, gpu="cpu")
    request = suite.Request(recipe="llama3.1-8b", choices=choices, overrides=words)
    planned = suite.plan(request, tmp_path)
    assert sorted(job.name for job in planned) == names
    assert suite.left_out(suite.recipe_of(planned), planned) == reasons
    split = next(job.recipe for job in planned if job.name == "accumulation")
    assert split.steps == 4
    assert split.find("eval.every", 0) <= 4
    assert split.find("finetune.training.warmup_steps", 0) <= 4


@pytest.mark.parametrize(("words", "packs"), [((), True), (("lora.dropout=0.1",), False)])
def test_the_second_epoch_packs_chats_unless_their_masks_are_drawn(
    tmp_path: Path, words: tuple[str, ...], packs: bool
) -> None:
    choices = Choices(backend="finetune", mode="lora", proxy=True, gpu="cpu")
    planned = suite.plan(replace(LLAMA, choices=choices, overrides=words), tmp_path)
    packed = {job.name: job.recipe.find("finetune.packing", default=False) for job in planned}
    assert packed["second-epoch"] is packed["second-epoch-resumed"] is packs
    assert packed["base"] is False


@pytest.mark.parametrize(
    ("words", "reasons"),
    [
        ((), []),
        (("seq_len=4096",), []),
        (
            ("seq_len=2048",),
            ["throughput: the recipe has no reference for mi300x and sequences of 2,048 tokens"],
        ),
        (
            ("model.layers=16",),
            ["throughput: the recipe's reference is of another size than model.layers=16"],
        ),
        (("proxy=true",), []),
    ],
)
def test_the_record_says_when_no_reference_of_throughput_fits(
    tmp_path: Path, words: tuple[str, ...], reasons: list[str]
) -> None:
    """Without it, a regression at another length than the published ones would pass in silence."""
    choices = Choices(backend="fsdp", gpu="mi300x", precision="bf16")
    if "proxy=true" in words:
        choices = Choices(backend="fsdp", gpu="mi300x", precision="bf16", proxy=True)
        words = ()
    request = suite.Request(recipe="llama3.1-8b", choices=choices, overrides=words)
    planned = suite.plan(request, tmp_path, "quick")
    assert suite.left_out(suite.recipe_of(planned), planned) == reasons


def test_a_healthy_suite_passes_and_makes_a_record_and_a_page(
    jobs: tuple[Job, ...], tmp_path: Path
) -> None:
    outcomes, failed = judged(jobs)
    assert failed == []
    verdicts = suite.judge(jobs, outcomes)
    made = suite.record(
        jobs,
        outcomes,
        verdicts,
        replace(PLACE, made="2026-11-20T15:00:00Z"),
    )
    assert made.passed is True
    assert suite.record(jobs, outcomes, (), PLACE).passed is False, "nothing was judged"
    assert made.versions == {"torch": "2.13.0+cpu"}
    assert [len(job.steps) for job in made.jobs] == [20, 20, 10, 4, 9, 2]
    html = page(replace(made, target="<cpu>"))
    assert "✓ the suite" in html
    assert "&lt;cpu&gt;" in html
    assert html.count('<figure class="chart">') == 4
    assert "http" not in html.partition("<body>")[2].partition("/*")[0].replace("http-equiv", "")


def test_when_the_base_run_fails_nothing_else_runs_and_nothing_passes(
    jobs: tuple[Job, ...],
) -> None:
    ran: list[str] = []

    def run(job: Job) -> Outcome:
        ran.append(job.name)
        return leave(job, exit_code=3, values={1: (7.3, 0.5)})

    outcomes, failed = judged(jobs, run)
    assert ran == ["base"]
    verdicts = suite.judge(jobs, outcomes)
    assert {
        "base: exit code",
        "base: steps logged",
        "repeat: exit code",
        "resume",
        "accumulation",
    } <= set(failed)
    made = suite.record(jobs, outcomes, verdicts, PLACE)
    assert made.passed is False
    assert "was not run" in page(made)


def test_of_a_failed_run_the_cause_is_told_once_and_the_rest_is_skipped(
    jobs: tuple[Job, ...],
) -> None:
    def run(job: Job) -> Outcome:
        leave(job, exit_code=1, values={})
        (job.output / "facts.json").unlink()
        (job.output / "cache" / "failures").mkdir()
        note = {"time": 1.0, "rank": 1, "text": "KeyError: 'text'"}
        (job.output / "cache" / "failures" / "1.json").write_text(json.dumps(note))
        return outcome.read(job, 1)

    outcomes = suite.run(jobs, run)
    verdicts = suite.judge(jobs, outcomes)
    assert [v.name for v in verdicts if not v.passed and not v.skipped] == ["base: exit code"]
    assert "was not run, because base failed" in next(
        v.reason for v in verdicts if v.name == "repeat: exit code"
    )
    made = suite.record(jobs, outcomes, verdicts, PLACE)
    assert made.passed is False
    assert made.jobs[0].cause == "rank 1: KeyError: 'text'"
    said = outcome_text(made, jobs[0].output)
    assert said.splitlines()[0].strip() == "✗ base failed: rank 1: KeyError: 'text'"
    assert said.count("KeyError") == 1
    assert "1 failed" in said


@pytest.mark.parametrize("code", [-9, 1])
def test_nothing_is_compared_with_a_run_that_failed_or_was_killed(
    code: int, jobs: tuple[Job, ...]
) -> None:
    def run(job: Job) -> Outcome:
        if job.name == "repeat":
            return leave(job, exit_code=code, values={1: (7.3, 0.5)})
        return leave(job)

    verdicts = {verdict.name: verdict for verdict in suite.judge(jobs, suite.run(jobs, run))}
    assert verdicts["same result again"].reason == "skipped: repeat failed"
    assert verdicts["same weights again"].skipped or verdicts["same weights again"].passed


def test_a_run_that_left_nothing_is_never_a_pass(jobs: tuple[Job, ...]) -> None:
    outcomes = suite.run(jobs, lambda job: outcome.read(job, 0))
    verdicts = suite.judge(jobs, outcomes)
    made = suite.record(jobs, outcomes, verdicts, PLACE)
    assert made.passed is False
    assert suite.record(jobs, {}, (), PLACE).passed is False
    passing = [Verdict("loss falls", True, "")]
    assert suite.record(jobs, outcomes, passing, PLACE).passed is False
    assert "nothing to draw" in page(made)


def other_weights(job: Job) -> None:
    facts = json.loads((job.output / "facts.json").read_text()) | {"weights_sha256": "cd" * 32}
    (job.output / "facts.json").write_text(json.dumps(facts))


def other_recipe(job: Job) -> None:
    content = json.loads((job.output / "job.json").read_text())
    content["recipe"]["sha256"] = "0" * 64
    (job.output / "job.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("job_name", "fault", "failed"),
    [
        ("repeat", {3: (6.70001, 0.5)}, "same result again"),
        ("resume", {15: (4.31, 0.5)}, "resume"),
        ("accumulation", {1: (7.1, 0.26)}, "accumulation"),
        ("repeat", other_weights, "same weights again"),
        ("resume", other_weights, "resume: last weights"),
        ("second-epoch-resumed", {9: (6.0, 0.5)}, "second epoch"),
        ("second-epoch-resumed", other_weights, "second epoch: last weights"),
        ("resume", other_recipe, "recipe"),
    ],
)
def test_each_comparison_fails_alone(
    jobs: tuple[Job, ...], job_name: str, fault: Any, failed: str
) -> None:
    def run(job: Job) -> Outcome:
        if job.name != job_name:
            return leave(job)
        if isinstance(fault, dict):
            return leave(job, values=losses(job) | fault)
        leave(job)
        fault(job)
        return outcome.read(job, 0)

    assert judged(jobs, run)[1] == [failed]


def test_other_weights_are_told_where_steps_may_differ_a_little(tmp_path: Path) -> None:
    words = ("validation.repeat_tolerance=0.01",)
    jobs = suite.plan(replace(PROXY, overrides=words), tmp_path)

    def run(job: Job) -> Outcome:
        leave(job)
        if job.name == "repeat":
            other_weights(job)
        return outcome.read(job, 0)

    verdicts = {verdict.name: verdict for verdict in suite.judge(jobs, suite.run(jobs, run))}
    weights = verdicts["same weights again"]
    assert weights.passed
    assert weights.reason == "final weights differ"
    assert weights.limit == "reported, not judged"
    assert weights.measured == "abababababab and cdcdcdcdcdcd"


@pytest.mark.parametrize(
    ("result", "code", "exit_code"),
    [
        ({"exit_code": 7}, 1, 7),
        ({"exit_code": 0, "passed": False}, 1, 0),
        ({"exit_code": 0, "passed": True}, 1, 1),
        ({"exit_code": 0, "passed": True}, 137, 137),
        ({"exit_code": 0, "passed": False}, 137, 137),
        (None, 1, 1),
    ],
)
def test_exit_codes_of_launcher_and_command(
    tmp_path: Path, result: dict[str, Any] | None, code: int, exit_code: int
) -> None:
    (tmp_path / "result.json").write_text(json.dumps(result) if result else "{broken")
    job = Job(name="x", recipe=resolve("llama3-proxy"), output=tmp_path)
    assert outcome.read(job, code).exit_code == exit_code


def test_the_suite_digest_follows_its_limits(tmp_path: Path) -> None:
    one, other, quick = (
        suite.plan(replace(PROXY, overrides=words), tmp_path, level)
        for words, level in (
            ((), "standard"),
            (("validation.loss_drop=0.2",), "standard"),
            ((), "quick"),
        )
    )
    assert len({suite.digest(suite.recipe_of(jobs), jobs) for jobs in (one, other, quick)}) == 3


def test_a_suite_too_short_to_resume_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="leaves no step of 10 to resume"):
        suite.plan(replace(PROXY, overrides=["training.steps=10"]), tmp_path)


def test_a_batch_that_validation_cannot_divide_trains_and_is_not_validated(tmp_path: Path) -> None:
    words = ["local_batch=1", "global_batch=4", "ranks=2"]
    recipe = resolve("llama3-proxy", words, Choices(gpu="cpu"))
    assert recipe.local_batch == 1
    with pytest.raises(InputError, match="2 parts must divide the local batch of 1") as refused:
        suite.plan(replace(PROXY, overrides=tuple(words)), tmp_path)
    assert refused.value.hint == "validation.accumulation=1"
    with pytest.raises(InputError, match="parts must divide"):
        resolve("llama3-proxy", ["validation.accumulation=3"], Choices(gpu="cpu"))


@pytest.mark.parametrize(
    ("word", "said"),
    [("15s", "every 15 seconds,"), ("1m", "every 1 minute,"), ("90m", "every 90 minutes,")],
)
def test_the_time_between_checkpoints_is_said(word: str, said: str, tmp_path: Path) -> None:
    recipe = resolve("llama3-proxy", [f"checkpoint={word}"], Choices(gpu="cpu"))
    assert said in train._saving(Job(name="x", recipe=recipe, output=tmp_path))


def test_the_environment_allows_no_network_and_writes_only_to_the_output(
    jobs: tuple[Job, ...],
) -> None:
    made = ranks.environment(jobs[0], {"PATH": "/bin", "HF_HUB_OFFLINE": "0"})
    assert made["HF_HUB_OFFLINE"] == "1"
    assert made["OMP_NUM_THREADS"] == "1"
    assert made["PATH"] == "/bin"
    for name in ("HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME"):
        assert made[name].startswith(str(jobs[0].output))
    assert ranks.environment(jobs[0], {"OMP_NUM_THREADS": "8"})["OMP_NUM_THREADS"] == "8"


def test_without_a_temporary_folder_the_ranks_get_one(
    jobs: tuple[Job, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun does not start in a container with a read-only root and no --tmpfs /tmp."""
    assert "TMPDIR" not in ranks.environment(jobs[0], {})
    monkeypatch.setattr(os, "access", lambda path, _mode: str(path) == "/mounted")
    assert ranks.environment(jobs[0], {})["TMPDIR"] == str(jobs[0].output / "cache")
    assert ranks.environment(jobs[0], {"TMPDIR": "/mounted"})["TMPDIR"] == "/mounted"


def test_runs_on_a_gpu_share_compiled_kernels(tmp_path: Path) -> None:
    recipe = resolve("llama3.1-8b", [], Choices(gpu="mi300x"))
    job = Job(name="run", recipe=recipe, output=tmp_path / "run", compiled=tmp_path / "kept")

    def inductor(job: Job) -> Path:
        return Path(ranks.environment(job, {})["TORCHINDUCTOR_CACHE_DIR"])

    start.prepare(job)
    assert inductor(job).is_relative_to(tmp_path / "kept")
    assert inductor(
        replace(job, recipe=resolve("llama3.1-8b", [], Choices(gpu="mi355x")))
    ) != inductor(job)
    own = job.output / "cache" / "inductor"
    assert inductor(replace(job, compiled=None)) == own
    assert inductor(replace(job, judged=True)) == own, "a proof must not depend on an earlier run"
    assert inductor(replace(job, recipe=resolve("llama3-proxy", [], Choices(gpu="cpu")))) == own


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_run_of_epochs_keeps_the_tokens_that_it_counts(
    dry_run: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[Path | None] = []
    textual = SimpleNamespace(
        check_data=lambda _: None, tokenize=lambda _job, kept, _say: folders.append(kept)
    )
    monkeypatch.setattr(train, "backend_of", lambda _: textual)
    monkeypatch.setattr(train.encoder, "without_torch", lambda: None)
    monkeypatch.setattr(
        train.tokens, "stored", lambda _: SimpleNamespace(samples=lambda *_, **__: 9000)
    )
    recipe = resolve("llama3.1-8b", ["epochs=2"], Choices(gpu="mi300x"))
    request = Request(recipe="llama3.1-8b", choices=Choices(gpu="mi300x"), words=("epochs=2",))
    options = Namespace(judge=False, dry_run=dry_run, json=True)
    steps = math.ceil(2 * 9000 / recipe.global_batch)
    counted = train._with_steps(request, recipe, options, tmp_path)
    assert counted == replace(request, words=(f"steps={steps}",))
    job = Job(name="run", recipe=recipe, output=tmp_path / "run", compiled=tmp_path)
    assert folders == [None if dry_run else start.tokens_folder(job)]
    assert dry_run or folders[0] is not None


def test_another_version_of_an_operator_finds_no_kept_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = resolve("llama3.1-8b", [], Choices(gpu="mi300x"))
    job = Job(name="run", recipe=recipe, output=tmp_path / "run", compiled=tmp_path / "kept")
    (tmp_path / "optimizations.py").touch()
    (tmp_path / "attention.py").write_text("gradient = 1")
    monkeypatch.setattr(ranks.optimizations, "__file__", str(tmp_path / "optimizations.py"))
    found = []
    for text in ("gradient = 1", "gradient = 2", "gradient = 1"):
        (tmp_path / "attention.py").write_text(text)
        ranks._packages.cache_clear()
        found.append(ranks.compiled_before(job))
    ranks._packages.cache_clear()
    assert found[0] == found[2] != found[1]


def test_a_folder_that_holds_a_run_is_not_reused(jobs: tuple[Job, ...]) -> None:
    leave(jobs[0])
    with pytest.raises(InputError, match="already holds a run"):
        start.prepare(jobs[0])


def test_several_nodes_meet_at_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(name="x", recipe=resolve("llama3-proxy", (), Choices(nodes=2)), output=tmp_path)
    with pytest.raises(InputError, match="2 nodes: NODE_RANK is not set"):
        ranks.argv(job, "python", {})
    with pytest.raises(InputError, match="MASTER_ADDR is not set"):
        ranks.argv(job, "python", {"SLURM_NODEID": "1"})
    words = " ".join(ranks.argv(job, "python", {"NODE_RANK": "1", "MASTER_ADDR": "first"}))
    assert "--nnodes 2 --rdzv-backend c10d --rdzv-id x --rdzv-endpoint first:29500" in words
    assert "is_host=false" in words
    assert str(tmp_path / "node-1") in words
    monkeypatch.setenv("NODE_RANK", "1")
    monkeypatch.setenv("MASTER_ADDR", "first")
    start.prepare(job)
    assert (tmp_path / "cache").is_dir(), "node 1 may be the first that writes the tokens of all"
    given = {"SLURM_NODEID": "0", "MASTER_ADDR": "first", "MASTER_PORT": "1", "RDZV_ID": "7-0"}
    words = " ".join(ranks.argv(job, "python", given))
    assert "--rdzv-id 7-0 --rdzv-endpoint first:1 --rdzv-conf is_host=true" in words
    with pytest.raises(InputError, match="from 0 to 1, not '2'"):
        ranks.argv(job, "python", {"NODE_RANK": "2", "MASTER_ADDR": "first"})
    for port in ("abc", "0", "65536", " "):
        with pytest.raises(InputError, match="a port from 1 to 65535"):
            ranks.argv(
                job, "python", {"NODE_RANK": "0", "MASTER_ADDR": "first", "MASTER_PORT": port}
            )


def test_a_node_says_where_it_waits_for_the_others(tmp_path: Path) -> None:
    job = Job(name="x", recipe=resolve("llama3-proxy", (), Choices(nodes=2)), output=tmp_path)
    variables = {"NODE_RANK": "1", "MASTER_ADDR": "first", "MASTER_PORT": "29501"}
    assert ranks.awaited(job, variables) == ""
    torchrun = tmp_path / "node-1/cache/torchrun"
    torchrun.mkdir(parents=True)
    sentence = "waiting for the other nodes of 2 at first:29501 (the job ends after 600 s)"
    assert ranks.awaited(job, variables) == sentence
    (torchrun / "attempt").mkdir()
    assert ranks.awaited(job, variables) == ""


def test_a_wrapper_precedes_the_python_of_each_rank_and_is_named_in_record_and_statement(
    tmp_path: Path,
) -> None:
    wrap = ("nsys", "profile", "-o", "a b")
    jobs = suite.plan(replace(LLAMA, wrap=wrap), tmp_path)
    for job in jobs:
        words = ranks.argv(job, "python", {})
        assert words[words.index("nsys") :][:7] == [*wrap, "python", "-u", "-m"]
        assert "--wrap" in job.arguments()
        parsed = parser_of("train").parse_args(job.arguments()[1:])
        assert tuple(parsed.wrap) == wrap
    record = suite.record(
        jobs,
        {},
        (),
        PLACE,
    )
    assert record.wrap == "nsys profile -o 'a b'"
    assert statement.test_result(record, b"")["primus"]["wrap"] == record.wrap


@pytest.mark.parametrize(
    ("precision", "overrides", "names"),
    [
        # On one rank, torchtitan computes in float32.
        ("bf16", (), ["precision-fp8"]),
        # One head of keys is no layer for two ranks.
        ("fp32", ("model.kv_heads=1",), ["precision-bf16", "precision-fp8"]),
    ],
)
def test_a_full_suite_runs_no_layout_and_precision_that_shows_nothing(
    tmp_path: Path, precision: str, overrides: tuple[str, ...], names: list[str]
) -> None:
    choices = Choices(proxy=True, gpu="cpu", precision=precision)
    request = replace(LLAMA, choices=choices, overrides=overrides)
    assert [job.name for job in suite.plan(request, tmp_path, "full")][6:] == names


def test_a_full_suite_adds_a_layout_and_every_precision(tmp_path: Path) -> None:
    jobs = suite.plan(LLAMA, tmp_path, "full")
    assert [job.name for job in jobs][6:] == [
        "one-rank",
        "tensor-parallel",
        "precision-bf16",
        "precision-fp8",
    ]
    assert jobs[7].resume_from == jobs[6].output / "checkpoint" / "step-1"
    assert [
        job.name
        for job in suite.plan(replace(LLAMA, choices=Choices(proxy=True)), tmp_path, "quick")
    ] == ["base"]

    def values(job: Job) -> dict[int, tuple[float, float]]:
        wrong = {"tensor-parallel": 0.5, "precision-bf16": 0.3}.get(job.name, 0.0)
        return {n: (loss + wrong, norm) for n, (loss, norm) in losses(job).items()}

    assert judged(jobs, lambda job: leave(job, values=values(job)))[1] == [
        "precision-bf16: precision",
        "precision-fp8: precision",
        "layout",
        "loss in bf16",
    ]


@pytest.mark.parametrize(
    ("ran", "passed", "skipped", "measured"),
    [
        ({"base": "own", "repeat": "own"}, True, False, "2 of 2"),
        ({"base": "own", "repeat": "x"}, False, False, "1 of 2"),
        ({"base": "x", "repeat": "x"}, False, False, "0 of 2"),
        # Of what did not run, nobody says that it was another recipe.
        ({"base": "own"}, False, True, ""),
        ({"base": "x"}, False, False, "0 of 2"),
        ({}, False, True, ""),
    ],
)
def test_the_runs_are_of_the_planned_recipe(
    ran: dict[str, str], passed: bool, skipped: bool, measured: str
) -> None:
    own = SimpleNamespace(digest="own")
    jobs: Any = [SimpleNamespace(name=name, recipe=own) for name in ("base", "repeat")]
    outcomes: Any = {name: SimpleNamespace(recipe_sha256=sha) for name, sha in ran.items()}
    verdict = suite._same_recipe(jobs, outcomes)
    assert (verdict.passed, verdict.skipped, verdict.measured) == (passed, skipped, measured)


def test_a_job_that_ran_is_recorded_with_what_it_did() -> None:
    request = suite.Request(recipe="llama3-proxy", choices=Choices(gpu="cpu"))
    first, *others = suite.plan(request, Path("/out"))
    run = outcome.RunResult(exit_code=0, seconds=2.5, argv=("python3", "x"))
    outcomes = {first.name: Outcome(job=first, exit_code=0, series=Series(), run=run)}
    place = suite.Place(target="demo", image=RecordedImage(), gpu="none", made="2026")
    made = suite.record([first, *others], outcomes, [], place)
    recorded = {job.name: job for job in made.jobs}
    done = recorded.pop(first.name)
    assert (done.ran, done.exit_code, done.seconds) == (True, 0, 2.5)
    assert (done.argv, done.series, done.cause) == (("python3", "x"), (), None)
    assert done.command[:2] == ("primus", "train")
    for job in recorded.values():
        assert (job.ran, job.exit_code, job.series, job.argv) == (False, None, None, None)
    assert (made.passed, made.target, made.gpu) == (False, "demo", "none")
