"""pip's resolver and our fetch against an index on 127.0.0.1 with every fault of a network."""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from loopback import Server, make_certificate, make_wheel, serve
from primus_images.errors import HostError, InputError
from primus_images.progress import Progress
from primus_images.versions.fetch import fetch
from primus_images.versions.filecache import FileCache
from primus_images.versions.lock import BaseRequest, LockedFile, Request
from primus_images.versions.wheels import resolve_sdists, resolve_wheels
from project_kit import until

pytestmark = pytest.mark.integration

BIG = 3_000_000


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    root = tmp_path / "www"
    files = root / "files"
    make_wheel(files, "small", "1.0")
    make_wheel(files, "small", "1.1")
    make_wheel(
        files,
        "big",
        "1.0+cpu",
        needs=("small", 'old-python-only; python_version < "3.12"'),
        padding=BIG,
    )
    make_wheel(files, "old-python-only", "1.0", needs=('never; sys_platform == "win32"',))
    make_wheel(files, "newer-glibc", "1.0", tag="cp311-cp311-manylinux_2_36_x86_64")
    make_wheel(files, "newer-glibc", "2.0", tag="cp311-cp311-manylinux_2_39_x86_64")
    make_wheel(files, "clash", "1.0", needs=("small==1.0",))
    with serve(root) as server:
        _use(monkeypatch, server.url + "/simple")
        yield server


