"""Experiment files with presets at hand. ``fixtures/primus`` is a small checkout of our own."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from primus_images.cli.main import main
from primus_images.errors import InputError, alike
from primus_images.recipes.architecture import architecture
from primus_images.recipes.experiments import models
from primus_images.recipes.experiments.presets import Argument, read_experiment, typed
from primus_images.recipes.experiments.source import import_experiment
from primus_images.recipes.experiments.translate import keys, megatron_arguments, translate
from primus_images.recipes.published import another_model
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.resolve import resolve
from primus_images.recipes.rules.stages import layers_of
from primus_images.recipes.setting import Choices
from primus_images.training.backends.torchtitan import render
from primus_images.yamlfile import section
from tables import FIXTURES

PRIMUS = FIXTURES / "primus"
LLAMA = PRIMUS / "experiments" / "llama.yaml"
QWEN = PRIMUS / "experiments" / "qwen.yaml"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("MY_", "PRIMUS_", "NNODES")):
            monkeypatch.delenv(name)
    for name in ("PRIMUS_ROOT", "PRIMUS_ALLOW_UNMAPPED"):
        # A command sets them for its own process.
        monkeypatch.setenv(name, "")


def resolved(path: Path = LLAMA, **choices: Any) -> Recipe:
    return resolve(str(path), (), Choices(**{"gpu": "mi300x", **choices}))


def test_a_file_with_its_presets_is_what_primus_merges() -> None:
    recipe = resolved()
    values = {key: setting.value for key, setting in recipe.settings.items()}
    expected = {
        "megatron.training.steps": 50,  # the file
        "megatron.training.micro_batch_size": 2,  # the last of two equal keys
        "megatron.training.lr": 2e-5,  # the preset of the trainer
        "megatron.training.beta2": 0.999,
        "megatron.training.seed": 1234,  # a preset that it extends
        "megatron.training.seq_len": 8192,
        "model.layers": 32,
        "model.rope_theta": 500000,
        "model.norm_eps": 1e-6,
        "model.rope_scaling.kind": "none",
        "model.vocab_size": 128256,
    }
    assert {key: values[key] for key in expected} == expected
    assert recipe.architecture.family == "llama3"
    # What only names kernels or files, or is a default, is no setting.
    assert not [key for key in values if "suggested" in key or "align" in key]
    assert recipe.settings["megatron.training.steps"].origin.startswith(f"{LLAMA}:9:")


def test_the_figures_of_the_file_win_and_the_run_says_so_once() -> None:
    recipe = resolved()
    assert another_model(recipe) == (
        "another model than meta-llama/Llama-3.1-8B: norm_eps 1.0e-06, not 1.0e-05; "
        "rope_scaling.kind none, not llama3"
    )
    (sentence,) = recipe.says
    assert "wandb_project" in sentence


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gpt_oss", "it keeps its layers in bfloat16"),
        ("flux", "torchtitan's flux is not computed here"),
    ],
)
def test_models_of_torchtitan_that_are_not_here_have_a_reason(name: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        models.of_flavor(name, "20b", "x")


@pytest.mark.parametrize(
    ("flavor", "sparse", "kind"), [("17bx16e", 48, "llama3"), ("17bx128e", 24, "none")]
)
def test_torchtitan_s_llama_4_has_its_own_widths(flavor: str, sparse: int, kind: str) -> None:
    fields = models.of_flavor("llama4", flavor, "x")
    model = architecture(fields)
    assert (model.sparse_layers, model.rope_scaling.kind) == (sparse, kind)
    assert model.moe.weighted_inputs
    values = render.model_arguments(model, "bf16")
    # As torchtitan 0.2.2 computes them (models/llama4/model/model.py).
    dense = int(values["ffn_dim_multiplier"] * int(2 * 4 * model.hidden_size / 3))
    expert = int(dense / (values["moe_args"]["top_k"] + values["moe_args"]["num_shared_experts"]))
    assert (dense, expert, values["multiple_of"]) == (model.ffn_size, model.moe.ffn_size, 1)
    assert values["moe_args"]["score_before_experts"]
    step = values["interleave_moe_layer_step"]
    theirs = [(layer + 1) % step == 0 for layer in range(model.layers)]
    assert theirs == [model.is_sparse(layer) for layer in range(model.layers)]
    small = models.proxy(fields)
    parts = 1 + model.moe.shared_experts
    assert small["ffn_size"] == int(str(small["moe.ffn_size"])) * parts


def test_what_decides_about_memory_reaches_megatron() -> None:
    arguments = [
        Argument(key="fp8", value="hybrid", where="x:1:1"),
        Argument(key="no_fp8_weight_transpose_cache", value=True, where="x:2:1"),
        Argument(key="cross_entropy_loss_fusion", value=True, where="x:3:1"),
        Argument(key="cross_entropy_fusion_impl", value="te", where="x:4:1"),
        Argument(key="main_grads_dtype", value="bf16", where="x:5:1"),
    ]
    settings = translate("megatron", arguments).settings
    assert settings["megatron.model.disable_parameter_transpose_cache"] is True
    assert settings["megatron.model.cross_entropy_fusion_impl"] == "te"
    assert settings["megatron.ddp.grad_reduce_in_fp32"] is False
    # On a CPU, PyTorch computes the loss: the proxy has its own settings.
    small = resolved(gpu="cpu", proxy=True)
    assert small.find("megatron.model.cross_entropy_fusion_impl", "native") == "native"


@pytest.mark.parametrize("nodes", [1, 2, 8])
def test_the_batch_is_that_of_the_whole_job_on_any_number_of_nodes(nodes: int) -> None:
    assert resolved(nodes=nodes).global_batch == 128


def test_a_layout_of_several_nodes_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolved().get("nodes", int) == 1
    monkeypatch.setenv("MY_STAGES", "16")
    recipe = resolved()
    assert (recipe.get("nodes", int), recipe.global_batch) == (2, 128)


@pytest.mark.parametrize(
    ("stages", "first", "last"), [("1", None, None), ("8", None, None), ("3", 11, 10), ("5", 6, 5)]
)
def test_the_outer_stages_get_fewer_layers_only_where_stages_cannot_be_equal(
    stages: str, first: int | None, last: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_STAGES", stages)
    settings = import_experiment(LLAMA).done.settings
    prefix = "megatron.model.num_layers_in_"
    assert settings.get(f"{prefix}first_pipeline_stage") == first
    assert settings.get(f"{prefix}last_pipeline_stage") == last


def test_what_fsdp2_excludes_is_left_out_wherever_it_stands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_SHARDING", "true")
    recipe = resolved()
    assert recipe.settings["megatron.torch_fsdp2"].value is True
    assert recipe.settings["megatron.ddp.overlap_grad_reduce"].value is False
    assert "overlap_grad_reduce" in import_experiment(LLAMA).done.left_out


@pytest.mark.parametrize(
    ("fp8", "precision", "form"),
    [("null", "bf16", None), ("hybrid", "fp8", "hybrid"), ("e4m3", "fp8", "e4m3")],
)
def test_the_precision_is_that_of_the_file(
    fp8: str, precision: str, form: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_FP8", fp8)
    recipe = resolved()
    assert recipe.precision == precision
    assert recipe.section("megatron").get("model.fp8") == form
    if form:
        assert recipe.settings["megatron.model.fp8_recipe"].value == "delayed"


def test_a_model_that_no_recipe_has_is_of_the_family_that_has_its_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_MODEL", "experts")
    model = resolved().architecture
    assert model.family == "moe"
    assert (model.moe.experts, model.moe.dense_layers, model.moe.shared_experts) == (16, 2, 2)
    assert (model.qk_norm, model.head_dim, model.kv_heads, model.vocab_size) == (
        True,
        128,
        4,
        102400,
    )
    small = resolved(gpu="cpu", proxy=True).architecture
    assert (small.moe.experts, small.moe.dense_layers, small.heads, small.kv_heads) == (8, 1, 8, 2)
    assert small.qk_norm and small.moe.shared_experts == 2


def test_a_long_run_keeps_the_schedule_of_the_presets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIMUS_ROOT", str(PRIMUS))
    long = tmp_path / "long.yaml"
    long.write_text(QWEN.read_text().replace(", steps: 15", ""))
    recipe = resolved(long)
    schedule = recipe.section("torchtitan.lr_scheduler")
    assert (recipe.steps, schedule["warmup_steps"], schedule["min_lr_factor"]) == (10000, 200, 0.0)


def test_torchtitan_s_flavor_is_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = resolved(QWEN)
    model = recipe.architecture
    assert (model.family, model.layers, model.hidden_size, model.tied_embeddings) == (
        "qwen3",
        4,
        2048,
        True,
    )
    assert (recipe.precision, recipe.local_batch, recipe.steps) == ("fp8", 4, 15)
    # torchtitan ends a longer warm-up with the run, and saves nothing unless asked to.
    assert recipe.settings["torchtitan.lr_scheduler.warmup_steps"].value == 15
    assert recipe.find("torchtitan.checkpoint.interval", 0) == 0
    assert any("warm-up of 200 steps" in sentence for sentence in recipe.says)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"MY_MODEL": "hybrid"}, "a Mamba hybrid: no family here computes it"),
        ({"MY_MODEL": "none"}, "there is no preset none.yaml in"),
        ({"MY_MODEL": "../x"}, "there is no preset ../x.yaml in"),
    ],
)
def test_what_is_not_here_is_refused_as_what_it_is(
    changed: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in changed.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError) as caught:
        resolved()
    assert caught.value.message.startswith(says)
    assert "did you mean" not in str(caught.value)


def test_all_doors_give_the_same_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    imported = tmp_path / "mine.yaml"
    assert main(["import-exp", str(LLAMA), "--out", str(imported)]) == 0
    monkeypatch.setenv("EXP", str(LLAMA))
    jobs = []
    for words in (
        ["train", str(LLAMA)],
        ["train", str(imported)],
        ["compat", "run_pretrain.sh"],
    ):
        capsys.readouterr()
        assert main([*words, "--gpu", "mi325x", "--dry-run", "--json"]) == 0
        jobs.append(json.loads(capsys.readouterr().out))
    first, *others = jobs
    for job in others:
        assert job["config"] == first["config"]
        assert job["model"] | {"hf_repo": ""} == first["model"] | {"hf_repo": ""}


def test_presets_are_looked_for_where_the_user_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = tmp_path / "exp.yaml"
    shutil.copy(LLAMA, alone)
    assert read_experiment(alone, {}).root is None
    assert read_experiment(alone, {"PRIMUS_ROOT": str(PRIMUS)}).root == PRIMUS
    monkeypatch.setenv("MY_MODEL", "experts")
    assert main(["show", str(alone), "--gpu", "mi300x"]) == 2
    assert "--primus-root DIR" in capsys.readouterr().err
    assert main(["show", str(alone), "--gpu", "mi300x", "--primus-root", str(PRIMUS)]) == 0
    monkeypatch.setenv("PRIMUS_ROOT", str(tmp_path))
    with pytest.raises(InputError, match="there is no primus/configs"):
        read_experiment(alone)


def test_every_key_has_an_answer() -> None:
    """A mapped key, one without effect, one of Megatron-LM at its default, and two that are not."""
    values = {
        "train_iters": 5,
        "wandb_project": "mine",
        "rampup_batch_size": None,
        "exit_interval": None,
        "adlr_autoresume_interval": 1000,
        "adlr_autoresume": True,
        "trian_iters": 5,
        "xyzzy": 5,
    }
    arguments = [Argument(key=key, value=value, where=key) for key, value in values.items()]
    done = translate("megatron", arguments)
    assert done.settings == {"megatron.training.steps": 5}
    assert set(done.left_out) == {"wandb_project", "adlr_autoresume_interval"}
    reasons = {argument.key: why for argument, why in done.unmapped}
    assert set(reasons) == {"adlr_autoresume", "trian_iters", "xyzzy"}
    assert "not supported here, except at its default, false" in reasons["adlr_autoresume"]
    assert reasons["trian_iters"].endswith("did you mean 'train_iters'?")
    assert "did you mean" not in reasons["xyzzy"]
    assert len(megatron_arguments()) > 400


@pytest.mark.parametrize(
    ("word", "meant"),
    [("qwen3_8B", False), ("llama3.1_8b", True), ("lama3.1_8B", True), ("grok1", False)],
)
def test_a_name_with_other_digits_is_another_thing(word: str, meant: bool) -> None:
    assert bool(alike(word, ["qwen2.5_7B", "llama3.1_8B", "llama3.1_70B"])) is meant


def test_an_entry_says_why_it_has_no_effect() -> None:
    for backend in ("megatron", "torchtitan"):
        for key, entry in keys(backend).items():
            assert entry.to or entry.choice or entry.because, key


@pytest.mark.parametrize(
    ("pattern", "layers", "dense", "every"),
    [
        (1, 4, 0, 1),
        ("1", 4, 0, 1),
        (2, 4, 0, 2),
        ("([0]*1+[1]*3)", 4, 1, 1),
        ("[0]*2+[1]", 3, 2, 1),
        ([0, 1, 1], 3, 1, 1),
        ("[0]*1+([1]+[0]*2)*2", 7, 1, 3),
    ],
)
def test_layers_with_experts_are_those_of_the_pattern(
    pattern: Any, layers: int, dense: int, every: int
) -> None:
    arguments = {"moe_layer_freq": Argument(key="moe_layer_freq", value=pattern, where="x")}
    places = models._places_of_experts(arguments, layers)
    assert places == {"moe.dense_layers": dense, "moe.every": every}


@pytest.mark.parametrize(
    "pattern",
    ["[1]*2+[0]+[1]", "([0]*1+[1]*9)", "[0]*9999999", "__import__('os')", "(((", "[2]", {}],
)
def test_a_pattern_of_layers_that_is_none_is_refused(pattern: Any) -> None:
    arguments = {"moe_layer_freq": Argument(key="moe_layer_freq", value=pattern, where="x")}
    with pytest.raises(InputError):
        models._places_of_experts(arguments, 4)


def _megatron_arguments(**values: Any) -> dict[str, Argument]:
    return {key: Argument(key=key, value=value, where="x") for key, value in values.items()}


_EXPERTS = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "ffn_hidden_size": 96,
    "num_experts": 8,
}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, {"top_k": 2, "ffn_size": 96, "shared_experts": 0, "normalize_top_k": True}),
        ({"moe_ffn_hidden_size": 32}, {"ffn_size": 32, "shared_experts": 0}),
        (
            {"moe_ffn_hidden_size": 32, "moe_shared_expert_intermediate_size": 64},
            {"shared_experts": 2},
        ),
        ({"moe_router_pre_softmax": True}, {"normalize_top_k": False}),
        ({"moe_aux_loss_coeff": 0.5}, {"auxiliary_loss": 0.5}),
        (
            {"moe_aux_loss_coeff": 0.5, "moe_router_load_balancing_type": "none"},
            {"auxiliary_loss": 0.0},
        ),
        (
            {
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_router_pre_softmax": True,
            },
            {"score": "sigmoid", "normalize_top_k": True},
        ),
    ],
)
def test_experts_are_as_megatron_reads_its_arguments(
    changed: dict[str, Any], expected: dict[str, Any]
) -> None:
    model = models.of_megatron(_megatron_arguments(**_EXPERTS, **changed))
    assert {key: model[f"moe.{key}"] for key in expected} == expected


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"moe_shared_expert_intermediate_size": 50}, "no multiple of experts of 96"),
        ({"moe_router_enable_expert_bias": True}, "softmax scores has no bias"),
        (
            {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": False},
            "sigmoid scores needs its bias",
        ),
        ({"num_experts": "8"}, "num_experts must be"),
    ],
)
def test_experts_that_no_field_expresses_are_refused(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        models.of_megatron(_megatron_arguments(**{**_EXPERTS, **changed}))


@pytest.mark.parametrize(
    ("layout", "layers"),
    [
        ("Et*2|t*3|t*3|t*2,L", [2, 3, 3, 2]),
        ("E|ttt|t*2L", [0, 3, 2]),
        ("t", [1]),
        ("Et*2|x*3", []),
        ("t*", []),
        ("", [0]),
    ],
)
def test_the_layers_of_a_layout_are_counted(layout: str, layers: list[int]) -> None:
    assert layers_of(layout) == layers


def test_a_layout_that_does_not_fit_the_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_STAGES", "4")
    fine = "Et*8|t*8|t*8|t*8,L"
    key = "megatron.model.pipeline_model_parallel_layout"
    choices = Choices(gpu="mi300x")
    assert resolve(str(LLAMA), [f"{key}={fine}"], choices).settings[key].value == fine
    for layout, says in (
        ("Et*8|t*8|t*8|t*9,L", "it has 33 layers, and the model 32"),
        ("Et*16|t*8|t*8L", "4 stages cannot have equally many of 3 chunks"),
        ("x", "is no list of stages"),
    ):
        with pytest.raises(InputError, match=says):
            resolve(str(LLAMA), [f"{key}={layout}"], choices)


def test_a_warm_up_may_be_longer_than_the_run_if_the_schedule_is() -> None:
    long = ["megatron.training.warmup_steps=200", "megatron.training.decay_steps=5000"]
    choices = Choices(gpu="mi300x")
    recipe = resolve(str(LLAMA), long, choices)
    assert recipe.settings["megatron.training.warmup_steps"].value == 200
    with pytest.raises(InputError, match=r"warmup_steps must be at most megatron\.training\.steps"):
        resolve(str(LLAMA), [*long[:1], "megatron.training.decay_steps=100"], choices)


@pytest.mark.parametrize("name", ["llama3.1-8b", "deepseek-v3", "qwen3-30b-a3b", "mixtral-8x7b"])
def test_a_model_survives_the_way_to_megatron_s_arguments_and_back(name: str) -> None:
    recipe = resolve(name, (), Choices(backend="megatron", gpu="mi355x"))
    values = models.of_architecture(recipe.architecture)
    arguments = {}
    for key, value in values.items():
        arguments[key] = Argument(key=key, value=value, where="x", level="model")
    model = models.of_megatron(arguments)
    written = section({key: one.value for key, one in recipe.settings.items()}, "model")
    for key in model.keys() & written.keys() - {"head_dim"}:
        assert model[key] == written[key], key


def written(tmp_path: Path, overrides: str = "", head: str = "", model: str = "mine.yaml") -> Path:
    """Write a checkout with our presets and an experiment, whose model is ``mine.yaml``."""
    checkout = tmp_path / "checkout"
    shutil.copytree(PRIMUS, checkout)
    (checkout / "primus/configs/models/megatron/mine.yaml").write_text("extends: [base.yaml]\n")
    module = f"    framework: megatron\n    config: pre_trainer.yaml\n    model: {model}\n"
    file = checkout / "mine.yaml"
    file.write_text(f"{head}modules:\n  pre_trainer:\n{module}    overrides:\n{overrides}")
    return file


def preset(file: Path, name: str, text: str) -> Path:
    """Write a preset of a model beside ``mine.yaml``, and return its file."""
    path = file.parent / "primus/configs/models/megatron" / name
    path.write_text(text)
    return path


def test_presets_that_extend_each_other_in_a_circle_are_named(tmp_path: Path) -> None:
    file = written(tmp_path)
    preset(file, "mine.yaml", "extends: [other.yaml]\n")
    other = preset(file, "other.yaml", "\nextends: mine.yaml\n")
    with pytest.raises(InputError, match=r"mine\.yaml → other\.yaml → mine\.yaml") as error:
        read_experiment(file, {})
    assert error.value.where == f"{other}:2:1"


def test_a_long_chain_of_presets_is_read(tmp_path: Path) -> None:
    file = written(tmp_path)
    preset(file, "step0.yaml", "num_layers: 30\n")
    for number in range(1, 40):
        preset(file, f"step{number}.yaml", f"extends: step{number - 1}.yaml\n")
    preset(file, "mine.yaml", "extends: step39.yaml\n")
    assert read_experiment(file, {}).arguments["num_layers"].value == 30


@pytest.mark.timeout(20)
def test_presets_that_share_a_base_many_times_are_read_once(tmp_path: Path) -> None:
    file = written(tmp_path)
    preset(file, "wide12.yaml", "num_layers: 30\n")
    for number in range(12):
        names = ", ".join([f"wide{number + 1}.yaml"] * 8)
        preset(file, f"wide{number}.yaml", f"extends: [{names}]\n")
    preset(file, "mine.yaml", "extends: wide0.yaml\n")
    assert read_experiment(file, {}).arguments["num_layers"].value == 30


def test_an_experiment_extends_another(tmp_path: Path) -> None:
    file = written(tmp_path, "      train_iters: 9\n      lr: 1.0e-3\n")
    more = file.with_name("more.yaml")
    more.write_text("extends: mine.yaml\nmodules: {pre_trainer: {overrides: {train_iters: 7}}}\n")
    experiment = read_experiment(more, {})
    assert experiment.arguments["train_iters"].value == 7
    assert experiment.arguments["lr"].value == 1e-3
    assert experiment.arguments["lr"].where.startswith(f"{file}:")
    assert experiment.places["model"].startswith(f"{file}:")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("framework: megatron", "framework: megatorn", "did you mean 'megatron'"),
        ("framework: megatron", "framework: [megatron]", "framework must be text"),
        ("model: mine.yaml", "model: 7", "model must be text, not 7"),
        ("model: mine.yaml", "model: mime.yaml", "did you mean 'mine.yaml'"),
        ("modules:", "overrides: {lr: 1}\nmodules:", "overrides stands outside of modules"),
        ("modules:", "extends: {a: b}\nmodules:", "the name of a file, or a list of names"),
    ],
)
def test_a_word_that_is_wrong_has_its_own_sentence(
    tmp_path: Path, old: str, new: str, says: str
) -> None:
    file = written(tmp_path)
    file.write_text(file.read_text().replace(old, new, 1))
    with pytest.raises(InputError) as error:
        import_experiment(file)
    assert says in error.value.message
    assert str(error.value.where).startswith(f"{file}:")


def test_what_nothing_reads_is_said(tmp_path: Path) -> None:
    file = tmp_path / "llama.yaml"
    text = LLAMA.read_text() + "  post_trainer: {framework: megatron}\nmatchers: 1\n"
    file.write_text(text)
    says = import_experiment(file, {"PRIMUS_ROOT": str(PRIMUS)}).says
    assert "nothing reads matchers, modules.post_trainer" in says


def test_a_wrong_size_of_the_model_has_the_place_of_its_key(tmp_path: Path) -> None:
    lines = LLAMA.read_text().splitlines()
    file = tmp_path / "llama.yaml"
    file.write_text("\n".join([*lines, "      num_layers: 0", ""]))
    shutil.copytree(PRIMUS / "primus", tmp_path / "primus")
    with pytest.raises(InputError, match=r"model\.layers must be at least 1") as error:
        resolved(file)
    assert error.value.where == f"{file}:{len(lines) + 1}:7"


def test_each_command_leaves_out_what_no_recipe_can_express(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "llama.yaml"
    file.write_text(LLAMA.read_text() + "      no_such_key: 7\n")
    words = ["show", str(file), "--gpu", "mi300x", "--primus-root", str(PRIMUS)]
    assert main(words) == 2
    assert "--allow-unmapped" in capsys.readouterr().err
    assert main([*words, "--allow-unmapped"]) == 0
    assert "no_such_key is left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "width"),
    [
        ({}, 256),
        ({"swiglu": True}, 128),
        ({"swiglu": True, "hidden_size": 128}, 320),
        ({"swiglu": True, "hidden_size": 96}, 256),
        ({"ffn_hidden_size": 100}, 100),
    ],
)
def test_without_a_width_megatron_has_its_own(changed: dict[str, Any], width: int) -> None:
    values = {"hidden_size": 64, "num_attention_heads": 4, "num_layers": 2, **changed}
    arguments = {
        key: Argument(key=key, value=value, where="here", level="model")
        for key, value in values.items()
    }
    assert models.of_megatron(arguments)["ffn_size"] == width


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", ""),
        ("8", 8),
        ("1e-5", 1e-5),
        ("true", True),
        ("[1, a]", [1, "a"]),
        ("/data/my text", "/data/my text"),
        ("{a: 1}", "{a: 1}"),
        ("a: b: c", "a: b: c"),
    ],
)
def test_a_variable_is_a_scalar_a_list_of_scalars_or_text(text: str, value: object) -> None:
    assert typed(text) == value
