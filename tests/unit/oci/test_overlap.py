"""Two sibling layers never own one path."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primus.errors import CheckFailed
from primus.oci.layer import check_overlap, overlaps

FOLDER = "dir 755 0:0"
FILE = "file 644 0:0"


def test_shared_folders_are_fine() -> None:
    check_overlap([("a", False, {"opt": FOLDER, "opt/a": FILE}), ("b", False, {"opt": FOLDER, "opt/b": FILE})])


def test_a_file_in_two_layers_names_both() -> None:
    with pytest.raises(CheckFailed, match=r"/opt/lib\.so is in both te \(.*\) and aiter"):
        check_overlap([("te", False, {"opt/lib.so": FILE}), ("aiter", False, {"opt/lib.so": FILE})])


def test_a_base_images_own_layers_replace_each_others_files() -> None:
    layers = [("lower", True, {"opt": FOLDER, "opt/a": FILE}), ("upper", True, {"opt/a": FILE})]
    check_overlap(layers)
    with pytest.raises(CheckFailed, match=r"/opt/a is in both the base image \(.*\) and te"):
        check_overlap([*layers, ("te", False, {"opt/a": FILE})])


def test_a_folder_with_other_rights_is_a_clash() -> None:
    assert overlaps([("a", {"opt": FOLDER}), ("b", {"opt": "dir 1777 0:0"})])


def test_a_path_below_another_layers_link_is_a_clash() -> None:
    found = overlaps([("base", {"lib": "symlink 777 0:0", "usr": FOLDER}), ("x", {"lib/a.so": FILE})])
    assert found == ["/lib/a.so of x lies below the symbolic link /lib of base"]


def test_many_clashes_are_counted() -> None:
    paths = {f"f{i}": FILE for i in range(9)}
    with pytest.raises(CheckFailed, match="and 4 more"):
        check_overlap([("a", False, paths), ("b", False, paths)])


NAMES = st.sets(st.sampled_from([f"p{i}" for i in range(8)]), max_size=5)


@given(st.lists(NAMES, min_size=2, max_size=4))
def test_files_clash_exactly_when_sets_meet(layers: list[set[str]]) -> None:
    found = overlaps([(str(i), dict.fromkeys(sorted(names), FILE)) for i, names in enumerate(layers)])
    assert bool(found) == (len(set().union(*layers)) < sum(map(len, layers)))
