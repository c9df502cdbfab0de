"""Checkpoints of every family and backend: exported, they give the backend's logits in
transformers; and back again.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# The image for CPUs has no compiler for what Megatron compiles, as in a run of it.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
import torch._dynamo.config
import torch.distributed.checkpoint as dcp
from cases import here, try_all
from megatron.core import parallel_state
from torch import Tensor
from torchtitan.config import ConfigManager
from torchtitan.protocols.train_spec import get_train_spec
from transformers import AutoConfig, AutoModelForCausalLM

from primus_images.cli.main import main
from primus_images.recipes.load import entries
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from primus_images.training.backends import gloo
from primus_images.training.backends.finetune import backend, models
from primus_images.training.backends.fsdp.llama import Llama
from primus_images.training.backends.loop import weights
from primus_images.training.backends.loop.config import read_job
from primus_images.training.backends.megatron import cpu
from primus_images.training.backends.protocol import backend_of
from primus_images.training.backends.torchtitan import cpu as on_cpu, render, spec as specs
from primus_images.training.judge.reference.names import to_canonical
from primus_images.training.run import identity, ranks
from primus_images.training.run.job import Job

torch._dynamo.config.disable = True
LENGTH = 48
# The smallest recipe of every kind of model that a backend trains.
SMALLEST = {
    (
        entry.backend,
        (model := entry.architecture).family,
        model.tied_embeddings,
        model.mla.q_lora_rank,
    ): entry.recipe
    for entry in sorted(entries(), key=lambda entry: -entry.size.total)
    if entry.backend != "flux" and entry.mode != "lora" and not entry.only_proxy
}
# Megatron ranks groups of experts by their best top_k ÷ top_groups experts, DeepSeek-V3 by their
# best two. Without the loss, torchtitan has no biases of routers.
WORDS = {
    "megatron deepseek-v3-proxy": "model.moe.top_k=4",
    "torchtitan deepseek-16b v3": (
        "model.family=deepseek_v3 model.moe.score=sigmoid model.moe.auxiliary_loss=0"
    ),
}
CASES = sorted({*WORDS, *(f"{backend} {recipe}" for (backend, *_), recipe in SMALLEST.items())})
# Settings that start from the exported folder.
TITAN = "checkpoint.initial_load_in_hf=true tokenizer={}"
BACK = {
    "torchtitan": TITAN,
    "megatron": "weights={}",
    # The run did not scale its positions, as all are below the original length.
    **dict.fromkeys(
        ("torchtitan deepseek-16b", "torchtitan deepseek-16b v3"),
        f"{TITAN} model.rope_scaling.kind=none",
    ),
}
# Ranks that share layers, stages of them, and experts.
LAYOUTS = {
    "megatron qwen2.5-7b": "--ranks 2 tp=2",
    "megatron qwen3-30b-a3b": "--ranks 4 tp=1 pp=2 ep=2",
}
TOKENS = torch.arange(2 * LENGTH).reshape(2, LENGTH) * 7 % 256
Model = tuple[torch.nn.Module, dict[str, Any], Callable[[], Tensor]]


def recipe_of(case: str, *words: str) -> Recipe:
    backend, name, *_ = case.split()
    choices = Choices(
        backend=backend,
        mode="full" if backend == "finetune" else "pretrain",
        precision="fp32",
        gpu="cpu",
        proxy=True,
    )
    few = ["ep=1"] if backend in ("torchtitan", "megatron") else []
    more = WORDS.get(case, "").split()
    return resolve(name, ["steps=1", "ranks=1", f"seq_len={LENGTH}", *few, *more, *words], choices)


def built(where: Path, recipe: Recipe) -> Model:
    """The model as a rank builds it, its state for checkpoints, and a function that computes
    logits.
    """
    where.mkdir()
    for name, text in ranks.files(Job(name="run", recipe=recipe, output=where)).items():
        (where / name).write_text(text)
    job = read_job(where)
    if recipe.backend == "torchtitan":
        spec = get_train_spec(render.model_name(job.model))
        kind = type(next(iter(spec.model_args.values())))
        arguments = specs.arguments(kind, render.model_arguments(job.model, recipe.precision))
        arguments.update_from_config(
            ConfigManager().parse_args(["--job.config_file", str(where / render.FILE)])
        )
        model = spec.model_cls(arguments)
        if recipe.find(render.INITIAL, False):
            adapter = specs.adapter_of(spec.state_dict_adapter, job.model)(
                arguments, job.assets["tokenizer"]
            )
            files = adapter.to_hf(model.state_dict())
            dcp.load(
                files,
                storage_reader=adapter.get_hf_storage_reader(job.assets["tokenizer"]),
                no_dist=True,
            )
            model.load_state_dict(adapter.from_hf(files), strict=False)
        return model, model.state_dict(), lambda: model(TOKENS)
    if recipe.backend == "megatron":
        from primus_images.training.backends.megatron.session import MegatronSession

        parallel_state.destroy_model_parallel()
        session = MegatronSession(job, torch.device("cpu"))
        (part,) = session.model_parts
        places = torch.arange(LENGTH).expand_as(TOKENS)
        return part, session.state_dict(), lambda: part(TOKENS, places, None)
    if recipe.backend == "fsdp":
        own = Llama(job.model, LENGTH, 1024)
        return own, {"model": own.state_dict()}, lambda: own.head(own.hidden(TOKENS)[0])
    tuned = models.FineTuned(models.causal_model(job.model, "sdpa"), 1024)
    weights.materialize(tuned, torch.device("cpu"))
    tuned.causal.tie_weights()
    return tuned, {"model": tuned.state_dict()}, lambda: tuned.model(TOKENS).logits


def check_export(case: str, where: Path) -> None:
    recipe = recipe_of(case)
    model, state, logits = built(where / "run", recipe)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if "norm" in name and tensor.is_floating_point():
            tensor.data.uniform_(0.5, 1.5)
        elif isinstance(tensor, torch.nn.Parameter) or (
            name.endswith("expert_bias") and "megatron" in case
        ):
            tensor.data.normal_(0, 0.15)
    checkpoint = where / "run/checkpoint/step-1"
    dcp.save(state, checkpoint_id=checkpoint, no_dist=True)
    identity.seal(checkpoint, identity.of(recipe))
    assert main(["export", str(where / "run"), str(where / "hf")]) == 0
    theirs = AutoModelForCausalLM.from_pretrained(where / "hf", dtype=torch.float32)(TOKENS).logits
    check_older_names(where / "hf")
    with torch.no_grad():
        gap = float((logits() - theirs).abs().max() / theirs.abs().max())
    assert gap < 1e-4, gap
    words = BACK.get(case, BACK.get(recipe.backend, "")).format(where / "hf").split()
    if words:
        recipe = recipe_of(case, *words)
        backend_of(recipe).check_weights(recipe)
        again, _, _ = built(where / "again", recipe)
        for (name, tensor), mine in zip(
            again.state_dict().items(), model.state_dict().values(), strict=True
        ):
            assert tensor is mine is None or torch.equal(tensor, mine), name


def check_older_names(folder: Path) -> None:
    """Without the settings that only transformers 5 reads, the rotary positions are the same."""
    rope, file = AutoConfig.from_pretrained(folder).rope_parameters, folder / "config.json"
    config = json.loads(text := file.read_text())
    file.write_text(
        json.dumps({key: value for key, value in config.items() if key != "rope_parameters"})
    )
    assert AutoConfig.from_pretrained(folder).rope_parameters == rope
    file.write_text(text)


def check_layout(case: str, where: Path) -> None:
    """The first weights depend on the seed alone, and a step of this size hardly changes them."""
    few = ["model.layers=4", "seed=7", "lr=1e-12", "checkpoint=1"]
    backend, name = case.split()
    command = [
        sys.executable,
        "-m",
        "primus_images.cli.main",
        "train",
        name,
        "--backend",
        backend,
        "--precision",
        "fp32",
        "--gpu",
        "cpu",
        "--proxy",
        "--output",
        str(where / "run"),
        "steps=1",
        f"seq_len={LENGTH}",
    ]
    subprocess.run([*command, *few, *LAYOUTS[case].split()], check=True, stdout=subprocess.DEVNULL)
    assert main(["export", str(where / "run"), str(where / "hf")]) == 0
    recipe = recipe_of(case, *few)
    model, _, _ = built(where / "whole", recipe)
    state = {name.removeprefix("module."): tensor for name, tensor in model.named_parameters()}
    exported = weights.Files(where / "hf")
    for name, tensor in to_canonical(backend, recipe.architecture, state).items():
        torch.testing.assert_close(exported.whole(name), tensor, rtol=0, atol=1e-9)


def join() -> None:
    on_cpu.patch_torch()
    cpu.patch_torch()
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    store = torch.distributed.TCPStore("127.0.0.1", 0, 1, is_master=True)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    cpu.patch_megatron()


if __name__ == "__main__":
    torch.manual_seed(0)
    chosen = [case for case in CASES if all(word in case for word in sys.argv[1:])]
    join()
    backend.subprocess = SimpleNamespace(run=here)
    layouts = [case for case in LAYOUTS if case in chosen]
    try_all([(check_export, chosen), (check_layout, layouts)])
    gloo.leave()
