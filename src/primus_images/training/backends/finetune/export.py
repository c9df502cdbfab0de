"""Trained weights or adapters, as the files that Hugging Face's libraries load."""

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from primus_images.files import write_file
from primus_images.recipes.recipe import MOCK
from primus_images.training.backends.finetune import models
from primus_images.training.backends.finetune.backend import FinetuneConfig
from primus_images.training.backends.loop.config import RankJob
from primus_images.training.text.corpus import TOKENIZER_FILES, tokenizer_folder
from primus_images.training.text.encoder import Encoder, template_of


def save(model: models.FineTuned, job: RankJob, source: Path | None) -> None:
    """Write what was trained from the weights in ``source``. All ranks."""
    merges = job.mode == "lora" and job.section(FinetuneConfig).export == "merged"
    # In mode full, too, some models have weights that are not trained, such as biases of routers.
    adapters_alone = job.mode == "lora" and not merges
    options = StateDictOptions(
        full_state_dict=True, cpu_offload=True, ignore_frozen_params=adapters_alone
    )
    state = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        if merges:
            model = _merged(job, source, state)
            state = model.state_dict()
        elif job.mode == "lora" and source is not None:
            # PEFT loads the base model from here.
            model.model.peft_config["default"].base_model_name_or_path = _lasting_name(source)
        plain = {name.removeprefix("model."): tensor for name, tensor in state.items()}
        tokenizer = source  # with mock data
        if job.assets["tokenizer"] != MOCK:
            tokenizer = tokenizer_folder(job.assets["tokenizer"])
        write(model, job.output / "weights", plain, tokenizer, source)
        if "chat_template" in job.assets:
            # transformers prefers this file to a template in tokenizer_config.json, but not to
            # others for chats with tools.
            shutil.rmtree(job.output / "weights" / "additional_chat_templates", ignore_errors=True)
            template = template_of(Path(job.assets["chat_template"]))
            write_file(job.output / "weights" / "chat_template.jinja", template)
    dist.barrier()


def _merged(job: RankJob, source: Path | None, state: Mapping[str, Any]) -> models.FineTuned:
    """Return the whole model, with the adapters in ``state`` added to its weights."""
    config = job.section(FinetuneConfig)
    causal = models.causal_model(job.model, config.attention, source)
    model = models.FineTuned(models.adapted(causal, config.lora), config.loss_chunk)
    wide = {name: tensor.float() for name, tensor in state.items()}
    model.load_state_dict(wide, assign=True)
    model.model = model.model.merge_and_unload()
    model.causal.tie_weights()
    return model


def _lasting_name(source: Path) -> str:
    """Return the hub's name of ``source``, whose folder in a cache exists on this machine only."""
    cached = re.search(r"/models--([^/]+?)--([^/]+)/snapshots/[^/]+$", str(source))
    if cached:
        return f"{cached[1]}/{cached[2]}"
    return str(source.absolute())


def write(
    model: models.FineTuned,
    folder: Path,
    state: Mapping[str, torch.Tensor],
    tokenizer: Path | None,
    source: Path | None = None,
) -> None:
    """Write ``state`` as the weights of ``model`` or its adapters, with the files of ``tokenizer``.

    Special tokens are those of the initial weights in ``source``, or else of ``tokenizer``. The
    ``generation_config.json`` of ``source`` is kept.
    """
    _complete_settings(model.causal, tokenizer)
    model.model.save_pretrained(folder, state_dict=dict(state))
    if source:
        _copy(source, "generation_config.json", folder)
    if tokenizer:
        for pattern in TOKENIZER_FILES:
            _copy(tokenizer, pattern, folder)
    if (folder / "config.json").is_file():
        _add_older_names(folder / "config.json")
    _share(folder)


def _share(folder: Path) -> None:
    """Give all files the mode of new files: safetensors writes its own for the owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    for file in folder.iterdir():
        if file.is_file():
            file.chmod(0o666 & ~mask)


def _complete_settings(causal: Any, tokenizer: Path | None) -> None:
    special_tokens = {}
    if tokenizer:
        encoder = Encoder(str(tokenizer))
        special_tokens["bos_token_id"] = encoder.tokenizer.bos_token_id
        special_tokens["eos_token_id"] = encoder.end
    for settings in (causal.config, causal.generation_config):
        settings.use_cache = True
        for key, number in special_tokens.items():
            if number is not None and getattr(settings, key, None) is None:
                setattr(settings, key, number)


def _copy(source: Path, pattern: str, folder: Path) -> None:
    for file in source.glob(pattern):
        if file.is_file():
            copy = folder / file.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)


def _add_older_names(file: Path) -> None:
    """Add rotary settings under older names, unless transformers would then read other settings.

    Of models whose kinds of layers rotate in different ways, it would.
    """
    from transformers import AutoConfig

    config = json.loads(file.read_text(encoding="utf-8"))
    older = _older_names(config.get("rope_parameters") or {})
    if not older:
        return
    named = json.dumps(config | older, indent=2) + "\n"
    with TemporaryDirectory() as folder:
        trial = Path(folder) / file.name
        trial.write_text(named, encoding="utf-8")
        try:
            read = AutoConfig.from_pretrained(trial).rope_parameters
        except (KeyError, ValueError):
            return
    if read == AutoConfig.from_pretrained(file).rope_parameters:
        write_file(file, named)


def _older_names(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary settings as before transformers 5.

    Servers with an older one would take 10,000 as the base.
    """
    whole = rope.get("full_attention") or rope
    if "rope_theta" not in whole:  # other kinds of layers, which older versions do not have
        return {}
    scaling = dict(whole)
    names = {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": None}
    if scaling.get("rope_type", "default") != "default":
        names["rope_scaling"] = scaling
    if "sliding_attention" in rope:
        names["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    return names
