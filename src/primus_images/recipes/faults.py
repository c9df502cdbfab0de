"""What a recipe asks for and its backend cannot do: layouts that do not divide, and fields of a
model that it lacks.

No field of a model is silently dropped. Fields without effect (``moe.top_k`` of a dense model) are
refused as well.
"""

import math
from collections.abc import Iterator, Mapping
from typing import cast

from primus_images.recipes.family import STRETCH, Family, families, family
from primus_images.recipes.recipe import MOCK, Recipe
from primus_images.recipes.schema import model_rules
from primus_images.recipes.setting import Value, outside
from primus_images.yamlfile import Scalar, spell

# The key of the wrong setting, the reason, and a remedy.
Fault = tuple[str, str, str | None]

# Part of the model → the key that enables it.
_SWITCHES = {"rope_scaling": "rope_scaling.kind", "moe": "moe.experts", "mla": "mla.kv_lora_rank"}


def data_faults(recipe: Recipe) -> Iterator[Fault]:
    """Yield what is asked of epochs, evaluation and packing, and is not possible."""
    asked = recipe.section("eval")
    packing = f"{recipe.backend}.packing"
    for key in asked:
        if not recipe.knows.evaluates:
            yield (
                f"eval.{key}",
                f"the backend {recipe.backend} does not evaluate",
                "--backend finetune does",
            )
        if ("corpus" in asked) == ("fraction" in asked):
            why = (
                "give either eval.corpus or eval.fraction, the share of the documents that is "
                "held out"
            )
            yield f"eval.{key}", why, "for example eval.fraction=0.05"
        if (
            key == "every"
            and "epochs" not in recipe.settings
            and recipe.get("eval.every", int) > recipe.steps
        ):
            yield (
                "eval.every",
                f"the run has only {recipe.steps} steps",
                f"eval.every={recipe.steps} or less",
            )
    if "epochs" in recipe.settings and (
        recipe.architecture.of_images or recipe.get("assets.corpus", str) == MOCK
    ):
        yield "epochs", "they are counted in a corpus of text", "name a corpus, or give steps"
    if not asked and not recipe.find(packing, False):
        return
    if recipe.get("assets.corpus", str) == MOCK:
        yield "assets.corpus", "mock has no documents to evaluate on, or to pack", "name a corpus"
    if recipe.find(packing, False) and recipe.find(f"{recipe.backend}.attention", "sdpa") not in (
        "sdpa",
        "eager",
    ):
        yield (
            packing,
            "only the attention sdpa and eager keep packed documents apart",
            "attention=sdpa",
        )
    if recipe.find(packing, False) and not recipe.architecture.has_formula:
        yield (
            packing,
            "nothing shows that a model of no family keeps packed documents apart",
            "packing=false",
        )


def _degree(recipe: Recipe, kind: str) -> str:
    return f"{recipe.knows.name}.{recipe.knows.degrees.get(kind, kind)}"


def _asked(recipe: Recipe, *keys: str) -> str:
    """Return the one of ``keys`` that the command line set, or else the first."""
    typed = (
        k
        for k in keys
        if k in recipe.settings and recipe.settings[k].origin.startswith(("command line", "--"))
    )
    return next(typed, keys[0])


