"""What a command asks for: recipes by name or for weights, and options that exclude others."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from primus_images.cli.image import request as of_requests
from primus_images.cli.image.request import Request, fine_tuning
from primus_images.cli.image.train import checked_recipe
from primus_images.cli.main import main
from primus_images.errors import InputError
from primus_images.gpus.detect import DetectedGpus
from primus_images.recipes.setting import Choices

PUBLISHED = Path(__file__).parents[3] / "recipes/published/meta-llama--Llama-3.1-8B.json"
PROXY = Request(
    recipe="llama3-proxy", choices=Choices(gpu="cpu"), words=("steps=20", "deterministic=false")
)


def options(**choices: Any) -> Any:
    usual = {
        "accept_change": [],
        "judge": False,
        "burn_in": None,
        "no_preflight": False,
        "judge_every": 0,
    }
    return SimpleNamespace(**{**usual, **choices})


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("primus_images.gpus.detect.detect", DetectedGpus)
    config = json.loads(PUBLISHED.read_text())
    del config["parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    return tmp_path


def request(*words: str, **choices: str) -> Request:
    return Request(recipe="", choices=Choices(gpu="mi300x", **choices), words=words)  # type: ignore[arg-type]


def test_weights_are_fine_tuned_with_what_fits(weights: Path) -> None:
    made = fine_tuning(request("corpus=mock"), str(weights))
    assert (made.recipe, made.choices.backend) == ("llama3-8b", "finetune")
    assert made.choices.mode in ("full", "lora")
    assert made.words[:3] == ("corpus=mock", f"weights={weights}", f"tokenizer={weights}")
    assert made.words[-1].startswith("local_batch=")
    assert made.resolved().local_batch >= 1


@pytest.mark.parametrize(("batch", "mode"), [(4, "full"), (1, "full"), (0, "lora"), (None, "lora")])
def test_all_weights_are_trained_if_a_batch_of_them_fits(
    batch: int | None, mode: str, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def batch_of(recipe: Any) -> int:
        if batch is None and recipe.mode == "full":
            raise InputError("the recipe has no mode full")
        return batch or 0

    monkeypatch.setattr(of_requests, "_batch_that_fits", batch_of)
    assert fine_tuning(request("corpus=mock"), str(weights)).choices.mode == mode


def test_a_fine_tuning_names_the_command_that_repeats_it(
    weights: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(weights)
    (weights / "my data.jsonl").write_text("{}\n")
    words = [str(weights), "my data.jsonl", "--gpu", "mi300x", "--mode", "lora", "--dry-run"]
    main(["finetune", *words])
    said = capsys.readouterr().err
    recipe, _, same = said.splitlines()[0].partition("; the same run: ")
    assert recipe == "primus: the recipe is llama3-8b, mode lora"
    assert same.startswith("primus train llama3-8b ")
    assert "'corpus=my data.jsonl'" in same
    assert f"weights={weights}" in same
    assert "--mode=lora" in same


def test_what_the_user_sets_stays(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two = DetectedGpus(names=("a", "b"))
    monkeypatch.setattr("primus_images.gpus.detect.detect", lambda: two)
    words = ("local_batch=1", "ranks=1", "assets.tokenizer=mock")
    made = fine_tuning(request(*words, mode="lora"), str(weights))
    assert made.choices.mode == "lora"
    assert made.words == (*words, f"weights={weights}")
    assert "ranks=2" in fine_tuning(request(mode="lora"), str(weights)).words
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert "ranks=1" in fine_tuning(request(mode="lora"), str(weights)).words


def test_weights_without_tokenizer_or_for_another_backend_are_refused(weights: Path) -> None:
    with pytest.raises(InputError, match="--backend megatron does not fine-tune"):
        fine_tuning(request(backend="megatron"), str(weights))
    (weights / "tokenizer.json").unlink()
    with pytest.raises(InputError, match="has no tokenizer"):
        fine_tuning(request(), str(weights))


def test_verified_steps_are_at_most_those_of_the_run_and_leave_the_others_as_they_are() -> None:
    assert not checked_recipe(PROXY, options(), resumed=False).deterministic
    plain = replace(PROXY, words=("steps=20",))
    verified = checked_recipe(plain, options(judge_every=20), resumed=False)
    assert verified == checked_recipe(plain, options(), resumed=False)
    with pytest.raises(InputError, match="--judge-every 21 verifies nothing in 20 steps"):
        checked_recipe(plain, options(judge_every=21), resumed=False)


@pytest.mark.parametrize(
    ("choices", "resumed", "words"),
    [
        ({"accept_change": ["seed"]}, False, "--accept-change needs --resume-from"),
        ({"accept_change": ["seed"]}, True, ""),
        ({"judge": True}, True, "--judge: it needs a run from step 1"),
        ({"judge": True}, False, ""),
        ({"judge": True, "judge_every": 2}, False, "exclude each other"),
        ({"burn_in": 9.0}, False, "the recipe is resolved for a CPU"),
        ({"burn_in": 9.0, "no_preflight": True}, False, "--no-preflight leaves it out"),
    ],
)
def test_options_that_exclude_each_other_are_refused(
    choices: dict[str, Any], resumed: bool, words: str
) -> None:
    plain = replace(PROXY, words=("steps=20",))
    if not words:
        checked_recipe(plain, options(**choices), resumed=resumed)
        return
    with pytest.raises(InputError, match=words):
        checked_recipe(plain, options(**choices), resumed=resumed)
