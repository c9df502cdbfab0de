"""One rank of fine-tuning: ``python -m primus_images.training.backends.finetune.entry FOLDER``."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from primus_images.training.backends.finetune import conversion, export, initial, models
from primus_images.training.backends.finetune.backend import FinetuneConfig, source_of
from primus_images.training.backends.loop import checkpoint, data, process, train, weights
from primus_images.training.backends.loop.config import RankJob
from primus_images.training.backends.loop.evaluation import Evaluation
from primus_images.training.backends.loop.session import Sharded, shard
from primus_images.turbo import attention, packed


def main(job: RankJob, device: torch.device) -> None:
    """Train in mode ``full`` or ``lora``."""
    config = job.section(FinetuneConfig)
    source = source_of(config.weights, offline=True)
    model = _model(job, config, source)
    converted = source is not None and conversion.are_converted(source, model.causal, job.model)
    layers = models.layers_of(model.causal, has_formula=job.model.has_formula)
    if job.training.compile:
        process.keep_fewer_activations()
    shard(model, layers, job, device, wide=_is_wide)
    _init(model, job, source, converted=converted)
    _cast_frozen_weights(model, job)
    session = Sharded(model, job, device)
    evaluation = None
    if job.evaluation:
        evaluation = Evaluation(job, session, data.held_out(job, packing=config.packing))
    train.run(job, device, session, data.text(job, packing=config.packing), evaluation)
    if config.save_weights or config.export == "merged":
        if evaluation and evaluation.best:
            checkpoint.load(evaluation.best, session)
        export.save(model, job, source)


def _init(model: models.FineTuned, job: RankJob, source: Path | None, *, converted: bool) -> None:
    norm = 1.0 - job.model.norm_offset
    if not converted:
        files = None
        if source:
            files = weights.Files(source)
        initial.init(model, job.training.seed, files, norm)
        return
    assert source
    # Each rank loads the whole model, so the ranks of a node do it one after another.
    for turn in range(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))):
        if turn == int(os.environ.get("LOCAL_RANK", "0")):
            initial.init(model, job.training.seed, conversion.Loaded(source), norm)
        dist.barrier()


def _model(job: RankJob, config: FinetuneConfig, source: Path | None) -> models.FineTuned:
    causal = models.causal_model(job.model, _attention(job, config), source)
    if job.mode == "lora":
        causal = models.adapted(causal, config.lora)
    kind = models.WholeLogits
    if job.model.has_formula:
        kind = models.FineTuned
    model = kind(causal, config.loss_chunk)
    model.choose_loss(job)
    return model


def _attention(job: RankJob, config: FinetuneConfig) -> str:
    """Return Hugging Face's name of the implementation of attention."""
    for name, version in packed.VERSIONS.items():
        if name in job.turbo:
            return packed.attend_in_transformers(version)
    for name in attention.FLASH:
        if name in job.turbo:
            return attention.attend_in_transformers(name)
    return config.attention


def _is_wide(layer: str) -> bool:
    # Adapters are small products, which would be slower in FP8, and their rank may not be a
    # multiple of 16.
    return "lm_head" in layer or "lora_" in layer


def _cast_frozen_weights(model: models.FineTuned, job: RankJob) -> None:
    if "frozen-weights" in job.turbo and job.training.fp8 == "tensorwise":
        from primus_images.turbo import fp8

        fp8.freeze(model)


if __name__ == "__main__":
    process.main(sys.argv[1], main)
