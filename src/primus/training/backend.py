"""What a backend does before its ranks start: it checks their data and weights, and writes their files.

What it computes from a recipe alone is in ``primus.recipes.rules``. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from primus.errors import InputError
from primus.recipes.recipe import MOCK, Recipe
from primus.recipes.rules import rules_of
from primus.training import corpus
from primus.training.finetune import backend as finetune
from primus.training.flux import backend as flux
from primus.training.job import Job
from primus.training.torchtitan import render as torchtitan


def _check_text(recipe: Recipe) -> None:
    path, tokenizer = recipe.asset("corpus"), recipe.asset("tokenizer")
    where = recipe.settings["assets.tokenizer"].origin
    if recipe.get("assets.tokenizer", str) == MOCK and recipe.get("assets.corpus", str) != MOCK:
        raise InputError(
            "assets.tokenizer is mock, but the corpus is text", where=where,
            hint="set assets.tokenizer=FOLDER to tokenize the corpus, or assets.corpus=mock for synthetic tokens",
        )  # fmt: skip
    if tokenizer is not None and not (tokenizer / "tokenizer.json").is_file():
        raise InputError(
            f"{tokenizer} has no tokenizer.json", where=where,
            hint="set assets.tokenizer to a folder that contains tokenizer.json",
        )  # fmt: skip
    if path is not None:
        column = recipe.find("data.column", "") or None
        texts = corpus.Corpus(path=path, column=column, tokenizer=tokenizer)
        corpus.check(texts, ranks=recipe.data_parallel if rules_of(recipe).divides_documents else 1)


@dataclass(frozen=True, kw_only=True)
class Backend:
    """The start of one backend's runs. The defaults are those of our own loop on text.

    ``check_data`` reads a sample of the corpus, and raises InputError, with file and line, if the ranks could not read
    it. ``check_weights`` raises InputError if the initial weights are missing, damaged or of another model. ``files``
    returns name → text of the files that the ranks read besides ``job.json``, and ``arguments`` each rank's
    command-line arguments.
    """

    check_data: Callable[[Recipe], None] = _check_text
    check_weights: Callable[[Recipe], None] = lambda _: None
    files: Callable[[Job], Mapping[str, str]] = lambda _: {}
    arguments: Callable[[Job], list[str]] = lambda job: [str(job.output)]


BACKENDS: Mapping[str, Backend] = {
    "torchtitan": Backend(files=torchtitan.files, arguments=torchtitan.arguments),
    "megatron": Backend(),
    "finetune": Backend(check_weights=finetune.check_weights),
    "flux": Backend(check_data=flux.check_data, check_weights=flux.check_weights),
    "fsdp": Backend(),
}


def backend_of(recipe: Recipe) -> Backend:
    """Return the recipe's backend."""
    return BACKENDS[recipe.backend]
