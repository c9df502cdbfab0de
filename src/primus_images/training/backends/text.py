"""The text of a run: the check of its corpora, and the tokens that its ranks read."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path

from primus_images.errors import InputError
from primus_images.files import (
    read_sealed,
    require_readable,
    text_if_readable,
    write_file,
    write_sealed,
)
from primus_images.recipes.recipe import MOCK, Recipe
from primus_images.recipes.rules import rules_of
from primus_images.recipes.weights import HUB
from primus_images.training.run.job import Job
from primus_images.training.text import encoder, tokens
from primus_images.training.text.corpus import (
    Corpus,
    corpus_of,
    files_of,
    held_out_corpus_of,
    labels_of,
    parts_of,
)

Progress = Callable[[str], None]


def check(recipe: Recipe) -> None:
    """Raise InputError if a corpus is missing, or has no tokenizer."""
    corpus = corpus_of(recipe)
    if corpus.tokenizer == MOCK and corpus.name != MOCK:
        raise InputError(
            "assets.tokenizer is mock, but the corpus is text",
            where=recipe.settings["assets.tokenizer"].origin,
            hint="set assets.tokenizer=FOLDER to tokenize the corpus, or assets.corpus=mock for "
            "synthetic tokens",
        )
    if corpus.template:
        encoder.template_of(corpus.template)
    for it in (corpus, held_out_corpus_of(recipe)):
        for part, _ in parts_of(it) if it else ():
            if part.name != MOCK and not part.name.startswith(HUB):
                for file in files_of(part).paths:
                    require_readable(file)


def tokenize(job: Job, shared: Path | None, progress: Progress) -> None:
    """Write the tokens of the job's corpora to its folder ``cache``.

    They are taken from the folder ``shared``, and kept there, if there is one.
    """
    recipe = job.recipe
    corpus = corpus_of(recipe)
    held_out = held_out_corpus_of(recipe)
    if corpus.name == MOCK:
        return
    cache = job.output / "cache"
    entry = None
    if shared and not held_out:
        entry = _entry_of(recipe, corpus, shared)
    lines: dict[str, str] = {}
    if entry:
        lines = _linked(entry, cache)
    made = not lines
    if made:
        lines = _written(recipe, corpus, held_out, cache, progress)
    if _name_skipped(cache, job.output / tokens.SKIPPED):
        progress(f"rows that are left out: {job.output / tokens.SKIPPED}")
    for name, line in lines.items():
        progress(line)
        source = corpus.name
        if held_out and name == "eval":
            source = held_out.name
        written = tokens.stored(cache, name)
        if made:
            _check_tokens(recipe, name, written, source)
    if made and entry:
        with suppress(OSError):  # what cannot be stored is made again
            _store(entry, cache, lines)


def _name_skipped(cache: Path, file: Path) -> bool:
    """Write the rows that were left out to one ``file`` of the run, and return whether any were."""
    rows = []
    for name in ("train", "eval"):
        rows.append(text_if_readable(cache / f"{name}.{tokens.SKIPPED}"))
    if not any(rows):
        return False
    write_file(file, "".join(rows))
    return True


def _entry_of(recipe: Recipe, corpus: Corpus, shared: Path) -> Path | None:
    """Return the folder of these tokens; None if the contents of the files are unknown.

    Tokens there were checked for this model and length.
    """
    digests = [recipe.asset_digests[name] for name in ("corpus", "tokenizer")]
    if not all(digests):
        return None
    fraction = recipe.find("eval.fraction", 0.0)
    settings = [
        recipe.backend,
        recipe.seq_len,
        recipe.architecture.vocab_size,
        recipe.find(f"{recipe.backend}.packing", False),
        fraction,
        asdict(corpus),
        _code(),
    ]
    if corpus.template:
        digests.append(recipe.asset_digests["chat_template"])
    key = json.dumps([settings, *digests], default=str)
    return shared / "tokens" / hashlib.sha256(key.encode()).hexdigest()[:32]


@cache
def _code() -> str:
    """Return the digest of the code that reads and tokenizes: another may make other tokens."""
    digest = hashlib.sha256()
    for source in sorted(Path(tokens.__file__).parent.iterdir()):
        if source.is_file():
            digest.update(source.read_bytes())
    return digest.hexdigest()


def _written(
    recipe: Recipe, corpus: Corpus, held_out: Corpus | None, cache: Path, progress: Progress
) -> dict[str, str]:
    """Write the tokens, and return lines about each kind: "train", and maybe "eval"."""
    lines = _write_parts(recipe, corpus, cache, progress)
    if held_out:
        lines |= _write_parts(recipe, held_out, cache, progress, name="eval")
    if "eval" in lines:
        repeated = tokens.stored(cache, "eval").repeated(tokens.stored(cache))
        if repeated:
            lines["eval"] += f"; {repeated:,} of them in the training text, too"
    return lines


def _write_parts(
    recipe: Recipe,
    corpus: Corpus,
    cache: Path,
    progress: Progress,
    name: str = "train",
) -> dict[str, str]:
    """Write the tokens of ``corpus`` under ``name``, and return lines about them.

    Of a corpus to train, those that ``eval.fraction`` asks for are held out.
    """
    parts = parts_of(corpus)
    fraction = 0.0
    if name == "train":
        fraction = recipe.find("eval.fraction", 0.0)
    train: dict[str, float] = {}
    held_out: dict[str, float] = {}
    lines: dict[str, list[str]] = {}
    for number, (part, weight) in enumerate(parts):
        reader = _reader(recipe, part)
        own = name
        own_held_out = "eval"
        prefix = ""
        if len(parts) > 1:
            own = f"{name}-{number}"
            own_held_out = f"eval-{number}"
            prefix = f"{weight:g} × "
        tokens.write(reader, cache, name=own, held_out=fraction, progress=progress)
        train[own] = weight
        if name == "eval":
            prefix = "held out for evaluation: "
        lines.setdefault(name, []).append(_line(recipe, reader, cache, own, prefix))
        if fraction:
            held_out[own_held_out] = 1.0
            line = _line(recipe, reader, cache, own_held_out, "held out for evaluation: ")
            lines.setdefault("eval", []).append(line)
    if len(parts) > 1:
        labels = labels_of(parts)
        if name == "eval":
            tokens.mix(cache, list(train.items()), name, labels)
        else:
            tokens.mix(cache, list(train.items()), name)
        if fraction:
            tokens.mix(cache, list(held_out.items()), "eval", labels)
    return {kind: "\n".join(several) for kind, several in lines.items()}


def _reader(recipe: Recipe, corpus: Corpus) -> tokens.Reader:
    reader = tokens.Reader(corpus)
    if reader.masked and rules_of(recipe).trains_every_token:
        raise InputError(
            f"{recipe.backend} trains every token of a corpus, not only answers",
            where=corpus.name,
            hint="--backend finetune trains answers only; data.train_on=all trains every token",
        )
    return reader


def _line(recipe: Recipe, reader: tokens.Reader, cache: Path, name: str, prefix: str = "") -> str:
    figures = tokens.figures_of(tokens.stored(cache, name), recipe.seq_len, reader.encoder)
    return reader.sentence(figures, recipe.seq_len, prefix)


def _link(source: Path, target: Path) -> None:
    waiting = target.with_name(f".{target.name}.{os.urandom(6).hex()}")
    try:
        try:
            waiting.hardlink_to(source)
        except OSError:  # another file system
            shutil.copyfile(source, waiting)
        waiting.replace(target)
    except OSError:
        waiting.unlink(missing_ok=True)
        raise


def _store(entry: Path, cache: Path, lines: Mapping[str, str]) -> None:
    entry.mkdir(parents=True, exist_ok=True)
    files = {}
    for name in lines:
        for file in cache.glob(f"{name}.*"):
            _link(file, entry / file.name)
            files[file.name] = _state(entry / file.name)
    write_sealed(entry / "entry.json", {"lines": lines, "files": files})


def _state(file: Path) -> list[int]:
    """Return what changes when somebody writes to a file, however large it is."""
    known = file.stat()
    return [known.st_size, known.st_mtime_ns]


def _linked(entry: Path, cache: Path) -> dict[str, str]:
    """Link stored tokens into the job's folder, and return their lines.

    There are none if the tokens are not there, or were written to since.
    """
    content = read_sealed(entry / "entry.json")
    if content is None:
        return {}
    try:
        for name, state in content["files"].items():
            if _state(entry / name) != state:
                return {}
        for name in content["files"]:
            _link(entry / name, cache / name)
    except (OSError, InputError):
        return {}
    return dict(content["lines"])


def _check_tokens(recipe: Recipe, name: str, written: tokens.Tokens, source: str) -> None:
    """Raise InputError if the model cannot be trained on the tokens ``written``."""
    vocabulary = recipe.architecture.vocab_size
    largest = max(int(block.tokens.max(initial=0)) for block in written.blocks())
    if largest >= vocabulary:
        hint = "name the tokenizer of the model"
        if recipe.weights:
            hint += (
                "; or for new tokens, resize the weights in transformers by "
                f"model.resize_token_embeddings({largest + 1}), and save them"
            )
        raise InputError(
            f"the tokenizer produces token {largest}, but the model's vocabulary has "
            f"{vocabulary} tokens",
            where=source,
            hint=hint,
        )
    length = recipe.seq_len
    packing = recipe.find(f"{recipe.backend}.packing", False)
    if name == "eval" or written.mask is not None or packing:
        firsts, _ = written.pieces(length)
        if written.mask is not None and not written.mask.any():
            raise InputError(
                "no token of the corpus is trained: every answer is empty, or its weight is 0",
                where=source,
                hint="see `primus data`",
            )
        if not len(firsts):
            raise InputError(
                "no document has an answer within seq_len tokens",
                where=source,
                hint="see `primus data`; raise seq_len",
            )
    elif len(written.tokens) <= length:
        raise InputError(
            f"the corpus has {len(written.tokens)} tokens, fewer than one sample of {length} + 1",
            where=source,
            hint="add text, or lower seq_len",
        )
