"""What ran, observed inside the process: dtypes, kernels, versions. Rank 0 writes ``facts.json``.

A configuration file only states what was requested. These facts come from the tensors of the first
step, so they show if another precision was used.
"""

import hashlib
import itertools
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from primus_images.files import write_file
from primus_images.yamlfile import read_values

NAMES: Any = read_values(Path(__file__).with_name("facts.yaml")).data


def static(parts: Sequence[Any], device: str, stages: Any = None) -> dict[str, Any]:
    """Return the facts of the whole run: versions, ranks, settings of torch, and the model's
    parameters.

    ``stages`` is the process group of a pipeline, in which each rank has different layers in
    ``parts``.
    """
    parameters = [parameter for part in parts for parameter in part.parameters()]
    counts = [
        (sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad))
    ]
    if stages is not None:
        counts *= dist.get_world_size(stages)
        dist.all_gather_object(counts, counts[0], stages)
    count, trainable = map(sum, zip(*counts, strict=True))
    gpu = None
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    trained = (
        name
        for part in parts
        for name, parameter in part.named_parameters()
        if parameter.requires_grad
    )
    versions = {}
    for name in NAMES["packages"]:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "versions": versions,
        "device": device,
        # A partition of a GPU has the name of the whole one, but fewer units.
        **({"gpu": gpu.name, "gpu_units": gpu.multi_processor_count} if gpu else {}),
        "world_size": dist.get_world_size(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "parameters": count,
        "trainable_parameters": trainable,
        "trained_outside_adapters": sum(".lora_" not in name for name in trained),
    }


def _computed(tensor: Any) -> str:
    device = tensor.device.type  # autocast, torchtitan's way on one rank, casts float32
    if tensor.dtype == torch.float32 and torch.is_autocast_enabled(device):
        return str(torch.get_autocast_dtype(device))
    return str(tensor.dtype)


