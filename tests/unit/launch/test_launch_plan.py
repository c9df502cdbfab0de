"""What a job on several nodes is, before Slurm or Kubernetes starts it."""

import pytest

from primus_images.launch.plan import Plan
from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices


def plan(*words: str, gpu: str = "mi300x", options: tuple[str, ...] = ()) -> Plan:
    return Plan(recipe=resolve("llama3.1-8b", words, Choices(nodes=2, gpu=gpu)), options=options)


@pytest.mark.parametrize(
    ("words", "mesh"),
    [
        ((), {"dp": 16}),
        (("tp=8",), {"dp": 2, "tp": 8}),
        (("tp=2", "pp=2"), {"dp": 4, "tp": 2, "pp": 2}),
        (("cp=2",), {"dp": 8, "cp": 2}),
        (("replicas=2",), {"dp": 16, "replicas": 2}),
    ],
)
def test_the_mesh_has_the_degrees_above_1(words: tuple[str, ...], mesh: dict[str, int]) -> None:
    made = plan(*words)
    assert made.mesh == mesh
    listed = " × ".join(f"{name} {degree}" for name, degree in mesh.items())
    assert f"mesh         {listed}" in made.lines()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            (),
            "none: a restarted job begins at step 1 (torchtitan.checkpoint.interval=N writes them)",
        ),
        (("checkpoint=10",), "every 10 steps"),
        (("saving.minutes=30",), "every 30 minutes"),
    ],
)
def test_the_plan_says_when_checkpoints_are_written(words: tuple[str, ...], line: str) -> None:
    assert plan(*words).lines()[-1] == f"checkpoints  {line}"


@pytest.mark.parametrize(("interval", "warned"), [(0, False), (19, False), (20, True), (30, True)])
def test_checkpoints_that_no_attempt_can_continue_from_are_pointed_out(
    interval: int, warned: bool
) -> None:
    warning = plan("steps=20", f"checkpoint={interval}").warning()
    assert (warning is not None) == warned
    if warning is not None:
        assert f"every {interval} steps, and the job ends at step 20" in warning


@pytest.mark.parametrize(
    ("words", "options", "last"),
    [(("steps=20",), (), 20), (("steps=20",), ("--judge",), 0)],
)
def test_an_attempt_continues_before_the_last_step_unless_it_is_judged(
    words: tuple[str, ...], options: tuple[str, ...], last: int
) -> None:
    assert plan(*words, options=options).resumable == last


def test_every_choice_is_explicit_on_the_nodes() -> None:
    command = plan("lr=1e-4", options=("--judge",)).command
    assert command[:2] == ("train", "llama3.1-8b")
    for word in ("--backend=torchtitan", "--gpu=mi300x", "--nodes=2", "--judge", "proxy=false"):
        assert word in command
    assert command[-1] == "torchtitan.optimizer.lr=1e-4"
    proxy = plan("proxy=true", gpu="cpu")
    assert "--proxy" in proxy.command and "proxy=true" not in proxy.command
    assert proxy.memory is None
    assert "memory       not predicted" in proxy.lines()


def test_the_document_has_the_figures_of_the_lines() -> None:
    made = plan("steps=20", "checkpoint=10", "tp=8")
    document = made.document()
    assert (document["nodes"], document["ranks_per_node"], document["world_size"]) == (2, 8, 16)
    assert (document["mesh"], document["checkpoint_interval"]) == (made.mesh, 10)
    tokens = document["global_batch"] * made.recipe.seq_len
    assert (document["steps"], document["tokens_per_step"]) == (20, tokens)
    assert document["checkpoint_minutes"] == 0
    by_time = plan("checkpoint=30m").document()
    assert (by_time["checkpoint_interval"], by_time["checkpoint_minutes"]) == (0, 30)