def rank_faults(recipe: Recipe) -> Iterator[Fault]:
    """Yield degrees of parallelism that do not divide the ranks."""
    world = recipe.world_size
    ranks = recipe.get("ranks", int)
    nodes = recipe.get("nodes", int)
    degrees = {kind: recipe.degree(kind) for kind in ("tp", "pp", "cp", "replicas")}
    product = math.prod(degrees.values())
    if world % product:
        lower = [kind for kind, degree in degrees.items() if degree > 1]
        hint = f"ranks={math.lcm(world, product) // nodes}, or lower {' or '.join(lower)}"
        wrong = _asked(recipe, "ranks", "nodes", *(_degree(recipe, kind) for kind in lower))
        yield wrong, f"{world} ranks are not divisible by TP·PP·CP·replicas = {product}", hint
    expert = recipe.degree("ep")
    stages = recipe.degree("pp")
    if world // stages % expert:
        least = math.lcm(ranks, expert * stages) // ranks
        if world >= stages:
            remedies = [f"ep={math.gcd(world // stages, expert)}"]
        else:
            remedies = []
        remedies += [f"--nodes {least}"] if least > nodes else []
        divisor = f"EP = {expert}" + (f" × PP = {stages}" if stages > 1 else "")
        wrong = _asked(recipe, "ranks", "nodes", _degree(recipe, "ep"), _degree(recipe, "pp"))
        yield wrong, f"{world} ranks are not divisible by {divisor}", " or ".join(remedies)
    key = f"{recipe.backend}.{recipe.knows.shard}"
    if recipe.knows.shard:
        shard = recipe.find(key, -1)
    else:
        shard = -1
    if shard not in (-1, world // product):
        why = f"{shard} × TP·PP·CP·replicas = {shard * product} is not the number of ranks, {world}"
        yield (
            key,
            why,
            f"{key.partition('.')[2]}={world // product}, or -1 for all ranks that are left",
        )


def layout_faults(recipe: Recipe) -> Iterator[Fault]:
    """Yield sizes of the model, and lengths of sequences, that do not divide among the ranks."""
    knows = recipe.knows
    model = recipe.architecture
    tensor, expert, stages, context = (recipe.degree(kind) for kind in ("tp", "ep", "pp", "cp"))

    for what, size in (
        ("heads", model.heads),
        ("kv_heads", model.kv_heads),
        ("vocab_size", model.vocab_size),
    ):
        if size % tensor:
            why = f"model.{what} = {size} is not divisible by TP = {tensor}"
            yield (
                _asked(recipe, _degree(recipe, "tp"), f"model.{what}"),
                why,
                f"tp={math.gcd(size, tensor)}",
            )
    if expert > 1 and (not model.moe.experts or model.moe.experts % expert):
        why = f"model.moe.experts = {model.moe.experts} is not divisible by EP = {expert}"
        remedy = f"ep={math.gcd(model.moe.experts, expert) if model.moe.experts else 1}"
        yield _asked(recipe, _degree(recipe, "ep"), "model.moe.experts"), why, remedy
    if stages > max(1, model.layers):
        wrong = _asked(recipe, _degree(recipe, "pp"), "model.layers")
        yield (
            wrong,
            f"model.layers = {model.layers} is fewer than PP stages = {stages}",
            f"pp={model.layers}",
        )
    if model.of_images:
        return
    length = recipe.seq_len
    parts = tensor * context * (2 if context > 1 else 1)
    if model.max_seq_len and length > model.max_seq_len:
        why = f"{length} is more than model.max_seq_len = {model.max_seq_len}"
        yield knows.key("seq_len"), why, f"seq_len={model.max_seq_len} at most"
    if length % parts:
        why = f"{length} tokens are not divisible by the {parts} parts that TP and CP make"
        wrong = _asked(recipe, knows.key("seq_len"), _degree(recipe, "tp"), _degree(recipe, "cp"))
        yield wrong, why, f"seq_len={max(1, length // parts) * parts}"


def batch_faults(recipe: Recipe) -> Iterator[Fault]:
    """Yield batches that do not divide as required."""
    knows = recipe.knows
    together = recipe.local_batch * recipe.data_parallel
    batch = recipe.find(knows.key("global_batch"), -1)
    parts = recipe.find("validation.accumulation", 1)
    if batch > 0 and batch % together:
        why = (
            f"a global batch of {batch} is not a multiple of local batch × data parallel size "
            f"= {together}"
        )
        near = f"global_batch={math.ceil(batch / together) * together}"
        wrong = _asked(
            recipe, knows.key("global_batch"), knows.key("local_batch"), "ranks", "nodes"
        )
        yield wrong, why, f"{near}, or another local_batch"
    if recipe.local_batch % parts:
        why = f"{parts} must divide the local batch of {recipe.local_batch}"
        wrong = _asked(recipe, "validation.accumulation", knows.key("local_batch"))
        yield wrong, why, f"validation.accumulation={math.gcd(parts, recipe.local_batch)}"


def model_faults(recipe: Recipe) -> Iterator[Fault]:
    """Yield each field of the model that its family or the recipe's backend lacks: its key, the
    reason and a remedy.
    """
    rules = model_rules()
    known = family(recipe.architecture.family)
    values = {key: rule.default for key, rule in rules.items()} | recipe.section("model")
    changed = [key for key, rule in rules.items() if values[key] != rule.default]
    yield from _idle(recipe, values, changed)
    if recipe.backend not in known.backends:
        hint = None
        if known.backends:
            hint = f"--backend {' or '.join(known.backends)}"
        yield "model.family", f"{recipe.backend} has no model of the family {known.name}", hint
        return
    yield from _foreign(known, values)
    yield from _uncomputed(recipe, known, values, [key for key in changed if not _off(key, values)])
    targets = None
    if recipe.mode == "lora":
        targets = recipe.section(recipe.backend).get("lora.targets")
    for name in targets if isinstance(targets, list) else ():
        if name not in known.linears:
            why = f"no linear layer of the family {known.name} is named {name!r}"
            yield f"{recipe.backend}.lora.targets", why, f"there are: {', '.join(known.linears)}"


def _off(key: str, values: Mapping[str, Value]) -> bool:
    """Whether the part of the model that ``key`` belongs to is disabled."""
    return values.get(_SWITCHES.get(key.partition(".")[0], ""), True) in (0, "none")


def _foreign(known: Family, values: Mapping[str, Value]) -> Iterator[Fault]:
    """Yield fields whose values no model of the family has."""
    for key, rule in model_rules().items():
        only = known.allowed(key, cast(Scalar, rule.default))
        value = values[key]
        if only and value not in only:
            having = [other for other in map(family, families()) if other.has(key)]
            others = [other.name for other in having if value in other.values.get(key, (value,))]
            if known.has(key):
                amount = f"have {' or '.join(map(spell, only))}, not {spell(value)}"
            else:
                amount = f"have no {key}"
            other = ""
            if others:
                other = f", or another model.family: {', '.join(others)}"
            yield (
                f"model.{key}",
                f"models of the family {known.name} {amount}",
                f"model.{key}={spell(only[0])}{other}",
            )
    for key, limits in known.limits.items():
        value = values[key]
        if isinstance(value, int | float) and (objection := outside(limits, value)):
            yield f"model.{key}", f"{objection[0]} in the family {known.name}", None


def _idle(recipe: Recipe, values: Mapping[str, Value], changed: list[str]) -> Iterator[Fault]:
    """Yield fields of a part that is disabled. A file may set them if it disables the part
    explicitly.
    """
    kind = str(values["rope_scaling.kind"])
    read = {"kind", "factor", "original_max_position", *STRETCH.get(kind, ())}
    read -= {"original_max_position"} if kind == "linear" else set()
    for key in changed:
        part, _, name = key.partition(".")
        if part == "rope_scaling" and kind in STRETCH and name not in read:
            yield (
                f"model.{key}",
                f"has no effect while model.rope_scaling.kind is {kind}",
                f"remove model.{key}",
            )
        switch = _SWITCHES.get(part, key)
        typed = recipe.settings[f"model.{key}"].origin.startswith("command")
        if (
            switch != key
            and _off(key, values)
            and (typed or f"model.{switch}" not in recipe.settings)
        ):
            yield (
                f"model.{key}",
                f"has no effect while model.{switch} is {values[switch]}",
                f"set model.{switch}, too",
            )


def _uncomputed(
    recipe: Recipe, known: Family, values: Mapping[str, Value], active: list[str]
) -> Iterator[Fault]:
    """Yield fields of enabled parts that the backend lacks, or computes with other values only."""
    row = known.backends[recipe.backend]
    title = f"the family {known.name}"

    def remedy(key: str, value: Value) -> str:
        computes = {
            name: row.values.get(key, (values[key],)) for name, row in known.backends.items()
        }
        others = [
            name
            for name, those in computes.items()
            if values[key] in those and known.has(key, name)
        ]
        if value in known.values.get(key, (value,)):
            ways = [f"model.{key}={spell(value)}"]
        else:
            ways = []
        return ", or ".join(ways + ([f"--backend {' or '.join(others)}"] if others else []))

    for key in active:
        # Every backend has this size of a head by default.
        usual = (
            key == "head_dim"
            and recipe.architecture.head_dim * recipe.architecture.heads == values["hidden_size"]
        )
        if known.has(key) and not known.has(key, recipe.backend) and not usual:
            why = f"{recipe.backend}'s model of {title} cannot express {spell(values[key])}"
            yield f"model.{key}", why, remedy(key, model_rules()[key].default)
    for key, allowed in row.values.items():
        switch = _SWITCHES.get(key.partition(".")[0], key)
        if values[key] not in allowed and (switch == key or not _off(key, values)):
            named = " or ".join(spell(value) for value in allowed)
            why = f"{recipe.backend} computes {title} with {named} only, not {spell(values[key])}"
            why += f", where model.{switch} is {values[switch]}" if switch != key else ""
            yield f"model.{key}", why, remedy(key, allowed[0])
    for key, other in row.equal.items():
        if key in active and values[key] != values[other]:
            both = f"{spell(values[key])} and {spell(values[other])}"
            why = f"{recipe.backend} has one value for this and model.{other}, not {both}"
            yield f"model.{key}", why, f"model.{key}={spell(values[other])}"
    for key in row.whole:
        value = values[key]
        if key in active and isinstance(value, float) and not value.is_integer():
            yield (
                f"model.{key}",
                f"{recipe.backend} takes a whole number, not {value}",
                f"model.{key}={round(value)}.0",
            )
