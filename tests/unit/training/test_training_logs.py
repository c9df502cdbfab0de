import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from primus_images.recipes.resolve import resolve
from primus_images.training.run import logs, metrics
from tables import table_of

HEAD = "[titan] 2026-11-20 15:08:39,146 - root - INFO - "


def line(step: int, loss: str, norm: str, tps: str = "3,986", memory: str = "0.59") -> str:
    return (
        f"{HEAD}step: {step:2}  loss: {loss:>8}  grad_norm: {norm:>7}  memory:  "
        f"{memory}GiB(2.49%)  "
        f"tps: {tps}  tflops: 0.01  mfu: 0.00%\n"
    )


def test_reads_a_line_as_torchtitan_0_2_2_prints_it() -> None:
    text = (
        "[titan] 2026-11-20 15:08:39,146 - root - INFO - step:  3  loss:  6.01418  grad_norm:  "
        "0.8882  "
        "memory: -0.00GiB(-0.00%)  tps: 13,986  tflops: 1,234.01  mfu: N/A"
    )
    step = logs.step_in(text)
    assert step == logs.Step(
        step=3,
        loss=6.01418,
        grad_norm=0.8882,
        tokens_per_second=13986.0,
        memory_gib=0.0,
        tflops=1234.01,
        tflops_decimals=2,
    )


def test_leaves_validation_lines_and_chatter_out() -> None:
    text = (
        f"{HEAD}validate step: 10  loss:  3.1060  memory:  0.59GiB(2.49%)  tps: 9,000\nstep "
        "by step\n"
    )
    assert logs.read_steps(text) == logs.Series()


def test_a_step_logged_twice_with_other_values_is_a_problem() -> None:
    series = logs.read_steps(line(1, "7.3", "0.6") + line(1, "7.2", "0.6"))
    assert series.problems == (
        "step 1 is logged twice: loss 7.3 and 7.2, gradient norm 0.6 and 0.6",
    )


def test_nan_and_unreadable_losses_are_read_as_nan_not_skipped() -> None:
    series = logs.read_steps(
        line(1, "nan", "nan") * 2 + line(2, "inf", "0.1") + line(3, "--", "0.1")
    )
    assert math.isnan(series.steps[0].loss)
    assert math.isinf(series.steps[1].loss)
    assert math.isnan(series.steps[2].loss)
    assert series.problems == ()


@pytest.mark.parametrize(("exact", "is_exact", "problem"), table_of("training_logs.exact_figures"))
def test_exact_figures_replace_rounded_ones(
    exact: dict[int, tuple[float, ...]], is_exact: bool, problem: str
) -> None:
    series = logs.with_exact(
        logs.read_steps(line(1, "7.37894", "0.6748") + line(2, "7.0", "0.6")), exact
    )
    assert series.exact is is_exact
    assert series.losses[0] == exact.get(1, (7.37894,))[0]
    assert problem in "".join(series.problems)
    assert bool(series.problems) is bool(problem)


@pytest.mark.parametrize(
    ("loss", "norm", "problems"),
    [
        (7.378949, 0.67489, 0),
        (7.37896, 0.6748, 1),
        (7.37894, 0.6750, 1),
    ],
)
def test_exact_figures_may_differ_by_rounding_only(loss: float, norm: float, problems: int) -> None:
    series = logs.with_exact(logs.read_steps(line(1, "7.37894", "0.6748")), {1: (loss, norm)})
    assert len(series.problems) == problems


def test_a_half_written_exact_line_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(line(1, "7.5", "0.5") + line(2, "7.0", "0.6"))
    (tmp_path / "exact.jsonl").write_text(
        '{"step": 1, "loss": "7.500001", "grad_norm": "0.5", "lr": 0.1, "seconds": 2.5}\n'
        '[]\n\n{"step": 2, "lo'
    )
    series = logs.read_run(tmp_path)
    assert (series.losses, series.exact) == ((7.500001, 7.0), False)
    assert [(step.lr, step.seconds) for step in series.steps] == [(0.1, 2.5), (None, None)]


