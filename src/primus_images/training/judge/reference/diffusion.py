"""FLUX.1's transformer and its loss, from their definitions; weights have diffusers' names.

Blocks have two streams (MM-DiT, arXiv:2403.03206) and then one, all modulated by the time (DiT,
arXiv:2212.09748).
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu
from typing_extensions import override

from primus_images.training.judge.reference.model import Part, Scores, Transformer, Weights
from primus_images.training.judge.reference.rounding import Rounding, exact

_EPS = 1e-6
# The number of sinusoids that encode a time, and their longest period in radians.
_WAVES = 256
_PERIOD = 10_000.0
# The model's times range from 0 to this value.
_TIMES = 1000.0
# GELU's approximation (arXiv:1606.08415, section 2).
_GELU = partial(gelu, approximate="tanh")
# Cosine and sine of the angles by which heads are rotated.
Turn = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class _Stream:
    """The text or the image in a block: parts of the names of its weights, and its states."""

    suffix: str
    projection: str
    norm: str
    output: str
    states: Tensor


@dataclass
class Diffusion(Transformer):
    """FLUX's transformer. It predicts the velocity, noise − latents, [images, tokens, channels].

    ``guidance`` is the scale passed to a model with guidance embeddings. ``entering`` rounds the
    model's inputs as the run does, and ``keeping`` the means and deviations that a norm keeps for
    its gradient.
    """

    guidance: float = 1.0
    entering: Rounding = exact
    keeping: Rounding = exact

    @override
    def blocks(self) -> list[str]:
        dit = self.sizes.dit
        double = [f"transformer_blocks.{number}" for number in range(dit.double_layers)]
        single = [f"single_transformer_blocks.{number}" for number in range(dit.single_layers)]
        return double + single

    @override
    def entered(self, weights: Weights, batch: Weights) -> tuple[Tensor, Tensor | None]:
        """The states of the text come first. A vector [images, hidden] modulates all blocks."""
        whole = Part(weights)
        dtype = whole["proj_out.weight"].dtype
        clean = batch["latents"].to(dtype)
        time = batch["time"].to(dtype)
        level = time[:, None, None]
        mixed = self.entering((1 - level) * clean + level * batch["noise"].to(dtype))
        text = self.entering(batch["text"].to(dtype))
        text = self._linear(whole, "context_embedder", text)
        image = self._linear(whole, "x_embedder", mixed)
        pooled = self.entering(batch["pooled"].to(dtype))
        condition = self._condition(whole.part("time_text_embed."), pooled, time)
        return torch.cat((text, image), 1), condition

    @override
    def block(
        self, weights: Weights, name: str, states: Tensor, context: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        assert context is not None
        condition = context.to(states.dtype)
        turn = self._angles(states)
        part = Part(weights, f"{name}.")
        if name.startswith("single"):
            states = self._single(part, states, condition, turn)
        else:
            states = self._double(part, states, condition, turn)
        return states, states.new_zeros(())

    @override
    def head(self, weights: Weights, states: Tensor, context: Tensor | None) -> Tensor:
        assert context is not None
        image = states[:, self.sizes.dit.text_tokens :]
        condition = context.to(states.dtype)
        scale, shift = self._modulation(Part(weights), "norm_out.linear", condition, 2)
        return self._linear(Part(weights), "proj_out", self._normed(image, shift, scale))

    @override
    def errors(self, predicted: Tensor, batch: Weights) -> Tensor:
        clean = batch["latents"].to(predicted.dtype)
        noise = batch["noise"].to(predicted.dtype)
        return (predicted - (noise - clean)).square().mean((1, 2))

    def _condition(self, part: Part, pooled: Tensor, time: Tensor) -> Tensor:
        parts = {"timestep": self._waves(time)}
        if self.sizes.dit.guidance:
            parts["guidance"] = self._waves(torch.full_like(time, self.guidance))
        parts["text"] = pooled
        total = torch.zeros(())
        for name, value in parts.items():
            embedder = part.part(f"{name}_embedder.")
            hidden = self.between(silu(self._linear(embedder, "linear_1", value)))
            embedded = self._linear(embedder, "linear_2", hidden)
            total = self.between(total + embedded)
        return total

    def _waves(self, value: Tensor) -> Tensor:
        place = torch.arange(_WAVES // 2, dtype=torch.float64)
        frequencies = torch.exp(-math.log(_PERIOD) * place / (_WAVES // 2))
        # Rounded twice: when it enters the model, and where the model multiplies it.
        entered = self.entering(self.entering(value) * _TIMES)
        angles = entered.double()[:, None] * frequencies
        return self.between(torch.cat((angles.cos(), angles.sin()), -1).to(value.dtype))

    def _double(self, part: Part, states: Tensor, condition: Tensor, turn: Turn) -> Tensor:
        length = self.sizes.dit.text_tokens
        streams = (
            _Stream("", "to_{}", "norm_", "to_out.0", states[:, length:]),
            _Stream("_context", "add_{}_proj", "norm_added_", "to_add_out", states[:, :length]),
        )
        attention = part.part("attn.")
        modulations = []
        heads = []
        for stream in streams:
            six = self._modulation(part, f"norm1{stream.suffix}.linear", condition, 6)
            normed = self._normed(stream.states, six[0], six[1])
            names = [stream.projection.format(kind) for kind in "qkv"]
            heads.append(self._heads(attention, names, stream.norm, normed))
            modulations.append(six)
        of_image, of_text = heads
        pairs = zip(of_text, of_image, strict=True)
        query, key, value = (torch.cat(pair, 2) for pair in pairs)
        mixed = self._mixed(query, key, value, turn)
        outputs = []
        mixtures = (mixed[:, length:], mixed[:, :length])
        for stream, mixture, six in zip(streams, mixtures, modulations, strict=True):
            _, _, gate, shift, scale, gate_fed = six
            moved = gate * self._linear(attention, stream.output, mixture)
            after = self.between(stream.states + self.between(moved))
            feed_forward = part.part(f"ff{stream.suffix}.net.")
            normed = self._normed(after, shift, scale)
            hidden = self.between(_GELU(self._linear(feed_forward, "0.proj", normed)))
            fed = self._linear(feed_forward, "2", hidden)
            outputs.append(self.between(after + self.between(gate_fed * fed)))
        image, text = outputs
        return torch.cat((text, image), 1)

    def _single(self, part: Part, states: Tensor, condition: Tensor, turn: Turn) -> Tensor:
        shift, scale, gate = self._modulation(part, "norm.linear", condition, 3)
        normed = self._normed(states, shift, scale)
        fed = self.between(_GELU(self._linear(part, "proj_mlp", normed)))
        names = [f"to_{kind}" for kind in "qkv"]
        query, key, value = self._heads(part.part("attn."), names, "norm_", normed)
        both = torch.cat((self._mixed(query, key, value, turn), fed), -1)
        moved = self.between(gate * self._linear(part, "proj_out", both))
        return self.between(states + moved)

    def _heads(self, part: Part, names: list[str], norm: str, states: Tensor) -> list[Tensor]:
        heads = []
        for name, kind in zip(names, "qkv", strict=True):
            projected = self._linear(part, name, states)
            projected = projected.unflatten(-1, (self.sizes.heads, -1)).transpose(1, 2)
            if kind != "v":
                mean = projected.square().mean(-1, keepdim=True)
                length = (mean + _EPS + self.constants.norm_eps).rsqrt()
                projected = self.between(projected * length * part[f"{norm}{kind}.weight"])
            heads.append(projected)
        return heads

    def _mixed(self, query: Tensor, key: Tensor, value: Tensor, turn: Turn) -> Tensor:
        query = self.between(_turned(query, *turn))
        key = self.between(_turned(key, *turn))
        hidden = torch.zeros((), dtype=torch.bool)
        scores = Scores(hidden=hidden, scale=query.shape[-1] ** -0.5)
        return self.attended(query, key, value, scores)

    def _modulation(self, part: Part, name: str, condition: Tensor, parts: int) -> list[Tensor]:
        modulation = self._linear(part, name, self.between(silu(condition)))
        return list(modulation.unsqueeze(1).chunk(parts, -1))

    def _normed(self, states: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        even = self.between(_Even.apply(states, _EPS + self.constants.norm_eps, self.keeping))
        return self.between(self.between(even * (1 + scale)) + shift)

    def _linear(self, part: Part, name: str, states: Tensor) -> Tensor:
        # The gradient of the states is rounded as well, before those of other products are added.
        product = self.between(states) @ part[name + ".weight"].T
        return self.between(product + part[name + ".bias"])

    def _angles(self, states: Tensor) -> Turn:
        """Return cosine and sine [tokens, size / 2] by index (always 0), row and column.

        The text comes first, at 0.
        """
        before = self.sizes.dit.text_tokens
        side = math.isqrt(states.shape[1] - before)
        place = torch.arange(side, dtype=torch.float64)
        size = self.sizes.head_size
        index = max(2, size // 8)
        index += (size - index) % 4
        along = (size - index) // 2
        angles = [torch.zeros(side * side, index // 2, dtype=torch.float64)]
        for axis in (place.repeat_interleave(side), place.repeat(side)):
            frequencies = _PERIOD ** (-torch.arange(0, along, 2, dtype=torch.float64) / along)
            angles.append(axis[:, None] * frequencies)
        of_image = torch.cat(angles, -1)
        of_text = torch.zeros(before, of_image.shape[1], dtype=torch.float64)
        phases = self.constants.phases(torch.cat((of_text, of_image)))
        cosine = self.constants.angles(phases.cos().to(states.dtype))
        sine = self.constants.angles(phases.sin().to(states.dtype))
        return self.between(cosine), self.between(sine)


class _Even(torch.autograd.Function):
    """States less their mean, over their standard deviation.

    The gradient uses both as ``keeping`` rounds them.
    """

    @staticmethod
    def forward(context: Any, states: Tensor, eps: float, keeping: Rounding) -> Tensor:
        mean = states.mean(-1, keepdim=True)
        centred = states - mean
        scale = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
        context.save_for_backward(states, keeping(mean), keeping(scale))
        return centred * scale

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradients[0]
        states, mean, scale = context.saved_tensors
        even = (states - mean) * scale
        along = even * (gradient * even).mean(-1, keepdim=True)
        return scale * (gradient - gradient.mean(-1, keepdim=True) - along), None, None


def _turned(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first = states[..., 0::2]
    second = states[..., 1::2]
    turned_first = first * cosine - second * sine
    turned_second = second * cosine + first * sine
    return torch.stack((turned_first, turned_second), -1).flatten(-2)
