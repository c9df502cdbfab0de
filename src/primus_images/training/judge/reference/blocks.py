"""Repeating the blocks of a model one by one, each from what entered it in the run: what remains is
its own rounding.

Each token is compared on its own, forward and backward; each block gets the run's gradient of what
it returned.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from primus_images.training.judge.reference.data import Samples
from primus_images.training.judge.reference.model import Model, Transformer
from primus_images.training.judge.reference.models import Part, Trial, products_of_blocks
from primus_images.training.judge.reference.names import Job, Tensors
from primus_images.training.judge.reference.rounding import LIMITS

# One call of a module: its inputs, outputs and their gradients, by the names of
# primus_images.training.judge.witness.
Call = Mapping[str, Tensor]
Batch = Mapping[str, Tensor]
Shape = tuple[int, ...]
Rows = list[dict[str, Any]]
# Name of a module's input or output → its shape [samples, length, size].
Shapes = Mapping[str, Shape]

_LIMITS = LIMITS["blocks"]


class Unlike(Exception):
    """The run's modules were not called as the model's definition says."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a module returned for each token [samples, length, size]: in the run, exactly, and in
    the run's precision.

    ``entered`` is what the module only adds to; None if it replaces its input. ``certain``
    [samples, length] are the tokens that rounding cannot send to other experts. ``balanced``: they
    are gradients, also of a balancing loss.
    """

    name: str
    run: Tensor
    exact: Tensor
    rounded: Tensor
    certain: Tensor
    entered: Tensor | None = None
    floor: float = _LIMITS["floor"]
    balanced: bool = False
    moved: Mapping[str, Tensor] = field(default_factory=dict)

    @cached_property
    def errors(self) -> Tensor:
        """The length of each token's error in the run: [samples, length]; infinite where it is not
        a number.
        """
        return (self.run.to(self.exact.dtype) - self.exact).norm(dim=-1).nan_to_num(nan=math.inf)

    @cached_property
    def noises(self) -> Tensor:
        """The same of the reference in the run's precision."""
        return (self.rounded.to(self.exact.dtype) - self.exact).norm(dim=-1)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The model without rounding and with that of the run, each with the weights that it computes
    with.

    ``plain`` is the exact model without FP8, and ``trials`` are what :func:`.models.trials`
    returns.
    """

    exact: Transformer
    rounded: Transformer
    weights: Tensors
    narrow: Tensors
    plain: Transformer
    trials: Mapping[str, Trial]

    def both(self, compute: Callable[[Any, Tensors], Any]) -> tuple[Any, Any]:
        """Return the results of both."""
        return compute(self.exact, self.weights), compute(self.rounded, self.narrow)

    def moved(
        self, where: str, exact: Tensor, compute: Callable[[Any], Tensor]
    ) -> dict[str, Tensor]:
        """Return how far each change that shows in ``where`` moves what ``compute`` makes with a
        model.
        """
        shown = {name: trial for name, trial in self.trials.items() if where in trial.shows}
        with torch.no_grad():
            if shown and self.plain is not self.exact:
                plain = compute(self.plain)
            else:
                plain = exact
            return {
                name: compute(trial.model) - (exact if trial.rounds else plain)
                for name, trial in shown.items()
            }


def compare(
    folder: Path, job: Job, step: int, samples: Samples, pair: Pair
) -> tuple[Rows, list[Part]]:
    """Return for each module how its errors at ``step`` compare with the noise, see
    :func:`_figures`; and with the effects of changed constants. Raises Unlike if the run's modules
    were not called as they should be.
    """
    ranks = job["data_parallel"]
    count = job["accumulation"]
    batches = [samples.batch(step, rank) for rank in range(ranks)]
    terms = sum(samples.terms(batch) for batch in batches)
    # Megatron divides gradients by the number of labels after the backward pass.
    scale = 1.0
    if job["backend"] == "megatron":
        scale = float(terms)
    seen = _calls(folder, step)
    if sorted(seen) != list(range(ranks)):
        raise Unlike(f"the ranks {sorted(seen)} of {ranks} left what their blocks computed")
    by_name: dict[str, list[Result]] = {}
    for rank, whole in enumerate(batches):
        for number, parts in enumerate(
            zip(*(tensor.chunk(count) for tensor in whole.values()), strict=True)
        ):
            micro_batch = _MicroBatch(
                calls=seen[rank],
                number=number,
                count=count,
                pair=pair,
                batch=dict(zip(whole, parts, strict=True)),
                per_term=scale / terms,
                per_call=scale / ranks / count,
            )
            for result in micro_batch.results():
                by_name.setdefault(result.name, []).append(result)
    rows = [{"name": name, **_figures(results)} for name, results in by_name.items()]
    return rows, products_of_blocks(
        list(pair.trials), (result for results in by_name.values() for result in results)
    )


def _calls(folder: Path, step: int) -> dict[int, dict[str, list[list[Call]]]]:
    calls: dict[int, dict[str, list[list[Call]]]] = {}
    for file in sorted(
        folder.glob(f"blocks-{step}-*.pt"), key=lambda file: int(file.stem.rpartition("-")[2])
    ):
        seen = torch.load(file, weights_only=True)
        of_rank = calls.setdefault(int(seen["data_rank"]), {})
        for name, each in seen["calls"].items():
            of_rank.setdefault(name, []).append(each)
    return calls


@dataclass(kw_only=True)
class _MicroBatch:
    """The ``number``-th of ``count`` micro-batches of a rank, which left ``calls``. Gradients are
    those of the losses × ``per_term`` + the balancing losses × ``per_call``.
    """

    calls: Mapping[str, Sequence[Sequence[Call]]]
    number: int
    count: int
    pair: Pair
    batch: Batch
    per_term: float
    per_call: float

    def results(self) -> Iterator[Result]:
        model = self.pair.exact
        batch = self.batch
        names, (inside, outside, predicted) = model.blocks(), _shapes(model, batch)
        states = self._needed(names[0], inside)
        (exact, context), (rounded, near) = self.pair.both(
            lambda model, weights: model.entered(weights, batch)
        )
        yield Result(
            name="embeddings", run=states, exact=exact, rounded=rounded, certain=_every(states)
        )
        time = None
        if model.sizes.of_images:
            time = self._time(names[0])
        if time is not None:
            seen = time[:, None]
            exact = context[:, None]
            rounded = near[:, None]
            yield Result(
                name="time",
                run=seen,
                exact=exact,
                rounded=rounded,
                certain=_every(seen),
                floor=_LIMITS["time"],
            )
            context = time
        for name in names:
            if not torch.equal(self._needed(name, inside), states):
                raise Unlike(f"{name} did not get what the block before it returned")
            if time is not None and not torch.equal(self._time(name), time):
                raise Unlike(f"{name} did not get the time that the first block got")
            returned = self._needed(name, outside)
            back = self._read(name, inside, "grad.")
            if back is None:
                back_out = None
            else:
                back_out = self._read(name, outside, "grad.")
            yield from self._of_block(name, states, returned, back, back_out, context)
            states = returned
        # A fused loss has no logits.
        called = time is not None or any(chain.from_iterable(self.calls.get("output", ())))
        logits = None
        if called:
            logits = self._needed("output", {"out.0": predicted})
        back = self._read(names[-1], outside, "grad.")
        yield from self._of_output(
            "logits" if time is None else "velocity", states, logits, back, context
        )

    def _needed(self, name: str, keys: Shapes) -> Tensor:
        tensor = self._read(name, keys)
        if tensor is None:
            raise Unlike(f"{name} left no tensors {' and '.join(keys)}")
        return tensor

    def _time(self, name: str) -> Tensor:
        time = self.calls[name][0][self.number].get("in.temb")
        if time is None:
            raise Unlike(f"{name} left no time")
        return time

    def _read(self, name: str, keys: Shapes, before: str = "") -> Tensor | None:
        """Return the tensors ``keys`` of the module ``name`` joined along their length; or with
        ``before`` "grad.", their gradients, if the run has any.
        """
        parts = self.calls.get(name, [])
        if not parts or any(len(each) % self.count or not each for each in parts):
            raise Unlike(
                f"{name} ran {len(parts[0]) if parts else 0} times for {self.count} micro-batches"
            )
        joined = {}
        for key, shape in keys.items():
            pieces = []
            for each in parts:
                size = len(each) // self.count
                share = [
                    call.get(before + key)
                    for call in each[self.number * size : (self.number + 1) * size]
                ]
                held = [tensor for tensor in share if tensor is not None]
                if len(held) == len(share):
                    pieces.append(
                        torch.cat([tensor.flatten(0, -2) for tensor in held])
                        if len(held) > 1
                        else held[0]
                    )
            if len(pieces) == len(parts):
                joined[key] = _arranged(pieces, shape, name)
        # What no later block uses has no gradient.
        every = [
            joined[key] if key in joined else torch.zeros(*shape) for key, shape in keys.items()
        ]
        if joined:
            return torch.cat(every, 1)
        return None

    def _of_block(
        self,
        name: str,
        entered: Tensor,
        returned: Tensor,
        back: Tensor | None,
        back_out: Tensor | None,
        context: Tensor | None,
    ) -> Iterator[Result]:
        pair = self.pair
        sure = _every(entered)
        balanced = False

        def one(model: Transformer, weights: Tensors) -> tuple[Tensor, Tensor | None]:
            states = entered.detach().to(next(iter(weights.values())).dtype).requires_grad_()
            out, balance = model.block(weights, name, states, context)
            if back_out is None:
                return out.detach(), None
            outs = [out]
            gradients = [back_out.to(out.dtype)]
            if balance.requires_grad:
                outs.append(balance)
                gradients.append(torch.full_like(balance, self.per_call))
            return out.detach(), model.between(torch.autograd.grad(outs, states, gradients)[0])

        (exact, gradient), (rounded, near) = pair.both(one)
        if isinstance(pair.exact, Model) and pair.exact.choices:
            balanced = (
                pair.exact.dialect.balance != "none" and pair.exact.sizes.moe.auxiliary_loss > 0
            )
            sure = _sure(pair.exact, pair.rounded).view_as(sure)
            pair.both(lambda model, _: model.choices.clear())
        states = entered.to(exact.dtype)
        moved = pair.moved(
            "outputs", exact, lambda model: model.block(pair.weights, name, states, context)[0]
        )
        result = Result(
            name=name,
            entered=entered,
            run=returned,
            exact=exact,
            rounded=rounded,
            certain=sure,
            moved=moved,
        )
        yield result
        if gradient is not None and near is not None and back is not None:
            if not sure.all():
                # Attention spreads the gradient of a token that went to another expert over its
                # sample.
                usual = _LIMITS["flipped"] * _mean_square(result.noises[sure])
                sure = sure & (result.errors.maximum(result.noises) <= usual).all(1, keepdim=True)
            trials = [
                (key, trial.model)
                for key, trial in pair.trials.items()
                if "gradients" in trial.shows
            ]
            yield Result(
                name=f"gradients of {name}",
                entered=back_out,
                run=back,
                exact=gradient,
                rounded=near,
                certain=sure,
                balanced=balanced,
                moved={key: one(model, pair.weights)[1] - gradient for key, model in trials},
            )

    def _of_output(
        self,
        name: str,
        entered: Tensor,
        returned: Tensor | None,
        back: Tensor | None,
        context: Tensor | None,
    ) -> Iterator[Result]:
        pair = self.pair
        batch = self.batch
        moved: dict[str, Tensor] = {}

        def one(model: Transformer, weights: Tensors) -> tuple[Tensor, Tensor]:
            states = entered.detach().to(next(iter(weights.values())).dtype).requires_grad_()
            out = model.head(weights, states, context)
            value = model.errors(out, batch).sum() * self.per_term
            gradient = torch.autograd.grad(value, states, retain_graph=True)[0]
            for key, trial in pair.trials.items() if model is pair.exact else ():
                if "loss" in trial.shows:
                    change = trial.model.errors(out, batch).sum() * self.per_term - value
                    moved[key] = torch.autograd.grad(change, states, retain_graph=True)[0]
            return out.detach(), model.between(gradient)

        (exact, gradient), (rounded, near) = pair.both(one)
        if returned is not None:
            states = entered.to(exact.dtype)
            yield Result(
                name=name,
                run=returned,
                exact=exact,
                rounded=rounded,
                certain=_every(exact),
                moved=pair.moved(
                    "head", exact, lambda model: model.head(pair.weights, states, context)
                ),
            )
        if back is not None:
            yield Result(
                name=f"gradients of {name}",
                run=back,
                exact=gradient,
                rounded=near,
                certain=_every(gradient),
                moved=moved,
            )


def _every(states: Tensor) -> Tensor:
    return torch.ones(states.shape[:2], dtype=torch.bool)


def _arranged(parts: Sequence[Tensor], shape: Shape, name: str) -> Tensor:
    """Join tensors of ranks that share a layer, each the whole or a piece; Megatron's begin with
    the length.
    """
    samples, length, size = shape
    for whole in (parts[0], *(torch.cat(list(parts), axis) for axis in range(parts[0].ndim))):
        if whole.shape == (samples, length, size):
            return whole
        if whole.shape == (length, samples, size):
            return whole.transpose(0, 1)
        if whole.shape == (samples * length, size):
            return whole.unflatten(0, (samples, length))
    raise Unlike(f"{name} computed {len(parts)} × {list(parts[0].shape)}, not {list(shape)}")


def _shapes(model: Transformer, batch: Batch) -> tuple[Shapes, Shapes, Shape]:
    width = model.sizes.hidden_size
    if model.sizes.of_images:
        images, tokens, _ = batch["latents"].shape
        text = (images, batch["text"].shape[1], width)
        image = (images, tokens, width)
        inside = {"in.encoder_hidden_states": text, "in.hidden_states": image}
        return inside, {"out.0": text, "out.1": image}, tuple(batch["latents"].shape)
    shape = (*batch["inputs"].shape, width)
    return (
        {"in.hidden_states": shape},
        {"out.0": shape},
        (*batch["inputs"].shape, model.sizes.vocab_size),
    )


def _sure(exact: Model, rounded: Transformer) -> Tensor:
    (choice,), (other,) = exact.choices.values(), rounded.choices.values()
    moved = (other.to(choice.dtype) - choice).abs().amax(-1)
    return ~exact.doubtful(choice, _LIMITS["ahead"] * moved.clamp(min=_mean_square(moved)))


def _mean_square(values: Tensor) -> float:
    if len(values):
        return float(values.double().square().mean().sqrt())
    return math.inf


def _figures(results: Sequence[Result]) -> dict[str, Any]:
    """Return the errors as multiples of the noise: of the ``typical`` (median) token, in the sample
    where it is largest if samples are long, of each ``token``, and of all tokens but the worst at
    one ``position``.

    ``certain`` is the share of the tokens that could be compared. ``share`` is the part of the
    errors along the module's change of its input beyond that of the noise, and ``noise`` the size
    of the noise, both relative to the change.
    """
    sure = torch.cat([result.certain for result in results])
    errors, noise = (
        torch.cat([getattr(result, key) for result in results]).double()
        for key in ("errors", "noises")
    )
    exact = torch.cat([result.exact for result in results]).double()
    if results[0].entered is not None:
        change = exact - torch.cat([result.entered for result in results])
    else:
        change = exact
    row: dict[str, Any] = {"certain": float(sure.double().mean()), "balanced": results[0].balanced}
    if not sure.any():
        return row
    # Before the first update of a layer that begins at 0, all gradients are 0.
    floor = results[0].floor * _mean_square(exact.norm(dim=-1)[sure]) + _LIMITS["smallest"]
    usual = _mean_square(noise[sure]) + floor
    allowed = noise.clamp(min=usual)
    ratios = torch.where(sure, errors / allowed, 0.0)
    at = int(ratios.argmax())
    others = sure.scatter(0, ratios.argmax(0, keepdim=True), value=False)
    squares, spread = (torch.where(others, part.square(), 0.0).sum(0) for part in (errors, allowed))
    places = (squares / spread.clamp(min=usual**2)).sqrt()
    parts = [
        part if sure.shape[1] >= _LIMITS["long"] else part[None] for part in (errors, noise, sure)
    ]
    medians = [
        float(of[held].median() / (rounding[held].median() + floor))
        for of, rounding, held in zip(*parts, strict=True)
        if int(held.sum()) >= min(_LIMITS["enough"], held.numel())
    ]
    size = float(change.norm(dim=-1)[sure].norm())
    run, rounded = (
        torch.cat([getattr(result, key) for result in results]).double()
        for key in ("run", "rounded")
    )
    along = ((run - rounded) * change).sum(-1)
    return row | {
        "typical": max(medians, default=0.0),
        "token": float(ratios.max()),
        "token_at": list(divmod(at, sure.shape[1])),
        "position": float(places.max()),
        "position_at": int(places.argmax()),
        "share": float(along[sure].sum()) / size**2 if size else 0.0,
        "noise": usual * math.sqrt(int(sure.sum())) / size if size else math.inf,
    }
