"""A source that sends a byte now and then, or a tool that waits for one, comes to an end."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from primus_images.errors import HostError
from primus_images.versions import traffic
from primus_images.versions.fetch import _append
from primus_images.versions.indexes import Indexes
from primus_images.versions.lock import LockedFile
from primus_images.versions.traffic import run_tool

HEADERS = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"


@contextlib.contextmanager
def dripping(start: bytes, drop: bytes) -> Iterator[str]:
    """The address of a server that answers with ``start``, then a ``drop`` ten times a second."""
    ended = threading.Event()

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(65536)
            connection.sendall(start)
            while not ended.wait(0.1):
                connection.sendall(drop)

    def serve(server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection = server.accept()[0]
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        ended.set()


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "_PATIENCE_S", 0.5)
    monkeypatch.setattr(traffic, "_LONGEST_S", 0.5)
    monkeypatch.setattr(traffic, "_SLOWEST", 10**9)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("start", "drop"), [(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"), (b"", b"H"), (HEADERS, b"x")]
)
def test_the_page_of_an_index_that_drips(start: bytes, drop: bytes) -> None:
    with dripping(start, drop) as address, pytest.raises(HostError) as caught:
        Indexes(urls=()).offers("p", address)
    assert f"{address}/p/ does not answer: its answer has not ended in" in str(caught.value)


@pytest.mark.timeout(20)
def test_a_file_that_drips_is_kept_as_far_as_it_came(tmp_path: Path) -> None:
    file = LockedFile(
        kind="wheel", name="p", version="1", file="p.whl", size=9_000_000, sha256="0" * 64
    )
    path = tmp_path / "part"
    with (
        path.open("w+b") as part,
        # A block of the client is larger than a drop.
        dripping(HEADERS.replace(b"1000", b"9000000"), bytes(300_000)) as address,
        pytest.raises(HostError) as caught,
    ):
        _append(part, file, f"{address}/p.whl", Indexes(urls=()))
    assert "is too slow" in str(caught.value)
    assert "run it again to continue the download" in str(caught.value)
    assert path.stat().st_size > 0


@pytest.mark.timeout(20)
def test_a_tool_that_waits_for_ever() -> None:
    words = ["sh", "-c", "exec sleep 60", "sh"]
    with pytest.raises(HostError, match=r"127\.0\.0\.1:1/x does not answer: sh copy has not ended"):
        run_tool(words, "http://me:secret@127.0.0.1:1/x", "copy")
