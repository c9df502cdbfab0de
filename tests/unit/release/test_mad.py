"""The files with which madengine trains an image's recipes."""

import json
from pathlib import Path
from typing import Any

import pytest

from primus_images.plan.project import Project
from primus_images.plan.resolve import resolve
from primus_images.recipes.load import entries
from primus_images.release.mad import mad_files, tags_of

ROOT = Path(__file__).resolve().parents[3]
IMAGE = "rocm/primus@sha256:1"


def of_target(name: str) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    files = mad_files(resolve(Project.find(ROOT), name), IMAGE)
    models = json.loads(files["models.json"])
    return files, {model["args"]: model for model in models}


@pytest.mark.parametrize(
    ("target", "file", "context"),
    [
        ("mi300x", "docker/primus.ubuntu.amd.Dockerfile", "{'gpu_vendor': 'AMD'}"),
        ("h200", "docker/primus.ubuntu.nvidia.Dockerfile", "{'gpu_vendor': 'NVIDIA'}"),
        ("cpu", "docker/primus.ubuntu.Dockerfile", "{}"),
    ],
)
def test_the_image_is_that_of_its_vendor(target: str, file: str, context: str) -> None:
    files, models = of_target(target)
    assert sorted(files) == sorted(["models.json", file, "scripts/primus/run.sh"])
    assert f"# CONTEXT {context}" in files[file]
    assert f"FROM {IMAGE}" in files[file] or IMAGE in files[file]
    names = [model["name"] for model in models.values()]
    assert len(names) == len(set(names))
    for model in models.values():
        assert model["dockerfile"] == "docker/primus"
        assert model["scripts"] == "scripts/primus/run.sh"
        assert (model["n_gpus"], model["timeout"]) == ("-1", 8 * 3600)
        assert f"v26.11-{target}" in " ".join(model["tags"])


def test_every_way_to_train_that_the_gpu_supports_is_a_model() -> None:
    _, models = of_target("mi300x")
    ways = {
        f"{entry.recipe} --backend {entry.backend} --mode {entry.mode} --precision {precision} "
        "--gpu mi300x"
        for entry in entries()
        for precision, gpus in entry.precisions.items()
        if "mi300x" in gpus
    }
    assert models.keys() == ways
    assert not any("mxfp8" in way for way in ways)
    bf16 = "llama3.1-8b --backend torchtitan --mode pretrain --precision"
    first, second = (models[f"{bf16} {name} --gpu mi300x"] for name in ("bf16", "fp8"))
    assert first["training_precision"] == "bf16"
    assert second["name"] == f"{first['name']}_fp8"
    assert first["tags"][-3:] == ["llama3.1-8b", "torchtitan", "pretrain"]


def test_an_image_without_a_gpu_trains_proxies() -> None:
    _, models = of_target("cpu")
    assert all(args.endswith("--gpu cpu --proxy") for args in models)
    assert "llama3.1-8b" in {args.partition(" ")[0] for args in models}


def test_the_tags_are_mads_or_in_their_style() -> None:
    assert "primus_pyt_megatron_lm_train_llama-3.1-8b" in tags_of(
        "llama3.1-8b", "megatron", "pretrain"
    )
    assert tags_of("mine", "fsdp", "pretrain") == ["primus_fsdp_train_mine"]
    assert tags_of("mine", "fsdp", "lora") == ["primus_fsdp_train_mine_lora"]
