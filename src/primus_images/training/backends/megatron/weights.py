"""Megatron's weights as one rank would have them: initial values, and what the ranks' optimizers
hold.

Initial weights depend only on the seed and the model, not on how ranks share the model.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from primus_images.recipes.architecture import Architecture, shapes
from primus_images.training.judge.reference.names import to_canonical
from primus_images.training.judge.witness import whole_tensors
from primus_images.training.run.facts import checksums

Method = Callable[..., Any]
Values = Mapping[torch.nn.Parameter, torch.Tensor]
# A function of the name and shape of a tensor in the whole model.
Source = Callable[[str, Sequence[int]], torch.Tensor]


_METHODS = ("embedding_init_method", "output_layer_init_method", "init_method")


def defer(config: Any) -> dict[str, Method]:
    """Remove the initialization methods from a ``TransformerConfig``, for :func:`initialize` of the
    built model.

    Megatron draws from one generator per rank, in the order of its modules. The initial weights
    then depend on TP, PP and EP, and a sharded model cannot be compared with the whole one.
    """
    methods = {name: getattr(config, name) for name in _METHODS}
    for name in _METHODS:
        setattr(config, name, lambda tensor: tensor)
    return methods


def initialize(
    model: Any, methods: dict[str, Method], seed: int, *, tied: bool, source: Source | None
) -> None:
    """Initialize every tensor of ``model`` (a ``GPTModel``) as in the whole model: from ``source``,
    or at random.

    Each random matrix has its own generator; norms and biases keep the values of their
    constructors. At any time, one whole tensor is in memory.
    """
    for name, parameter in _named(model, tied=tied, biases=source is not None):
        if parameter.dim() < 2 and source is None:
            continue
        split = _split(parameter)
        group = _tensor_group(name)
        shape = list(parameter.shape)
        if split >= 0:
            shape[split] *= group.size()
        if source is not None:
            whole = source(name, shape)
        else:
            generator = torch.Generator(device=parameter.device)
            generator.manual_seed(
                int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "big")
            )
            whole = torch.empty(shape, dtype=torch.float32, device=parameter.device)
            into_stream = re.search(r"\.(linear_proj|linear_fc2)\.", name)
            kind = "init_method"
            if into_stream:
                kind = "output_layer_init_method"
            methods["embedding_init_method" if name.startswith("embedding.") else kind](
                whole, generator=generator
            )
        if split >= 0:
            halves = whole.chunk(_halves(name), dim=split)
            whole = torch.cat(
                [half.chunk(group.size(), dim=split)[group.rank()] for half in halves], dim=split
            )
        parameter.data.copy_(whole)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A rank's part of one tensor: along which dimension it is split (-1: none), and the rank's
    place in that split.

    ``tensor`` is None if another rank sends the same values. ``digest`` shows whether they really
    are the same.
    """

    name: str
    split: int
    place: int
    tensor: torch.Tensor | None
    digest: tuple[int, ...]


def gather(
    parts: Sequence[Any], values: Values, *, tied: bool
) -> tuple[dict[str, torch.Tensor], set[str]]:
    """On rank 0, return every parameter and router bias of ``parts`` by its name in the whole
    model, and the names of those of which ranks that must hold the same hold different values. All
    ranks; the others get nothing.

    ``values`` maps each parameter to what is gathered for it: itself, or a tensor of its shape,
    such as its gradient.
    """
    mine = list(_parts(parts, values, tied=tied))
    # Rank 0 keeps its own tensors, because copying them takes longer than all else.
    rows = gathered([] if dist.get_rank() == 0 else mine)
    rows[:1] = [mine] if rows else []
    pieces: dict[str, dict[int, _Part]] = {}
    apart: set[str] = set()
    for part in chain(*rows):
        earlier = pieces.setdefault(part.name, {}).setdefault(part.place, part)
        if earlier.digest != part.digest:
            apart.add(part.name)
        if earlier.tensor is None:
            pieces[part.name][part.place] = part
    return {
        name: _joined([row[place] for place in sorted(row)]) for name, row in pieces.items()
    }, apart


