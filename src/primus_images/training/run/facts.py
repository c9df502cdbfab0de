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
from torch.distributed.fsdp import FSDPModule

from primus_images.files import write_file
from primus_images.yamlfile import read_values

NAMES: Any = read_values(Path(__file__).with_name("facts.yaml")).data


def static(parts: Sequence[Any], device: str, stages: Any = None) -> dict[str, Any]:
    """Return the facts of the whole run: versions, ranks, settings of torch, and parameters.

    ``stages`` is the process group of a pipeline, in which each rank has different layers in
    ``parts``.
    """
    parameters = [parameter for part in parts for parameter in part.named_parameters()]
    trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    count = sum(parameter.numel() for _, parameter in parameters)
    trainable = sum(parameter.numel() for _, parameter in trained)
    if stages is not None:
        counts = [(count, trainable)] * dist.get_world_size(stages)
        dist.all_gather_object(counts, (count, trainable), stages)
        count = sum(of_stage for of_stage, _ in counts)
        trainable = sum(of_stage for _, of_stage in counts)
    facts = {
        "versions": _versions(),
        "device": device,
        "world_size": dist.get_world_size(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "parameters": count,
        "trainable_parameters": trainable,
        "trained_outside_adapters": sum(".lora_" not in name for name, _ in trained),
    }
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
        # A partition of a GPU has the name of the whole one, but fewer units.
        facts |= {"gpu": gpu.name, "gpu_units": gpu.multi_processor_count}
    return facts


def _versions() -> dict[str, str]:
    versions = {}
    for name in NAMES["packages"]:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _computed(tensor: Any) -> str:
    device = tensor.device.type  # autocast, torchtitan's way on one rank, casts float32
    if tensor.dtype == torch.float32 and torch.is_autocast_enabled(device):
        return str(torch.get_autocast_dtype(device))
    return str(tensor.dtype)


class _Dtypes:
    """Counts the dtypes of linear layers, as forward hooks see them."""

    def __init__(self) -> None:
        self.input = Counter[str]()
        self.weight = Counter[str]()
        self.output = Counter[str]()

    def note(self, module: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Count those of one call; the forward hook of a layer."""
        if module.weight is None:  # Megatron passes the weight of a tied head to each call.
            return
        self.input[_computed(inputs[0])] += 1
        # Inside forward, FSDP has replaced the shard by the gathered weight, in the dtype of the
        # computation.
        self.weight[_computed(module.weight)] += 1
        if isinstance(output, tuple):
            output = output[0]
        # A head that also computes the loss returns one number, not a product.
        if output.dim():
            self.output[str(output.dtype)] += 1

    def facts(self) -> dict[str, dict[str, int]]:
        """Return the counts by name of the fact."""
        return {
            "input_dtypes": dict(sorted(self.input.items())),
            "weight_dtypes": dict(sorted(self.weight.items())),
            "output_dtypes": dict(sorted(self.output.items())),
        }


@contextmanager
def watching(
    parts: Sequence[Any],
    linear_types: tuple[type, ...] = (torch.nn.Linear,),
    *,
    compiled: bool = False,
    trace: Path | None = None,
) -> Iterator[dict[str, Any]]:
    """Fill the yielded dict with the dtypes of every linear layer and the step's kernels.

    ``linear_types`` are the classes that count as linear layers: each has a ``weight``, and takes
    and returns a tensor (or a tuple that begins with one). Layers of a ``compiled`` model get no
    hooks, which would cause a second compilation; their dtypes come from the profiler. ``trace`` is
    a file for everything that it recorded.
    """
    dtypes = _Dtypes()
    converted, plain = _linear_layers(parts, linear_types)
    hooks = []
    if not compiled:
        hooks = [layer.register_forward_hook(dtypes.note) for layer in plain.values()]
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
    # Transformer Engine's layers have one class for all precisions. After an FP8 run, an attribute
    # shows it.
    for name, layer in list(plain.items()):
        if getattr(layer, "fp8", False) is True:
            converted[name] = plain.pop(name)
    executed = _executed(profile)
    called = {event.name() for event in executed}
    seen["linears"] = {
        "converted": dict(Counter(type(layer).__name__ for layer in converted.values())),
        "plain": sorted(plain),
        "listened": not compiled,
        **dtypes.facts(),
    }
    seen["attention"] = sorted(name for name in called if _is_attention(name))
    seen["matmul_dtypes"], seen["matmul_flops"] = _products(executed)
    seen["gpu_kernels"] = _gpu_kernels(executed)


def _linear_layers(
    parts: Sequence[Any], linear_types: tuple[type, ...]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the linear layers by name: those that torchao converted, and the others."""
    converted = {}
    plain = {}
    for part in parts:
        for name, module in part.named_modules():
            if type(module).__name__ in NAMES["converted"]:
                converted[name] = module
            elif isinstance(module, linear_types):
                plain[name] = module
    return converted, plain


def _is_attention(kernel: str) -> bool:
    return "scaled_dot_product" in kernel or "flash" in kernel


def _executed(profile: Any) -> list[Any]:
    """Return the events of a profile in order, without those of compilation.

    torch.compile calls operators on tensors without values, and a bfloat16 linear layer as a
    product in float32.
    """
    executed = []
    compiles_until = Counter[int]()
    events = profile.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        thread = event.start_thread_id()
        start = event.start_ns()
        on_cpu = event.device_type() == torch.autograd.DeviceType.CPU
        if event.name().endswith("(dynamo_timed)"):
            compiles_until[thread] = max(compiles_until[thread], start + event.duration_ns())
        elif start > compiles_until[thread] or not on_cpu:
            executed.append(event)
    return executed


def _products(events: Sequence[Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Return calls and FLOPs by names such as "aten::mm BFloat16".

    The dtype is that of the second factor. If the profiler recorded no dtype or shapes, the name
    has none, and there are no FLOPs.
    """
    counts = Counter[str]()
    flops = Counter[str]()
    for event in events:
        name = event.name()
        if name not in NAMES["products"]:
            continue
        second = 1
        if name == "aten::addmm":
            second = 2
        dtypes = event.dtypes()
        if len(dtypes) <= second:
            continue
        dtype = dtypes[second].removeprefix("c10::")
        factors = event.shapes()[second - 1 : second + 1]
        if not dtype or len(factors) != 2 or any(len(shape) < 2 for shape in factors):
            counts[name] += 1
            continue
        # Also true for batched and grouped products. On a CPU, linear layers keep the weight
        # transposed.
        columns = factors[1][-1]
        if name.startswith("mkldnn"):
            columns = factors[1][0]
        counts[f"{name} {dtype}"] += 1
        flops[f"{name} {dtype}"] += 2 * math.prod(factors[0]) * columns
    return dict(sorted(counts.items())), dict(sorted(flops.items()))


def _gpu_kernels(events: Sequence[Any]) -> list[str]:
    """Return the names of the kernels that took the most time."""
    timed = Counter[str]()
    for event in events:
        name = event.name()
        on_gpu = event.device_type() == torch.autograd.DeviceType.CUDA
        if on_gpu and any(word in name for word in NAMES["kernels"]):
            timed[name] += event.duration_ns()
    return [name for name, _ in timed.most_common(12)]


def loaded() -> list[str]:
    """Return the Python packages that this process has loaded, and its libraries.

    A package that shares its folder with others, such as those below ``nvidia``, counts with them.
    """
    modules = {name.partition(".")[0] for name in sys.modules}
    names = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        if ".so" not in line:
            continue
        library = Path(line.split(maxsplit=5)[5])
        names.add(library.name.partition(".so")[0].lower())
        for folder, inside in itertools.pairwise(library.parts):
            if folder.endswith("-packages"):
                modules.add(inside)
    owners = metadata.packages_distributions()
    for module in modules:
        for package in owners.get(module, ()):
            names.add(re.sub("[-_.]+", "-", package).lower())
    return sorted(names)


def final(parts: Sequence[Any], step: int) -> dict[str, Any]:
    """Return the facts of the end of a run: its weights, and what rank 0, their writer, loaded."""
    names = []
    if dist.get_rank() == 0:
        names = loaded()
    return {"weights_sha256": digest(parts), "last_step": step, "loaded": names}


def digest(parts: Sequence[Any]) -> str:
    """Return the sha256 of checksums of the weights of all ranks, in their order.

    Each rank computes the checksums where its weights are: hashing gigabytes on the CPU would take
    minutes.
    """
    hasher = hashlib.sha256()
    for part in parts:
        reshard(part)
        for name, parameter in part.named_parameters():
            local = parameter
            if hasattr(parameter, "to_local"):
                local = parameter.to_local()
            sums = tuple(checksum % 2**64 for checksum in checksums(local.detach()).tolist())
            hasher.update(f"{name} {local.dtype} {tuple(local.shape)} {sums}".encode())
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, hasher.hexdigest())
    return hashlib.sha256("".join(gathered).encode()).hexdigest()


def reshard(part: Any) -> None:
    """Let FSDP2 show the shards: after an evaluation, a model still has its gathered weights.

    Whether it has depends on whether a checkpoint was saved since.
    """
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of all elements, in order, as integers of the same size."""
    return tensor.contiguous().view(-1).view(_INTEGERS[tensor.element_size()])


def checksums(tensor: torch.Tensor, at_once: int = 1 << 24) -> torch.Tensor:
    """Return two sums over the bits of all elements, modulo 2⁶⁴.

    The second weights each element by its position. Sums of integers do not depend on the order,
    so CPUs and GPUs agree. The weights are odd, so a change of one element always changes the sum.
    """
    bits = bits_of(tensor)
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
