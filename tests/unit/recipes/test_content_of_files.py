"""A large file is read once, and again after any change."""

import hashlib
import os
from pathlib import Path

import pytest

from primus_images.recipes import contents


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(contents, "_LARGE", 4)


def read_files(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return a list to which every file that is read is added."""
    files: list[Path] = []

    def sha256_of(file: Path) -> str:
        files.append(file)
        return hashlib.sha256(file.read_bytes()).hexdigest()

    monkeypatch.setattr(contents, "sha256_of", sha256_of)
    return files


def test_a_large_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = read_files(monkeypatch)
    monkeypatch.setattr(contents, "_SETTLED_SECONDS", -1.0)
    large = tmp_path / "large"
    large.write_bytes(b"12345")
    first = contents.content_of(large)
    assert contents.content_of(large) == first == hashlib.sha256(b"12345").hexdigest()
    assert files == [large]
    large.write_bytes(b"54321")
    os.utime(large, ns=(0, 0))
    assert contents.content_of(large) == hashlib.sha256(b"54321").hexdigest()
    os.utime(large, ns=(0, 0))  # the time of writing is as before, that of the change is not
    contents.content_of(large)
    assert files == [large] * 3


def test_small_and_new_files_are_read_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = read_files(monkeypatch)
    small = tmp_path / "small"
    small.write_bytes(b"123")
    new = tmp_path / "new"
    new.write_bytes(b"12345")
    for _ in range(2):
        contents.content_of(small)
        contents.content_of(new)
    assert files == [small, new] * 2
    assert not (tmp_path / "home").exists()


def test_damage_and_a_cache_that_is_no_folder_only_cost_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = read_files(monkeypatch)
    monkeypatch.setattr(contents, "_SETTLED_SECONDS", -1.0)
    large = tmp_path / "large"
    large.write_bytes(b"12345")
    digest = contents.content_of(large)
    (kept,) = (tmp_path / "home").rglob("contents/*")
    kept.write_bytes(kept.read_bytes()[:-3])
    assert contents.content_of(large) == digest
    monkeypatch.setenv("HOME", str(large))
    assert contents.content_of(large) == digest
    assert files == [large] * 3
