"""The number of tokens of a tokenizer, read from its ``tokenizer.json`` without the tokenizers library."""

from __future__ import annotations

import json
from pathlib import Path

from primus.errors import InputError


def tokens(folder: Path) -> int | None:
    """Return the largest token id + 1 of the tokenizer in ``folder``, or None if it has no ``tokenizer.json``.

    Raises InputError if the file is not that of a tokenizer.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_bytes())
        vocabulary = content["model"]["vocab"]
        # Unigram models have a list of tokens; all others map tokens to ids.
        largest = len(vocabulary) - 1 if isinstance(vocabulary, list) else max(vocabulary.values(), default=-1)
        added = max((token["id"] for token in content.get("added_tokens") or ()), default=-1)
        return int(max(largest, added)) + 1
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        hint = "tokenizers of the transformers library have it: model.vocab and added_tokens"
        raise InputError(f"not a tokenizer file: {error!r}"[:200], where=str(file), hint=hint) from None
