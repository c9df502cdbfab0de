import re
from pathlib import Path
from typing import Any

import pytest
from docs.generated import dataclass_keys

from primus_images.errors import InputError
from primus_images.recipes import load, resolve, schema
from primus_images.recipes.rules import rules_of
from primus_images.recipes.schema import backends
from primus_images.recipes.setting import Choices, ends_of, outside
from tables import text_of

ROOT = Path(__file__).resolve().parents[3]
PROXY = text_of("recipes/whole.yaml")

# The shape of torchtitan's own job_config.py, so that its keys are judged without torchtitan
# installed.
JOB_CONFIG = """
@dataclass
class DataLoader:
    num_workers: int = 0

@dataclass
class Training:
    steps: int = 10000
    max_norm: float | int = 1.0
    dataset_path: str | None = None
    dtype: Literal["bfloat16", "float32"] = "float32"
    dataloader: DataLoader = field(default_factory=DataLoader)

    def __post_init__(self):
        pass

@dataclass
class Model:
    hook: Callable | None = None
    _private: int = 0
    converters: list[str] = field(default_factory=list)

@dataclass
class JobConfig:
    training: Training = field(default_factory=Training)
    model: Model = field(default_factory=Model)
"""


@pytest.fixture
def edited(tmp_path: Path) -> Path:
    """A copy of the proxy recipe beside its assets, to be broken."""
    (tmp_path / "assets").symlink_to(ROOT / "recipes" / "assets")
    copy = tmp_path / "copy.yaml"
    copy.write_text(PROXY)
    return copy


def change(recipe: Path, old: str, new: str) -> None:
    text = recipe.read_text()
    assert old in text
    recipe.write_text(text.replace(old, new, 1))


def place(recipe: Path, word: str) -> str:
    """file:line:col of the first ``word`` in the recipe."""
    before = recipe.read_text().partition(word)[0]
    return f"{recipe}:{before.count(chr(10)) + 1}:{len(before) - before.rfind(chr(10))}"


def test_a_recipe_resolves_and_every_value_has_an_origin(edited: Path) -> None:
    recipe = resolve.resolve(str(edited), ["training.steps=7"])
    assert recipe.steps == 7
    assert recipe.settings["torchtitan.training.steps"].origin == "command line: training.steps=7"
    assert recipe.settings["ranks"].origin == place(edited, "2\nassets")
    corpus = recipe.asset("corpus")
    assert corpus is not None
    assert corpus.is_file()
    assert (recipe.world_size, recipe.data_parallel, recipe.global_batch, recipe.accumulation) == (
        2,
        2,
        8,
        1,
    )


def test_the_digest_follows_values_and_assets_not_names(edited: Path) -> None:
    whole = resolve.resolve(str(edited)).digest
    other = edited.with_name("other.yaml")
    other.write_text(PROXY)
    assert resolve.resolve(str(other)).digest == whole
    assert resolve.resolve(str(edited), ["training.steps=20"]).digest == whole
    assert resolve.resolve(str(edited), ["training.steps=21"]).digest != whole
    (edited.parent / "assets").unlink()
    (edited.parent / "assets" / "tokenizer").mkdir(parents=True)
    (edited.parent / "assets" / "corpus.jsonl").write_text("{}")
    assert resolve.resolve(str(edited)).digest != whole


def test_overrides_reach_the_backend_without_its_name() -> None:
    recipe = resolve.resolve(
        "llama3-proxy", ["optimizer.lr=0.005", "model.hidden_size=64", "checkpoint.interval=5"]
    )
    assert recipe.get("torchtitan.optimizer.lr", float) == 0.005
    assert recipe.get("model.hidden_size", int) == 64
    assert recipe.get("torchtitan.checkpoint.interval", int) == 5


def test_what_every_backend_has_is_one_word() -> None:
    for backend, steps, tp in (
        ("torchtitan", "training.steps", "parallelism.tensor_parallel_degree"),
        ("megatron", "training.steps", "model.tensor_model_parallel_size"),
    ):
        choices = Choices(backend=backend, proxy=True)
        recipe = resolve.resolve("llama3-8b", ["steps=7", "tp=2", "ranks=2"], choices)
        assert recipe.overrides == (f"{backend}.{steps}=7", f"{backend}.{tp}=2", "ranks=2")
        assert (recipe.steps, recipe.degree("tp")) == (7, 2)


