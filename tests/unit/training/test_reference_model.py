"""The reference computes what our own model computes with the same weights, in code of its own."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from primus_images.recipes.architecture import Architecture, RopeScaling, shapes  # noqa: E402
from primus_images.recipes.resolve import resolve  # noqa: E402
from primus_images.recipes.setting import Choices  # noqa: E402
from primus_images.training.backends.fsdp.llama import Llama  # noqa: E402
from primus_images.training.judge.reference.model import Model  # noqa: E402
from primus_images.training.judge.reference.names import (  # noqa: E402
    from_canonical,
    to_canonical,
)
from primus_images.training.judge.reference.rounding import bfloat  # noqa: E402

LLAMA = replace(
    resolve("llama3.1-8b", (), Choices(gpu="cpu", proxy=True)).architecture,
    layers=2,
    vocab_size=64,
    hidden_size=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn_size=48,
)
LENGTH = 24
SIZES = {
    "llama": LLAMA,
    "tied": replace(LLAMA, tied_embeddings=True),
    "window": replace(LLAMA, window=5),
    "one head of keys": replace(LLAMA, kv_heads=1),
    "biases": replace(LLAMA, family="qwen2", qkv_bias=True),
    "norms of heads": replace(LLAMA, family="qwen3", qk_norm=True),
    "no scaling": replace(LLAMA, rope_scaling=RopeScaling()),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Products of this size gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made(sizes: Architecture) -> tuple[Llama, dict[str, torch.Tensor]]:
    """A model with random weights, and these weights by their general names."""
    torch.manual_seed(0)
    model = Llama(sizes, LENGTH, 0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)
    named = to_canonical("fsdp", sizes, dict(model.state_dict()))
    return model.double(), {name: tensor.double() for name, tensor in named.items()}


def batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 64, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


@pytest.mark.parametrize("name", SIZES)
def test_logits_and_gradients_are_the_same(name: str) -> None:
    sizes = SIZES[name]
    model, weights = made(sizes)
    assert {key: tuple(tensor.shape) for key, tensor in weights.items()} == shapes(sizes)
    given = batch()
    own = {key: tensor.clone().requires_grad_() for key, tensor in weights.items()}
    logits, _ = Model(sizes).prediction(own, given)
    theirs = model.output(model.hidden(given["inputs"])[0])
    # Our model keeps its angles in float32.
    assert apart(logits.detach(), theirs.detach()) < 1e-5
    errors, _ = Model(sizes).losses(own, given)
    loss = torch.nn.functional.cross_entropy(theirs.flatten(0, 1), given["labels"].flatten())
    assert errors.mean().item() == pytest.approx(loss.item(), rel=1e-5)
    errors.mean().backward()
    loss.backward()
    gradients = to_canonical("fsdp", sizes, {key: p.grad for key, p in model.named_parameters()})
    for key, gradient in gradients.items():
        assert apart(own[key].grad, gradient) < 1e-4, key


@pytest.mark.parametrize("name", SIZES)
def test_names_of_weights_lead_back(name: str) -> None:
    sizes = SIZES[name]
    model, weights = made(sizes)
    for key, tensor in model.state_dict().items():
        if not (sizes.tied_embeddings and key == "output.weight"):
            again = from_canonical("fsdp", sizes, key, tensor.shape, weights.__getitem__)
            assert torch.equal(again, tensor), key


@pytest.mark.parametrize(
    "wrong",
    [
        {"norm_eps": 0.1},
        {"rope_theta": 10_000.0},
        {"window": 5},
        {"rope_scaling": replace(LLAMA.rope_scaling, factor=2.0)},
    ],
)
def test_a_model_of_other_sizes_computes_something_else(wrong: dict[str, object]) -> None:
    _, weights = made(LLAMA)
    right, _ = Model(LLAMA).prediction(weights, batch())
    other, _ = Model(replace(LLAMA, **wrong)).prediction(weights, batch())
    assert apart(other, right) > 1e-4


def test_documents_of_a_sample_do_not_see_each_other() -> None:
    _, weights = made(LLAMA)
    given = batch()
    places = torch.arange(LENGTH).repeat(2, 1)
    places[:, 10:] -= 10
    packed, _ = Model(LLAMA).prediction(weights, {**given, "positions": places})
    alone, _ = Model(LLAMA).prediction(weights, {"inputs": given["inputs"][:, 10:]})
    assert apart(packed[:, 10:], alone) < 1e-6
    whole, _ = Model(LLAMA).prediction(weights, given)
    assert apart(packed[:, :10], whole[:, :10]) < 1e-6
    assert apart(packed[:, 10:], whole[:, 10:]) > 1e-3


def test_rounding_between_operations_moves_results_by_as_much_as_the_type() -> None:
    _, weights = made(LLAMA)
    right, _ = Model(LLAMA).prediction(weights, batch())
    for inner in ((), ("norm", "rope")):
        rounded, _ = Model(LLAMA, between=bfloat, inner=inner).prediction(weights, batch())
        assert 1e-4 < apart(rounded, right) < 0.1


@pytest.mark.parametrize(
    ("doubt", "chosen"),
    [(0.0, [[0, 2], [1, 0]]), (0.1, [[0, 3], [1, 0]]), (0.6, [[0, 3], [1, 2]])],
)
def test_a_token_in_doubt_goes_to_the_next_best_expert(
    doubt: float, chosen: list[list[int]]
) -> None:
    sizes = replace(LLAMA, moe=replace(LLAMA.moe, experts=4, top_k=2))
    model = Model(sizes=sizes, doubt=doubt)
    scores = torch.tensor([[0.8, 0.1, 0.4, 0.38], [0.5, 0.9, 0.25, 0.1]])
    assert model._best(scores).tolist() == chosen
    assert model.closest == pytest.approx(0.05)
