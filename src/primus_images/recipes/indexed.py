"""The files of a tokenized corpus of Megatron-LM: ``NAME.idx``, and its tokens in ``NAME.bin``."""

from pathlib import Path

INDEX = ".idx"
TOKENS = ".bin"


def is_index(path: Path) -> bool:
    """Whether ``path`` is the index of a tokenized corpus, by its name."""
    return path.suffix == INDEX


def tokens_of(index: Path) -> Path:
    """Return the file with the tokens of an ``index``."""
    return index.with_suffix(TOKENS)


def named(path: Path) -> Path:
    """Return the index that ``path`` names, or ``path`` itself if it names none.

    Megatron-LM names both files by what their names share; one of them is understood as well.
    """
    if path.suffix == TOKENS:
        index = path.with_suffix(INDEX)
    else:
        index = path.with_name(f"{path.name}{INDEX}")
        if path.exists():
            return path
    if index.is_file():
        return index
    return path
