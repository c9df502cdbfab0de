"""Checks of the parallel layout: world size, parallel degrees, sizes and batches must be divisible by each other."""

from __future__ import annotations

import math
from collections.abc import Iterator

from primus.recipes.recipe import Recipe

# The key of the wrong setting, the reason, and a remedy.
Fault = tuple[str, str, str | None]


def faults(recipe: Recipe) -> Iterator[Fault]:
    """Yield everything that is not divisible as required, ranks first."""
    yield from _ranks(recipe)
    yield from _sizes(recipe)
    yield from _batch(recipe)


def _degree(recipe: Recipe, kind: str) -> str:
    return f"{recipe.knows.name}.{recipe.knows.degrees.get(kind, kind)}"


def _asked(recipe: Recipe, *keys: str) -> str:
    """Return the one of ``keys`` that the command line set, or else the first."""
    typed = (k for k in keys if k in recipe.settings and recipe.settings[k].origin.startswith(("command line", "--")))
    return next(typed, keys[0])


def _ranks(recipe: Recipe) -> Iterator[Fault]:
    world, ranks, nodes = recipe.world_size, recipe.get("ranks", int), recipe.get("nodes", int)
    product = math.prod(recipe.degree(kind) for kind in ("tp", "pp", "cp", "replicas"))
    if world % product:
        lower = [kind for kind in ("tp", "pp", "cp", "replicas") if recipe.degree(kind) > 1]
        hint = f"ranks={math.lcm(world, product) // nodes}, or lower {' or '.join(lower)}"
        wrong = _asked(recipe, "ranks", "nodes", *(_degree(recipe, kind) for kind in lower))
        yield wrong, f"{world} ranks are not divisible by TP·PP·CP·replicas = {product}", hint
    expert, stages = recipe.degree("ep"), recipe.degree("pp")
    if world // stages % expert:
        least = math.lcm(ranks, expert * stages) // ranks
        remedies = [f"ep={math.gcd(world // stages, expert)}"] if world >= stages else []
        remedies += [f"--nodes {least}"] if least > nodes else []
        divisor = f"EP = {expert}" + (f" × PP = {stages}" if stages > 1 else "")
        wrong = _asked(recipe, "ranks", "nodes", _degree(recipe, "ep"), _degree(recipe, "pp"))
        yield wrong, f"{world} ranks are not divisible by {divisor}", " or ".join(remedies)
    key = f"{recipe.backend}.{recipe.knows.shard}"
    shard = recipe.find(key, -1) if recipe.knows.shard else -1
    if shard not in (-1, world // product):
        why = f"{shard} × TP·PP·CP·replicas = {shard * product} is not the number of ranks, {world}"
        yield key, why, f"{key.partition('.')[2]}={world // product}, or -1 for all ranks that are left"


def _sizes(recipe: Recipe) -> Iterator[Fault]:
    knows, model = recipe.knows, recipe.architecture
    tensor, expert, stages, context = (recipe.degree(kind) for kind in ("tp", "ep", "pp", "cp"))

    for what, size in (("heads", model.heads), ("kv_heads", model.kv_heads), ("vocab_size", model.vocab_size)):
        if size % tensor:
            why = f"model.{what} = {size} is not divisible by TP = {tensor}"
            yield _asked(recipe, _degree(recipe, "tp"), f"model.{what}"), why, f"tp={math.gcd(size, tensor)}"
    if expert > 1 and (not model.moe.experts or model.moe.experts % expert):
        why = f"model.moe.experts = {model.moe.experts} is not divisible by EP = {expert}"
        yield (
            _asked(recipe, _degree(recipe, "ep"), "model.moe.experts"),
            why,
            f"ep={math.gcd(model.moe.experts, expert) if model.moe.experts else 1}",
        )
    if stages > max(1, model.layers):
        wrong = _asked(recipe, _degree(recipe, "pp"), "model.layers")
        yield wrong, f"model.layers = {model.layers} is fewer than PP stages = {stages}", f"pp={model.layers}"
    if model.family == "flux":
        return
    length, parts = recipe.seq_len, tensor * context * (2 if context > 1 else 1)
    if model.max_seq_len and length > model.max_seq_len:
        why = f"{length} is more than model.max_seq_len = {model.max_seq_len}"
        yield knows.key("seq_len"), why, f"seq_len={model.max_seq_len} at most"
    if length % parts:
        why = f"{length} tokens are not divisible by the {parts} parts that TP and CP make"
        wrong = _asked(recipe, knows.key("seq_len"), _degree(recipe, "tp"), _degree(recipe, "cp"))
        yield wrong, why, f"seq_len={max(1, length // parts) * parts}"


def _batch(recipe: Recipe) -> Iterator[Fault]:
    knows, together = recipe.knows, recipe.local_batch * recipe.data_parallel
    batch, parts = recipe.find(knows.key("global_batch"), -1), recipe.find("validation.accumulation", 1)
    if batch > 0 and batch % together:
        why = f"{batch} is not a multiple of local batch × data parallel size = {together}"
        near = f"global_batch={math.ceil(batch / together) * together}"
        wrong = _asked(recipe, knows.key("global_batch"), knows.key("local_batch"), "ranks", "nodes")
        yield wrong, why, f"{near}, or another local_batch"
    if recipe.local_batch % parts:
        why = f"{parts} must divide the local batch of {recipe.local_batch}"
        wrong = _asked(recipe, "validation.accumulation", knows.key("local_batch"))
        yield wrong, why, f"validation.accumulation={math.gcd(parts, recipe.local_batch)}"
