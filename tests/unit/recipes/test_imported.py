"""What overrides of an experiment file become: a row pins settings, sentences and refusals."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from primus_images.errors import InputError
from primus_images.recipes.experiments.source import import_experiment
from tables import FIXTURES, text_of

ROWS = yaml.safe_load(text_of("experiments.yaml"))
HEAD = """\
work_group: w
user_name: u
exp_name: e
workspace: ./o
modules:
  pre_trainer:
    framework: {framework}
    config: pre_trainer.yaml
    model: {model}.yaml
    overrides:
"""


def text_of_row(row: dict[str, Any]) -> str:
    overrides = list(row["overrides"])
    if row["framework"] == "megatron" and not any("train_iters" in one for one in overrides):
        overrides.append("train_iters: 9")
    lines = "".join(f"      {one}\n" for one in overrides)
    return HEAD.format_map(row) + lines


@pytest.mark.parametrize(
    "row", ROWS, ids=lambda row: " ".join([row["framework"], row["model"], *row["overrides"]])
)
def test_an_override_becomes_settings_or_a_refusal(row: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text_of_row(row))
    environment = {}
    if row.get("presets"):
        environment["PRIMUS_ROOT"] = str(FIXTURES / "primus")
    if row.get("unmapped"):
        environment["PRIMUS_ALLOW_UNMAPPED"] = "1"
    if "said" in row:
        with pytest.raises(InputError) as caught:
            import_experiment(file, environment)
        message = caught.value.message.replace(str(tmp_path), "FOLDER")
        assert (message, caught.value.hint) == (row["said"], row.get("hint"))
        return
    imported = import_experiment(file, environment)
    assert imported.recipe == row["recipe"]
    assert imported.done.settings == row["settings"]
    assert imported.says == row["says"]
    assert imported.model == row.get("fields", {})
