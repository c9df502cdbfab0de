"""Exporting a checkpoint of any backend: to the files of a model that transformers loads."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers.utils import logging

from primus_images.errors import InputError
from primus_images.files import json_if_readable
from primus_images.recipes.architecture import Architecture, architecture
from primus_images.recipes.recipe import MOCK
from primus_images.training.backends.finetune import models
from primus_images.training.judge.reference.models import as_trained
from primus_images.training.judge.reference.names import BIAS, from_canonical, to_canonical
from primus_images.training.run import identity
from primus_images.training.text.corpus import tokenizer_folder

# What a checkpoint of torchtitan has besides weights. Those of our own loop are below ``model.``.
_NO_WEIGHTS = ("optimizer.", "lr_scheduler.", "dataloader", "train_state")


def write_model(
    checkpoint: Path, folder: Path, dtype: str | None, tokenizer: Path | None
) -> list[str]:
    """Write the model of ``checkpoint`` to ``folder``, in ``dtype`` (None: as saved).

    ``tokenizer`` None: that of the run, if the checkpoint lies in it. Returns in sentences how the
    result differs from the run's model. Raises InputError if the checkpoint is incomplete, or if it
    has no model that transformers knows.
    """
    fields = identity.saved(checkpoint)
    if not fields:
        raise InputError(
            "the checkpoint is incomplete or damaged",
            where=checkpoint,
            hint=f"--resume-from accepts it only if its {identity.FILE} and all its files are "
            "there",
        )
    backend = str(fields["backend"])
    sizes = architecture({k[6:]: v for k, v in fields.items() if k.startswith("model.")})
    model = as_trained(sizes, backend, int(fields["seq_len"]))
    if model.of_images or not model.has_formula:
        why = "a model of no family is exported by its own run"
        if model.of_images:
            why = "transformers has no FLUX"
        raise InputError(why, where=str(checkpoint))
    if fields["mode"] == "lora":
        raise InputError(
            "the checkpoint contains LoRA adapters, not a whole model",
            where=checkpoint,
            hint="export=merged, or save_weights=true, of a run that resumes from it with more "
            "steps",
        )
    tensors = to_canonical(backend, model, _weights(checkpoint, backend, model))
    logging.disable_progress_bar()
    whole = models.FineTuned(models.causal_model(model, "sdpa"), 1)
    if dtype:
        whole.causal.config.dtype = dtype
    state: dict[str, Tensor] = {}
    for name, empty in whole.model.state_dict().items():
        if not (model.tied_embeddings and name == models.OUTER[0]):
            if name.endswith(BIAS):  # torchtitan has none without a balancing loss
                tensors.setdefault(name, torch.zeros(empty.shape))
            tensor = from_canonical(
                "finetune", model, f"model.{name}", empty.shape, tensors.__getitem__
            )
            state[name] = (
                tensor if dtype is None or name.endswith(BIAS) else tensor.to(getattr(torch, dtype))
            )
    biases = [
        tensor for name, tensor in tensors.items() if name.endswith(BIAS) and name not in state
    ]
    name = (
        json_if_readable(checkpoint.parents[1] / "job.json")
        .get("assets", {})
        .get("tokenizer", MOCK)
    )
    if tokenizer is None and name != MOCK and tokenizer_folder(name).is_dir():
        tokenizer = tokenizer_folder(name)
    models.write(whole, folder, state, tokenizer)
    return list(_differences(backend, model, biases, tokenizer))


def _differences(
    backend: str, model: Architecture, biases: Iterable[Tensor], tokenizer: Path | None
) -> Iterator[str]:
    moe = model.moe
    others = "some tokens go to other experts in transformers"
    largest = max((float(bias.abs().max()) for bias in biases), default=0.0)
    if largest > 0:
        yield (
            f"{others}: the run's routers have biases (up to {largest:.2g}), and its "
            f"{model.family} has none"
        )
    ranked = max(1, moe.top_k // moe.top_groups)
    if (
        backend == "megatron"
        and moe.groups > 1
        and ranked != (theirs := 2 if moe.score == "sigmoid" else 1)
    ):
        yield (
            f"{others}: it ranks groups of experts by the best {theirs} of each, Megatron by "
            f"the best {ranked}"
        )
    if tokenizer is None:
        yield "there is no tokenizer: --tokenizer DIR copies one"


def _weights(checkpoint: Path, backend: str, model: Architecture) -> Mapping[str, Tensor]:
    """Read the weights in ``checkpoint`` by their names in the whole model."""
    reader = dcp.FileSystemReader(checkpoint)
    stored = reader.read_metadata().state_dict_metadata
    names = [name for name in stored if not name.startswith(_NO_WEIGHTS)]
    if backend != "torchtitan":
        names = [name for name in names if name.startswith("model.")]
    kinds = {
        name: kind for name in names if isinstance(kind := stored[name], TensorStorageMetadata)
    }
    identity.verify_tensors(checkpoint, kinds)
    tensors = {
        name: torch.empty(kind.size, dtype=kind.properties.dtype) for name, kind in kinds.items()
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    if backend == "torchtitan":
        return tensors
    inner = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    if backend == "megatron":
        from primus_images.training.backends.megatron.weights import joined

        return joined(model, inner)
    return inner
