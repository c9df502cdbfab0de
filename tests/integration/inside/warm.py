"""Runs Python commands in forks of a process that has imported torch, which takes seconds.

Each line of standard input is a command, ``{"words": [...], "variables": {...}}``, and its answer is a line of standard
output, ``{"code": …, "out": …, "err": …}``. Python that a command starts, such as torchrun, is forked, too.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

FAULTS = next(place for place in os.environ["PYTHONPATH"].split(":") if place.endswith("faults"))
OWN = {str(Path(__file__).parent), *os.environ["PYTHONPATH"].split(":")}
PLACES = [place for place in sys.path if place not in OWN]
# torchtitan, Megatron and primus look at the environment, or get a fault, when they are imported.
MODULES = ("torch.distributed.run", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp",
           "torchao.float8", "torchdata.stateful_dataloader", "datasets", "transformers", "peft", "diffusers",
           "transformers.models.llama.modeling_llama")  # fmt: skip
execute: Any = subprocess._fork_exec  # type: ignore[attr-defined]


def start(words: list[str], programs: Any, close: bool, keep: Any, folder: Any, variables: Any, *rest: Any) -> int:
    """What ``subprocess`` calls to start ``words``: Python is forked, all else executed."""
    environment = dict(os.environ) if variables is None else dict(
        os.fsdecode(entry).split("=", 1) for entry in variables
    )  # fmt: skip
    places = environment.get("PYTHONPATH", "").split(":")
    # The faults of this process are not those of a process that has not their folder on its path.
    if words[0] != sys.executable or (os.environ.get("PRIMUS_FAULT") and FAULTS not in places):
        return int(execute(words, programs, close, keep, folder, variables, *rest))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if child := os.fork():
        return child
    code = 1
    try:
        _enter(folder, *rest)
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:] = [*filter(None, places), *PLACES]
        if FAULTS in places:
            importlib.import_module("sitecustomize").install()
        _run(words[1:])
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
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    sys.excepthook = sys.__excepthook__
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)


def _run(words: list[str]) -> None:
    while (word := words[0]) in ("-u", "-s", "-P", "-W"):
        if word == "-u":
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        if word == "-W":
            warnings.simplefilter(words[1])  # type: ignore[arg-type]
        words = words[2 if word == "-W" else 1 :]
    if word == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    elif word == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(word).parent))
        runpy.run_path(word, run_name="__main__")


def main() -> None:
    for name in MODULES:
        importlib.import_module(name)
    subprocess._fork_exec = start  # type: ignore[attr-defined]
    for line in sys.stdin:
        command = json.loads(line)
        ended = subprocess.run(
            [sys.executable, *command["words"]], env=os.environ | command["variables"], stdin=subprocess.DEVNULL,
            capture_output=True, text=True, errors="replace", check=False,
        )  # fmt: skip
        print(json.dumps({"code": ended.returncode, "out": ended.stdout, "err": ended.stderr}), flush=True)


if __name__ == "__main__":
    main()
