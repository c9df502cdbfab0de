"""The GPUs of a validation: which are used, and what proves that the jobs ran on them."""

from pathlib import Path
from typing import Any

import pytest

from primus_images.errors import HostError
from primus_images.gpus.detect import DetectedGpus, detect
from primus_images.gpus.table import generation
from primus_images.recipes.resolve import resolve
from primus_images.release import hardware
from primus_images.release.cells import cell_of
from primus_images.release.hardware import Hardware, choose_gpus, ran_on, require_gpus
from primus_images.sandbox.container import Devices
from primus_images.training.run.job import Job
from primus_images.training.run.logs import Series
from primus_images.training.run.outcome import Outcome
from tables import table_of

NAME = "AMD Instinct MI300X (gfx942)"
EIGHT = DetectedGpus(vendor="amd", names=(NAME,) * 8, generation="mi300x", driver="amdgpu 6.14.14")
MI300X = generation("mi300x")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what this machine shows; the devices are then named after what is asked."""

    def show(found: DetectedGpus) -> None:
        monkeypatch.setattr(hardware, "detect", lambda: found)
        monkeypatch.setattr(
            "primus_images.release.hardware.gpus",
            lambda count: Devices(names=(f"amd.com/gpu={count}",)),
        )

    return show


def test_a_target_gets_the_gpu_that_it_is_for(machine: Any) -> None:
    machine(EIGHT)
    found = choose_gpus(None, MI300X)
    assert (found.gpu, len(found.names), found.driver) == ("mi300x", 8, "amdgpu 6.14.14")
    assert found.devices.names == ("amd.com/gpu=all",)


@pytest.mark.parametrize(
    ("shown", "why"),
    [
        (DetectedGpus(), "none found"),
        (EIGHT, "8 × AMD Instinct MI300X"),
        (DetectedGpus(vendor="amd", names=("unknown AMD GPU",)), "unknown AMD GPU"),
    ],
)
def test_another_machine_validates_on_its_cpu_and_says_why(
    machine: Any, shown: DetectedGpus, why: str
) -> None:
    machine(shown)
    found = choose_gpus(None, generation("mi355x"))
    assert (found.gpu, found.devices) == ("none", Devices())
    assert "MI355X" in found.why
    assert why in found.why


def test_a_target_for_the_cpu_gets_no_gpu_unless_asked(machine: Any) -> None:
    machine(EIGHT)
    assert choose_gpus(None, None) == Hardware()
    assert choose_gpus("none", None) == Hardware()
    assert choose_gpus("none", MI300X).gpu == "none"
    two = choose_gpus("2", None)
    assert (two.gpu, len(two.names), two.devices.names) == ("mi300x", 2, ("amd.com/gpu=2",))


def test_an_unknown_gpu_is_never_recorded(machine: Any) -> None:
    machine(DetectedGpus(vendor="amd", names=("unknown AMD GPU",)))
    with pytest.raises(HostError, match="cannot be identified: 1 × unknown AMD GPU"):
        choose_gpus("all", MI300X)
    machine(DetectedGpus())
    with pytest.raises(HostError, match="its driver reports none"):
        choose_gpus("all", MI300X)


def outcome(**facts: str) -> Outcome:
    recipe = resolve("llama3-proxy", ())
    job = Job(name="base", recipe=recipe, output=Path("base"))
    return Outcome(job=job, exit_code=0, series=Series(), facts=facts)


@pytest.mark.parametrize(("facts", "passed", "reason"), table_of("hardware.where_jobs_ran"))
def test_the_jobs_prove_where_they_ran(facts: dict[str, str], passed: bool, reason: str) -> None:
    verdict = ran_on("mi300x", {"base": outcome(**facts)})
    assert (verdict.passed, verdict.reason) == (passed, reason)
    assert not ran_on("mi300x", {}).passed, "no job proves nothing"


def test_a_recipe_with_more_ranks_than_gpus() -> None:
    recipe = resolve("llama3-proxy", ())
    assert recipe.world_size == 2
    require_gpus(recipe, Hardware())
    require_gpus(recipe, Hardware(gpu="mi300x", names=(NAME,) * 2))
    with pytest.raises(HostError, match="trains on 2 GPUs, but its job gets 1"):
        require_gpus(recipe, Hardware(gpu="mi300x", names=(NAME,)))


def test_cells_for_a_gpu() -> None:
    cell = cell_of("llama3-proxy", "mi300x")
    recipe = resolve(cell.recipe, (), cell.choices)
    assert recipe.gpu == "mi300x"
    assert "--gpu=mi300x" in Job(name="x", recipe=recipe, output=Path("x")).arguments()


@pytest.mark.parametrize(("files", "driver"), table_of("hardware.the_driver"))
def test_the_driver(tmp_path: Path, files: dict[str, str], driver: str) -> None:
    node = tmp_path / "sys/class/kfd/kfd/topology/nodes/1/properties"
    for path, text in {
        **files,
        str(node.relative_to(tmp_path)): "simd_count 1216\ngfx_target_version 90402\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert detect(tmp_path).driver == driver


@pytest.mark.parametrize(
    ("text", "model"),
    [
        (
            "model name\t: EPYC\ncpu family\t: 25\nmodel\t\t: 17\nstepping\t: 1\n\nmodel name: X",
            "EPYC, cpu family 25, model 17, stepping 1",
        ),
        ("processor\t: 0\nmodel\t: 3\n", "unknown, model 3"),
        ("", "unknown"),
    ],
)
def test_a_cpu_is_named_by_its_first_core(
    text: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(hardware, "Path", lambda _: tmp_path / "cpuinfo")
    assert hardware.cpu_model() == model
