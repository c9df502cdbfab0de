"""Flash Attention as the models call it, with a stand-in that computes the same on a CPU."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
# They look for Flash Attention when they are imported.
transformers = pytest.importorskip("transformers")
AttentionInterface = transformers.AttentionInterface
flux = pytest.importorskip("diffusers.models.transformers.transformer_flux")

from torch import Tensor  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

from primus_images.turbo import attention, packed  # noqa: E402
from primus_images.turbo.optimizations import CALLS  # noqa: E402

SCALE = 0.3


def expected(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, causal: bool) -> Tensor:
    """Attention of tensors [batch, tokens, heads, size] by PyTorch."""
    places = torch.arange(q.shape[1])
    distance = places[:, None] - places
    mask = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        mask = distance >= 0
    if window:
        mask &= distance < window
    parts = (part.transpose(1, 2) for part in (q, k, v))
    out = scaled_dot_product_attention(*parts, attn_mask=mask, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


class Kernels:
    """The functions of Flash Attention, and what they were called with."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, words: Any) -> Tensor:
        if "cu_seqlens_q" in words:
            bounds = words["cu_seqlens_q"].tolist()
            assert words["cu_seqlens_k"].tolist() == bounds
            assert (
                words["max_seqlen_q"]
                == words["max_seqlen_k"]
                >= max(last - first for first, last in pairwise(bounds))
            )
            spans = pairwise(bounds)
            plain = {key: value for key, value in words.items() if "seqlen" not in key}
            outs = [
                self._attend(*(part[None, first:last] for part in (q, k, v)), scale, plain)
                for first, last in spans
            ]
            return torch.cat(outs, dim=1)[0]
        window = words.get("window_size_left", -1) + 1
        assert words.get("window_size_right", 0) == 0
        return expected(q, k, v, scale, window, words["causal"])

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **words: Any) -> tuple[Tensor, Tensor]:
        self.calls.append(words)
        assert words.pop("return_lse") is True
        out = self._attend(q, k, v, words["softmax_scale"], words)
        return out.contiguous(), torch.zeros(1)

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        _out: Tensor,
        grad: Tensor,
        _lse: Tensor,
        **words: Any,
    ) -> tuple[Tensor, ...]:
        self.calls.append(words)
        assert grad.is_contiguous()

        def gradients() -> tuple[Tensor, ...]:
            leaves = [part.detach().requires_grad_() for part in (q, k, v)]
            out = self._attend(*leaves, words["softmax_scale"], words)
            return torch.autograd.grad(out, leaves, grad)

        # Within an operator, its own thread computes no gradients.
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(gradients).result()

    def version_2(self, q: Tensor, k: Tensor, v: Tensor, **words: Any) -> Tensor:
        self.calls.append(words)
        left, right = words["window_size"]
        window = left + 1
        assert right == (0 if window else -1)
        return expected(
            q, k, v, words["softmax_scale"] or q.shape[-1] ** -0.5, window, words["causal"]
        )


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    made = Kernels()
    names = ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface")
    modules: list[Any] = [ModuleType(name) for name in names]
    modules[0].flash_attn_func = made.version_2
    modules[2]._flash_attn_fwd = made.forward
    modules[2]._flash_attn_bwd = made.backward
    for name, module in zip(names, modules, strict=True):
        monkeypatch.setitem(sys.modules, name, module)
    before = dict(CALLS)
    yield made
    CALLS.clear()
    CALLS.update(before)


def parts(heads: int = 4, kv_heads: int = 2) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = ((2, 6, heads, 8), (2, 6, kv_heads, 8), (2, 6, kv_heads, 8))
    return [torch.randn(size).requires_grad_() for size in sizes]


@pytest.mark.parametrize("scale", [None, SCALE])
@pytest.mark.parametrize(("window", "causal"), [(0, True), (2, True), (0, False)])
def test_flash_attention_4_has_the_results_and_gradients_of_pytorch(
    kernels: Kernels, scale: float | None, window: int, causal: bool
) -> None:
    q, k, v = parts()
    before = CALLS["fa4_forward"], CALLS["fa4_backward"]
    out = attention.flash_attention_4(q, k, v, scale=scale, window=window, causal=causal)
    weight = torch.randn(out.shape)
    gradients = torch.autograd.grad((out * weight).sum(), (q, k, v))
    right = expected(q, k, v, scale or 8**-0.5, window, causal)
    torch.testing.assert_close(out, right)
    torch.testing.assert_close(gradients, torch.autograd.grad((right * weight).sum(), (q, k, v)))
    assert (CALLS["fa4_forward"], CALLS["fa4_backward"]) == (before[0] + 1, before[1] + 1)
    assert kernels.calls[1]["deterministic"] is False


@pytest.mark.parametrize("window", [0, 3])
def test_flash_attention_2_has_the_results_of_pytorch(kernels: Kernels, window: int) -> None:
    q, k, v = parts()
    before = CALLS["flash_attention_2"]
    out = attention.flash_attention_2(q, k, v, scale=SCALE, window=window)
    torch.testing.assert_close(out, expected(q, k, v, SCALE, window, True))
    assert CALLS["flash_attention_2"] == before + 1


