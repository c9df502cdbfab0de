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

from primus_images.training.judge.reference.model import Transformer, Weights
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
        names = [f"transformer_blocks.{number}" for number in range(dit.double_layers)]
        return names + [
            f"single_transformer_blocks.{number}" for number in range(dit.single_layers)
        ]

    @override
    def entered(self, weights: Weights, batch: Weights) -> tuple[Tensor, Tensor | None]:
        """The states of the text come first. All blocks are modulated by a vector [images, hidden]."""
        like = weights["proj_out.weight"]
        clean, noise, time = (batch[name].to(like.dtype) for name in ("latents", "noise", "time"))
        level = time[:, None, None]
        mixed = self.entering((1 - level) * clean + level * noise)
        text, pooled = (self.entering(batch[name].to(like.dtype)) for name in ("text", "pooled"))
        states = (
            self._linear(weights, "context_embedder", text),
            self._linear(weights, "x_embedder", mixed),
        )
        return torch.cat(states, 1), self._condition(weights, pooled, time)

    @override
    def block(
        self, weights: Weights, name: str, states: Tensor, context: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        assert context is not None
        condition = context.to(states.dtype)
        none = states.new_zeros(())
        text, image = states.split(
            [self.sizes.dit.text_tokens, states.shape[1] - self.sizes.dit.text_tokens], 1
        )
        turn = self._angles(text.shape[1], image)
        if name.startswith("single"):
            return self._single(weights, f"{name}.", states, condition, turn), none
        return self._double(weights, f"{name}.", image, text, condition, turn), none

    @override
    def head(self, weights: Weights, states: Tensor, context: Tensor | None) -> Tensor:
        assert context is not None
        scale, shift = self._modulation(weights, "norm_out.linear", context.to(states.dtype), 2)
        return self._linear(
            weights, "proj_out", self._normed(states[:, self.sizes.dit.text_tokens :], shift, scale)
        )

    @override
    def errors(self, predicted: Tensor, batch: Weights) -> Tensor:
        clean, noise = (batch[name].to(predicted.dtype) for name in ("latents", "noise"))
        return (predicted - (noise - clean)).square().mean((1, 2))

    def _condition(self, weights: Weights, pooled: Tensor, time: Tensor) -> Tensor:
        place = torch.arange(_WAVES // 2, dtype=torch.float64)
        frequencies = torch.exp(-math.log(_PERIOD) * place / (_WAVES // 2))

        def waves(value: Tensor) -> Tensor:
            # Rounded twice: when it enters the model, and where the model multiplies it.
            angles = self.entering(self.entering(value) * _TIMES).double()[:, None] * frequencies
            return self.between(torch.cat((angles.cos(), angles.sin()), -1).to(value.dtype))

        parts = [("timestep", waves(time)), ("text", pooled)]
        if self.sizes.dit.guidance:
            parts.insert(1, ("guidance", waves(torch.full_like(time, self.guidance))))
        total = torch.zeros(())
        for name, value in parts:
            hidden = self._linear(weights, f"time_text_embed.{name}_embedder.linear_1", value)
            embedded = self._linear(
                weights, f"time_text_embed.{name}_embedder.linear_2", self.between(silu(hidden))
            )
            total = self.between(total + embedded)
        return total

    def _double(
        self,
        weights: Weights,
        block: str,
        image: Tensor,
        text: Tensor,
        condition: Tensor,
        turn: Turn,
    ) -> Tensor:
        streams = (
            ("", "to_", "norm_", "to_out.0", image),
            ("_context", "add_", "norm_added_", "to_add_out", text),
        )
        modulations = []
        heads = []
        for which, to, norm, _, states in streams:
            six = self._modulation(weights, f"{block}norm1{which}.linear", condition, 6)
            suffix = ""
            if which:
                suffix = "_proj"
            names = [f"{block}attn.{to}{kind}{suffix}" for kind in "qkv"]
            heads.append(
                self._heads(
                    weights, names, f"{block}attn.{norm}", self._normed(states, six[0], six[1])
                )
            )
            modulations.append(six)
        query, key, value = (torch.cat((heads[1][n], heads[0][n]), 2) for n in range(3))
        mixed = self._mixed(query, key, value, turn)
        parts = (mixed[:, text.shape[1] :], mixed[:, : text.shape[1]])
        outputs = []
        for (which, _, _, out, before), mixture, six in zip(
            streams, parts, modulations, strict=True
        ):
            _, _, gate, shift, scale, gate_fed = six
            moved = gate * self._linear(weights, f"{block}attn.{out}", mixture)
            states = self.between(before + self.between(moved))
            hidden = self._linear(
                weights, f"{block}ff{which}.net.0.proj", self._normed(states, shift, scale)
            )
            fed = self._linear(weights, f"{block}ff{which}.net.2", self.between(_GELU(hidden)))
            outputs.append(self.between(states + self.between(gate_fed * fed)))
        return torch.cat((outputs[1], outputs[0]), 1)

    def _single(
        self, weights: Weights, block: str, states: Tensor, condition: Tensor, turn: Turn
    ) -> Tensor:
        shift, scale, gate = self._modulation(weights, f"{block}norm.linear", condition, 3)
        normed = self._normed(states, shift, scale)
        fed = self.between(_GELU(self._linear(weights, f"{block}proj_mlp", normed)))
        names = [f"{block}attn.to_{kind}" for kind in "qkv"]
        query, key, value = self._heads(weights, names, f"{block}attn.norm_", normed)
        both = torch.cat((self._mixed(query, key, value, turn), fed), -1)
        return self.between(
            states + self.between(gate * self._linear(weights, f"{block}proj_out", both))
        )

    def _heads(self, weights: Weights, names: list[str], norm: str, states: Tensor) -> list[Tensor]:
        heads = []
        for name, kind in zip(names, "qkv", strict=True):
            projected = (
                self._linear(weights, name, states)
                .unflatten(-1, (self.sizes.heads, -1))
                .transpose(1, 2)
            )
            if kind != "v":
                length = (
                    projected.square().mean(-1, keepdim=True) + _EPS + self.constants.norm_eps
                ).rsqrt()
                projected = self.between(projected * length * weights[f"{norm}{kind}.weight"])
            heads.append(projected)
        return heads

    def _mixed(self, query: Tensor, key: Tensor, value: Tensor, turn: Turn) -> Tensor:
        query, key = (self.between(_turned(part, *turn)) for part in (query, key))
        return self.attended(
            query, key, value, torch.zeros((), dtype=torch.bool), query.shape[-1] ** -0.5
        )

    def _modulation(
        self, weights: Weights, name: str, condition: Tensor, parts: int
    ) -> list[Tensor]:
        return list(
            self._linear(weights, name, self.between(silu(condition))).unsqueeze(1).chunk(parts, -1)
        )

    def _normed(self, states: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        even = self.between(_Even.apply(states, _EPS + self.constants.norm_eps, self.keeping))
        return self.between(self.between(even * (1 + scale)) + shift)

    def _linear(self, weights: Weights, name: str, states: Tensor) -> Tensor:
        # The gradient of the states is rounded as well, before those of other products are added.
        return self.between(
            self.between(states) @ weights[name + ".weight"].T + weights[name + ".bias"]
        )

    def _angles(self, before: int, image: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine [tokens, size / 2] by index (always 0), row and column; the text
        comes first, at 0.
        """
        side = math.isqrt(image.shape[1])
        place = torch.arange(side, dtype=torch.float64)
        rows = place.repeat_interleave(side)
        columns = place.repeat(side)
        size = self.sizes.head_size
        index = max(2, size // 8)
        index += (size - index) % 4
        along = (size - index) // 2
        angles = [torch.zeros(len(rows), index // 2, dtype=torch.float64)]
        for axis in (rows, columns):
            frequencies = _PERIOD ** (-torch.arange(0, along, 2, dtype=torch.float64) / along)
            angles.append(axis[:, None] * frequencies)
        whole = torch.cat(angles, -1)
        whole = self.constants.phases(
            torch.cat((torch.zeros(before, whole.shape[1], dtype=torch.float64), whole))
        )
        rounded = [
            self.constants.angles(table.to(image.dtype)) for table in (whole.cos(), whole.sin())
        ]
        return self.between(rounded[0]), self.between(rounded[1])


class _Even(torch.autograd.Function):
    """States less their mean, over their standard deviation. The gradient uses both as ``keeping``
    rounds them.
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
        (gradient,), (states, mean, scale) = gradients, context.saved_tensors
        even = (states - mean) * scale
        along = even * (gradient * even).mean(-1, keepdim=True)
        return scale * (gradient - gradient.mean(-1, keepdim=True) - along), None, None


def _turned(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first = states[..., 0::2]
    second = states[..., 1::2]
    return torch.stack(
        (first * cosine - second * sine, second * cosine + first * sine), -1
    ).flatten(-2)
