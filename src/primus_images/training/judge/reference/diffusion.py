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
        names = []
        for number in range(dit.double_layers):
            names.append(f"transformer_blocks.{number}")
        for number in range(dit.single_layers):
            names.append(f"single_transformer_blocks.{number}")
        return names

    @override
    def entered(self, weights: Weights, batch: Weights) -> tuple[Tensor, Tensor | None]:
        """The states of the text come first. A vector [images, hidden] modulates all blocks."""
        whole = Part(weights)
        dtype = whole["proj_out.weight"].dtype
        clean = batch["latents"].to(dtype)
        noise = batch["noise"].to(dtype)
        time = batch["time"].to(dtype)
        level = time[:, None, None]
        mixed = self.entering((1 - level) * clean + level * noise)
        image = self._linear(whole, "x_embedder", mixed)
        words = self.entering(batch["text"].to(dtype))
        text = self._linear(whole, "context_embedder", words)
        pooled = self.entering(batch["pooled"].to(dtype))
        embedders = whole.part("time_text_embed.")
        condition = self._condition(embedders, pooled, time)
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
        whole = Part(weights)
        image = states[:, self.sizes.dit.text_tokens :]
        condition = context.to(states.dtype)
        scale, shift = self._modulation(whole, "norm_out.linear", condition, 2)
        normed = self._normed(image, shift, scale)
        return self._linear(whole, "proj_out", normed)

    @override
    def errors(self, predicted: Tensor, batch: Weights) -> Tensor:
        clean = batch["latents"].to(predicted.dtype)
        noise = batch["noise"].to(predicted.dtype)
        velocity = noise - clean
        squares = (predicted - velocity).square()
        return squares.mean((1, 2))

    def _condition(self, part: Part, pooled: Tensor, time: Tensor) -> Tensor:
        parts = {"timestep": self._waves(time)}
        if self.sizes.dit.guidance:
            guidance = torch.full_like(time, self.guidance)
            parts["guidance"] = self._waves(guidance)
        parts["text"] = pooled
        total = torch.zeros(())
        for name, value in parts.items():
            embedder = part.part(f"{name}_embedder.")
            wide = self._linear(embedder, "linear_1", value)
            hidden = self.between(silu(wide))
            embedded = self._linear(embedder, "linear_2", hidden)
            total = self.between(total + embedded)
        return total

    def _waves(self, value: Tensor) -> Tensor:
        count = _WAVES // 2
        place = torch.arange(count, dtype=torch.float64)
        frequencies = torch.exp(-math.log(_PERIOD) * place / count)
        # Rounded twice: when it enters the model, and where the model multiplies it.
        entered = self.entering(value)
        time = self.entering(entered * _TIMES).double()
        angles = time[:, None] * frequencies
        waves = torch.cat((angles.cos(), angles.sin()), -1)
        return self.between(waves.to(value.dtype))

    def _double(self, part: Part, states: Tensor, condition: Tensor, turn: Turn) -> Tensor:
        length = self.sizes.dit.text_tokens
        text = states[:, :length]
        image = states[:, length:]
        streams = (
            _Stream("", "to_{}", "norm_", "to_out.0", image),
            _Stream("_context", "add_{}_proj", "norm_added_", "to_add_out", text),
        )
        attention = part.part("attn.")
        modulations = []
        heads = []
        for stream in streams:
            name = f"norm1{stream.suffix}.linear"
            six = self._modulation(part, name, condition, 6)
            shift, scale, *_ = six
            normed = self._normed(stream.states, shift, scale)
            names = [stream.projection.format(kind) for kind in "qkv"]
            heads.append(self._heads(attention, names, stream.norm, normed))
            modulations.append(six)
        heads_of_image, heads_of_text = heads
        pairs = zip(heads_of_text, heads_of_image, strict=True)
        query, key, value = (torch.cat(pair, 2) for pair in pairs)
        mixed = self._mixed(query, key, value, turn)
        outputs = []
        of_text = mixed[:, :length]
        of_image = mixed[:, length:]
        mixtures = (of_image, of_text)
        for stream, mixture, six in zip(streams, mixtures, modulations, strict=True):
            _, _, gate, shift, scale, gate_fed = six
            attended = self._linear(attention, stream.output, mixture)
            moved = self.between(gate * attended)
            after = self.between(stream.states + moved)
            normed = self._normed(after, shift, scale)
            feed_forward = part.part(f"ff{stream.suffix}.net.")
            wide = self._linear(feed_forward, "0.proj", normed)
            hidden = self.between(_GELU(wide))
            narrow = self._linear(feed_forward, "2", hidden)
            fed = self.between(gate_fed * narrow)
            outputs.append(self.between(after + fed))
        image, text = outputs
        return torch.cat((text, image), 1)

    def _single(self, part: Part, states: Tensor, condition: Tensor, turn: Turn) -> Tensor:
        shift, scale, gate = self._modulation(part, "norm.linear", condition, 3)
        normed = self._normed(states, shift, scale)
        wide = self._linear(part, "proj_mlp", normed)
        fed = self.between(_GELU(wide))
        attention = part.part("attn.")
        names = ["to_q", "to_k", "to_v"]
        query, key, value = self._heads(attention, names, "norm_", normed)
        mixed = self._mixed(query, key, value, turn)
        both = torch.cat((mixed, fed), -1)
        out = self._linear(part, "proj_out", both)
        moved = self.between(gate * out)
        return self.between(states + moved)

    def _heads(self, part: Part, names: list[str], norm: str, states: Tensor) -> list[Tensor]:
        heads = []
        for name, kind in zip(names, "qkv", strict=True):
            projected = self._linear(part, name, states)
            split = projected.unflatten(-1, (self.sizes.heads, -1))
            head = split.transpose(1, 2)
            if kind != "v":
                mean = head.square().mean(-1, keepdim=True)
                length = (mean + _EPS + self.constants.norm_eps).rsqrt()
                weight = part[f"{norm}{kind}.weight"]
                head = self.between(head * length * weight)
            heads.append(head)
        return heads

    def _mixed(self, query: Tensor, key: Tensor, value: Tensor, turn: Turn) -> Tensor:
        query = self.between(_turned(query, *turn))
        key = self.between(_turned(key, *turn))
        hidden = torch.zeros((), dtype=torch.bool)
        scale = query.shape[-1] ** -0.5
        scores = Scores(hidden=hidden, scale=scale)
        return self.attended(query, key, value, scores)

    def _modulation(self, part: Part, name: str, condition: Tensor, parts: int) -> list[Tensor]:
        activated = self.between(silu(condition))
        modulation = self._linear(part, name, activated)
        of_all_tokens = modulation.unsqueeze(1)
        return list(of_all_tokens.chunk(parts, -1))

    def _normed(self, states: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        eps = _EPS + self.constants.norm_eps
        even = self.between(_Even.apply(states, eps, self.keeping))
        scaled = self.between(even * (1 + scale))
        return self.between(scaled + shift)

    def _linear(self, part: Part, name: str, states: Tensor) -> Tensor:
        # The gradient of the states is rounded as well, before those of other products are added.
        weight = part[name + ".weight"]
        bias = part[name + ".bias"]
        product = self.between(states) @ weight.T
        return self.between(product + bias)

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
        pairs = torch.arange(0, along, 2, dtype=torch.float64)
        frequencies = _PERIOD ** (-pairs / along)
        of_index = torch.zeros(side * side, index // 2, dtype=torch.float64)
        rows = place.repeat_interleave(side)
        of_rows = rows[:, None] * frequencies
        columns = place.repeat(side)
        of_columns = columns[:, None] * frequencies
        of_image = torch.cat((of_index, of_rows, of_columns), -1)
        of_text = torch.zeros(before, of_image.shape[1], dtype=torch.float64)
        angles = torch.cat((of_text, of_image))
        phases = self.constants.phases(angles)
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
        variance = centred.square().mean(-1, keepdim=True)
        scale = (variance + eps).rsqrt()
        context.save_for_backward(states, keeping(mean), keeping(scale))
        return centred * scale

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradients[0]
        states, mean, scale = context.saved_tensors
        even = (states - mean) * scale
        product = (gradient * even).mean(-1, keepdim=True)
        along = even * product
        centred = gradient - gradient.mean(-1, keepdim=True)
        of_states = scale * (centred - along)
        return of_states, None, None


def _turned(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first = states[..., 0::2]
    second = states[..., 1::2]
    turned_first = first * cosine - second * sine
    turned_second = second * cosine + first * sine
    pairs = torch.stack((turned_first, turned_second), -1)
    return pairs.flatten(-2)
