"""Which weights a model has and how they begin, which of them a run trains, and which of them
moved.
"""

import hashlib
import math
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from primus_images.recipes.architecture import Architecture, shapes
from primus_images.training.judge.reference.names import BIAS, Job, Tensors, to_canonical
from primus_images.training.judge.reference.rounding import LIMITS


def operations(model: Architecture, length: int, adapters: int | None = None) -> float:
    """Return the floating-point operations per token of a sequence of ``length``, or per image,
    attention in full.

    Each weight that a token meets takes 2 operations forward and 4 backward; frozen ones beside
    ``adapters`` (the number of weights that LoRA trains) take 2 less.
    """
    if model.of_images:
        width = model.hidden_size
        blocks = model.dit.double_layers + model.dit.single_layers
        tokens = (model.dit.image_size // 16) ** 2 + model.dit.text_tokens
        return blocks * tokens * (6 * 12 * width**2 + 12 * width * tokens)
    count = 0.0
    for name, shape in shapes(model).items():
        share = 1.0
        if ".experts." in name:
            share = model.moe.top_k / model.moe.experts
        count += (
            0.0
            if name == "model.embed_tokens.weight" and not model.tied_embeddings
            else share * math.prod(shape)
        )
    if adapters is None:
        weights = 6 * count
    else:
        weights = 4 * count + 6 * adapters
    # Queries with keys, and the shares with values, in layers with and without a window.
    sizes = model.query_size + model.value_size
    full = sum(not model.has_window(n) for n in range(model.layers))
    seen = full * length + (model.layers - full) * min(model.window, length)
    return weights + 6 * model.heads * sizes * seen


def adapter_shapes(
    model: Architecture, rank: int, targets: Sequence[str]
) -> dict[str, tuple[int, ...]]:
    """Return the adapters of the linear layers named by ``targets``, by default of all but the
    output layer.
    """
    adapters: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes(model).items():
        layer = name.removesuffix(".weight")
        kind = layer.rpartition(".")[2]
        linear = name.endswith("_proj.weight") and ".experts." not in name
        if linear and (not targets or kind in targets):
            adapters[layer + ".lora_A.weight"] = (rank, shape[1])
            adapters[layer + ".lora_B.weight"] = (shape[0], rank)
    return adapters


_LIMITS = LIMITS["first_weights"]
# Standard deviation of N(0, 1) truncated to ±3.
_CUT_AT_3 = 0.98658
# The parts that PEFT adds to the names of weights.
_ADAPTED = re.compile(r"^base_model\.model\.|\.base_layer(?=\.)")
# Names of matrices whose products are added to the residual stream.
_INTO_STREAM = re.compile(r"\.(o_proj|down_proj)\.weight$")


def strange(job: Job, sizes: Architecture, folder: Path, weights: Tensors) -> list[str]:
    """Return which of the first ``weights``, by canonical names, do not follow the backend's rule,
    and which of those in ``folder/weights-0.pt``, and which ranks, use random numbers of another
    seed.
    """
    config = job["config"]
    if config.get("weights", "random") != "random" or job["resume_from"] or job["first_step"] != 1:
        return []
    findings = [*_other_seeds(job, sizes, folder)]
    for name, tensor in weights.items():
        wide = tensor.double()
        value = constant(job, name, tensor)
        if value is not None:
            if bool((wide != value).any()):
                findings.append(f"{name} does not begin as {value:g}")
            continue
        std = _deviation(job, sizes, name, tensor)
        count = tensor.numel()
        seen = float(wide.std())
        mean = float(wide.mean())
        if abs(seen / std - 1) > _LIMITS["errors"] / math.sqrt(2 * count):
            findings.append(f"{name} begins with a standard deviation of {seen:.4g}, not {std:.4g}")
        elif abs(mean) > _LIMITS["errors"] * std / math.sqrt(count):
            findings.append(f"{name} begins with a mean of {mean:.4g}, not 0")
        elif _repeats(tensor, job["world_size"]):
            findings.append(f"{name} begins with the same numbers in each rank's share")
    return findings


def _repeats(tensor: Tensor, ranks: int) -> bool:
    shares = [
        tensor.chunk(ranks, axis)
        for axis in (0, -1)
        if ranks > 1 and tensor.shape[axis] % ranks == 0
    ]
    return any(torch.equal(first, other) for first, *others in shares for other in others)


def _other_seeds(job: Job, sizes: Architecture, folder: Path) -> Iterator[str]:
    key, usual = ("debug.seed", None) if job["backend"] == "torchtitan" else ("training.seed", 42)
    seed = job["config"].get(key, usual)
    if seed is None:
        # Without a seed, torchtitan uses a random one.
        return
    # Our own loop draws dropout from a different seed on each rank. Megatron and torchtitan seed
    # all ranks alike.
    apart = job["backend"] not in ("torchtitan", "megatron")
    ranks = [
        torch.load(folder / f"batch-1-{rank}.pt", weights_only=True)
        for rank in range(job["world_size"])
    ]
    for rank, seen in enumerate(ranks):
        if seen["seed"] != seed + rank * apart:
            yield (
                f"rank {rank} draws random numbers from seed {seen['seed']}, not "
                f"{seed + rank * apart}"
            )
    if any(seen["device"] != "cpu" for seen in ranks):
        # A GPU draws other numbers from a seed than a CPU.
        return
    stored = torch.load(folder / "weights-0.pt", weights_only=True)["weights"]
    if job["backend"] == "torchtitan":
        drawn = _of_torchtitan
    else:
        drawn = _by_name
    for name, expected in drawn(job, sizes, stored, seed):
        tensor = stored[name].float()
        if float((tensor - expected).abs().max()) > _LIMITS["same"] * float(expected.abs().max()):
            yield f"{name} is not what seed {seed} draws"


def _by_name(
    job: Job, sizes: Architecture, stored: Tensors, seed: int
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in stored.items():
        plain = name
        mark = "/"
        if job["backend"] != "megatron":
            plain = _ADAPTED.sub(
                "", name.removeprefix("model.") if job["backend"] == "finetune" else name
            )
            mark = " "
        canonical = to_canonical(job["backend"], sizes, {name: tensor})
        ours, part = next(iter(canonical.items()), ("", tensor))
        if not ours or constant(job, ours, part) is not None:
            continue
        number = int.from_bytes(hashlib.sha256(f"{seed}{mark}{plain}".encode()).digest()[:7], "big")
        std = _deviation(job, sizes, ours, part)
        generator = torch.Generator().manual_seed(number)
        drawn = torch.empty(tensor.shape).normal_(0, std, generator=generator)
        # Megatron's float32 weights are converted from those of the model.
        narrow = tensor.dtype == torch.bfloat16 or (
            job["backend"] == "megatron" and job["precision"] != "fp32"
        )
        yield name, drawn.bfloat16().float() if narrow else drawn


def _of_torchtitan(
    job: Job, sizes: Architecture, stored: Tensors, seed: int
) -> Iterator[tuple[str, Tensor]]:
    if any(tensor.dtype == torch.bfloat16 for tensor in stored.values()):
        return
    plain = {
        name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", ""): name
        for name in stored
    }
    matrices = (
        f"layers.{layer}.{part}" for layer in range(sizes.layers) for part in _LIMITS["drawn"]
    )
    generator = torch.Generator().manual_seed(seed)
    for name in filter(plain.__contains__, ("tok_embeddings.weight", *matrices, "output.weight")):
        tensor = stored[plain[name]]
        whole = torch.empty(tensor.shape)
        ours, part = next(iter(to_canonical("torchtitan", sizes, {name: tensor}).items()))
        std = _deviation(job, sizes, ours, part)
        if name == "tok_embeddings.weight":
            whole.normal_(0, std, generator=generator)
        elif name == "output.weight":
            std /= _CUT_AT_3
            torch.nn.init.trunc_normal_(whole, 0, std, -3 * std, 3 * std, generator=generator)
        else:
            torch.nn.init.trunc_normal_(whole, 0, std, -2, 2, generator=generator)
        yield plain[name], whole


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
    backend = job["backend"]
    config = job["config"]
    outer = name in ("model.embed_tokens.weight", "lm_head.weight")
    if ".lora_A." in name:
        return 1 / math.sqrt(3 * tensor.shape[-1])
    if backend == "megatron":
        usual = float(config.get("model.init_method_std", 0.02))
        if name == "model.embed_tokens.weight":
            return float(config.get("model.embedding_init_method_std", usual))
        if _INTO_STREAM.search(name):
            return usual / math.sqrt(2 * sizes.layers)
        return usual
    if backend == "torchtitan":
        if outer:
            if name.startswith("model."):
                return 1.0
            return _CUT_AT_3 / math.sqrt(tensor.shape[-1])
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        deep = _INTO_STREAM.search(name) or name.endswith((".up_proj.weight", ".mlp.gate.weight"))
        if layer and deep:
            return 0.02 / math.sqrt(2 * (int(layer[1]) + 1))
        return 0.02
    if outer:
        return 0.5 / math.sqrt(tensor.shape[-1])
    return 0.02


def describe(job: Job, sizes: Architecture, weights: Tensors) -> dict[str, Any]:
    """Return FLOPs and numbers of parameters; which are ``missing`` or of another shape, so that
    nothing can be repeated; and ``odd`` ones: unexpected, or with values that no first weights
    have.
    """
    expected = shapes(sizes)
    if job["mode"] == "lora":
        config = job["config"]
        expected |= adapter_shapes(
            sizes, int(config.get("lora.rank", 16)), config.get("lora.targets") or ()
        )
    present = {name: tuple(tensor.shape) for name, tensor in without_bias(weights).items()}
    matrices: list[tuple[str, Tensor]] = []
    odd = [f"not in the model: {name}" for name in sorted(set(present) - set(expected))]
    for name, tensor in without_bias(weights).items():
        if not bool(torch.isfinite(tensor).all()):
            odd.append(f"{name} is not finite")
        elif ".lora_B." in name:
            if job["first_step"] == 1 and bool(tensor.any()):
                odd.append(f"{name} is not zero, so the adapted model is not the given one")
        elif tensor.ndim > 1 and float(tensor.std()) == 0 and constant(job, name, tensor) is None:
            odd.append(f"{name} holds one value")
        elif tensor.ndim > 1 and ".lora_" not in name:
            same = [other for other, value in matrices if torch.equal(value, tensor)]
            odd += [f"{name} equals {other}" for other in same[:1]]
            matrices.append((name, tensor))
    trained = sum(tensor.numel() for name, tensor in weights.items() if is_trained(job, name))
    length = int(job["config"].get("training.seq_len", 2048))
    return {
        "flops": operations(sizes, length, trained if job["mode"] == "lora" else None),
        "missing": [f"missing: {name}" for name in sorted(set(expected) - set(present))]
        + [
            f"{n}: {list(present[n])}, not {list(s)}"
            for n, s in expected.items()
            if present.get(n, s) != s
        ],
        "odd": odd,
        "count": sum(math.prod(shape) for shape in expected.values()),
        "trained": trained,
    }


def moved(job: Job, first: Tensors, last: Tensors, moving: Collection[str]) -> list[str]:
    """Return which trained weights no step changed, and which frozen ones changed. If rounding to
    bfloat16 loses every update of a weight, it may stay the same; ``moving`` are those that must
    change.
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
