"""`primus-cli` as a person types it, on a host and in an image."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from primus_images.cli.image import primus_cli as of_primus_cli
from primus_images.cli.main import main
from primus_images.gpus.detect import DetectedGpus

LLAMA = "examples/megatron/configs/MI300X/llama2_7B-BF16-pretrain.yaml"


PRETRAIN = ("train", "pretrain", "--config", LLAMA)


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("compat", "primus_cli"):
        monkeypatch.setattr(f"primus_images.cli.image.{module}.detect", lambda *_: DetectedGpus())
    monkeypatch.setattr("primus_images.gpus.detect.detect", lambda *_: DetectedGpus())


@pytest.fixture
def in_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("primus_images.cli.image.primus_cli.installed_verbs", dict)


@pytest.mark.usefixtures("without_gpu", "in_the_image")
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("direct", "--", *PRETRAIN), "train llama2-7b --backend=megatron"),
        (("direct", *PRETRAIN), "train llama2-7b"),
        (("direct", "--", *PRETRAIN, "--train_iters", "7"), "megatron.training.steps=7"),
        (("direct", "--env", "NNODES=2", "--", *PRETRAIN), "--nodes=2"),
        (("direct", "--", *PRETRAIN, "--proxy", "--gpu", "cpu"), "--proxy"),
        (("direct", "--", *PRETRAIN, "--precision", "fp8"), "--precision=fp8"),
        (("direct", "--", *PRETRAIN, "--gpu", "mi355x"), "--gpu=mi355x"),
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
    ("gpu", "image", "proxy", "config", "here", "target"),
    [
        ("mi355x", "rocm-mi300x", False, LLAMA, "mi325x", "mi355x"),
        (None, "rocm-mi300x", False, LLAMA, "mi325x", "mi300x"),
        (None, "rocm", False, LLAMA, "mi325x", "mi325x"),
        (None, "rocm", False, LLAMA, None, "mi300x"),
        (None, "rocm", True, LLAMA, None, "cpu"),
        (None, "rocm", False, "exp.yaml", None, "cpu"),
    ],
)
def test_a_container_is_of_the_gpu_that_is_named_or_here_or_in_the_path(
    gpu: str | None,
    image: str,
    proxy: bool,
    config: str,
    here: str | None,
    target: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(of_primus_cli, "detect", lambda: SimpleNamespace(generation=here))
    call: Any = SimpleNamespace(image=image, command=("train", "pretrain", "--config", config))
    assert of_primus_cli._target(call, gpu, proxy=proxy) == target
