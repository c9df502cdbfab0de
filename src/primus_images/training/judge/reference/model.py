"""Decoder-only language models from their definitions: Llama, Mistral, Qwen, Mixtral, DeepSeek,
Gemma and gpt-oss.

A model is a function of its weights, by Hugging Face's names, and computes in their precision.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from primus_images.recipes.architecture import Architecture, RopeScaling
from primus_images.training.judge.reference.rounding import Rounding, attended, exact, multiplied

Weights = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """How backends define a model differently although its sizes are the same.

    ``softmax_mscale``: YaRN multiplies the attention logits by (0.1 · mscale · ln factor + 1)²
    instead of scaling the rotation. ``balance``: the loss that balances experts, by "sequence"
    (DeepSeek-V2, arXiv:2405.04434, eq. 18-21), by "batch" (Switch Transformer, arXiv:2101.03961,
    eq. 4), or "none". ``group_best``: how many of a group's best experts represent it.
    ``bias_rate``: how far a step moves an expert's bias towards the mean number of tokens
    (arXiv:2408.15664); ``centered``: less the mean of all these moves. ``scale`` rounds the factor
    of the embedding.
    """

    softmax_mscale: bool = False
    balance: str = "none"
    group_best: int = 2
    bias_rate: float = 0.0
    centered: bool = False
    scale: Rounding = exact


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What a model computes with besides weights and sizes. The defaults are correct;
    :mod:`.models` tries others.

    ``phases`` is applied to position × frequency, ``angles`` to their cosines and sines.
    ``norm_eps`` is added to every epsilon. ``attention`` multiplies the attention logits,
    ``shares`` is applied to their softmax. ``z_loss`` is the coefficient of the squared
    log-sum-exp, ``smoothing`` the spread share of a label. ``one_format``: gradients of FP8
    products have the format of the factors. ``wide`` is which of these products is not rounded:
    "outputs", "gradients of states" or "gradients of weights". ``reversed_shares``: a token's
    experts have each other's weights.
    """

    angles: Rounding = exact
    phases: Rounding = exact
    norm_eps: float = 0.0
    attention: float = 1.0
    shares: Rounding = exact
    z_loss: float = 0.0
    smoothing: float = 0.0
    one_format: bool = False
    wide: str = ""
    reversed_shares: bool = False


@dataclass
class Transformer:
    """A model as a function of its weights, which enter block after block.

    ``between`` is applied to every tensor that one operation passes to the next. If it rounds to a
    narrow type, the model shows how far that precision moves its results. ``adding`` is as in
    :func:`.rounding.attended`.
    """

    sizes: Architecture
    between: Rounding = exact
    adding: bool = False
    constants: Constants = field(default_factory=Constants)
    # The smallest relative difference between the scores of a chosen and a not chosen expert.
    closest: float = math.inf
    # Layer → the number of tokens of each expert, over all calls.
    sent: dict[str, Tensor] = field(default_factory=dict)
    # Layer → the scores [tokens, experts] by which experts were chosen in the last call.
    choices: dict[str, Tensor] = field(default_factory=dict)

    def blocks(self) -> list[str]:
        """Return the names of the blocks in order."""
        raise NotImplementedError

    def entered(self, weights: Weights, batch: Weights) -> tuple[Tensor, Tensor | None]:
        """Return the states [samples, length, hidden] that enter the first block, and what all
        blocks see besides.
        """
        raise NotImplementedError

    def block(
        self, weights: Weights, name: str, states: Tensor, context: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the states after a block, and its balancing loss per token."""
        raise NotImplementedError

    def head(self, weights: Weights, states: Tensor, context: Tensor | None) -> Tensor:
        """Return the prediction from the states after the last block."""
        raise NotImplementedError

    def errors(self, predicted: Tensor, batch: Weights) -> Tensor:
        """Return the loss of each label, or of each image."""
        raise NotImplementedError

    def prediction(self, weights: Weights, batch: Weights) -> tuple[Tensor, Tensor]:
        """Return the prediction for ``batch``, and the balancing loss per token."""
        states, context = self.entered(weights, batch)
        balance = states.new_zeros(())
        for name in self.blocks():
            states, extra = self.block(weights, name, states, context)
            balance = balance + extra
        return self.head(weights, states, context), balance

    def attended(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        hidden: Tensor,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return attention's output [samples, length, heads · size]. Pairs that are ``hidden`` do
        not attend. ``sinks`` [heads] are logits of nothing; no fused kernel has them, so every
        operation rounds.
        """
        between = self.between
        if between is not exact and sinks is None:
            return attended(
                query, key, value, hidden, scale=scale, between=between, adding=self.adding
            )
        key, value = (
            part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value)
        )
        scores = between(
            between(query @ key.transpose(-1, -2)) * (scale * self.constants.attention)
        )
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(*scores.shape[:-1], 1)), -1)
        scores = between(scores - scores.detach().amax(-1, keepdim=True))
        shares = between(self.constants.shares(scores.softmax(-1)[..., : key.shape[-2]]))
        return between(shares @ value).transpose(1, 2).flatten(-2)

    def losses(self, weights: Weights, batch: Weights) -> tuple[Tensor, Tensor]:
        """Return the loss of each label, or of each image, and the balancing loss per token."""
        predicted, balance = self.prediction(weights, batch)
        return self.errors(predicted, batch), balance


