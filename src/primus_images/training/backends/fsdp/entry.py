"""One rank of plain FSDP: ``python -m primus_images.training.backends.fsdp.entry FOLDER``."""

import sys

import torch

from primus_images.training.backends.fsdp.llama import FsdpConfig, Llama
from primus_images.training.backends.loop import data, process, train, weights
from primus_images.training.backends.loop.config import RankJob
from primus_images.training.backends.loop.evaluation import Evaluation
from primus_images.training.backends.loop.session import Sharded, shard
from primus_images.turbo.attention import FLASH


def main(job: RankJob, device: torch.device) -> None:
    """Train from random weights."""
    config = job.section(FsdpConfig)
    with weights.empty():
        model = Llama(job.model, job.training.seq_len, config.loss_chunk, _attention(job))
    model.choose_loss(job)
    shard(model, list(model.layers), job, device, wide=lambda name: name == "output")
    weights.draw_all(model, job.training.seed, outer=("embedding.weight", "output.weight"))
    session = Sharded(model, job, device)
    evaluation = None
    if job.evaluation:
        evaluation = Evaluation(job, session, data.held_out(job))
    train.run(job, device, session, data.text(job), evaluation)


def _attention(job: RankJob) -> str:
    for name in FLASH:
        if name in job.turbo:
            return name
    return "torch"


if __name__ == "__main__":
    process.main(sys.argv[1], main)
