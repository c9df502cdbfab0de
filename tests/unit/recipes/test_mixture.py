"""Several corpora as one: what a list may contain, and what a resumed run compares."""

from pathlib import Path

import pytest

from primus_images.errors import InputError
from primus_images.recipes import mixture
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from primus_images.training.judge.proof import unjudged
from primus_images.training.text.corpus import corpus_of, parts_of


def listed(folder: Path, text: str) -> Path:
    (folder / "a.jsonl").write_text('{"text": "a"}\n')
    (folder / "b.txt").write_text("b\n")
    (folder / "mix.yaml").write_text(text)
    return folder / "mix.yaml"


def of(file: Path) -> Recipe:
    words = [f"corpus={file}", "data.skip=1%", "data.column=body"]
    return resolve("llama3.1-8b", words, Choices(proxy=True, gpu="cpu"))


def test_each_corpus_has_its_weight_and_its_own_columns(tmp_path: Path) -> None:
    file = listed(tmp_path, "- {corpus: a.jsonl, weight: 2, column: text}\n- {corpus: b.txt}\n")
    parts = parts_of(corpus_of(of(file)))
    names = [(Path(part.name).name, weight, part.column) for part, weight in parts]
    assert names == [("a.jsonl", 2.0, "text"), ("b.txt", 1.0, None)]
    assert all(part.skip == 0.01 for part, _ in parts)
    assert unjudged(of(file)) == "the reference reads one corpus, and no mixture"


def test_a_change_of_a_corpus_or_of_a_weight_changes_the_digest(tmp_path: Path) -> None:
    text = "- {corpus: a.jsonl}\n- {corpus: b.txt}\n"
    digests = {of(listed(tmp_path, text)).asset_digests["corpus"]}
    digests.add(
        of(listed(tmp_path, text.replace("b.txt", "b.txt, weight: 2"))).asset_digests["corpus"]
    )
    file = listed(tmp_path, text)
    (tmp_path / "b.txt").write_text("c\n")
    digests.add(of(file).asset_digests["corpus"])
    assert len(digests) == 3
    assert of(listed(tmp_path, "- {corpus: hf:owner/texts}\n")).asset_digests["corpus"] == ""


@pytest.mark.parametrize("weight", ["0.001", "1000"])
def test_a_weight_may_be_as_large_as_the_limit(tmp_path: Path, weight: str) -> None:
    (part,) = mixture.parts_of(listed(tmp_path, f"- {{corpus: a.jsonl, weight: {weight}}}\n"))
    assert part.weight == float(weight)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("corpus: a.jsonl\n", "expected a list of corpora"),
        ("[]\n", "expected a list of corpora"),
        ("- a.jsonl\n", "expected a corpus and its weight"),
        ("- {corpus: gone.jsonl}\n", "gone.jsonl is not a file or a folder"),
        ("- {corpus: a.jsonl, wieght: 2}\n", "did you mean 'weight'"),
        ("- {corpus: a.jsonl, weight: 0}\n", "weight must be a number above 0"),
        ("- {corpus: a.jsonl, weight: 1000.1}\n", "at most 1000, not 1000.1"),
        ("- {corpus: a.jsonl, weight: -1}\n", "weight must be a number above 0"),
        ("- {corpus: a.jsonl, weight: yes}\n", "weight must be a number above 0"),
        ("- {corpus: a.jsonl, column: 7}\n", "column must be text, not 7"),
        ("- {corpus: a.jsonl, question: q}\n", "a question needs its answer"),
        ("- {corpus: mix.yaml}\n", "a mixture contains no other one"),
    ],
)
def test_a_wrong_list_is_refused_with_its_place(tmp_path: Path, text: str, words: str) -> None:
    file = listed(tmp_path, text)
    with pytest.raises(InputError) as caught:
        mixture.parts_of(file)
    assert words in str(caught.value)
    assert str(file) in str(caught.value.where)
