"""What a backend does before its ranks start: it checks their data and weights, and writes their files.

What it computes from a recipe alone is in ``primus.recipes.rules``. Nothing here needs torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from primus.errors import InputError
from primus.recipes.recipe import MOCK, Recipe
from primus.recipes.rules import rules_of
from primus.terminal import counted
from primus.training import tokens
from primus.training.corpus import HUB, corpus_of, files_of
from primus.training.finetune import backend as finetune
from primus.training.flux import backend as flux
from primus.training.job import Job
from primus.training.mock import TEXTS, texts
from primus.training.torchtitan import render as torchtitan


def _check_text(recipe: Recipe) -> None:
    corpus = corpus_of(recipe)
    if corpus.tokenizer == MOCK and corpus.name != MOCK:
        raise InputError(
            "assets.tokenizer is mock, but the corpus is text", where=recipe.settings["assets.tokenizer"].origin,
            hint="set assets.tokenizer=FOLDER to tokenize the corpus, or assets.corpus=mock for synthetic tokens",
        )  # fmt: skip
    if recipe.asset("corpus"):
        files_of(corpus)


def _tokenize(job: Job, progress: Callable[[str], None]) -> None:
    recipe = job.recipe
    corpus, rules = corpus_of(recipe), rules_of(recipe)
    if corpus.name == MOCK and not rules.divides_documents:
        return
    if not corpus.name.startswith(HUB) and not corpus.tokenizer.startswith(HUB):
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    made = texts(max(0, recipe.seed), TEXTS) if corpus.name == MOCK else None
    reader = tokens.Reader(corpus, made)
    tokens.write(reader, job.output / "cache", progress=progress)
    written = tokens.stored(job.output / "cache")
    progress(reader.sentence(written))
    for objection, hint in _objections(recipe, reader, written):
        raise InputError(objection, where=corpus.name, hint=hint)


def _objections(recipe: Recipe, reader: tokens.Reader, written: tokens.Tokens) -> Iterator[tuple[str, str]]:
    vocabulary, rules, ranks = recipe.architecture.vocab_size, rules_of(recipe), recipe.data_parallel
    if reader.masked and rules.divides_documents:
        yield (
            f"{recipe.backend} trains every token of a corpus, not only answers",
            "--backend finetune trains answers only; data.train_on=all trains every token",
        )
    if (largest := int(written.tokens.max())) >= vocabulary:
        yield (
            f"the tokenizer produces token {largest}, but the model's vocabulary has {vocabulary} tokens",
            "name the tokenizer of the model",
        )
    if rules.divides_documents:
        if (few := len(written.ends)) < ranks:
            yield (
                f"the corpus has {counted(few, 'document')}, and each of the {ranks} data-parallel ranks needs one",
                f"add documents, or train on fewer ranks (--ranks {few})",
            )
    elif reader.masked:
        if not len(tokens.trained_documents(written, recipe.seq_len)):
            yield "no document has an answer within seq_len tokens", "see `primus data`; raise seq_len"
    elif len(written.tokens) <= recipe.seq_len:
        yield (
            f"the corpus has {len(written.tokens)} tokens, fewer than one sample of {recipe.seq_len} + 1",
            "add text, or lower seq_len",
        )


@dataclass(frozen=True, kw_only=True)
class Backend:
    """The start of one backend's runs. The defaults are those of our own loop on text.

    ``check_data`` raises InputError if the corpus is missing, or not clear. ``tokenize`` writes its tokens for the
    ranks to the job's ``cache``, and raises InputError, with file and line, if a document cannot be read.
    ``check_weights`` raises InputError if the initial weights are missing, damaged or of another model. ``files``
    returns name → text of the files that the ranks read besides ``job.json``, and ``arguments`` each rank's
    command-line arguments.
    """

    check_data: Callable[[Recipe], None] = _check_text
    tokenize: Callable[[Job, Callable[[str], None]], None] = _tokenize
    check_weights: Callable[[Recipe], None] = lambda _: None
    files: Callable[[Job], Mapping[str, str]] = lambda _: {}
    arguments: Callable[[Job], list[str]] = lambda job: [str(job.output)]


BACKENDS: Mapping[str, Backend] = {
    "torchtitan": Backend(files=torchtitan.files, arguments=torchtitan.arguments),
    "megatron": Backend(),
    "finetune": Backend(check_weights=finetune.check_weights),
    "flux": Backend(
        check_data=flux.check_data, tokenize=lambda _job, _progress: None, check_weights=flux.check_weights
    ),
    "fsdp": Backend(),
}


def backend_of(recipe: Recipe) -> Backend:
    """Return the recipe's backend."""
    return BACKENDS[recipe.backend]
