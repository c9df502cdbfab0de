"""The text of a run: what is refused, and when its tokens are made again."""

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from primus_images.errors import InputError
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from primus_images.training.backends import text
from primus_images.training.run.job import Job
from primus_images.training.text.corpus import Corpus


def test_runs_share_tokens_that_nobody_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []

    def written(_recipe: Recipe, _corpus: Corpus, _held_out: None, cache: Path, _: object) -> Any:
        calls.append(cache)
        for kind, data in (("tokens", b"1" * 8), ("ends", b"2" * 8)):
            (cache / f"train.{kind}").write_bytes(data)
        return {"train": "two tokens"}

    def run(number: int, *overrides: str) -> list[str]:
        recipe = resolve("llama3.1-8b", overrides, Choices(gpu="mi300x"))
        job = Job(name="run", recipe=recipe, output=tmp_path / f"{number}")
        lines: list[str] = []
        (job.output / "cache").mkdir(parents=True)
        text.tokenize(job, tmp_path / "kept", lines.append)
        assert (job.output / "cache" / "train.tokens").read_bytes() == b"1" * 8
        return lines

    monkeypatch.setattr(text, "_written", written)
    monkeypatch.setattr(text, "_check_tokens", lambda *_: None)
    monkeypatch.setattr(text.tokens, "stored", lambda *_: SimpleNamespace(ends=[1] * 8))
    assert run(1) == run(2) == ["two tokens"]
    assert len(calls) == 1
    run(3, "training.seq_len=4096")
    assert len(calls) == 2, "the line says how many documents are longer than a sequence"
    run(4, "model.vocab_size=128512")
    assert len(calls) == 3, "whether the model has all tokens was checked for its vocabulary"
    run(5, "ranks=16")
    assert len(calls) == 3, "the number of ranks changes no token"
    for file in (tmp_path / "kept" / "tokens").glob("*/train.tokens"):
        file.unlink()
        file.write_bytes(b"3" * 8)
    run(6)
    assert len(calls) == 4
    monkeypatch.setattr(text, "_code", lambda: "other")
    run(7)
    assert len(calls) == 5, "other code may read the same file differently"


def test_a_full_folder_of_shared_tokens_keeps_no_part_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_source: Path, target: Path) -> None:
        target.write_bytes(b"1")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def elsewhere(_path: Path, _source: Path) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(shutil, "copyfile", full)
    monkeypatch.setattr(Path, "hardlink_to", elsewhere)
    with pytest.raises(OSError, match="No space"):
        text._link(tmp_path / "train.tokens", tmp_path / "kept")
    assert not list(tmp_path.iterdir())


def recipe_of(*overrides: str, backend: str = "fsdp") -> Recipe:
    return resolve("llama3.1-8b", overrides, Choices(gpu="cpu", backend=backend, proxy=True))


def test_text_needs_a_tokenizer() -> None:
    recipe = recipe_of("assets.corpus=assets/corpus.jsonl", "assets.tokenizer=mock")
    with pytest.raises(InputError, match="tokenizer is mock, but the corpus is text"):
        text.check(recipe)
    text.check(recipe_of("assets.corpus=mock", "assets.tokenizer=mock"))


@pytest.mark.parametrize("name", ["corpus", "tokenizer"])
def test_tokens_of_unknown_files_are_not_shared(tmp_path: Path, name: str) -> None:
    recipe: Any = SimpleNamespace(
        asset_digests={"corpus": "a", "tokenizer": "b", name: ""},
        backend="fsdp",
        seq_len=8,
        architecture=SimpleNamespace(vocab_size=1024),
        find=lambda _key, default: default,
    )
    assert text._entry_of(recipe, Corpus(name="c", tokenizer="t"), tmp_path) is None
    recipe.asset_digests[name] = "x"
    assert text._entry_of(recipe, Corpus(name="c", tokenizer="t"), tmp_path) is not None
