"""The files that a recipe names: its corpus, its tokenizer and the weights to start from."""

import json
import re
from collections.abc import Iterator
from os.path import isdir, isfile
from pathlib import Path

from primus_images.errors import InputError
from primus_images.files import refuse_pointer
from primus_images.recipes.faults import Fault
from primus_images.recipes.indexed import is_index, tokens_of
from primus_images.recipes.recipe import Recipe

# A path, or a data set or model on the hub; no address of another kind.
_NAME = re.compile(r"(?!hf:|\w+://).*|hf:[\w.-]+(/[\w.-]+)?")
# What a file that is no tokenizer makes the reader of one raise.
_DAMAGES = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


def file_faults(recipe: Recipe, *, here: bool) -> Iterator[Fault]:
    """Yield the files that are not there; those at absolute paths only if the run is ``here``."""
    yield from _template_faults(recipe)
    for key, setting in recipe.settings.items():
        elsewhere = not here and str(setting.value).startswith("/")
        if not elsewhere and (key.startswith("assets.") or key == "eval.corpus"):
            yield from _asset_faults(recipe, key)
    key = f"{recipe.backend}.weights"
    weights = recipe.find(key, "random")
    if weights == "random" or weights.startswith("hf:") or isdir(weights):
        return
    if here or not weights.startswith("/"):
        remedy = "name a folder of safetensors files, hf:OWNER/NAME or random"
        yield key, f"there is no folder {weights!r}", remedy


def _asset_faults(recipe: Recipe, key: str) -> Iterator[Fault]:
    name = recipe.get(key, str)
    if not _NAME.fullmatch(name):
        remedy = "as in hf:OWNER/NAME; download what is elsewhere, and name the file"
        yield key, f"{name} names no file, and no data set or model on the hub", remedy
    asset = recipe.asset(key)
    if asset is None or isdir(asset):
        return
    if key == "assets.tokenizer":
        kind = "a folder"
    elif is_index(asset) and not isfile(tokens_of(asset)):
        yield key, f"{asset} has no {tokens_of(asset).name} beside it", "copy both files"
        return
    elif isfile(asset):
        return
    else:
        kind = "a file or a folder"
    remedy = f"name {kind}, hf:OWNER/NAME or mock"
    if "*" in name:
        remedy = "name the folder: all of its files are read"
    yield key, f"{asset} is not {kind}", remedy


def _template_faults(recipe: Recipe) -> Iterator[Fault]:
    """Yield a chat template that is no file."""
    key = "assets.chat_template"
    if key in recipe.settings:
        asset = recipe.asset(key)
        if asset is None or not isfile(asset):
            name = asset or recipe.get(key, str)
            yield key, f"{name} is not a file", "name a file with the Jinja text of a template"


def vocabulary_faults(recipe: Recipe) -> Iterator[Fault]:
    """Yield the model's vocabulary, if it is smaller than the tokenizer's.

    Beside weights, tokens that were added to it may be more, such as Gemma 3's for images: what a
    corpus has of them is refused when it is tokenized.
    """
    tokenizer = recipe.asset("tokenizer")
    rows = recipe.architecture.vocab_size
    if tokenizer is None or rows < 1:
        return
    tokens = vocabulary(tokenizer)
    if recipe.weights:
        tokens = vocabulary(tokenizer, added=False)
    if tokens > rows:
        why = f"{rows} is less than the {tokens} tokens of {tokenizer}"
        remedy = f"model.vocab_size={tokens} or more"
        if recipe.weights:
            remedy = (
                f"resize the weights in transformers by model.resize_token_embeddings({tokens}), "
                "and save them"
            )
        remedy += ", or another assets.tokenizer"
        yield "model.vocab_size", why, remedy


def vocabulary(folder: Path, *, added: bool = True) -> int:
    """Return the largest token id + 1 of ``tokenizer.json`` in ``folder``; 0 without the file.

    Without ``added``, tokens that were added to its model do not count. Raises InputError if the
    file is not that of a tokenizer.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        return 0
    try:
        refuse_pointer(file)
        content = json.loads(file.read_bytes())
        words = content["model"]["vocab"]
        if isinstance(words, list):
            # Unigram models have a list of tokens; all others map tokens to ids.
            ids = [len(words) - 1]
        else:
            ids = list(words.values())
        if added:
            ids += [token["id"] for token in content.get("added_tokens") or ()]
        return int(max(ids, default=-1)) + 1
    except _DAMAGES as error:
        reason = f"{type(error).__name__}: {error}"[:178]
        raise InputError(
            f"not a tokenizer file: {reason}",
            where=file,
            hint="tokenizers of the transformers library have it: model.vocab and added_tokens",
        ) from None
