"""The same weights give the same output in the reference as in transformers and diffusers."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from diffusers import FluxTransformer2DModel
from transformers import AutoModelForCausalLM

from primus_images.recipes.architecture import shapes
from primus_images.recipes.family import OTHER, families, family
from primus_images.recipes.load import entries
from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from primus_images.training.backends.finetune.models import config_of
from primus_images.training.backends.flux.backend import config_of as flux_config_of
from primus_images.training.backends.flux.entry import rotary_axes
from primus_images.training.judge.reference import blocks, diffusion, models, update
from primus_images.training.judge.reference.model import Model
from primus_images.training.judge.reference.names import from_canonical, to_canonical
from primus_images.training.judge.reference.parameters import without_bias
from primus_images.training.judge.reference.rounding import (
    Kernel,
    Rounding,
    attended,
    bfloat,
    exact,
)
from primus_images.training.judge.witness import Blocks


def main() -> None:
    torch.manual_seed(0)
    names = {entry.architecture.family: entry.recipe for entry in entries()}
    # A family that only Megatron computes has no model of transformers.
    known = [family(name) for name in families() if name != OTHER]
    computed = [one.name for one in known if one.transformers and not one.images]
    proxies = [
        resolve(names[name], [], Choices(gpu="cpu", proxy=True)).architecture for name in computed
    ]
    proxies.append(replace(proxies[computed.index("llama3")], tied_embeddings=True))
    for proxy in proxies:
        name = proxy.family
        sizes = replace(proxy, window=7) if name == "mistral" else proxy
        model = AutoModelForCausalLM.from_config(config_of(sizes, "eager"))
        for parameter in model.parameters():
            torch.nn.init.normal_(
                parameter, 1.0 - sizes.norm_offset if parameter.ndim == 1 else 0.0, 0.1
            )
        mine = {f"model.{name}": value for name, value in model.state_dict().items()}
        weights = to_canonical("finetune", sizes, mine)
        assert {key: tuple(value.shape) for key, value in without_bias(weights).items()} == shapes(
            sizes
        ), name
        for key, tensor in mine.items():
            if not (sizes.tied_embeddings and "lm_head" in key):
                again = from_canonical("finetune", sizes, key, tensor.shape, weights.__getitem__)
                assert torch.equal(again, tensor), (name, key)
        tokens = torch.randint(0, sizes.vocab_size, (2, 33))
        wide, batch = {key: value.double() for key, value in weights.items()}, {"inputs": tokens}
        with torch.no_grad():
            ours, _ = Model(sizes).prediction(wide, batch)
            theirs = model(tokens).logits
        gap = float((ours - theirs).abs().max() / theirs.abs().max())
        assert gap < 1e-5, (name, gap)
        for wrong in _wrong(sizes):
            other, _ = Model(wrong).prediction(wide, batch)
            assert float((other.detach() - theirs).abs().max() / theirs.abs().max()) > 1e-4, (
                name,
                wrong,
            )


def norms() -> None:
    """A norm's gradient, also as PyTorch computes it on a CPU, where it keeps means and deviations
    in bfloat16.
    """

    torch.manual_seed(0)

    def gradient(
        states: torch.Tensor, norm: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        leaf = states.detach().clone().requires_grad_()
        norm(leaf).backward(given.to(states.dtype))
        assert leaf.grad is not None
        return leaf.grad.double()

    def theirs(states: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(states, states.shape[-1:], eps=1e-6)

    def ours(keeping: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return gradient(states.double(), lambda leaf: diffusion._Even.apply(leaf, 1e-6, keeping))

    # The mean is much larger than the deviation, as in the states of a trained model.
    states, given = (
        (torch.randn(6, 64) + 30 * torch.rand(6, 1)).bfloat16(),
        torch.randn(6, 64).bfloat16(),
    )
    exactly = gradient(states.double(), theirs)
    torch.testing.assert_close(ours(exact), exactly)
    narrow = gradient(states, theirs)
    explained, unexplained = float((ours(bfloat) - narrow).norm()), float((exactly - narrow).norm())
    assert explained < unexplained / 4, (explained, unexplained)


def attention() -> None:
    """Attention of grouped heads with its gradients, also as PyTorch's CPU kernel rounds them."""
    shapes, length = ((3, 8, 128, 16), (3, 2, 128, 16), (3, 2, 128, 16)), 128
    given = torch.randn(shapes[0]).bfloat16()
    # The first tokens get most of the attention, as in trained models: many gradients are added
    # there.
    parts = [torch.randn(shape) for shape in shapes]
    parts[1][..., :2, :] += 4 * parts[0].mean((1, 2))[:, None, None]
    parts = [part.bfloat16() for part in parts]
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)

    def results(attend: Callable[..., torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [part.to(dtype).requires_grad_() for part in parts]
        out = attend(*leaves)
        return [each.double() for each in (out, *torch.autograd.grad(out, leaves, given.to(dtype)))]

    def theirs(*leaves: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            *leaves, is_causal=True, enable_gqa=True
        )

    def ours(between: Rounding, adding: bool) -> list[torch.Tensor]:
        def attend(*leaves: torch.Tensor) -> torch.Tensor:
            out = attended(
                *leaves, Kernel(hidden=hidden, scale=0.25, between=between, adding=adding)
            )
            return out.unflatten(-1, (8, -1)).transpose(1, 2)

        return results(attend, torch.float64)

    exactly, narrow = results(theirs, torch.float64), results(theirs, torch.bfloat16)
    torch.testing.assert_close(ours(exact, adding=True), exactly)
    rounded = ours(bfloat, adding=True)
    for name, *each in zip(
        ("output", "query", "key", "value"), exactly, narrow, rounded, strict=True
    ):
        error, own = ((seen - each[0]).norm(dim=-1).mean((0, 1)) for seen in each[1:])
        # The first token's output is its value, and its query has no gradient.
        most = float((error[1:] / own[1:]).max())
        assert 0.5 < most < 2, (name, most)
    # Without the rounded sums, the gradients of the first values would be twice as exact.
    once, sums = (
        (seen[3] - exactly[3])[..., :2, :].norm() for seen in (ours(bfloat, adding=False), narrow)
    )
    assert float(once) < 0.6 * float(sums), (once, sums)


def flux() -> None:
    """FLUX's transformer, in float64 on both sides."""
    sizes = resolve("flux.1-dev", [], Choices(gpu="cpu", proxy=True)).architecture
    dit = sizes.dit
    axes = rotary_axes(sizes.head_size)
    model = FluxTransformer2DModel(**flux_config_of(sizes), axes_dims_rope=axes).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.1)
    weights = dict(model.named_parameters())
    assert {key: tuple(value.shape) for key, value in weights.items()} == shapes(sizes)
    image, text = torch.randn(2, 16, dit.in_channels), torch.randn(2, dit.text_tokens, dit.text_dim)
    pooled, time = torch.randn(2, dit.pooled_dim).double(), torch.rand(2).double()
    places = torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0))
    with torch.no_grad():
        theirs = model(
            hidden_states=image.double(),
            encoder_hidden_states=text.double(),
            pooled_projections=pooled,
            timestep=time,
            img_ids=places,
            txt_ids=torch.zeros(dit.text_tokens, 3),
            guidance=torch.full((2,), 3.5).double(),
            return_dict=False,
        )[0]
        for guidance, scale, agrees in ((3.5, 1.0, True), (3.0, 1.0, False), (3.5, 0.99, False)):
            own = diffusion.Diffusion(sizes, guidance=guidance)
            # An image mixed with itself is the image at any time.
            batch = {
                "latents": image,
                "noise": image,
                "time": scale * time,
                "text": text,
                "pooled": pooled,
            }
            found, _ = own.prediction(weights, batch)
            gap = float((found - theirs).abs().max() / theirs.abs().max())
            # diffusers computes the sinusoids of the time in float32.
            assert (gap < 1e-4) is agrees, (guidance, scale, gap)


