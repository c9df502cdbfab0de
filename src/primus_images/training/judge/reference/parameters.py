"""Which weights a model has, how they begin, which of them a run trains, and which moved."""

import math
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from primus_images.recipes.architecture import Architecture, shapes
from primus_images.training.judge.reference.names import BIAS, Job, Tensors
from primus_images.training.judge.reference.rounding import LIMITS

Shapes = dict[str, tuple[int, ...]]
_LIMITS = LIMITS["first_weights"]
# Standard deviation of N(0, 1) truncated to ±3.
_CUT_AT_3 = 0.98658
# Names of matrices whose products are added to the residual stream.
_INTO_STREAM = re.compile(r"\.(o_proj|down_proj)\.weight$")
_EMBEDDING = "model.embed_tokens.weight"


def operations(model: Architecture, length: int, adapters: int | None = None) -> float:
    """Return the floating-point operations per token of a sequence of ``length``, or per image.

    Attention counts in full. Each weight that a token meets takes 2 operations forward and 4
    backward; frozen ones beside ``adapters`` (the number of weights that LoRA trains) take 2 less.
    """
    if model.of_images:
        dit = model.dit
        width = model.hidden_size
        blocks = dit.double_layers + dit.single_layers
        tokens = (dit.image_size // 16) ** 2 + dit.text_tokens
        of_weights = 6 * 12 * width**2
        of_pairs = 12 * width * tokens
        return blocks * tokens * (of_weights + of_pairs)
    count = 0.0
    for name, shape in shapes(model).items():
        if name == _EMBEDDING and not model.tied_embeddings:
            continue
        share = 1.0
        if ".experts." in name:
            share = model.moe.top_k / model.moe.experts
        count += share * math.prod(shape)
    weights = 6 * count
    if adapters is not None:
        weights = 4 * count + 6 * adapters
    # Queries with keys, and the shares with values, in layers with and without a window.
    sizes = model.query_size + model.value_size
    pairs = 0
    for layer in range(model.layers):
        if model.has_window(layer):
            pairs += min(model.window, length)
        else:
            pairs += length
    return weights + 6 * model.heads * sizes * pairs


def adapter_shapes(model: Architecture, rank: int, targets: Sequence[str]) -> Shapes:
    """Return the adapters of the linear layers named by ``targets``.

    By default, all but the output layer have them.
    """
    adapters: Shapes = {}
    for name, shape in shapes(model).items():
        layer = name.removesuffix(".weight")
        _, _, kind = layer.rpartition(".")
        linear = name.endswith("_proj.weight") and ".experts." not in name
        if linear and (not targets or kind in targets):
            adapters[layer + ".lora_A.weight"] = (rank, shape[1])
            adapters[layer + ".lora_B.weight"] = (shape[0], rank)
    return adapters


def adapters_of(job: Job, sizes: Architecture) -> Shapes:
    """Return the adapters that the recipe of ``job`` requests."""
    config = job["config"]
    rank = int(config.get("lora.rank", 16))
    targets = config.get("lora.targets") or ()
    return adapter_shapes(sizes, rank, targets)


def strange(job: Job, sizes: Architecture, folder: Path, weights: Tensors) -> list[str]:
    """Return what does not follow the backend's rule in the first weights.

    These are ``weights``, by canonical names, and ranks that use random numbers of another seed.
    """
    is_random = job["config"].get("weights", "random") == "random"
    if not is_random or job["resume_from"] or job["first_step"] != 1:
        return []
    findings = list(_other_seeds(job, folder))
    for name, tensor in weights.items():
        fault = _fault(job, sizes, name, tensor)
        if fault:
            findings.append(f"{name} {fault}")
    return findings


def _fault(job: Job, sizes: Architecture, name: str, tensor: Tensor) -> str:
    wide = tensor.double()
    value = constant(job, name, tensor)
    if value is not None:
        if bool((wide != value).any()):
            return f"does not begin as {value:g}"
        return ""
    errors = _LIMITS["errors"]
    count = tensor.numel()
    expected = _deviation(job, sizes, name, tensor)
    deviation = float(wide.std())
    ratio = deviation / expected
    if abs(ratio - 1) > errors / math.sqrt(2 * count):
        return f"begins with a standard deviation of {deviation:.4g}, not {expected:.4g}"
    mean = float(wide.mean())
    if abs(mean) > errors * expected / math.sqrt(count):
        return f"begins with a mean of {mean:.4g}, not 0"
    if _repeats(tensor, job["world_size"]):
        return "begins with the same numbers in each rank's share"
    return ""


def _repeats(tensor: Tensor, ranks: int) -> bool:
    if ranks == 1:
        return False
    for axis in (0, -1):
        if tensor.shape[axis] % ranks == 0:
            first, *others = tensor.chunk(ranks, axis)
            if any(torch.equal(first, other) for other in others):
                return True
    return False


def _other_seeds(job: Job, folder: Path) -> Iterator[str]:
    config = job["config"]
    if job["backend"] == "torchtitan":
        seed = config.get("debug.seed")
    else:
        seed = config.get("training.seed", 42)
    if seed is None:
        # Without a seed, torchtitan uses a random one.
        return
    for rank in range(job["world_size"]):
        recorded = torch.load(folder / f"batch-1-{rank}.pt", weights_only=True)
        used = recorded["seed"]
        expected = seed
        if job["backend"] not in ("torchtitan", "megatron"):
            # Our own loop draws dropout from a different seed on each rank.
            expected += rank
        if used != expected:
            yield f"rank {rank} draws random numbers from seed {used}, not {expected}"


def constant(job: Job, name: str, tensor: Tensor) -> float | None:
    """Return the initial value of each element of a weight; None if they are random."""
    if ".lora_B." in name or name.endswith(("bias", ".sinks", BIAS)):
        return 0.0
    if job["backend"] == "flux" and name.startswith("proj_out."):
        return 0.0
    if tensor.ndim == 1:
        return 1.0 - job["model"]["norm_offset"]
    return None


def _deviation(job: Job, sizes: Architecture, name: str, tensor: Tensor) -> float:
    width = tensor.shape[-1]
    if ".lora_A." in name:
        return 1 / math.sqrt(3 * width)
    if job["backend"] == "megatron":
        return _deviation_of_megatron(job, sizes, name)
    if job["backend"] == "torchtitan":
        return _deviation_of_torchtitan(sizes, name, width)
    if name in (_EMBEDDING, "lm_head.weight"):
        return 0.5 / math.sqrt(width)
    return 0.02


def _deviation_of_megatron(job: Job, sizes: Architecture, name: str) -> float:
    config = job["config"]
    usual = float(config.get("model.init_method_std", 0.02))
    if name == _EMBEDDING:
        return float(config.get("model.embedding_init_method_std", usual))
    if _INTO_STREAM.search(name):
        return usual / math.sqrt(2 * sizes.layers)
    return usual


def _deviation_of_torchtitan(sizes: Architecture, name: str, width: int) -> float:
    if name == _EMBEDDING and not sizes.tied_embeddings:
        return 1.0
    if name in (_EMBEDDING, "lm_head.weight"):
        # The output layer is drawn last, and replaces what was drawn for a tied embedding.
        return _CUT_AT_3 / math.sqrt(width)
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    deep = _INTO_STREAM.search(name) or name.endswith((".up_proj.weight", ".mlp.gate.weight"))
    if layer and deep:
        depth = int(layer[1]) + 1
        return 0.02 / math.sqrt(2 * depth)
    return 0.02


def describe(job: Job, sizes: Architecture, weights: Tensors) -> dict[str, Any]:
    """Return FLOPs and numbers of parameters, and which of them are wrong.

    Nothing can be repeated if some are ``missing`` or of another shape. ``odd`` ones are
    unexpected, or have values that no first weights have.
    """
    expected = shapes(sizes)
    if job["mode"] == "lora":
        expected |= adapters_of(job, sizes)
    present = without_bias(weights)
    missing = []
    for name in sorted(expected.keys() - present.keys()):
        missing.append(f"missing: {name}")
    count = 0
    for name, shape in expected.items():
        count += math.prod(shape)
        if name in present and present[name].shape != shape:
            other = list(present[name].shape)
            missing.append(f"{name}: {other}, not {list(shape)}")
    odd = []
    for name in sorted(present.keys() - expected.keys()):
        odd.append(f"not in the model: {name}")
    odd += _odd_values(job, present)
    trained = 0
    for name, tensor in weights.items():
        if is_trained(job, name):
            trained += tensor.numel()
    adapters = None
    if job["mode"] == "lora":
        adapters = trained
    length = int(job["config"].get("training.seq_len", 2048))
    return {
        "flops": operations(sizes, length, adapters),
        "missing": missing,
        "odd": odd,
        "count": count,
        "trained": trained,
    }


def _odd_values(job: Job, weights: Tensors) -> Iterator[str]:
    matrices: Tensors = {}
    for name, tensor in weights.items():
        if not bool(torch.isfinite(tensor).all()):
            yield f"{name} is not finite"
            continue
        if ".lora_B." in name:
            if job["first_step"] == 1 and bool(tensor.any()):
                yield f"{name} is not zero, so the adapted model is not the given one"
            continue
        if tensor.ndim <= 1:
            continue
        is_random = constant(job, name, tensor) is None
        if is_random and float(tensor.std()) == 0:
            yield f"{name} holds one value"
        elif ".lora_" not in name:
            for other, matrix in matrices.items():
                if torch.equal(matrix, tensor):
                    yield f"{name} equals {other}"
                    break
            matrices[name] = tensor


def moved(job: Job, first: Tensors, last: Tensors, moving: Collection[str]) -> list[str]:
    """Return which trained weights no step changed, and which frozen ones changed.

    If rounding to bfloat16 loses every update of a weight, it may stay the same; ``moving`` are
    those that must change.
    """
    narrow = kept_dtype(job) == "bfloat16"
    wrong = []
    for name, tensor in without_bias(first).items():
        same = torch.equal(tensor, last[name])
        trained = is_trained(job, name)
        if trained and same and (name in moving or not narrow):
            wrong.append(f"{name} was never updated")
        if not trained and not same:
            wrong.append(f"{name} is frozen and changed")
    return wrong


def kept_dtype(job: Job) -> str:
    """Return the dtype of the stored weights, which may differ from that of the computation."""
    key = "training.master_dtype"
    if job["backend"] == "torchtitan":
        key = "training.dtype"
    return str(job["config"].get(key, "float32"))


def is_trained(job: Job, name: str) -> bool:
    """Return whether the job trains the weight ``name``: all, or with LoRA only adapters."""
    return not name.endswith(BIAS) and (job["mode"] != "lora" or ".lora_" in name)


def without_bias(weights: Tensors) -> Tensors:
    """Return ``weights`` without router biases."""
    return {name: tensor for name, tensor in weights.items() if not name.endswith(BIAS)}
