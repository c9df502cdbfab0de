"""Run scripts two at a time, each in a fork of this process, which has imported torch; print their exit codes."""

from __future__ import annotations

import os
import runpy
import sys
from functools import partial
from pathlib import Path

import torch
import torchao
import transformers

sys.path.append(str(Path(__file__).parent))
from forks import forked

torch.set_num_threads(1)
assert torchao and transformers.AutoModelForCausalLM, "imported once for all scripts"
waiting = sys.argv[1:]
running: dict[int, str] = {}
while waiting or running:
    while waiting and len(running) < 2:
        path = waiting.pop(0)
        sys.argv = [path]
        running[forked(partial(runpy.run_path, path, run_name="__main__"), 2)] = Path(path).stem
    child, status = os.wait()
    print(f"{running.pop(child)}: {os.waitstatus_to_exitcode(status)}", flush=True)
