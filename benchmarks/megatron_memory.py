"""Weights, gradients and optimizer states of a rank, as megatron-core itself allocates them.

``python -m benchmarks.megatron_memory`` needs megatron-core and PyTorch, and no GPU: the model,
gradient buffers and optimizer of a run are made on PyTorch's device ``meta``, which has sizes and
no memory, in a group of ranks that do not exist. Each pipeline stage is a process of its own. The
sizes are written to ``benchmarks/results/megatron-memory.json``, with which a test compares what
``primus fit`` predicts.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from primus_images.recipes.architecture import built
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from primus_images.training.backends.loop.config import LoopConfig, RankJob
from primus_images.yamlfile import section

RESULT = Path(__file__).parent / "results/megatron-memory.json"
# Recipe, nodes, and the layout.
LAYOUTS: Sequence[tuple[str, int, Sequence[str]]] = (
    ("llama3.1-8b", 1, ()),
    ("llama3.1-8b", 1, ("ddp.grad_reduce_in_fp32=false",)),
    ("llama3.1-8b", 1, ("tp=2",)),
    ("llama3.1-8b", 1, ("tp=2", "ddp.use_distributed_optimizer=false")),
    ("llama3.1-8b", 2, ("pp=2", "model.virtual_pipeline_model_parallel_size=2")),
    ("llama3.1-70b", 8, ("tp=8", "pp=4")),
    ("qwen2.5-72b", 4, ("tp=4", "pp=2")),
    ("mixtral-8x7b", 1, ("ep=8",)),
    ("mixtral-8x7b", 2, ("ep=8", "ddp.use_distributed_optimizer=false")),
    ("mixtral-8x7b", 4, ("ep=4", "tp=2", "pp=2")),
    ("mixtral-8x7b", 2, ("ep=2", "tp=4", "model.expert_tensor_parallel_size=2")),
    ("deepseek-v2-lite", 1, ("ep=8",)),
    ("deepseek-v2-lite", 3, ("ep=8", "pp=3")),
    ("deepseek-v3", 16, ()),
    ("qwen3-30b-a3b", 2, ("ep=8", "pp=2")),
)


def recipe_of(name: str, nodes: int, words: Sequence[str]) -> Recipe:
    """Return the recipe of one of the layouts."""
    choices = Choices(backend="megatron", precision="bf16", gpu="mi355x", nodes=nodes)
    batch = ("training.micro_batch_size=1", "training.global_batch_size=12288")
    return resolve(name, [*batch, *words], choices)


class _OnMeta(TorchFunctionMode):  # type: ignore[misc,unused-ignore]
    """Keep on ``meta`` what Megatron moves to a GPU, and report a CUDA type for tensors."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "meta"
        if function is torch.Tensor.cuda:
            return args[0]
        result = function(*args, **kwargs)
        if function is torch.Tensor.type and isinstance(result, str):
            return f"torch.cuda.{result.rpartition('.')[2]}"
        return result


def allocated(recipe: Recipe, stage: int) -> dict[str, int]:
    """Return the bytes that Megatron allocates on the first rank of ``stage``, by kind."""
    torch.cuda.current_device = lambda: torch.device("meta")
    torch.cuda.Stream = torch.cpu.Stream
    from megatron.core import parallel_state
    from megatron.core.optimizer import get_megatron_optimizer
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from primus_images.training.backends.megatron import cpu, model, weights
    from primus_images.training.backends.megatron.render import TABLES
    from primus_images.training.backends.megatron.session import optimizer_settings

    cpu.patch_without_te()
    job = _job(recipe)
    world = recipe.world_size
    torch.distributed.init_process_group(
        "fake", store=FakeStore(), rank=stage * world // recipe.degree("pp"), world_size=world
    )
    settings = section(job.config, "model")
    degrees = {name: settings[name] for name in TABLES["degrees"] if name in settings}
    parallel_state.initialize_model_parallel(**degrees, create_gloo_process_groups=False)
    with torch.device("meta"), _OnMeta():
        transformer = model.transformer_config(job, on_cpu=True)
        weights.defer(transformer)
        virtual_stages: list[int | None] = [None]
        if transformer.virtual_pipeline_model_parallel_size:
            virtual_stages = list(range(transformer.virtual_pipeline_model_parallel_size))
        parts = []
        for virtual_stage in virtual_stages:
            part = model.gpt_model(job, transformer, virtual_stage)
            parts.append(model.in_bfloat16(transformer, part))
        parts = model.distributed_parts(transformer, parts, job, sharded=False)
        adam = optimizer_settings(job, parts[0].ddp_config)
        optimizer = get_megatron_optimizer(adam, parts, use_gloo_process_groups=False)
    return _bytes(parts, optimizer)


def _job(recipe: Recipe) -> RankJob:
    config = recipe.section("megatron")
    return RankJob(
        output=Path(),
        mode=recipe.mode,
        precision=recipe.precision,
        model=recipe.architecture,
        assets={},
        config=config,
        training=built(LoopConfig, section(config, "training")),
        first_step=1,
        last_step=1,
        resume_from=None,
        identity={},
        world_size=recipe.world_size,
        data_parallel=recipe.data_parallel,
        global_batch=recipe.global_batch,
        accumulation=recipe.accumulation,
        witness=False,
        examined=(),
        blocks=False,
        turbo=(),
        evaluation={},
    )


def _bytes(parts: Sequence[Any], optimizer: Any) -> dict[str, int]:
    weights = gradients = states = 0
    for part in parts:
        weights += sum(weight.nbytes for weight in part.parameters())
        for buffer in (*part.buffers, *part.expert_parallel_buffers):
            gradients += buffer.grad_data.nbytes
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        if inner.optimizer is None:
            continue
        for group in inner.optimizer.param_groups:
            # Adam's two moments have the size of the float32 weight.
            states += sum(3 * master.nbytes for master in group["params"])
    return {"weights": weights, "gradients": gradients, "optimizer": states}


def _measured(layout: int, stage: int) -> dict[str, int]:
    command = [sys.executable, "-m", "benchmarks.megatron_memory", str(layout), str(stage)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    sizes: dict[str, int] = json.loads(lines[-1])
    return sizes


def main() -> None:
    """Write the result; with a layout's number and a stage, print the sizes of this one."""
    if len(sys.argv) == 3:
        recipe = recipe_of(*LAYOUTS[int(sys.argv[1])])
        print(json.dumps(allocated(recipe, int(sys.argv[2]))))
        return
    rows = []
    for number, (name, nodes, words) in enumerate(LAYOUTS):
        stages = recipe_of(name, nodes, words).degree("pp")
        # Stages in the middle are equal.
        for stage in sorted({0, min(1, stages - 1), stages - 1}):
            row = {"recipe": name, "nodes": nodes, "words": list(words), "stage": stage}
            rows.append(row | {"bytes": _measured(number, stage)})
            print(rows[-1])
    document = {
        "command": "python -m benchmarks.megatron_memory",
        "megatron_core": version("megatron-core"),
        "torch": torch.__version__,
        "rows": rows,
    }
    RESULT.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
