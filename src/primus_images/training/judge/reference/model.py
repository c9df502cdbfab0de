"""Decoder-only language models from their definitions.

They are Llama, Mistral, Qwen, Mixtral, DeepSeek, Gemma and gpt-oss. A model is a function of its
weights, by Hugging Face's names, and computes in their precision.
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
from primus_images.training.judge.reference.rounding import (
    EightBits,
    Kernel,
    Rounding,
    attended,
    exact,
    multiplied,
)

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Part:
    """The weights of a part of a model, by what follows ``prefix`` in their names."""

    weights: Weights
    prefix: str = ""

    def __getitem__(self, name: str) -> Tensor:
        return self.weights[self.prefix + name]

    def get(self, name: str) -> Tensor | None:
        """Return the weight ``name``, None if the model has none."""
        return self.weights.get(self.prefix + name)

    def part(self, name: str) -> "Part":
        """Return the part ``name`` of this one."""
        return Part(self.weights, self.prefix + name)


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
    """What a model computes with besides weights and sizes.

    The defaults are correct; :mod:`.models` tries others.

    ``phases`` is applied to position × frequency, ``angles`` to their cosines and sines.
    ``norm_eps`` is added to every epsilon. ``attention`` multiplies the attention logits,
    ``shares`` is applied to their softmax. ``z_loss`` is the coefficient of the squared
    log-sum-exp, ``smoothing`` the spread share of a label. ``one_format``: gradients of FP8
    products have the format of the factors. ``wide`` is which of these products is not rounded:
    "outputs" or "gradients of states". ``reversed_shares``: a token's experts have each other's
    weights.
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


@dataclass(frozen=True, kw_only=True)
class Scores:
    """How pairs of tokens attend: ``hidden`` ones not at all, the others by products × ``scale``.

    ``sinks`` [heads] are logits of nothing.
    """

    hidden: Tensor
    scale: float
    sinks: Tensor | None = None


