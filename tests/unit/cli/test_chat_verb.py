"""``primus chat``: which weights it loads, and a conversation with a model that repeats."""

import io
import json
from pathlib import Path

import pytest

from primus_images.cli.image import chat
from primus_images.cli.main import main
from primus_images.errors import InputError


class Parrot:
    """Repeats the last question, and counts the turns before it."""

    def __init__(self, *, chats: bool = True) -> None:
        self.chats = chats

    def reply(self, turns: list[dict[str, str]], max_tokens: int, show: chat.Show) -> str:
        roles = "".join(turn["role"][0] for turn in turns)
        text = f"{roles}{max_tokens}: {turns[-1]['content']}"
        for part in text.split(" "):
            show(part)
        return text


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/config.json").write_text("{}")
    monkeypatch.setattr(chat, "importable", lambda _: True)
    monkeypatch.setattr(chat, "_loaded", lambda _: Parrot())
    return tmp_path


def ask(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_each_line_is_a_question_in_one_conversation(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(monkeypatch, "Hi\n\n  Again \x1b\n")
    assert main(["chat", str(run), "--max-tokens", "9"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "u9:Hi"
    assert shown[1].startswith("uau9:Again")
    assert "\x1b" not in shown[1]
    ask(monkeypatch, "Hi\n")
    assert main(["chat", str(run / "weights"), "--system", "Be brief.", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["turns"] == [{"question": "Hi", "answer": "su512: Hi"}]


def test_a_model_without_a_template_continues_each_line_alone(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chat, "_loaded", lambda _: Parrot(chats=False))
    ask(monkeypatch, "Once\nThen\n")
    assert main(["chat", str(run)]) == 0
    assert capsys.readouterr().out.splitlines() == ["u512:Once", "u512:Then"]
    assert main(["chat", str(run), "--system", "Be brief."]) == 2
    assert "no chat template" in capsys.readouterr().err


def test_a_run_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no folder"):
        chat.weights_of(tmp_path / "gone")
    with pytest.raises(InputError, match="no exported weights"):
        chat.weights_of(tmp_path)
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(InputError) as caught:
        chat.weights_of(tmp_path)
    assert f"primus export {tmp_path} DIR" in str(caught.value.hint)
