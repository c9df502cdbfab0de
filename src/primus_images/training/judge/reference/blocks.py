"""Repeating the blocks of a model one by one, each from what entered it in the run.

What remains is the rounding of one block. Each token is compared on its own, forward and backward;
each block gets the run's gradient of what it returned.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from primus_images.training.judge.reference.data import Batch, Samples, micro_batches
from primus_images.training.judge.reference.model import Model, Transformer
from primus_images.training.judge.reference.models import Part, Trial, products_of_blocks
from primus_images.training.judge.reference.names import Job, Tensors
from primus_images.training.judge.reference.rounding import LIMITS

# One call of a module: its inputs, outputs and their gradients, by the names of
# primus_images.training.judge.witness.
Call = Mapping[str, Tensor]
# Name of a module → its calls on each rank that shares it.
Calls = dict[str, list[list[Call]]]
Shape = tuple[int, ...]
Rows = list[dict[str, Any]]
# Name of a module's input or output → its shape [samples, length, size].
Shapes = Mapping[str, Shape]

_LIMITS = LIMITS["blocks"]


class Unlike(Exception):
    """The run's modules were not called as the model's definition says."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a module returned for each token [samples, length, size].

    It is that of the ``run``, the ``exact`` one, and one ``rounded`` in the run's precision.
    ``entered`` is what the module only adds to; None if it replaces its input. ``certain``
    [samples, length] are the tokens that rounding cannot send to other experts. ``balanced``: they
    are gradients, also of a balancing loss. ``moved``: name of a changed constant → its effect.
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
        """The length of each token's error in the run: [samples, length].

        It is infinite where it is not a number.
        """
        difference = self.run.to(self.exact.dtype) - self.exact
        return difference.norm(dim=-1).nan_to_num(nan=math.inf)

    @cached_property
    def noises(self) -> Tensor:
        """The same of the reference in the run's precision."""
        difference = self.rounded.to(self.exact.dtype) - self.exact
        return difference.norm(dim=-1)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The model without rounding and with that of the run, each with the weights that it uses.

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
        of_exact = compute(self.exact, self.weights)
        of_rounded = compute(self.rounded, self.narrow)
        return of_exact, of_rounded

    def shown(self, where: str) -> dict[str, Trial]:
        """Return the changes that show in ``where``."""
        return {name: trial for name, trial in self.trials.items() if where in trial.shows}

    def moved(
        self, where: str, exact: Tensor, compute: Callable[[Any], Tensor]
    ) -> dict[str, Tensor]:
        """Return how far the changes that show in ``where`` move what ``compute`` makes."""
        shown = self.shown(where)
        moved = {}
        with torch.no_grad():
            plain = exact
            if shown and self.plain is not self.exact:
                plain = compute(self.plain)
            for name, trial in shown.items():
                unchanged = plain
                if trial.rounds:
                    unchanged = exact
                changed = compute(trial.model)
                moved[name] = changed - unchanged
        return moved


def compare(
    folder: Path, job: Job, step: int, samples: Samples, pair: Pair
) -> tuple[Rows, list[Part]]:
    """Return for each module how its errors at ``step`` compare with the noise.

    The rows are those of :func:`_figures`. The effects of changed constants are returned as well.
    Raises Unlike if the run's modules were not called as they should be.
    """
    ranks = job["data_parallel"]
    count = job["accumulation"]
    batches = [samples.batch(step, rank) for rank in range(ranks)]
    terms = sum(samples.terms(batch) for batch in batches)
    # Megatron divides gradients by the number of labels after the backward pass.
    scale = 1.0
    if job["backend"] == "megatron":
        scale = float(terms)
    calls = _calls(folder, step)
    if sorted(calls) != list(range(ranks)):
        raise Unlike(f"the ranks {sorted(calls)} of {ranks} left what their blocks computed")
    by_name: dict[str, list[Result]] = {}
    for rank, whole in enumerate(batches):
        for number, batch in enumerate(micro_batches(whole, count)):
            micro_batch = _MicroBatch(
                calls=calls[rank],
                number=number,
                count=count,
                pair=pair,
                batch=batch,
                per_term=scale / terms,
                per_call=scale / ranks / count,
            )
            for result in micro_batch.results():
                of_module = by_name.setdefault(result.name, [])
                of_module.append(result)
    rows: Rows = []
    every_result: list[Result] = []
    for name, results in by_name.items():
        rows.append({"name": name, **_figures(results)})
        every_result += results
    return rows, products_of_blocks(list(pair.trials), every_result)