def test_choices_are_options_or_words_and_cases_follow_them() -> None:
    recipe = resolve.resolve("llama3-proxy", ["precision=bf16"])
    assert rules_of(recipe).precision(recipe) == recipe.precision == "bf16"
    assert recipe.settings["precision"].origin == "--precision bf16"
    assert resolve.resolve("llama3-proxy", (), Choices(precision="bf16")).digest == recipe.digest


def test_a_global_batch_is_of_one_node(edited: Path) -> None:
    two = resolve.resolve(str(edited), (), Choices(nodes=2))
    assert (two.world_size, two.global_batch, two.accumulation) == (4, 16, 1)
    assert "× 2 nodes" in two.settings["torchtitan.training.global_batch_size"].origin
    change(
        edited,
        "cases:",
        "cases:\n  - when: {nodes: multi}\n    torchtitan.training.global_batch_size: 32",
    )
    assert resolve.resolve(str(edited), (), Choices(nodes=2)).global_batch == 32
    assert resolve.resolve(str(edited)).global_batch == 8


def test_a_recipe_uses_files_before_its_own_text(edited: Path) -> None:
    edited.with_name("more.yaml").write_text("ranks: 4\ntorchtitan.training.max_norm: 2.0\n")
    change(edited, "name: whole", "uses: [more.yaml]\nname: whole")
    recipe = resolve.resolve(str(edited))
    assert recipe.get("ranks", int) == 2
    assert recipe.get("torchtitan.training.max_norm", float) == 2.0


def test_backend_keys_are_read_from_a_source() -> None:
    assert dataclass_keys(JOB_CONFIG, "JobConfig") == {
        "training.steps": {"types": ["int"], "default": 10000},
        "training.max_norm": {"types": ["float", "int"], "default": 1.0},
        "training.dataset_path": {"types": ["str", "None"], "default": None},
        "training.dtype": {
            "types": ["str"],
            "choices": ["bfloat16", "float32"],
            "default": "float32",
        },
        "training.dataloader.num_workers": {"types": ["int"], "default": 0},
        "model.converters": {"types": ["list"], "items": ["str"], "default": []},
        "model.hook": {"types": []},
    }


_VALUES: dict[str, Any] = {
    "int": 1,
    "float": 0.5,
    "bool": True,
    "str": "a",
    "list": ["a"],
    "dict": {"a": 1},
    "None": None,
}


@pytest.mark.parametrize(
    ("types", "accepted"),
    [
        (("int",), {"int"}),
        (("float",), {"int", "float"}),
        (("bool",), {"bool"}),
        (("str", "None"), {"str", "None"}),
        (("list",), {"list"}),
        (("tuple",), {"list"}),
    ],
)
def test_a_rule_takes_values_of_its_types_alone(types: tuple[str, ...], accepted: set[str]) -> None:
    rule = schema.Rule(types=frozenset(types))
    assert {name for name, value in _VALUES.items() if rule.objection(value) is None} == accepted


def test_a_rule_judges_type_choice_items_and_size() -> None:
    rules = schema.backend_rules("torchtitan")
    assert rules["training.steps"].objection("x") == "must be a whole number, not 'x'"
    assert rules["training.steps"].objection(True) is not None
    assert rules["training.steps"].objection(2**63) is not None
    assert rules["training.max_norm"].objection(1) is None
    assert rules["training.max_norm"].objection(float("nan")) == "must be finite, not nan"
    assert rules["training.dataset_path"].objection(None) is None
    assert (
        rules["training.mixed_precision_param"].objection("fp8")
        == "must be one of bfloat16, float32, not 'fp8'"
    )
    assert rules["model.converters"].objection(["float8"]) is None
    assert rules["model.converters"].objection([3]) == "contains 3: each item must be text"
    assert "a recipe cannot express" in str(
        schema.backend_rules("megatron")["model.init_method"].objection("xavier")
    )


@pytest.mark.parametrize("name", list(backends()))
def test_bounds_name_keys_that_are_there_and_hold_the_defaults(name: str) -> None:
    rules, knows = schema.backend_rules(name), backends()[name]
    assert set(knows.bounds) | set(knows.choices) <= set(rules)
    for key, rule in rules.items():
        if rule.bounds is None:
            continue
        assert {
            end for end in ends_of(rule.bounds)[2:4] if re.search("[a-z]", end) and end != "inf"
        } <= set(rules)
        if isinstance(rule.default, int | float):
            assert outside(rule.bounds, rule.default) is None, key
    for rule in schema.model_rules().values():
        if rule.bounds is not None:
            assert {
                end for end in ends_of(rule.bounds)[2:4] if re.search("[a-z]", end) and end != "inf"
            } <= set(schema.model_rules())


