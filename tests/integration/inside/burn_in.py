"""``primus preflight --burn-in`` on ranks of this machine's CPU: every wrong GPU is named, and no
healthy one.

    python burn_in.py --gpus --seconds 10 --patience 60

uses the machine's GPUs instead, four at least, and plants the wrong ones there.
"""

import argparse
import json
import os
import re
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch.distributed as dist
from forks import ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
from burn_in_faults import GPUS

from primus_images.system import measure, nodes
from primus_images.system.host import Host
from primus_images.training.backends import gloo


def named(name: str, host: Host, seconds: float, patience: float) -> bool:
    """Whether the burn-in names the wrong GPU ``name``, and no other."""
    os.environ |= {
        "PRIMUS_FAULT": f"burn-in {name}",
        "PYTHONPATH": f"{sys.path[0]}:{os.environ['PYTHONPATH']}",
    }
    wrong = GPUS[name]
    # A fault in one of 50 calls has to happen, on a busy machine, too.
    findings = nodes.burn_in(host, max(seconds, wrong.every / 4), print, patience)
    gpus = set(
        re.findall(r"^GPU (\d)", "\n".join(finding.message for finding in findings), re.MULTILINE)
    )
    fine = (
        gpus
        and gpus <= {*(wrong.gpus or str(wrong.rank))}
        and any(re.search(wrong.named, f.message) for f in findings)
    )
    print(name, "is named" if fine else "is NOT named", *findings, sep="\n  ", flush=True)
    return bool(fine) and all(finding.level == "failed" for finding in findings)


def healthy(folder: Path, tries: int, number: int) -> None:
    os.environ |= {"RANK": str(number), "WORLD_SIZE": "3", "LOCAL_RANK": str(number)}
    bench = measure._Bench()
    for attempt in range(tries):
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/{attempt}", rank=number, world_size=3
        )
        burn_in = measure.BurnIn(bench, folder / f"rank-{number}.json", "e4m3fn")
        for round_ in range(1, 4):
            burn_in.run(round_)
        assert burn_in.state["wrong"] == [], burn_in.state
        dist.barrier()
        dist.destroy_process_group()
    print(tries)
    gloo.leave()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", action="store_true")
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--patience", type=float, default=6)
    parser.add_argument("--tries", type=int, default=200)
    parser.add_argument("names", nargs="*", default=[*GPUS])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        host = Host(environment={})
        if not options.gpus:
            for number in range(4):
                file = folder / f"proc/driver/nvidia/gpus/{number}/information"
                file.parent.mkdir(parents=True)
                file.write_text("Model: NVIDIA H200\n")
            host = Host(root=folder, environment={})
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        counts = {"planted": len(options.names)}
        counts["named"] = sum(
            named(name, host, options.seconds, options.patience) for name in options.names
        )
        if not options.gpus:
            counts["healthy"] = int(ranks(partial(healthy, folder, options.tries), 3)[0])
    print(json.dumps(counts))
    sys.exit(counts["named"] < counts["planted"])


main()
