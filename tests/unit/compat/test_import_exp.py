import json
from pathlib import Path
from typing import Any

import pytest

import experiment_kit
from primus_images.cli.main import main
from primus_images.compat.commands import documented
from primus_images.errors import InputError
from primus_images.recipes.experiments.presets import Argument
from primus_images.recipes.experiments.translate import options, translate
from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from tables import text_of

MEGATRON = text_of("experiments/megatron.yaml")
TITAN = text_of("experiments/torchtitan.yaml")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return experiment_kit.enter(tmp_path, monkeypatch)


def imported(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    assert main(["import-exp", "exp.yaml", "--json", *more]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_an_experiment_of_megatron_becomes_a_recipe(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "exp.yaml").write_text(MEGATRON)
    assert main(["import-exp", "exp.yaml", "--out", "mine.yaml"]) == 0
    said = capsys.readouterr().err
    assert "what exp.yaml does not set is as in the recipe llama3.1-8b" in said
    recipe = resolve("./mine.yaml", (), Choices(gpu="mi300x"))
    assert (recipe.backend, recipe.mode, recipe.precision) == ("megatron", "pretrain", "bf16")
    assert (recipe.steps, recipe.local_batch, recipe.global_batch, recipe.seq_len) == (
        7,
        2,
        64,
        4096,
    )
    assert recipe.settings["megatron.training.lr"].value == 1e-5
    assert recipe.settings["megatron.training.lr_schedule"].value == "cosine"
    assert recipe.settings["megatron.model.init_method_std"].value == 0.008
    assert recipe.settings["megatron.model.sequence_parallel"].value is False
    assert recipe.settings["assets.corpus"].value == "mock"
    # With nothing saved, or no profile, their steps mean nothing.
    assert recipe.find("megatron.training.checkpoint_interval", 0) == 0
    assert recipe.find("megatron.training.profile_step", 0) == 0


def test_the_proxy_of_an_imported_recipe_keeps_its_own_sizes(here: Path) -> None:
    (here / "exp.yaml").write_text(MEGATRON)
    assert main(["import-exp", "exp.yaml", "--out", "mine.yaml"]) == 0
    recipe = resolve("./mine.yaml", (), Choices(gpu="cpu", proxy=True))
    assert (recipe.seq_len, recipe.local_batch, recipe.global_batch) == (128, 4, 8)


def test_an_experiment_of_torchtitan_takes_its_precision_from_the_model(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "exp.yaml").write_text(TITAN)
    document = imported(capsys)
    assert (document["recipe"], document["backend"], document["precision"]) == (
        "llama3.1-8b",
        "torchtitan",
        "fp8",
    )
    own = {
        "torchtitan.lr_scheduler.warmup_steps": 10,
        "torchtitan.training.local_batch_size": 4,
        "torchtitan.training.steps": 50,
        "torchtitan.quantize.linear.float8.filter_fqns": ["output"],
    }
    assert document["settings"].items() >= own.items()
    assert "assets.corpus" not in document["settings"] and document["unmapped"] == []


def test_the_environment_fills_in_what_the_file_leaves_open(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "exp.yaml").write_text(MEGATRON)
    monkeypatch.setenv("MY_BATCH", "32")
    monkeypatch.setenv("MY_MODEL", "qwen2.5_7B")
    document = imported(capsys)
    assert document["recipe"] == "qwen2.5-7b"
    assert document["settings"]["megatron.training.global_batch_size"] == 32


def test_every_key_that_cannot_be_said_is_named_with_its_place(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "exp.yaml").write_text(
        MEGATRON
        + (
            "      micro_batchsize: 3\n      enable_primus_turbo: true\n      "
            "enable_turbo_attention_float8: true\n"
        )
        + "      fp4: e2m1\n      hidden_dropout: 0.1\n"
    )
    assert main(["import-exp", "exp.yaml"]) == 2
    said = capsys.readouterr().err
    assert (
        "exp.yaml:30:7: micro_batchsize: neither Megatron-LM nor Primus has such a key, as far as "
        "known here; did you mean 'micro_batch_size'?" in said
    )
    assert "exp.yaml:32:7: enable_turbo_attention_float8: true has no counterpart" in said
    assert "exp.yaml:33:7: fp4: e2m1 has no counterpart" in said
    assert "exp.yaml:34:7: hidden_dropout: 0.1 has no counterpart (known: 0.0, 0)" in said
    document = imported(capsys, "--allow-unmapped")
    keys = {
        "micro_batchsize",
        "enable_turbo_attention_float8",
        "fp4",
        "hidden_dropout",
    }
    assert {option["key"] for option, _ in document["unmapped"]} == keys
    assert "# not expressible: micro_batchsize: 3" in document["text"]


def test_options_are_understood_in_all_their_forms() -> None:
    parsed = options(["--a", "1", "--b=2", "--training.c", "--d", "-5"])
    assert [(one.key, one.value) for one in parsed] == [
        ("a", 1),
        ("b", 2),
        ("training.c", True),
        ("d", -5),
    ]


def test_a_later_option_wins_and_keeps_one_word() -> None:
    twice = [Argument(key="train_iters", value=number, where="x") for number in (5, 6)]
    assert translate("megatron", twice).words() == ("megatron.training.steps=6",)


def test_a_documented_path_is_understood_wherever_it_stands() -> None:
    there, _ = documented("/workspace/Primus/examples/torchtatin/config/llama3_8b.toml")
    assert (there.recipe, there.choices.backend, there.choices.precision) == (
        "llama3-8b",
        "torchtitan",
        "bf16",
    )
    assert there.gpu_of_path is None
    mx, _ = documented("examples/megatron/configs/MI355X/qwen2.5_7B-MXFP8-pretrain.yaml")
    assert (mx.recipe, mx.choices.precision, mx.gpu_of_path) == ("qwen2.5-7b", "mxfp8", "mi355x")
    with pytest.raises(InputError, match="no document has a model 'llama9'"):
        documented("examples/megatron/configs/llama9-pretrain.yaml")


def test_a_null_keeps_the_value_of_the_recipe(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "exp.yaml").write_text(
        MEGATRON.replace("llama3.1_8B", "llama3.1_70B") + "      lr: null\n".replace("lr", "min_lr")
    )
    settings = imported(capsys)["settings"]
    assert not {"megatron.training.decay_steps", "megatron.training.min_lr"} & settings.keys()


def test_what_cannot_train_is_refused_where_the_file_has_it(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "exp.yaml").write_text(MEGATRON.replace("lr_warmup_iters: 2", "lr_warmup_iters: 8"))
    assert main(["import-exp", "exp.yaml"]) == 2
    assert (
        "exp.yaml:18:7: lr_warmup_iters: megatron.training.warmup_steps must be at most"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "value", ["0", "-1", str(2**70), "0.5", "''", "x", "[]", "true", "[[0]]", "{a: 1}"]
)
@pytest.mark.parametrize(
    "key", ["num_layers", "num_experts", "tensor_model_parallel_size", "global_batch_size", "fp8"]
)
def test_no_value_of_a_key_ends_in_a_traceback(
    key: str, value: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = MEGATRON.replace("      global_batch_size: ${MY_BATCH:64}\n", "")
    (here / "exp.yaml").write_text(f"{text}      {key}: {value}\n")
    assert main(["import-exp", "exp.yaml"]) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err


def test_a_recipe_is_written_for_the_nodes_that_its_degrees_need(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = MEGATRON + "      tensor_model_parallel_size: 8\n      pipeline_model_parallel_size: 4\n"
    (here / "exp.yaml").write_text(
        wide.replace("llama3.1_8B", "llama3.1_70B").replace("MY_BATCH:64", "MY_BATCH:32")
    )
    assert imported(capsys, "--nodes", "4")["nodes"] == 4
    document = imported(capsys, "--nodes", "8")
    (here / "mine.yaml").write_text(document["text"])
    for nodes in (None, 8, 16):
        # The batch is that of the whole job, as Primus reads it.
        recipe = resolve("./mine.yaml", (), Choices(gpu="mi300x", nodes=nodes))
        assert (recipe.get("nodes", int), recipe.global_batch) == (nodes or 8, 32)
    assert main(["import-exp", "exp.yaml", "--nodes", "0"]) == 2
    assert "must be a whole number of at least 1" in capsys.readouterr().err