@contextmanager
def watching(
    parts: Sequence[Any],
    linear_types: tuple[type, ...] = (torch.nn.Linear,),
    *,
    compiled: bool = False,
    trace: Path | None = None,
) -> Iterator[dict[str, Any]]:
    """Fill the yielded dict with the dtypes of every linear layer and the kernels that the step
    called.

    ``linear_types`` are the classes that count as linear layers: each has a ``weight``, and takes
    and returns a tensor (or a tuple that begins with one). Layers of a ``compiled`` model get no
    hooks, which would cause a second compilation; their dtypes come from the profiler. ``trace`` is
    a file for everything that it recorded.
    """
    dtypes: dict[str, Counter[str]] = {"input": Counter(), "weight": Counter(), "output": Counter()}

    def note(module: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if module.weight is None:  # Megatron passes the weight of a tied head to each call.
            return
        dtypes["input"][_computed(inputs[0])] += 1
        # Inside forward, FSDP has replaced the shard by the gathered weight, in the dtype of the
        # computation.
        dtypes["weight"][_computed(module.weight)] += 1
        if isinstance(output, tuple):
            product = output[0]
        else:
            product = output
        # A head that also computes the loss returns one number, not a product.
        if product.dim():
            dtypes["output"][str(product.dtype)] += 1

    modules: dict[str, Any] = {
        name: module for part in parts for name, module in part.named_modules()
    }
    kinds = {name: type(module).__name__ for name, module in modules.items()}
    linears = [
        name
        for name, m in modules.items()
        if isinstance(m, linear_types) or kinds[name] in NAMES["converted"]
    ]
    plain = [name for name in linears if kinds[name] not in NAMES["converted"]]
    if compiled:
        hooks = []
    else:
        hooks = [modules[name].register_forward_hook(note) for name in plain]
    seen: dict[str, Any] = {}
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    try:
        with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
            yield seen
    finally:
        for hook in hooks:
            hook.remove()
    if trace:
        profile.export_chrome_trace(str(trace))
    executed = _executed(profile)
    # Transformer Engine's layers have one class for all precisions. After an FP8 run, an attribute
    # shows it.
    plain = [name for name in plain if getattr(modules[name], "fp8", False) is not True]
    seen["linears"] = {
        "converted": dict(Counter(kinds[name] for name in linears if name not in plain)),
        "plain": sorted(plain),
        "listened": not compiled,
        **{f"{side}_dtypes": dict(sorted(counter.items())) for side, counter in dtypes.items()},
    }
    called = {event.name() for event in executed}
    seen["attention"] = sorted(
        name for name in called if "scaled_dot_product" in name or "flash" in name
    )
    seen["matmul_dtypes"], seen["matmul_flops"] = _products(executed)
    seen["gpu_kernels"] = _gpu_kernels(executed)


def _executed(profile: Any) -> list[Any]:
    # torch.compile calls operators on tensors without values, and a bfloat16 linear layer as a
    # product in float32.
    executed = []
    compiles_until = Counter[int]()
    for event in sorted(
        profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()
    ):
        thread = event.start_thread_id()
        start = event.start_ns()
        if event.name().endswith("(dynamo_timed)"):
            compiles_until[thread] = max(compiles_until[thread], start + event.duration_ns())
        elif start > compiles_until[thread] or event.device_type() != torch.autograd.DeviceType.CPU:
            executed.append(event)
    return executed


def _products(events: Sequence[Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Return numbers of calls and FLOPs by names such as "aten::mm BFloat16", with the dtype of the
    second factor.

    If the profiler recorded no dtype or shapes, the name has none, and there are no FLOPs.
    """
    counts = Counter[str]()
    flops = Counter[str]()
    for event in events:
        if event.name() not in NAMES["products"]:
            continue
        place = 1
        if event.name() == "aten::addmm":
            place = 2
        dtypes = event.dtypes()
        shapes = event.shapes()
        if len(dtypes) <= place:
            continue
        dtype = dtypes[place].removeprefix("c10::")
        factors = shapes[place - 1 : place + 1]
        complete = bool(dtype) and len(factors) == 2 and all(len(shape) > 1 for shape in factors)
        counts[f"{event.name()} {dtype}" if complete else event.name()] += 1
        if complete:
            # Also true for batched and grouped products. On a CPU, linear layers keep the weight
            # transposed.
            columns = factors[1][0 if event.name().startswith("mkldnn") else -1]
            flops[f"{event.name()} {dtype}"] += 2 * math.prod(factors[0]) * columns
    return dict(sorted(counts.items())), dict(sorted(flops.items()))


def _gpu_kernels(events: Sequence[Any]) -> list[str]:
    timed: Counter[str] = Counter()
    for event in events:
        on_gpu = event.device_type() == torch.autograd.DeviceType.CUDA
        if on_gpu and any(word in event.name() for word in NAMES["kernels"]):
            timed[event.name()] += event.duration_ns()
    return [name for name, _ in timed.most_common(12)]


def loaded() -> list[str]:
    """Return the Python packages of which this process has loaded a module, and the libraries that
    it has mapped.

    A package that shares its folder with others, such as those below ``nvidia``, counts with them.
    """
    lines = Path("/proc/self/maps").read_text().splitlines()
    libraries = [Path(line.split(maxsplit=5)[5]) for line in lines if ".so" in line]
    tops = {name.partition(".")[0] for name in sys.modules}
    for library in libraries:
        tops |= {
            top for above, top in itertools.pairwise(library.parts) if above.endswith("-packages")
        }
    owners = metadata.packages_distributions()
    packages = {
        re.sub("[-_.]+", "-", owner).lower() for top in tops for owner in owners.get(top, ())
    }
    return sorted(packages | {library.name.partition(".so")[0].lower() for library in libraries})


def final(parts: Sequence[Any], step: int) -> dict[str, Any]:
    """Return the facts of the end of a run: the weights after ``step``, and what rank 0, their
    writer, has loaded.
    """
    return {
        "weights_sha256": digest(parts),
        "last_step": step,
        "loaded": [] if dist.get_rank() else loaded(),
    }


def digest(parts: Sequence[Any]) -> str:
    """Return the sha256 of checksums of the weights of all ranks, each rank's own shards in order.

    Each rank computes the checksums where its weights are: hashing gigabytes on the CPU would take
    minutes.
    """
    hasher = hashlib.sha256()
    for part in parts:
        for name, parameter in part.named_parameters():
            if hasattr(parameter, "to_local"):
                local = parameter.to_local()
            else:
                local = parameter
            sums = tuple(checksum % 2**64 for checksum in checksums(local.detach()).tolist())
            hasher.update(f"{name} {local.dtype} {tuple(local.shape)} {sums}".encode())
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, hasher.hexdigest())
    return hashlib.sha256("".join(gathered).encode()).hexdigest()


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksums(tensor: torch.Tensor, at_once: int = 1 << 24) -> torch.Tensor:
    """Return two sums over the bits of all elements, modulo 2⁶⁴; the second weights each element by
    its position.

    Sums of integers do not depend on the order, so CPUs and GPUs agree. The weights are odd, so a
    change of one element always changes the sum.
    """
    bits = tensor.contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    sums = torch.zeros(2, dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), at_once):
        chunk = bits[start : start + at_once].to(torch.int64)
        places = torch.arange(start, start + len(chunk), dtype=torch.int64, device=bits.device)
        # An odd multiplier, so that the weights of distant positions differ as much as those of
        # near ones.
        weights = (places * 0x9E3779B97F4A7C1) | 1
        sums += torch.stack([chunk.sum(), (chunk * weights).sum()])
    return sums


def write(path: Path, facts: Mapping[str, Any]) -> None:
    """Write ``facts`` to ``path`` atomically, on rank 0."""
    if dist.get_rank() == 0:
        write_file(path, json.dumps(facts, indent=2, sort_keys=True) + "\n")
