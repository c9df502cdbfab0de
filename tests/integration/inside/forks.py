"""Processes forked from one that has imported torch, which takes seconds."""

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from tempfile import TemporaryFile


def forked(work: Callable[[], object], into: int | None = None) -> int:
    """Run ``work`` in a child process, its output going to the file descriptor ``into``; the
    child's id.
    """
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        if into is not None:
            os.dup2(into, 1)
            os.dup2(into, 2)
        work()
        code = 0
    except SystemExit as stop:
        code = int(isinstance(stop.code, str) or bool(stop.code))
        print(stop, flush=True)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def outputs(*works: Callable[[], object]) -> list[str]:
    """Run all ``works`` side by side, and return what each printed. All must end well."""
    with ExitStack() as stack:
        files = [stack.enter_context(TemporaryFile("w+")) for _ in works]
        children = [forked(work, file.fileno()) for work, file in zip(works, files, strict=True)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        for file in files:
            file.seek(0)
        texts = [file.read() for file in files]
    assert not any(codes), "\n".join(texts)
    return texts


def ranks(work: Callable[[int], object], count: int = 2) -> list[str]:
    """Run ``work`` with the number of each of ``count`` ranks, and return what each printed."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    return outputs(*(partial(work, number) for number in range(count)))
