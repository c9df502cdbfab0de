"""A job that cannot run on this machine is refused before anything starts, and what can is not."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from primus_images.cli.main import main
from primus_images.errors import HostError
from primus_images.gpus.detect import memory_bytes
from primus_images.gpus.table import generation
from primus_images.recipes.resolve import resolve
from primus_images.recipes.rules import predict
from primus_images.recipes.setting import Choices
from primus_images.training.run import machine
from tables import table_of

GIB = 2**30


def machine_of(
    root: Path, gpu: str = "", count: int = 8, gib: float = 1000, limit: str = "max"
) -> Path:
    """The files of a machine with ``count`` AMD GPUs, or H200s, and so much memory."""
    (root / "proc").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal:  {int(gib * GIB / 1024)} kB\nMemFree: 1 kB\n")
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "sys/fs/cgroup/memory.max").write_text(limit)
    (root / "dev").mkdir()
    for number in range(count if gpu else 0):
        if gpu == "h200":
            (node := root / f"proc/driver/nvidia/gpus/{number}").mkdir(parents=True)
            (node / "information").write_text("Model: \t NVIDIA H200\n")
            (root / f"dev/nvidia{number}").touch()
            continue
        known = generation(gpu)
        (node := root / f"sys/class/kfd/kfd/topology/nodes/{number}").mkdir(parents=True)
        major, minor = known.arch[3:-2], int(known.arch[-2:], 16)
        version = int(major) * 10000 + minor // 16 * 100 + minor % 16
        device = int(known.device_ids[0], 16)
        simds = known.compute_units * 4
        (node / "properties").write_text(
            f"simd_count {simds}\ngfx_target_version {version}\ndevice_id {device}\n"
        )
        (root / "dev/kfd").touch()
    return root


@pytest.mark.parametrize(
    ("recipe", "choices", "words", "here", "said"), table_of("machine.what_cannot_run_here")
)
def test_what_cannot_run_here_is_refused(
    tmp_path: Path,
    recipe: str,
    choices: dict[str, Any],
    words: list[str],
    here: dict[str, Any],
    said: str,
) -> None:
    with pytest.raises(HostError) as refused:
        machine.check(resolve(recipe, words, Choices(**choices)), machine_of(tmp_path, **here))
    assert said in refused.value.message
    assert refused.value.hint


@pytest.mark.parametrize("gpu", ["mi300x", "mi325x", "mi350x", "mi355x", "h200"])
@pytest.mark.parametrize(
    ("recipe", "backend", "mode"), table_of("machine.what_is_published_for_eight_gpus_runs_there")
)
def test_what_is_published_for_eight_gpus_runs_there(
    tmp_path: Path, gpu: str, recipe: str, backend: str, mode: str
) -> None:
    resolved = resolve(recipe, (), Choices(backend=backend, mode=mode, gpu=gpu))
    machine.check(resolved, machine_of(tmp_path, gpu))
    machine.check_prediction(resolved)


def test_a_proxy_for_a_gpu_runs_on_a_cpu_and_unknown_gpus_are_taken_at_the_recipes_word(
    tmp_path: Path,
) -> None:
    machine.check(
        resolve("llama3.1-8b", (), Choices(gpu="mi355x", proxy=True)),
        machine_of(tmp_path / "cpu", gib=8),
    )
    part = machine_of(tmp_path / "part", "mi300x", count=2)
    for node in (part / "sys/class/kfd/kfd/topology/nodes").iterdir():
        properties = node / "properties"
        properties.write_text(properties.read_text().replace("simd_count 1216", "simd_count 152"))
    machine.check(resolve("llama3.1-8b", (), Choices(gpu="mi300x")), part)


def test_adapters_and_sharded_states_need_less() -> None:
    def bytes_of(mode: str, *words: str) -> float:
        return predict(
            resolve("llama3.1-8b", words, Choices(backend="finetune", mode=mode, gpu="mi300x"))
        ).states

    assert (full := bytes_of("full")) == pytest.approx(8.03e9 * 16 / 8, rel=0.01)
    assert bytes_of("lora", "sharding.reshard_after_forward=true") == full / 4
    assert bytes_of("full", "sharding.replicas=2") == 2 * full
    assert bytes_of("full", "training.master_dtype=bfloat16") == full / 2


@pytest.mark.parametrize("words", [["--gpu", "mi355x"], []])
def test_the_error_offers_the_small_form_at_once(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    if machine.detect().names:
        pytest.skip("this machine has a GPU")
    started = time.monotonic()
    assert main(["train", "llama3.1-8b", *words]) == (3 if words else 2)
    assert time.monotonic() - started < 1
    said = capsys.readouterr().err
    assert "--proxy trains a small model" in said
    assert ("--dry-run" if words else "`primus show`, `primus fit`") in said


def test_force_starts_what_is_predicted_not_to_fit(tmp_path: Path) -> None:
    recipe = resolve("llama3.1-8b", ["local_batch=16"], Choices(gpu="mi300x"))
    machine.check(recipe, machine_of(tmp_path, gpu="mi300x"), force=True)


def test_unlisted_gpus_have_the_memory_of_the_smallest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node, gib in enumerate((192, 96)):
        (bank := tmp_path / f"sys/class/kfd/kfd/topology/nodes/{node}/mem_banks/0").mkdir(
            parents=True
        )
        (bank / "properties").write_text(f"heap_type 1\nsize_in_bytes {gib * GIB}\n")
    assert memory_bytes(tmp_path) == 96 * GIB
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nprintf '81559\\n80000\\n'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    other = machine_of(tmp_path / "nvidia", "h200", count=1)
    assert machine.unlisted_memory(other) is None
    (other / "proc/driver/nvidia/gpus/0/information").write_text(
        "Model: \t NVIDIA H100 80GB HBM3\n"
    )
    memory = machine.unlisted_memory(other)
    with pytest.raises(HostError, match="a GPU of this machine has 78 GiB"):
        machine.check(
            resolve("llama3.1-8b", ["ranks=1"], Choices(gpu="h200")), other, memory=memory
        )


def test_a_dry_run_refuses_what_a_start_would_refuse(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "llama3.1-8b", "--gpu", "mi300x", "local_batch=64", "--dry-run"]
    assert main(words) == 3
    shown = capsys.readouterr().err
    assert "2,230 GiB per rank, and AMD Instinct MI300X has 192 GiB" in shown
    assert "--force shows it anyway" in shown
    assert main([*words, "--force"]) == 0


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/\n", {"memory.max": "max\n"}, 64),
        ("0::/\n", {"memory.max": f"{8 * GIB}\n"}, 8),
        ("0::/slurm/job_7/step_0\n", {"slurm/job_7/memory.max": f"{16 * GIB}\n"}, 16),
        (
            "0::/slurm/job_7\n",
            {"slurm/memory.max": f"{32 * GIB}\n", "slurm/job_7/memory.max": f"{48 * GIB}\n"},
            32,
        ),
        (
            "5:cpu,cpuacct:/a\n3:hugetlb,memory:/slurm/job_7\n",
            {
                "memory/memory.limit_in_bytes": "9223372036854771712\n",
                "memory/slurm/job_7/memory.limit_in_bytes": f"{4 * GIB}\n",
                "memory/a/memory.limit_in_bytes": f"{GIB}\n",
            },
            4,
        ),
        ("", {}, 64),
    ],
)
def test_the_lowest_limit_of_a_process_and_its_groups_counts(
    groups: str, limits: dict[str, str], expected: int, tmp_path: Path
) -> None:
    root = machine_of(tmp_path / "root", gib=64)
    (root / "proc/self").mkdir()
    (root / "proc/self/cgroup").write_text(groups)
    for name, limit in limits.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(limit)
    assert machine.host_bytes(root) == expected * GIB