def fit() -> None:
    """A change that a tenth of the rounding hides in every tensor is found; one that the run has
    not is not.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn() -> torch.Tensor:
        return torch.randn(1, 50, 50, generator=generator)

    results = []
    for number in range(32):
        own, one, other = drawn(), drawn(), drawn()
        results.append(
            blocks.Result(
                name=f"layers.{number}",
                run=own + 0.1 * one + drawn(),
                exact=own,
                rounded=own + drawn(),
                certain=torch.ones(1, 50, dtype=torch.bool),
                moved={"one": 0.1 * one, "other": 0.1 * other},
            )
        )
    parts = models.products_of_blocks(("one", "other", "none"), results)
    rows = models.fit(("one", "other", "none"), parts)
    assert set(rows) == {"one", "other"}, rows
    assert abs(rows["one"]["share"] - 1) < 0.2 > abs(rows["other"]["share"]), rows
    assert all(
        abs(row["rounding"]) < 0.2 and 0.01 < row["deviation"] < 0.1 for row in rows.values()
    ), rows


def updates() -> None:
    """An update to NaN is a gap. The last step of a schedule still learns."""
    before = {"a": torch.ones(2, 2)}
    expected = {"a": torch.zeros(2, 2, dtype=torch.float64)}
    assert update.gap(before, expected, expected, 0.0) == {"gap": 0.0, "name": ""}
    broken = {"a": torch.full((2, 2), torch.nan)}
    assert update.gap(before, expected, broken, 0.0) == {"gap": 1e9, "name": "a"}
    config = {"optimizer.lr": 1.0, "lr_scheduler.warmup_steps": 2, "training.steps": 4}
    job = {"backend": "torchtitan", "config": config}
    assert [update.rate(job, step) for step in range(1, 5)] == [0.5, 1.0, 1.0, 0.5]


def figures() -> None:
    """One token far off is a wrong token; a position is wrong if all of its tokens are."""
    generator = torch.Generator().manual_seed(0)
    outputs, noise = (
        torch.randn(8, 128, 16, generator=generator, dtype=torch.float64) for _ in range(2)
    )

    def judged(*places: tuple[int | slice, int]) -> dict[str, object]:
        run = outputs + 1e-3 * noise.flip(-1)
        for sample, position in places:
            run[sample, position] = outputs[sample, position] + 8e-3 * noise[sample, position]
        certain = torch.ones(8, 128, dtype=torch.bool)
        rounded = outputs + 1e-3 * noise
        one = blocks.Result(
            name="layers.0", run=run, exact=outputs, rounded=rounded, certain=certain
        )
        return blocks._figures([one])

    for places, token, position in (((), 2, 2), (((3, 9),), 9, 2), (((slice(None), 9),), 9, 9)):
        row = judged(*places)
        assert token - 2 < row["token"] < token and position - 2 < row["position"] < position, row  # type: ignore[operator]
        assert not places or row["token_at"][1] == 9, row  # type: ignore[index]
    assert row["position_at"] == 9, row
    # All outputs but those of uncertain tokens are 1% too long.
    run, certain = 1.01 * outputs, torch.ones(8, 128, dtype=torch.bool)
    run[0, :4], certain[0, :4] = torch.nan, False
    rounded = outputs + 1e-3 * noise
    one = blocks.Result(name="layers.0", run=run, exact=outputs, rounded=rounded, certain=certain)
    row = blocks._figures([one])
    assert abs(row["share"] - 0.01) < 1e-4 and 0.9e-3 < row["noise"] < 1.1e-3, row


class _Unused(torch.autograd.Function):
    """Twice its input, which gets no gradient."""

    @staticmethod
    def forward(_context: object, states: torch.Tensor) -> torch.Tensor:
        return 2 * states

    @staticmethod
    def backward(_context: object, _gradient: torch.Tensor) -> None:  # type: ignore[override]
        return None


class _Block(torch.nn.Module):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        used: torch.Tensor = _Unused.apply(states)  # type: ignore[no-untyped-call]
        return used


def unused() -> None:
    """A block's input without a gradient has a gradient of zeros."""
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([_Block()])})
    seen = Blocks([model])
    seen.watch()
    states = torch.ones(2, 3, requires_grad=True) * 1
    (model["layers"][0](states) * torch.ones(3, requires_grad=True)).sum().backward()  # type: ignore[index]
    (call,) = seen.taken()["layers.0"]
    assert call["grad.in.hidden_states"].tolist() == [[0.0] * 3] * 2, call