def gathered(mine: Any) -> list[Any]:
    """Return the object ``mine`` of every rank on rank 0, and an empty list on the others."""
    rows: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, rows)
    return rows or []


def different(parts: Sequence[Any], values: Values, *, tied: bool) -> set[str]:
    """Return the parameters of this rank that are not their ``values``, rounded to their dtype."""
    return {
        name
        for part in parts
        for name, parameter in _named(_model(part), tied=tied)
        if not torch.equal(_local(parameter), _local(values[parameter]).to(parameter.dtype))
    }


def _model(part: Any) -> Any:
    while hasattr(part, "module"):
        part = part.module
    return part


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()


def _parts(parts: Sequence[Any], values: Values, *, tied: bool) -> Iterator[_Part]:
    for part in parts:
        model = _model(part)
        named = dict(_named(model, tied=tied, biases=True))
        whole = whole_tensors(
            {n: values[t] if isinstance(t, torch.nn.Parameter) else t for n, t in named.items()}
        )
        for name, tensor in named.items():
            split = _split(tensor)
            place = _tensor_group(name).rank()
            copy = parallel_state.get_data_parallel_rank(with_context_parallel=True)
            if ".experts." in name:
                copy = parallel_state.get_expert_data_parallel_rank()
            sends = copy == 0 and (split >= 0 or place == 0)
            yield _Part(
                name=name,
                split=split,
                place=place if split >= 0 else 0,
                tensor=whole[name] if sends else None,
                # Zeros have one sign, and gradients of unused weights are NaN.
                digest=tuple(checksums(whole[name].nan_to_num() + 0.0).tolist()),
            )


def _split(tensor: torch.Tensor) -> int:
    if getattr(tensor, "tensor_model_parallel", False):
        return getattr(tensor, "partition_dim", -1)
    return -1


def _halves(name: str) -> int:
    if "linear_fc1" in name:
        return 2
    return 1


def _joined(pieces: Sequence[_Part]) -> torch.Tensor:
    split = pieces[0].split
    halves = range(_halves(pieces[0].name))
    tensors = [piece.tensor for piece in pieces if piece.tensor is not None]
    if split < 0:
        return tensors[0]
    chunks = [tensor.chunk(len(halves), dim=split) for tensor in tensors]
    return torch.cat([chunk[half] for half in halves for chunk in chunks], dim=split)


