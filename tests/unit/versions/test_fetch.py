"""Fetching locked files: from which source each comes, what is refused, and what is tried again."""

import errno
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from primus_images.errors import HostError, InputError
from primus_images.progress import Progress, choose_progress
from primus_images.versions import fetch as module
from primus_images.versions.fetch import fetch
from primus_images.versions.filecache import FileCache
from primus_images.versions.indexes import LOGIN_HINT, Indexes, Offer
from primus_images.versions.lock import BaseRequest, Commit, LockedFile, Request

DATA = b"0123456789"
PLACES = ("first", "second")
Reply = Callable[[int], tuple[int, list[bytes]]]


def sha_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def locked(
    kind: Any = "wheel", name: str = "torch", data: bytes = DATA, **fields: Any
) -> LockedFile:
    usual: dict[str, Any] = {"version": "1", "file": f"{name}.whl", "size": len(data)}
    return LockedFile(kind=kind, name=name, sha256=sha_of(data), **{**usual, **fields})


def request_of(**fields: Any) -> Request:
    return Request(target="demo", channel="amd", python="3.11", **fields)


class Sources:
    """What indexes offer, (name, place) → offers, and what each address replies."""

    places = PLACES

    def __init__(self) -> None:
        self.offered: dict[tuple[str, str], list[Offer] | HostError] = {}
        self.replies: dict[str, list[Any]] = {}
        self.asked: list[tuple[str, int]] = []
        self.waits: list[float] = []

    def offers(self, name: str, place: str) -> list[Offer]:
        found = self.offered.get((name, place), [])
        if isinstance(found, HostError):
            raise found
        return found

    @contextmanager
    def open(self, url: str, size: int) -> Iterator[tuple[None, int, list[bytes]]]:
        self.asked.append((url, size))
        replies = self.replies[url]
        reply = replies.pop(0) if len(replies) > 1 else replies[0]
        if isinstance(reply, BaseException):
            raise reply
        offset, blocks = reply(size)
        yield None, offset, blocks


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Sources:
    found = Sources()
    monkeypatch.setattr(Indexes, "of_host", lambda own: found)
    monkeypatch.setattr(module.time, "sleep", found.waits.append)
    return found


@pytest.fixture
def cache(tmp_path: Path) -> FileCache:
    return FileCache(tmp_path / "files")


def act(cache: FileCache, *files: LockedFile, request: Request | None = None, **words: Any) -> None:
    fetch(dict.fromkeys(files, request or request_of()), cache, progress=Progress(), **words)


def whole(data: bytes) -> Reply:
    """A server without ranges, which always begins at 0."""
    return lambda size: (0, [data])


def rest(data: bytes) -> Reply:
    return lambda size: (size, [data[size:]])


def offer(place: str = "first", **fields: Any) -> Offer:
    return Offer(file="torch.whl", url=f"https://me:word@{place}/torch.whl?x", **fields)


def refused(cache: FileCache, *files: LockedFile, **words: Any) -> HostError | InputError:
    with pytest.raises((HostError, InputError)) as caught:
        act(cache, *files, **words)
    return caught.value


def test_a_file_comes_from_the_first_place_that_has_it(sources: Sources, cache: FileCache) -> None:
    sources.offered["torch", "first"] = [Offer(file="torch-other.whl", url="x")]
    sources.offered["torch", "second"] = [offer("second")]
    sources.replies[offer("second").url] = [whole(DATA)]
    act(cache, locked())
    assert cache.path(sha_of(DATA)).read_bytes() == DATA
    assert sources.asked == [(offer("second").url, 0)]
    # What is here is not asked for again.
    act(cache, locked())
    assert len(sources.asked) == 1


def test_a_place_that_fails_is_named_only_if_no_other_has_the_file(
    sources: Sources, cache: FileCache
) -> None:
    sources.offered["torch", "first"] = HostError("first does not answer")
    assert refused(cache, locked()).message == "first does not answer"
    sources.offered["torch", "second"] = [offer("second")]
    sources.replies[offer("second").url] = [whole(DATA)]
    act(cache, locked())
    assert cache.has(sha_of(DATA), len(DATA))


