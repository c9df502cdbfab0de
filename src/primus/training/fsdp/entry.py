"""One rank of an FSDP benchmark: ``python -m primus.training.fsdp.entry OUTPUT_FOLDER``."""

from __future__ import annotations

import sys

from primus.training.fsdp.backend import FsdpConfig
from primus.training.fsdp.llama import FAMILIES, Llama
from primus.training.loop import data, process, session, train, weights
from primus.training.loop.config import RankJob
from primus.training.loop.process import Process
from primus.training.loop.sharded import Sharded, shard


def main(given: RankJob, here: Process) -> None:
    """Train from random weights."""
    config = given.section(FsdpConfig)
    if given.model.family not in FAMILIES or given.model.moe.experts:
        raise SystemExit(f"the fsdp backend has no model for the family {given.model.family}")
    with weights.empty():
        attend = next((name for name in ("flash-attention-4", "flex-attention") if name in given.turbo), "torch")
        model = Llama(given.model, given.training.seq_len, config.loss_chunk, attend)
    if "linear-cross-entropy" in given.turbo:
        model.fuse_loss()
    if given.training.compile:
        model.compile_loss()
    shard(model, list(model.layers), given, here, wide=lambda name: name == "output")
    weights.draw_all(model, given.training.seed, outer=("embedding.weight", "output.weight"))
    train.run(given, here, Sharded(model, session.loss, given, here), data.text(given, here))


if __name__ == "__main__":
    process.main(sys.argv[1], main)
