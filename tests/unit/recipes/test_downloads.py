"""Weights on the hub: what is downloaded of them, and what is said if that fails."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from primus_images.errors import HostError
from primus_images.recipes.weights import FILES, downloaded, folder_of

DESCRIBING = ["*.json", "*.jinja", "*.model", "*.txt"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, dict[str, Any]]]:
    """What a stand-in for the hub's library is asked for, which answers with a folder."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def snapshot_download(name: str, **options: Any) -> str:
        calls.append((name, options))
        return str(tmp_path)

    hub = SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    return calls


@pytest.mark.parametrize("offline", [False, True])
def test_only_files_of_the_patterns_are_downloaded(
    asked: list[tuple[str, dict[str, Any]]], tmp_path: Path, offline: bool
) -> None:
    assert downloaded("hf:meta/Llama", "*.json", offline=offline) == tmp_path
    assert asked == [
        (
            "meta/Llama",
            {
                "allow_patterns": ["*.json"],
                "ignore_patterns": ["consolidated*", "original/*"],
                "local_files_only": offline,
            },
        )
    ]


@pytest.mark.parametrize(
    ("kind", "whole", "patterns"),
    [
        ("llama", False, [DESCRIBING]),
        ("llama", True, [DESCRIBING, list(FILES)]),
        # The number of parameters of no family is counted in the tensors.
        ("new", False, [DESCRIBING, list(FILES)]),
    ],
)
def test_tensors_are_downloaded_only_where_they_are_read(
    asked: list[tuple[str, dict[str, Any]]],
    tmp_path: Path,
    kind: str,
    whole: bool,
    patterns: list[list[str]],
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    assert folder_of("hf:a/b", whole=whole) == tmp_path
    assert [options["allow_patterns"] for _, options in asked] == patterns


def test_a_folder_is_taken_as_it_is(asked: list[tuple[str, dict[str, Any]]]) -> None:
    assert folder_of("some/folder", whole=True) == Path("some/folder")
    assert asked == []


def test_without_the_library_a_folder_is_named_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(HostError) as caught:
        downloaded("hf:a/b")
    assert caught.value.message == "hf:a/b: huggingface_hub is not installed"
    assert caught.value.hint == "run this inside a primus image, or name a folder"


def test_a_hub_that_refuses_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, **_: Any) -> str:
        raise ValueError(f"  401: no access to {name}\nRequest ID: 7")

    hub = SimpleNamespace(snapshot_download=refuse)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    with pytest.raises(HostError) as caught:
        downloaded("hf:a/b")
    assert caught.value.message == (
        "hf:a/b cannot be downloaded: ValueError: 401: no access to a/b"
    )
    assert "HF_TOKEN opens what is not public" in str(caught.value.hint)