def test_a_file_of_the_channels_own_index_comes_from_there_alone(
    sources: Sources, cache: FileCache
) -> None:
    sources.offered["torch", "first"] = [offer("first")]
    request = request_of(indexes={"rocm": "own"})
    assert "no source" in refused(cache, locked(index="rocm"), request=request).message
    sources.offered["torch", "own"] = [offer("own")]
    sources.replies[offer("own").url] = [whole(DATA)]
    act(cache, locked(index="rocm"), request=request)


def test_files_that_nobody_offers_are_named_with_what_locks_their_successors(
    sources: Sources, cache: FileCache
) -> None:
    files = [locked(name=name, data=name.encode()) for name in ("b", "a")]
    files.append(locked("sdist", name="b", data=b"other", version="2"))
    error = refused(cache, *files)
    assert error.message == ("no source that pip and apt are configured for offers: a 1, b 1, b 2")
    assert "(primus lock --refresh-package a --refresh-package b)" in str(error.hint)


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (1, "--offline allows no download, and 1 file is not here: n0 1"),
        (2, "--offline allows no download, and 2 files are not here: n0 1, n1 1"),
    ],
)
def test_offline_names_what_is_not_here(
    sources: Sources, cache: FileCache, count: int, said: str
) -> None:
    files = [locked(name=f"n{number}", data=b"%d" % number) for number in range(count)]
    assert refused(cache, *files, offline=True).message == said
    assert sources.asked == []


@pytest.mark.parametrize(
    ("offered", "data", "said"),
    [
        ({"sha256": "f" * 64}, DATA, f"has sha256 {'f' * 64}, but"),
        ({}, b"9876543210", f"has sha256 {sha_of(b'9876543210')}, but"),
        ({}, b"0123", f"has sha256 {sha_of(b'0123')}, but"),
        # No more than a block beyond the file's size is read.
        ({}, b"0" * 99, f"has sha256 {sha_of(b'0' * 99)}, but"),
    ],
)
def test_other_bytes_under_the_name_are_refused(
    sources: Sources, cache: FileCache, offered: dict[str, Any], data: bytes, said: str
) -> None:
    sources.offered["torch", "first"] = [offer(**offered)]
    sources.replies[offer().url] = [whole(data)]
    error = refused(cache, locked())
    assert error.message == (
        f"torch.whl from https://first/torch.whl {said} sha256 {sha_of(DATA)} (10 bytes) is locked"
    )
    assert str(error.hint).startswith("do not trust that source")
    assert not cache.path(sha_of(DATA)).exists()


def test_a_lock_with_another_size_was_edited(sources: Sources, cache: FileCache) -> None:
    sources.offered["torch", "first"] = [offer()]
    sources.replies[offer().url] = [whole(DATA)]
    error = refused(cache, locked(size=11))
    assert error.message == (
        "torch.whl has 10 bytes, and the lock says 11 of the same sha256: the lock was edited"
    )
    assert error.hint == "primus lock --refresh-package torch"


def test_a_download_goes_on_where_it_ended(sources: Sources, cache: FileCache) -> None:
    cut = requests.ConnectionError("cut")

    def half(size: int) -> tuple[int, Any]:
        def blocks() -> Iterator[bytes]:
            yield DATA[size : size + 4]
            raise cut

        return size, blocks()

    sources.offered["torch", "first"] = [offer()]
    sources.replies[offer().url] = [half, half, rest(DATA)]
    act(cache, locked())
    assert [size for _, size in sources.asked] == [0, 4, 8]
    assert cache.path(sha_of(DATA)).read_bytes() == DATA
    assert sources.waits == [0.4, 0.4], "a server that makes progress is not waited for longer"


def test_a_connection_that_ends_after_the_last_byte_is_a_whole_file(
    sources: Sources, cache: FileCache
) -> None:
    def blocks() -> Iterator[bytes]:
        yield DATA
        raise requests.ConnectionError("cut")

    sources.offered["torch", "first"] = [offer()]
    sources.replies[offer().url] = [lambda size: (size, blocks())]
    act(cache, locked())
    assert [size for _, size in sources.asked] == [0]


