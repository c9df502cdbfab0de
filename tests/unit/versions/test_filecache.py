import hashlib
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from primus_images.versions.filecache import FileCache

DATA = b"some bytes" * 1000
SHA = hashlib.sha256(DATA).hexdigest()


def _source(folder: Path, data: bytes = DATA) -> Path:
    path = folder / "source"
    path.write_bytes(data)
    return path


def test_put_makes_a_file_that_is_there_and_right(tmp_path: Path) -> None:
    cache = FileCache(tmp_path / "files")
    assert not cache.has(SHA, len(DATA))
    assert not cache.verify(SHA)
    assert cache.put(_source(tmp_path), SHA)
    assert cache.has(SHA, len(DATA))
    assert not cache.has(SHA, len(DATA) + 1)
    assert cache.verify(SHA)
    assert [p.name for p in (tmp_path / "files/sha256").iterdir()] == [SHA]


@pytest.mark.parametrize("begun", [b"", DATA[:100], b"a page of an error" * 1000])
def test_put_takes_nothing_of_an_interrupted_fetch(begun: bytes, tmp_path: Path) -> None:
    cache = FileCache(tmp_path / "files")
    with cache.part(SHA) as part:
        assert part is not None
        part.write(begun)
    assert cache.size(SHA) == len(begun)
    assert cache.put(_source(tmp_path), SHA)
    assert cache.verify(SHA)


def test_put_refuses_other_bytes(tmp_path: Path) -> None:
    cache = FileCache(tmp_path / "files")
    assert not cache.put(_source(tmp_path, DATA + b"!"), SHA)
    assert not cache.path(SHA).exists()


def test_other_bytes_are_not_continued_by_the_next_fetch(tmp_path: Path) -> None:
    cache = FileCache(tmp_path / "files")
    with cache.part(SHA) as part:
        assert part is not None
        part.write(b"a page of an error" * 100)
        assert cache.commit(part, SHA) != SHA
    assert cache.size(SHA) == 0
    with cache.part(SHA) as part:
        assert part is not None
        part.write(DATA)
        assert cache.commit(part, SHA) == SHA
    assert cache.verify(SHA)


@pytest.mark.parametrize("left", [b"", DATA[:100], bytes(len(DATA)), None])
def test_what_a_power_cut_left_is_replaced(left: bytes | None, tmp_path: Path) -> None:
    cache = FileCache(tmp_path / "files")
    assert cache.put(_source(tmp_path), SHA)
    cache.path(SHA).unlink()
    if left is None:
        cache.path(SHA).mkdir()
    else:
        cache.path(SHA).write_bytes(left)
    assert cache.put(_source(tmp_path), SHA)
    assert cache.verify(SHA)
    assert [p.name for p in (tmp_path / "files/sha256").iterdir()] == [SHA]


def test_verify_sees_a_flipped_bit(tmp_path: Path) -> None:
    cache = FileCache(tmp_path / "files")
    cache.put(_source(tmp_path), SHA)
    cache.path(SHA).chmod(0o644)
    cache.path(SHA).write_bytes(b"X" + DATA[1:])
    assert cache.has(SHA, len(DATA))
    assert not cache.verify(SHA)
    cache.drop(SHA)
    assert cache.put(_source(tmp_path), SHA)
    assert cache.verify(SHA)


def test_an_interrupted_part_is_kept_and_continued(tmp_path: Path) -> None:
    cache = FileCache(tmp_path / "files")
    with pytest.raises(KeyboardInterrupt), cache.part(SHA) as part:
        assert part is not None
        part.write(DATA[:4000])
        raise KeyboardInterrupt
    assert not cache.path(SHA).exists()
    with cache.part(SHA) as part:
        assert part is not None
        assert part.seek(0, os.SEEK_END) == 4000
        part.write(DATA[4000:])
        assert cache.commit(part, SHA) == SHA
    assert cache.verify(SHA)


def test_the_second_of_two_waits_and_finds_it_done(tmp_path: Path) -> None:
    cache = FileCache(tmp_path / "files")
    inside, release = threading.Event(), threading.Event()
    order: list[str] = []

    def first() -> None:
        with cache.part(SHA) as part:
            inside.set()
            assert release.wait(10)
            assert part is not None
            part.write(DATA)
            order.append("committed")
            cache.commit(part, SHA)

    def second() -> None:
        with cache.part(SHA) as part:
            order.append("none" if part is None else "part")

    one, two = threading.Thread(target=first), threading.Thread(target=second)
    one.start()
    assert inside.wait(10)
    two.start()
    two.join(0.2)
    assert two.is_alive()
    release.set()
    one.join(10)
    two.join(10)
    assert order == ["committed", "none"]
    assert cache.verify(SHA)
    assert [p.name for p in (tmp_path / "files/sha256").iterdir()] == [SHA]


@settings(max_examples=25)
@given(st.binary(max_size=2000), st.lists(st.integers(0, 2000), max_size=4))
def test_any_cuts_end_in_the_same_file(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, cuts: list[int]
) -> None:
    cache = FileCache(tmp_path_factory.mktemp("cache"))
    sha256 = hashlib.sha256(data).hexdigest()
    for cut in sorted(cuts):
        with cache.part(sha256) as part:
            assert part is not None
            part.write(data[part.seek(0, os.SEEK_END) : cut])
    with cache.part(sha256) as part:
        assert part is not None
        part.write(data[part.seek(0, os.SEEK_END) :])
        assert cache.commit(part, sha256) == sha256
    assert cache.path(sha256).read_bytes() == data
