"""Made text from a seed, for measurements: learnable, and equal on every machine."""

import random
from collections.abc import Iterator

_TEXTS = 2000
_LENGTH = 400
_WORDS = 500
_FOLLOWERS = 4
_LETTERS = "etaoinshrdlu"


def texts(seed: int) -> Iterator[str]:
    """Yield the 2,000 texts of ``seed``, of 400 words each.

    Every word has a few possible successors (an order-1 Markov chain), so a model's loss falls
    towards the chain's entropy of ln 4 ≈ 1.39 per word, and a run that does not learn is noticed.
    """
    chain = random.Random(seed)
    vocabulary = ["".join(chain.choices(_LETTERS, k=chain.randint(2, 7))) for _ in range(_WORDS)]
    followers = [chain.choices(range(_WORDS), k=_FOLLOWERS) for _ in range(_WORDS)]
    for number in range(_TEXTS):
        draw = random.Random(f"{seed} {number}")
        place = draw.randrange(_WORDS)
        picked = []
        for _ in range(_LENGTH):
            picked.append(vocabulary[place])
            place = draw.choice(followers[place])
        yield " ".join(picked)