def joined(model: Architecture, saved: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of the whole ``model`` from those that its ranks saved, by the names that
    they have there: ``tp0.pp0.PART.NAME``, or ``tp0.pp0.ep0.PART.NAME`` for experts.

    Ranks number their layers and experts from 0. The parts of a pipeline stage alternate with those
    of other stages.
    """
    rows: dict[tuple[int, int, int, str], dict[int, torch.Tensor]] = {}
    for match, tensor in ((_SAVED.fullmatch(name), tensor) for name, tensor in saved.items()):
        if match:
            part, stage, expert_rank, tensor_rank = (
                int(match[key] or 0) for key in ("part", "pp", "ep", "tp")
            )
            rows.setdefault((part, stage, expert_rank, match["name"]), {})[tensor_rank] = tensor
    layers: dict[tuple[int, int], set[str]] = {}
    for part, stage, _, name in rows:
        layers.setdefault((part, stage), set()).update(_LAYER.findall(name))
    experts = len({number for *_, name in rows for number in _EXPERT.findall(name)})
    expected = shapes(model)

    def fits(name: str, tensor: torch.Tensor) -> bool:
        with suppress(RuntimeError):  # of a part that cannot be cut into heads
            parts = to_canonical("megatron", model, {name: tensor}).items()
            return all(expected.get(part, tensor.shape) == tensor.shape for part, tensor in parts)
        return False

    whole: dict[str, torch.Tensor] = {}
    for (part, stage, expert_rank, name), row in rows.items():
        first = sum(len(there) for place, there in layers.items() if place < (part, stage))
        numbered = _LAYER.sub(partial(_raised, by=first), name)
        numbered = _EXPERT.sub(partial(_raised, by=expert_rank * experts), numbered)
        # Whether ranks have parts of a tensor, and along which dimension, depends on the layers'
        # library, too.
        wholes = (
            _joined(
                [
                    _Part(name=name, split=split, place=n, tensor=row[n], digest=())
                    for n in sorted(row)
                ]
            )
            for split in (-1, 0, 1)
        )
        whole[numbered] = next(tensor for tensor in wholes if fits(numbered, tensor))
    return whole


def _raised(number: re.Match[str], by: int) -> str:
    return str(int(number[0]) + by)


def _tensor_group(name: str) -> Any:
    if ".experts." in name:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def _named(model: Any, *, tied: bool, biases: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield each parameter, and with ``biases`` each router's, by its name in the whole model."""
    layers = {
        str(place): str(layer.layer_number - 1) for place, layer in enumerate(model.decoder.layers)
    }
    here = (
        model.config.num_moe_experts or 1
    ) // parallel_state.get_expert_model_parallel_world_size()
    first = here * parallel_state.get_expert_model_parallel_rank()
    routers = [
        (name, buffer) for name, buffer in model.named_buffers() if name.endswith("expert_bias")
    ]
    for name, parameter in chain(model.named_parameters(), routers if biases else ()):
        if tied and name == "output_layer.weight":
            # The last pipeline stage's copy of the embedding.
            yield "embedding.word_embeddings.weight", parameter
            continue
        whole = _LAYER.sub(lambda match: layers[match[0]], name)
        yield _EXPERT.sub(lambda match: str(first + int(match[0])), whole), parameter


_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+")
_EXPERT = re.compile(r"(?<=local_experts\.)\d+|(?<=experts\.linear_fc[12]\.weight)\d+")

# A parameter, or the bias of a router, behind the names of the wrappers.
_SAVED = re.compile(
    r"tp(?P<tp>\d+)\.pp(?P<pp>\d+)(\.ep(?P<ep>\d+))?\.(?P<part>\d+)\.(module\.)*"
    r"(?P<name>.*(weight\d*|bias))"
)


def held(
    optimizers: Iterable[Any],
    parameters: Sequence[torch.nn.Parameter],
    of: Callable[[torch.Tensor], torch.Tensor] = lambda updated: updated,
) -> Values:
    """Return ``of`` the tensor that Megatron's ``optimizers`` update for each parameter: its
    weight, say. All ranks.

    If ranks share the optimizer states, each tensor is summed up from their ranges of it.
    """
    places = [
        (optimizer, getattr(optimizer, "model_param_group_index_map", None))
        for optimizer in optimizers
    ]
    if all(place is None for _, place in places):
        return {
            parameter: of(getattr(parameter, "main_param", parameter)).detach()
            for parameter in parameters
        }
    own = {
        parameter: (optimizer.optimizer.param_groups[group]["params"][number], optimizer)
        for optimizer, place in places
        for parameter, (group, number) in (place or {}).items()
    }
    tensors: dict[torch.nn.Parameter, torch.Tensor] = {}
    for dense in (True, False):
        kind = [p for p in parameters if getattr(p, "allreduce", True) == dense]
        if not kind:
            continue
        # One sum over the ranks for all parameters: gloo takes a millisecond for each.
        flat = torch.zeros(sum(p.numel() for p in kind), dtype=torch.float32, device=kind[0].device)
        pieces = flat.split([p.numel() for p in kind])
        for parameter, piece in zip(kind, pieces, strict=True):
            if parameter in own:
                updated, optimizer = own[parameter]
                where = optimizer._get_model_param_range_map(parameter)["param"]
                piece[where.start : where.end] = of(updated).detach().float()
        if dense:
            dist.all_reduce(
                flat, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
            )
        else:
            dist.all_reduce(flat, group=parallel_state.get_expert_data_parallel_group())
        tensors |= {
            parameter: piece.view_as(parameter)
            for parameter, piece in zip(kind, pieces, strict=True)
        }
    return tensors


def gradient(updated: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the last update of ``updated``, after clipping; NaN if it has none."""
    if updated.grad is None:
        return torch.full_like(updated, torch.nan)
    return updated.grad
