"""A target with a GPU carries that generation's environment, and its own goes over it."""

import json
from pathlib import Path

import pytest

from primus_images.gpus.table import environment
from project_kit import Kit, make_project

BAKED = {v.name: v.value for v in environment("mi355x")}


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    kit = make_project(tmp_path / "project")
    kit.edit("images/demo.yaml", "channels:", "gpu: mi355x\nchannels:")
    # Nothing in it is for that GPU, which no release may be.
    kit.edit(
        "images/demo.yaml",
        "channels: [local]",
        "channels: [local]\npreviews: {local: it is a test}",
    )
    return kit


def baked(kit: Kit, digest: str) -> dict[str, str]:
    store = kit.root / ".primus/store/blobs/sha256"
    manifest = json.loads((store / digest.removeprefix("sha256:")).read_bytes())
    config = json.loads((store / manifest["config"]["digest"].removeprefix("sha256:")).read_bytes())
    pairs = [line.partition("=") for line in config["config"]["Env"]]
    assert len({name for name, _, _ in pairs}) == len(pairs)
    return {name: value for name, _, value in pairs}


def test_the_image_carries_the_generations_environment(kit: Kit) -> None:
    assert baked(kit, kit.build().digest) == {**BAKED, "COLOR": "red"}


def test_the_target_file_wins(kit: Kit) -> None:
    kit.edit("images/demo.yaml", "name: COLOR, value: red", "name: GPU_MAX_HW_QUEUES, value: '4'")
    assert baked(kit, kit.build().digest) == {**BAKED, "GPU_MAX_HW_QUEUES": "4"}


def test_another_gpu_is_another_image_of_the_same_layers(kit: Kit) -> None:
    first = kit.build().digest
    kit.edit("images/demo.yaml", "gpu: mi355x", "gpu: mi300x")
    second = kit.build()
    assert second.digest != first
    assert "0 layers built" in second.err
    assert baked(kit, second.digest)["NVTE_CK_IS_V3_ATOMIC_FP32"] == "1"


def test_a_variable_that_is_listed_twice_is_refused_with_its_place(kit: Kit) -> None:
    kit.edit(
        "images/demo.yaml",
        "environment:\n",
        "environment:\n  - {name: COLOR, value: blue, why: again}\n",
    )
    result = kit.primus("plan", "demo")
    assert result.code == 2
    assert "images/demo.yaml:9:5: COLOR is listed twice in environment" in result.err
