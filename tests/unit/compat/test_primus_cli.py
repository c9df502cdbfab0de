"""AMD's ``primus-cli``: the command lines of its README, quick start and user guide."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from primus_images.cli.main import main
from primus_images.compat.primus_cli import parsed, usage, work_of
from primus_images.errors import InputError, PrimusError
from primus_images.gpus.detect import DetectedGpus
from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices

ROOT = Path(__file__).resolve().parents[3]
LINES: list[dict[str, Any]] = yaml.safe_load(
    (ROOT / "tests/fixtures/primus_cli.yaml").read_text(encoding="utf-8")
)
LLAMA = "examples/megatron/configs/MI300X/llama2_7B-BF16-pretrain.yaml"
PRETRAIN = ("train", "pretrain", "--config", LLAMA)


def words_of(line: dict[str, Any]) -> list[str]:
    """The words after ``primus-cli``."""
    words = shlex.split(line.get("spelt", line["command"]))
    return words[words.index("primus-cli") + 1 :]


def without_settings(arguments: tuple[str, ...] | list[str]) -> str:
    return " ".join(word for word in arguments if word.startswith("--") or "=" not in word)


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("compat", "primus_cli"):
        monkeypatch.setattr(f"primus_images.cli.image.{module}.detect", lambda *_: DetectedGpus())
    monkeypatch.setattr("primus_images.gpus.detect.detect", lambda *_: DetectedGpus())


@pytest.fixture
def in_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("primus_images.cli.image.primus_cli.installed_verbs", dict)


@pytest.mark.parametrize("line", LINES, ids=lambda line: line["command"][-80:])
def test_every_line_of_the_documents_is_translated_or_refused(line: dict[str, Any]) -> None:
    if "refused" in line:
        with pytest.raises(PrimusError, match=re.escape(line["refused"])):
            work_of(parsed(words_of(line)), {})
        return
    call = parsed(words_of(line))
    if call.help:
        assert line["runs"] == "help"
        return
    work = work_of(call, {})
    if not work.request:
        assert line["runs"] == "; ".join(map(without_settings, work.commands))
        return
    assert line["runs"] == without_settings(work.request.arguments())
    # What it asks for can be resolved on the GPU that the path names.
    choices = Choices(**{**vars(work.request.choices), "gpu": work.request.gpu_of_path or "mi355x"})
    resolve(work.request.recipe, work.request.words, choices)


def test_nine_in_ten_lines_run() -> None:
    run = [line for line in LINES if "runs" in line]
    assert len(LINES) > 160
    assert len(run) >= 0.9 * len(LINES)


@pytest.mark.usefixtures("without_gpu", "in_the_image")
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("direct", "--", *PRETRAIN), "train llama2-7b --backend=megatron"),
        (("direct", *PRETRAIN), "train llama2-7b"),
        (("direct", "--", *PRETRAIN, "--train_iters", "7"), "megatron.training.steps=7"),
        (("direct", "--env", "NNODES=2", "--", *PRETRAIN), "--nodes=2"),
        (("direct", "--", *PRETRAIN, "--proxy", "--gpu", "cpu"), "--proxy"),
        (("container", "--image", "x", "--volume", "/data", "--", *PRETRAIN), "train llama2-7b"),
        (("slurm", "srun", "-N", "4", "--", *PRETRAIN, "--proxy"), "train llama2-7b"),
    ],
)
def test_a_training_run_is_printed_and_resolved(
    words: tuple[str, ...],
    line: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NNODES", "")  # restored after the test, as --env sets it
    assert main(["compat", "primus-cli", "--dry-run", *words]) == 0
    captured = capsys.readouterr()
    assert re.search(rf"→ primus .*{re.escape(line)}", captured.err), captured.err
    assert ".entry " in captured.out


@pytest.mark.usefixtures("without_gpu", "in_the_image")
def test_a_job_of_several_nodes_is_not_submitted_from_inside_the_image(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["compat", "primus-cli", "slurm", "srun", "-N", "4", "--", *PRETRAIN]) == 3
    error = capsys.readouterr().err
    assert "on a login node: primus launch slurm llama2-7b" in error
    assert "--proxy" in error


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ("--image", "rocm/primus:v26.5", "--env", "HF_TOKEN=hf_x", "--volume", "/d:/data"),
            "primus run mi300x --volume=/d:/data --env=HF_TOKEN",
        ),
        (("--image", "rocm/primus:v26.11-mi355x"), "primus run mi355x"),
        (("--memory", "64g", "--shm-size=16g"), "--memory=64g --shm-size=16g"),
    ],
)
def test_on_the_host_a_container_is_that_of_primus_run(
    words: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ["compat", "primus-cli", "--dry-run", "container", *words, "--", *PRETRAIN]
    assert main(call) == 0
    error = capsys.readouterr().err
    assert line in error
    assert "hf_x" not in error
    assert f"-- primus compat primus-cli direct -- {' '.join(PRETRAIN)}" in error


@pytest.mark.usefixtures("without_gpu")
def test_a_file_of_a_checkout_is_mounted_with_its_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "primus/configs/models").mkdir(parents=True)
    file = tmp_path / "examples/my.yaml"
    file.parent.mkdir()
    file.write_text("modules: {}\n")
    monkeypatch.chdir(tmp_path)
    command = ("train", "pretrain", "--config", "examples/my.yaml", "--proxy")
    assert main(["compat", "primus-cli", "--dry-run", "container", "--", *command]) == 0
    error = capsys.readouterr().err
    assert f"primus run cpu --volume={tmp_path}:{tmp_path}:ro" in error
    assert f"--config {file} --proxy" in error


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ("slurm", "srun", "-N", "4", "-p", "gpu", "-t", "1:00:00", "--qos=high"),
            "--nodes=4 --partition=gpu --time=1:00:00 --sbatch=--qos=high --wait",
        ),
        (("slurm", "sbatch", "-N2", "-J", "mine"), "--nodes=2 --name=mine"),
        (("slurm", "--nodes=3", "--ntasks-per-node=1"), "--nodes=3 --wait"),
    ],
)
def test_on_the_host_slurm_is_that_of_primus_launch(
    words: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compat", "primus-cli", "--dry-run", *words, "--", *PRETRAIN]) == 0
    captured = capsys.readouterr()
    assert "→ primus launch slurm llama2-7b --backend=megatron" in captured.err
    assert line in captured.err
    assert captured.out.startswith("#!/bin/bash")


def test_other_commands_run_on_each_node(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["slurm", "srun", "-N", "4", "-p", "gpu", "--", "preflight", "--host", "--network"]
    assert main(["compat", "primus-cli", "--dry-run", *words]) == 0
    error = capsys.readouterr().err
    assert "→ srun -N 4 -p gpu --ntasks-per-node=1 primus preflight --quick" in error


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("train", "pretrain", "--config", LLAMA, "--dry-run"), "→ primus train llama2-7b"),
        (("projection", "memory", "--config", LLAMA), "→ primus fit llama2-7b"),
        (("projection", "performance", "--config", LLAMA, "--target-nodes", "2"), "--nodes=2"),
        (("preflight", "--host", "--gpu", "--network"), "→ primus preflight --quick"),
        (("preflight", "--gpu"), "→ primus preflight --quick"),
        (("direct", "--", "projection", "memory", "--config", LLAMA), "→ primus fit llama2-7b"),
    ],
)
def test_amds_own_primus_is_answered_by_ours(
    words: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(list(words))
    captured = capsys.readouterr()
    assert line in captured.err
    if words[0] != "preflight":
        assert code == 0


@pytest.mark.parametrize(
    "words",
    [
        ("preflight", "--quick", "--gpu", "mi300x", "--expect", "0"),
        ("preflight", "--quick", "--expect", "0"),
    ],
)
def test_our_own_preflight_is_not_taken_for_amds(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    main(list(words))
    assert "primus-cli" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "no MODE"),
        (("direct",), "no command"),
        (("driect", "--", "train"), "there is no MODE 'driect'; did you mean 'direct'?"),
        (("direct", "--volme", "x", "--", "train"), "there is no option '--volme'"),
        (("container", "--imag", "x", "--", "train"), "did you mean '--image'?"),
        (("direct", "--", "tran", "pretrain"), "there is no command 'tran'; did you mean 'train'?"),
        (("direct", "--", "train"), "train needs more words"),
        (("direct", "--", "train", "pretrain"), "--config is missing"),
        (("direct", "--", "train", "evaluate", "--config", "x"), "train has no 'evaluate'"),
        (("direct", "--", "train", "pretrain", "--config"), "--config needs a value"),
        (("direct", "--", "benchmark", "gem"), "there is no suite 'gem'; did you mean 'gemm'?"),
        (("direct", "--", "benchmark", "rccl", "--op", "broadcast"), "only all-reduce"),
        (("direct", "--", "preflight", "--hosts"), "did you mean '--host'?"),
        (("direct", "--", "preflight", "--tests", "gem"), "there is no test 'gem'"),
        (("direct", "--env", "A", "--", "preflight"), "'A' sets no variable"),
        (("direct", "--patch", "x.sh", "--", "preflight"), "nothing is patched"),
        (("direct", "--script", "x.py", "--", "preflight"), "other scripts are not started"),
        (("direct", "--", "projection", "speed", "--config", LLAMA), "projection has no 'speed'"),
    ],
)
def test_wrong_words_are_refused_with_a_sentence(words: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(PrimusError) as caught:
        work_of(parsed(words), {})
    assert sentence in str(caught.value)


def test_a_file_of_post_training_becomes_fine_tuning(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    overrides = {"peft": "lora", "train_iters": 9, "finetune_lr": 1e-4, "seq_length": 1024}
    trainer = {"framework": "megatron_bridge", "model": "qwen3_8b.yaml", "overrides": overrides}
    file.write_text(yaml.safe_dump({"modules": {"post_trainer": trainer}}))
    words = ("direct", "--", "train", "posttrain", "--config", str(file))
    request = work_of(parsed(words), {}).request
    assert request
    assert (request.recipe, request.choices.backend, request.choices.mode) == (
        "qwen3-8b",
        "finetune",
        "lora",
    )
    choices = Choices(**{**vars(request.choices), "gpu": "mi300x"})
    recipe = resolve(request.recipe, request.words, choices)
    assert recipe.steps == 9
    assert recipe.seq_len == 1024
    with pytest.raises(InputError, match="tensor_model_parallel_size"):
        work_of(parsed((*words, "--tensor_model_parallel_size", "2")), {})
    file.write_text("modules: {pre_trainer: {}}\n")
    with pytest.raises(InputError, match="no experiment of post-training"):
        work_of(parsed(words), {})


def test_help_names_every_command() -> None:
    text = "\n".join(usage())
    for word in ("pretrain", "posttrain", "gemm", "memory", "--host", "node_smoke", "--volume"):
        assert word in text


def test_a_word_before_the_command_is_no_option() -> None:
    words = ["slurm", "srun", "-N", "2", "...", "--", "train", "pretrain", "--config", "x.yaml"]
    with pytest.raises(InputError, match=r"'\.\.\.' is no option of slurm"):
        parsed(words)
