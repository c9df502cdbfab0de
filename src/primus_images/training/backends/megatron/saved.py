"""The whole model in a checkpoint, of which each rank has saved its pieces."""

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch

from primus_images.errors import InputError
from primus_images.recipes.architecture import Architecture, shapes
from primus_images.training.backends.megatron.layout import EXPERT, LAYER, join, raised
from primus_images.training.judge.reference.names import to_canonical

# A parameter, or the bias of a router, behind the names of the wrappers.
_SAVED = re.compile(
    r"tp(?P<tp>\d+)\.pp(?P<pp>\d+)(\.ep(?P<ep>\d+))?\.(?P<part>\d+)\.(module\.)*"
    r"(?P<name>.*(weight\d*|bias))"
)


@dataclass(frozen=True, kw_only=True)
class _Place:
    """A tensor in a part of a pipeline stage. Ranks number their layers and experts from 0."""

    part: int
    stage: int
    expert_rank: int
    name: str


def joined(model: Architecture, saved: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of the whole ``model`` from those that its ranks saved.

    Their names in ``saved`` are ``tp0.pp0.PART.NAME``, or ``tp0.pp0.ep0.PART.NAME`` for experts.
    """
    pieces: dict[_Place, dict[int, torch.Tensor]] = {}
    for name, tensor in saved.items():
        match = _SAVED.fullmatch(name)
        if match:
            place = _Place(
                part=int(match["part"]),
                stage=int(match["pp"]),
                expert_rank=int(match["ep"] or 0),
                name=match["name"],
            )
            pieces.setdefault(place, {})[int(match["tp"])] = tensor
    first_layers = _first_layers(pieces)
    numbers_of_experts = set()
    for place in pieces:
        numbers_of_experts.update(EXPERT.findall(place.name))
    fits = _fitter(model)
    whole: dict[str, torch.Tensor] = {}
    for place, row in pieces.items():
        name = raised(LAYER, place.name, first_layers[place.part, place.stage])
        name = raised(EXPERT, name, place.expert_rank * len(numbers_of_experts))
        whole[name] = _joined(name, [row[rank] for rank in sorted(row)], fits)
    return whole


def _first_layers(places: Iterable[_Place]) -> dict[tuple[int, int], int]:
    """Return the number of the first layer of each part of each stage.

    The parts of a pipeline stage alternate with those of other stages.
    """
    layers: dict[tuple[int, int], set[str]] = {}
    for place in places:
        layers.setdefault((place.part, place.stage), set()).update(LAYER.findall(place.name))
    first = 0
    first_layers = {}
    for part_and_stage in sorted(layers):
        first_layers[part_and_stage] = first
        first += len(layers[part_and_stage])
    return first_layers


def _joined(
    name: str, pieces: list[torch.Tensor], fits: Callable[[str, torch.Tensor], bool]
) -> torch.Tensor:
    # Whether ranks have parts of a tensor, and along which dimension, depends on the layers'
    # library, too.
    for split in (-1, 0, 1):
        tensor = join(name, pieces, split)
        if fits(name, tensor):
            return tensor
    raise InputError(f"the pieces of {name} make no tensor of the recipe's model")


def _fitter(model: Architecture) -> Callable[[str, torch.Tensor], bool]:
    """Return whether a tensor of a name has the shape that ``model`` needs."""
    expected = shapes(model)

    def fits(name: str, tensor: torch.Tensor) -> bool:
        with suppress(RuntimeError):  # of a part that cannot be cut into heads
            parts = to_canonical("megatron", model, {name: tensor}).items()
            return all(expected.get(key, part.shape) == part.shape for key, part in parts)
        return False

    return fits
