"""The Megatron backend on CPU ranks: against itself in other layouts, and its suite."""

from pathlib import Path

import pytest
from training_kit import Python, failing, train

from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from primus_images.training.judge import suite
from primus_images.training.run import outcome
from primus_images.training.run.job import Job
from primus_images.training.run.outcome import Outcome

pytestmark = pytest.mark.integration
SLOW = pytest.mark.slow

CPU = Choices(backend="megatron", gpu="cpu", proxy=True)


def three_steps(python: Python, name: str, output: Path, *words: str) -> Outcome:
    job = Job(name="train", recipe=resolve(name, ["training.steps=3", *words], CPU), output=output)
    left = train(python, job)
    assert failing(outcome.basic_verdicts(left)) == []
    return left


TENSOR = "model.tensor_model_parallel_size=2"
PIPELINE = "model.pipeline_model_parallel_size=2"
FSDP2 = ["torch_fsdp2=true", "ddp.use_distributed_optimizer=false"]
ALONE = "model.expert_model_parallel_size=1"


@SLOW
@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("llama3.1-8b", [[], [TENSOR], [PIPELINE], ["ddp.use_distributed_optimizer=false"], FSDP2]),
        ("deepseek-v2-lite", [[], [ALONE], [ALONE, PIPELINE]]),
    ],
)
def test_every_layout_trains_the_same_model(
    python: Python, tmp_path: Path, name: str, layouts: list[list[str]]
) -> None:
    runs = [
        three_steps(python, name, tmp_path / str(number), "model.layers=4", *words)
        for number, words in enumerate(layouts)
    ]
    base = runs[0].series.steps
    for words, other in zip(layouts[1:], runs[1:], strict=True):
        steps = other.series.steps
        assert steps[0].loss == pytest.approx(base[0].loss, rel=1e-6), words
        # Of one group of weights counted twice or not at all, the norm of the first gradient tells.
        assert steps[0].grad_norm == pytest.approx(base[0].grad_norm, rel=2e-5), words
        # Adam's first updates are as large for a gradient that is nothing but rounding.
        assert [step.loss for step in steps] == pytest.approx(
            [step.loss for step in base], rel=1e-3
        ), words


@SLOW
@pytest.mark.parametrize(
    ("name", "precision", "words"),
    [("deepseek-v2-lite", "fp32", []), ("llama3.1-8b", "bf16", []), ("llama3.1-8b", "bf16", FSDP2)],
)
def test_the_suite_passes(
    python: Python, tmp_path: Path, name: str, precision: str, words: list[str]
) -> None:
    choices = Choices(backend="megatron", gpu="cpu", proxy=True, precision=precision)
    jobs = suite.plan(suite.Request(recipe=name, overrides=words, choices=choices), tmp_path)
    assert failing(suite.judge(jobs, suite.run(jobs, lambda job: train(python, job)))) == []


def test_an_images_choices_for_gpus_are_no_error_without_one(
    python: Python, tmp_path: Path
) -> None:
    """Transformer Engine is there and not used. Images for AMD GPUs choose its attention, too;
    Megatron's ``auto`` refuses any choice but its own.
    """
    job = Job(
        name="run", recipe=resolve("qwen2.5-7b", ["training.steps=2"], CPU), output=tmp_path / "run"
    )
    left = train(python, job, "transformer_engine", NVTE_FLASH_ATTN="0", NVTE_FUSED_ATTN="1")
    assert failing(outcome.basic_verdicts(left)) == []
