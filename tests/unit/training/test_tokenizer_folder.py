"""Folders of tokenizers that cannot be used, and tables that the reference reads as written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from primus_images.errors import InputError  # noqa: E402
from primus_images.recipes.resolve import resolve  # noqa: E402
from primus_images.recipes.setting import Choices  # noqa: E402
from primus_images.training.judge.reference import rows as reference  # noqa: E402
from primus_images.training.text import encoder  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    recipe = resolve("llama3.1-8b", (), Choices(gpu="cpu", proxy=True))
    shutil.copytree(recipe.asset("tokenizer"), tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def settings(file: str, **values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / file
        content = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(content | values))

    return change


def of_another_form(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"none")


def random_merges(folder: Path) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["dropout"] = 0.5
    path.write_text(json.dumps(content))


def of_own_code(folder: Path) -> None:
    settings("tokenizer_config.json", auto_map={"AutoTokenizer": ["own.Own", None]})(folder)
    settings("tokenizer_config.json", tokenizer_class="Own")(folder)
    (folder / "own.py").write_text("class Own: ...")


@pytest.mark.parametrize(
    ("change", "words", "hint"),
    [
        (
            lambda folder: (folder / "tokenizer.json").unlink(),
            "the folder has no tokenizer (tokenizer.json or tokenizer.model)",
            "set assets.tokenizer to a folder",
        ),
        (of_another_form, "no tokenizer.json, only another form: ", "take tokenizer.json from"),
        (random_merges, "tokenizes the same text differently each time", "set it to null"),
        (
            lambda folder: (folder / "tokenizer.json").write_text("{}"),
            "the tokenizer cannot be loaded: ",
            "set assets.tokenizer to a folder",
        ),
        (of_own_code, "it needs custom code (auto_map), which primus does not run", "set assets"),
    ],
)
def test_tokenizer_that_cannot_be_used_is_named(
    folder: Path, change: Callable[[Path], None], words: str, hint: str
) -> None:
    change(folder)
    with pytest.raises(InputError) as caught:
        encoder.Encoder(str(folder))
    assert words in str(caught.value)
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: "),
        (b"\xff", "a chat template is UTF-8 text"),
        (b" \n", "the chat template is empty"),
        (b'{"chat_template": [{"name": "rag"}]}', "this JSON has no chat_template that is one"),
        (b"[]", "this JSON has no chat_template that is one text"),
    ],
)
def test_template_that_is_no_text_is_refused(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    if content is not None:
        (tmp_path / "template").write_bytes(content)
    with pytest.raises(InputError, match=words):
        encoder.template_of(tmp_path / "template")


@pytest.mark.parametrize("text", ["{% if a %}{% endif %}", "{{ messages }}", "plain"])
def test_template_of_a_processor_is_that_in_its_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.jinja").write_text(text, encoding="utf-8")
    (tmp_path / "a.json").write_text(json.dumps({"chat_template": text}), encoding="utf-8")
    for name in ("a.jinja", "a.json"):
        assert encoder.template_of(tmp_path / name) == text


@pytest.mark.parametrize(
    ("of_model", "of_generation", "end"),
    [([5, 6], None, 5), (None, 7, 7), (-1, 8, 8), ("x", 9, 9), ([], 4, 4), (None, None, None)],
)
def test_end_of_a_model_is_the_first_of_its_configurations(
    tmp_path: Path, of_model: Any, of_generation: Any, end: int | None
) -> None:
    settings("config.json", eos_token_id=of_model)(tmp_path)
    settings("generation_config.json", eos_token_id=of_generation)(tmp_path)
    assert encoder._end_of_model("name", tmp_path, 10) == end
    settings("config.json", eos_token_id=10)(tmp_path)
    with pytest.raises(InputError, match="10 is no token of the tokenizer, which has 10"):
        encoder._end_of_model("name", tmp_path, 10)


def test_transformers_is_told_of_no_torch_only_where_it_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import transformers.utils

    monkeypatch.setattr("sys.path", [str(Path.cwd()), "/nowhere"])
    before = transformers.utils.is_torch_available
    encoder.without_torch()
    assert transformers.utils.is_torch_available is before
    import sys

    assert "/nowhere" in sys.path


@pytest.mark.parametrize("suffix", ["csv", "tsv", "parquet"])
def test_tables_are_read_as_they_were_written(tmp_path: Path, suffix: str) -> None:
    datasets = pytest.importorskip("datasets")
    content: list[dict[str, Any]] = [
        {"text": "One, two.", "number": "1"},  # every cell is text
        {"text": "Three;\tfour.", "number": "02"},
    ]
    if suffix == "parquet":
        content = [
            {"messages": [{"role": "user", "content": "One?"}], "more": None},
            {"messages": [{"role": "user", "content": "Two?", "name": "x"}], "more": None},
        ]
    file = tmp_path / f"rows.{suffix}"
    table = datasets.Dataset.from_list(content)
    if suffix == "parquet":
        table.to_parquet(file)
    else:
        table.to_csv(file, index=False, sep="\t" if suffix == "tsv" else ",")
    assert list(reference.rows_of(file, None)) == content
