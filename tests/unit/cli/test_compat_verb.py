"""`primus compat`: commands of older documents, as a person types them."""

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import experiment_kit
from primus_images.cli.main import main
from primus_images.compat.commands import requested
from primus_images.errors import PrimusError
from primus_images.gpus.detect import DetectedGpus
from tables import text_of


def test_a_machine_without_a_gpu_refuses_and_says_how_to_run_the_proxy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EXP", "examples/torchtitan/configs/MI300X/llama3.1_8B-BF16-pretrain.yaml")
    monkeypatch.setattr("primus_images.gpus.detect.detect", lambda *_: DetectedGpus())
    assert main(["compat", "run_pretrain.sh", "--training.local_batch_size", "4"]) == 2
    assert "--proxy" in capsys.readouterr().err
    assert (
        main(
            [
                "compat",
                "run_pretrain.sh",
                "--training.local_batch_size",
                "4",
                "--proxy",
                "--dry-run",
            ]
        )
        == 0
    )
    out, err = capsys.readouterr()
    assert "llama3.1-8b: torchtitan, pretrain, bf16, cpu, 2 ranks" in out
    assert "the proxy keeps its own sizes: torchtitan.training.local_batch_size=4 left out" in err


def test_only_one_rank_of_torchrun_starts_primus(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main(["compat", "train_fsdp.py", "nothing is read"]) == 0
    assert capsys.readouterr().err == ""


def test_a_job_of_slurm_trains_with_tuned_gemms(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EXP", "examples/megatron/configs/llama2_7B-pretrain.yaml")
    monkeypatch.setenv("PRIMUS_HIPBLASLT_TUNING_STAGE", "3")
    monkeypatch.delenv("SLURM_NODEID", raising=False)
    assert main(["compat", "run_slurm_pretrain.sh", "--gpu", "mi300x"]) == 3
    err = capsys.readouterr().err
    assert "primus launch slurm llama2-7b --backend=megatron" in err
    assert "--tuned-gemms output/tune_gemm" in err


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_gemms_are_not_tuned_on_a_node_without_a_gpu(
    stage: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EXP", "examples/megatron/configs/llama2_7B-pretrain.yaml")
    monkeypatch.setenv("PRIMUS_HIPBLASLT_TUNING_STAGE", stage)
    monkeypatch.setenv("SLURM_NODEID", "0")
    assert main(["compat", "run_slurm_pretrain.sh", "--gpu", "cpu", "--proxy"]) == 2
    err = capsys.readouterr().err
    assert "TunableOp tunes GEMMs of GPUs only" in err or "no GEMM is recorded" in err
    assert not list(tmp_path.rglob("*.csv"))


@pytest.mark.parametrize(
    "words",
    [
        ["pytorch_benchmark_setup.sh"],
        ["./pytorch_benchmark_setup.sh", "--dry-run"],
        ["pytorch_benchmark_setup.sh", "--json"],
        ["pytorch_benchmark_setup.sh", "--gpu", "mi300x"],
    ],
)
def test_there_is_nothing_to_install(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compat", *words]) == 0
    assert "nothing to install" in capsys.readouterr().out


def test_a_tuning_stage_never_starts_a_training_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EXP", "examples/megatron/configs/llama2_7B-pretrain.yaml")
    monkeypatch.delenv("SLURM_NODEID", raising=False)
    stage, gpu = {"PRIMUS_HIPBLASLT_TUNING_STAGE": "2"}, ["--gpu", "mi300x"]
    for words, code, says in (
        (
            ["compat", "run_slurm_pretrain.sh", *gpu],
            3,
            "primus tune gemm --stage=tune llama2-7b --backend=megatron",
        ),
        (["compat", "run_pretrain.sh", *gpu], 2, "no GEMM is recorded"),
    ):
        with monkeypatch.context() as shell:
            for name, value in stage.items():
                shell.setenv(name, value)
            assert main(words) == code
        assert says in capsys.readouterr().err
    with pytest.raises(PrimusError, match="must be 0, 1, 2 or 3"):
        requested("run_pretrain.sh", [], {**os.environ, "PRIMUS_HIPBLASLT_TUNING_STAGE": "4"})


def test_a_proxy_in_fp8_is_trained_in_bf16_where_a_cpu_lacks_it_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("primus_images.gpus.detect.detect", lambda *_: DetectedGpus())
    monkeypatch.setattr("primus_images.cli.image.compat.detect", lambda *_: DetectedGpus())
    for path, precision in (
        ("examples/megatron/configs/MI300X/llama3.1_8B-FP8-pretrain.yaml", "bf16"),
        ("examples/torchtitan/configs/MI300X/llama3.1_8B-FP8-pretrain.yaml", "fp8"),
    ):
        monkeypatch.setenv("EXP", path)
        assert main(["compat", "run_pretrain.sh", "--proxy", "--dry-run"]) == 0
        out, err = capsys.readouterr()
        assert f"pretrain, {precision}, cpu" in out
        says = "the proxy is trained in bf16: megatron does not compute fp8 on a CPU"
        assert (says in err) == (precision == "bf16")
        assert main(["compat", "run_pretrain.sh", "--proxy", "--dry-run", "--gpu=mi300x"]) == 0
        assert "pretrain, fp8, mi300x" in capsys.readouterr().out


def test_what_only_the_host_can_start_is_refused_with_the_command_that_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EXP", "examples/megatron/configs/MI300X/llama3.1_8B-BF16-pretrain.yaml")
    monkeypatch.setenv("NNODES", "8")
    monkeypatch.setenv("DOCKER_IMAGE", "rocm/primus:v26.11-mi300x")
    monkeypatch.delenv("SLURM_NODEID", raising=False)
    assert main(["compat", "run_slurm_pretrain.sh", "--train_iters", "5"]) == 3
    (command,) = re.findall("on a login node: primus (.*)", capsys.readouterr().err)
    assert main([*shlex.split(command), "--dry-run"]) == 0
    script = capsys.readouterr().out
    for part in (
        "#SBATCH --nodes=8",
        "rocm/primus:v26.11-mi300x",
        "--nodes=8",
        "megatron.training.steps=5",
    ):
        assert part in script
    assert main(["compat", "madengine", "run", "--tags", "pyt_train_flux"]) == 3
    for words in (
        ["download_assets"],
        ["pytorch_benchmark_setup.sh", "--download"],
    ):
        assert main(["compat", *words]) == 3
    err = capsys.readouterr().err
    assert err.count("hf download black-forest-labs/FLUX.1-dev") == 2
    assert main(["compat", "pytorch_benchmark_setup.sh"]) == 0


MEGATRON = text_of("experiments/megatron.yaml")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return experiment_kit.enter(tmp_path, monkeypatch)


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
