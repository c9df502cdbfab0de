"""Verbs about your own data: fine-tune a model without a recipe to pick, and report what would be
trained.
"""

import argparse
import re
import shlex
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from primus_images.cli.image.recipes import names_weights, of_name, of_weights
from primus_images.cli.image.train import newest_checkpoint, train
from primus_images.cli.verb import answer, note
from primus_images.errors import HostError, InputError
from primus_images.gpus.detect import detect
from primus_images.recipes.recipe import MOCK
from primus_images.terminal import Screen
from primus_images.training.backends.backend import backend_of
from primus_images.training.text import encoder, tokens
from primus_images.training.text.corpus import corpus_of
from primus_images.turbo.optimizations import importable

# Documents that are shown, and tokens of each.
_SAMPLES = 5
_SHOWN = 2000
_CONTROL = re.compile("[\0-\b\v-\x1f\x7f-\x9f]")


def finetune(options: argparse.Namespace) -> int:
    """Fine-tune a model on your data: the weights' folder decides the model, the tokenizer and the
    template.
    """
    tuned(options, options.weights, options.data)
    return train(options)


def tuned(options: argparse.Namespace, weights: str, data: str) -> None:
    """Let ``options`` name the recipe and the settings that fine-tune ``weights`` on ``data``."""
    options.overrides = [*options.overrides, f"corpus={data}"]
    recipe = of_weights(options, weights, save_weights="true")
    same = shlex.join(["primus", "train", recipe.name, *recipe.choices.words(), *options.overrides])
    note(options, f"primus: the recipe is {recipe.name}, mode {recipe.mode}; the same run: {same}")


def data(options: argparse.Namespace) -> int:
    """Report a corpus as a run would train it: documents, tokens, what is cut, and some documents
    with their mask.
    """
    if not (options.gpu or options.proxy or names_weights(options.recipe) or detect().names):
        options.gpu = "mi300x"  # what is read depends on no GPU
    recipe = of_name(options)
    if (corpus := corpus_of(recipe)).name == MOCK or recipe.architecture.family == "flux":
        raise InputError(
            "there is no text to report", hint="corpus=FILE names a file, a folder or hf:OWNER/NAME"
        )
    backend_of(recipe).check_data(recipe)
    encoder.without_torch()
    reader = tokens.Reader(corpus)
    with TemporaryDirectory() as folder:
        tokens.write(
            reader, Path(folder), progress=lambda line: print(f"primus: {line}", file=sys.stderr)
        )
        written = tokens.stored(Path(folder))
        figures = tokens.figures_of(written, recipe.seq_len, reader.encoder)
        count = min(_SAMPLES, figures["documents"])
        samples = [
            _sample(reader, written, number * figures["documents"] // count)
            for number in range(count)
        ]
    document = {
        "corpus": corpus.name,
        "tokenizer": corpus.tokenizer,
        "seq_len": recipe.seq_len,
        "columns": reader.layout.columns,
        "unused_columns": reader.layout.unused,
        "split": reader.files.split,
        "files_not_read": reader.files.others,
        "bos": reader.encoder.begin,
        "eos": reader.encoder.end,
        **figures,
        "samples": [
            [{"text": text, "trained": trained} for text, trained in parts] for parts in samples
        ],
    }
    screen = Screen.of()
    head = screen.wrap(reader.sentence(figures, recipe.seq_len))
    return answer(options, document, [*head, *(_marked(parts, screen) for parts in samples)])


def export(options: argparse.Namespace) -> int:
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
    checkpoint = newest_checkpoint(options.checkpoint)
    for package in ("torch", "transformers"):
        if not importable(package):
            raise HostError(
                f"{package} is not installed", hint="run `primus export` in a container of an image"
            )
    # Seam "torch": no other verb of this module needs it in this process.
    from primus_images.training.backends.export import write_model

    missing = write_model(checkpoint, options.folder, options.dtype, options.tokenizer)
    document = {"checkpoint": str(checkpoint), "folder": str(options.folder), "missing": missing}
    lines = [
        f"{checkpoint.name} → {options.folder} for transformers",
        *(f"– {text}" for text in missing),
    ]
    return answer(options, document, lines)


def _marked(parts: list[tuple[str, bool]], screen: Screen) -> str:
    before, behind = ("", "") if screen.colour or all(trained for _, trained in parts) else "⟦⟧"
    texts = [(_CONTROL.sub("\ufffd", text), trained) for text, trained in parts]
    return "\n" + "".join(
        before + screen.paint(text, "green") + behind if trained else text
        for text, trained in texts
    )


def _sample(reader: tokens.Reader, written: tokens.Tokens, number: int) -> list[tuple[str, bool]]:
    place = written.document(number)
    numbers = written.tokens[place][:_SHOWN].tolist()
    return reader.encoder.parts(
        numbers, [1] * len(numbers) if written.mask is None else written.mask[place].tolist()
    )
