"""What a backend is asked for and does not compute, and keys that it does not have."""

import pytest

from primus_images.errors import InputError
from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices


def refusal(
    backend: str, *words: str, recipe: str = "llama3.1-8b", **choices: object
) -> InputError:
    usual = {"gpu": "mi300x", "nodes": 1, "backend": backend}
    with pytest.raises(InputError) as caught:
        resolve(recipe, words, Choices(**{**usual, **choices}))  # type: ignore[arg-type]
    return caught.value


@pytest.mark.parametrize(
    ("backend", "word", "message", "hint"),
    [
        ("torchtitan", "training.stepz=5", "there is no key 'torchtitan.training.stepz'", None),
        (
            "torchtitan",
            "finetune.training.steps=5",
            "finetune.training.steps is not a key of the backend torchtitan",
            "--backend finetune has it",
        ),
        (
            "torchtitan",
            "zebra.zebra=5",
            "there is no key 'torchtitan.zebra.zebra'",
            "the keys of torchtitan are those of its own configuration at the pinned version",
        ),
        (
            "torchtitan",
            "model.zzzzzz=5",
            "there is no key 'model.zzzzzz'",
            "a model is described by ",
        ),
        ("torchtitan", "steps=five", "torchtitan.training.steps must be a whole number", None),
        ("torchtitan", "steps=.nan", "torchtitan.training.steps must be a whole number", None),
        ("torchtitan", "steps=.inf", "torchtitan.training.steps must be a whole number", None),
        ("torchtitan", "steps=1e3", "torchtitan.training.steps must be a whole number", None),
        ("torchtitan", "seq_len=five", "torchtitan.training.seq_len must be a whole number", None),
    ],
)
def test_a_key_that_a_backend_does_not_have(
    backend: str, word: str, message: str, hint: str | None
) -> None:
    error = refusal(backend, word)
    assert error.message.startswith(message)
    assert str(error.where).startswith("command line: ")
    assert str(error.hint).startswith(str(hint))


def test_lora_settings_have_no_effect_in_another_mode() -> None:
    error = refusal("finetune", "lora.rank=8", mode="full")
    assert error.message == "lora.rank has no effect in another mode than LoRA"
    assert error.hint == "--mode lora"


@pytest.mark.parametrize(
    ("backend", "words", "recipe", "reason"),
    [
        ("torchtitan", ("cp=2",), "llama3.1-8b", "PyTorch's attention on the CPU cannot split"),
        ("torchtitan", ("pp=2",), "qwen3-8b", "torchtitan 0.2.2 cannot cut Qwen 3 into stages"),
        ("megatron", ("cp=2",), "llama3.1-8b", "Megatron splits sequences in Transformer Engine"),
        (
            "megatron",
            ("torch_fsdp2=true", "tp=2"),
            "llama3.1-8b",
            "torch_fsdp2 shares out the whole model over all ranks",
        ),
        (
            "torchtitan",
            ("training.enable_cpu_offload=true",),
            "llama3.1-8b",
            "the weights are on the CPU already",
        ),
    ],
)
def test_what_a_backend_does_not_compute_on_a_cpu_is_refused(
    backend: str, words: tuple[str, ...], recipe: str, reason: str
) -> None:
    words = ("ranks=2", "proxy=true", *words)
    error = refusal(backend, *words, recipe=recipe, gpu="cpu")
    assert reason in error.message
    assert str(error.where).startswith("command line: ")
