"""``python -m primus.training.reference OUTPUT``: check the run in the folder OUTPUT, and write
``proof.json`` there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from primus.training.reference.replay import replay

if __name__ == "__main__":
    # On a busy machine, threads that wait for each other cost more than a second thread gains on so small a model.
    torch.set_num_threads(1)
    # A mask's exponentials underflow, and denormal numbers are a hundred times as slow.
    torch.set_flush_denormal(True)
    folder = Path(sys.argv[1])
    found = replay(folder)
    (folder / "proof.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