def test_a_server_that_has_no_more_bytes_has_sent_a_whole_file(
    sources: Sources, cache: FileCache
) -> None:
    with cache.part(sha_of(DATA)) as part:
        assert part
        part.write(DATA)
    sources.offered["torch", "first"] = [offer()]
    sources.replies[offer().url] = [answered(416)]
    assert "and the lock says 11 of the same sha256" in refused(cache, locked(size=11)).message


def test_what_was_here_before_is_read_anew_if_it_is_of_another_file(
    sources: Sources, cache: FileCache
) -> None:
    sources.offered["torch", "first"] = [offer()]
    with cache.part(sha_of(DATA)) as part:
        assert part
        part.write(b"other")
    sources.replies[offer().url] = [rest(DATA)]
    act(cache, locked())
    assert [size for _, size in sources.asked] == [5, 0]


def answered(status: int) -> requests.HTTPError:
    response = requests.Response()
    response.status_code = status
    return requests.HTTPError(response=response)


@pytest.mark.parametrize(
    "error", [FileNotFoundError(), PermissionError(), answered(404), answered(403), answered(410)]
)
def test_a_place_that_lost_the_file_is_passed_over(
    sources: Sources, cache: FileCache, error: Exception
) -> None:
    sources.offered["torch", "first"] = [offer()]
    sources.replies[offer().url] = [error]
    assert refused(cache, locked()).message.endswith("for offers: torch 1")
    sources.offered["torch", "second"] = [offer("second")]
    sources.replies[offer("second").url] = [whole(DATA)]
    act(cache, locked())


@pytest.mark.parametrize(
    ("error", "tries", "said", "hint"),
    [
        (answered(500), 1, "HTTP status 500", "run it again to continue the download"),
        (answered(401), 1, "HTTP status 401", LOGIN_HINT),
        (answered(407), 1, "HTTP status 407", LOGIN_HINT),
        (
            requests.ConnectionError("cut"),
            4,
            "cut, 4 times",
            "run it again to continue the download",
        ),
    ],
)
def test_a_server_that_fails_is_asked_four_times_unless_it_answers(
    sources: Sources, cache: FileCache, error: Exception, tries: int, said: str, hint: str
) -> None:
    sources.offered["torch", "first"] = [offer()]
    sources.replies[offer().url] = [error]
    caught = refused(cache, locked())
    assert caught.message == f"https://first/torch.whl cannot be fetched: {said}"
    assert (caught.hint, len(sources.asked)) == (hint, tries)
    assert sources.waits == [0.4, 0.8, 1.6][: tries - 1]


def test_a_server_that_drips_is_left(
    sources: Sources, cache: FileCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 10**6, 10**4))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    sources.offered["torch", "first"] = [offer()]
    sources.replies[offer().url] = [lambda size: (0, [b"0", b"1"])]
    caught = refused(cache, locked())
    assert caught.message == "https://first/torch.whl is too slow: 1 of 10 bytes are here"


class Amounts(Progress):
    """Adds what a task reports."""

    total = 0

    def advance(self, key: str, amount: int) -> None:
        self.total += amount


