"""What a backend does before its ranks start: it checks their data and weights, and writes their
files.

What it computes from a recipe alone is in ``primus_images.recipes.rules``. Nothing here needs
torch.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from primus_images.errors import InputError
from primus_images.files import read_sealed, require_readable, sha256_of, write_sealed
from primus_images.recipes.recipe import MOCK, Recipe
from primus_images.recipes.rules import rules_of
from primus_images.recipes.weights import HUB, config_of
from primus_images.terminal import counted
from primus_images.training.backends.finetune import backend as finetune
from primus_images.training.backends.flux import backend as flux
from primus_images.training.backends.torchtitan import render as torchtitan
from primus_images.training.run.job import Job
from primus_images.training.text import tokens
from primus_images.training.text.corpus import Corpus, corpus_of, files_of, held_out_corpus_of
from primus_images.training.text.mock import texts


def _check_text(recipe: Recipe) -> None:
    corpus = corpus_of(recipe)
    if corpus.tokenizer == MOCK and corpus.name != MOCK:
        raise InputError(
            "assets.tokenizer is mock, but the corpus is text",
            where=recipe.settings["assets.tokenizer"].origin,
            hint="set assets.tokenizer=FOLDER to tokenize the corpus, or assets.corpus=mock for "
            "synthetic tokens",
        )
    for each in (corpus, held_out_corpus_of(recipe)):
        if each and each.name != MOCK and not each.name.startswith(HUB):
            for file in files_of(each).paths:
                require_readable(file)


def _tokenize(job: Job, shared: Path | None, progress: Callable[[str], None]) -> None:
    recipe = job.recipe
    cache = job.output / "cache"
    corpus = corpus_of(job.recipe)
    if corpus.name == MOCK and not rules_of(recipe).divides_documents:
        return
    others = held_out_corpus_of(recipe)
    folder = None
    digests = [recipe.asset_digests[name] for name in ("corpus", "tokenizer")]
    if shared and not others and all(digests):
        settings = [
            recipe.backend,
            recipe.seq_len,
            recipe.find("eval.fraction", 0.0),
            asdict(corpus),
        ]
        key = hashlib.sha256(json.dumps([settings, *digests]).encode()).hexdigest()
        folder = shared / "tokens" / key[:32]
    if folder:
        lines = _copied(folder, cache)
    else:
        lines = {}
    if not lines:
        lines = _written(job, corpus, others, progress)
        if folder:
            with suppress(OSError):  # what cannot be stored is made again
                _store(folder, cache, lines)
    for name, line in lines.items():
        progress(line)
        _check_tokens(
            recipe,
            name,
            tokens.stored(cache, name),
            (others if others and name == "eval" else corpus).name,
        )


def _written(
    job: Job, corpus: Corpus, others: Corpus | None, progress: Callable[[str], None]
) -> dict[str, str]:
    """Write the tokens to the job's folder. Returns what was read, "train" and maybe "eval" → a
    line.
    """
    recipe = job.recipe
    cache = job.output / "cache"
    made = None
    if corpus.name == MOCK:
        made = texts(max(0, recipe.seed))
    reader = tokens.Reader(corpus, made)
    if reader.masked and rules_of(recipe).divides_documents:
        raise InputError(
            f"{recipe.backend} trains every token of a corpus, not only answers",
            where=corpus.name,
            hint="--backend finetune trains answers only; data.train_on=all trains every token",
        )
    tokens.write(reader, cache, held_out=recipe.find("eval.fraction", 0.0), progress=progress)
    readers = {"train": reader}
    if others:
        readers["eval"] = tokens.Reader(others)
        tokens.write(readers["eval"], cache, name="eval", progress=progress)
    elif "eval.fraction" in recipe.settings:
        readers["eval"] = reader
    lines = {}
    for name, reader in readers.items():
        figures = tokens.figures_of(tokens.stored(cache, name), recipe.seq_len, reader.encoder)
        lines[name] = reader.sentence(
            figures, recipe.seq_len, "held out for evaluation: " if name == "eval" else ""
        )
    if "eval" in readers and (
        repeated := tokens.stored(cache, "eval").repeated(tokens.stored(cache))
    ):
        lines["eval"] += f"; {repeated:,} of them in the training text, too"
    return lines


def _link(source: Path, target: Path) -> None:
    waiting = target.with_name(f".{target.name}.{os.urandom(6).hex()}")
    try:
        waiting.hardlink_to(source)
    except OSError:  # another file system
        shutil.copyfile(source, waiting)
    waiting.replace(target)


def _store(folder: Path, cache: Path, lines: Mapping[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    files = {file.name: sha256_of(file) for name in lines for file in cache.glob(f"{name}.*")}
    for name in files:
        _link(cache / name, folder / name)
    write_sealed(folder / "entry.json", {"lines": lines, "files": files})


def _copied(folder: Path, cache: Path) -> dict[str, str]:
    """Link stored tokens into the job's folder, and return their lines; none if they are not there,
    or damaged.
    """
    entry = read_sealed(folder / "entry.json") or {"lines": {}, "files": {}}
    try:
        if any(sha256_of(folder / name) != sha256 for name, sha256 in entry["files"].items()):
            return {}
        for name in entry["files"]:
            _link(folder / name, cache / name)
    except (OSError, InputError):
        return {}
    return dict(entry["lines"])


def _check_tokens(recipe: Recipe, name: str, written: tokens.Tokens, where: str) -> None:
    vocabulary = recipe.architecture.vocab_size
    ranks = recipe.data_parallel
    length = recipe.seq_len
    largest = int(written.tokens.max())
    if largest >= vocabulary:
        raise InputError(
            f"the tokenizer produces token {largest}, but the model's vocabulary has "
            f"{vocabulary} tokens",
            where=where,
            hint="name the tokenizer of the model",
        )
    if rules_of(recipe).divides_documents:
        few = len(written.ends)
        if few < ranks:
            documents = counted(few, "document")
            raise InputError(
                f"the corpus has {documents}, and each of the {ranks} data-parallel ranks needs "
                "one",
                where=where,
                hint=f"add documents, or train on fewer ranks (--ranks {few})",
            )
    elif (
        name == "eval"
        or written.mask is not None
        or recipe.find(f"{recipe.backend}.packing", False)
    ):
        if not len(written.pieces(length)[0]):
            raise InputError(
                "no document has an answer within seq_len tokens",
                where=where,
                hint="see `primus data`; raise seq_len",
            )
    elif len(written.tokens) <= length:
        raise InputError(
            f"the corpus has {len(written.tokens)} tokens, fewer than one sample of {length} + 1",
            where=where,
            hint="add text, or lower seq_len",
        )


def _check_initial(recipe: Recipe) -> None:
    """Check the weights that torchtitan or Megatron start from. Unlike transformers, these have one
    activation.
    """
    folder = finetune.source_of(recipe.find(f"{recipe.backend}.weights", "random"), offline=False)
    if recipe.find(torchtitan.INITIAL, False):
        folder = recipe.asset("tokenizer")
    if folder is None:
        return
    finetune.check(folder, recipe.architecture)
    file, config = config_of(folder)
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise InputError(
            f"{recipe.backend} computes SiLU, and hidden_act of the weights is {activation}",
            where=f"{file}: hidden_act",
            hint="--backend finetune computes it",
        )


@dataclass(frozen=True, kw_only=True)
class Backend:
    """The start of one backend's runs. The defaults are those of our own loop on text.

    The checks raise InputError if the data or weights are missing, damaged, or not the recipe's.
    ``tokenize`` writes the tokens for the ranks to the job's ``cache``, and takes and keeps them in
    a folder that runs share. ``files`` returns name → text of the files that the ranks read besides
    ``job.json``.
    """

    check_data: Callable[[Recipe], None] = _check_text
    tokenize: Callable[[Job, Path | None, Callable[[str], None]], None] = _tokenize
    check_weights: Callable[[Recipe], None] = lambda _: None
    files: Callable[[Job], Mapping[str, str]] = lambda _: {}


BACKENDS: Mapping[str, Backend] = {
    "torchtitan": Backend(
        check_weights=_check_initial, files=lambda job: {torchtitan.FILE: torchtitan.toml(job)}
    ),
    "megatron": Backend(check_weights=_check_initial),
    "finetune": Backend(check_weights=finetune.check_weights),
    "flux": Backend(
        check_data=flux.check_data,
        tokenize=lambda _job, _shared, _progress: None,
        check_weights=flux.check_weights,
    ),
    "fsdp": Backend(),
}


def backend_of(recipe: Recipe) -> Backend:
    """Return the recipe's backend."""
    return BACKENDS[recipe.backend]
