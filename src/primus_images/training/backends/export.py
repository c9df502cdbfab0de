"""Exporting a checkpoint of any backend: to the files of a model that transformers loads."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers.utils import logging

from primus_images.errors import InputError
from primus_images.files import json_if_readable
from primus_images.recipes.architecture import Architecture, architecture
from primus_images.recipes.recipe import MOCK
from primus_images.training.backends.finetune import export as finetune, models
from primus_images.training.backends.finetune.initial import EMBEDDING, HEAD
from primus_images.training.judge.reference.models import as_trained
from primus_images.training.judge.reference.names import BIAS, from_canonical, to_canonical
from primus_images.training.run import identity
from primus_images.training.text.corpus import tokenizer_folder

# What a checkpoint of torchtitan has besides weights. Those of our own loop are below ``model.``.
_OTHER_STATES = ("optimizer.", "lr_scheduler.", "dataloader", "train_state")


def write_model(
    checkpoint: Path, folder: Path, dtype: str | None, tokenizer: Path | None
) -> list[str]:
    """Write the model of ``checkpoint`` to ``folder``, in ``dtype`` (None: as saved).

    ``tokenizer`` None: that of the run, if the checkpoint lies in it. Returns in sentences how the
    result differs from the run's model. Raises InputError if the checkpoint is incomplete, or if it
    has no model that transformers knows.
    """
    fields = _identity(checkpoint)
    backend = str(fields["backend"])
    model = _architecture(fields, backend, checkpoint)
    tensors = to_canonical(backend, model, _weights(checkpoint, backend, model))
    logging.disable_progress_bar()
    whole = models.FineTuned(models.causal_model(model, "sdpa"), 1)
    state = _state(whole.model, model, tensors)
    if dtype:
        for name, tensor in state.items():
            if not name.endswith(BIAS):
                state[name] = tensor.to(getattr(torch, dtype))
    # transformers writes the dtype of the empty model to config.json.
    whole.causal.to(state[EMBEDDING].dtype)
    tokenizer = tokenizer or _tokenizer_of_run(checkpoint)
    finetune.write(whole, folder, state, tokenizer)
    lost_biases = []
    for name, tensor in tensors.items():
        if name.endswith(BIAS) and name not in state:
            lost_biases.append(tensor)
    return list(_differences(backend, model, lost_biases, tokenizer))


def _identity(checkpoint: Path) -> dict[str, Any]:
    """Return the identity of the run that saved ``checkpoint``, if it has a whole model."""
    fields = identity.saved(checkpoint)
    if not fields:
        raise InputError(
            "the checkpoint is incomplete or damaged",
            where=checkpoint,
            hint=f"--resume-from accepts it only if its {identity.FILE} and all its files are "
            "there",
        )
    return dict(fields)


def _architecture(fields: Mapping[str, Any], backend: str, checkpoint: Path) -> Architecture:
    sizes = {}
    for key, value in fields.items():
        if key.startswith("model."):
            sizes[key.removeprefix("model.")] = value
    model = as_trained(architecture(sizes), backend, int(fields["seq_len"]))
    if model.of_images:
        raise InputError("transformers has no FLUX", where=str(checkpoint))
    if not model.has_formula:
        raise InputError(
            "a model of no family is exported by its own run",
            where=str(checkpoint),
            hint="take the folder weights of that run; or save_weights=true, of a run that resumes "
            "from it with more steps",
        )
    if fields["mode"] == "lora":
        raise InputError(
            "the checkpoint contains LoRA adapters, not a whole model",
            where=checkpoint,
            hint="export=merged, or save_weights=true, of a run that resumes from it with more "
            "steps",
        )
    return model


def _state(whole: Any, model: Architecture, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of transformers' model ``whole``, from those by canonical names."""
    state: dict[str, Tensor] = {}
    for name, empty in whole.state_dict().items():
        if name == HEAD and model.tied_embeddings:
            continue
        if name.endswith(BIAS) and name not in tensors:
            # torchtitan has none without a balancing loss
            state[name] = torch.zeros(empty.shape)
            continue
        state[name] = from_canonical(
            "finetune", model, f"model.{name}", empty.shape, tensors.__getitem__
        )
    return state


def _tokenizer_of_run(checkpoint: Path) -> Path | None:
    job = json_if_readable(checkpoint.parents[1] / "job.json")
    name = job.get("assets", {}).get("tokenizer", MOCK)
    if name == MOCK or not tokenizer_folder(name).is_dir():
        return None
    return tokenizer_folder(name)


def _differences(
    backend: str, model: Architecture, lost_biases: Iterable[Tensor], tokenizer: Path | None
) -> Iterator[str]:
    others = "some tokens go to other experts in transformers"
    largest = max((float(bias.abs().max()) for bias in lost_biases), default=0.0)
    if largest > 0:
        yield (
            f"{others}: the run's routers have biases (up to {largest:.2g}), and its "
            f"{model.family} has none"
        )
    ranked = max(1, model.moe.top_k // model.moe.top_groups)
    ranked_by_transformers = 1
    if model.moe.score == "sigmoid":
        ranked_by_transformers = 2
    if backend == "megatron" and model.moe.groups > 1 and ranked != ranked_by_transformers:
        yield (
            f"{others}: it ranks groups of experts by the best {ranked_by_transformers} of each, "
            f"Megatron by the best {ranked}"
        )
    if tokenizer is None:
        yield "there is no tokenizer: --tokenizer DIR copies one"


def _weights(checkpoint: Path, backend: str, model: Architecture) -> Mapping[str, Tensor]:
    """Read the weights in ``checkpoint`` by their names in the whole model."""
    reader = dcp.FileSystemReader(checkpoint)
    stored = reader.read_metadata().state_dict_metadata
    saved = {
        name: metadata for name, metadata in stored.items() if _is_weight(name, metadata, backend)
    }
    identity.verify_tensors(checkpoint, saved)
    tensors = {
        name: torch.empty(metadata.size, dtype=metadata.properties.dtype)
        for name, metadata in saved.items()
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    if backend == "torchtitan":
        return tensors
    inner = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    if backend == "megatron":
        from primus_images.training.backends.megatron.saved import joined

        return joined(model, inner)
    return inner


def _is_weight(name: str, metadata: Any, backend: str) -> bool:
    if not isinstance(metadata, TensorStorageMetadata):
        return False
    if backend == "torchtitan":
        return not name.startswith(_OTHER_STATES)
    return name.startswith("model.")
