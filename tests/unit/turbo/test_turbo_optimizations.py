"""The catalogue of optimizations: what a recipe may ask for, what it is refused, and that each
entry is real.
"""

from pathlib import Path

import pytest

from primus_images.cli.main import main
from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from primus_images.turbo.optimizations import chosen, compatible, optimizations, reasons

ROOT = Path(__file__).parents[3]
COUNTING = (
    "turbo/kernels.py",
    "turbo/sharded.py",
    "turbo/fp8_kernels.py",
    "turbo/attention.py",
    "turbo/experts.py",
    "turbo/packed.py",
    "turbo/primus_turbo.py",
    "training/backends/torchtitan/turbo.py",
    "training/backends/loop/session.py",
)


def _chosen(
    *words: str, precision: str = "bf16", backend: str = "torchtitan", gpu: str = "h200"
) -> tuple[str, ...]:
    choices = Choices(backend=backend, precision=precision, gpu=gpu)
    return chosen(resolve("llama3.1-8b", words, choices))


def test_a_run_uses_what_its_recipe_can_use_unless_it_is_off() -> None:
    bf16, fp8 = _chosen(), _chosen(precision="fp8")
    assert bf16 == _chosen("turbo=auto") == _chosen("turbo=require")
    assert set(fp8) - set(bf16) == {
        "fp8-weight-cast",
        "fp8-linear",
        "fp8-feed-forward",
    }
    assert _chosen("turbo=off") == _chosen(backend="megatron") == ()
    assert "flash-attention-4" in _chosen(backend="fsdp")


def test_a_run_on_a_cpu_uses_only_what_it_names() -> None:
    assert _chosen("proxy=true", gpu="cpu") == ()
    assert _chosen("proxy=true", "turbo=real-rope", gpu="cpu") == ("real-rope",)


def test_of_two_that_exclude_each_other_the_first_is_used() -> None:
    words = ("enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp")
    recipe = resolve(
        "llama3.1-8b",
        [f"quantize.linear.float8.{word}=false" for word in words],
        Choices(backend="torchtitan", precision="fp8", gpu="mi300x"),
    )
    assert "turbo-fp8-linear" in chosen(recipe)
    assert not {"fp8-linear", "fp8-weight-cast", "fp8-feed-forward"} & set(chosen(recipe))
    assert reasons(recipe)["fp8-linear"] == (False, "turbo-fp8-linear is used instead")
    assert compatible(["fp8-linear", "turbo-fp8-linear"]) == ("fp8-linear",)


@pytest.mark.parametrize(
    ("words", "name", "on", "why"),
    [
        ([], "linear-cross-entropy", True, "by default, if its self-test passes"),
        (["turbo=off"], "linear-cross-entropy", False, "turbo is off"),
        (["turbo=require"], "turbo-attention", True, "requested"),
        ([], "fp8-linear", False, "needs precision fp8, not bf16"),
        (["turbo=turbo-attention"], "turbo-attention", True, "requested"),
        (["turbo=turbo-attention"], "linear-cross-entropy", False, "not named"),
    ],
)
def test_each_optimization_is_on_or_off_with_its_reason(
    words: tuple[str, ...], name: str, on: bool, why: str
) -> None:
    recipe = resolve(
        "llama3.1-8b", words, Choices(backend="torchtitan", precision="bf16", gpu="mi355x")
    )
    found = reasons(recipe)
    assert found[name] == (on, why)
    assert {one for one, (switched, _) in found.items() if switched} == set(chosen(recipe))


@pytest.mark.parametrize(
    ("backend", "gpu", "words", "used"),
    [
        # On one rank, torchtitan keeps weights in float32, and the loss takes one type.
        ("torchtitan", "h200", ["ranks=1"], {"real-rope", "flash-attention-4"}),
        (
            "finetune",
            "h200",
            ["ranks=1"],
            {"linear-cross-entropy", "reduce-scatter-copy-in", "flash-attention-4"},
        ),
        (
            "finetune",
            "h200",
            ["ranks=1", "packing=true"],
            {"linear-cross-entropy", "reduce-scatter-copy-in", "packed-attention-4"},
        ),
        (
            "finetune",
            "mi300x",
            ["ranks=1", "packing=true"],
            {"linear-cross-entropy", "reduce-scatter-copy-in", "packed-attention"},
        ),
    ],
)
def test_one_rank_uses_what_needs_no_shards(
    backend: str, gpu: str, words: list[str], used: set[str]
) -> None:
    recipe = "llama3.1-8b"
    mode = "pretrain"
    if backend == "finetune":
        recipe = "llama3.2-1b"
        mode = "full"
    choices = Choices(backend=backend, mode=mode, precision="bf16", gpu=gpu)
    assert set(chosen(resolve(recipe, words, choices))) == used


def test_show_says_what_is_on_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "llama3.1-8b", "--gpu", "mi355x", "--turbo", "turbo-attention"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["turbo-attention", "on", "requested"] in lines
    assert ["linear-cross-entropy", "off", "not", "named"] in lines


def test_every_entry_is_proven_and_tested() -> None:
    text = "".join((ROOT / "src/primus_images" / file).read_text() for file in COUNTING)
    for one in optimizations().values():
        assert one.proof
        for call in one.proof:
            # Versions of one function count calls by their number.
            versions = call.rstrip("0123456789") + "{version}"
            counted = f'"{call}"' in text or f'"{versions}"' in text
            assert counted, f"{one.name}: nothing counts {call}"
        assert f'"{one.name}": ' in (ROOT / "src/primus_images/turbo/selftest.py").read_text()


def test_weights_of_one_rank_are_not_sharded() -> None:
    choices = Choices(backend="torchtitan", precision="bf16", gpu="h200")
    one = reasons(resolve("llama3.1-8b", ["ranks=1"], choices))
    assert one["peer-copies"] == (False, "needs weights sharded over at least 2 ranks")
    assert reasons(resolve("llama3.1-8b", ["ranks=2"], choices))["peer-copies"][0]
