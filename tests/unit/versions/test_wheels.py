from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primus.errors import HostError, InputError
from primus.versions.names import normalised
from primus.versions.piprun import explain
from primus.versions.wheels import parse_report, platforms

SHA = "ab" * 32


def _item(url: str, name: str = "Torch", version: str = "2.13.0+cpu", **archive: object) -> dict[str, object]:
    return {"download_info": {"url": url, "archive_info": archive}, "metadata": {"name": name, "version": version}}


def test_report_gives_file_name_unquoted_and_name_normalised() -> None:
    url = "file:///some/where/torch-2.13.0%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl"
    (found,) = parse_report({"install": [_item(url, name="Torch_Thing", hashes={"sha256": SHA})]})
    assert found.file == "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"
    assert (found.name, found.version, found.sha256) == ("torch-thing", "2.13.0+cpu", SHA)


@pytest.mark.parametrize(
    ("archive", "sha256"),
    [({"hash": f"sha256={SHA}"}, SHA), ({"hashes": {"md5": "00"}}, None), ({}, None), ({"hash": "md5=00"}, None)],
)
def test_report_hash_may_be_missing_but_never_another_kind(archive: dict[str, object], sha256: str | None) -> None:
    assert parse_report({"install": [_item("https://h/a-1-py3-none-any.whl", **archive)]})[0].sha256 == sha256


def test_report_with_an_sdist_is_refused() -> None:
    with pytest.raises(InputError, match="which is not a wheel"):
        parse_report({"install": [_item("https://h/a-1.tar.gz")]})


def test_platforms_stop_at_the_glibc_of_the_suite() -> None:
    tags = platforms("bookworm", "amd64")
    assert tags[0] == "manylinux_2_36_x86_64"
    assert {"manylinux_2_28_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64", "linux_x86_64"} <= set(tags)
    assert "manylinux_2_37_x86_64" not in tags
    assert "manylinux_2_37_x86_64" in platforms("trixie", "amd64")
    assert not any("x86" in tag for tag in platforms("bookworm", "arm64"))
    with pytest.raises(InputError, match="no glibc version is known for suite 'jammy'"):
        platforms("jammy", "amd64")


def test_a_version_nobody_has_names_nearest_and_latest() -> None:
    error = explain(
        "ERROR: Could not find a version that satisfies the requirement torch==2.13.9 "
        "(from versions: 2.12.0, 2.13.0, 2.15.0)\nERROR: No matching distribution found for torch==2.13.9"
    )
    assert isinstance(error, InputError)
    assert error.message == "there is no wheel of torch 2.13.9 for this target"
    assert error.hint == "nearest is 2.13.0, latest is 2.15.0"


def test_an_unknown_name_is_told_from_an_unknown_version() -> None:
    error = explain("ERROR: Could not find a version that satisfies the requirement nix==1 (from versions: none)")
    assert "no wheel of nix is on the Python indexes" in error.message


def test_a_conflict_is_one_sentence_with_both_sides() -> None:
    error = explain(
        "ERROR: Cannot install a==1 and b==1 because these package versions have conflicting dependencies.\n\n"
        "The conflict is caused by:\n    The user requested b==1\n    a 1 depends on b==2\n\nTo fix this\n"
    )
    assert isinstance(error, InputError)
    assert error.message == "the pins are not compatible: b==1 is required; a 1 depends on b==2"
    assert error.about == "b"


def test_a_version_that_no_index_has_is_no_conflict() -> None:
    error = explain(
        "ERROR: Cannot install torch==2.13.0+cpu because these package versions have conflicting dependencies.\n\n"
        "The conflict is caused by:\n    The user requested torch==2.13.0+cpu\n"
        "    The user requested (constraint) torch<=2.14.1,==2.13.0+cpu\n\n"
        "Additionally, some packages in these conflicts have no matching distributions available for your "
        "environment:\n    torch\n\nTo fix this\n"
    )
    assert isinstance(error, InputError)
    assert error.message == "no Python index of this host has a wheel of torch 2.13.0+cpu for this target"
    assert error.about == "torch"


def test_a_network_failure_is_no_input_error() -> None:
    error = explain(
        "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError'\n"
        "ERROR: Could not find a version that satisfies the requirement a==1 (from versions: none)"
    )
    assert isinstance(error, HostError)


@given(st.one_of(st.text(), st.text().map("ERROR: {}".format)))
def test_explain_always_answers_with_one_line(text: str) -> None:
    assert "\n" not in explain(text).message


@given(st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", fullmatch=True))
def test_normalise_is_idempotent(name: str) -> None:
    once = normalised(name)
    assert normalised(once) == once
    assert "_" not in once
    assert once == once.lower()