def _rank_of(file: Path) -> int:
    return int(file.stem.rpartition("-")[2])


def _calls(folder: Path, step: int) -> dict[int, Calls]:
    """Return data-parallel rank → the calls of its modules."""
    calls: dict[int, Calls] = {}
    files = folder.glob(f"blocks-{step}-*.pt")
    for file in sorted(files, key=_rank_of):
        recorded = torch.load(file, weights_only=True)
        rank = int(recorded["data_rank"])
        of_rank = calls.setdefault(rank, {})
        for name, of_module in recorded["calls"].items():
            of_ranks = of_rank.setdefault(name, [])
            of_ranks.append(of_module)
    return calls


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """What entered a module of the run and what it returned, and their gradients, if there are."""

    name: str
    entered: Tensor
    returned: Tensor | None
    gradient: Tensor | None
    of_returned: Tensor | None = None


@dataclass(kw_only=True)
class _MicroBatch:
    """The ``number``-th of ``count`` micro-batches of a rank, which left ``calls``.

    Gradients are those of the losses × ``per_term`` + the balancing losses × ``per_call``.
    ``context`` is what all blocks get besides their states.
    """

    calls: Mapping[str, Sequence[Sequence[Call]]]
    number: int
    count: int
    pair: Pair
    batch: Batch
    per_term: float
    per_call: float
    context: Tensor | None = None

    def results(self) -> Iterator[Result]:
        model = self.pair.exact
        names = model.blocks()
        inside, outside, predicted = _shapes(model, self.batch)
        yield from self._of_entrance(names[0], inside)
        states = self._needed(names[0], inside)
        for name in names:
            if not torch.equal(self._needed(name, inside), states):
                raise Unlike(f"{name} did not get what the block before it returned")
            if model.sizes.of_images and not self._has_time_of(name, names[0]):
                raise Unlike(f"{name} did not get the time that the first block got")
            gradient = self._read(name, inside, "grad.")
            of_returned = None
            if gradient is not None:
                of_returned = self._read(name, outside, "grad.")
            returned = self._needed(name, outside)
            seen = _Seen(
                name=name,
                entered=states,
                returned=returned,
                gradient=gradient,
                of_returned=of_returned,
            )
            yield from self._of_block(seen)
            states = returned
        name = "logits"
        if model.sizes.of_images:
            name = "velocity"
        prediction = None
        # A fused loss has no logits.
        recorded = any(map(any, self.calls.get("output", ())))
        if model.sizes.of_images or recorded:
            prediction = self._needed("output", {"out.0": predicted})
        gradient = self._read(names[-1], outside, "grad.")
        seen = _Seen(name=name, entered=states, returned=prediction, gradient=gradient)
        yield from self._of_output(seen)

    def _of_entrance(self, first: str, inside: Shapes) -> Iterator[Result]:
        states = self._needed(first, inside)

        def enter(model: Transformer, weights: Tensors) -> tuple[Tensor, Tensor | None]:
            return model.entered(weights, self.batch)

        (exact, context), (rounded, near) = self.pair.both(enter)
        yield Result(
            name="embeddings", run=states, exact=exact, rounded=rounded, certain=_every(states)
        )
        self.context = context
        if self.pair.exact.sizes.of_images:
            self.context = self._time(first)
            time = self.context[:, None]
            yield Result(
                name="time",
                run=time,
                exact=context[:, None],
                rounded=near[:, None],
                certain=_every(time),
                floor=_LIMITS["time"],
            )

    def _needed(self, name: str, keys: Shapes) -> Tensor:
        tensor = self._read(name, keys)
        if tensor is None:
            raise Unlike(f"{name} left no tensors {' and '.join(keys)}")
        return tensor

    def _time(self, name: str) -> Tensor:
        of_first_rank = self.calls[name][0]
        time = of_first_rank[self.number].get("in.temb")
        if time is None:
            raise Unlike(f"{name} left no time")
        return time

    def _has_time_of(self, name: str, other: str) -> bool:
        time = self._time(name)
        return torch.equal(time, self._time(other))

    def _read(self, name: str, keys: Shapes, prefix: str = "") -> Tensor | None:
        """Return the tensors ``keys`` of the module ``name`` joined along their length.

        With the ``prefix`` "grad.", these are their gradients, if the run has any.
        """
        parts = self.calls.get(name, [])
        as_often = [bool(calls) and len(calls) % self.count == 0 for calls in parts]
        if not parts or not all(as_often):
            times = 0
            if parts:
                times = len(parts[0])
            raise Unlike(f"{name} ran {times} times for {self.count} micro-batches")
        joined = []
        recorded = False
        for key, shape in keys.items():
            pieces = [self._piece(calls, prefix + key) for calls in parts]
            whole = [piece for piece in pieces if piece is not None]
            if len(whole) == len(parts):
                joined.append(_arranged(whole, shape, name))
                recorded = True
            else:
                # What no later block uses has no gradient.
                joined.append(torch.zeros(*shape))
        if recorded:
            return torch.cat(joined, 1)
        return None

    def _piece(self, calls: Sequence[Call], key: str) -> Tensor | None:
        size = len(calls) // self.count
        first = self.number * size
        of_batch = calls[first : first + size]
        tensors = [call[key] for call in of_batch if key in call]
        if len(tensors) != len(of_batch):
            return None
        if len(tensors) == 1:
            return tensors[0]
        flat = [tensor.flatten(0, -2) for tensor in tensors]
        return torch.cat(flat)

    def _of_block(self, seen: _Seen) -> Iterator[Result]:
        pair = self.pair

        def compute(model: Transformer, weights: Tensors) -> tuple[Tensor, Tensor | None]:
            return self._block(model, weights, seen)

        (exact, gradient), (rounded, near) = pair.both(compute)
        certain = _every(seen.entered)
        balanced = False
        if isinstance(pair.exact, Model) and pair.exact.choices:
            balancing = pair.exact.dialect.balance != "none"
            balanced = balancing and pair.exact.sizes.moe.auxiliary_loss > 0
            certain = _certain(pair.exact, pair.rounded).view_as(certain)
            pair.exact.choices.clear()
            pair.rounded.choices.clear()
        states = seen.entered.to(exact.dtype)

        def returned(model: Transformer) -> Tensor:
            return model.block(pair.weights, seen.name, states, self.context)[0]

        result = Result(
            name=seen.name,
            entered=seen.entered,
            run=seen.returned,
            exact=exact,
            rounded=rounded,
            certain=certain,
            moved=pair.moved("outputs", exact, returned),
        )
        yield result
        if gradient is None or near is None or seen.gradient is None:
            return
        moved = {}
        for name, trial in pair.shown("gradients").items():
            _, changed = compute(trial.model, pair.weights)
            moved[name] = changed - gradient
        yield Result(
            name=f"gradients of {seen.name}",
            entered=seen.of_returned,
            run=seen.gradient,
            exact=gradient,
            rounded=near,
            certain=_certain_gradients(result),
            balanced=balanced,
            moved=moved,
        )

    def _block(
        self, model: Transformer, weights: Tensors, seen: _Seen
    ) -> tuple[Tensor, Tensor | None]:
        states = _leaf(seen.entered, weights)
        out, balance = model.block(weights, seen.name, states, self.context)
        if seen.of_returned is None:
            return out.detach(), None
        outs = [out]
        gradients = [seen.of_returned.to(out.dtype)]
        if balance.requires_grad:
            outs.append(balance)
            gradients.append(torch.full_like(balance, self.per_call))
        gradient = torch.autograd.grad(outs, states, gradients)[0]
        return out.detach(), model.between(gradient)

    def _of_output(self, seen: _Seen) -> Iterator[Result]:
        pair = self.pair
        moved: dict[str, Tensor] = {}

        def compute(model: Transformer, weights: Tensors) -> tuple[Tensor, Tensor]:
            states = _leaf(seen.entered, weights)
            out = model.head(weights, states, self.context)
            loss = self._loss(model, out)
            (gradient,) = torch.autograd.grad(loss, states, retain_graph=True)
            if model is pair.exact:
                for name, trial in pair.shown("loss").items():
                    change = self._loss(trial.model, out) - loss
                    (moved[name],) = torch.autograd.grad(change, states, retain_graph=True)
            return out.detach(), model.between(gradient)

        (exact, gradient), (rounded, near) = pair.both(compute)
        if seen.returned is not None:
            states = seen.entered.to(exact.dtype)

            def predicted(model: Transformer) -> Tensor:
                return model.head(pair.weights, states, self.context)

            yield Result(
                name=seen.name,
                run=seen.returned,
                exact=exact,
                rounded=rounded,
                certain=_every(exact),
                moved=pair.moved("head", exact, predicted),
            )
        if seen.gradient is not None:
            yield Result(
                name=f"gradients of {seen.name}",
                run=seen.gradient,
                exact=gradient,
                rounded=near,
                certain=_every(gradient),
                moved=moved,
            )

    def _loss(self, model: Transformer, predicted: Tensor) -> Tensor:
        errors = model.errors(predicted, self.batch)
        return errors.sum() * self.per_term


