"""What a user gets wrong ends with exit code 2 and a sentence that names the place, never with a traceback."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from primus.cli.main import main

INPUTS: list[dict[str, Any]] = yaml.safe_load(
    (Path(__file__).resolve().parents[1] / "fixtures" / "bad_inputs.yaml").read_text(encoding="utf-8")
)
# Texts that are too long to write down. Each alias of the bomb doubles what the one before holds.
LONG = {
    "{long}": "a" * 300,
    "{digits}": "ranks: " + "9" * 5000,
    "ranks={many digits}": "ranks=" + "9" * 5000,
    "{brackets}": "[" * 1_000_000,
    "{keys}": "".join(f"k{n}: 1\n" for n in range(100_000)),
    "{huge}": "# " + "x" * 3_000_000,
    "{deep}": "name: " + "{a: " * 5000 + "1" + "}" * 5000,
    "{bomb}": "a0: &a0 {k: 1, l: 2}\n" + "".join(f"a{n}: &a{n} {{k: *a{n - 1}, l: *a{n - 1}}}\n" for n in range(1, 40)),
}
STANDING = (
    "HF_TOKEN",
    "EXP",
    "BACKEND",
    "NNODES",
    "GPUS_PER_NODE",
    "PRIMUS_PROXY",
    "PRIMUS_GPU",
    "PRIMUS_HIPBLASLT_TUNING_STAGE",
)


@pytest.mark.parametrize("given", INPUTS, ids=[one["name"].replace(" ", "-") for one in INPUTS])
def test_a_bad_input_is_a_sentence(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "needs" in given and find_spec(given["needs"]) is None:
        pytest.skip(f"{given['needs']} judges it, and is not installed")
    for name, text in given.get("files", {}).items():
        if name.endswith("/"):
            (tmp_path / name).mkdir()
        else:
            (tmp_path / name).write_text(LONG.get(text, text), encoding="utf-8")
    for name, digits in given.get("hex", {}).items():
        (tmp_path / name).write_bytes(bytes.fromhex(digits))
    monkeypatch.chdir(tmp_path)
    for name in STANDING:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.get("env", {}).items():
        monkeypatch.setenv(name, value)
    try:
        code = main([LONG.get(word, word) for word in given["run"]])
    except SystemExit as error:
        code = error.code
    said = capsys.readouterr().err
    assert code == 2, said
    assert re.search(given["says"], said, re.DOTALL), said
    assert given.get("where", "") in said
    assert "Traceback" not in said


def test_there_are_many_of_them() -> None:
    assert len({one["name"] for one in INPUTS}) == len(INPUTS) >= 60
