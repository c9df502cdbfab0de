"""``python -m primus.training.reference OUTPUT``: judge the run in the folder OUTPUT, write ``proof.json`` there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from primus.training.reference.replay import replay

if __name__ == "__main__":
    # Threads that wait for each other on a busy machine cost more than a second one gains on so small a model.
    torch.set_num_threads(1)
    # A mask's exponentials underflow; numbers below the normal ones cost a hundred times as much.
    torch.set_flush_denormal(True)
    folder = Path(sys.argv[1])
    found = replay(folder)
    (folder / "proof.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
