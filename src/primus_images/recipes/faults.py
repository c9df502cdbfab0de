"""What a recipe asks for and its backend cannot do.

Layouts that do not divide, and fields of a model that the backend lacks. No field of a model is
silently dropped: those without effect, such as ``moe.top_k`` of a dense model, are refused as well.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias, cast

from primus_images.recipes.family import AS_OTHER, STRETCH, Family, Support, families, family
from primus_images.recipes.load import folder
from primus_images.recipes.recipe import MOCK, Recipe
from primus_images.recipes.schema import model_rules
from primus_images.recipes.setting import Value, outside, share_of
from primus_images.yamlfile import Scalar, spell

# The key of the wrong setting, the reason, and a remedy.
Fault: TypeAlias = tuple[str, str, str | None]

# The tokens of the tokenizer that recipes carry along.
_BUILT_IN_TOKENS = 1024
# Part of the model → the key that enables it.
_SWITCHES = {"rope_scaling": "rope_scaling.kind", "moe": "moe.experts", "mla": "mla.kv_lora_rank"}


def data_faults(recipe: Recipe) -> Iterator[Fault]:
    """Yield what is asked of epochs, evaluation and packing, and is not possible."""
    packing = recipe.find(f"{recipe.backend}.packing", False)
    evaluation = recipe.section("eval")
    is_mock = recipe.get("assets.corpus", str) == MOCK
    yield from _column_faults(recipe)
    yield from _saving_faults(recipe)
    yield from _tokenizer_faults(recipe)
    if evaluation:
        yield from _evaluation_faults(recipe, evaluation)
    if "epochs" in recipe.settings and (is_mock or recipe.architecture.of_images):
        yield "epochs", "they are counted in a corpus of text", "name a corpus, or give steps"
    if is_mock and (evaluation or packing):
        yield "assets.corpus", "mock has no documents to evaluate on, or to pack", "name a corpus"
    if packing:
        yield from _packing_faults(recipe)


def _saving_faults(recipe: Recipe) -> Iterator[Fault]:
    if recipe.checkpoint_interval and "saving.minutes" in recipe.settings:
        why = "checkpoints are saved after steps or after minutes"
        yield "saving.minutes", why, "checkpoint=500, or checkpoint=30m"


def _tokenizer_faults(recipe: Recipe) -> Iterator[Fault]:
    """Yield text of the user's that the built-in tokenizer, of a small model, would cut."""
    if recipe.get("proxy", bool):
        return
    tokenizer = recipe.asset("tokenizer")
    corpus = recipe.asset("corpus")
    assets = folder().resolve() / "assets"
    own_text = corpus is not None and not corpus.resolve().is_relative_to(assets)
    own_text |= recipe.get("assets.corpus", str).startswith("hf:")
    vocabulary = recipe.architecture.vocab_size
    built_in = tokenizer is not None and tokenizer.resolve() == assets / "tokenizer"
    if built_in and own_text and vocabulary > _BUILT_IN_TOKENS:
        why = (
            f"the built-in one has {_BUILT_IN_TOKENS:,} tokens, and the model a vocabulary of "
            f"{vocabulary:,}"
        )
        remedy = (
            "tokenizer=FOLDER of the model's tokenizer, or hf:OWNER/NAME; --proxy trains a small "
            "model with the built-in one"
        )
        yield "assets.tokenizer", why, remedy


def _column_faults(recipe: Recipe) -> Iterator[Fault]:
    named = [key for key in ("data.question", "data.answer") if key in recipe.settings]
    if len(named) == 1:
        yield named[0], "a question needs its answer", "give both data.question and data.answer"
    elif named and "data.column" in recipe.settings:
        why = "data.column names the column of whole texts or chats"
        yield "data.column", why, "give either data.column, or data.question and data.answer"
    if "data.skip" in recipe.settings:
        text = recipe.get("data.skip", str)
        try:
            share_of(text)
        except ValueError:
            why = f"{text} is no share of the rows"
            yield "data.skip", why, "for example data.skip=1%"


def _evaluation_faults(recipe: Recipe, evaluation: Mapping[str, Value]) -> Iterator[Fault]:
    key = f"eval.{next(iter(evaluation))}"
    if not recipe.knows.evaluates:
        why = f"the backend {recipe.backend} does not evaluate"
        yield key, why, "leave out eval.*"
    if ("corpus" in evaluation) == ("fraction" in evaluation):
        yield (
            key,
            "give either eval.corpus or eval.fraction, the share of the documents that is held out",
            "for example eval.fraction=0.05",
        )
    steps = recipe.steps
    if "epochs" not in recipe.settings and recipe.find("eval.every", 0) > steps:
        yield "eval.every", f"the run has only {steps} steps", f"eval.every={steps} or less"


