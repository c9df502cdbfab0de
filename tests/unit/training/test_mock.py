"""Made-up text: the same for a seed, and as predictable as is said."""

import hashlib
from itertools import islice, pairwise

from primus_images.training.text import mock


def test_words_have_few_successors_and_a_seed_has_its_texts() -> None:
    found = [text.split() for text in islice(mock.texts(1), 40)]
    assert {len(text) for text in found} == {400}
    after: dict[str, set[str]] = {}
    for text in found:
        for word, successor in pairwise(text):
            after.setdefault(word, set()).add(successor)
    # Two words may be spelled alike, and then have the successors of both.
    usual = sorted(map(len, after.values()))[len(after) // 2]
    assert usual == 4
    words = {word for text in found for word in text}
    assert {len(word) for word in words} <= set(range(2, 8))
    assert next(mock.texts(1)) == " ".join(found[0])
    assert next(mock.texts(2)) != " ".join(found[0])


def test_the_texts_of_a_seed_are_as_ever() -> None:
    """Golden curves were trained on them."""
    first = "\n".join(islice(mock.texts(7), 5))
    assert hashlib.sha256(first.encode()).hexdigest() == (
        "d1914daa2bb6fda12c19ef7a9f5bb3b7cb9dbf7492493f132841feb46eae6514"
    )
