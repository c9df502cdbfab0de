"""How many tokens a tokenizer has, read off its ``tokenizer.json`` without the library that runs it."""

from __future__ import annotations

import json
from pathlib import Path

from primus.errors import InputError

__all__ = ["tokens"]


def tokens(folder: Path) -> int | None:
    """The largest token id + 1 of the tokenizer in ``folder``; None where it has no ``tokenizer.json``.

    InputError when the file is not a tokenizer's.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_bytes())
        vocabulary = content["model"]["vocab"]
        # Unigram models list their tokens, all others number them.
        largest = len(vocabulary) - 1 if isinstance(vocabulary, list) else max(vocabulary.values(), default=-1)
        added = max((token["id"] for token in content.get("added_tokens") or ()), default=-1)
        return int(max(largest, added)) + 1
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        hint = "tokenizers of the transformers library have it: model.vocab and added_tokens"
        raise InputError(f"not a tokenizer's file: {error!r}"[:200], where=str(file), hint=hint) from None
