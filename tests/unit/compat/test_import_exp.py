from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from primus.cli.main import main
from primus.compat import words
from primus.compat.arguments import derived
from primus.compat.merge import merge
from primus.compat.presets import known_versions, presets
from primus.compat.tables import documented, documented_paths
from primus.compat.translate import translate
from primus.compat.words import Given
from primus.errors import InputError
from primus.recipes.resolve import resolve
from primus.recipes.setting import Choices

MEGATRON = """\
work_group: ${PRIMUS_TEAM:amd}
user_name: ${PRIMUS_USER:root}
exp_name: ${MY_NAME:mine}
workspace: ./output

modules:
  pre_trainer:
    framework: megatron
    config: pre_trainer.yaml
    model: ${MY_MODEL:llama3.1_8B}.yaml
    overrides:
      stderr_sink_level: DEBUG
      train_iters: 7
      micro_batch_size: 2
      global_batch_size: ${MY_BATCH:64}
      seq_length: 4096
      lr: 1.0e-5
      lr_warmup_iters: 2
      lr_decay_iters: null
      lr_decay_style: cosine
      init_method_std: 0.008
      sequence_parallel: 0
      mock_data: true
      train_data_path: null
      save: null
      save_interval: 20000
      profile: false
      profile_step_end: 7
      use_turbo_attention: true
"""
TITAN = """\
work_group: amd
modules:
  pre_trainer:
    framework: torchtitan
    config: pre_trainer.yaml
    model: llama3.1_8B-fp8.yaml
    overrides:
      metrics: {log_freq: 10}
      lr_scheduler:
        warmup_steps: 10
      training:
        batch_size: 4
        steps: 50
        mock_data: false
      quantize: {linear: {float8: {filter_fqns: [output]}}}
      primus_turbo:
        enable_primus_turbo: true
        enable_attention_float8: false
"""
OLDER_TITAN = TITAN.replace("        mock_data: false\n", "").replace(
    "      quantize: {linear: {float8: {filter_fqns: [output]}}}\n", ""
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("EXP", "NNODES", "BACKEND", "PRIMUS_TEAM", "PRIMUS_USER"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def imported(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    assert main(["import-exp", "exp.yaml", "--json", *more]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_an_experiment_of_megatron_becomes_a_recipe(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "exp.yaml").write_text(MEGATRON)
    assert main(["import-exp", "exp.yaml", "--out", "mine.yaml"]) == 0
    said = capsys.readouterr().err
    assert "use_turbo_attention is left out: it has no effect without enable_primus_turbo" in said
    recipe = resolve("./mine.yaml", (), Choices(gpu="mi300x"))
    assert (recipe.backend, recipe.mode, recipe.precision) == ("megatron", "pretrain", "bf16")
    assert (recipe.steps, recipe.local_batch, recipe.global_batch, recipe.seq_len) == (7, 2, 64, 4096)
    assert recipe.settings["megatron.training.lr"].value == 1e-5
    assert recipe.settings["megatron.training.lr_schedule"].value == "cosine"
    assert recipe.settings["megatron.model.init_method_std"].value == 0.008
    assert recipe.settings["megatron.model.sequence_parallel"].value is False
    assert recipe.settings["assets.corpus"].value == "mock"
    # With nothing saved, or no profile, their steps mean nothing.
    assert recipe.find("megatron.training.checkpoint_interval", 0) == 0
    assert recipe.find("megatron.training.profile_step", 0) == 0
    assert recipe.settings["megatron.training.steps"].origin == f"{here}/mine.yaml:{_line(here, 'steps: 7')}:30"


def _line(here: Path, text: str) -> int:
    lines = (here / "mine.yaml").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(text))


def test_the_proxy_of_an_imported_recipe_keeps_its_own_sizes(here: Path) -> None:
    (here / "exp.yaml").write_text(MEGATRON)
    assert main(["import-exp", "exp.yaml", "--out", "mine.yaml"]) == 0
    recipe = resolve("./mine.yaml", (), Choices(gpu="cpu", proxy=True))
    assert (recipe.seq_len, recipe.local_batch, recipe.global_batch) == (128, 4, 8)


def test_an_experiment_of_torchtitan_takes_its_precision_from_the_preset(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "exp.yaml").write_text(TITAN)
    document = imported(capsys)
    assert (document["recipe"], document["backend"], document["precision"]) == ("llama3.1-8b", "torchtitan", "fp8")
    own = {
        "torchtitan.lr_scheduler.warmup_steps": 10,
        "torchtitan.training.local_batch_size": 4,
        "torchtitan.training.steps": 50,
        "torchtitan.quantize.linear.float8.filter_fqns": ["output"],
    }
    assert document["settings"].items() >= own.items()
    # Of Primus's preset; and the tokenizer of its model, since the data are real.
    assert document["settings"]["torchtitan.optimizer.lr"] == 8e-4
    assert document["settings"]["assets.tokenizer"] == "hf:meta-llama/Llama-3.1-8B"
    # A name of v25.9 beside keys of v25.10: no version has both.
    said = "training.batch_size: Primus v25.10 does not have this key and would refuse the file"
    assert document["primus"] == "Primus v25.10" and said in document["left_out"]
    assert document["unmapped"] == []


def test_the_environment_fills_in_what_the_file_leaves_open(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "exp.yaml").write_text(MEGATRON)
    monkeypatch.setenv("MY_BATCH", "32")
    monkeypatch.setenv("MY_MODEL", "qwen2.5_7B")
    document = imported(capsys)
    assert document["recipe"] == "qwen2.5-7b"
    assert document["settings"]["megatron.training.global_batch_size"] == 32


def test_every_key_that_cannot_be_said_is_named_with_its_place(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "exp.yaml").write_text(
        MEGATRON
        + "      micro_batchsize: 3\n      enable_primus_turbo: true\n      enable_turbo_attention_float8: true\n"
        + "      attn_logit_softcapping: 30.0\n      fp4: e2m1\n"
    )
    assert main(["import-exp", "exp.yaml"]) == 2
    said = capsys.readouterr().err
    assert "exp.yaml:30:7: micro_batchsize: no recipe has such a key; did you mean 'micro_batch_size'?" in said
    assert "exp.yaml:32:7: enable_turbo_attention_float8: true has no counterpart" in said
    assert "exp.yaml:33:7: attn_logit_softcapping: 30.0 has no counterpart (known: null)" in said
    assert "exp.yaml:34:7: fp4: e2m1 has no counterpart: FP4 is not implemented here" in said
    document = imported(capsys, "--allow-unmapped")
    keys = {"micro_batchsize", "enable_turbo_attention_float8", "attn_logit_softcapping", "fp4"}
    assert {one["key"] for one in document["unmapped"]} == keys
    assert "# not expressible: micro_batchsize: 3" in document["text"]


def test_presets_of_the_users_own_come_before_the_overrides(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "exp.yaml").write_text(MEGATRON.replace("${MY_MODEL:llama3.1_8B}", "mine"))
    (here / "mine.yaml").write_text("extends:\n  - base.yaml\nnum_layers: 16\n")
    (here / "base.yaml").write_text("extends: [llama3.1_8B.yaml]\nnum_layers: 12\nffn_hidden_size: 8192\n")
    (here / "pre_trainer.yaml").write_text("train_iters: 1000\nweight_decay: 0.0\n")
    settings = imported(capsys)["settings"]
    assert (settings["model.layers"], settings["model.ffn_size"]) == (16, 8192)
    assert (settings["megatron.training.steps"], settings["megatron.training.weight_decay"]) == (7, 0.0)


def test_run_pretrain_takes_a_file_of_the_users_own_and_options_over_it(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "exp.yaml").write_text(MEGATRON)
    monkeypatch.setenv("EXP", "exp.yaml")
    words = ["--train_iters", "9", "--fp8=hybrid", "--gpu", "mi325x", "--dry-run", "--json"]
    assert main(["compat", "run_pretrain.sh", *words]) == 0
    job = json.loads(capsys.readouterr().out)
    assert (job["last_step"], job["precision"], job["gpu"]) == (9, "fp8", "mi325x")
    assert job["config"]["training.global_batch_size"] == 64
    monkeypatch.setenv("NNODES", "2")
    assert main(["compat", "run_pretrain.sh", *words]) == 0
    # Its batch is that of the whole job, as it was for Primus.
    assert json.loads(capsys.readouterr().out)["config"]["training.global_batch_size"] == 64


def test_run_pretrain_takes_a_recipe_by_name_or_file(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BACKEND", "megatron")
    monkeypatch.setenv("EXP", "llama3.1-8b")
    words = ["--train_iters", "9", "--gpu", "mi325x", "--dry-run", "--json"]
    assert main(["compat", "run_pretrain.sh", *words]) == 0
    job = json.loads(capsys.readouterr().out)
    assert (job["backend"], job["last_step"]) == ("megatron", 9)
    (here / "own.yaml").write_text("uses: [llama3.1-8b.yaml]\nname: own\n")
    monkeypatch.setenv("EXP", "own.yaml")
    assert main(["compat", "run_pretrain.sh", *words]) == 0
    assert json.loads(capsys.readouterr().out)["recipe"]["name"] == "own"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ("1e-5", 1e-5),
        ("1.0e-5", 1e-5),
        ("-3", -3),
        ("true", True),
        ("True", True),
        ("null", None),
        ("hybrid", "hybrid"),
        ("", ""),
        ("[a, b]", ["a", "b"]),
        ("{a: 1}", "{a: 1}"),
        ("2026-01-01", "2026-01-01"),
        ("[1", "[1"),
    ],
)
def test_a_value_means_what_was_typed(text: str, value: object) -> None:
    assert words.typed(text) == value
    assert type(words.typed(text)) is type(value)


@pytest.mark.parametrize(
    "value", [5, 1e-5, 1.5e300, -3, True, None, "hybrid", "", "a b", "true", "5", "1e-5", "a: b", ["a, b", 3], []]
)
def test_what_is_spelt_is_read_back(value: Any) -> None:
    assert words.typed(words.spelt(value)) == value
    assert type(words.typed(words.spelt(value))) is type(value)


def test_options_are_understood_in_all_their_forms() -> None:
    found = words.options(["--a", "1", "--b=2", "--training.c", "--d", "-5"])
    assert [(one.key, one.value) for one in found] == [("a", 1), ("b", 2), ("training.c", True), ("d", -5)]


def test_a_later_option_wins_and_keeps_one_word() -> None:
    twice = [Given(key="train_iters", value=number, where="x") for number in (5, 6)]
    assert translate("megatron", twice).words() == ("megatron.training.steps=6",)


def test_a_documented_path_is_understood_wherever_it_stands() -> None:
    there = documented("/workspace/Primus/examples/torchtatin/config/llama3_8b.toml")
    assert (there.recipe, there.backend, there.precision, there.gpu) == ("llama3-8b", "torchtitan", "bf16", None)
    mx = documented("examples/megatron/configs/MI355X/qwen2.5_7B-MXFP8-pretrain.yaml")
    assert (mx.recipe, mx.precision, mx.gpu) == ("qwen2.5-7b", "mxfp8", "mi355x")
    assert len(documented_paths()) > 200
    with pytest.raises(InputError, match="no document has a model 'llama9'"):
        documented("examples/megatron/configs/llama9-pretrain.yaml")


def test_what_the_presets_decide_is_imported(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "exp.yaml").write_text(MEGATRON + "      fp8: hybrid\n")
    document = imported(capsys)
    assert document["primus"] == "Primus v25.10"
    assert (
        document["settings"].items()
        >= {
            "megatron.training.seed": 1234,
            "megatron.training.weight_decay": 0.0,
            "megatron.training.beta2": 0.999,
            # Primus trains Llama 3.1 without its stretched positions, and scales FP8 by the past.
            "model.rope_scaling.kind": "none",
            "megatron.model.fp8_recipe": "delayed",
            "megatron.model.fp8_amax_history_len": 1024,
            "megatron.model.cross_entropy_loss_fusion": False,
        }.items()
    )
    effective = document["effective"]
    assert len(effective) > 400
    assert (effective["seed"], effective["moe_router_topk"], effective["sequence_parallel"]) == (1234, 2, 0)
    (here / "mine.yaml").write_text(document["text"])
    recipe = resolve("./mine.yaml", (), Choices(gpu="mi300x"))
    assert (recipe.seed, recipe.architecture.rope_scaling.kind) == (1234, "none")


def test_a_null_is_a_value(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = (
        "      recompute_granularity: null\n      recompute_method: null\n      recompute_num_layers: null\n"
        "      moe_router_dtype: null\n"
    )
    (here / "exp.yaml").write_text(MEGATRON.replace("llama3.1_8B", "mixtral_8x7B_v0.1") + overrides)
    settings = imported(capsys)["settings"]
    assert settings["megatron.model.moe_router_dtype"] is None
    assert settings["megatron.model.recompute_granularity"] is None
    # The recipe of 70 billion recomputes; here nothing is.
    (here / "exp.yaml").write_text(MEGATRON.replace("llama3.1_8B", "llama3.1_70B"))
    assert imported(capsys)["settings"]["megatron.model.recompute_granularity"] is None


def test_the_effective_configuration_is_printed_for_any_model(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "exp.yaml").write_text(MEGATRON.replace("llama3.1_8B", "grok2"))
    assert main(["import-exp", "exp.yaml"]) == 2
    assert "exp.yaml:10:5: there is no recipe for the model 'grok2'" in capsys.readouterr().err
    assert main(["import-exp", "exp.yaml", "--effective", "--json"]) == 0
    keys = json.loads(capsys.readouterr().out)["keys"]
    assert keys["router_logit_softcapping"] == {"value": 30.0, "where": "Primus v25.10, grok2.yaml"}
    assert keys["train_iters"] == {"value": 7, "where": "exp.yaml:13:7"}
    assert main(["import-exp", "exp.yaml", "--effective"]) == 0
    assert "seed: 1234  # Primus v25.10, pre_trainer.yaml\n" in capsys.readouterr().out


def test_the_version_is_the_newest_that_has_the_keys_or_the_one_that_is_named(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "exp.yaml").write_text(OLDER_TITAN)
    document = imported(capsys)
    assert document["primus"] == "Primus v25.9"
    assert document["settings"]["torchtitan.training.local_batch_size"] == 4
    assert imported(capsys, "--primus", "v25.9")["primus"] == "Primus v25.9"
    (here / "exp.yaml").write_text(OLDER_TITAN.replace("-fp8", ""))
    assert imported(capsys, "--primus", "v25.7")["primus"] == "Primus v25.7"
    assert main(["import-exp", "exp.yaml", "--primus", "v25.1"]) == 2
    said = capsys.readouterr().err
    assert "there is no version 'v25.1' of Primus here" in said and "there are: v25.7, v25.9, v25.10" in said


def test_torchtitans_model_is_the_one_of_its_flavor(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The preset of 405 billion in v25.7 says 8 billion.
    (here / "exp.yaml").write_text(OLDER_TITAN.replace("llama3.1_8B-fp8", "llama3.1_405B"))
    assert imported(capsys, "--primus", "v25.7")["recipe"] == "llama3.1-8b"
    assert imported(capsys, "--primus", "v25.9")["settings"]["model.layers"] == 126


def test_the_last_of_duplicate_keys_is_taken_and_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "exp.yaml").write_text(MEGATRON + "      seq_length: 2048\n")
    document = imported(capsys)
    assert document["settings"]["megatron.training.seq_len"] == 2048
    assert "exp.yaml:30:7: duplicate key 'seq_length': the last value is used, as by Primus" in document["left_out"]


def test_a_recipe_is_written_for_the_nodes_that_its_degrees_need(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = MEGATRON + "      tensor_model_parallel_size: 8\n      pipeline_model_parallel_size: 4\n"
    (here / "exp.yaml").write_text(wide.replace("llama3.1_8B", "llama3.1_70B").replace("MY_BATCH:64", "MY_BATCH:32"))
    assert imported(capsys)["nodes"] == 4
    document = imported(capsys, "--nodes", "8")
    (here / "mine.yaml").write_text(document["text"])
    for nodes, batch in ((None, 32), (8, 32), (16, 64)):
        recipe = resolve("./mine.yaml", (), Choices(gpu="mi300x", nodes=nodes))
        assert (recipe.get("nodes", int), recipe.global_batch) == (nodes or 8, batch)
    with pytest.raises(SystemExit, match="2"):
        main(["import-exp", "exp.yaml", "--nodes", "0"])
    assert "must be a whole number of at least 1" in capsys.readouterr().err


def test_what_cannot_train_is_refused_where_primus_has_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "exp.yaml").write_text(MEGATRON.replace("      lr_warmup_iters: 2\n", ""))
    assert main(["import-exp", "exp.yaml"]) == 2
    said = capsys.readouterr().err
    assert "Primus v25.10, pre_trainer.yaml: lr_warmup_iters: megatron.training.warmup_steps must be at most" in said


CHECKOUT = {
    "modules/megatron/base.yaml": "a: 1\nb: 2\nc: {d: 3, e: 4}\n",
    "modules/megatron/other.yaml": "b: 5\nf: 6\n",
    "models/megatron/llama3.1_8B.yaml": "m: ${NOT_SET:7}\n",
}


def test_a_checkout_of_primus_is_merged_as_its_version_merges(here: Path) -> None:
    configs = here / "primus" / "configs"
    files = {
        **CHECKOUT,
        "modules/megatron/pre_trainer.yaml": "extends: [base.yaml, other.yaml]\nc: {e: 8}\n",
        "modules/megatron/older.yaml": "bases: [base.yaml]\nincludes: [other.yaml]\na: 9\n",
    }
    for name, content in files.items():
        (configs / name).parent.mkdir(parents=True, exist_ok=True)
        (configs / name).write_text(content)
    (here / "examples").mkdir()
    path = here / "examples" / "exp.yaml"
    text = "modules: {pre_trainer: {framework: megatron, config: FILE, model: llama3.1_8B.yaml, overrides: {a: 0}}}"

    def keys(config: str) -> dict[str, object]:
        path.write_text(text.replace("FILE", config))
        return {key: one.value for key, one in merge(path, {}).keys.items()}

    # v25.7: what is below fills in, the first one first; and `extends` is a key like any other.
    assert keys("older.yaml") == {"a": 0, "b": 2, "c.d": 3, "c.e": 4, "f": 6, "m": 7}
    (here / "primus" / "core" / "config").mkdir(parents=True)
    (here / "primus" / "core" / "config" / "yaml_loader.py").touch()
    # Later: mappings are merged, the last of `extends` and then the file itself win.
    assert keys("pre_trainer.yaml") == {"a": 0, "b": 5, "c.d": 3, "c.e": 8, "f": 6, "m": 7}
    assert keys("older.yaml").keys() == {"a", "bases", "includes", "m"}


MEANT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"hidden_size": 4096, "num_attention_heads": 32}, {"model.ffn_size": 10880, "model.kv_heads": 32}),
    ({"group_query_attention": True, "num_query_groups": 8, "num_attention_heads": 32}, {"model.kv_heads": 8}),
    ({"num_query_groups": 8, "num_attention_heads": 32}, {"model.kv_heads": 32}),
    ({"kv_channels": 128, "hidden_size": 4096, "num_attention_heads": 32}, {"model.head_dim": 0}),
    ({"kv_channels": 256, "hidden_size": 4096, "num_attention_heads": 32}, {"model.head_dim": 256}),
    ({"sequence_parallel": True}, {"megatron.model.sequence_parallel": False}),
    ({"sequence_parallel": 1, "tensor_model_parallel_size": 2}, {"megatron.model.sequence_parallel": True}),
    ({"grad_reduce_in_bf16": True}, {"megatron.ddp.grad_reduce_in_fp32": False}),
    ({"accumulate_allreduce_grads_in_fp32": False}, {"megatron.ddp.grad_reduce_in_fp32": True}),
    ({"use_rope_scaling": True, "rope_scaling_factor": 8.0}, {"model.rope_scaling.kind": "llama3"}),
    ({"rotary_scaling_factor": 40}, {"model.rope_scaling.kind": "none", "model.mla.kv_lora_rank": 0}),
    (
        {"multi_latent_attention": True, "rotary_scaling_factor": 40, "qk_layernorm": True, "kv_lora_rank": 512},
        {"model.rope_scaling.kind": "yarn", "model.rope_scaling.factor": 40, "model.mla.kv_lora_rank": 512},
    ),
    (
        {"num_experts": 8, "ffn_hidden_size": 100, "moe_shared_expert_intermediate_size": 200, "num_layers": 4}
        | {"moe_layer_freq": "([0]*1+[1]*3)", "moe_router_score_function": "sigmoid"},
        {"model.moe.ffn_size": 100, "model.moe.shared_experts": 2, "model.moe.dense_layers": 1}
        | {"model.moe.normalize_top_k": True, "megatron.model.moe_router_enable_expert_bias": False},
    ),
    ({"num_experts": None, "moe_router_topk": 6}, {"model.moe.experts": 0}),
    ({"lr_decay_iters": 320000, "train_iters": 50}, {"megatron.training.decay_steps": 320000}),
    ({"lr_decay_iters": 50, "train_iters": 50}, {"megatron.training.decay_steps": 0}),
    (
        {"num_layers": 32, "pipeline_model_parallel_size": 4, "num_layers_per_virtual_pipeline_stage": 2},
        {"megatron.model.virtual_pipeline_model_parallel_size": 4},
    ),
    ({"recompute_activations": True}, {"megatron.model.recompute_granularity": "selective"}),
    (
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 0},
        {"megatron.model.recompute_granularity": None},
    ),
    (
        {"use_torch_fsdp2": True, "overlap_grad_reduce": True},
        {"megatron.torch_fsdp2": True, "megatron.ddp.overlap_grad_reduce": False},
    ),
    ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, {"megatron.model.fp8": "e4m3", "megatron.model.fp8_recipe": "mxfp8"}),
]


