"""Which of many changes make a release bad: a search for one or two culprits with a judge that may
be wrong.

A *point* is the set of changes that are taken from the bad release; the rest is as in the good one.
Each hypothesis says which points are bad, and its probability depends on the number of answers that
contradict it (Bayes). The search asks about a point that half of the probability calls bad, so a
doubtful answer is asked for again where it matters.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, combinations
from operator import or_
from random import Random
from typing import NamedTuple

Point = frozenset[int]
# The probability that none of the changes is the reason, that a single one is, and that two are.
_PRIOR = (0.05, 0.5, 0.45)
_ORDERS = 4
# The answer to a point that less of the probability calls good, or bad, tells nothing.
_LEAST = 1e-6
# After so many points in a row that cannot be judged, those that would tell more are given up.
_PATIENCE = 24
# A point that is likelier to be buildable may halve the probability by so much worse than the best
# one.
_TOLERANCE = 0.1


class Hypothesis(NamedTuple):
    """A point is bad with any of ``changes``, or, if they act ``together``, only with all of them.

    Any of none is no point and all of none is every point: then the changes are not the reason.
    """

    changes: tuple[int, ...]
    together: bool = False


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The likeliest hypothesis with its probability, and ``rivals`` that are not negligible, the
    likeliest first.

    ``fit`` is the probability that a judge of the assumed quality gives at least as many wrong
    answers as the hypothesis implies. If it is very small, no hypothesis explains the answers.
    """

    hypothesis: Hypothesis
    probability: float
    rivals: tuple[Hypothesis, ...]
    fit: float


def hypotheses(changes: int) -> list[Hypothesis]:
    """Return all hypotheses about a number of changes: none, one, or two that suffice alone or act
    together.
    """
    pairs = list(combinations(range(changes), 2))
    singles = [Hypothesis((change,)) for change in range(changes)]
    together = [Hypothesis(pair, together=True) for pair in pairs]
    return [
        Hypothesis(()),
        Hypothesis((), together=True),
        *singles,
        *map(Hypothesis, pairs),
        *together,
    ]


def bound(changes: int, wrong: float) -> float:
    """Return the least mean number of answers that can decide: log2 of the number of hypotheses ÷
    bits of an answer.

    An answer that is wrong with probability ``wrong`` carries the capacity of a binary symmetric
    channel.
    """
    noise = sum(-p * math.log2(p) for p in (wrong, 1 - wrong) if p)
    return math.log2(len(hypotheses(changes))) / (1 - noise)


