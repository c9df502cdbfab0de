import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from docs.old_lines import COMMANDS, spoken

from primus_images.cli.main import main
from primus_images.compat.commands import requested
from primus_images.compat.tables import table
from primus_images.errors import PrimusError
from primus_images.gpus.detect import DetectedGpus
from primus_images.recipes.experiments.translate import table as table_of_experiments
from primus_images.recipes.load import names
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from tables import FIXTURES

ROOT = Path(__file__).resolve().parents[3]
WORKSPACE = ROOT / "images" / "workspace"


def named(entry: dict[str, Any]) -> str:
    return f"{entry['document'].partition('.')[0]}:{entry['line']}"


def trained(entry: dict[str, Any], gpu: str) -> Recipe:
    script, words, given = spoken(entry)
    request = requested(script, words, given)
    choices = Choices(**{**vars(request.choices), "gpu": gpu})
    return resolve(request.recipe, request.words, choices)


TRAINING = [(entry, gpu) for entry in COMMANDS if "resolves" in entry for gpu in entry["gpus"]]


@pytest.mark.parametrize(
    ("entry", "gpu"), TRAINING, ids=[f"{named(e)}-{g}-{i}" for i, (e, g) in enumerate(TRAINING)]
)
def test_every_training_command_resolves_to_what_the_document_says(
    entry: dict[str, Any], gpu: str
) -> None:
    recipe = trained(entry, gpu)
    found = {
        "recipe": recipe.name,
        "backend": recipe.backend,
        "mode": recipe.mode,
        "precision": recipe.precision,
        "nodes": recipe.get("nodes", int),
        "local": recipe.local_batch,
        "global": recipe.global_batch,
        "steps": recipe.steps,
        "seq_len": recipe.seq_len,
        "ranks": recipe.get("ranks", int),
        "layers": recipe.architecture.layers,
    }
    assert {name: found[name] for name in entry["resolves"]} == entry["resolves"]


