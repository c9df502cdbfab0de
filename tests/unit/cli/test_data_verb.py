"""``primus data``: what is shown of a corpus, with a tokenizer of one token a letter."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from primus_images.cli.image import finetune as module
from primus_images.cli.main import main
from primus_images.errors import InputError
from primus_images.gpus.detect import DetectedGpus

DOCUMENTS = 12


class Row(list[int]):
    """Numbers as NumPy has them."""

    def __getitem__(self, place: Any) -> Any:
        return Row(super().__getitem__(place))

    def tolist(self) -> list[int]:
        return list(self)


class Encoder:
    """Its tokens are the letters of the alphabet."""

    begin = 1
    end = 2

    def parts(self, tokens: list[int], mask: list[int]) -> list[tuple[str, bool]]:
        return [
            (chr(ord("a") + token), bool(trained))
            for token, trained in zip(tokens, mask, strict=True)
        ]


class Reader:
    """What the report uses of a reader: each document is its number twice."""

    def __init__(self, corpus: Any) -> None:
        self.corpus = corpus
        self.layout = SimpleNamespace(columns=["text"], unused=["id"])
        self.files = SimpleNamespace(split="train", others=["notes.bin"])
        self.encoder = Encoder()
        self.skipped = [InputError("it is empty", where=f"rows:{n}") for n in range(30)]

    def sentence(self, figures: dict[str, int], seq_len: int) -> str:
        return f"{figures['documents']} documents for {seq_len} tokens"


def corpus(name: str) -> SimpleNamespace:
    return SimpleNamespace(name=name, tokenizer="letters")


class Setting:
    """A corpus ``whole``, whose parts and mask a test decides."""

    def __init__(self) -> None:
        self.parts: list[tuple[Any, float]] = [(corpus("whole"), 1.0)]
        self.mask: Row | None = Row([1, 0] * DOCUMENTS)

    def stored(self, _: Path) -> SimpleNamespace:
        numbers = Row(number for number in range(DOCUMENTS) for _ in range(2))
        place = SimpleNamespace(tokens=numbers, mask=self.mask)
        place.document = lambda number: slice(2 * number, 2 * number + 2)
        return place

    def write(self, reader: Reader, folder: Path, progress: Any) -> None:
        assert folder.is_dir()
        progress("half of it")


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Setting:
    made = Setting()
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("{}\n")
    monkeypatch.setattr("primus_images.gpus.detect.detect", DetectedGpus)
    monkeypatch.setattr(module, "detect", DetectedGpus)
    monkeypatch.setattr(module, "corpus_of", lambda _: corpus("whole"))
    monkeypatch.setattr(module, "parts_of", lambda _: made.parts)
    monkeypatch.setattr(
        module, "backend_of", lambda _: SimpleNamespace(check_data=lambda recipe: None)
    )
    monkeypatch.setattr(module.encoder, "without_torch", lambda: None)
    reading = SimpleNamespace(
        Reader=Reader,
        write=made.write,
        stored=made.stored,
        figures_of=lambda written, seq_len, encoder: {"documents": DOCUMENTS},
    )
    monkeypatch.setattr(module, "tokens", reading)
    return made


def data(*words: str) -> int:
    return main(["data", "llama3-proxy", "corpus=rows.jsonl", *words])


def test_documents_are_spread_over_the_corpus_and_what_is_trained_is_marked(
    setting: Setting, capsys: pytest.CaptureFixture[str]
) -> None:
    assert data() == 0
    said = capsys.readouterr()
    assert "primus: half of it" in said.err
    lines = [line for line in said.out.splitlines() if line]
    assert lines[0].startswith(f"{DOCUMENTS} documents for ")
    left_out = [line for line in lines if line.startswith("left out: ")]
    assert left_out == [f"left out: rows:{n}: it is empty" for n in range(20)]
    assert lines[-5:] == ["⟦a⟧a", "⟦c⟧c", "⟦e⟧e", "⟦h⟧h", "⟦j⟧j"]
    # Where everything is trained, no mark says so.
    setting.mask = None
    assert data() == 0
    assert capsys.readouterr().out.splitlines()[-1] == "jj"


def test_a_report_of_a_corpus_is_a_document(
    setting: Setting, capsys: pytest.CaptureFixture[str]
) -> None:
    assert data("--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["corpus"] == "whole"
    assert (document["bos"], document["eos"]) == (1, 2)
    assert (document["columns"], document["unused_columns"]) == (["text"], ["id"])
    assert len(document["skipped"]) == 30
    assert document["skipped"][0] == {"where": "rows:0", "why": "it is empty"}
    assert document["samples"][1] == [
        {"text": "c", "trained": True},
        {"text": "c", "trained": False},
    ]


def test_the_parts_of_a_mixture_have_their_weights(
    setting: Setting, capsys: pytest.CaptureFixture[str]
) -> None:
    setting.parts = [(corpus("one"), 0.25), (corpus("two"), 0.75)]
    assert data() == 0
    said = capsys.readouterr().out
    assert said.index("weight 0.25:") < said.index("weight 0.75:")
    assert data("--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["corpus"] == "whole"
    assert [(row["corpus"], row["weight"]) for row in document["parts"]] == [
        ("one", 0.25),
        ("two", 0.75),
    ]


@pytest.mark.parametrize(
    ("recipe", "name"), [("llama3.1-8b", "mock"), ("flux.1-dev", "rows.jsonl")]
)
def test_a_corpus_without_text_is_refused(
    recipe: str,
    name: str,
    setting: Setting,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(module, "corpus_of", lambda _: corpus(name))
    assert main(["data", recipe]) == 2
    assert "there is no text to report" in capsys.readouterr().err