def test_a_run_shorter_than_its_warm_up_says_so() -> None:
    recipe = resolve.resolve("llama3.1-8b", ["steps=3"], Choices(gpu="mi300x"))
    warmup = recipe.settings["torchtitan.lr_scheduler.warmup_steps"]
    assert warmup.value == 3
    assert re.search(r"torchtitan\.yaml:\d+:\d+, at most the 3 steps$", warmup.origin)


def test_epochs_leave_the_steps_to_the_run_or_to_the_user(edited: Path, tmp_path: Path) -> None:
    (corpus := tmp_path / "a.txt").write_text("text")
    words = ["epochs=2.5", f"corpus={corpus}", "tokenizer=mock"]
    choices = Choices(backend="finetune", mode="lora", gpu="mi300x")
    more = ["training.warmup_steps=1000", "eval.fraction=0.1", "eval.every=1000"]
    recipe = resolve.resolve("llama3.1-8b", [*words, *more], choices)
    assert recipe.get("epochs", float) == 2.5
    assert (
        recipe.settings["finetune.training.steps"].origin
        == "replaced by those of epochs when a run starts"
    )
    change(edited, "ranks: 2", "epochs: 2\nranks: 2")
    assert "epochs" in resolve.resolve(str(edited)).settings
    assert "epochs" not in resolve.resolve(str(edited), ["steps=7"]).settings
    for wrong, objection in (
        ([*words, "steps=3"], "give either"),
        (["epochs=2", "corpus=mock"], "text"),
        (["epochs=0"], "greater"),
    ):
        with pytest.raises(InputError, match=objection):
            resolve.resolve("llama3-proxy", wrong)


def test_a_recipe_may_need_several_nodes_and_its_proxy_one(edited: Path) -> None:
    change(edited, "default:", "default:\n  nodes: 4")
    assert resolve.resolve(str(edited)).get("nodes", int) == 1
    whole = resolve.resolve(str(edited), ["proxy=false", "gpu=h200"])
    assert whole.get("nodes", int) == 4
    assert whole.global_batch == 32
    assert resolve.resolve(str(edited), ["proxy=false", "gpu=h200", "nodes=2"]).global_batch == 16


def test_the_example_on_the_page_of_recipes_resolves(tmp_path: Path) -> None:
    page = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (file := tmp_path / "my-model.yaml").write_text(example, encoding="utf-8")
    assert resolve.resolve(str(file), [], Choices(gpu="h200")).local_batch == 1
    assert resolve.resolve(str(file), [], Choices(gpu="cpu", proxy=True)).architecture.layers == 3


def test_a_case_sets_the_nodes_that_a_gpu_needs_unless_the_command_does(tmp_path):
    text = (load.folder() / "llama3.1-8b.yaml").read_text()
    case = "  - {when: {gpu: h200}, nodes: 3, because: because}\n"
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace("cases:\n", "cases:\n" + case, 1))
    setting = resolve.resolve(str(path), [], Choices(gpu="h200")).settings["nodes"]
    assert (setting.value, setting.because) == (3, "because")
    assert resolve.resolve(str(path), [], Choices(gpu="h200", nodes=1)).get("nodes", int) == 1
    assert resolve.resolve(str(path), [], Choices(gpu="mi300x")).get("nodes", int) == 1
    for group, nodes in (
        ("amd", [3, 1]),
        ("gfx942", [3, 1]),
        ("sm_90", [1, 3]),
        ("[gfx950, nvidia]", [1, 3]),
    ):
        path.write_text(text.replace("cases:\n", "cases:\n" + case.replace("h200", group), 1))
        resolved = (resolve.resolve(str(path), [], Choices(gpu=gpu)) for gpu in ("mi300x", "h200"))
        assert [recipe.get("nodes", int) for recipe in resolved] == nodes, group
    path.write_text(text.replace("cases:\n", "cases:\n" + case.replace("h200", "gfx94"), 1))
    with pytest.raises(InputError, match="there is no gpu 'gfx94' here; did you mean 'gfx942'"):
        resolve.resolve(str(path), [], Choices(gpu="h200"))
    path.write_text(text.replace("cases:\n", "cases:\n" + case.replace("gpu: h200", "nodes: 2"), 1))
    with pytest.raises(InputError, match="a case for a number of nodes cannot set nodes"):
        resolve.resolve(str(path), [], Choices(gpu="h200"))
