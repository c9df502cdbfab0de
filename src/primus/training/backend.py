"""What a backend does before its ranks start: it checks their data and weights, and writes their files.

What it computes from a recipe alone is in ``primus.recipes.rules``. Nothing here needs torch.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from primus.errors import InputError
from primus.recipes.recipe import MOCK, Recipe
from primus.recipes.rules import rules_of
from primus.recipes.weights import HUB, config_of
from primus.terminal import counted
from primus.training import tokens
from primus.training.corpus import corpus_of, files_of, held_out_corpus_of
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
    for each in (corpus, held_out_corpus_of(recipe)):
        if each and each.name != MOCK and not each.name.startswith(HUB):
            files_of(each)


def _tokenize(job: Job, progress: Callable[[str], None]) -> None:
    recipe, cache = job.recipe, job.output / "cache"
    corpus, rules = corpus_of(recipe), rules_of(recipe)
    if corpus.name == MOCK and not rules.divides_documents:
        return
    made = texts(max(0, recipe.seed), TEXTS) if corpus.name == MOCK else None
    reader = tokens.Reader(corpus, made)
    if reader.masked and rules.divides_documents:
        raise InputError(
            f"{recipe.backend} trains every token of a corpus, not only answers", where=corpus.name,
            hint="--backend finetune trains answers only; data.train_on=all trains every token",
        )  # fmt: skip
    tokens.write(reader, cache, held_out=recipe.find("eval.fraction", 0.0), progress=progress)
    readers = {"train": reader}
    if others := held_out_corpus_of(recipe):
        readers["eval"] = tokens.Reader(others)
        tokens.write(readers["eval"], cache, name="eval", progress=progress)
    elif "eval.fraction" in recipe.settings:
        readers["eval"] = reader
    for name, reader in readers.items():
        written = tokens.stored(cache, name)
        figures = tokens.figures_of(written, recipe.seq_len, reader.encoder)
        progress(reader.sentence(figures, recipe.seq_len, "held out for evaluation: " if name == "eval" else ""))
        for objection, hint in _objections(recipe, name, written):
            raise InputError(objection, where=reader.corpus.name, hint=hint)


def _objections(recipe: Recipe, name: str, written: tokens.Tokens) -> Iterator[tuple[str, str]]:
    vocabulary, ranks = recipe.architecture.vocab_size, recipe.data_parallel
    if (largest := int(written.tokens.max())) >= vocabulary:
        yield (
            f"the tokenizer produces token {largest}, but the model's vocabulary has {vocabulary} tokens",
            "name the tokenizer of the model",
        )
    if rules_of(recipe).divides_documents:
        if (few := len(written.ends)) < ranks:
            yield (
                f"the corpus has {counted(few, 'document')}, and each of the {ranks} data-parallel ranks needs one",
                f"add documents, or train on fewer ranks (--ranks {few})",
            )
    elif name == "eval" or written.mask is not None or recipe.find(f"{recipe.backend}.packing", False):
        if not len(written.pieces(recipe.seq_len)[0]):
            yield "no document has an answer within seq_len tokens", "see `primus data`; raise seq_len"
    elif len(written.tokens) <= recipe.seq_len:
        yield (
            f"the corpus has {len(written.tokens)} tokens, fewer than one sample of {recipe.seq_len} + 1",
            "add text, or lower seq_len",
        )


def _check_initial(recipe: Recipe) -> None:
    """Check the weights that torchtitan or Megatron start from. Unlike transformers, these have one activation."""
    folder = finetune.source_of(recipe.find(f"{recipe.backend}.weights", "random"), offline=False)
    if recipe.find(torchtitan.INITIAL, False):
        folder = recipe.asset("tokenizer")
    if folder is None:
        return
    finetune.check(folder, recipe.architecture)
    file, config = config_of(folder)
    if (activation := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        why = f"{recipe.backend} computes SiLU, and hidden_act of the weights is {activation}"
        raise InputError(why, where=f"{file}: hidden_act", hint="--backend finetune computes it")


@dataclass(frozen=True, kw_only=True)
class Backend:
    """The start of one backend's runs. The defaults are those of our own loop on text.

    The checks raise InputError if the data or weights are missing, damaged, or not the recipe's. ``tokenize`` writes
    the tokens for the ranks to the job's ``cache``. ``files`` returns name → text of the files that the ranks read
    besides ``job.json``, and ``arguments`` each rank's command-line arguments.
    """

    check_data: Callable[[Recipe], None] = _check_text
    tokenize: Callable[[Job, Callable[[str], None]], None] = _tokenize
    check_weights: Callable[[Recipe], None] = lambda _: None
    files: Callable[[Job], Mapping[str, str]] = lambda _: {}
    arguments: Callable[[Job], list[str]] = lambda job: [str(job.output)]


BACKENDS: Mapping[str, Backend] = {
    "torchtitan": Backend(
        check_weights=_check_initial,
        files=lambda job: {torchtitan.FILE: torchtitan.toml(job)},
        arguments=lambda job: ["--job.config_file", str(job.output / torchtitan.FILE)],
    ),
    "megatron": Backend(check_weights=_check_initial),
    "finetune": Backend(check_weights=finetune.check_weights),
    "flux": Backend(
        check_data=flux.check_data, tokenize=lambda _job, _progress: None, check_weights=flux.check_weights
    ),
    "fsdp": Backend(),
}


def backend_of(recipe: Recipe) -> Backend:
    """Return the recipe's backend."""
    return BACKENDS[recipe.backend]