@dataclass
class Model(Transformer):
    """A language model. It predicts logits [samples, length, vocabulary] for the ``inputs``
    [samples, length] of a batch; with ``positions``, each 0 begins a document of its own.

    ``inner``: operations of ``limits.yaml`` inside of which ``between`` is applied as well.
    ``eight``: the FP8 format in which linear layers multiply. ``doubt``: a token goes to the next
    best expert instead of the last chosen one if their scores differ by less than this share.
    """

    dialect: Dialect = field(default_factory=Dialect)
    inner: Collection[str] = ()
    eight: torch.dtype | None = None
    doubt: float = 0.0

    @override
    def blocks(self) -> list[str]:
        return [f"layers.{number}" for number in range(self.sizes.layers)]

    @override
    def entered(self, weights: Weights, batch: Weights) -> tuple[Tensor, Tensor | None]:
        states = self.between(weights["model.embed_tokens.weight"][batch["inputs"]])
        if self.sizes.scaled_embedding:
            states = self.between(
                states * self.dialect.scale(torch.tensor(self.sizes.hidden_size**0.5))
            )
        return states, batch.get("positions")

    @override
    def block(
        self, weights: Weights, name: str, states: Tensor, context: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        sizes = self.sizes
        layer = f"model.{name}."
        number = int(name.removeprefix("layers."))
        normed = self._norm(weights[layer + "input_layernorm.weight"], states)
        if sizes.mla.kv_lora_rank:
            attend = self._latent_attention
        else:
            attend = self._attention
        parts = [normed]
        if context is not None:
            starts = (context.flatten() == 0).nonzero().flatten().tolist()
            lengths = [end - start for start, end in pairwise([*starts, context.numel()])]
            parts = list(normed.reshape(1, -1, normed.shape[-1]).split(lengths, 1))
        attended = torch.cat([attend(weights, layer + "self_attn.", part) for part in parts], 1)
        attended = attended.view_as(states)
        before = "post_attention_layernorm.weight"
        if sizes.sandwich_norms:
            attended = self._norm(weights[layer + before], attended)
            before = "pre_feedforward_layernorm.weight"
        states = self.between(states + attended)
        normed = self._norm(weights[layer + before], states)
        if sizes.moe.experts and number >= sizes.moe.dense_layers:
            fed, extra = self._experts(weights, layer + "mlp.", normed)
        else:
            fed = self._swiglu(weights, layer + "mlp.", normed)
            extra = states.new_zeros(())
        if sizes.sandwich_norms:
            fed = self._norm(weights[layer + "post_feedforward_layernorm.weight"], fed)
        return self.between(states + fed), extra

    @override
    def head(self, weights: Weights, states: Tensor, context: Tensor | None) -> Tensor:
        states = self._norm(weights["model.norm.weight"], states)
        name = "lm_head.weight"
        if self.sizes.tied_embeddings:
            name = "model.embed_tokens.weight"
        return self.between(states @ weights[name].T)

    @override
    def errors(self, predicted: Tensor, batch: Weights) -> Tensor:
        labels = batch["labels"]
        trained = labels >= 0
        chosen = predicted.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        total = predicted.logsumexp(-1)
        constants = self.constants
        if constants.smoothing:
            chosen = chosen + constants.smoothing * (predicted.mean(-1) - chosen)
        return (total - chosen + constants.z_loss * total.square()) * trained

    def _linear(self, weights: Weights, name: str, states: Tensor) -> Tensor:
        eight = None
        if is_narrow(name + ".weight"):
            eight = self.eight
        constants = self.constants

        def multiply(states: Tensor, weight: Tensor) -> Tensor:
            if eight is None:
                return states @ weight.T
            return multiplied(
                states, weight, eight, one_format=constants.one_format, wide=constants.wide
            )

        if "inputs" in self.inner:
            states = self.between(states)
        out = multiply(states, weights[name + ".weight"])
        bias = weights.get(name + ".bias")
        if bias is not None:
            out = (self.between(out) if "biases" in self.inner else out) + bias
        out = self.between(out)
        down = weights.get(name + ".lora_A.weight")
        if down is not None:
            low = self.between(multiply(states, down))
            scaled = weights[".adapter_scale"] * self.between(
                multiply(low, weights[name + ".lora_B.weight"])
            )
            out = self.between(out + self.between(scaled))
        return out

    def _norm(self, weight: Tensor, states: Tensor) -> Tensor:
        # The states are rounded already, and their gradient from here is as well before others are
        # added.
        states = self.between(states)
        mean = states.square().mean(-1, keepdim=True)
        even = states * (mean + (self.sizes.norm_eps + self.constants.norm_eps)).rsqrt()
        if self.sizes.norm_offset:
            weight = 1 + weight
        return self.between((self.between(even) if "norms" in self.inner else even) * weight)

    def _swiglu(self, weights: Weights, name: str, states: Tensor) -> Tensor:
        gate = self._linear(weights, name + "gate_proj", states)
        up = self._linear(weights, name + "up_proj", states)
        if self.sizes.activation == "clamped_swiglu":
            gate = gate.clamp(max=7.0)
            up = self.between(up.clamp(-7.0, 7.0) + 1)
            gate = gate * self.between(self.between(1.702 * gate).sigmoid())
        else:
            gelu = self.sizes.activation == "gelu_tanh"
            if gelu:
                gate = functional.gelu(gate, approximate="tanh")
            else:
                gate = gate * gate.sigmoid()
        return self._linear(weights, name + "down_proj", self.between(self.between(gate) * up))

    def _attention(self, weights: Weights, name: str, states: Tensor) -> Tensor:
        sizes = self.sizes
        query, key, value = (
            self._linear(weights, f"{name}{kind}_proj", states)
            .unflatten(-1, (-1, sizes.head_size))
            .transpose(1, 2)
            for kind in "qkv"
        )
        if sizes.qk_norm:
            query = self._norm(weights[name + "q_norm.weight"], query)
            key = self._norm(weights[name + "k_norm.weight"], key)
        windowed = sizes.has_window(int(name.split(".")[2]))
        if windowed or not sizes.interleaved_rope:
            magnitude, _ = self._yarn_magnitudes()
            angles = self._angles(sizes.head_size, states, local=windowed)
            cosine, sine = (magnitude * self.constants.angles(part) for part in angles)
            if sizes.interleaved_rope:
                query = _paired(query)
                key = _paired(key)
            query, key = (self._turned(part, cosine, sine) for part in (query, key))
            if sizes.interleaved_rope:
                query, key = (self._norm(part.new_ones(()), part) for part in (query, key))
        else:
            # Llama 4 sharpens the attention of tokens from the 8,192nd on.
            places = torch.arange(1, query.shape[-2] + 1, device=query.device)[:, None]
            query = self.between(query * (1 + 0.1 * (places // 8192).to(query.dtype).log1p()))
        scale = (sizes.query_scalar or sizes.head_size) ** -0.5
        sinks = weights.get(name + "sinks")
        mixed = self._mixed(query, key, value, scale, sizes.window if windowed else 0, sinks)
        return self._linear(weights, name + "o_proj", mixed)

    def _latent_attention(self, weights: Weights, name: str, states: Tensor) -> Tensor:
        """DeepSeek-V2's attention (arXiv:2405.04434, section 2.1)."""
        sizes = self.sizes
        mla = self.sizes.mla
        if mla.q_lora_rank:
            low = self._linear(weights, name + "q_a_proj", states)
            query = self._linear(
                weights, name + "q_b_proj", self._norm(weights[name + "q_a_layernorm.weight"], low)
            )
        else:
            query = self._linear(weights, name + "q_proj", states)
        query = query.unflatten(-1, (sizes.heads, -1)).transpose(1, 2)
        low = self._linear(weights, name + "kv_a_proj_with_mqa", states)
        low, shared = low.split([mla.kv_lora_rank, mla.qk_rope_head_dim], -1)
        wide = self._linear(
            weights, name + "kv_b_proj", self._norm(weights[name + "kv_a_layernorm.weight"], low)
        )
        key, value = (
            wide.unflatten(-1, (sizes.heads, -1))
            .transpose(1, 2)
            .split([mla.qk_nope_head_dim, mla.v_head_dim], -1)
        )
        cosine, sine = map(self.constants.angles, self._angles(mla.qk_rope_head_dim, states))
        magnitude, scale = self._yarn_magnitudes()
        cosine = cosine * magnitude
        sine = sine * magnitude
        plain, turned = query.split([mla.qk_nope_head_dim, mla.qk_rope_head_dim], -1)
        query = torch.cat((plain, self._turned(_paired(turned), cosine, sine)), -1)
        shared = self._turned(_paired(shared.unsqueeze(1)), cosine, sine).expand(
            -1, sizes.heads, -1, -1
        )
        key = torch.cat((key, shared), -1)
        scale *= (mla.qk_nope_head_dim + mla.qk_rope_head_dim) ** -0.5
        mixed = self._mixed(query, key, value, scale, sizes.window)
        return self._linear(weights, name + "o_proj", mixed)

    def _yarn_magnitudes(self) -> tuple[float, float]:
        """Return YaRN's factors (arXiv:2309.00071, section 3.4) of the rotation and of the
        attention logits.
        """
        scaling = self.sizes.rope_scaling
        if scaling.kind != "yarn":
            return 1.0, 1.0

        def magnitude(scale: float) -> float:
            if scaling.factor > 1:
                return 0.1 * scale * math.log(scaling.factor) + 1.0
            return 1.0

        if self.dialect.softmax_mscale:
            return 1.0, magnitude(scaling.mscale) ** 2
        return magnitude(scaling.mscale) / magnitude(scaling.mscale_all_dim), magnitude(
            scaling.mscale_all_dim
        ) ** 2

    def _mixed(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int,
        sinks: Tensor | None = None,
    ) -> Tensor:
        length = query.shape[-2]
        place = torch.arange(length, device=query.device)
        hidden = place[None, :] > place[:, None]
        if 0 < window < length:
            chunk = place - place % window
            hidden |= (
                place[None, :]
                < (chunk if self.sizes.interleaved_rope else place - window + 1)[:, None]
            )
        return self.attended(query, key, value, hidden, scale, sinks)

    def _angles(self, size: int, like: Tensor, *, local: bool = False) -> tuple[Tensor, Tensor]:
        theta = float(self.sizes.rope_theta)
        scaling = self.sizes.rope_scaling
        if local and self.sizes.local_rope_theta:
            theta = float(self.sizes.local_rope_theta)
            scaling = RopeScaling()
        place = torch.arange(0, size, 2, dtype=torch.float64, device=like.device)
        frequencies = _stretched(theta ** (-place / size), size, theta, scaling)
        positions = torch.arange(like.shape[-2], dtype=torch.float64, device=like.device)
        phases = self.constants.phases(positions[:, None] * frequencies[None, :])
        return phases.cos().to(like.dtype), phases.sin().to(like.dtype)

    def _turned(self, states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Rotate each pair (i, i + size / 2) by the angle of its position (RoFormer,
        arXiv:2104.09864, eq. 34).
        """
        if "rotations" in self.inner:
            inner = self.between
        else:
            inner = exact
        cosine = inner(cosine)
        sine = inner(sine)
        first, second = states.chunk(2, -1)
        turned = (
            inner(first * cosine) - inner(second * sine),
            inner(second * cosine) + inner(first * sine),
        )
        return self.between(torch.cat(turned, -1))

    def _experts(self, weights: Weights, name: str, states: Tensor) -> tuple[Tensor, Tensor]:
        moe = self.sizes.moe
        samples, length, _ = states.shape
        flat = states.flatten(0, 1)
        # Routers compute in full precision in every backend.
        raw = flat @ weights[name + "gate.weight"].T + weights.get(name + "gate.bias", 0.0)
        if moe.score == "softmax":
            scores = raw.softmax(-1)
        else:
            scores = raw.sigmoid()
        bias = weights.get(name + "gate.e_score_correction_bias")
        if bias is None:
            choice = scores.detach()
        else:
            choice = scores.detach() + bias
        self.choices[name] = choice
        chosen = self._best(self._limited(choice))
        self.sent[name] = self.sent.get(name, 0) + chosen.flatten().bincount(minlength=moe.experts)
        share = scores.gather(-1, chosen)
        if moe.normalize_top_k:
            share = share / share.sum(-1, keepdim=True)
        if self.constants.reversed_shares:
            share = share.flip(-1)
        share = share * moe.route_scale
        out = torch.zeros_like(flat)
        for number in range(moe.experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            if len(token):
                entering = flat[token]
                weight = share[token, place].unsqueeze(-1)
                if moe.weighted_inputs:
                    entering = self.between(entering * weight)
                fed = self._swiglu(weights, f"{name}experts.{number}.", entering)
                out = out.index_add(
                    0, token, fed if moe.weighted_inputs else self.between(fed * weight)
                )
        if moe.shared_experts:
            out = self.between(out) + self._swiglu(weights, name + "shared_experts.", flat)
        extra = self._balance(raw, scores, samples, length)
        return out.unflatten(0, (samples, length)), extra

    def _best(self, scores: Tensor) -> Tensor:
        count = self.sizes.moe.top_k
        best = scores.topk(min(count + 1, scores.shape[-1]), -1)
        if scores.shape[-1] > count:
            last = best.values[:, count - 1]
            other = best.values[:, count]
            apart = (last - other) / last.abs().clamp(min=1e-9)
            self.closest = min(self.closest, float(apart.min()))
            if self.doubt:
                swapped = torch.where(
                    apart < self.doubt, best.indices[:, count], best.indices[:, count - 1]
                )
                return torch.cat([best.indices[:, : count - 1], swapped.unsqueeze(1)], 1)
        return best.indices[:, :count]

    def _limited(self, choice: Tensor) -> Tensor:
        moe = self.sizes.moe
        if moe.groups <= 1:
            return choice
        grouped = choice.unflatten(-1, (moe.groups, -1))
        best = (
            grouped.topk(self.dialect.group_best, -1)
            .values.sum(-1)
            .topk(moe.top_groups, -1)
            .indices
        )
        allowed = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=choice.device).scatter_(
            1, best, True
        )
        return grouped.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(-2)

    def doubtful(self, choice: Tensor, shift: Tensor) -> Tensor:
        """Return which tokens [tokens] may go to other experts if each of their scores moves by up
        to ``shift``.
        """
        moe = self.sizes.moe
        count = self.sizes.moe.top_k
        limited = self._limited(choice).sort(-1, descending=True).values
        near = torch.zeros_like(shift, dtype=torch.bool)
        if count < moe.experts:
            near |= limited[:, count - 1] - limited[:, count] < 2 * shift
        if 1 < moe.groups != moe.top_groups:
            best = (
                choice.unflatten(-1, (moe.groups, -1))
                .topk(self.dialect.group_best, -1)
                .values.sum(-1)
            )
            sums = best.sort(-1, descending=True).values
            near |= (
                sums[:, moe.top_groups - 1] - sums[:, moe.top_groups]
                < 2 * self.dialect.group_best * shift
            )
        return near

    def _balance(self, raw: Tensor, scores: Tensor, samples: int, length: int) -> Tensor:
        """Return the balancing loss of a sequence or batch (DeepSeek-V3, arXiv:2412.19437, eq. 18)."""
        moe = self.sizes.moe
        kind = self.dialect.balance
        if not moe.auxiliary_loss or kind == "none":
            return raw.new_zeros(())
        scores = scores / scores.sum(-1, keepdim=True)
        sent = torch.zeros_like(scores).scatter_(1, self._best(scores.detach()), 1.0)
        if kind == "batch":
            sent = sent.mean(0)
            mean = scores.mean(0)
        else:
            sent = sent.unflatten(0, (samples, length)).mean(1)
            mean = scores.unflatten(0, (samples, length)).mean(1)
        total = (sent * mean).sum() * moe.experts / moe.top_k
        return moe.auxiliary_loss * (total if kind == "batch" else total / samples)


def is_narrow(name: str) -> bool:
    """Return whether linear layers in FP8 multiply the weight so. Routed experts' grouped products
    stay wide.
    """
    return "_proj" in name and ".experts." not in name


def _paired(states: Tensor) -> Tensor:
    """Reorder DeepSeek's rotary pairs, which are neighbors: the rotation below pairs element i with
    i + size / 2.
    """
    return torch.cat((states[..., 0::2], states[..., 1::2]), -1)


def _stretched(frequencies: Tensor, size: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Return Llama 3.1's scaled frequencies (its model card) or YaRN's (arXiv:2309.00071, eq.
    18-23).
    """
    if scaling.kind == "llama3":
        turns = scaling.original_max_position * frequencies / (2 * math.pi)
        share = (turns - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
    elif scaling.kind == "yarn":

        def dimension(turns: float) -> float:
            return (
                size
                * math.log(scaling.original_max_position / (turns * 2 * math.pi))
                / (2 * math.log(theta))
            )

        first = dimension(scaling.beta_fast)
        last = dimension(scaling.beta_slow)
        low = max(math.floor(first) if scaling.truncate else first, 0)
        high = min(math.ceil(last) if scaling.truncate else last, size - 1)
        place = torch.arange(len(frequencies), dtype=frequencies.dtype, device=frequencies.device)
        share = 1 - (place - low) / max(high - low, 0.001)
    else:
        return frequencies / scaling.factor
    share = share.clamp(0, 1)
    return share * frequencies + (1 - share) * frequencies / scaling.factor
