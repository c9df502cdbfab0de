"""One rank of a fine-tuning job: ``python -m primus_images.training.backends.finetune.entry
OUTPUT_FOLDER``.
"""

import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from primus_images.recipes.recipe import MOCK
from primus_images.training.backends.finetune import models
from primus_images.training.backends.finetune.backend import FinetuneConfig, source_of
from primus_images.training.backends.loop import data, process, train, weights
from primus_images.training.backends.loop.config import RankJob
from primus_images.training.backends.loop.session import Sharded, shard
from primus_images.training.text.corpus import tokenizer_folder
from primus_images.turbo.attention import FLASH, attend_in_transformers


def main(job: RankJob, device: torch.device) -> None:
    """Train in mode ``full`` or ``lora``."""
    config = job.section(FinetuneConfig)
    source = source_of(config.weights, offline=True)
    flash = next((name for name in FLASH if name in job.turbo), None)
    if flash:
        attention = attend_in_transformers(flash)
    else:
        attention = config.attention
    causal = models.causal_model(job.model, attention, source)
    if job.model.has_formula:
        kind = models.FineTuned
    else:
        kind = models.WholeLogits
    model = kind(
        models.adapted(causal, config.lora) if job.mode == "lora" else causal, config.loss_chunk
    )
    model.choose_loss(job)
    # Adapters are small products, which would be slower in FP8, and their rank may not be a
    # multiple of 16.
    shard(
        model,
        list(model.causal.model.layers),
        job,
        device,
        wide=lambda name: "lm_head" in name or "lora_" in name,
    )
    models.init(
        model,
        job.training.seed,
        weights.Files(source) if source else None,
        1.0 - job.model.norm_offset,
    )
    if "frozen-weights" in job.turbo and job.training.fp8 == "tensorwise":
        from primus_images.turbo import fp8

        fp8.freeze(model)
    if "adapter-products" in job.turbo:
        from primus_images.turbo import adapters

        adapters.attach(model)
    sharded = Sharded(model, job, device)
    packing = config.packing
    evaluation = None
    if job.evaluation:
        evaluation = train.Evaluation(job, sharded, data.held_out(job, packing=packing))
    train.run(job, device, sharded, data.text(job, packing=packing), evaluation)
    if config.save_weights or config.export == "merged":
        if evaluation and evaluation.best:
            train.load_checkpoint(evaluation.best, sharded)
        _save(model, job, source)


def _save(model: models.FineTuned, job: RankJob, source: Path | None) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    config = job.section(FinetuneConfig)
    merged = job.mode == "lora" and config.export == "merged"
    whole = StateDictOptions(
        full_state_dict=True, cpu_offload=True, ignore_frozen_params=not merged
    )
    state = get_model_state_dict(model, options=whole)
    if dist.get_rank() == 0:
        folder = job.output / "weights"
        name = job.assets["tokenizer"]
        # With mock data, the tokenizer of the initial weights.
        if name == MOCK:
            tokenizer = source
        else:
            tokenizer = tokenizer_folder(name)
        if merged:
            causal = models.causal_model(job.model, config.attention, source)
            model = models.FineTuned(models.adapted(causal, config.lora), config.loss_chunk)
            model.load_state_dict(
                {name: tensor.float() for name, tensor in state.items()}, assign=True
            )
            model.model = model.model.merge_and_unload()
            model.causal.tie_weights()
            state = model.state_dict()
        if job.mode == "lora" and not merged and source is not None:
            # PEFT loads the base model from here. A folder of the hub's cache exists on this
            # machine only.
            cached = re.search(r"/models--([^/]+?)--([^/]+)/snapshots/[^/]+$", str(source))
            if cached:
                base = f"{cached[1]}/{cached[2]}"
            else:
                base = str(source.absolute())
            model.model.peft_config["default"].base_model_name_or_path = base
        plain = {name.removeprefix("model."): tensor for name, tensor in state.items()}
        models.write(model, folder, plain, tokenizer, source)
    dist.barrier()


if __name__ == "__main__":
    process.main(sys.argv[1], main)