class Search:
    """A search among a number of ``changes``. It depends on nothing but its arguments and the
    answers.

    ``wrong`` is the assumed share of wrong answers, below 0.5. The search ends when the probability
    of a wrong verdict is at most ``doubt``.
    """

    def __init__(
        self, changes: int, *, wrong: float = 0.1, doubt: float = 0.004, seed: int = 0
    ) -> None:
        self.changes = changes
        self.wrong = wrong
        self.doubt = doubt
        self._seed = seed
        self.answers: list[tuple[Point, bool | None]] = []
        self._every = hypotheses(changes)
        # Sets of hypotheses are the bits of a number: those that a change is part of, by how its
        # changes act.
        self._any = [0] * changes
        self._all = [0] * changes
        self._together = 0
        # (number of changes, number of contradicting answers) → the hypotheses.
        self._levels: Counter[tuple[int, int]] = Counter()
        for index, hypothesis in enumerate(self._every):
            bit = 1 << index
            self._levels[len(hypothesis.changes), 0] |= bit
            self._together |= bit if hypothesis.together else 0
            for change in hypothesis.changes:
                (self._all if hypothesis.together else self._any)[change] |= bit
        self._counts = {size: mask.bit_count() for (size, _), mask in self._levels.items()}
        # For each change, the changes that were absent beside it in points that could be built, and
        # that could not.
        self._fits: list[set[int]] = [set() for _ in range(changes)]
        self._suspects: list[set[int]] = [set() for _ in range(changes)]

    def tell(self, point: Point, bad: bool | None) -> None:
        """Take the answer about a point. None: it cannot be judged."""
        self.answers.append((point, bad))
        absent = set(range(self.changes)) - point
        for change in point:
            (self._suspects if bad is None else self._fits)[change].update(absent)
        if bad is None:
            if point and absent:
                return
            bad = bool(
                point
            )  # GOOD and BAD are what the question says, as long as nothing contradicts it
        contradicting = self._calling_bad([*point, *absent])[len(point)]
        if bad:
            contradicting = ~contradicting
        levels: Counter[tuple[int, int]] = Counter()
        for (size, count), mask in self._levels.items():
            levels[size, count] |= mask & ~contradicting
            levels[size, count + 1] |= mask & contradicting
        self._levels = +levels

    def next(self) -> Point | None:
        """Return the point to ask about, or None at the end of the search."""
        last = [bad for _, bad in self.answers[-_PATIENCE:]]
        if max(self._weights().values()) >= 1 - self.doubt or last == [None] * _PATIENCE:
            return None
        skipped = {point for point, bad in self.answers if bad is None}
        candidates = [
            (p, s) for p, s in self._candidates() if _LEAST < s < 1 - _LEAST and p not in skipped
        ]
        if not candidates:
            return None
        near = min(abs(share - 0.5) for _, share in candidates) + _TOLERANCE
        rows = [
            (self._suspicion(p) if skipped else 0, abs(s - 0.5), p)
            for p, s in candidates
            if abs(s - 0.5) <= near
        ]
        return min(rows, key=lambda row: row[:2])[2]

    def verdict(self) -> Verdict:
        """Return what the answers so far say."""
        weights = self._weights()
        first = max(weights, key=weights.__getitem__)
        likely = sorted(
            (w for w in weights.items() if w[1] > weights[first] * self.doubt), key=lambda w: -w[1]
        )
        top, *rivals = (hypothesis for level, _ in likely for hypothesis in self._in(level))
        judged = sum(bad is not None for _, bad in self.answers)
        fit = sum(
            math.comb(judged, k) * self.wrong**k * (1 - self.wrong) ** (judged - k)
            for k in range(first[1], judged + 1)
        )
        return Verdict(hypothesis=top, probability=weights[first], rivals=tuple(rivals), fit=fit)

    def _weights(self) -> dict[tuple[int, int], float]:
        """Return the probability of each hypothesis of a level."""
        least = min(count for _, count in self._levels)
        odds = self.wrong / (1 - self.wrong)
        weights = {
            (size, n): _PRIOR[size] / self._counts[size] * odds ** (n - least)
            for size, n in self._levels
        }
        total = sum(weight * self._levels[level].bit_count() for level, weight in weights.items())
        return {level: weight / total for level, weight in weights.items()}

    def _in(self, level: tuple[int, int]) -> Iterator[Hypothesis]:
        mask = self._levels[level]
        while mask:
            yield self._every[(mask & -mask).bit_length() - 1]
            mask &= mask - 1

    def _calling_bad(self, order: list[int]) -> list[int]:
        """Return the hypotheses that call a point bad, for the points of the first 0, 1, … changes
        of an order.
        """
        present = accumulate((self._any[change] for change in order), or_, initial=0)
        absent = [*accumulate((self._all[change] for change in reversed(order)), or_, initial=0)]
        return [
            some | (self._together & ~lacking)
            for some, lacking in zip(present, reversed(absent), strict=True)
        ]

    def _candidates(self) -> Iterator[tuple[Point, float]]:
        """Yield points with the probability that they are bad: beginnings of random orders that are
        next to 0.5.
        """
        random = Random(f"{self._seed} {len(self.answers)}")
        weights = self._weights()
        order = list(range(self.changes))
        for _ in range(_ORDERS):
            random.shuffle(order)
            masks = self._calling_bad(order)

            def share(length: int, masks: list[int] = masks) -> float:
                return sum(
                    w * (self._levels[le] & masks[length]).bit_count() for le, w in weights.items()
                )

            # Along an order, the share only grows.
            length = bisect_left(range(self.changes), 0.5, key=share)
            for near in (length - 1, length):
                if near >= 0:
                    yield frozenset(order[:near]), share(near)

    def _suspicion(self, point: Point) -> int:
        absent = set(range(self.changes)) - point
        return sum(len((self._suspects[change] & absent) - self._fits[change]) for change in point)
