"""The faults: name → class, backend, module, the function that changes the module, and the checks that must fail.

A fault changes a module after it was loaded. Training goes on, the loss falls, nothing is printed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Silent(NamedTuple):
    """``kind`` is the class of fault; ``names``: at least one of these checks must fail."""

    kind: str
    backend: str
    module: str
    change: Callable[[Any], None]
    names: tuple[str, ...]
    words: tuple[str, ...] = ()


SILENT: dict[str, Silent] = {}


def silent(kind: str, backend: str, module: str, *names: str, words: tuple[str, ...] = ()) -> Any:
    """Register a function that changes ``module`` for the job of ``backend`` with ``words``."""

    def register(change: Callable[[Any], None]) -> Callable[[Any], None]:
        name = f"{backend}_{change.__name__}"
        assert name not in SILENT, name
        SILENT[name] = Silent(kind, backend, module, change, names, words)
        return change

    return register


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace ``owner.name`` by ``around(original, *arguments)``."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: around(original, *args, **kwargs))


# Checks
DATA = "reference data"
LOSS = "reference loss"
NORM = "reference gradient norm"
GRADIENTS = "reference gradients"
RATE = "reference learning rate"
UPDATE = "reference update"
CONSTANTS = "reference constants"
BLOCKS = "reference blocks"
PARAMETERS = "reference parameters"
MOVED = "reference trained weights"
CLOCK = "clock"
LOGGED = "steps logged"
FIRST = "reference first weights"
FIGURES = "reported figures"
KEPT = "reference saved files"
NAN = "finite"
# Modules
ADAMW = "torch.optim.adamw"
DISTRIBUTED = "megatron.core.distributed.distributed_data_parallel"
EMBEDDINGS = "diffusers.models.embeddings"
ENTROPY = "megatron.core.tensor_parallel.cross_entropy"
FINETUNE = "primus.training.finetune.models"
FLOAT8 = "torchao.float8.float8_linear"
LOOP_SESSION = "primus.training.loop.session"
LATENTS = "primus.training.flux.latents"
LAYERS = "megatron.core.tensor_parallel.layers"
LLAMA = "primus.training.fsdp.llama"
LOOP = "primus.training.loop.train"
LOOP_DATA = "primus.training.loop.data"
OPTIMIZER = "torchtitan.components.optimizer"
RENDER = "primus.training.megatron.render"
ROUTER = "megatron.core.transformer.moe.router"
SESSION = "primus.training.megatron.session"
TITAN_DATA = "torchtitan.hf_datasets.text_datasets"
TITAN_LOSS = "torchtitan.components.loss"
TITAN_MODEL = "torchtitan.models.llama3.model.model"
TITAN_MOE = "torchtitan.models.moe.moe"
TITAN_RATE = "torchtitan.components.lr_scheduler"
TITAN_TRAIN = "torchtitan.train"
TOKENS = "primus.training.tokens"
TITAN_UTILS = "torchtitan.distributed.utils"
TRANSFORMER = "diffusers.models.transformers.transformer_flux"
WEIGHTS = "primus.training.loop.weights"
# Settings of jobs, and choices
BF16 = ("--precision=bf16",)
BIASED = ("--recipe=qwen2.5-7b",)
COPIES = ("sharding.replicas=2",)
DEEPSEEK_V3 = ("--recipe=deepseek-v3",)
DEEPSEEK_WORDS = ("--recipe=deepseek-16b",)
FLUX = ("--recipe=flux.1-dev", "--mode=pretrain")
FP8 = ("--precision=fp8",)
LORA = ("--mode=lora",)
MIXTRAL = ("--recipe=mixtral-8x7b",)
SAVED = ("finetune.save_weights=true",)
TENSORS = ("tp=2",)
TITAN_SPLIT = ("torchtitan.training.local_batch_size=2",)
WHOLE = ("steps=20",)
MIXTRAL_BF16 = ("--recipe=mixtral-8x7b", *BF16)
END = 1


def each_sample(module: Any, change: Callable[[int, Any, Any], tuple[Any, Any]]) -> None:
    original = module.HuggingFaceTextDataset.__iter__

    def samples(self: Any) -> Any:
        for number, (inputs, label) in enumerate(original(self)):
            tokens, target = change(number, inputs["input"], label)
            yield {"input": tokens}, target

    module.HuggingFaceTextDataset.__iter__ = samples


def local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def built(module: Any, change: Callable[[Any], None]) -> None:
    """Call ``change`` with each language model that fine-tuning builds."""

    def build(run: Any, *args: Any, **kwargs: Any) -> Any:
        output = run(*args, **kwargs)
        change(output)
        return output

    wrap(module, "causal_model", build)