@pytest.mark.parametrize(("given", "meant"), MEANT)
def test_arguments_mean_what_megatron_makes_of_them(given: dict[str, Any], meant: dict[str, Any]) -> None:
    assert derived("megatron", given).settings.items() >= meant.items()


@pytest.mark.parametrize(
    "given",
    [
        {"mtp_num_layers": 1},
        {"position_embedding_type": "learned_absolute"},
        {"normalization": "LayerNorm"},
        {"hidden_dropout": 0.1},
        {"rotary_percent": 0.5},
        {"fp16": True},
        {"bf16": False},
        {"exp_avg_dtype": "bf16"},
        {"rope_type": "yarn"},
        {"num_experts": 8, "num_layers": 4, "moe_layer_freq": 2, "moe_ffn_hidden_size": 64},
        {"num_experts": 8, "num_layers": 4, "moe_shared_expert_intermediate_size": 96, "moe_ffn_hidden_size": 64},
    ],
)
def test_arguments_that_no_recipe_can_hold_are_refused_by_name(given: dict[str, Any]) -> None:
    assert derived("megatron", given).refused.keys() & given.keys()


@pytest.mark.parametrize("value", [0, -1, 2**70, 0.5, "", "x", [], [0] * 9, True, None])
@pytest.mark.parametrize(
    "key",
    [
        "num_experts", "moe_ffn_hidden_size", "ffn_hidden_size", "hidden_size", "num_attention_heads", "num_layers",
        "moe_layer_freq", "moe_shared_expert_intermediate_size", "pipeline_model_parallel_size",
        "num_layers_per_virtual_pipeline_stage", "tensor_model_parallel_size", "moe_router_topk", "kv_channels",
        "num_query_groups", "seq_length", "micro_batch_size", "global_batch_size", "q_lora_rank", "kv_lora_rank",
    ],
)  # fmt: skip
def test_no_value_of_an_argument_ends_in_a_traceback(key: str, value: Any) -> None:
    """Values that make no sense are refused here or by the checks of the recipe."""
    sizes = {"hidden_size": 1024, "num_layers": 4, "num_layers_per_virtual_pipeline_stage": 1}
    derived("megatron", {"num_experts": 8, **sizes, "multi_latent_attention": True, key: value})
    derived("megatron", {**sizes, key: value})


