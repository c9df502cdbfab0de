"""The backends train for real, on two ranks without a GPU."""

from pathlib import Path

import pytest
from training_kit import Python, failing, train

from primus_images.recipes.architecture import size
from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from primus_images.training.judge import suite
from primus_images.training.run import outcome
from primus_images.training.run.job import Job
from primus_images.training.run.metrics import of_recipe_unit
from tables import table_of

pytestmark = pytest.mark.integration

CELLS = [
    ("llama3.1-8b", "finetune", "full"),
    ("llama3.1-8b", "finetune", "lora"),
    ("llama3.1-8b", "fsdp", "pretrain"),
    ("flux.1-dev", "flux", "pretrain"),
]


def choices(backend: str, mode: str, precision: str = "fp32") -> Choices:
    return Choices(backend=backend, mode=mode, precision=precision, gpu="cpu", proxy=True)


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "backend", "mode"), CELLS)
def test_the_suite_passes(
    python: Python, tmp_path: Path, recipe: str, backend: str, mode: str
) -> None:
    """Twice to the last bit, resumed to the last bit, the same in one micro-batch and in two."""
    jobs = suite.plan(suite.Request(recipe=recipe, choices=choices(backend, mode)), tmp_path)
    left = suite.run(jobs, lambda job: train(python, job))
    assert failing(suite.judge(jobs, left)) == []
    assert all(outcome.series.exact for outcome in left.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "backend", "mode", "turbo"),
    table_of("backends.optimizations_change_no_loss_and_are_proven"),
)
def test_optimizations_change_no_loss_and_are_proven(
    python: Python, tmp_path: Path, recipe: str, backend: str, mode: str, turbo: str
) -> None:
    found = []
    for name, word in (("plain", "off"), ("turbo", turbo)):
        words = ["training.steps=3", "training.deterministic=false", f"turbo={word}"]
        job = Job(
            name=name,
            recipe=resolve(recipe, words, choices(backend, mode, "bf16")),
            output=tmp_path / name,
        )
        left = train(python, job)
        assert failing(outcome.basic_verdicts(left)) == []
        found.append([step.loss for step in left.series.steps])
    assert found[1] == pytest.approx(found[0], rel=1e-3)
    assert left.facts["turbo"] == sorted(turbo.split(","))


# inside/tutorial.py trains and saves all weights, and test_silent_faults.py trains adapters.
@pytest.mark.slow
def test_saved_weights_are_where_adapters_start(python: Python, tmp_path: Path) -> None:
    """All weights are trained and saved; adapters beside the saved ones begin no worse than
    training ended.
    """
    words = ["finetune.save_weights=true", "training.steps=10"]
    whole = Job(
        name="whole",
        recipe=resolve("llama3.1-8b", words, choices("finetune", "full")),
        output=tmp_path / "whole",
    )
    before = train(python, whole)
    words = [
        f"finetune.weights={whole.output / 'weights'}",
        "finetune.save_weights=true",
        "training.steps=3",
    ]
    beside = Job(
        name="beside",
        recipe=resolve("llama3.1-8b", words, choices("finetune", "lora")),
        output=tmp_path / "lora",
    )
    after = train(python, beside)
    assert failing(outcome.basic_verdicts(after)) == []
    assert before.series.losses[-1] < 0.7 * before.series.losses[0]
    assert after.series.losses[0] < 1.1 * before.series.losses[-1]
    saved = {path.name for path in (beside.output / "weights").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= saved
    folders = [str(job.output / "weights") for job in (whole, beside)]
    ended = python.run(str(Path(__file__).with_name("inside") / "generate.py"), *folders)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("The carpenter asked") == 2


@pytest.mark.slow
def test_a_pipeline_of_torchtitan_reports_all_stages(python: Python, tmp_path: Path) -> None:
    """Each rank has other layers, and only the last stage knows the loss."""
    recipe = resolve("llama3.1-8b", ["steps=3", "pp=2"], choices("torchtitan", "pretrain"))
    job = Job(name="train", recipe=recipe, output=tmp_path / "run")
    left = train(python, job)
    assert failing(outcome.basic_verdicts(left)) == []
    assert all(step.loss > 0 for step in left.series.steps)
    # Those of all labels together would be a thousand times as large.
    assert all(0.1 < step.grad_norm < 10 for step in left.series.steps)
    assert left.facts["parameters"] == size(recipe.architecture).total


def test_torchtitan_shards_a_tied_embedding_once(python: Python, tmp_path: Path) -> None:
    """It is a weight of two layers. The run reports it once, and computes with it twice."""
    words = ["steps=3", "model.tied_embeddings=true"]
    recipe = resolve("qwen3-8b", words, choices("torchtitan", "pretrain"))
    assert recipe.world_size == 2
    job = Job(name="train", recipe=recipe, output=tmp_path / "run")
    left = train(python, job)
    assert failing(outcome.basic_verdicts(left)) == []
    assert left.facts["parameters"] == size(recipe.architecture).total
    own = of_recipe_unit(recipe.architecture, recipe.seq_len).non_causal
    assert left.facts["flops_per_unit"] == pytest.approx(own)


TAGS = (
    "import sys; "
    "from tensorboard.backend.event_processing import event_accumulator; "
    "events = event_accumulator.EventAccumulator(sys.argv[1]); events.Reload(); "
    "print(*sorted(events.Tags()['scalars']))"
)


def test_backends_save_by_time_and_give_trackers_the_same_figures(
    python: Python, tmp_path: Path
) -> None:
    names = set()
    for backend in ("torchtitan", "fsdp"):
        words = ["steps=12", "tensorboard=true", "saving.minutes=0.0001", "keep=2", "ranks=1"]
        recipe = resolve("llama3.1-8b", words, choices(backend, "pretrain"))
        job = Job(name="train", recipe=recipe, output=tmp_path / backend)
        left = train(python, job)
        assert failing(outcome.basic_verdicts(left)) == []
        assert all(step.lr and step.seconds for step in left.series.steps)
        saved = {path.name for path in (job.output / "checkpoint").glob("step-*")}
        assert saved == {"step-10", "step-12"}
        ended = python.run("-W", "ignore", "-c", TAGS, str(job.output / "tensorboard"))
        assert ended.returncode == 0, ended.stderr
        names.add(ended.stdout)
    (shown,) = names
    assert {"loss", "grad_norm", "lr", "tokens", "tokens_per_second"} <= set(shown.split())