def _packing_faults(recipe: Recipe) -> Iterator[Fault]:
    key = f"{recipe.backend}.packing"
    if recipe.find(f"{recipe.backend}.attention", "sdpa") not in ("sdpa", "eager"):
        why = "only the attention sdpa and eager keep packed documents apart"
        yield key, why, "attention=sdpa"
    if not recipe.architecture.has_formula:
        why = (
            "no recipe has this type of model (family other), and nothing shows that it keeps "
            "packed documents apart"
        )
        yield key, why, "packing=false"


def _degree_key(recipe: Recipe, kind: str) -> str:
    return f"{recipe.backend}.{recipe.knows.degrees.get(kind, kind)}"


def _typed_of(recipe: Recipe, *keys: str) -> str:
    """Return the one of ``keys`` that the command line set, or else the first."""
    for key in keys:
        setting = recipe.settings.get(key)
        if setting and (setting.typed or setting.origin.startswith("--")):
            return key
    return keys[0]


def rank_faults(recipe: Recipe) -> Iterator[Fault]:
    """Yield degrees of parallelism that do not divide the ranks."""
    world = recipe.world_size
    degrees = {kind: recipe.degree(kind) for kind in ("tp", "pp", "cp", "replicas")}
    product = math.prod(degrees.values())
    if world % product:
        ranks = math.lcm(world, product) // recipe.get("nodes", int)
        divided = [kind for kind, degree in degrees.items() if degree > 1]
        keys = [_degree_key(recipe, kind) for kind in divided]
        yield (
            _typed_of(recipe, "ranks", "nodes", *keys),
            f"{world} ranks are not divisible by TP·PP·CP·replicas = {product}",
            f"ranks={ranks}, or lower {' or '.join(divided)}",
        )
    yield from _expert_faults(recipe)
    shard = -1
    key = f"{recipe.backend}.{recipe.knows.shard}"
    if recipe.knows.shard:
        shard = recipe.find(key, -1)
    if shard not in (-1, world // product):
        yield (
            key,
            f"{shard} × TP·PP·CP·replicas = {shard * product} is not the number of ranks, {world}",
            f"{recipe.knows.shard}={world // product}, or -1 for all ranks that are left",
        )


def _expert_faults(recipe: Recipe) -> Iterator[Fault]:
    world = recipe.world_size
    ranks = recipe.get("ranks", int)
    expert = recipe.degree("ep")
    stages = recipe.degree("pp")
    if world // stages % expert == 0:
        return
    remedies = []
    if world >= stages:
        remedies.append(f"ep={math.gcd(world // stages, expert)}")
    nodes = math.lcm(ranks, expert * stages) // ranks
    if nodes > recipe.get("nodes", int):
        remedies.append(f"--nodes {nodes}")
    divisor = f"EP = {expert}"
    if stages > 1:
        divisor += f" × PP = {stages}"
    keys = (_degree_key(recipe, "ep"), _degree_key(recipe, "pp"))
    yield (
        _typed_of(recipe, "ranks", "nodes", *keys),
        f"{world} ranks are not divisible by {divisor}",
        " or ".join(remedies),
    )


def layout_faults(recipe: Recipe) -> Iterator[Fault]:
    """Yield sizes of the model, and lengths of sequences, that do not divide among the ranks."""
    model = recipe.architecture
    tensor = recipe.degree("tp")
    expert = recipe.degree("ep")
    stages = recipe.degree("pp")
    for field in ("heads", "kv_heads", "vocab_size"):
        size = getattr(model, field)
        if size % tensor:
            yield (
                _typed_of(recipe, _degree_key(recipe, "tp"), f"model.{field}"),
                f"model.{field} = {size} is not divisible by TP = {tensor}",
                f"tp={math.gcd(size, tensor)}",
            )
    experts = model.moe.experts
    if expert > 1 and (experts == 0 or experts % expert):
        # A model without experts takes EP = 1, not the greatest common divisor with 0.
        divisor = math.gcd(experts, expert) if experts else 1
        yield (
            _typed_of(recipe, _degree_key(recipe, "ep"), "model.moe.experts"),
            f"model.moe.experts = {experts} is not divisible by EP = {expert}",
            f"ep={divisor}",
        )
    if stages > max(1, model.layers):
        yield (
            _typed_of(recipe, _degree_key(recipe, "pp"), "model.layers"),
            f"model.layers = {model.layers} is fewer than PP stages = {stages}",
            f"pp={model.layers}",
        )
    if not model.of_images:
        yield from _length_faults(recipe)


def _length_faults(recipe: Recipe) -> Iterator[Fault]:
    key = recipe.knows.key("seq_len")
    length = recipe.seq_len
    longest = recipe.architecture.max_seq_len
    if 0 < longest < length:
        why = f"{length} is more than model.max_seq_len = {longest}"
        yield key, why, f"seq_len={longest} at most"
    context = recipe.degree("cp")
    parts = recipe.degree("tp") * context
    if context > 1:
        # Each rank has one part of the beginning and one of the end.
        parts *= 2
    if length % parts:
        keys = (_degree_key(recipe, "tp"), _degree_key(recipe, "cp"))
        yield (
            _typed_of(recipe, key, *keys),
            f"{length} tokens are not divisible by the {parts} parts that TP and CP make",
            f"seq_len={max(1, length // parts) * parts}",
        )


def batch_faults(recipe: Recipe) -> Iterator[Fault]:
    """Yield batches that do not divide as required."""
    local_key = recipe.knows.key("local_batch")
    whole_key = recipe.knows.key("global_batch")
    together = recipe.local_batch * recipe.data_parallel
    whole = recipe.find(whole_key, -1)
    if whole > 0 and whole % together:
        yield (
            _typed_of(recipe, whole_key, local_key, "ranks", "nodes"),
            f"a global batch of {whole} is not a multiple of local batch × data parallel size "
            f"= {together}",
            _batches_that_divide(recipe, whole),
        )
    typed = _typed_of(recipe, "validation.accumulation", local_key)
    # A batch of the user's own is for training. Validation asks again.
    if typed != local_key:
        yield from accumulation_faults(recipe)


def _batches_that_divide(recipe: Recipe, whole: int) -> str:
    """Return the remedies for a global batch of ``whole`` that the ranks cannot divide.

    The first is the largest local batch that leaves it as it is, since a resumed run may not
    change it.
    """
    together = recipe.local_batch * recipe.data_parallel
    multiple = f"global_batch={math.ceil(whole / together) * together}"
    of_rank, rest = divmod(whole, recipe.data_parallel)
    if rest:
        return f"{multiple}, or another number of ranks"
    size = recipe.local_batch
    while of_rank % size:
        size -= 1
    return f"local_batch={size}, or {multiple}"


def accumulation_faults(recipe: Recipe) -> Iterator[Fault]:
    """Yield a local batch that the accumulation run of validation cannot divide."""
    parts = recipe.find("validation.accumulation", 1)
    if recipe.local_batch % parts:
        yield (
            "validation.accumulation",
            f"{parts} parts must divide the local batch of {recipe.local_batch}",
            f"validation.accumulation={math.gcd(parts, recipe.local_batch)}",
        )


def model_faults(recipe: Recipe) -> Iterator[Fault]:
    """Yield each field of the model that its family or the recipe's backend lacks."""
    known = family(recipe.architecture.family)
    values = {key: rule.default for key, rule in model_rules().items()}
    values.update(recipe.section("model"))
    model = _Model(recipe=recipe, known=known, values=values)
    yield from _idle(model)
    if recipe.backend not in known.backends:
        remedy = None
        if known.backends:
            remedy = f"--backend {' or '.join(known.backends)}"
        yield "model.family", f"{recipe.backend} has no model of the family {known.name}", remedy
        return
    yield from _foreign(model)
    yield from _lacking(model)
    yield from _other_values(model)
    targets = None
    # The layers of a model of no family are known to transformers alone.
    if recipe.mode == "lora" and known.linears:
        targets = recipe.section(recipe.backend).get("lora.targets")
    for name in targets if isinstance(targets, list) else ():
        if name not in known.linears:
            why = f"no linear layer of the family {known.name} is named {name!r}"
            yield f"{recipe.backend}.lora.targets", why, f"there are: {', '.join(known.linears)}"


@dataclass(frozen=True, kw_only=True)
class _Model:
    """What a recipe says of its model: ``values`` of all fields, without the prefix ``model.``."""

    recipe: Recipe
    known: Family
    values: Mapping[str, Value]

    @property
    def changed(self) -> list[str]:
        """The fields that have another value than by default."""
        return [key for key, rule in model_rules().items() if self.values[key] != rule.default]

    @property
    def active(self) -> list[str]:
        """The changed fields of parts that are enabled."""
        return [key for key in self.changed if not self.is_off(key)]

    @property
    def support(self) -> Support:
        """How the recipe's backend computes the family."""
        return self.known.backends[self.recipe.backend]

    def is_off(self, key: str) -> bool:
        """Whether the part of the model that ``key`` belongs to is disabled."""
        return self.values.get(switch_of(key), True) in (0, "none")


def switch_of(key: str) -> str:
    """Return the key that enables the part of the model that ``key`` belongs to; else ``key``."""
    return _SWITCHES.get(key.partition(".")[0], key)


def _idle(model: _Model) -> Iterator[Fault]:
    """Yield fields of a part that is disabled.

    A file may set them if it disables the part explicitly.
    """
    settings = model.recipe.settings
    kind = str(model.values["rope_scaling.kind"])
    read = ["kind", "factor", *STRETCH.get(kind, ())]
    if kind != "linear":
        read.append("original_max_position")
    for key in model.changed:
        part, _, name = key.partition(".")
        if part == "rope_scaling" and kind in STRETCH and name not in read:
            why = f"has no effect while model.rope_scaling.kind is {kind}"
            yield f"model.{key}", why, f"remove model.{key}"
        switch = switch_of(key)
        if switch == key or not model.is_off(key):
            continue
        if settings[f"model.{key}"].typed or f"model.{switch}" not in settings:
            why = f"has no effect while model.{switch} is {model.values[switch]}"
            yield f"model.{key}", why, f"set model.{switch}, too"


def _foreign(model: _Model) -> Iterator[Fault]:
    """Yield fields whose values no model of the family has."""
    known = model.known
    for key, rule in model_rules().items():
        only = known.allowed(key, cast(Scalar, rule.default))
        value = model.values[key]
        if not only or value in only:
            continue
        amount = f"have no {key}"
        if known.has(key):
            amount = f"have {' or '.join(map(spell, only))}, not {spell(value)}"
        remedy = f"model.{key}={spell(only[0])}"
        others = _families_with(key, value)
        if _is_of_weights(model, key):
            remedy = AS_OTHER
        elif others:
            remedy += f", or another model.family: {', '.join(others)}"
        yield f"model.{key}", f"models of the family {known.name} {amount}", remedy
    for key, limits in known.limits.items():
        value = model.values[key]
        if isinstance(value, int | float):
            objection = outside(limits, value)
            if objection:
                yield f"model.{key}", f"{objection[0]} in the family {known.name}", None


def _is_of_weights(model: _Model, key: str) -> bool:
    """Return whether a value is that of the weights to start from."""
    recipe = model.recipe
    setting = recipe.settings.get(f"model.{key}")
    if setting is None or setting.typed:
        return False
    return recipe.find(f"{recipe.backend}.weights", "random") != "random"


def _families_with(key: str, value: Value) -> list[str]:
    having = [row for row in map(family, families()) if row.has(key)]
    return [row.name for row in having if value in row.values.get(key, (value,))]


def _lacking(model: _Model) -> Iterator[Fault]:
    """Yield fields of enabled parts that the backend lacks."""
    backend = model.recipe.backend
    architecture = model.recipe.architecture
    for key in model.active:
        # Every backend has this size of a head by default.
        if key == "head_dim" and (
            architecture.head_dim * architecture.heads == architecture.hidden_size
        ):
            continue
        if model.known.has(key) and not model.known.has(key, backend):
            why = (
                f"{backend}'s model of the family {model.known.name} cannot express "
                f"{spell(model.values[key])}"
            )
            yield f"model.{key}", why, _remedy(model, key, model_rules()[key].default)


def _remedy(model: _Model, key: str, value: Value) -> str:
    """Return the ways to a model that is computed: another value, or another backend."""
    known = model.known
    ways = []
    if value in known.values.get(key, (value,)):
        ways.append(f"model.{key}={spell(value)}")
    here = cast(Scalar, model.values[key])
    able = []
    for name, support in known.backends.items():
        if known.has(key, name) and here in support.values.get(key, (here,)):
            able.append(name)
    if able:
        ways.append(f"--backend {' or '.join(able)}")
    return ", or ".join(ways)


def _other_values(model: _Model) -> Iterator[Fault]:
    """Yield fields of enabled parts that the backend computes with other values only."""
    backend = model.recipe.backend
    values = model.values
    for key, allowed in model.support.values.items():
        switch = switch_of(key)
        if values[key] in allowed or (switch != key and model.is_off(key)):
            continue
        why = (
            f"{backend} computes the family {model.known.name} with "
            f"{' or '.join(map(spell, allowed))} only, not {spell(values[key])}"
        )
        if switch != key:
            why += f", where model.{switch} is {values[switch]}"
        yield f"model.{key}", why, _remedy(model, key, allowed[0])
    for key, other in model.support.equal.items():
        if key in model.active and values[key] != values[other]:
            both = f"{spell(values[key])} and {spell(values[other])}"
            why = f"{backend} has one value for this and model.{other}, not {both}"
            yield f"model.{key}", why, f"model.{key}={spell(values[other])}"
    for key in model.support.whole:
        value = values[key]
        if key in model.active and isinstance(value, float) and not value.is_integer():
            why = f"{backend} takes a whole number, not {value}"
            yield f"model.{key}", why, f"model.{key}={round(value)}.0"
