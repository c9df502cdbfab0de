"""The corpus of a job: what it names, and the files that are read.

A corpus is a file, a folder of files of one form, or a data set on the hub. Its rows are read by
:mod:`primus_images.training.text.pieces`.
"""

import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from primus_images.errors import InputError, PrimusError
from primus_images.files import below, refuse_special
from primus_images.recipes import mixture
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.setting import share_of
from primus_images.recipes.weights import HUB, downloaded
from primus_images.terminal import some
from primus_images.training.text.pieces import Piece, Unreadable, pieces_of_file, pieces_of_rows
from primus_images.training.text.rows import (
    TABLE,
    datasets_library,
    first_line,
    form_of,
    rows_of_hub,
    unreadable,
)

TOKENIZER_FILES: Sequence[str] = TABLE["tokenizer"]
_BESIDE = re.compile("|".join(TABLE["beside"]), re.IGNORECASE)
# Files of one split, except data-00000-of-00001.arrow, which `save_to_disk` writes to the folder of
# each split.
_SHARD = re.compile(r"(?!data-)([A-Za-z0-9_.]+)-\d{5}-of-\d{5}")
_CHOOSES = "data.split=NAME (eval.split=NAME) chooses one"


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The text of a job: a path or ``hf:OWNER/NAME``, its ``tokenizer``, and what to take of it.

    The tokenizer is a folder or ``hf:``, too. Without ``column``, the columns of the first row
    decide; with ``question`` and ``answer``, these columns are the turns of a chat. Without
    ``split``, it is ``usual_split`` if there are several. With ``completions``, only the words of
    the assistant, or of the completion, are trained. ``template`` is the file of a chat template in
    place of the tokenizer's. A share of the rows, up to ``skip``, may be wrong: these are left out.
    """

    name: str
    tokenizer: str = ""
    column: str | None = None
    split: str | None = None
    usual_split: str = "train"
    completions: bool = True
    question: str | None = None
    answer: str | None = None
    template: Path | None = None
    skip: float = 0.0


def corpus_of(recipe: Recipe) -> Corpus:
    """Return the corpus of ``recipe``."""
    template = None
    if "assets.chat_template" in recipe.settings:
        template = recipe.asset("chat_template")
    return Corpus(
        name=_named(recipe, "assets.corpus"),
        tokenizer=_named(recipe, "assets.tokenizer"),
        column=recipe.find("data.column", "") or None,
        split=recipe.find("data.split", "") or None,
        completions=recipe.find("data.train_on", "completions") == "completions",
        question=recipe.find("data.question", "") or None,
        answer=recipe.find("data.answer", "") or None,
        template=template,
        skip=share_of(recipe.find("data.skip", "0%")),
    )


def parts_of(corpus: Corpus) -> list[tuple[Corpus, float]]:
    """Return the corpora that ``corpus`` is, each with its weight: itself, or those of a mixture.

    Raises InputError if the file of a mixture is wrong.
    """
    if not mixture.is_mixture(corpus.name):
        return [(corpus, 1.0)]
    parts = []
    for part in mixture.parts_of(Path(corpus.name)):
        own = replace(
            corpus,
            name=part.name,
            column=part.options.get("column"),
            split=part.options.get("split"),
            question=part.options.get("question"),
            answer=part.options.get("answer"),
        )
        parts.append((own, part.weight))
    return parts


def labels_of(parts: Sequence[tuple[Corpus, float]]) -> list[str]:
    """Return a short name of each corpus, for the names of figures: no two are the same."""
    labels: list[str] = []
    for part, _ in parts:
        label = re.sub(r"[^\w.-]", "_", Path(part.name).name.partition(".")[0]) or "corpus"
        same = 1
        own = label
        while own in labels:
            same += 1
            own = f"{label}-{same}"
        labels.append(own)
    return labels


def held_out_corpus_of(recipe: Recipe) -> Corpus | None:
    """Return the corpus of ``recipe`` for evaluation, None if there is none of its own."""
    if "eval.corpus" not in recipe.settings:
        return None
    name = _named(recipe, "eval.corpus")
    split = recipe.find("eval.split", "") or None
    return replace(corpus_of(recipe), name=name, split=split, usual_split="validation")


def _named(recipe: Recipe, key: str) -> str:
    return str(recipe.asset(key) or recipe.get(key, str))


def tokenizer_folder(name: str) -> Path:
    """Return the folder of a tokenizer; that of ``hf:OWNER/NAME`` is downloaded once."""
    if name.startswith(HUB):
        return downloaded(name, *TOKENIZER_FILES, "*config.json")
    return Path(name)


@dataclass(frozen=True, kw_only=True)
class Files:
    """The files of a corpus in order, the ``split`` that they are, and the ``others``.

    ``split`` is None if there is only one.
    """

    paths: Sequence[Path]
    split: str | None = None
    others: Sequence[str] = ()


# Split → its files. The key None stands for files of no split.
_Splits = Mapping[str | None, Sequence[Path]]


def files_of(corpus: Corpus) -> Files:
    """Return the files to read.

    Raises InputError if they are of several forms, or if the split must be chosen.
    """
    root = Path(corpus.name)
    if not root.is_dir():
        refuse_special(root, str(root))
        if corpus.split:
            raise InputError(
                f"data.split: {root} is one file, which has no splits", where=str(root)
            )
        return Files(paths=[root])
    inside = sorted(below(root, hidden=False))
    for file in inside:
        if not file.exists():
            raise InputError(
                "the link leads nowhere", where=file, hint="remove it, or restore its file"
            )
        refuse_special(file, str(file))
    splits = _splits_of_card(root, inside) or _splits(root, inside)
    split = _chosen_split(corpus, root, splits)
    files = splits.get(split, [])
    forms = {form_of(file) for file in files}
    if inside and not forms:
        names = some([str(file.relative_to(root)) for file in inside], 3)
        raise unreadable(f"the folder has only files beside a corpus: {names}", str(root))
    if len(forms) != 1:
        kinds = ", ".join(sorted(form or "no suffix" for form in forms)) or "no files"
        remedy = ""
        if forms:
            remedy = "name one file; or list several in a .yaml file, as - {corpus: FILE}"
        raise unreadable(
            f"expected files of one form in the folder, found {kinds}", str(root), remedy
        )
    others = sorted({*inside} - {*files})
    return Files(paths=files, split=split, others=[str(file.relative_to(root)) for file in others])


def pieces(corpus: Corpus, files: Files) -> Generator[Piece]:
    """Yield the pieces of the corpus in order. The last one may be what cannot be read."""
    try:
        if corpus.name.startswith(HUB):
            split = corpus.split or corpus.usual_split
            yield from pieces_of_rows(rows_of_hub(corpus.name.removeprefix(HUB), split))
        for file in files.paths:
            yield from pieces_of_file(file)
    except PrimusError as error:
        yield Unreadable(error=error)


def _chosen_split(corpus: Corpus, root: Path, splits: _Splits) -> str | None:
    split = corpus.split
    if split is None:
        split = next(iter(splits), None)
        if len(splits) > 1:
            split = corpus.usual_split
    names = ", ".join(sorted(name for name in splits if name))
    if len(splits) > 1 and None in splits and not corpus.split:
        file = splits[None][0].relative_to(root)
        raise InputError(
            f"{file} belongs to no split, and other files do",
            where=root,
            hint=f"{_CHOOSES} of {names}; or remove the file",
        )
    if splits and split not in splits:
        raise InputError(
            f"the folder has no split {split}, only {names}", where=root, hint=_CHOOSES
        )
    return split


def _splits_of_card(root: Path, files: Sequence[Path]) -> _Splits:
    """As ``datasets`` reads the ``configs`` of a README.md; empty if there are none."""
    card = root / "README.md"
    if not card.is_file() or b"\nconfigs:" not in card.read_bytes().partition(b"\n---")[0]:
        return {}
    library = datasets_library()
    try:
        named = library.load_dataset_builder(str(root.resolve())).config.data_files or {}
    except Exception as error:
        raise InputError(
            f"datasets cannot choose files: {first_line(error)}",
            where=f"{card}: configs",
            hint="assets.corpus names one of its files",
        ) from error
    places = {file.resolve(): file for file in files}
    splits: dict[str | None, list[Path]] = {}
    for split, names in named.items():
        paths = [Path(name) for name in names]
        splits[str(split)] = [places.get(path.resolve(), path) for path in paths]
    return splits


def _splits(root: Path, files: Sequence[Path]) -> _Splits:
    """Return the splits that the names of files, or of their folders, tell."""
    data = []
    for file in files:
        folders = file.relative_to(root).parts[:-1]
        # datasets reads no folder like __pycache__ either.
        hidden = any(folder.startswith("__") for folder in folders)
        if not hidden and not _BESIDE.fullmatch(file.name):
            data.append(file)
    split_of = _split_of_folders
    if (root / "dataset_dict.json").exists():  # of `save_to_disk`: each split is a folder
        split_of = _first_folder
    elif any(_split_in(file.name) for file in data):
        split_of = _split_of_name
    splits: dict[str | None, list[Path]] = {}
    for file in data:
        splits.setdefault(split_of(file.relative_to(root)), []).append(file)
    return splits


def _first_folder(file: Path) -> str | None:
    return file.parts[0]


def _split_of_name(file: Path) -> str | None:
    return _split_in(file.name)


def _split_of_folders(file: Path) -> str | None:
    return next(filter(None, map(_split_in, file.parts[:-1])), None)


def _split_in(name: str) -> str | None:
    shard = _SHARD.match(name)
    if shard:
        return shard[1]
    for split, words in TABLE["splits"].items():
        pattern = rf"(?:^|[-._ 0-9])(?:{'|'.join(words)})(?:[-._ 0-9]|$)"
        if re.search(pattern, name, re.IGNORECASE):
            return str(split)
    return None