def _wrong(sizes: object) -> Iterator[object]:
    """The same sizes with one thing changed: a test that tells nothing apart would agree, too."""
    yield replace(sizes, rope_theta=sizes.rope_theta * 0.9)  # type: ignore[type-var, attr-defined]
    yield replace(sizes, norm_eps=1e-2)  # type: ignore[type-var]
    yield replace(sizes, window=5)  # type: ignore[type-var]
    if sizes.family == "gemma3":  # type: ignore[attr-defined]
        stretched = replace(sizes.rope_scaling, factor=4.0)  # type: ignore[attr-defined]
        for field, value in {
            "window_pattern": 3,
            "local_rope_theta": 9000.0,
            "query_scalar": 30,
            "activation": "silu",
            "norm_offset": False,
            "scaled_embedding": False,
            "sandwich_norms": False,
            "rope_scaling": stretched,
        }.items():
            yield replace(sizes, **{field: value})  # type: ignore[type-var]
    if sizes.family == "llama4":  # type: ignore[attr-defined]
        moe = replace(sizes.moe, weighted_inputs=False)  # type: ignore[attr-defined]
        for field, value in {"window_pattern": 2, "interleaved_rope": False, "moe": moe}.items():
            yield replace(sizes, **{field: value})  # type: ignore[type-var]
    if sizes.family == "gpt_oss":  # type: ignore[attr-defined]
        for field, value in {
            "window_pattern": 3,
            "activation": "silu",
            "rope_scaling": replace(sizes.rope_scaling, truncate=True),
        }.items():
            yield replace(sizes, **{field: value})  # type: ignore[type-var]


main()
norms()
attention()
flux()
fit()
updates()
figures()
unused()
