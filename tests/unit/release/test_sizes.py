"""The size of an image that has no lock yet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from primus.errors import InputError
from primus.plan.project import Project
from primus.plan.resolve import resolve
from primus.release.gate_record import load_gate_records
from primus.release.sizes import CHANNEL, Size, estimate, load_sizes, sizes_page
from project_kit import Kit

REPOSITORY = Path(__file__).parents[3]
TARGETS = ("mi300x", "mi325x", "mi350x", "mi355x")


@pytest.mark.parametrize("name", TARGETS)
def test_every_part_of_a_release_image_has_a_size_and_all_fit_the_budget(name: str) -> None:
    resolved = resolve(Project(REPOSITORY, channel=CHANNEL), name)
    found = estimate(resolved, load_gate_records(REPOSITORY)[name], load_sizes())
    named = [part for one in found.parts for part in one.names]
    assert {*resolved.pins, *resolved.extras, "image", "base"} <= set(named)
    assert len(named) == len(set(named)), "nothing counts twice"
    assert found.budget_gb == 10
    assert found.gb() < found.budget_gb
    assert found.gb() == pytest.approx(found.gb("published", "measured", "near") + found.gb("assumed"))


def test_a_component_without_a_size_is_an_error() -> None:
    sizes = load_sizes()
    without = replace(sizes, sizes=tuple(row for row in sizes.sizes if "aiter" not in row.for_))
    resolved = resolve(Project(REPOSITORY, channel=CHANNEL), "mi355x")
    with pytest.raises(InputError, match="no size of aiter is known for gfx950"):
        estimate(resolved, load_gate_records(REPOSITORY)["mi355x"], without)


def test_the_size_of_another_architecture_does_not_count() -> None:
    sizes, record = load_sizes(), load_gate_records(REPOSITORY)["mi355x"]
    resolved = resolve(Project(REPOSITORY, channel=CHANNEL), "mi355x")
    other = Size(for_=("aiter",), mb=9e6, basis="near", source="", arch="gfx942")
    more = replace(sizes, sizes=(*sizes.sizes, other))
    assert estimate(resolved, record, more).gb() == estimate(resolved, record, sizes).gb()


def test_every_figure_of_the_page_has_its_source() -> None:
    resolved = resolve(Project(REPOSITORY, channel=CHANNEL), "mi355x")
    found = estimate(resolved, load_gate_records(REPOSITORY)["mi355x"], load_sizes())
    page = sizes_page([found], load_sizes())
    assert f"| `mi355x` | gfx950 | {found.gb('published', 'measured'):.1f} GB |" in page
    for part in found.parts:
        assert part.source in page
        assert part.source


def test_a_plan_without_a_lock_says_how_large_the_image_will_be(capfd: pytest.CaptureFixture[str]) -> None:
    said = Kit(REPOSITORY).primus("plan", "mi355x", "--channel", "amd", "--offline")
    assert said.code == 2
    assert said.err.startswith("! mi355x on channel amd: about ")
    assert "its budget is 10 GB" in said.err
    assert "mi355x has no lock yet" in said.err
