"""Each stage of the resolution, and the rules below it, at their edges."""

import json
from pathlib import Path

import pytest

from primus_images.errors import InputError
from primus_images.recipes import load
from primus_images.recipes.assets import vocabulary
from primus_images.recipes.family import described, family
from primus_images.recipes.overrides import choices_among
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.resolve import Place, changed, resolve
from primus_images.recipes.rules import USABLE, predict
from primus_images.recipes.rules.loop import copies_in_eight
from primus_images.recipes.setting import Choices, outside
from primus_images.recipes.tensors import header

GIB = 2**30


def llama(*words: str, **choices: object) -> Recipe:
    return resolve("llama3.1-8b", words, Choices(**{"gpu": "mi300x", **choices}))  # type: ignore[arg-type]


def test_a_case_for_several_nodes_leaves_the_batch_to_their_number_unless_it_sets_it(
    tmp_path: Path,
) -> None:
    case = (
        "uses: [llama3.1-8b.yaml]\nname: mine\ndescription: mine\ncases: [{when: {nodes: 2}, %s}]\n"
    )
    batches = []
    for setting in ("megatron.training.max_norm: 2.0", "megatron.training.global_batch_size: 384"):
        (file := tmp_path / "mine.yaml").write_text(case % setting)
        choices = Choices(backend="megatron", gpu="mi300x", nodes=2)
        batches.append(resolve(str(file), (), choices).global_batch)
    assert batches == [256, 384]


def test_a_run_as_long_as_its_warm_up_keeps_it() -> None:
    key = "torchtitan.lr_scheduler.warmup_steps"
    steps = llama().settings[key].value
    assert "at most" not in llama(f"steps={steps}").settings[key].origin


def test_a_value_fits_only_what_training_can_use_of_the_memory() -> None:
    choices = Choices(gpu="h200", precision="bf16")
    words = ["ranks=2", "model.layers=12"]
    peak = predict(resolve("llama3.1-8b", [*words, "local_batch=4"], choices)).peak
    batches = []
    for memory in (peak / USABLE * 1.001, peak * 1.001):
        place = Place(memory=memory)
        batches.append(resolve("llama3.1-8b", words, choices, place=place).local_batch)
    assert batches[0] == 4
    assert batches[1] < 4


def test_a_list_of_batches_leaves_out_those_that_accumulation_does_not_divide() -> None:
    recipe = llama("validation.accumulation=2", backend="finetune", mode="lora")
    assert recipe.local_batch % 2 == 0


def test_a_changed_recipe_keeps_its_other_words_in_their_order() -> None:
    recipe = llama("steps=7", "tp=2", "seed=3")
    other = changed(recipe, ["tp=4"])
    assert (other.steps, other.degree("tp"), other.get("torchtitan.debug.seed", int)) == (7, 4, 3)
    assert other.overrides == (
        "torchtitan.training.steps=7",
        "torchtitan.parallelism.tensor_parallel_degree=4",
        "torchtitan.debug.seed=3",
    )
    assert changed(recipe, [], Choices(gpu="mi355x")).gpu == "mi355x"


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Llama 3.1's config.json with few layers, for a CPU."""
    published = load.folder() / "published/meta-llama--Llama-3.1-8B.json"
    facts = json.loads(published.read_text())
    (tmp_path / "weights").mkdir()
    small = {**facts, "num_hidden_layers": 2, "max_position_embeddings": 512}
    (tmp_path / "weights/config.json").write_text(json.dumps(small))
    return tmp_path / "weights"


def test_weights_bring_their_sizes_and_shorten_sequences(weights: Path) -> None:
    words = [f"weights={weights}"]
    choices = Choices(backend="finetune", mode="full", gpu="cpu", proxy=False)
    recipe = resolve("llama3.1-8b", words, choices)
    assert (recipe.architecture.layers, recipe.seq_len) == (2, 512)
    assert recipe.settings["finetune.training.seq_len"].origin.startswith(str(weights))
    ranks = recipe.settings["ranks"]
    assert (ranks.value, ranks.origin) == (1, "one process on a CPU")
    assert resolve("llama3.1-8b", [*words, "ranks=2"], choices).get("ranks", int) == 2
    with pytest.raises(InputError, match=r"model\.layers is 3, and the weights have 2"):
        resolve("llama3.1-8b", [*words, "model.layers=3"], choices)


def test_weights_with_a_longer_context_leave_the_length_of_the_recipe(weights: Path) -> None:
    config = json.loads((weights / "config.json").read_text())
    long = json.dumps({**config, "max_position_embeddings": 131072})
    (weights / "config.json").write_text(long)
    choices = Choices(backend="finetune", mode="full", gpu="mi300x")
    recipe = resolve("llama3.1-8b", [f"weights={weights}"], choices)
    assert recipe.seq_len < 131072


