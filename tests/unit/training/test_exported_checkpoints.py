"""A checkpoint of a run, exported: transformers loads what the run trained."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
for name in ("torchtitan", "megatron", "peft", "diffusers"):
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)

import tiny_runs  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tiny_runs import CHATS, SMALL, ended, folder  # noqa: E402
from torch.distributed import checkpoint as dcp  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from primus_images.errors import InputError  # noqa: E402
from primus_images.recipes.architecture import architecture  # noqa: E402
from primus_images.recipes.resolve import resolve  # noqa: E402
from primus_images.recipes.setting import Choices  # noqa: E402
from primus_images.training.backends import export  # noqa: E402
from primus_images.training.judge.reference.names import to_canonical  # noqa: E402
from primus_images.training.run.job import Job  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

BIASES = (
    "some tokens go to other experts in transformers: it ranks groups of experts by the best 2 of "
    "each, Megatron by the best 1"
)


@pytest.mark.parametrize(
    ("run", "differences"),
    [("fsdp", []), ("torchtitan", []), ("megatron", []), ("megatron-mla", [BIASES])],
)
def test_exported_weights_are_those_of_the_last_step(
    run: str, differences: list[str], tmp_path: Path
) -> None:
    checkpoint = folder(run) / "checkpoint/step-3"
    assert export.write_model(checkpoint, tmp_path / "hf", None, None) == differences
    model = architecture(json.loads((folder(run) / "job.json").read_text())["model"])
    recorded = torch.load(folder(run) / "witness/weights-3.pt", weights_only=True)["weights"]
    trained = to_canonical(ended(run).job.recipe.backend, model, recorded)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    state = {f"model.{key}": value for key, value in loaded.state_dict().items()}
    saved = to_canonical("finetune", model, state)
    assert saved.keys() >= trained.keys()
    for key, tensor in trained.items():
        rounded = tensor.to(torch.bfloat16 if run == "megatron" else torch.float32)
        assert torch.equal(saved[key], rounded.float()), key
    assert (tmp_path / "hf/tokenizer.json").is_file()


def test_dtype_and_tokenizer_are_those_that_are_named(tmp_path: Path) -> None:
    checkpoint = folder("fsdp") / "checkpoint/step-3"
    other = tmp_path / "tokenizer"
    shutil.copytree(ended("fsdp").job.recipe.asset("tokenizer"), other)
    (other / "tokenizer_config.json").write_text('{"eos_token": "<|other|>"}')
    export.write_model(checkpoint, tmp_path / "hf", "bfloat16", other)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert json.loads((tmp_path / "hf/config.json").read_text())["dtype"] == "bfloat16"
    assert "<|other|>" in (tmp_path / "hf/tokenizer_config.json").read_text()


def test_lonely_checkpoint_has_no_tokenizer(tmp_path: Path) -> None:
    lonely = tmp_path / "run/checkpoint/step-3"
    shutil.copytree(folder("fsdp") / "checkpoint/step-3", lonely)
    sentences = export.write_model(lonely, tmp_path / "hf", None, None)
    assert sentences == ["there is no tokenizer: --tokenizer DIR copies one"]


@pytest.mark.parametrize(
    ("run", "words"),
    [("flux", "transformers has no FLUX"), ("lora", "contains LoRA adapters, not a whole model")],
)
def test_what_is_no_language_model_is_refused(run: str, words: str, tmp_path: Path) -> None:
    source = folder("flux" if run == "flux" else "fsdp") / "checkpoint/step-3"
    checkpoint = tmp_path / "checkpoint/step-3"
    shutil.copytree(source, checkpoint)
    if run == "lora":
        file = checkpoint / "recipe.json"
        file.write_text(file.read_text().replace('"pretrain"', '"lora"'))
    with pytest.raises(InputError, match=words):
        export.write_model(checkpoint, tmp_path / "hf", None, None)


def test_a_model_of_no_family_leads_to_the_folder_of_its_run(tmp_path: Path) -> None:
    fields = {"model.family": "other", "model.parameters": 8, "seq_len": 8, "mode": "full"}
    with pytest.raises(InputError, match="is exported by its own run") as caught:
        export._architecture(fields, "finetune", tmp_path)
    assert "the folder weights" in str(caught.value.hint)


def test_unfinished_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "step-3").mkdir()
    with pytest.raises(InputError, match="the checkpoint is incomplete or damaged"):
        export.write_model(tmp_path / "step-3", tmp_path / "hf", None, None)


def test_lost_biases_of_routers_are_told_with_the_largest() -> None:
    model = ended("fsdp").job.recipe.architecture
    biases = [torch.tensor([0.02, -0.25]), torch.tensor([0.1])]
    assert list(export._differences("megatron", model, biases, Path())) == [
        "some tokens go to other experts in transformers: the run's routers have biases "
        "(up to 0.25), and its llama3 has none"
    ]
    assert list(export._differences("megatron", model, [torch.zeros(2)], Path())) == []


def test_a_run_that_gets_worse_exports_its_best_weights(tmp_path: Path) -> None:
    words = (
        f"{CHATS} {SMALL} eval.fraction=0.1 eval.every=1 finetune.save_weights=true "
        "training.lr=0.02 training.warmup_steps=0"
    )
    choices = Choices(backend="finetune", mode="full", gpu="cpu", proxy=True, precision="fp32")
    recipe = resolve("llama3.1-8b", words.split(), choices)
    output = tiny_runs.run(Job(name="worse", recipe=recipe, output=tmp_path / "worse")).folder
    evaluations = [json.loads(line) for line in (output / "eval.jsonl").read_text().splitlines()]
    best = min(evaluations, key=lambda evaluation: float(evaluation["eval_loss"]))
    assert best["step"] == 2, "the last of three steps is worse"
    exported = load_file(output / "weights/model.safetensors")
    saved = {f"model.model.{name}": torch.empty_like(exported[name]) for name in exported}
    dcp.load(saved, checkpoint_id=output / "checkpoint/step-2", no_dist=True)
    for name, tensor in exported.items():
        assert torch.equal(tensor, saved[f"model.model.{name}"]), name