def test_every_command_that_works_here_is_a_dry_run_on_a_machine_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a user types it in the image: the script is there, no option is needed, and it says what
    it does.
    """
    entries = [entry for entry in COMMANDS if not {"resolves", "tuned"}.isdisjoint(entry)]
    for entry in entries:
        script, words, given = spoken(entry)
        assert list(WORKSPACE.rglob(script.rpartition("/")[2])), script
        # A dry run on a machine without a GPU asks whether the batch fits the GPU of the file.
        gpu = DetectedGpus()
        if entry.get("gpus", ["mi300x"])[0] == "mi325x":
            gpu = DetectedGpus(vendor="amd", names=("mi325x",) * 8, generation="mi325x")
        with monkeypatch.context() as shell:
            shell.setattr("primus_images.cli.image.compat.detect", lambda *_, gpu=gpu: gpu)
            shell.setattr("primus_images.gpus.detect.detect", lambda *_, gpu=gpu: gpu)
            for name, value in given.items():
                shell.setenv(name, value)
            # The page of MI325X names the files of MI300X, whose memory its batches exceed.
            gpu = ["--gpu", "mi325x"] if entry.get("gpus") == ["mi325x"] else []
            code = main(["compat", script, *words, "--dry-run", *gpu])
        out, err = capsys.readouterr()
        assert code == 0, (entry, err)
        verb = (
            f"tune gemm --stage={entry['tuned']} llama2-7b --backend=megatron"
            if "tuned" in entry
            else "train "
        )
        assert f"→ primus {verb}" in err
        assert (".entry " in out) == ("tuned" not in entry)
    assert len(entries) > 70


def test_every_folder_a_document_changes_to_is_in_the_image() -> None:
    assert all((WORKSPACE / entry["folder"]).is_dir() for entry in COMMANDS if "folder" in entry)


OF_THE_HOST = ("docker", "pre-commit")


@pytest.mark.parametrize(
    "entry", [e for e in COMMANDS if "refused" in e or spoken(e)[0] in OF_THE_HOST], ids=named
)
def test_commands_that_train_nothing_are_refused_with_a_sentence(entry: dict[str, Any]) -> None:
    script, words, given = spoken(entry)
    assert list(WORKSPACE.rglob(script.rpartition("/")[2])), script
    with pytest.raises(
        PrimusError, match=entry.get("refused", "a command of the host|no hooks to install")
    ):
        requested(script, words, given)


def test_every_script_is_a_link_to_one_that_calls_primus(tmp_path: Path) -> None:
    """A shell runs it by each of its names, and primus gets that name and the words, unchanged."""
    told = tmp_path / "primus"
    told.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    told.chmod(0o755)
    scripts = sorted(WORKSPACE.rglob("*.sh"))
    assert len(scripts) == 8
    for script in scripts:
        done = subprocess.run(
            ["sh", script, "--a", "b c"],
            env={**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.splitlines() == ["compat", script.name, "--a", "b c"]


def test_every_recipe_that_a_table_names_is_there() -> None:
    commands = table("commands")
    known = table_of_experiments("models")["recipes"].values()
    stems = [row for rows in known for row in rows.values()]
    named_ones = {row if isinstance(row, str) else row["recipe"] for row in stems}
    named_ones |= {
        what["recipe"]
        for part in ("programs", "configs", "tags")
        for what in commands[part].values()
    }
    named_ones |= {what["recipe"] for what in commands["report"]["models"].values()}
    assert named_ones <= set(names())


def test_the_table_of_scripts_is_what_is_in_the_image() -> None:
    scripts = table("commands")["scripts"]
    for name, what in scripts.items():
        assert not what["folder"] or (WORKSPACE / what["folder"] / name).is_file(), name
    with pytest.raises(PrimusError) as caught:
        requested("nothing.sh", [], {})
    assert caught.value.hint == f"commands: {', '.join(scripts)}"


def test_an_fp8_claim_is_never_silently_bf16(capsys: pytest.CaptureFixture[str]) -> None:
    path = "examples/torchtitan/configs/MI355X/llama3.1_8B-BF16-pretrain.yaml"
    bf16 = requested("run_pretrain.sh", [], {"EXP": path})
    assert bf16.choices.precision == "bf16"
    assert any(
        "trains in BF16" in sentence and "llama3.1_8B-FP8" in sentence for sentence in bf16.says
    )
    fp8 = requested("run_pretrain.sh", [], {"EXP": path}, precision="fp8")
    assert fp8.choices.precision == "fp8"
    assert not any("trains in BF16" in sentence for sentence in fp8.says)
    beside = requested("run_pretrain.sh", [], {"EXP": path.replace("BF16", "FP8")})
    assert beside.choices.precision == "fp8"


@pytest.mark.parametrize("ranks", ["abc", "0", "-8", "8.5", "²", "1e3"])
def test_a_number_of_ranks_that_is_none_is_refused(ranks: str) -> None:
    with pytest.raises(PrimusError, match="WORLD_SIZE must be a whole number of at least 1"):
        requested("train_fsdp.py", ["configs/llama-3.1-8b-4k.json", "llama"], {"WORLD_SIZE": ranks})


FSDP2 = [
    "--use_torch_fsdp2",
    "1",
    "--use_distributed_optimizer",
    "false",
    "--overlap_param_gather",
    "false",
]


@pytest.mark.parametrize(
    ("command", "gpu", "key", "value"),
    [
        (["run_pretrain.sh", *FSDP2], "mi300x", "megatron.ddp.overlap_grad_reduce", False),
        (
            ["run_pretrain.sh", "--recompute_num_layers", "99"],
            "mi300x",
            "99 is more than the model's 32 layers",
            None,
        ),
        *(
            (
                ["train_fsdp.py", "configs/llama-3.1-8b-4k.json", "llama", "--enable_fp8", fp8],
                gpu,
                LOCAL,
                batch,
            )
            for LOCAL in ["fsdp.training.micro_batch_size"]
            for fp8, gpu, batch in (
                ("False", "mi300x", 6),
                ("True", "mi300x", 6),
                ("False", "mi325x", 8),
                ("True", "mi325x", 10),
            )
        ),
    ],
)
def test_what_a_page_states_in_its_text_and_tables_holds(
    command: list[str], gpu: str, key: str, value: Any
) -> None:
    """Options of "Key options" of the v25.7 page, and the batches at 4096 tokens of the v25.2
    table.
    """
    request = requested(
        command[0], command[1:], {"EXP": "examples/megatron/configs/llama2_7B-pretrain.yaml"}
    )
    choices = Choices(**{**vars(request.choices), "gpu": gpu})
    if value is None:
        with pytest.raises(PrimusError, match=key):
            resolve(request.recipe, request.words, choices)
    else:
        assert resolve(request.recipe, request.words, choices).settings[key].value == value


def test_variables_that_change_nothing_are_named_and_the_deterministic_one_is_kept() -> None:
    given = {"EXP": "examples/megatron/configs/llama2_7B-pretrain.yaml"}
    told = requested(
        "run_pretrain.sh", [], {**given, "TRAIN_LOG": "a.txt", "PRIMUS_DETERMINISTIC": "1"}
    )
    assert any("TRAIN_LOG is left out" in sentence for sentence in told.says)
    assert told.words == ("megatron.training.deterministic=true",)
    assert requested("run_pretrain.sh", [], given).words == ()


def test_variables_that_images_do_not_set_are_passed_on_with_a_word() -> None:
    given = {"ROCBLAS_USE_HIPBLASLT": "1", "DISABLE_ADDMM_CUDA_LT": "0", "GPU_MAX_HW_QUEUES": "8"}
    told = requested("launcher.py", [], given)
    assert told.says == (
        "ROCBLAS_USE_HIPBLASLT=1 is passed on to the ranks: rocBLAS reads it",
        "DISABLE_ADDMM_CUDA_LT=0 is passed on to the ranks: PyTorch reads it, and 0 is its default",
    )
    assert requested("launcher.py", [], {}).says == ()


def test_a_proxy_keeps_the_steps_and_the_seed_of_the_command() -> None:
    words = ["--train_iters", "7", "--seed", "3", "--micro_batch_size", "2"]
    request = requested(
        "run_pretrain.sh", words, {"EXP": "examples/megatron/configs/llama3.1_8B-pretrain.yaml"}
    )
    kept = request.for_proxy()
    assert set(kept.words) == {"megatron.training.steps=7", "megatron.training.seed=3"}
    assert kept.choices.proxy is True
    assert kept.says[-1].startswith("the proxy keeps its own sizes: ")
    assert "megatron.training.micro_batch_size=2 left out" in kept.says[-1]


@pytest.mark.parametrize(("given", "nodes"), [({}, 1), ({"NNODES": "2"}, 2)])
def test_a_proxy_needs_no_more_nodes_than_the_command_names(
    tmp_path: Path, given: dict[str, str], nodes: int
) -> None:
    text = (FIXTURES / "primus" / "experiments" / "llama.yaml").read_text()
    file = tmp_path / "llama.yaml"
    file.write_text(text + "      tensor_model_parallel_size: 32\n")
    shutil.copytree(FIXTURES / "primus" / "primus", tmp_path / "primus")
    environment = {"EXP": str(file), **given}
    request = requested("run_pretrain.sh", [], environment)
    assert request.choices.nodes == int(given.get("NNODES", 4))
    assert request.for_proxy().choices.nodes == nodes


def test_fsdp_runs_on_eight_ranks_unless_torchrun_says_otherwise() -> None:
    words = ["configs/llama-3.1-8b-4k.json", "llama"]
    for environment, ranks in (({}, "ranks=8"), ({"WORLD_SIZE": "2"}, "ranks=2")):
        assert requested("train_fsdp.py", words, environment).words[0] == ranks


@pytest.mark.parametrize(("text", "is_asked"), [("0", False), ("", False), ("1", True)])
def test_deterministic_kernels_are_asked_for_by_any_value_but_zero(
    text: str, is_asked: bool
) -> None:
    environment = {"EXP": "llama3.1-8b", "PRIMUS_DETERMINISTIC": text}
    words = requested("run_pretrain.sh", [], environment).words
    assert ("torchtitan.debug.deterministic=true" in words) is is_asked