def _every(states: Tensor) -> Tensor:
    return torch.ones(states.shape[:2], dtype=torch.bool)


def _leaf(states: Tensor, weights: Tensors) -> Tensor:
    dtype = next(iter(weights.values())).dtype
    return states.detach().to(dtype).requires_grad_()


def _certain_gradients(result: Result) -> Tensor:
    """Return the certain tokens of ``result`` whose gradients are certain as well.

    Attention spreads the gradient of a token that went to another expert over its sample, so a
    sample with one large error has no certain gradient.
    """
    certain = result.certain
    if certain.all():
        return certain
    largest = _LIMITS["flipped"] * _mean_square(result.noises[certain])
    is_near = result.errors.maximum(result.noises) <= largest
    is_near_sample = is_near.all(1, keepdim=True)
    return certain & is_near_sample


def _arranged(parts: Sequence[Tensor], shape: Shape, name: str) -> Tensor:
    """Join tensors of ranks that share a layer, each the whole or a piece.

    Megatron's begin with the length.
    """
    samples, length, size = shape
    first = parts[0]
    possible = [first]
    for axis in range(first.ndim):
        possible.append(torch.cat(list(parts), axis))
    for whole in possible:
        if whole.shape == (samples, length, size):
            return whole
        if whole.shape == (length, samples, size):
            return whole.transpose(0, 1)
        if whole.shape == (samples * length, size):
            return whole.unflatten(0, (samples, length))
    computed = f"{len(parts)} × {list(first.shape)}"
    raise Unlike(f"{name} computed {computed}, not {list(shape)}")


