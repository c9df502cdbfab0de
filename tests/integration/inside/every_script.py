"""Run scripts, each in a fork of this process, which has imported torch; print ``SCRIPT: EXIT CODE`` as each ends."""

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
from silent_jobs import forked

torch.set_num_threads(1)
assert torchao and transformers.AutoModelForCausalLM, "imported once for all scripts"
for path in sys.argv[1:]:
    print(f"{path}:", file=sys.stderr, flush=True)
    sys.argv = [path]
    child = forked(partial(runpy.run_path, path, run_name="__main__"), 2)
    print(f"{Path(path).stem}: {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}", flush=True)
