"""Synthetic text from a seed, for measurements: no download, equal on every machine, and learnable."""

import random
from collections.abc import Iterator

TEXTS = 2000
_WORDS = 500
_FOLLOWERS = 4
_LETTERS = "etaoinshrdlu"


def texts(seed: int, count: int, words: int = 400) -> Iterator[str]:
    """Yield ``count`` texts of ``words`` words each.

    Every word has a few possible successors (an order-1 Markov chain), so a model's loss falls towards the chain's
    entropy of ln 4 ≈ 1.39 per word, and a run that does not learn is noticed.
    """
    chain = random.Random(seed)
    vocabulary = ["".join(chain.choices(_LETTERS, k=chain.randint(2, 7))) for _ in range(_WORDS)]
    followers = [chain.choices(range(_WORDS), k=_FOLLOWERS) for _ in range(_WORDS)]
    for number in range(count):
        draw = random.Random(f"{seed} {number}")
        place = draw.randrange(_WORDS)
        picked = []
        for _ in range(words):
            picked.append(vocabulary[place])
            place = draw.choice(followers[place])
        yield " ".join(picked)