def test_the_fingerprint_of_samples_is_that_of_the_step(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("".join(line(step, "7.5", "0.5") for step in (1, 2, 3)))
    entries = [{"step": 1, "data_hash": "00f0"}, {"step": 2}, [], {"step": 3, "data_hash": "9c"}]
    (tmp_path / "exact.jsonl").write_text("".join(json.dumps(row) + "\n" for row in entries))
    series = logs.read_run(tmp_path)
    assert [step.data_hash for step in series.steps] == ["00f0", None, "9c"]
    lines = metrics.lines_of(series, resolve("llama3-proxy"), {})
    assert [row["data_hash"] for row in lines] == ["00f0", None, "9c"]
    assert "data_hash" not in metrics.rows(series, resolve("llama3-proxy"), {})[0]


def test_a_clock_notes_when_each_step_begins_and_collects_the_lines_of_all_ranks() -> None:
    steps: list[str] = []
    clock = logs.Clock(steps.append)
    for text in ["hello\n", *(line(number, "1.0", "1.0") for number in (1, 1, 2, 1, 2, 3))]:
        clock.line(text)
    assert list(clock.arrivals) == [1, 2, 3]
    assert steps == [line(number, "1.0", "1.0") * 2 for number in (1, 2)]
    clock.close()
    clock.close()
    assert steps[2:] == [line(3, "1.0", "1.0")]


def test_the_summary_names_the_best_evaluation(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("".join(line(number, "7.5", "0.5") for number in range(1, 5)))
    losses = ((2, "0.5"), (3, "nan"), (4, "2"))
    (tmp_path / "eval.jsonl").write_text(
        "".join(f'{{"step": {n}, "eval_loss": "{loss}"}}\n' for n, loss in losses)
    )
    summary = metrics.summarize(logs.read_run(tmp_path), resolve("llama3-proxy"), {})
    assert (summary.eval_step, summary.eval_loss, summary.eval_perplexity) == (
        2,
        0.5,
        math.exp(0.5),
    )


def test_rows_hold_no_nan() -> None:
    (row,) = metrics.rows(logs.read_steps(line(1, "nan", "inf")), resolve("llama3-proxy"), {})
    assert (row["step"], row["loss"], row["grad_norm"], row["memory_gib"]) == (1, None, None, 0.59)
    json.dumps(row, allow_nan=False)


@given(
    st.lists(st.tuples(st.floats(0, 99), st.floats(0.001, 99)), min_size=1, max_size=12),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_any_interleaving_of_any_number_of_ranks_is_one_series(
    values: list[tuple[float, float]], ranks: int, order: random.Random
) -> None:
    rounded = [(f"{loss:8.5f}", f"{norm:7.4f}") for loss, norm in values]
    lines = [
        line(n, *pair, f"{90 + rank}", f"0.7{rank}")
        for n, pair in enumerate(rounded, 1)
        for rank in range(ranks)
    ]
    order.shuffle(lines)
    series = logs.read_steps("noise\n".join(lines))
    assert series.problems == ()
    assert {(step.tokens_per_second, step.memory_gib) for step in series.steps} == {
        (90.0, round(0.69 + ranks / 100, 2))
    }
    assert [(step.step, step.loss, step.grad_norm) for step in series.steps] == [
        (n, float(loss), float(norm)) for n, (loss, norm) in enumerate(rounded, 1)
    ]
    assert logs.with_exact(series, dict(enumerate(values, 1))).problems == ()


@pytest.mark.parametrize(("logged", "problems"), [("2.34568", 0), ("2.30000", 1), ("nan", 1)])
def test_a_logged_evaluation_is_the_runs_own_figure(
    tmp_path: Path, logged: str, problems: int
) -> None:
    step = "step:  3  loss:  6.0  grad_norm:  0.8  memory: 1GiB(1%)  tps: 9  tflops: 1  mfu: N/A\n"
    line = f"primus: evaluation after step 3: loss {logged}, perplexity 9, the best so far\n"
    (tmp_path / "log.txt").write_text(step + line)
    (tmp_path / "eval.jsonl").write_text('{"step": 3, "eval_loss": "2.345678"}\n')
    series = logs.read_run(tmp_path)
    assert len(series.problems) == problems
    assert series.steps[0].eval_loss == 2.345678
