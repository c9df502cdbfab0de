"""Resolving a recipe from its name and the user's choices and overrides, with all checks."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from itertools import chain, product
from os.path import exists, expanduser, isdir, isfile
from pathlib import Path
from typing import Any

from primus_images.errors import InputError, PrimusError, nearest
from primus_images.files import refuse_pointer
from primus_images.recipes import load, schema
from primus_images.recipes.choose import CPU, LENGTH, check_choice, choose, supported
from primus_images.recipes.family import OTHER, families, family
from primus_images.recipes.faults import (
    Fault,
    batch_faults,
    data_faults,
    layout_faults,
    model_faults,
    rank_faults,
)
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.rules import USABLE, gpu_bytes, holds, predict, rules_of
from primus_images.recipes.schema import Backend, backends
from primus_images.recipes.setting import CHOICES, Choices, Setting, Value
from primus_images.recipes.weights import kind_faults, model_of, published_faults
from primus_images.yamlfile import LARGEST, read_values, spell, value as typed_value

_OWN_SECTIONS = {"validation", "assets", "model", "ranks"}
# Keys of weights to start from.
_WEIGHTS = ("weights", "finetune.weights", "megatron.weights")
# Sections of the file that guide the resolution and are not settings of the run.
_DECIDING = ("default.", "supports.")


def resolve(
    name: str,
    overrides: Sequence[str] = (),
    choices: Choices | None = None,
    replacing: Sequence[str] = (),
    among: Path | None = None,
    *,
    here: bool = True,
    memory: float | None = None,
) -> Recipe:
    """Load the recipe ``name`` (of the folder ``among``, or a path), make the choices, apply its
    cases and overrides.

    ``overrides`` are ``key=value`` words, one for each key, which may omit the backend's name or be
    a short name or a choice: ``training.steps=5``, ``steps=5``, ``precision=fp8``. ``replacing``
    are further ones, which replace those of the same key. If the run is not ``here``, files at
    absolute paths are not looked for.

    Of a list of values, the first whose predicted memory fits is taken, else the last. ``memory``
    are the bytes of one GPU if they differ from those of the generation. With weights to fine-tune,
    the model is that of their ``config.json``. Raises InputError with the place of the wrong value.
    """
    path = load.find(name, among).absolute()
    source = load.read(path)
    choices, words = choices_among(choices or Choices(), overrides)
    texts = dict(word.partition("=")[::2] for word in words)
    weights = next((Path(texts[key]) for key in _WEIGHTS if exists(texts.get(key, ""))), None)
    chosen = choose(source.settings, choices, path, sized=weights is not None)
    settings = {key: s for key, s in source.settings.items() if not key.startswith(_DECIDING)}
    facts = {choice: load.words(setting.value)[0] for choice, setting in chosen.items()}
    for case in source.cases if choices.nodes is None else ():
        if "nodes" in case.settings and case.holds(facts):
            chosen["nodes"] = case.settings["nodes"]
            facts["nodes"] = str(chosen["nodes"].value)
    knows = backends()[facts["backend"]]
    spelled: dict[str, str] = {}
    overriding: dict[str, Setting] = {}
    for number, word in enumerate([*words, *replacing]):
        full, key, setting = _override(word, knows)
        if key in overriding and number < len(words):
            first = spelled[key]
            raise InputError(
                f"{key} is set twice: {first} and {full}",
                where="command line",
                hint="keep one of the two",
            )
        spelled[key] = full
        overriding[key] = setting
    body = settings
    settings = _with_cases(body, source, facts, overriding, knows) | chosen
    others = backends().keys() - {knows.name}
    settings = {key: s for key, s in settings.items() if key.partition(".")[0] not in others}
    # The global batch is written for one node.
    _scale_batch(settings, source, facts, knows)
    if weights and here:
        settings = _of_weights(weights, settings, overriding, knows)
    if facts["gpu"] == CPU and facts["proxy"] == "false":
        settings["ranks"] = Setting(value=1, origin="one process on a CPU")
    settings.update(overriding)
    _settle_steps(settings, overriding, knows)
    trying = {key: _listed(settings, key, knows) for key in knows.tried}
    _check_keys(settings, source, knows)
    if not chosen["gpu"].origin.startswith("--gpu"):
        # With these choices, the recipe is the same on any machine.
        choices = replace(choices, gpu=facts["gpu"])
    recipe = Recipe(
        name=name,
        path=path,
        settings=settings,
        overrides=tuple(spelled.values()),
        choices=choices,
        precisions=supported(source.settings)[facts["backend"], facts["mode"]],
        by_path=load.is_path(name),
        files=source.files,
    )
    whole = recipe.find(knows.key("global_batch"), -1)
    batch = knows.keys["local_batch"]
    trying[batch] = [
        size for size in trying[batch] if whole < 1 or whole % (size * recipe.data_parallel) == 0
    ]
    if trying[batch]:
        recipe = _with(recipe, batch, trying[batch][-1])
    # Files at absolute paths must exist only if the run is here.
    _refuse_first(
        recipe,
        (
            partial(_file_faults, here=here),
            kind_faults,
            model_faults,
            lambda recipe: recipe.architecture.objections(),
            published_faults,
            rank_faults,
            layout_faults,
            batch_faults,
            data_faults,
            _vocabulary_faults,
            rules_of(recipe).faults,
            _precision_faults,
        ),
    )
    if facts["proxy"] == "true":
        # A proxy has sizes of its own. Those of the full model are in the same file, and have to be
        # the published ones.
        complete = _with_cases(body, source, {**facts, "proxy": "false"}, {}, knows)
        mixed = {k: s for k, s in settings.items() if not k.startswith("model.")}
        mixed |= {k: s for k, s in complete.items() if k.startswith("model.")}
        mixed["proxy"] = Setting(value=False, origin="the full model")
        _refuse_first(
            replace(recipe, settings=mixed),
            (lambda r: r.architecture.objections(), published_faults),
        )
    memory = memory or gpu_bytes(recipe.gpu)
    if memory:
        lists = [[(key, value) for value in values] for key, values in trying.items() if values]
        every = (
            reduce(lambda each, pair: _with(each, *pair), pairs, recipe)
            for pairs in product(*lists)
        )
        recipe = next((each for each in every if predict(each).peak <= USABLE * memory), recipe)
    return replace(recipe, name=recipe.get("name", str) if "/" not in name else name)


def _with_cases(
    body: Mapping[str, Setting],
    source: load.Source,
    facts: Mapping[str, str],
    overriding: Mapping[str, Setting],
    knows: Backend,
) -> dict[str, Setting]:
    """Return ``body``, settings that do not depend on a choice, with those of the cases that hold
    for ``facts``.
    """
    settings = dict(body)
    for case in source.cases:
        length = overriding.get(knows.key(LENGTH)) or settings.get(knows.key(LENGTH))
        if case.holds({**facts, LENGTH: str(length and length.value)}):
            settings.update(case.settings)
    return settings


def runs_on(entry: load.Entry, precision: str, gpu: str) -> bool:
    """Whether a ``gpu`` holds the recipe of ``entry`` on its own number of nodes, with some micro
    batch.
    """
    choices = Choices(backend=entry.backend, mode=entry.mode, precision=precision, gpu=gpu)
    try:
        return entry.only_proxy or holds(resolve(str(entry.path), (), choices))
    except InputError:
        return True  # a fault of the recipe, which `show` names


# YAML also reads signs, other bases and other spellings of true.
_SPELLINGS = {"nodes": "[0-9]{1,9}", "proxy": "true|false"}


def choices_among(choices: Choices, overrides: Sequence[str]) -> tuple[Choices, list[str]]:
    """Return the choices with those that ``overrides`` make, and the other overrides. Raises
    InputError.
    """
    words = []
    for word in overrides:
        key, _, text = word.partition("=")
        if key not in CHOICES:
            # The shell leaves ~ as it is after =.
            words.append(f"{key}={expanduser(text)}" if text.startswith("~/") else word)
            continue
        before = getattr(choices, key)
        if before is not None:
            first = f"{key}={str(before).lower() if key == 'proxy' else before}"
            raise InputError(
                f"{key} is set twice: {first} and {word}",
                where="command line",
                hint="keep one of the two",
            )
        value: object = text
        spelling = _SPELLINGS.get(key)
        if spelling:
            where = f"command line: {key}"
            typed = Setting(
                value=typed_value(text, where) if re.fullmatch(spelling, text) else text,
                origin=where,
            )
            check_choice(key, typed)
            value = typed.value
        choices = replace(choices, **{key: value})  # type: ignore[arg-type]
    return choices, words


def _of_weights(
    folder: Path, settings: dict[str, Setting], overriding: Mapping[str, Setting], knows: Backend
) -> dict[str, Setting]:
    name = ""
    if "model.family" in settings:
        name = str(settings["model.family"].value)
    if not (
        name in families()
        and not family(name).images
        and "weights" in schema.backend_rules(knows.name)
    ):
        return settings
    typed = overriding.get("model.family")
    if typed and typed.value == OTHER:
        name = OTHER
    described = model_of(folder, name)
    for key, setting in overriding.items():
        if setting.value != (theirs := described.get(key, setting)).value:
            raise InputError(
                f"{key} is {setting.value}, and the weights have {theirs.value}",
                where=theirs.origin,
                hint="leave it out: the sizes are those of the weights",
            )
    kept = ()
    if name != OTHER:
        kept = ("model.hf_repo", "model.moe.auxiliary_loss")
    settings = {
        key: s for key, s in settings.items() if not key.startswith("model.") or key in kept
    } | described
    for key, plain in (("compile", False), ("recompute", "full")) if name == OTHER else ():
        settings[f"{knows.name}.training.{key}"] = Setting(
            value=plain, origin="a model of no family"
        )
    lengths = (settings[knows.key("seq_len")], described["model.max_seq_len"])
    return settings | {
        knows.key("seq_len"): min(lengths, key=lambda length: int(str(length.value)))
    }


def _scale_batch(
    settings: dict[str, Setting], source: load.Source, facts: Mapping[str, str], knows: Backend
) -> None:
    key = knows.key("global_batch")
    nodes = int(facts["nodes"])
    batch = settings.get(key)
    set_by_case = any(
        "nodes" in case.when and key in case.settings and case.holds(facts) for case in source.cases
    )
    if batch and nodes > 1 and not set_by_case and isinstance(batch.value, int) and batch.value > 0:
        settings[key] = replace(
            batch, value=batch.value * nodes, origin=f"{batch.origin} × {nodes} nodes"
        )


def _listed(settings: dict[str, Setting], key: str, knows: Backend) -> list[Any]:
    """Return the values of a list, of which its last becomes the setting; empty if it is not a
    list.
    """
    full = f"{knows.name}.{key}"
    setting = settings.get(full)
    if setting is None or not isinstance(setting.value, list):
        return []
    rule = schema.backend_rules(knows.name)[key]
    values = [v for v in setting.value if not rule.objection(v) and not (type(v) is int and v < 1)]
    if not values or len(values) < len(setting.value):
        raise InputError(
            f"{full} is {spell(setting.value)}",
            where=setting.origin,
            hint="give one value, or a list of values to try in this order",
        )
    origin = f"{setting.origin}, the first of {', '.join(map(spell, values))} that fits"
    settings[full] = replace(setting, value=values[-1], origin=origin)
    return values


def _with(recipe: Recipe, key: str, value: Value) -> Recipe:
    full = f"{recipe.backend}.{key}"
    return replace(
        recipe, settings={**recipe.settings, full: replace(recipe.settings[full], value=value)}
    )


def _settle_steps(
    settings: dict[str, Setting], overriding: Mapping[str, Setting], knows: Backend
) -> None:
    """Leave the steps to ``epochs``, which a run counts, or to the user, who may shorten the run
    and its warm-up.
    """
    key = knows.key("steps")
    warmup = f"{knows.name}.{knows.warmup}"
    if "epochs" in settings and key in overriding:
        if "epochs" in overriding:
            raise InputError("give either epochs or steps", where=overriding["epochs"].origin)
        del settings["epochs"]
    elif "epochs" in settings and key in settings:
        settings[key] = replace(
            settings[key], origin="replaced by those of epochs when a run starts"
        )
    steps = overriding.get(key)
    before = settings.get(warmup)
    if not steps or not before or warmup in overriding:
        return
    if (
        isinstance(steps.value, int)
        and isinstance(before.value, int)
        and 0 < steps.value < before.value
    ):
        limit = f"{before.origin}, at most the {steps.value} steps"
        settings[warmup] = replace(before, value=steps.value, origin=limit)


def is_setting(key: str) -> bool:
    """Return whether ``key`` is the name of a setting of any backend, long or short."""
    return key in {"corpus", "tokenizer", *schema.recipe_rules()} or bool(_having(key))


def _having(key: str) -> list[str]:
    rows = backends().values()
    return [
        row.name
        for row in rows
        if key in {*row.keys, *row.degrees, *schema.backend_rules(row.name)}
    ]


def _override(word: str, knows: Backend) -> tuple[str, str, Setting]:
    """Return ``word`` with the whole name of its key, the key in the recipe's settings, and the
    setting.
    """
    key, separator, text = word.partition("=")
    if not separator or not key:
        raise InputError(
            f"{word!r} is not key=value", where="command line", hint="example: training.steps=5"
        )
    if key in ("corpus", "tokenizer"):
        key = f"assets.{key}"
    elif native_key := knows.keys.get(key) or knows.degrees.get(key):
        key = f"{knows.name}.{native_key}"
    section = key.partition(".")[0]
    # A size in the recipe's model section, from which primus sets the backend's key of the same
    # name.
    sized = (
        key in knows.owned
        and key.startswith("model.")
        and key.removeprefix("model.") in schema.model_rules()
    )
    own = schema.backend_rules(knows.name)
    native = key in knows.owned or key in own or section not in _OWN_SECTIONS
    whole = section == knows.name or key in schema.recipe_rules() or sized
    if native and not whole:
        place = f"{knows.name}.{key}"
    else:
        place = key
    # A path may look like a number, or contain what is a comment in YAML.
    rule = schema.recipe_rules().get(place) or own.get(place.removeprefix(f"{knows.name}."))
    plain = not text or (
        rule and rule.types == {"str"} and not rule.choices and text[0] not in "\"'"
    )
    value: Value = text if plain else typed_value(text, f"command line: {key}")
    return f"{key}={text}", place, Setting(value=value, origin=f"command line: {word}")


def _check_keys(settings: Mapping[str, Setting], source: load.Source, knows: Backend) -> None:
    needed = ("name", "description", "ranks", "assets.tokenizer", "assets.corpus", "model.family")
    for key in (*needed, *map(knows.key, ("steps", "seq_len", "local_batch"))):
        if key not in settings:
            more = ""
            if key.startswith(("ranks", "assets.")):
                more = ", or add `uses: [shared/data.yaml]`, which sets it"
            hint = f"set {key}" + (
                f" to one of {', '.join(families())}" if key == "model.family" else more
            )
            raise InputError(f"{key} is missing", where=f"{source.files[0]}:1:1", hint=hint)
    head = f"{knows.name}."
    typed = (key for key, setting in settings.items() if setting.origin.startswith("command line"))
    adapters = [key for key in typed if key.startswith(f"{head}lora.")]
    if adapters and settings["mode"].value != "lora":
        key_text = adapters[0].removeprefix(head)
        raise InputError(
            f"{key_text} has no effect in another mode than LoRA",
            where=settings[adapters[0]].origin,
            hint="--mode lora",
        )
    sections = {
        "": schema.recipe_rules(),
        "model.": schema.model_rules(),
        head: schema.backend_rules(knows.name),
    }
    rules = {
        prefix + key: rule for prefix, section in sections.items() for key, rule in section.items()
    }
    for key, setting in settings.items():
        if key in CHOICES:
            continue
        native = key.removeprefix(head)
        if native != key and native in knows.owned:
            raise InputError(
                f"{key} is set by primus", where=setting.origin, hint=f"use {knows.owned[native]}"
            )
        rule = rules.get(key)
        if rule is None:
            raise _unknown(key, setting, rules, knows)
        objection = rule.objection(setting.value)
        if objection is not None:
            raise InputError(f"{key} {objection}", where=setting.origin)
    # What a case or an override replaces has its type, too. Of some settings, a list holds values
    # to try.
    for key, setting in chain(
        source.settings.items(), *(case.settings.items() for case in source.cases)
    ):
        listed = key.removeprefix(head) in knows.tried and isinstance(setting.value, list)
        if (
            key in rules
            and not listed
            and (objection := rules[key].objection(setting.value)) is not None
        ):
            raise InputError(f"{key} {objection}", where=setting.origin)
    if "epochs" in settings:  # nothing exceeds the steps before they are counted
        steps = knows.key("steps")
        settings = {**settings, steps: replace(settings[steps], value=LARGEST)}
    # First the values that are wrong by themselves, because they often make others wrong.
    for related in (False, True):
        for key in rules:
            wrong = schema.out_of_bounds(key, rules, settings, related=related)
            if wrong:
                reason, remedy = wrong
                raise InputError(f"{key} {reason}", where=settings[key].origin, hint=remedy)


def _unknown(
    key: str, setting: Setting, rules: Mapping[str, schema.Rule], knows: Backend
) -> PrimusError:
    native = key.removeprefix(f"{knows.name}.")
    if native in (names := read_values(Path(__file__).with_name("other_names.yaml")).data):
        name_text = names[native]
        return InputError(f"there is no key {key!r}; here it is {name_text}", where=setting.origin)
    other = native.partition(".")[0]
    if other != knows.name and other in backends():
        return InputError(
            f"{native} is not a key of the backend {knows.name}",
            where=setting.origin,
            hint=f"--backend {other} has it",
        )
    if key.startswith("model."):
        fields = [name.removeprefix("model.") for name in rules if name.startswith("model.")]
        # Compared without the prefix, which makes any two keys of a model similar.
        near = ""
        if nearest(key.removeprefix("model."), fields):
            near = nearest(key, map("model.{}".format, fields))
        groups = dict.fromkeys(
            f"{head}.*" if rest else head for head, _, rest in (f.partition(".") for f in fields)
        )
        hint = f"a model is described by {', '.join(groups)}"
    else:
        # Compared without the backend's name, which makes any two of its keys similar.
        full = {rule.removeprefix(f"{knows.name}."): rule for rule in rules}
        near = nearest(native, [*full, *knows.keys, *knows.degrees])
        near = next(
            (
                near.replace(repr(name), repr(rule))
                for name, rule in full.items()
                if repr(name) in near
            ),
            near,
        )
        hint = f"the keys of {knows.name} are those of its own configuration at the pinned version"
        having = _having(native)
        if having:
            near = ""
            hint = f"{native} is a setting of --backend {' or '.join(having)}"
    return InputError(
        f"there is no key {key!r}{near}", where=setting.origin, hint=None if near else hint
    )


def _refuse_first(recipe: Recipe, checks: Iterable[Callable[[Recipe], Iterable[Fault]]]) -> None:
    for key, why, hint in chain.from_iterable(faults(recipe) for faults in checks):
        # If the key is missing, the place is that of the first setting that the reason names.
        named = next(
            (word for word in (key, *why.replace(",", "").split()) if word in recipe.settings), None
        )
        if named:
            origin = recipe.settings[named].origin
        else:
            origin = f"{recipe.path}:1:1"
        raise InputError(f"{key}: {why}", where=origin, hint=hint)


def _file_faults(recipe: Recipe, *, here: bool) -> Iterator[Fault]:
    names = [key for key in recipe.settings if key.startswith("assets.") or key == "eval.corpus"]
    for name in (
        key for key in names if here or not str(recipe.settings[key].value).startswith("/")
    ):
        asset = recipe.asset(name)
        kind = "a file or a folder"
        if name == "assets.tokenizer":
            kind = "a folder"
        if not re.fullmatch(
            r"(?!hf:|\w+://).*|hf:[\w.-]+(/[\w.-]+)?", value := recipe.get(name, str)
        ):
            hint = "as in hf:OWNER/NAME; download what is elsewhere, and name the file"
            yield name, f"{value} names no file, and no data set or model on the hub", hint
        if asset is not None and not (isdir(asset) or (kind != "a folder" and isfile(asset))):
            yield name, f"{asset} is not {kind}", f"name {kind}, hf:OWNER/NAME or mock"
    key = f"{recipe.backend}.weights"
    weights = recipe.find(key, "random")
    elsewhere = weights.startswith("hf:") or (weights.startswith("/") and not here)
    if not (elsewhere or weights == "random" or isdir(weights)):
        yield (
            key,
            f"there is no folder {weights!r}",
            "name a folder of safetensors files, hf:OWNER/NAME or random",
        )


def _vocabulary_faults(recipe: Recipe) -> Iterator[Fault]:
    tokenizer = recipe.asset("tokenizer")
    rows = recipe.architecture.vocab_size
    if tokenizer is not None and (size := vocabulary(tokenizer)) > rows > 0:
        why = f"{rows} is less than the {size} tokens of {tokenizer}"
        yield (
            "model.vocab_size",
            why,
            f"model.vocab_size={size} or more, or another assets.tokenizer",
        )


def _precision_faults(recipe: Recipe) -> Iterator[Fault]:
    knows = recipe.knows
    computed = rules_of(recipe).precision(recipe)
    if computed != recipe.precision:
        hint = f"the recipe has no case that makes {knows.name} compute {recipe.precision}"
        if knows.sharded_precision and recipe.unsharded:
            hint = (
                "it computes below float32 where FSDP shards the weights: leave ranks to "
                "data or context parallelism"
            )
        yield (
            "precision",
            f"{recipe.precision} is requested, but the {knows.name} settings give {computed}",
            hint,
        )


def vocabulary(folder: Path) -> int:
    """Return the largest token id + 1 of ``tokenizer.json`` in ``folder``; 0 without it. InputError
    if it is wrong.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        return 0
    try:
        refuse_pointer(file)
        content = json.loads(file.read_bytes())
        words = content["model"]["vocab"]
        # Unigram models have a list of tokens; all others map tokens to ids.
        if isinstance(words, list):
            largest = len(words) - 1
        else:
            largest = max(words.values(), default=-1)
        added = max((token["id"] for token in content.get("added_tokens") or ()), default=-1)
        return int(max(largest, added)) + 1
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        error_text = f"{type(error).__name__}: {error}"[:178]
        raise InputError(
            f"not a tokenizer file: {error_text}",
            where=file,
            hint="tokenizers of the transformers library have it: model.vocab and added_tokens",
        ) from None