def test_adapters_are_set_in_lora_only() -> None:
    choices = {"backend": "finetune", "mode": "lora"}
    assert llama("lora.rank=4", **choices).get("finetune.lora.rank", int) == 4
    with pytest.raises(InputError, match=r"lora\.rank has no effect in another mode than LoRA"):
        llama("lora.rank=4", backend="finetune", mode="full")


def test_a_home_folder_is_read_after_the_equals_sign() -> None:
    _, words = choices_among(Choices(), ["corpus=~/text", "tokenizer=~name"])
    assert words == [f"corpus={Path.home()}/text", "tokenizer=~name"]


@pytest.mark.parametrize(
    ("tokens", "added", "rows"),
    [({"a": 0, "b": 5}, [], 6), ({"a": 0, "b": 5}, [{"id": 7}], 8), (["a", "b", "c"], None, 3)],
)
def test_a_vocabulary_is_as_large_as_its_last_token(
    tmp_path: Path, tokens: object, added: object, rows: int
) -> None:
    assert vocabulary(tmp_path) == 0
    content = {"model": {"vocab": tokens}, "added_tokens": added}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert vocabulary(tmp_path) == rows


def test_layers_with_windows_are_a_pattern_or_none_that_a_field_takes() -> None:
    local, full = "sliding_attention", "full_attention"
    for layers, pattern in (
        ([local, local, full] * 2, 3),
        ([local] * 5, 6),  # the first of transformers' own pattern
        ([full, local, local], "[full_attention, sliding_attention, sliding_attention]"),
    ):
        config = {"layer_types": layers, "sliding_window": 8}
        rows = {key: value for key, _, value in described(family("gemma3"), config, Path("c"))}
        assert rows["window_pattern"] == pattern


def test_experts_are_shared_among_the_ranks_of_one_stage() -> None:
    choices = Choices(backend="megatron", gpu="mi300x", nodes=1)
    message = r"8 ranks are not divisible by EP = 8 × PP = 2"
    with pytest.raises(InputError, match=message) as refused:
        resolve("mixtral-8x7b", ["pp=2", "ep=8", "tp=1"], choices)
    assert refused.value.hint == "ep=4 or --nodes 2"


def test_context_parallel_ranks_take_two_parts_of_a_sequence() -> None:
    with pytest.raises(InputError, match="8190 tokens are not divisible by the 4 parts"):
        llama("cp=2", "seq_len=8190")
    assert llama("cp=2", "seq_len=8188", "global_batch=-1").seq_len == 8188


@pytest.mark.parametrize(
    ("bounds", "value", "reason"),
    [
        ("(0, 1]", 0, "must be greater than 0, not 0"),
        ("(0, 1]", 1, None),
        ("[0, 1)", 1, "must be less than 1, not 1"),
        ("[0, 1)", 0, None),
        ("-1 | [1, inf)", 0, "must be -1 or at least 1, not 0"),
        ("-1 | [1, inf)", -1, None),
        ("[0, 0.5]", 0.6, "must be at most 0.5, not 0.6"),
    ],
)
def test_an_end_of_an_interval_is_open_or_closed(
    bounds: str, value: float, reason: str | None
) -> None:
    objection = outside(bounds, value)
    assert (objection and objection[0]) == reason


@pytest.mark.parametrize(("shape", "is_damaged"), [([3], True), ([4], False), ([5], True)])
def test_a_tensor_has_the_bytes_of_its_shape(
    tmp_path: Path, shape: list[int], is_damaged: bool
) -> None:
    text = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 16]}}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 16)
    if is_damaged:
        with pytest.raises(InputError, match="damaged"):
            header(file)
    else:
        assert header(file).shapes == {"a": (4,)}


def test_memory_that_is_used_twice_is_at_most_that_of_gradients() -> None:
    for batch in (1, 2, 4, 8):
        recipe = llama("ranks=1", "model.layers=2", f"local_batch={batch}", "global_batch=-1")
        memory = predict(recipe)
        assert 0 < memory.reused <= memory.gradients


def test_the_distributed_optimizer_of_megatron_is_shared_by_all_ranks() -> None:
    shared, copied = (
        predict(llama(f"ddp.use_distributed_optimizer={word}", "tp=2", backend="megatron"))
        for word in ("true", "false")
    )
    assert copied.optimizer == 4 * shared.optimizer
    assert copied.weights == shared.weights


def test_adapters_keep_the_inputs_of_layers_in_the_computing_precision() -> None:
    choices = {"backend": "finetune", "mode": "lora"}
    words = ("turbo=off", "local_batch=1", "training.recompute=none")
    eight = predict(llama(*words, precision="fp8", **choices))
    plain = predict(llama(*words, precision="bf16", **choices))
    model = llama(**choices).architecture
    assert eight.activations - plain.activations == pytest.approx(copies_in_eight(model))
