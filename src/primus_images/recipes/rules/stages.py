"""The pipeline stages of a Megatron job, and the parameters that one rank of a stage keeps."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from primus_images.recipes.architecture import Architecture
from primus_images.recipes.family import Weight, weights_of
from primus_images.recipes.faults import Fault
from primus_images.recipes.recipe import Recipe

# Matrices that every tensor-parallel rank keeps whole.
_WHOLE = ("mlp.gate.weight", "self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight")
_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "megatron.model."
_LAYOUT = f"{_HEAD}pipeline_model_parallel_layout"
# Published totals count these balancing biases, which are buffers of Megatron.
_BUFFER = "mlp.gate.e_score_correction_bias"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One pipeline stage.

    ``layers`` are the numbers of its layers. ``in_flight`` are the micro-batches of which it keeps
    activations; with interleaved stages, a part of its layers counts as a part.
    """

    layers: tuple[int, ...]
    is_first: bool
    is_last: bool
    in_flight: float


@dataclass(frozen=True, kw_only=True)
class Share:
    """The parameters of one rank: those of ``experts``, which fewer ranks repeat, and others."""

    dense: float
    experts: float

    @property
    def total(self) -> float:
        """All parameters of the rank."""
        return self.dense + self.experts


def stages(recipe: Recipe) -> list[Stage]:
    """Return the pipeline stages of ``recipe``, of which there is at least one."""
    number = recipe.degree("pp")
    chunks = _chunks(recipe)
    virtual = chunks_of_a_stage(recipe)
    places = _places(recipe)
    layers: list[list[int]] = [[] for _ in range(number)]
    first = 0
    # Interleaved stages: each in turn has the next chunk of layers, several times.
    for chunk, size in enumerate(chunks):
        end = first + size
        layers[chunk % number].extend(place for place in places[first:end] if place is not None)
        first = end
    made = []
    for stage in range(number):
        made.append(
            Stage(
                layers=tuple(layers[stage]),
                is_first=stage == 0,
                is_last=stage == number - 1,
                in_flight=_in_flight(recipe, number - stage - 1, virtual),
            )
        )
    return made


def chunks_of_a_stage(recipe: Recipe) -> int:
    """Return how many chunks of layers each stage has; 1 without interleaved stages."""
    return len(_chunks(recipe)) // recipe.degree("pp")