@dataclass
class Transformer:
    """A model as a function of its weights, which enter block after block.

    ``between`` is applied to every tensor that one operation passes to the next. If it rounds to a
    narrow type, the model shows how far that precision moves its results. ``adding`` is as in
    :class:`.rounding.Kernel`.
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
        """Return the states [samples, length, hidden] that enter the first block.

        The second is what all blocks get besides their states.
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

    def attended(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Return attention's output [samples, length, heads · size].

        No fused kernel has sinks, so with them every operation rounds.
        """
        between = self.between
        hidden = scores.hidden
        if between is not exact and scores.sinks is None:
            scale = scores.scale
            kernel = Kernel(hidden=hidden, scale=scale, between=between, adding=self.adding)
            return attended(query, key, value, kernel)
        group = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(group, 1)
        value = value.repeat_interleave(group, 1)
        products = between(query @ key.transpose(-1, -2))
        logits = between(products * (scores.scale * self.constants.attention))
        logits = logits.masked_fill(hidden, -torch.inf)
        if scores.sinks is not None:
            of_heads = scores.sinks.view(-1, 1, 1)
            sinks = of_heads.expand(*logits.shape[:-1], 1)
            logits = torch.cat((logits, sinks), -1)
        largest = logits.detach().amax(-1, keepdim=True)
        logits = between(logits - largest)
        length = key.shape[-2]
        shares = logits.softmax(-1)[..., :length]
        shares = between(self.constants.shares(shares))
        out = between(shares @ value)
        return out.transpose(1, 2).flatten(-2)

    def losses(self, weights: Weights, batch: Weights) -> tuple[Tensor, Tensor]:
        """Return the loss of each label, or of each image, and the balancing loss per token."""
        predicted, balance = self.prediction(weights, batch)
        return self.errors(predicted, batch), balance


@dataclass
class Model(Transformer):
    """A language model, which predicts logits [samples, length, vocabulary].

    It gets the ``inputs`` [samples, length] of a batch; with ``positions``, each 0 begins a
    document of its own.

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
        embedding = weights["model.embed_tokens.weight"]
        tokens = batch["inputs"]
        states = self.between(embedding[tokens])
        if self.sizes.scaled_embedding:
            root = torch.tensor(self.sizes.hidden_size**0.5)
            scale = self.dialect.scale(root)
            states = self.between(states * scale)
        return states, batch.get("positions")

    @override
    def block(
        self, weights: Weights, name: str, states: Tensor, context: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        sizes = self.sizes
        layer = Part(weights, f"model.{name}.")
        number = int(name.removeprefix("layers."))
        normed = self._norm(layer["input_layernorm.weight"], states)
        attended = self._attended_documents(layer.part("self_attn."), normed, context)
        before = "post_attention_layernorm.weight"
        if sizes.sandwich_norms:
            attended = self._norm(layer[before], attended)
            before = "pre_feedforward_layernorm.weight"
        states = self.between(states + attended)
        normed = self._norm(layer[before], states)
        feed_forward = layer.part("mlp.")
        balance = states.new_zeros(())
        if sizes.is_sparse(number):
            fed, balance = self._experts(feed_forward, normed)
        else:
            fed = self._swiglu(feed_forward, normed)
        if sizes.sandwich_norms:
            fed = self._norm(layer["post_feedforward_layernorm.weight"], fed)
        return self.between(states + fed), balance

    def _attended_documents(self, part: Part, states: Tensor, positions: Tensor | None) -> Tensor:
        attend = self._attention
        if self.sizes.mla.kv_lora_rank:
            attend = self._latent_attention
        if positions is None:
            return attend(part, states)
        begins = positions.flatten() == 0
        starts = begins.nonzero().flatten().tolist()
        edges = [*starts, positions.numel()]
        lengths = [end - start for start, end in pairwise(edges)]
        stream = states.reshape(1, -1, states.shape[-1])
        documents = stream.split(lengths, 1)
        outputs = [attend(part, document) for document in documents]
        return torch.cat(outputs, 1).view_as(states)

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
        constants = self.constants
        index = labels.clamp(min=0).unsqueeze(-1)
        chosen = predicted.gather(-1, index).squeeze(-1)
        if constants.smoothing:
            spread = predicted.mean(-1) - chosen
            chosen = chosen + constants.smoothing * spread
        total = predicted.logsumexp(-1)
        losses = total - chosen + constants.z_loss * total.square()
        is_trained = labels >= 0
        return losses * is_trained

    def _linear(self, part: Part, name: str, states: Tensor) -> Tensor:
        layer = part.part(name)
        if "inputs" in self.inner:
            states = self.between(states)
        out = self._multiplied(layer, ".weight", states)
        bias = layer.get(".bias")
        if bias is not None:
            if "biases" in self.inner:
                out = self.between(out)
            out = out + bias
        out = self.between(out)
        if layer.get(".lora_A.weight") is None:
            return out
        kept = layer.get(".dropout")
        if kept is not None:
            states = self.between(states * kept)
        low = self.between(self._multiplied(layer, ".lora_A.weight", states))
        adapted = self.between(self._multiplied(layer, ".lora_B.weight", low))
        scale = part.weights[".adapter_scale"]
        scaled = self.between(scale * adapted)
        return self.between(out + scaled)

    def _multiplied(self, layer: Part, name: str, states: Tensor) -> Tensor:
        weight = layer[name]
        if self.eight is None or not is_narrow(layer.prefix):
            return states @ weight.T
        constants = self.constants
        eight = EightBits(dtype=self.eight, one_format=constants.one_format, wide=constants.wide)
        return multiplied(states, weight, eight)

    def _norm(self, weight: Tensor, states: Tensor) -> Tensor:
        # The states are rounded already, and their gradient from here is as well before others are
        # added.
        states = self.between(states)
        mean = states.square().mean(-1, keepdim=True)
        eps = self.sizes.norm_eps + self.constants.norm_eps
        even = states * (mean + eps).rsqrt()
        if self.sizes.norm_offset:
            weight = 1 + weight
        if "norms" in self.inner:
            even = self.between(even)
        return self.between(even * weight)

    def _swiglu(self, part: Part, states: Tensor) -> Tensor:
        gate = self._linear(part, "gate_proj", states)
        up = self._linear(part, "up_proj", states)
        if self.sizes.activation == "clamped_swiglu":
            gate = gate.clamp(max=7.0)
            up = self.between(up.clamp(-7.0, 7.0) + 1)
            scaled = self.between(1.702 * gate)
            opened = self.between(scaled.sigmoid())
            gate = gate * opened
        elif self.sizes.activation == "gelu_tanh":
            gate = functional.gelu(gate, approximate="tanh")
        else:
            gate = gate * gate.sigmoid()
        activated = self.between(gate)
        hidden = self.between(activated * up)
        return self._linear(part, "down_proj", hidden)

    def _attention(self, part: Part, states: Tensor) -> Tensor:
        sizes = self.sizes
        query = self._heads(part, "q_proj", states)
        key = self._heads(part, "k_proj", states)
        value = self._heads(part, "v_proj", states)
        if sizes.qk_norm:
            query = self._norm(part["q_norm.weight"], query)
            key = self._norm(part["k_norm.weight"], key)
        number = int(part.prefix.split(".")[2])
        windowed = sizes.has_window(number)
        window = 0
        if windowed:
            window = sizes.window
        # Llama 4's layers without a window do not rotate.
        if windowed or not sizes.interleaved_rope:
            query, key = self._rotated(query, key, windowed)
        else:
            query = self._sharpened(query)
        scalar = sizes.query_scalar or sizes.head_size
        scores = Scores(
            hidden=self._hidden(query, window), scale=scalar**-0.5, sinks=part.get("sinks")
        )
        attended = self.attended(query, key, value, scores)
        return self._linear(part, "o_proj", attended)

    def _sharpened(self, query: Tensor) -> Tensor:
        """Llama 4 sharpens the attention of tokens from the 8,192nd on."""
        length = query.shape[-2]
        places = torch.arange(1, length + 1, device=query.device)
        passed = (places // 8192).to(query.dtype)
        growth = 1 + 0.1 * passed.log1p()
        return self.between(query * growth[:, None])

    def _heads(self, part: Part, name: str, states: Tensor) -> Tensor:
        projected = self._linear(part, name, states)
        split = projected.unflatten(-1, (-1, self.sizes.head_size))
        return split.transpose(1, 2)

    def _rotated(self, query: Tensor, key: Tensor, windowed: bool) -> tuple[Tensor, Tensor]:
        magnitude, _ = self._yarn_magnitudes()
        cosine, sine = self._angles(self.sizes.head_size, query, local=windowed)
        cosine = magnitude * self.constants.angles(cosine)
        sine = magnitude * self.constants.angles(sine)
        if not self.sizes.interleaved_rope:
            query = self._turned(query, cosine, sine)
            key = self._turned(key, cosine, sine)
            return query, key
        # Llama 4 rotates neighbors, and norms what it rotated, without weights.
        query = self._turned(_paired(query), cosine, sine)
        key = self._turned(_paired(key), cosine, sine)
        one = query.new_ones(())
        return self._norm(one, query), self._norm(one, key)

    def _latent_attention(self, part: Part, states: Tensor) -> Tensor:
        """DeepSeek-V2's attention (arXiv:2405.04434, section 2.1)."""
        heads = self.sizes.heads
        mla = self.sizes.mla
        plain_size = mla.qk_nope_head_dim
        turned_size = mla.qk_rope_head_dim
        if mla.q_lora_rank:
            low = self._linear(part, "q_a_proj", states)
            low = self._norm(part["q_a_layernorm.weight"], low)
            query = self._linear(part, "q_b_proj", low)
        else:
            query = self._linear(part, "q_proj", states)
        query = query.unflatten(-1, (heads, -1)).transpose(1, 2)
        low = self._linear(part, "kv_a_proj_with_mqa", states)
        low, shared = low.split([mla.kv_lora_rank, turned_size], -1)
        low = self._norm(part["kv_a_layernorm.weight"], low)
        wide = self._linear(part, "kv_b_proj", low)
        wide = wide.unflatten(-1, (heads, -1)).transpose(1, 2)
        key, value = wide.split([plain_size, mla.v_head_dim], -1)
        magnitude, scale = self._yarn_magnitudes()
        cosine, sine = self._angles(turned_size, states)
        cosine = self.constants.angles(cosine) * magnitude
        sine = self.constants.angles(sine) * magnitude
        plain, turned = query.split([plain_size, turned_size], -1)
        turned = self._turned(_paired(turned), cosine, sine)
        query = torch.cat((plain, turned), -1)
        shared = _paired(shared.unsqueeze(1))
        shared = self._turned(shared, cosine, sine)
        of_every_head = shared.expand(-1, heads, -1, -1)
        key = torch.cat((key, of_every_head), -1)
        scale *= (plain_size + turned_size) ** -0.5
        hidden = self._hidden(query, self.sizes.window)
        scores = Scores(hidden=hidden, scale=scale)
        attended = self.attended(query, key, value, scores)
        return self._linear(part, "o_proj", attended)

    def _yarn_magnitudes(self) -> tuple[float, float]:
        """Return YaRN's factors (arXiv:2309.00071, section 3.4).

        They are those of the rotation and of the attention logits.
        """
        scaling = self.sizes.rope_scaling
        if scaling.kind != "yarn":
            return 1.0, 1.0
        growth = math.log(max(1.0, scaling.factor))
        magnitude = 0.1 * scaling.mscale * growth + 1.0
        of_all_dimensions = 0.1 * scaling.mscale_all_dim * growth + 1.0
        if self.dialect.softmax_mscale:
            return 1.0, magnitude**2
        return magnitude / of_all_dimensions, of_all_dimensions**2

    def _hidden(self, query: Tensor, window: int) -> Tensor:
        """Return which keys each query does not attend to."""
        length = query.shape[-2]
        place = torch.arange(length, device=query.device)
        keys = place[None, :]
        hidden = keys > place[:, None]
        if 0 < window < length:
            first = place - window + 1
            # Llama 4's windows are chunks.
            if self.sizes.interleaved_rope:
                first = place - place % window
            hidden |= keys < first[:, None]
        return hidden

    def _angles(self, size: int, like: Tensor, *, local: bool = False) -> tuple[Tensor, Tensor]:
        theta = float(self.sizes.rope_theta)
        scaling = self.sizes.rope_scaling
        if local and self.sizes.local_rope_theta:
            theta = float(self.sizes.local_rope_theta)
            scaling = RopeScaling()
        place = torch.arange(0, size, 2, dtype=torch.float64, device=like.device)
        frequencies = theta ** (-place / size)
        frequencies = _stretched(frequencies, theta, scaling)
        length = like.shape[-2]
        positions = torch.arange(length, dtype=torch.float64, device=like.device)
        angles = positions[:, None] * frequencies[None, :]
        phases = self.constants.phases(angles)
        cosine = phases.cos().to(like.dtype)
        sine = phases.sin().to(like.dtype)
        return cosine, sine

    def _turned(self, states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Rotate each pair (i, i + size / 2) by its angle (RoFormer, arXiv:2104.09864, eq. 34)."""
        inner: Rounding = exact
        if "rotations" in self.inner:
            inner = self.between
        cosine = inner(cosine)
        sine = inner(sine)
        first, second = states.chunk(2, -1)
        turned_first = inner(first * cosine) - inner(second * sine)
        turned_second = inner(second * cosine) + inner(first * sine)
        turned = torch.cat((turned_first, turned_second), -1)
        return self.between(turned)

    def _experts(self, part: Part, states: Tensor) -> tuple[Tensor, Tensor]:
        moe = self.sizes.moe
        flat = states.flatten(0, 1)
        # Routers compute in full precision in every backend.
        raw = flat @ part["gate.weight"].T
        bias = part.get("gate.bias")
        if bias is not None:
            raw = raw + bias
        if moe.score == "softmax":
            scores = raw.softmax(-1)
        else:
            scores = raw.sigmoid()
        choice = scores.detach()
        name = part.prefix
        bias = part.get("gate.e_score_correction_bias")
        if bias is not None:
            choice = choice + bias
        self.choices[name] = choice
        chosen = self._best(self._limited(choice))
        counts = chosen.flatten().bincount(minlength=moe.experts)
        self.sent[name] = self.sent.get(name, 0) + counts
        share = self._shares(scores.gather(-1, chosen))
        out = torch.zeros_like(flat)
        for number in range(moe.experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            if not len(token):
                continue
            entered = flat[token]
            weight = share[token, place].unsqueeze(-1)
            expert = part.part(f"experts.{number}.")
            if moe.weighted_inputs:
                weighted = self.between(entered * weight)
                fed = self._swiglu(expert, weighted)
            else:
                computed = self._swiglu(expert, entered)
                fed = self.between(computed * weight)
            out = out.index_add(0, token, fed)
        if moe.shared_experts:
            shared = self._swiglu(part.part("shared_experts."), flat)
            out = self.between(out) + shared
        samples = states.shape[0]
        return out.view_as(states), self._balance(scores, samples)

    def _shares(self, share: Tensor) -> Tensor:
        moe = self.sizes.moe
        if moe.normalize_top_k:
            share = share / share.sum(-1, keepdim=True)
        if self.constants.reversed_shares:
            share = share.flip(-1)
        return share * moe.route_scale

    def _best(self, scores: Tensor) -> Tensor:
        count = self.sizes.moe.top_k
        experts = scores.shape[-1]
        best = scores.topk(min(count + 1, experts), -1)
        if experts == count:
            return best.indices
        last = best.values[:, count - 1]
        next_best = best.values[:, count]
        apart = (last - next_best) / last.abs().clamp(min=1e-9)
        self.closest = min(self.closest, float(apart.min()))
        chosen, other = best.indices.split([count, 1], -1)
        if not self.doubt:
            return chosen
        is_close = apart[:, None] < self.doubt
        first = chosen[:, :-1]
        swapped = torch.where(is_close, other, chosen[:, -1:])
        return torch.cat([first, swapped], 1)

    def _limited(self, choice: Tensor) -> Tensor:
        moe = self.sizes.moe
        if moe.groups <= 1:
            return choice
        grouped = choice.unflatten(-1, (moe.groups, -1))
        sums = self._of_groups(choice)
        best = sums.topk(moe.top_groups, -1).indices
        hidden = torch.ones(grouped.shape[:2], dtype=torch.bool, device=choice.device)
        hidden.scatter_(1, best, False)
        limited = grouped.masked_fill(hidden.unsqueeze(-1), -torch.inf)
        return limited.flatten(-2)

    def _of_groups(self, choice: Tensor) -> Tensor:
        grouped = choice.unflatten(-1, (self.sizes.moe.groups, -1))
        best = grouped.topk(self.dialect.group_best, -1).values
        return best.sum(-1)

    def doubtful(self, choice: Tensor, shift: Tensor) -> Tensor:
        """Return which tokens [tokens] may go to other experts.

        Each of their scores moves by up to ``shift``.
        """
        moe = self.sizes.moe
        near = torch.zeros_like(shift, dtype=torch.bool)
        if moe.top_k < moe.experts:
            limited = self._limited(choice).sort(-1, descending=True).values
            last = limited[:, moe.top_k - 1]
            apart = last - limited[:, moe.top_k]
            near |= apart < 2 * shift
        if 1 < moe.groups != moe.top_groups:
            sums = self._of_groups(choice).sort(-1, descending=True).values
            last = sums[:, moe.top_groups - 1]
            apart = last - sums[:, moe.top_groups]
            near |= apart < 2 * self.dialect.group_best * shift
        return near

    def _balance(self, scores: Tensor, samples: int) -> Tensor:
        """Return the loss that balances experts (DeepSeek-V3, arXiv:2412.19437, eq. 18)."""
        moe = self.sizes.moe
        kind = self.dialect.balance
        if not moe.auxiliary_loss or kind == "none":
            return scores.new_zeros(())
        scores = scores / scores.sum(-1, keepdim=True)
        chosen = self._best(scores.detach())
        sent = torch.zeros_like(scores).scatter_(1, chosen, 1.0)
        if kind == "batch":
            products = sent.mean(0) * scores.mean(0)
            total = products.sum() * moe.experts / moe.top_k
            return moe.auxiliary_loss * total
        sent = sent.unflatten(0, (samples, -1)).mean(1)
        mean = scores.unflatten(0, (samples, -1)).mean(1)
        products = sent * mean
        total = products.sum() * moe.experts / moe.top_k
        return moe.auxiliary_loss * (total / samples)


def is_narrow(name: str) -> bool:
    """Return whether linear layers in FP8 multiply the weight so.

    Routed experts' grouped products stay wide.
    """
    return "_proj" in name and ".experts." not in name


def _paired(states: Tensor) -> Tensor:
    """Reorder rotary pairs of DeepSeek and Llama 4, which are neighbors.

    The rotation above pairs element i with i + size / 2.
    """
    first = states[..., 0::2]
    second = states[..., 1::2]
    return torch.cat((first, second), -1)


def _stretched(frequencies: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Return Llama 3.1's scaled frequencies, or YaRN's (arXiv:2309.00071, eq. 18-23)."""
    if scaling.kind == "llama3":
        turns = scaling.original_max_position * frequencies / (2 * math.pi)
        spread = scaling.high_freq_factor - scaling.low_freq_factor
        share = (turns - scaling.low_freq_factor) / spread
    elif scaling.kind == "yarn":
        size = 2 * len(frequencies)
        low = _dimension(scaling.beta_fast, size, theta, scaling)
        high = _dimension(scaling.beta_slow, size, theta, scaling)
        if scaling.truncate:
            low = math.floor(low)
            high = math.ceil(high)
        low = max(low, 0)
        high = min(high, size - 1)
        place = torch.arange(size // 2, dtype=frequencies.dtype, device=frequencies.device)
        risen = (place - low) / max(high - low, 0.001)
        share = 1 - risen
    else:
        return frequencies / scaling.factor
    share = share.clamp(0, 1)
    kept = share * frequencies
    return kept + (1 - share) * frequencies / scaling.factor


def _dimension(turns: float, size: int, theta: float, scaling: RopeScaling) -> float:
    length = scaling.original_max_position / (turns * 2 * math.pi)
    return size * math.log(length) / (2 * math.log(theta))