def _shapes(model: Transformer, batch: Batch) -> tuple[Shapes, Shapes, Shape]:
    width = model.sizes.hidden_size
    if model.sizes.of_images:
        images, tokens, channels = batch["latents"].shape
        text = (images, batch["text"].shape[1], width)
        image = (images, tokens, width)
        inside = {"in.encoder_hidden_states": text, "in.hidden_states": image}
        return inside, {"out.0": text, "out.1": image}, (images, tokens, channels)
    samples, length = batch["inputs"].shape
    states = (samples, length, width)
    logits = (samples, length, model.sizes.vocab_size)
    return {"in.hidden_states": states}, {"out.0": states}, logits


def _certain(exact: Model, rounded: Transformer) -> Tensor:
    (choice,) = exact.choices.values()
    (other,) = rounded.choices.values()
    difference = other.to(choice.dtype) - choice
    moved = difference.abs().amax(-1)
    usual = _mean_square(moved)
    shift = _LIMITS["ahead"] * moved.clamp(min=usual)
    return ~exact.doubtful(choice, shift)


def _mean_square(values: Tensor) -> float:
    if len(values):
        return float(values.double().square().mean().sqrt())
    return math.inf


def _joined(results: Sequence[Result], key: str) -> Tensor:
    tensors = [getattr(result, key) for result in results]
    return torch.cat(tensors).double()