def test_experts_have_the_width_of_a_dense_layer_by_default() -> None:
    given = {"num_experts": 8, "hidden_size": 1024}
    assert derived("megatron", given).settings["model.moe.ffn_size"] == 2688
    assert "moe_ffn_hidden_size" in derived("megatron", {"num_experts": 8}).refused
    long = "([0]*1+[1]*" + "9" * 5000 + ")"
    assert (
        derived("megatron", {**given, "num_layers": 4, "moe_layer_freq": long}).settings["model.moe.dense_layers"] == 1
    )


def test_the_presets_of_every_documented_version_are_there() -> None:
    assert known_versions() == ["v25.7", "v25.9", "v25.10"]
    for version in known_versions():
        megatron = presets("megatron", version)
        assert len(megatron.layer("modules", "pre_trainer.yaml", "")) > 250
        assert megatron.layer("models", "llama3.1_8B.yaml", "")["hidden_size"] == 4096
        assert presets("torchtitan", version).layer("models", "llama3.1_8B.yaml", "")["model.flavor"] == "8B"
    with pytest.raises(InputError, match=r"has no model 'lama3\.1_8B' for megatron; did you mean 'llama3\.1_8B'"):
        presets("megatron").layer("models", "lama3.1_8B.yaml", "")


def test_the_measured_examples_are_merged_as_primus_merges_them() -> None:
    file = Path(__file__).parents[3] / "benchmarks" / "results" / "primus-import.json"
    measured = json.loads(file.read_text(encoding="utf-8"))
    assert [row["version"] for row in measured["versions"]] == known_versions()
    for row in measured["versions"]:
        assert row["share"] >= 0.95 and row["trained_otherwise_in_silence"] == 0


def test_primus_turbo_of_an_experiment_is_asked_for_by_name(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    choices = MEGATRON.replace(
        "use_turbo_attention: true", "enable_primus_turbo: true\n      use_turbo_attention: true"
    )
    (here / "exp.yaml").write_text(choices)
    assert main(["import-exp", "exp.yaml", "--out", "mine.yaml"]) == 0
    capsys.readouterr()
    assert main(["show", "mine.yaml", "--gpu", "mi300x", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["turbo"]["value"] == "turbo-attention"
    # A proxy trains without it.
    assert main(["show", "mine.yaml", "--gpu", "mi300x", "--proxy", "--json"]) == 0
    assert "turbo" not in json.loads(capsys.readouterr().out)["settings"]
