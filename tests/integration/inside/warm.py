"""Runs Python commands in forks of a process that has imported torch, which takes seconds.

Each line of standard input is a command, ``{"words": [...], "variables": {...}}``, and its answer
is a line of standard output, ``{"code": …, "out": …, "err": …}``. Python that a command starts,
such as a rank, is forked, too.
"""

import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

FAULTS = str(Path(__file__).parents[1] / "faults")
# torchtitan, Megatron and primus look at the environment when they are imported, so each process
# does that itself.
MODULES = (
    "torch",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torchao.float8",
    "torchdata.stateful_dataloader",
    "torch.utils.benchmark",
    "datasets",
    "diffusers",
    "peft",
    "transformers.models.llama.modeling_llama",
    "torch._inductor.compile_fx",
    "torch.utils.tensorboard",
)
given = [str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(":")]
PLACES = [place for place in sys.path if place not in given]
FINDERS = list(sys.meta_path)
execute: Any = subprocess._fork_exec  # type: ignore[attr-defined]


def warm() -> None:
    """From now on, Python that this process starts is a fork of it."""
    for name in MODULES:
        with suppress(ImportError):
            importlib.import_module(name)
    # A collection in a child would copy all pages of these modules.
    gc.collect()
    gc.freeze()
    os.environ["PYTHONPATH"] = ":".join(dict.fromkeys((FAULTS, *given[1:])))
    subprocess._fork_exec = start  # type: ignore[attr-defined]


def start(
    words: list[str], programs: Any, close: bool, keep: Any, folder: Any, variables: Any, *rest: Any
) -> int:
    """What ``subprocess`` calls to start ``words``: Python is forked, all else executed."""
    if words[0] != sys.executable:
        return int(execute(words, programs, close, keep, folder, variables, *rest))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if child := os.fork():
        return child
    code = 1
    try:
        _enter(folder, *rest)
        if variables is not None:
            os.environ.clear()
            os.environ.update(os.fsdecode(entry).split("=", 1) for entry in variables)
        sys.path[:] = [*filter(None, os.environ.get("PYTHONPATH", "").split(":")), *PLACES]
        # A fault of this process is not one of its child.
        sys.meta_path[:] = FINDERS
        for name in [
            name
            for name in sys.modules
            if name.partition(".")[0] in ("primus_images", "silent", "sitecustomize")
        ]:
            del sys.modules[name]
        run = _command(words[1:])
        if FAULTS in sys.path:
            importlib.import_module("sitecustomize")
        run()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - as an interpreter ends
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _enter(folder: Any, *rest: Any) -> None:
    """Do in the child what ``subprocess`` does before it executes a program."""
    stdin, _, _, stdout, _, stderr, _, _, _, new_session = rest[:10]
    for source, target in ((stdin, 0), (stdout, 1), (stderr, 2)):
        if source != -1:
            os.dup2(source, target)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    if folder is not None:
        os.chdir(folder)
    if new_session:
        os.setsid()
    for prepare in filter(callable, rest[10:]):
        prepare()
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(
                number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            )
    sys.excepthook = sys.__excepthook__
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(
        2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False
    )


def _command(words: list[str]) -> Callable[[], object]:
    """What Python does with these words, whose ``sys.argv`` is set."""
    while (word := words[0]) in ("-u", "-s", "-P", "-W"):
        if word == "-u":
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        if word == "-W":
            warnings.simplefilter(words[1])  # type: ignore[arg-type]
        words = words[2 if word == "-W" else 1 :]
    sys.argv = {"-m": words[1:], "-c": [word, *words[2:]]}.get(word, words)
    if word == "-m":
        return partial(runpy.run_module, words[1], run_name="__main__", alter_sys=True)
    if word == "-c":
        return partial(exec, words[1], {"__name__": "__main__"})
    sys.path.insert(0, str(Path(word).parent))
    return partial(runpy.run_path, word, run_name="__main__")


def main() -> None:
    warm()
    for line in sys.stdin:
        command = json.loads(line)
        ended = subprocess.run(
            [sys.executable, *command["words"]],
            env=os.environ | command["variables"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        print(
            json.dumps({"code": ended.returncode, "out": ended.stdout, "err": ended.stderr}),
            flush=True,
        )


if __name__ == "__main__":
    main()
