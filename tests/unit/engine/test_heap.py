"""What freed memory the builder keeps."""

from __future__ import annotations

import subprocess
import sys

import pytest

# As layers are written: large buffers come and go, so the C library keeps more of what is freed; each thread has some.
THREADS = """
import ctypes, sys, threading
from primus.engine import heap

if sys.argv[1:]:
    heap.share()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
libc.free(libc.malloc(20_000_000))
together = threading.Barrier(4)

def work():
    places = [libc.malloc(1_000_000) for _ in range(15)]
    together.wait()
    for place in places:
        ctypes.memset(place, 1, 1_000_000)
        libc.free(place)

threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
heap.give_back()
(line,) = [line for line in open("/proc/self/smaps_rollup") if line.startswith("Anonymous:")]
print(int(line.split()[1]) // 1024)
"""


def kept(*words: str) -> int:
    out = subprocess.run([sys.executable, "-c", THREADS, *words], check=True, capture_output=True, text=True)
    return int(out.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_what_threads_freed_is_given_back() -> None:
    """Of 60 MB; without the shared heap nearly all stays."""
    assert kept("share") < 20 < kept()