def _use(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    for name in [
        n for n in os.environ if n.startswith(("PIP_", "UV_")) or n.lower().endswith("_proxy")
    ]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def _request(python: str = "3.11", **wheels: str) -> Request:
    base = BaseRequest(suite="bookworm", python=f"{python}.2", packages=())
    pins = {name.replace("_", "-"): version for name, version in wheels.items()}
    return Request(target="t", channel="pypi", python=python, bases={"b": base}, wheels=pins)


def _resolve(request: Request, **keep: str) -> dict[str, LockedFile]:
    return {f.name: f for f in resolve_wheels(request, keep)}


def _fetch(files: list[LockedFile], cache: FileCache, offline: bool = False) -> None:
    fetch(dict.fromkeys(files, _request()), cache, offline=offline, progress=Progress())


def _fetched(file: LockedFile, folder: Path) -> None:
    """Fetch the file into an empty cache, or one that holds a part of it."""
    cache = FileCache(folder)
    _fetch([file], cache)
    assert cache.verify(file.sha256)


def _within(seconds: float, work: Callable[[], object], error: type[Exception]) -> str:
    began = time.monotonic()
    with pytest.raises(error) as caught:
        work()
    assert time.monotonic() - began < seconds
    return str(caught.value)


def test_resolve_gives_closure_names_sizes_and_hashes(index: Server) -> None:
    found = _resolve(_request(big="1.0+cpu"))
    assert {n: f.version for n, f in found.items()} == {
        "big": "1.0+cpu",
        "old-python-only": "1.0",
        "small": "1.1",
    }
    big = found["big"]
    data = (index.root / "files" / big.file).read_bytes()
    assert big.file == "big-1.0+cpu-py3-none-any.whl"
    assert (big.size, big.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert index.asked(big.file, "HEAD") or index.asked(big.file)


def test_markers_are_those_of_the_base_and_not_of_the_host(index: Server) -> None:
    assert "old-python-only" not in _resolve(_request(python="3.12", big="1.0+cpu"))


def test_a_wheel_for_a_newer_glibc_is_not_taken(index: Server) -> None:
    assert _resolve(_request(newer_glibc="1.0"))["newer-glibc"].version == "1.0"
    message = _within(9, lambda: _resolve(_request(newer_glibc="2.0")), InputError)
    assert "newer-glibc==2.0" in message
    assert "manylinux_2_36_x86_64" in message


def test_earlier_versions_stay_unless_they_cannot(index: Server) -> None:
    assert _resolve(_request(big="1.0+cpu"), small="1.0")["small"].version == "1.0"
    assert _resolve(_request(big="1.0+cpu"), small="0.5")["small"].version == "1.1"


def test_what_the_base_brings_is_not_taken_from_the_index(index: Server) -> None:
    brought = replace(_request(big="1.0+cpu"), debs={"python3-small": "0.9"})
    assert set(_resolve(brought)) == {"big", "old-python-only"}
    assert set(_resolve(brought, small="1.0")) == {"big", "old-python-only"}
    message = _within(
        9,
        lambda: _resolve(replace(_request(clash="1.0"), debs={"python3-small": "0.9"})),
        InputError,
    )
    assert "the pins do not fit" in message


def test_a_pure_pin_takes_the_wheel_for_every_platform(index: Server) -> None:
    make_wheel(index.root / "files", "two", "1.0")
    make_wheel(index.root / "files", "two", "1.0", tag="cp311-cp311-manylinux_2_28_x86_64")
    asked = _request(two="1.0")
    assert _resolve(asked)["two"].file == "two-1.0-cp311-cp311-manylinux_2_28_x86_64.whl"
    assert _resolve(replace(asked, pure=("two",)))["two"].file == "two-1.0-py3-none-any.whl"
    with pytest.raises(InputError, match=r"newer-glibc 1\.0 has no wheel for every platform"):
        _resolve(replace(_request(newer_glibc="1.0"), pure=("newer-glibc",)))


def test_no_such_version_and_conflict_are_sentences(index: Server) -> None:
    message = _within(9, lambda: _resolve(_request(small="1.2")), InputError)
    assert "small==1.2" in message
    message = _within(9, lambda: _resolve(_request(clash="1.0", small="1.1")), InputError)
    assert "the pins do not fit" in message
    assert "small==1.0" in message


def test_index_without_hashes_and_lengths_is_read_in_full(index: Server, tmp_path: Path) -> None:
    with serve(index.root, hashes=False) as bare, pytest.MonkeyPatch.context() as patch:
        _use(patch, bare.url + "/simple")
        bare.faults.no_length.add("/files/small-1.1-py3-none-any.whl")
        small = _resolve(_request(small="1.1"))["small"]
    data = (index.root / "files" / small.file).read_bytes()
    assert (small.size, small.sha256) == (len(data), hashlib.sha256(data).hexdigest())


def test_an_sdist_is_found_by_version(index: Server) -> None:
    path = index.root / "files/src_thing-1.5.tar.gz"
    with tarfile.open(path, "w:gz"):
        pass
    request = replace(_request(), sdists={"src-thing": "1.5"})
    (file,) = resolve_sdists(request)
    assert (file.kind, file.file, file.size) == ("sdist", path.name, path.stat().st_size)
    with pytest.raises(InputError, match=r"src-thing==1\.6"):
        resolve_sdists(replace(request, sdists={"src-thing": "1.6"}))


def test_unreachable_index_answers_in_seconds(
    index: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = list(_resolve(_request(big="1.0+cpu")).values())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        _use(monkeypatch, f"http://user:SECRET@127.0.0.1:{taken.getsockname()[1]}/simple")
        for work in (
            lambda: _resolve(_request(small="1.1")),
            lambda: _fetch(files, FileCache(tmp_path / "c")),
        ):
            message = _within(5, work, HostError)
            assert "Connection refused" in message
            assert "SECRET" not in message


def test_silent_index_answers_in_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that drops packets: its backlog is full, so connecting never ends."""
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for filler in (first, second):
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        _use(monkeypatch, f"http://127.0.0.1:{full.getsockname()[1]}/simple")
        assert "does not answer" in _within(15, lambda: _resolve(_request(small="1.1")), HostError)


def test_nobody_waits_as_long_as_a_server_asks(index: Server) -> None:
    """The server answers with 503, and with ``Retry-After`` of an hour."""
    index.faults.status["/simple/big/"] = [503]
    began = time.monotonic()
    assert _resolve(_request(big="1.0+cpu"))["big"].version == "1.0+cpu"
    assert index.faults.status["/simple/big/"] == []
    assert time.monotonic() - began < 60


def test_a_file_in_find_links_needs_no_download(
    index: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = list(_resolve(_request(small="1.1")).values())
    monkeypatch.setenv("PIP_FIND_LINKS", str(index.root / "files"))
    index.log.clear()
    _fetch(files, FileCache(tmp_path / "c"))
    assert index.asked(files[0].file) == []


@pytest.mark.parametrize("ranges", [True, False])
def test_a_cut_download_goes_on_where_it_was_cut(
    index: Server, tmp_path: Path, ranges: bool
) -> None:
    index.faults.no_range = not ranges
    big = _resolve(_request(big="1.0+cpu"))["big"]
    index.faults.cut["/files/" + big.file] = [1_000_000, 2_000_000] if ranges else [1_000_000]
    index.log.clear()
    _fetched(big, tmp_path / "c")
    starts = [int(header[6:-1]) for header in index.asked(big.file) if header]
    assert starts == [1_000_000, 2_000_000][: 1 + ranges]


def test_a_rotten_left_over_is_thrown_away(index: Server, tmp_path: Path) -> None:
    big = _resolve(_request(big="1.0+cpu"))["big"]
    cache = FileCache(tmp_path / "c")
    with cache.part(big.sha256) as part:
        assert part is not None
        part.write(b"rubbish" * 1000)
    _fetch([big], cache)
    assert cache.verify(big.sha256)


def test_passing_faults_are_waited_out(index: Server, tmp_path: Path) -> None:
    small = _resolve(_request(small="1.1"))["small"]
    index.faults.status["/files/" + small.file] = [503, 429]
    _fetched(small, tmp_path / "c")


def test_a_lasting_fault_ends_with_a_sentence(index: Server, tmp_path: Path) -> None:
    small = _resolve(_request(small="1.1"))["small"]
    index.faults.status["/files/" + small.file] = [503] * 99
    message = _within(9, lambda: _fetch([small], FileCache(tmp_path / "c")), HostError)
    assert "HTTP status 503" in message


def test_wrong_bytes_are_named_and_never_kept(index: Server, tmp_path: Path) -> None:
    small = _resolve(_request(small="1.1"))["small"]
    index.faults.wrong.add("/files/" + small.file)
    cache = FileCache(tmp_path / "c")
    message = _within(9, lambda: _fetch([small], cache), HostError)
    zeros = hashlib.sha256(bytes(small.size)).hexdigest()
    assert all(word in message for word in (small.file, small.sha256, zeros, index.url))
    assert not cache.path(small.sha256).exists()


@pytest.mark.parametrize("more", [1, -1, 4096])
def test_a_size_that_somebody_edited_is_named(index: Server, tmp_path: Path, more: int) -> None:
    """Also where the file was fetched before: its bytes are right, and the lock is not."""
    small = _resolve(_request(small="1.1"))["small"]
    edited = replace(small, size=small.size + more)
    for cache in (FileCache(tmp_path / "new"), FileCache(tmp_path / "old")):
        if cache.root.name == "old":
            _fetch([small], cache)
        message = _within(9, partial(_fetch, [edited], cache), InputError)
        assert f"the lock says {edited.size} of the same sha256" in message
        assert f"has {small.size} bytes" in message


def test_a_replaced_file_is_convicted_by_its_index_entry(index: Server, tmp_path: Path) -> None:
    small = _resolve(_request(small="1.1"))["small"]
    make_wheel(index.root / "files", "small", "1.1", padding=10)
    index.log.clear()
    _within(5, lambda: _fetch([small], FileCache(tmp_path / "c")), HostError)
    assert index.asked(small.file) == []


def test_pips_own_proxy_wins_over_the_environment(
    index: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = _resolve(_request(small="1.1"))["small"]
    monkeypatch.delenv("NO_PROXY")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("PIP_PROXY", index.url)
    monkeypatch.setenv("PIP_INDEX_URL", "http://index.invalid/simple")
    _fetched(small, tmp_path / "c")


def test_another_place_with_the_right_bytes_is_taken(
    index: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = _resolve(_request(small="1.1"))["small"]
    rebuilt = tmp_path / "rebuilt"
    make_wheel(rebuilt, "small", "1.1", padding=10)
    monkeypatch.setenv("PIP_FIND_LINKS", str(rebuilt))
    _fetched(small, tmp_path / "c")


def test_a_vanished_wheel_is_gone_and_the_rest_comes(index: Server, tmp_path: Path) -> None:
    files = _resolve(_request(big="1.0+cpu"))
    (index.root / "files" / files["small"].file).unlink()
    cache = FileCache(tmp_path / "c")
    with pytest.raises(HostError, match=r"for offers: small 1\.1"):
        _fetch(list(files.values()), cache)
    assert cache.verify(files["big"].sha256)


def test_credentials_of_the_index_reach_its_files_and_no_message(
    index: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.faults.login = ("me", "SECRET")
    assert "valid authentication credentials" in _within(
        5, lambda: _resolve(_request(small="1.1")), HostError
    )
    monkeypatch.setenv("PIP_INDEX_URL", index.url.replace("//", "//me:SECRET@") + "/simple")
    small = _resolve(_request(small="1.1"))["small"]
    _fetched(small, tmp_path / "c")
    index.faults.wrong.add("/files/" + small.file)
    message = _within(9, lambda: _fetch([small], FileCache(tmp_path / "d")), HostError)
    assert "SECRET" not in message
    index.faults.wrong.clear()
    monkeypatch.setenv("PIP_INDEX_URL", index.url + "/simple")
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password SECRET\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    assert _resolve(_request(small="1.1"))["small"] == small


def test_a_private_ca_is_pips_own_setting(
    index: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = make_certificate(tmp_path / "ca.pem")
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    with serve(index.root, certificate=certificate) as secure:
        monkeypatch.setenv("PIP_INDEX_URL", secure.url + "/simple")
        message = _within(5, lambda: _resolve(_request(small="1.1")), HostError)
        assert "invalid peer certificate" in message
        for setting, value in (("PIP_CERT", str(certificate)), ("PIP_TRUSTED_HOST", "127.0.0.1")):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(setting, value)
                small = _resolve(_request(small="1.1"))["small"]
                _fetched(small, tmp_path / setting)


def test_offline_names_what_is_missing_and_asks_nobody(index: Server, tmp_path: Path) -> None:
    small = _resolve(_request(small="1.1"))["small"]
    many = [replace(small, name=f"n{i}", sha256=f"{i:064x}") for i in range(7)]
    index.log.clear()
    message = _within(1, lambda: _fetch(many, FileCache(tmp_path / "c"), offline=True), HostError)
    assert "7 files are not here: n0 1.1, n1 1.1, n2 1.1, n3 1.1, n4 1.1 and 2 more" in message
    assert index.log == []
    cache = FileCache(tmp_path / "c")
    _fetch([small], cache)
    _fetch([small], cache, offline=True)


def test_a_full_disk_is_a_sentence_and_loses_nothing(index: Server, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small disk")
    files = _resolve(_request(big="1.0+cpu"))
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=True)
    try:
        cache = FileCache(disk / "files")
        _fetch([files["small"]], cache)
        message = _within(9, lambda: _fetch(list(files.values()), cache), HostError)
        assert "the disk is full" in message
        assert cache.verify(files["small"].sha256)
        assert not cache.path(files["big"].sha256).exists()
        subprocess.run(["mount", "-o", "remount,size=9m", str(disk)], check=True)
        _fetch(list(files.values()), cache)
        assert all(cache.verify(f.sha256) for f in files.values())
        assert index.asked(files["big"].file)[-1] is not None, (
            "it went on from what the full disk had taken"
        )
    finally:
        subprocess.run(["umount", str(disk)], check=True)


PROGRAM = """
import json, sys
from pathlib import Path
from primus_images.versions.fetch import fetch
from primus_images.versions.filecache import FileCache
from primus_images.progress import Progress
from primus_images.versions.lock import LockedFile, Request
file = LockedFile(**json.loads(sys.argv[1]))
request = Request(target="t", channel="pypi", python="3.11")
fetch({file: request}, FileCache(Path(sys.argv[2])), progress=Progress())
"""


def test_ctrl_c_on_a_stalled_server_ends_at_once_and_keeps_the_part(
    index: Server, tmp_path: Path
) -> None:
    big = _resolve(_request(big="1.0+cpu"))["big"]
    path = "/files/" + big.file
    index.faults.cut[path] = [1_000_000]
    index.faults.stall.add(path)
    cache = FileCache(tmp_path / "c")
    entry = json.dumps({k: v for k, v in vars(big).items() if v is not None})
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, entry, str(cache.root)], stderr=subprocess.PIPE, text=True
    )
    part = cache.path(big.sha256).with_name(big.sha256 + ".part")
    assert until(lambda: part.exists() and part.stat().st_size > 500_000, 20)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, text = process.communicate(timeout=10)
    assert time.monotonic() - began < 3
    assert "KeyboardInterrupt" in text
    assert not cache.path(big.sha256).exists()
    index.faults.stall.clear()
    _fetch([big], cache)
    assert cache.verify(big.sha256)
    assert index.asked(big.file)[-1] not in (None, "bytes=0-")
