"""One rank of a fine-tuning job: ``python -m primus.training.finetune.entry OUTPUT_FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from primus.training.finetune import models
from primus.training.finetune.config import FinetuneConfig
from primus.training.loop import data, language, process, train, weights
from primus.training.loop.given import Given
from primus.training.loop.process import Process
from primus.training.loop.sharded import Sharded, shard

__all__ = ["main"]

_HUB = "hf:"


def main(given: Given, here: Process) -> None:
    """Train in mode ``full`` or ``lora``."""
    config = given.section(FinetuneConfig)
    causal = models.causal_model(given.model, config)
    model = models.FineTuned(models.adapted(causal, config.lora) if given.mode == "lora" else causal, config.loss_chunk)
    if given.training.compile:
        model.compile_loss()
    # Adapters are small products: in FP8 they would be slower, and their rank may be no multiple of 16.
    shard(model, list(model.causal.model.layers), given, here, wide=lambda name: "lm_head" in name or "lora_" in name)
    models.init(model, given.training.seed, _files(config.weights, here))
    session = Sharded(model, language.loss, given, here, _facts(given, config, model))
    train.run(given, here, session, data.text(given, here))
    if config.save_weights:
        _save(model, given.output / "weights")


def _files(name: str, here: Process) -> weights.Files | None:
    if name == "random":
        return None
    if not name.startswith(_HUB):
        return weights.Files(Path(name))
    from huggingface_hub import snapshot_download

    wanted = {"repo_id": name.removeprefix(_HUB), "allow_patterns": ["*.safetensors", "*.json"]}
    if here.local_rank == 0:
        snapshot_download(**wanted)
    dist.barrier()
    return weights.Files(Path(snapshot_download(**wanted, local_files_only=True)))


def _facts(given: Given, config: FinetuneConfig, model: models.FineTuned) -> dict[str, Any]:
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return {
        "mode": given.mode,
        "weights": config.weights,
        "adapters": sum(".lora_A." in name for name in trained),
        "trained_outside_adapters": sum(".lora_" not in name for name in trained),
    }


def _save(model: models.FineTuned, folder: Path) -> None:
    """All weights, or the adapters alone, as Hugging Face's libraries read them; written by rank 0."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    whole = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    state = get_model_state_dict(model, options=whole)
    if dist.get_rank() == 0:
        model.model.save_pretrained(folder, state_dict={name.removeprefix("model."): v for name, v in state.items()})
    dist.barrier()


if __name__ == "__main__":
    process.main(sys.argv[1], main)
