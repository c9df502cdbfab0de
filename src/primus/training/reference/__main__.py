"""``python -m primus.training.reference OUTPUT``: check the run in the folder OUTPUT, and write
``proof.json`` there.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from primus.training.reference.replay import replay

# Each thread holds the gradients of a step.
_MOST_THREADS = 4

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    found = replay(folder, threads=min(_MOST_THREADS, len(os.sched_getaffinity(0))))
    (folder / "proof.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
