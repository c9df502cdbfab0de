"""Two sibling layers never own one path."""

import contextlib

import pytest
from hypothesis import given, strategies as st

from primus_images.errors import CheckFailed
from primus_images.oci.layer import check_overlap

FOLDER = "dir 755 0:0"
FILE = "file 644 0:0"


def test_shared_folders_are_fine() -> None:
    check_overlap(
        [("a", False, {"opt": FOLDER, "opt/a": FILE}), ("b", False, {"opt": FOLDER, "opt/b": FILE})]
    )


def test_a_file_in_two_layers_names_both() -> None:
    with pytest.raises(CheckFailed, match=r"/opt/lib\.so is in both te \(.*\) and aiter"):
        check_overlap([("te", False, {"opt/lib.so": FILE}), ("aiter", False, {"opt/lib.so": FILE})])


def test_a_base_images_own_layers_replace_each_others_files() -> None:
    layers = [("lower", True, {"opt": FOLDER, "opt/a": FILE}), ("upper", True, {"opt/a": FILE})]
    check_overlap(layers)
    with pytest.raises(CheckFailed, match=r"/opt/a is in both the base image \(.*\) and te"):
        check_overlap([*layers, ("te", False, {"opt/a": FILE})])


@pytest.mark.parametrize(
    ("below", "above", "sentence"),
    [
        ({"opt": FOLDER}, {"opt": "dir 1777 0:0"}, "/opt is in both"),
        (
            {"lib": "symlink 777 0:0"},
            {"lib/a.so": FILE},
            "/lib/a.so of b lies below the symbolic link /lib of a",
        ),
        ({f"f{i}": FILE for i in range(9)}, {f"f{i}": FILE for i in range(9)}, "and 4 more"),
    ],
)
def test_a_clash(below: dict[str, str], above: dict[str, str], sentence: str) -> None:
    with pytest.raises(CheckFailed, match=sentence):
        check_overlap([("a", False, below), ("b", False, above)])


NAMES = st.sets(st.sampled_from([f"p{i}" for i in range(8)]), max_size=5)


@given(st.lists(NAMES, min_size=2, max_size=4))
def test_files_clash_exactly_when_sets_meet(layers: list[set[str]]) -> None:
    meet = len(set().union(*layers)) < sum(map(len, layers))
    with pytest.raises(CheckFailed) if meet else contextlib.nullcontext():
        check_overlap(
            [(str(i), False, dict.fromkeys(sorted(names), FILE)) for i, names in enumerate(layers)]
        )