@pytest.mark.parametrize("name", attention.FLASH)
@pytest.mark.parametrize(("sliding", "window"), [(None, 0), (3, 3), (5, 5), (6, 0), (9, 0)])
def test_models_of_transformers_attend_by_name(
    kernels: Kernels, name: str, sliding: int | None, window: int
) -> None:
    assert attention.attend_in_transformers(name) == "primus_attention"
    attend = AttentionInterface()["primus_attention"]
    q, k, v = parts()
    heads_first = [part.transpose(1, 2) for part in (q, k, v)]
    out, shares = attend(None, *heads_first, None, sliding_window=sliding)
    assert shares is None
    torch.testing.assert_close(out, expected(q, k, v, 8**-0.5, window, True))
    with pytest.raises(RuntimeError, match=f"{name} takes no mask: these sequences"):
        attend(None, *heads_first, torch.ones(1))


def test_flux_attends_to_everything(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flux, "dispatch_attention_fn", flux.dispatch_attention_fn)
    attention.attend_in_diffusers()
    q, k, v = parts(2, 2)
    out = flux.dispatch_attention_fn(q, k, v, attn_mask=None, backend="x")
    torch.testing.assert_close(out, expected(q, k, v, 8**-0.5, 0, False))
    with pytest.raises(RuntimeError, match="supports no attention mask in FLUX"):
        flux.dispatch_attention_fn(q, k, v, torch.ones(1))


def test_torchtitans_attention_has_heads_before_tokens(kernels: Kernels) -> None:
    q, k, v = parts()
    heads_first = [part.transpose(1, 2) for part in (q, k, v)]
    out = attention.Attention(attention.flash_attention_4)(*heads_first, scale=SCALE, other=1)
    torch.testing.assert_close(out.transpose(1, 2), expected(q, k, v, SCALE, 0, True))


def test_rotation_turns_neighbors_as_complex_numbers() -> None:
    x = torch.randn(2, 3, 8).bfloat16()
    angles = torch.randn(3, 4)
    turn = torch.stack((angles.cos(), angles.sin()), -1)
    complex_x = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    right = torch.view_as_real(complex_x * torch.polar(torch.ones_like(angles), angles))
    out = attention.rotate(x, turn)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, right.flatten(-2).bfloat16())


@pytest.mark.parametrize("scale", [None, SCALE])
@pytest.mark.parametrize("window", [0, 2])
def test_packed_documents_attend_by_flash_attention_4(
    kernels: Kernels, scale: float | None, window: int
) -> None:
    q, k, v = (part.detach()[0].requires_grad_() for part in parts())
    bounds = torch.tensor([0, 2, 6], dtype=torch.int32)
    factor = scale or 8**-0.5
    before = CALLS["packed_forward_4"], CALLS["packed_backward_4"]
    out, _ = packed._forward(q, k, v, bounds, 4, factor, window, packed.FLASH_4)
    weight = torch.randn(out.shape)
    gradients = torch.autograd.grad((out * weight).sum(), (q, k, v))
    # A CPU computes with a mask of all pairs.
    right = packed.packed_attention(q, k, v, bounds, 4, scale=scale, window=window)
    torch.testing.assert_close(out, right)
    torch.testing.assert_close(gradients, torch.autograd.grad((right * weight).sum(), (q, k, v)))
    assert (CALLS["packed_forward_4"], CALLS["packed_backward_4"]) == (before[0] + 1, before[1] + 1)


def test_packed_samples_of_transformers_are_concatenated() -> None:
    assert packed.attend_in_transformers(packed.OF_PYTORCH) == "primus_packed"
    attend = AttentionInterface()["primus_packed"]
    q, k, v = parts()
    heads_first = [part.transpose(1, 2) for part in (q, k, v)]
    bounds = torch.tensor([0, 2, 6, 12], dtype=torch.int32)
    for sliding, window in ((None, 0), (2, 2), (5, 5), (6, 0)):
        out, shares = attend(
            None, *heads_first, None, document_bounds=bounds, sliding_window=sliding, scaling=SCALE
        )
        assert shares is None
        assert out.shape == (2, 6, 4, 8)
        for sample, first, last in ((0, 0, 2), (0, 2, 6), (1, 0, 6)):
            alone = [part[sample : sample + 1, first:last] for part in (q, k, v)]
            right = expected(*alone, SCALE, window, True)
            torch.testing.assert_close(out[sample : sample + 1, first:last], right)
    for mask, given in ((torch.ones(1), bounds), (None, None)):
        with pytest.raises(RuntimeError, match="takes the bounds of documents, and no mask"):
            attend(None, *heads_first, mask, document_bounds=given)


def test_shapes_of_packed_attention_are_known_without_computing() -> None:
    with torch.device("meta"):
        q, k = torch.empty(6, 4, 8), torch.empty(6, 2, 8)
        bounds = torch.empty(3, dtype=torch.int32)
        out, sums = packed._forward(q, k, k, bounds, 4, SCALE, 0, 4)
        grads = packed._backward(out, q, k, k, out, sums, bounds, 4, SCALE, 0, 4)
        assert (out.shape, sums.shape, sums.dtype) == ((6, 4, 8), (4, 6), torch.float32)
        assert [grad.shape for grad in grads] == [q.shape, k.shape, k.shape]
        q, k = torch.empty(2, 6, 4, 8), torch.empty(2, 6, 2, 8)
        out, sums = attention._forward(q, k, k, SCALE, 0)
        grads = attention._backward(q, k, k, out, out, sums, SCALE, 0)
        assert (out.shape, sums.shape, sums.dtype) == (q.shape, (2, 4, 6), torch.float32)
        assert [grad.shape for grad in grads] == [q.shape, k.shape, k.shape]