def _figures(results: Sequence[Result]) -> dict[str, Any]:
    """Return the errors as multiples of the noise.

    They are those of the ``typical`` (median) token, in the sample where it is largest if samples
    are long, of each ``token``, and of all tokens but the worst at one ``position``.

    ``certain`` is the share of the tokens that could be compared. ``share`` is the part of the
    errors along the module's change of its input beyond that of the noise, and ``noise`` the size
    of the noise, both relative to the change.
    """
    first = results[0]
    certain = torch.cat([result.certain for result in results])
    certain_share = float(certain.double().mean())
    row = {"certain": certain_share, "balanced": first.balanced}
    if not certain.any():
        return row
    errors = _joined(results, "errors")
    noise = _joined(results, "noises")
    exact = _joined(results, "exact")
    # Before the first update of a layer that begins at 0, all gradients are 0.
    lengths = exact.norm(dim=-1)
    length = _mean_square(lengths[certain])
    floor = first.floor * length + _LIMITS["smallest"]
    usual = _mean_square(noise[certain]) + floor
    allowed = noise.clamp(min=usual)
    ratios = torch.where(certain, errors / allowed, 0.0)
    token = int(ratios.argmax())
    worst = ratios.argmax(0, keepdim=True)
    others = certain.scatter(0, worst, value=False)
    squares = torch.where(others, errors.square(), 0.0).sum(0)
    spread = torch.where(others, allowed.square(), 0.0).sum(0)
    positions = (squares / spread.clamp(min=usual**2)).sqrt()
    change = exact
    if first.entered is not None:
        entered = torch.cat([result.entered for result in results])
        change = exact - entered
    changes = change.norm(dim=-1)
    size = float(changes[certain].norm())
    share = 0.0
    relative_noise = math.inf
    if size:
        difference = _joined(results, "run") - _joined(results, "rounded")
        along = (difference * change).sum(-1)
        total = float(along[certain].sum())
        share = total / size**2
        count = int(certain.sum())
        relative_noise = usual * math.sqrt(count) / size
    return row | {
        "typical": _typical(errors, noise, certain, floor),
        "token": float(ratios.max()),
        "token_at": list(divmod(token, certain.shape[1])),
        "position": float(positions.max()),
        "position_at": int(positions.argmax()),
        "share": share,
        "noise": relative_noise,
    }


def _typical(errors: Tensor, noise: Tensor, certain: Tensor, floor: float) -> float:
    if certain.shape[1] < _LIMITS["long"]:
        errors = errors[None]
        noise = noise[None]
        certain = certain[None]
    medians = []
    for number, compared in enumerate(certain):
        enough = min(_LIMITS["enough"], compared.numel())
        if int(compared.sum()) >= enough:
            rounding = noise[number][compared].median() + floor
            error = errors[number][compared].median()
            medians.append(float(error / rounding))
    return max(medians, default=0.0)