def _chunks(recipe: Recipe) -> list[int]:
    """Return the number of layers of each chunk, of which every stage has equally many."""
    layout = recipe.find(_LAYOUT, "")
    if layout:
        return layers_of(layout)
    virtual = recipe.find(f"{_HEAD}virtual_pipeline_model_parallel_size", 1)
    sizes = _sizes(recipe, len(_places(recipe)))
    chunks = []
    for chunk in range(virtual):
        for size in sizes:
            chunks.append(size * (chunk + 1) // virtual - size * chunk // virtual)
    return chunks


def layers_of(layout: str) -> list[int]:
    """Return the layers of each chunk of Megatron's ``layout``, as in ``Et*3|t*4|t*3,L``.

    The letters are the embedding, layers of the decoder and of multi-token prediction, and the
    loss; chunks are separated by ``|``. The list is empty for a text of another form.
    """
    chunks = []
    for chunk in layout.replace(",", "").split("|"):
        parts = re.findall(r"([EtmL])(?:\*(\d{1,4}))?", chunk)
        if "".join(f"{letter}*{times}" if times else letter for letter, times in parts) != chunk:
            return []
        chunks.append(sum(int(times or 1) for letter, times in parts if letter == "t"))
    return chunks


def _places(recipe: Recipe) -> list[int | None]:
    """Return the numbers of the layers that the stages share out.

    The embedding and the loss take the place of a layer, None, if they count as one.
    """
    places: list[int | None] = list(range(recipe.architecture.layers))
    if recipe.find(f"{_HEAD}account_for_embedding_in_pipeline_split", False):
        places.insert(0, None)
    if recipe.find(f"{_HEAD}account_for_loss_in_pipeline_split", False):
        places.append(None)
    return places


def _sizes(recipe: Recipe, places: int) -> list[int]:
    """Return how many of the ``places`` each stage has."""
    number = recipe.degree("pp")
    ends = {}
    for stage, name in ((0, "first"), (number - 1, "last")):
        key = f"{_HEAD}num_layers_in_{name}_pipeline_stage"
        if key in recipe.settings and number > 1:
            ends[stage] = recipe.get(key, int)
    even = math.ceil((places - sum(ends.values())) / max(1, number - len(ends)))
    return [ends.get(stage, even) for stage in range(number)]


def stage_faults(recipe: Recipe) -> Iterator[Fault]:
    """Yield layers that Megatron cannot share out equally among stages, or among their chunks."""
    number = recipe.degree("pp")
    virtual_key = f"{_HEAD}virtual_pipeline_model_parallel_size"
    virtual = recipe.find(virtual_key, 1)
    if virtual > 1 and number == 1:
        yield virtual_key, f"{virtual} chunks of a stage need PP of 2 or more", "pp=2"
        return
    if recipe.find(_LAYOUT, ""):
        yield from _layout_faults(recipe)
        return
    places = len(_places(recipe))
    sizes = _sizes(recipe, places)
    if sum(sizes) != places or min(sizes) < 1:
        divisors = [degree for degree in range(1, number + 1) if places % degree == 0]
        why = f"{number} stages cannot have equally many of {places} layers"
        remedy = (
            f"pp={divisors[-1]}, or model.num_layers_in_first_pipeline_stage and "
            "model.num_layers_in_last_pipeline_stage"
        )
        yield f"megatron.{recipe.knows.degrees['pp']}", why, remedy
        return
    for size in sizes:
        if size % virtual:
            why = f"a stage of {size} layers cannot have {virtual} chunks of equally many"
            yield virtual_key, why, f"{virtual_key}={math.gcd(size, virtual)}"
            return


def _layout_faults(recipe: Recipe) -> Iterator[Fault]:
    number = recipe.degree("pp")
    chunks = layers_of(recipe.get(_LAYOUT, str))
    layers = recipe.architecture.layers
    remedy = f"as in Et*{max(1, layers // number)}|…|t*{max(1, layers // number)},L"
    if not chunks:
        yield _LAYOUT, "is no list of stages", remedy
    elif sum(chunks) != layers:
        yield _LAYOUT, f"it has {sum(chunks)} layers, and the model {layers}", remedy
    elif len(chunks) % number:
        yield _LAYOUT, f"{number} stages cannot have equally many of {len(chunks)} chunks", remedy


def _in_flight(recipe: Recipe, after: int, virtual: int) -> float:
    """Return the micro-batches in flight of a stage with ``after`` stages after it (1F1B)."""
    accumulation = max(1, recipe.accumulation)
    if virtual == 1:
        return min(after + 1, accumulation)
    warmup = 2 * after + (virtual - 1) * recipe.degree("pp") + 1
    return min(warmup, accumulation * virtual) / virtual


def share(recipe: Recipe, stage: Stage) -> Share:
    """Return the parameters of one rank of ``stage``."""
    model = recipe.architecture
    tensor = recipe.degree("tp")
    expert_tensor = recipe.find(f"{_HEAD}expert_tensor_parallel_size", tensor)
    experts_here = model.moe.experts / recipe.degree("ep") / expert_tensor
    dense = experts = 0.0
    for weight, copies in _weights(model, stage):
        numbers = copies * math.prod(weight.sizes(model))
        # The name of an expert's weight has a place for its number.
        if "{}" in weight.name:
            experts += numbers * experts_here
        elif len(weight.shape) > 1 and weight.name not in _WHOLE:
            dense += numbers / tensor
        else:
            dense += numbers
    return Share(dense=dense, experts=experts)


def products(recipe: Recipe, stage: Stage) -> float:
    """Return the parameters of one rank of ``stage`` that its layers multiply by."""
    layers = replace(stage, is_first=False, is_last=False)
    return share(recipe, layers).total


def _weights(model: Architecture, stage: Stage) -> Iterator[tuple[Weight, int]]:
    """Yield the weights of ``stage``, and how many of its layers have one."""
    for weight in weights_of(model, "outer"):
        is_here = stage.is_last
        if weight.name == _EMBEDDING:
            # A tied output layer repeats it on the last stage.
            is_here = stage.is_first or (stage.is_last and model.tied_embeddings)
        if is_here:
            yield weight, 1
    sparse = len([layer for layer in stage.layers if model.is_sparse(layer)])
    copies = {"layer": len(stage.layers), "dense": len(stage.layers) - sparse, "sparse": sparse}
    for part, count in copies.items():
        for weight in weights_of(model, part):
            if count and weight.name != _BUFFER:
                yield weight, count


def replicas(recipe: Recipe) -> Share:
    """Return how many ranks repeat a parameter, of those outside experts and of experts."""
    world = recipe.world_size / recipe.degree("pp")
    tensor = recipe.degree("tp")
    expert_tensor = recipe.find(f"{_HEAD}expert_tensor_parallel_size", tensor)
    experts = max(1.0, world / recipe.degree("ep") / expert_tensor)
    return Share(dense=world / tensor, experts=experts)
