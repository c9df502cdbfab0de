"""Which tokens a model can be trained on."""

import pytest

np = pytest.importorskip("numpy")

from primus_images.errors import InputError  # noqa: E402
from primus_images.recipes.recipe import Recipe  # noqa: E402
from primus_images.recipes.resolve import resolve  # noqa: E402
from primus_images.recipes.setting import Choices  # noqa: E402
from primus_images.training.backends import text  # noqa: E402
from primus_images.training.text.tokens import Tokens  # noqa: E402


def recipe_of(*overrides: str, backend: str = "fsdp") -> Recipe:
    return resolve("llama3.1-8b", overrides, Choices(gpu="cpu", backend=backend, proxy=True))


def tokens_of(*documents: int, trained: bool | None = None, largest: int = 5) -> Tokens:
    """Documents of these lengths; with ``trained``, all of their tokens are trained, or none."""
    ends = np.cumsum(documents)
    tokens = np.full(ends[-1], largest)
    mask = None if trained is None else np.full(len(tokens), int(trained), dtype=np.uint8)
    return Tokens(tokens=tokens, ends=ends, mask=mask)


LENGTH = recipe_of().seq_len


@pytest.mark.parametrize(
    ("name", "tokens", "backend"),
    [
        ("train", tokens_of(LENGTH + 1), "fsdp"),
        ("train", tokens_of(3, trained=True), "finetune"),
        ("eval", tokens_of(3), "finetune"),
    ],
)
def test_tokens_that_can_be_trained(name: str, tokens: Tokens, backend: str) -> None:
    text._check_tokens(recipe_of(backend=backend), name, tokens, "corpus.jsonl")


@pytest.mark.parametrize(
    ("name", "tokens", "backend", "said"),
    [
        ("train", tokens_of(LENGTH), "fsdp", f"{LENGTH} tokens, fewer than one sample"),
        ("train", tokens_of(3, trained=False), "finetune", "no token of the corpus is trained"),
        ("eval", tokens_of(1), "finetune", "no document has an answer"),
        ("train", tokens_of(LENGTH), "torchtitan", f"{LENGTH} tokens, fewer than one sample"),
    ],
)
def test_too_few_tokens_are_refused(name: str, tokens: Tokens, backend: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        text._check_tokens(recipe_of(backend=backend), name, tokens, "corpus.jsonl")


def test_tokens_outside_of_the_vocabulary_are_refused() -> None:
    vocabulary = recipe_of().architecture.vocab_size
    text._check_tokens(recipe_of(), "train", tokens_of(200, largest=vocabulary - 1), "x")
    with pytest.raises(InputError, match=f"produces token {vocabulary}, but"):
        text._check_tokens(recipe_of(), "train", tokens_of(200, largest=vocabulary), "x")


def test_packing_needs_a_document_that_fits() -> None:
    recipe = recipe_of("packing=true", "assets.corpus=assets/corpus.jsonl", backend="finetune")
    text._check_tokens(recipe, "train", tokens_of(3), "x")
    with pytest.raises(InputError, match="no document has an answer"):
        text._check_tokens(recipe, "train", tokens_of(1), "x")