def test_what_was_fetched_is_told_with_its_amount_and_rate(
    sources: Sources,
    cache: FileCache,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = b"0123456789" * 300_000
    seconds = [100.0]

    def reply(size: int) -> tuple[int, list[bytes]]:
        seconds[0] += 2
        return 0, [data]

    sources.offered["torch", "first"] = [offer()]
    sources.replies[offer().url] = [reply]
    clock = SimpleNamespace(monotonic=lambda: seconds[0])
    monkeypatch.setattr(module, "time", clock)
    with choose_progress() as progress:
        fetch({locked(data=data): request_of()}, cache, progress=progress)
    assert capsys.readouterr().err == "✓ fetch  1 file, 3.0 MB, 1.5 MB/s\n"


def test_the_amount_of_progress_is_the_size_of_the_files(
    sources: Sources, cache: FileCache
) -> None:
    names = {name: name.encode() * 1000 for name in ("one", "two")}
    for name, data in names.items():
        url = f"https://first/{name}"
        sources.offered[name, "first"] = [Offer(file=f"{name}.whl", url=url)]
        sources.replies[url] = [whole(data)]
    files = [locked(name=name, data=data) for name, data in names.items()]
    progress = Amounts()
    fetch(dict.fromkeys(files, request_of()), cache, progress=progress)
    assert progress.total == 6000


COMMIT = Commit(url="https://example.org/a.git", commit="c" * 40, version="1")
BASE = BaseRequest(suite="bookworm", python="3.11", packages=("gcc/trixie",))


def tool(
    noted: list[tuple[Any, ...]], written: Mapping[str, bytes], *words: Any, **options: Any
) -> None:
    folder = next(word for word in words if isinstance(word, Path))
    noted.append((*(word for word in words if word != folder), *options.items()))
    for name, data in written.items():
        (folder / name).write_bytes(data)


def test_archives_images_and_commits_have_a_tool_each(
    sources: Sources, cache: FileCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = {kind: kind.encode() for kind in ("git", "deb", "layer")}
    names = {kind: sha_of(data) for kind, data in contents.items()}
    noted: list[tuple[Any, ...]] = []
    tools = {"git": "archive_commit", "deb": "download_debs", "layer": "copy_image"}
    for kind, name in tools.items():
        written = {names[kind]: contents[kind]}
        monkeypatch.setattr(module, name, partial(tool, noted, written))
    files = {
        kind: locked(kind, name="aiter" if kind == "git" else "x", data=data, base=base)
        for (kind, data), base in zip(contents.items(), (None, "small", "ready"), strict=True)
    }
    ready = BASE._replace(image="docker.io/x@sha256:1")
    request = request_of(gits={"aiter": COMMIT}, bases={"small": BASE, "ready": ready})
    act(cache, *files.values(), request=request)
    for name in names.values():
        assert cache.path(name).exists()
    assert sorted(noted, key=str) == sorted(
        [
            (COMMIT, names["git"]),
            ([files["deb"]], ("bookworm", "trixie")),
            ("docker.io/x@sha256:1", ("size", 5)),
        ],
        key=str,
    )


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({}, "no source that pip and apt are configured for offers: aiter 1"),
        ({"": b"other"}, "aiter.whl from https://example.org/a.git has other bytes, but sha256"),
    ],
)
def test_a_tool_that_brings_no_or_other_bytes_is_a_sentence(
    sources: Sources,
    cache: FileCache,
    monkeypatch: pytest.MonkeyPatch,
    written: Mapping[str, bytes],
    said: str,
) -> None:
    named = {sha_of(DATA): data for data in written.values()}
    monkeypatch.setattr(module, "archive_commit", partial(tool, [], named))
    request = request_of(gits={"aiter": COMMIT})
    assert refused(cache, locked("git", name="aiter"), request=request).message.startswith(said)


@pytest.mark.parametrize(
    "file",
    [locked("git"), locked("deb", base="gone"), locked("layer", base="gone"), locked(index="gone")],
)
def test_a_lock_that_names_what_the_pins_do_not_is_refused(
    sources: Sources, cache: FileCache, file: LockedFile
) -> None:
    error = refused(cache, file)
    assert error.message.endswith(", but versions.yaml does not")
    assert error.hint == "run `primus lock` again"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.ENOSPC, "the disk is full at FOLDER: the missing files take 0.0 MB"),
        (errno.EDQUOT, "the disk is full at FOLDER: the missing files take 0.0 MB"),
        (errno.EACCES, "FOLDER cannot be written: no"),
        (errno.EROFS, "FOLDER cannot be written: no"),
        (errno.EIO, None),
    ],
)
def test_a_disk_that_takes_no_file_is_a_sentence(
    sources: Sources,
    cache: FileCache,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    said: str | None,
) -> None:
    def refuse(*_: object) -> Sequence[object]:
        raise OSError(code, "no")

    monkeypatch.setattr(module._Fetch, "jobs", refuse)
    if said is None:
        with pytest.raises(OSError, match="no"):
            act(cache, locked())
        return
    assert refused(cache, locked()).message == said.replace("FOLDER", str(cache.root))
