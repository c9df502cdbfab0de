"""The catalogue of optimizations: what a recipe may ask for, what it is refused, and that each entry is real."""

from __future__ import annotations

from pathlib import Path

import pytest

from primus.cli.main import main
from primus.errors import InputError
from primus.recipes.resolve import resolve
from primus.recipes.setting import Choices
from primus.turbo.optimizations import chosen, optimizations, reasons, state

ROOT = Path(__file__).parents[3]
COUNTING = (
    "turbo/kernels.py",
    "turbo/fp8_kernels.py",
    "turbo/attention.py",
    "turbo/experts.py",
    "turbo/primus_turbo.py",
    "training/torchtitan/turbo.py",
)


def _chosen(*words: str, precision: str = "bf16", backend: str = "torchtitan", gpu: str = "h200") -> tuple[str, ...]:
    choices = Choices(backend=backend, precision=precision, gpu=gpu)
    return chosen(resolve("llama3.1-8b", words, choices))


def test_nothing_is_used_unless_asked_for() -> None:
    assert _chosen() == _chosen("turbo=off") == ()


def test_auto_takes_what_the_recipe_can_use() -> None:
    bf16, fp8 = _chosen("turbo=auto"), _chosen("turbo=auto", precision="fp8")
    assert "fp8-weight-cast" not in bf16
    assert set(fp8) - set(bf16) == {"fp8-weight-cast", "fp8-linear", "fp8-projections", "fp8-feed-forward"}
    assert all(optimizations()[name].auto for name in fp8)
    assert _chosen("turbo=auto", backend="fsdp") == (
        "linear-cross-entropy",
        "reduce-scatter-copy-in",
        "fused-adamw",
    )
    assert _chosen("turbo=auto", backend="megatron") == ()


@pytest.mark.parametrize(
    ("words", "name", "on", "why"),
    [
        ((), "linear-cross-entropy", False, "not requested"),
        (("turbo=off",), "linear-cross-entropy", False, "turbo is off"),
        (("turbo=auto",), "linear-cross-entropy", True, "part of auto"),
        (("turbo=auto",), "turbo-attention", False, "not part of auto: name it"),
        (("turbo=auto",), "fp8-linear", False, "needs precision fp8, not bf16"),
        (("turbo=turbo-attention",), "turbo-attention", True, "named"),
        (("turbo=turbo-attention",), "linear-cross-entropy", False, "not named"),
    ],
)
def test_each_optimization_is_on_or_off_with_its_reason(words: tuple[str, ...], name: str, on: bool, why: str) -> None:
    recipe = resolve("llama3.1-8b", words, Choices(backend="torchtitan", precision="bf16", gpu="mi355x"))
    found = reasons(recipe)
    assert found[name] == (on, why)
    assert {one for one, (switched, _) in found.items() if switched} == set(chosen(recipe))


def test_show_says_what_is_on_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "llama3.1-8b", "--gpu", "mi355x", "--turbo", "turbo-attention"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["turbo-attention", "on", "named"] in lines
    assert ["linear-cross-entropy", "off", "not", "named"] in lines


def test_one_rank_shards_nothing() -> None:
    assert _chosen("turbo=auto", "ranks=1") == ("real-rope",)


@pytest.mark.parametrize(
    ("words", "precision", "gpu", "sentence"),
    [
        (["turbo=linear-cross-entrpy"], "bf16", "h200", "did you mean"),
        (["turbo=fp8-weight-cast"], "bf16", "h200", "needs precision fp8, not bf16"),
        (["turbo=flash-attention-4"], "bf16", "mi300x", "needs a GPU of sm_90 or sm_100, not mi300x"),
        (["turbo=linear-cross-entropy", "tp=2"], "bf16", "h200", "needs TP = 1, not 2"),
        (["turbo=fused-adamw", "optimizer.name=Adam"], "bf16", "h200", "needs torchtitan.optimizer.name=AdamW"),
        (["turbo=flex-attention"], "bf16", "h200", "needs backend fsdp, not torchtitan"),
        (["turbo=auto,real-rope"], "bf16", "h200", "there is no optimization 'auto'"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(
    words: list[str], precision: str, gpu: str, sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence.replace("(", r"\(")):
        _chosen(*words, precision=precision, gpu=gpu)


def test_the_order_of_the_words_does_not_matter() -> None:
    assert _chosen("turbo=real-rope,fused-adamw") == _chosen("turbo=fused-adamw,real-rope")


def test_every_entry_is_proven_and_tested() -> None:
    text = "".join((ROOT / "src/primus" / file).read_text() for file in COUNTING)
    for one in optimizations().values():
        assert one.proof
        for call in one.proof:
            assert f'"{call}"' in text, f"{one.name}: nothing counts {call}"
        assert (ROOT / one.test).is_file(), one.name


def test_the_state_says_what_is_missing() -> None:
    attention = optimizations()["flash-attention-4"]
    assert "not installed" in state(attention, "sm_90")
    assert state(optimizations()["real-rope"], None) == "usable, part of auto"


def test_list_shows_optimizations(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["turbo", "list", "--gpu", "h200"]) == 0
    shown = capsys.readouterr().out
    assert "fused-adamw  (primus; usable, part of auto)" in shown
