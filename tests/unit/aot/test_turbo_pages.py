"""Letting go of what was only read of a file, and of nothing else."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

import pytest

from primus.aot.pages import forget_files

SIZE = 1_000_000


def resident(path: Path) -> int:
    """KiB of the file that this process holds."""
    found, mine = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line.split()[0].endswith(":"):
            mine = line.endswith(str(path))
        elif mine and line.startswith("Rss:"):
            found += int(line.split()[1])
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_pages_that_were_only_read_go_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "library"
    path.write_bytes(b"r" * SIZE)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) as pages:
        assert pages[:] == b"r" * SIZE
        assert resident(path) >= SIZE // 1024
        forget_files()
        assert resident(path) == 0
        assert pages[:] == b"r" * SIZE


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_pages_that_were_changed_stay(tmp_path: Path) -> None:
    """As the addresses that a loader writes into a library before it forbids to write there."""
    path = tmp_path / "library"
    path.write_bytes(b"r" * SIZE)
    with path.open("rb") as file:
        pages = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    pages[5000] = ord("w")
    start = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(pages)))
    assert ctypes.CDLL(None).mprotect(start, ctypes.c_size_t(SIZE), mmap.PROT_READ) == 0
    forget_files()
    assert pages[4999:5002] == b"rwr"
