"""Golden curves: where a run leaves one, what is missing, and what changed between two releases."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from primus_images.errors import InputError
from primus_images.release import golden
from primus_images.release.golden import Curves
from primus_images.training.judge.checks import Verdict
from primus_images.training.judge.record import Record, RecordedJob
from primus_images.versions.lock import LockedFile
from records import recipe, record

LOSSES = [6.0, 5.5, 5.0, 4.5]
NAME = "mixtral-8x7b-megatron-pretrain"


def evidence(losses: list[float] | None = None, **about: str) -> Record:
    """A record of a run that logged these losses."""
    series = tuple({"loss": loss, "grad_norm": 1.0} for loss in losses or LOSSES)
    described = {"name": "mixtral-8x7b", **about}
    job = RecordedJob(name="base", ran=True, series=series)
    return record(recipe=recipe(**described), jobs=(job,))


def kept(root: Path, *records: Record, release: str = "v26.11-cpu", cpu: str = "A") -> Curves:
    golden.save(root, golden.of_records(release, records, date="2026-11-22", cpu=cpu))
    found = golden.load(root, release)
    assert found is not None
    return found


def verdict(curves: Curves, seen: Record) -> Verdict:
    found = golden.compared([curves], seen)
    assert isinstance(found, Verdict)
    return found


def test_the_same_run_agrees_to_the_last_bit(tmp_path: Path) -> None:
    found = verdict(kept(tmp_path, evidence()), evidence())
    assert found.passed
    assert found.reason == "4 steps are equal to the last bit to those of v26.11-cpu"


def test_another_cpu_may_differ_by_rounding(tmp_path: Path) -> None:
    found = verdict(kept(tmp_path, evidence()), evidence([6.0, 5.5, 5.0001, 4.5]))
    assert found.passed
    assert "last bit" not in found.reason


# Seen between CPUs of two makers, by step: a mixture of experts and FLUX.
@pytest.mark.parametrize(
    ("gaps", "passed"),
    [
        (
            [
                7e-8,
                0,
                0,
                4e-8,
                0,
                9e-8,
                2e-6,
                5e-6,
                4e-6,
                1e-5,
                3e-5,
                4e-5,
                4e-5,
                9e-5,
                6e-4,
                7e-4,
                3e-4,
                8e-5,
                1e-3,
            ],
            1,
        ),
        ([0, 0, 0, 5e-8, 3e-7, 4e-6, 6e-6, 6e-6, 1e-4, 7e-5, 2.4e-4, 2e-5, 3e-5], 1),
        ([0, 0, 3e-4], 0),  # a fault is there from its first step on
        ([0, 0, 1e-4, 2e-4, 4e-4, 8e-4], 0),
    ],
)
def test_a_difference_may_grow_only_as_rounding_does(
    tmp_path: Path, gaps: list[float], passed: int
) -> None:
    curves = kept(tmp_path, evidence([6.0] * len(gaps)))
    assert verdict(curves, evidence([6.0 * (1 + gap) for gap in gaps])).passed == bool(passed)


@pytest.mark.parametrize(
    "losses", [[6.0, 5.5, 5.1, 4.5], [6.0, 5.5], [6.0, 5.5, float("nan"), 4.0]]
)
def test_the_step_at_which_a_run_leaves_the_curve_is_named(
    tmp_path: Path, losses: list[float]
) -> None:
    found = verdict(kept(tmp_path, evidence()), evidence(losses))
    assert not found.passed
    assert found.reason.startswith("the loss leaves the curve of v26.11-cpu at step 3")


def test_a_missing_curve_is_no_verdict(tmp_path: Path) -> None:
    curves = kept(tmp_path, evidence())
    assert golden.compared([], evidence()) == f"the golden curve: none is recorded for {NAME}"
    assert "another version" in str(golden.compared([curves], evidence(sha256="def")))


def test_a_bump_is_compared_with_the_newest_release_that_has_the_recipe(tmp_path: Path) -> None:
    for release, sha256 in (
        ("v26.9-cpu", "abc"),
        ("v26.10-cpu", "abc"),
        ("v26.11-cpu", "def"),
        ("v26.11-h200", "abc"),
    ):
        kept(tmp_path, evidence(sha256=sha256), release=release)
    every = golden.recorded(tmp_path, "cpu")
    assert [one.release for one in every] == ["v26.11-cpu", "v26.10-cpu", "v26.9-cpu"]
    found = golden.compared(every, evidence([6.0, 5.5, 5.1, 4.5]))
    assert isinstance(found, Verdict)
    assert found.reason == "the loss leaves the curve of v26.10-cpu at step 3, by 2.0e-02"


@pytest.mark.parametrize("other", [{"precision": "bf16"}, {"gpu": "mi355x"}])
def test_only_fp32_on_a_cpu_has_a_curve(other: dict[str, str]) -> None:
    assert golden.name_of(evidence(**other)) is None


def test_a_failed_run_leaves_no_curve(tmp_path: Path) -> None:
    assert kept(tmp_path, replace(evidence(), passed=False)).curves == {}


def test_curves_of_one_recipe_join_the_others(tmp_path: Path) -> None:
    versions = {"torch": "8"}
    kept(tmp_path, replace(evidence(), versions=versions))
    other = replace(evidence(name="llama3.1-8b"), versions=versions)
    golden.save(tmp_path, golden.of_records("v26.11-cpu", [other], cpu="B"), keep=True)
    found = golden.load(tmp_path, "v26.11-cpu")
    assert found is not None
    cpus = {name: curve.cpu for name, curve in found.curves.items()}
    assert cpus == {"llama3.1-8b-megatron-pretrain": "B", NAME: "A"}
    assert list(cpus) == sorted(cpus)
    newer = golden.of_records("v26.11-cpu", [replace(other, versions={"torch": "9"})], cpu="B")
    with pytest.raises(InputError, match="the curves of other recipes were recorded with torch 8"):
        golden.save(tmp_path, newer, keep=True)
    torch = LockedFile(
        kind="wheel", name="torch", version="9", file="torch.whl", size=1, sha256="0" * 64
    )
    with pytest.raises(InputError, match="the curves of other recipes were recorded with torch 8"):
        golden.check_locked(tmp_path, "v26.11-cpu", [torch])
    golden.check_locked(tmp_path, "v26.11-cpu", [replace(torch, version="8")])
    golden.check_locked(tmp_path, "v26.11-cpu", [replace(torch, base="a build")])
    golden.save(tmp_path, newer)
    assert kept(tmp_path, other).curves.keys() == {"llama3.1-8b-megatron-pretrain"}


@pytest.mark.parametrize(("cpu", "changed"), [("A", 1), ("B", 0)])
def test_only_one_type_of_cpu_repeats_a_curve_to_the_last_bit(
    tmp_path: Path, cpu: str, changed: int
) -> None:
    old = kept(tmp_path, evidence())
    new = kept(tmp_path, evidence([6.0, 5.5, 5.0001, 4.5]), release="v26.12-cpu", cpu=cpu)
    agree = golden.changes(old, new) == ("the only golden curve of both sides agrees",)
    assert agree != bool(changed)


@pytest.mark.parametrize(
    "curve",
    [
        '{"loss": [1]}',
        '{"recipe": "a", "loss": [1], "grad_norm": [], "cpu": "x"}',
        '{"recipe": "a", "loss": [], "grad_norm": [], "cpu": ""}',
    ],
)
def test_a_damaged_file_is_a_sentence(tmp_path: Path, curve: str) -> None:
    kept(tmp_path, evidence())
    text = f'{{"release": "v26.11-cpu", "curves": {{"a": {curve}}}}}'
    (tmp_path / golden.FOLDER / "v26.11-cpu.json").write_text(text)
    with pytest.raises(InputError, match="not a file of golden curves"):
        golden.load(tmp_path, "v26.11-cpu")


def test_a_run_without_steps_has_no_curve() -> None:
    made = evidence()
    made = replace(made, jobs=(replace(made.jobs[0], series=()),))
    assert golden.of_records("v26.11-cpu", [made]).curves == {}


def test_what_changed_between_two_releases(tmp_path: Path) -> None:
    old = kept(tmp_path, evidence(), evidence(name="llama3.1-8b"))
    new = kept(tmp_path, evidence([6.0, 5.5, 5.1, 4.5]), release="v26.12-cpu")
    assert golden.changes(old, replace(old, release="v26.12-cpu", date="2026-12-01")) == (
        "all 2 golden curves of both sides agree",
    )
    assert golden.changes(old, old) == (
        "training was not compared: both sides have the curves of one run, v26.11-cpu",
    )
    assert golden.changes(old, new) == (
        f"the loss of {NAME} changed at step 3, by 2.0e-02",
        "only v26.11-cpu has a curve of llama3.1-8b-megatron-pretrain",
    )
    curve = old.curves[NAME]
    more = {f"recipe-{number}": curve for number in (3, 1, 0, 4, 2)}
    wider = replace(new, curves={**old.curves, **more})
    assert golden.changes(old, wider) == (
        "all 2 golden curves of both sides agree",
        "only v26.12-cpu has a curve of recipe-0, recipe-1, recipe-2 and 2 more",
    )
    wider = replace(new, curves={**old.curves, **new.curves})
    assert golden.changes(old, wider) == (
        "1 of 2 golden curves of both sides agree",
        f"the loss of {NAME} changed at step 3, by 2.0e-02",
    )


def test_a_side_without_curves_is_named() -> None:
    some = Curves(release="v1", curves={})
    assert golden.changes(None, None, "v1", "v2") == ()
    assert golden.changes(some, None, "v1", "v2") == (
        "v2 has no golden curves, so training was not compared",
    )
    assert golden.changes(None, some, "v1", "v2") == (
        "v1 has no golden curves, so training was not compared",
    )


@pytest.mark.parametrize(
    ("step", "loss", "norm", "passed"),
    [
        (7, 2e-4, 0, True),
        (7, 3e-4, 0, False),
        # However late, the loss differs by 0.5 % at most, and the gradient norm by 20 %.
        (20, 4.9e-3, 0, True),
        (20, 5.1e-3, 0, False),
        (20, 0, 0.19, True),
        (20, 0, 0.21, False),
        # The gradient norm may differ by ten times as much from the first step on.
        (1, 0, 1.9e-3, True),
        (1, 0, 2.1e-3, False),
    ],
)
def test_the_tolerance_of_a_step_is_that_of_its_growth(
    tmp_path: Path, step: int, loss: float, norm: float, passed: bool
) -> None:
    losses = [6.0] * step
    curves = kept(tmp_path, evidence(losses))
    (job,) = evidence([*losses[:-1], 6.0 * (1 - loss)]).jobs
    last = {**job.series[-1], "grad_norm": 1.0 - norm}
    changed = replace(job, series=(*job.series[:-1], last))
    assert verdict(curves, replace(evidence(), jobs=(changed,))).passed is passed


@pytest.mark.parametrize("count", [3, 5])
def test_a_run_of_another_length_leaves_the_curve(tmp_path: Path, count: int) -> None:
    found = verdict(kept(tmp_path, evidence()), evidence([*LOSSES, 4.0][:count]))
    assert not found.passed
    assert found.reason.endswith(f"at step {min(count, 4) + 1}, by inf")


@pytest.mark.parametrize(
    ("old", "new", "gap"),
    [
        ([2.0], [2.0], 0.0),
        ([None], [2.0], math.inf),
        ([2.0], [None], math.inf),
        ([None], [None], math.inf),
        ([2.0], [], math.inf),
        ([], [2.0], math.inf),
    ],
)
def test_a_figure_that_one_side_lacks_is_as_far_as_can_be(
    old: list[float | None], new: list[float | None], gap: float
) -> None:
    assert golden._gap(old, new, 0) == gap
