"""What may be published: each missing piece of evidence is an objection of its own."""

from dataclasses import replace
from typing import Any

import pytest

from primus_images.release.policy import Evidence, Policy, objections, unmet
from primus_images.training.judge.record import Machine, Rates
from records import RUNS, jobs, recipe, record, verdicts

GOOD = Evidence(
    target="mi300x",
    preview="",
    gpu=None,
    recipes=("one",),
    components={"pytorch": "torch"},
    failed_gates=(),
    records=(record(),),
    commit="c" * 40,
    edited=(),
)
QUICK = jobs("base")
NOT_RUN = jobs(*RUNS, without="resume")
COVERAGE = {"passed": False, "verdicts": verdicts("gate coverage", failed=("gate coverage",))}
DIVERGED = {"passed": False, "verdicts": verdicts("loss falls", failed=("loss falls",))}


def test_a_whole_release_may_be_published() -> None:
    assert objections(GOOD, Policy(), preview=False) == ()
    assert (
        objections(
            replace(GOOD, gpu="mi355x", records=(record(gpu="mi355x"),)), Policy(), preview=False
        )
        == ()
    )
    shared = (record(jobs=QUICK), record(recipe=recipe(name="two")))
    assert (
        objections(replace(GOOD, recipes=("one", "two"), records=shared), Policy(), preview=False)
        == ()
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"preview": "no code for gfx950"}, "it is a preview: no code for gfx950"),
        ({"failed_gates": ("litter",)}, "gate litter fails"),
        ({"failed_gates": ("coverage",)}, "gate coverage fails"),
        ({"recipes": ()}, "names no recipe"),
        ({"components": {"pytorch": "torch", "apex": "apex"}}, "no validation loaded apex"),
        ({"records": ()}, "one did not pass a validation in this image"),
        ({"recipes": ("one", "two")}, "two did not pass a validation in this image"),
        ({"records": (record(passed=False),)}, "one did not pass a validation in this image"),
        (
            {"records": (record(), record(recipe=recipe(precision="bf16"), **DIVERGED))},
            "the newest validation of one (bf16) on the CPU failed: loss falls",
        ),
        (
            {"records": (record(), record(gpu="mi300x", passed=False, verdicts=()))},
            "on mi300x failed: not all of its jobs ran",
        ),
        ({"records": (record(jobs=QUICK),)}, "repeated a run, resumed it and split its batch"),
        ({"records": (record(jobs=NOT_RUN),)}, "repeated a run, resumed it and split its batch"),
        ({"gpu": "mi355x"}, "nothing was trained in this image on mi355x"),
        (
            {"gpu": "mi355x", "records": (record(gpu="mi300x"),)},
            "nothing was trained in this image on mi355x",
        ),
        (
            {
                "gpu": "mi355x",
                "recipes": ("one", "two"),
                "records": (record(gpu="mi355x"), record(recipe=recipe(name="two"))),
            },
            "two did not pass a validation in this image on mi355x",
        ),
        (
            {"gpu": "mi355x", "records": (record(gpu="mi355x", jobs=QUICK), record())},
            "no validation in this image on mi355x repeated a run",
        ),
        ({"commit": None}, "the commit it was built from is unknown"),
        ({"edited": tuple("vwxyz")}, "files differ from commit cccccccccccc: v, w, x and 2 more"),
    ],
)
def test_each_lack_is_named(changes: dict[str, Any], words: str) -> None:
    found = objections(replace(GOOD, **changes), Policy(), preview=False)
    assert any(words in objection for objection in found), found


@pytest.mark.parametrize(
    "changes",
    [
        {
            "preview": "no code for gfx950",
            "failed_gates": ("coverage",),
            "records": (record(**COVERAGE),),
        },
        {"gpu": "mi355x"},
        {"commit": None},
        {"edited": ("versions.yaml",)},
    ],
)
def test_a_preview_may_lack_what_makes_it_one(changes: dict[str, Any]) -> None:
    assert objections(replace(GOOD, **changes), Policy(), preview=True) == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"failed_gates": ("litter",)},
        {"records": ()},
        {"records": (record(**DIVERGED),)},
        {"records": (record(verdicts=()),)},
        {"records": (record(jobs=NOT_RUN),)},
        {
            "recipes": ("one", "two"),
            "records": (record(), record(recipe=recipe(name="two"), jobs=NOT_RUN)),
        },
        {"recipes": ()},
    ],
)
def test_a_preview_may_lack_nothing_else(changes: dict[str, Any]) -> None:
    assert objections(replace(GOOD, **changes), Policy(), preview=True)


RATES = Rates(faults=100, named=99, healthy=100, refused=1)


@pytest.mark.parametrize(
    ("policy", "rates", "reasons"),
    [
        (Policy(found=0.99, alarms=0.01), RATES, []),
        (Policy(found=0.991), RATES, ["the suite finds 99 of 100 faults, less than 99.1%"]),
        (
            Policy(alarms=0.009),
            RATES,
            ["the suite refuses 1 of 100 healthy runs, more than 0.9%"],
        ),
        (
            Policy(found=0.5),
            None,
            ["the validation of one says nothing about its suite's own faults"],
        ),
        (Policy(), None, []),
        (
            Policy(found=0.5),
            Rates(faults=0, named=0, healthy=100, refused=1),
            ["the suite was tried with no fault, so the share that it finds is unknown"],
        ),
        (
            Policy(alarms=0.5),
            Rates(faults=100, named=99, healthy=0, refused=0),
            ["the suite was tried with no healthy run, so the share that it refuses is unknown"],
        ),
    ],
)
def test_the_suite_itself_must_be_good_enough(
    policy: Policy, rates: Rates | None, reasons: list[str]
) -> None:
    made = record()
    made = replace(made, suite=replace(made.suite, rates=rates))
    assert list(unmet(made, policy)) == reasons


def test_a_gpu_must_have_the_driver_and_firmware_of_the_policy() -> None:
    policy = Policy(driver="6.12", firmware="7")
    good = Machine(driver="6.12", firmware="7")
    assert list(unmet(record(gpu="mi300x", machine=good), policy)) == []
    assert list(unmet(record(gpu="mi300x", machine=Machine(driver="6.10")), policy)) == [
        "one was validated with driver 6.10, not 6.12",
        "one was validated with firmware unknown, not 7",
    ]
    assert list(unmet(record(), policy)) == [], "a CPU has neither"
