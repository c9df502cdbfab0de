"""Verbs about your own data: fine-tune a model on it, report what would be trained, and export the
result.
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from primus_images.cli.image import train
from primus_images.cli.image.request import LocalRecipeOptions, Request, fine_tuning, names_weights
from primus_images.cli.verb import Options, answer, note
from primus_images.errors import HostError, InputError
from primus_images.gpus.detect import detect
from primus_images.recipes.recipe import MOCK
from primus_images.terminal import Screen, harmless
from primus_images.training.backends.protocol import backend_of
from primus_images.training.text import encoder, tokens
from primus_images.training.text.corpus import Corpus, corpus_of, parts_of
from primus_images.turbo.optimizations import importable

# Documents that are shown, and tokens of each.
_SAMPLES = 5
_SAMPLE_TOKENS = 2000
# Rows that are named of those that are left out; --json has all.
_SKIPPED = 20

# A part of a document, and whether it is trained.
Part = tuple[str, bool]


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(train.RunOptions):
    """The options of ``finetune``."""

    weights: str
    data: str


@dataclass(frozen=True, kw_only=True)
class ExportOptions(Options):
    """The options of ``export``."""

    checkpoint: Path
    folder: Path
    dtype: str | None
    tokenizer: Path | None


def finetune(options: FinetuneOptions) -> int:
    """Fine-tune a model on your data: the weights' folder decides the model, the tokenizer and the
    template.
    """
    request = options.request_of("")
    return train.run(tuning_on(request, options.weights, options.data, options), options)


def tuning_on(request: Request, weights: str, data: str, options: Options) -> Request:
    """Return the request for the recipe that fine-tunes ``weights`` on ``data``, and print it."""
    request = fine_tuning(request.with_words(f"corpus={data}"), weights, to_train=True)
    choices = request.choices
    same = shlex.join(["primus", "train", request.recipe, *choices.words(), *request.words])
    note(
        options,
        f"primus: the recipe is {request.recipe}, mode {choices.mode}; the same run: {same}",
    )
    return request


def data(options: LocalRecipeOptions) -> int:
    """Report a corpus as a run would train it: documents, tokens, what is cut, and some documents
    with their mask.
    """
    gpu_is_known = options.gpu or options.proxy or detect().names
    if not gpu_is_known and not names_weights(options.recipe):
        options = replace(options, gpu="mi300x")  # what is read depends on no GPU
    recipe = options.request.resolved()
    corpus = corpus_of(recipe)
    if corpus.name == MOCK or recipe.architecture.family == "flux":
        raise InputError(
            "there is no text to report", hint="corpus=FILE names a file, a folder or hf:OWNER/NAME"
        )
    backend_of(recipe).check_data(recipe)
    encoder.without_torch()
    screen = Screen.of()
    documents = []
    lines: list[str] = []
    for part, weight in parts_of(corpus):
        document, more = _reported(part, recipe.seq_len, screen)
        if part.name != corpus.name:
            document = {"weight": weight, **document}
            lines.append(f"\nweight {weight:g}:")
        documents.append(document)
        lines += more
    if len(documents) == 1:
        return answer(options, documents[0], lines)
    return answer(options, {"corpus": corpus.name, "parts": documents}, lines)


def _reported(corpus: Corpus, seq_len: int, screen: Screen) -> tuple[dict[str, object], list[str]]:
    """Return the report of one corpus, for JSON and as lines."""
    reader = tokens.Reader(corpus)
    with TemporaryDirectory() as name:
        folder = Path(name)
        tokens.write(reader, folder, progress=_print_progress)
        written = tokens.stored(folder)
        figures = tokens.figures_of(written, seq_len, reader.encoder)
        samples = _samples(reader, written, figures["documents"])
    document = {
        "corpus": corpus.name,
        "tokenizer": corpus.tokenizer,
        "seq_len": seq_len,
        "columns": reader.layout.columns,
        "unused_columns": reader.layout.unused,
        "split": reader.files.split,
        "files_not_read": reader.files.others,
        "bos": reader.encoder.begin,
        "eos": reader.encoder.end,
        **figures,
        "skipped": [{"where": row.where, "why": row.message} for row in reader.skipped],
        "samples": [[_part_document(part) for part in parts] for parts in samples],
    }
    lines = list(screen.wrap(reader.sentence(figures, seq_len)))
    for row in reader.skipped[:_SKIPPED]:
        lines += screen.wrap(f"left out: {row.where}: {row.message}")
    lines += [_marked(parts, screen) for parts in samples]
    return document, lines


def _print_progress(line: str) -> None:
    print(f"primus: {line}", file=sys.stderr)


def _samples(reader: tokens.Reader, written: tokens.Tokens, documents: int) -> list[list[Part]]:
    """Return the parts of a few documents, evenly spread over the corpus."""
    samples = []
    count = min(_SAMPLES, documents)
    for number in range(count):
        place = written.document(number * documents // count)
        shown = written.tokens[place][:_SAMPLE_TOKENS].tolist()
        mask = [1] * len(shown)
        if written.mask is not None:
            mask = written.mask[place].tolist()
        samples.append(reader.encoder.parts(shown, mask))
    return samples


def _part_document(part: Part) -> dict[str, object]:
    text, trained = part
    return {"text": text, "trained": trained}


def _marked(parts: Sequence[Part], screen: Screen) -> str:
    """Return a document whose trained parts are green or, without colour, between ⟦ and ⟧."""
    all_trained = all(trained for _, trained in parts)
    words = ["\n"]
    for text, trained in parts:
        shown = harmless(text, colors=False)
        if trained:
            shown = screen.paint(shown, "green")
            if not screen.colour and not all_trained:
                shown = f"⟦{shown}⟧"
        words.append(shown)
    return "".join(words)


def export(options: ExportOptions) -> int:
    """Write the weights of a checkpoint as a model folder, which transformers and inference engines
    load.
    """
    if options.folder.is_dir() and any(options.folder.iterdir()):
        raise InputError(f"{options.folder} is not empty", hint="name a new folder")
    if options.tokenizer and not options.tokenizer.is_dir():
        raise InputError(
            f"--tokenizer {options.tokenizer} is not a folder",
            hint="leave it out for that of the run",
        )
    checkpoint = train.newest_checkpoint(options.checkpoint)
    for package in ("torch", "transformers"):
        if not importable(package):
            raise HostError(
                f"{package} is not installed", hint="run `primus export` in a container of an image"
            )
    # Seam "torch": no other verb of this module needs it in this process.
    from primus_images.training.backends.export import write_model

    missing = write_model(checkpoint, options.folder, options.dtype, options.tokenizer)
    document = {"checkpoint": str(checkpoint), "folder": str(options.folder), "missing": missing}
    lines = [f"{checkpoint.name} → {options.folder} for transformers"]
    lines += [f"– {text}" for text in missing]
    return answer(options, document, lines)
