"""What the machine lacks is one sentence within seconds: network, namespaces, disk. Everything here
is real.
"""

import contextlib
import hashlib
import http.server
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loopback import make_deb, make_wheel
from primus_images.engine.kinds.debs import root_entries
from primus_images.errors import HostError
from primus_images.progress import Progress
from primus_images.versions.fetch import fetch
from primus_images.versions.filecache import FileCache
from primus_images.versions.lock import BaseRequest, LockedFile, Request
from project_kit import make_project

pytestmark = pytest.mark.integration
root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


class Refuses(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def bad_server(kind: str) -> Iterator[str]:
    """The address of a server that refuses connections, never answers, or answers 503."""
    if kind == "answers 503":
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield f"http://127.0.0.1:{server.server_address[1]}"
            server.shutdown()
        return
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        if kind == "hangs":
            one.listen(50)
        yield f"http://127.0.0.1:{one.getsockname()[1]}"


SMALL = BaseRequest(suite="bookworm", python="3.11.2", packages=())
REQUEST = Request(target="t", channel="pypi", python="3.11", bases={"small": SMALL})
CAUSES = {
    "refuses": ".*Connection refused.*",
    "hangs": ".*(timed out|deadline has elapsed|Connection failed).*",
    "answers 503": ".*503.*",
}


def locked(kind: str, number: int) -> LockedFile:
    name = f"thing{number}"
    return LockedFile(
        kind=kind,  # type: ignore[arg-type]
        name=name,
        version="1",
        file=f"{name}-1-py3-none-any.whl",
        size=100 + number,
        sha256=f"{number:064x}",
        base="small" if kind == "deb" else None,
    )


# An index that hangs is in test_wheels_loopback.py. For an archive, apt waits for ten seconds.
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        *((fault, kind) for fault in ("refuses", "answers 503") for kind in ("wheel", "deb")),
        pytest.param("hangs", "deb", marks=pytest.mark.slow),
    ],
)
def test_an_unreachable_source_is_named_before_any_file(
    fault: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "deb" and not Path("/usr/share/keyrings/debian-archive-keyring.gpg").exists():
        pytest.skip("no keyring of the Debian archive is installed")
    files = [locked(kind, number) for number in range(40)]
    with bad_server(fault) as address:
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PIP_INDEX_URL", f"{address}/simple")
        monkeypatch.setenv("PRIMUS_DEBIAN_MIRROR", f"{address}/debian")
        began = time.monotonic()
        with pytest.raises(HostError) as caught:
            fetch(dict.fromkeys(files, REQUEST), FileCache(tmp_path / "cache"), progress=Progress())
        assert time.monotonic() - began < 20
    if kind == "wheel":
        what = rf"the Python index at {address}/simple/thing\d+/"
    else:
        what = f"the Debian archive at {address}/debian"
    assert re.fullmatch(f"{what} does not answer: {CAUSES[fault]}", caught.value.message)
    assert caught.value.exit_code == 3
    assert caught.value.hint


def test_one_index_of_several_may_be_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = make_wheel(tmp_path / "local", "thing1", "1")
    here = replace(
        locked("wheel", 1),
        size=wheel.stat().st_size,
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
    )
    with bad_server("refuses") as away:
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", f"{away}/simple")
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"{away}/more")
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "local"))
        cache = FileCache(tmp_path / "cache")
        fetch({here: REQUEST}, cache, progress=Progress())
        assert cache.verify(here.sha256)
        with pytest.raises(HostError, match="does not answer"):
            fetch({here: REQUEST, locked("wheel", 2): REQUEST}, cache, progress=Progress())


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@root
@pytest.mark.skipif(not shutil.which("mmdebstrap"), reason="mmdebstrap is not installed")
@pytest.mark.parametrize("size", ["8m", "26m"])
def test_a_disk_that_fills_inside_mmdebstrap_is_the_cause_told(size: str, tmp_path: Path) -> None:
    deb = make_deb(tmp_path / "pool", "large", "1", essential=True, padding=12_000_000)
    file = LockedFile(
        kind="deb",
        name="large",
        version="1",
        file=deb.name,
        size=deb.stat().st_size,
        sha256="0" * 64,
        base="small",
    )
    with small_disk(tmp_path / "disk", size) as disk, pytest.raises(HostError) as caught:
        action: Any = SimpleNamespace(files=(file,), spec={"suite": "bookworm"})
        shop: Any = SimpleNamespace(
            file=lambda _: deb, log=lambda _: tmp_path / "log", progress=Progress()
        )
        root_entries(action, shop, disk)
    assert caught.value.message == f"the disk that holds {tmp_path / 'disk'} is full"
    assert "free s" in str(caught.value.hint)


@root
@pytest.mark.parametrize("size", ["16k", "200k", "1m"])
def test_a_build_on_a_full_disk_is_one_sentence(size: str, tmp_path: Path) -> None:
    kit = make_project(tmp_path / "project", size=2_000_000)
    kit.write("parts/beta/noise", os.urandom(1_500_000))
    with small_disk(tmp_path / "disk", size) as disk:
        done = kit.primus("build", "demo", "--store", str(disk / "store"))
        assert done.code == 3, done.err
        sentence = [line for line in done.err.splitlines() if line.startswith("primus build:")]
        assert len(sentence) == 1
        assert "the disk" in sentence[0]
        assert len(done.err.splitlines()) <= 6
