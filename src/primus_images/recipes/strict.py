"""Keys and values that a recipe may have: nothing unknown, nothing missing, and within bounds."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from primus_images.errors import InputError, nearest
from primus_images.recipes.family import families
from primus_images.recipes.load import Source
from primus_images.recipes.overrides import backends_with
from primus_images.recipes.schema import (
    Backend,
    Rule,
    backend_rules,
    backends,
    model_rules,
    out_of_bounds,
    recipe_rules,
)
from primus_images.recipes.setting import CHOICES, Setting, Settings
from primus_images.yamlfile import LARGEST, read_values

_NEEDED = ("name", "description", "ranks", "assets.tokenizer", "assets.corpus", "model.family")
_OTHER_NAMES = Path(__file__).with_name("other_names.yaml")


def check(settings: Settings, source: Source, backend: Backend) -> None:
    """Raise InputError for a key that the recipe lacks, or that has a wrong value.

    ``settings`` are the resolved ones of the files ``source``.
    """
    _require_keys(settings, backend, source.files[0])
    _require_lora(settings, backend)
    rules = _rules(backend)
    for key, setting in settings.items():
        if key not in CHOICES:
            _check_key(key, setting, rules, backend)
    for written in (source.settings, *(case.settings for case in source.cases)):
        _check_written(written, rules, backend)
    if "epochs" in settings:
        # Nothing exceeds the steps before they are counted.
        steps = backend.key("steps")
        settings = {**settings, steps: replace(settings[steps], value=LARGEST)}
    # First the values that are wrong by themselves, because they often make others wrong.
    for related in (False, True):
        for key in rules:
            bounding = settings
            if key == f"{backend.name}.{backend.warmup}":
                bounding = _until_decay(settings, backend)
            wrong = out_of_bounds(key, rules, bounding, related=related)
            if wrong:
                reason, remedy = wrong
                raise InputError(f"{key} {reason}", where=settings[key].origin, hint=remedy)


def _until_decay(settings: Settings, backend: Backend) -> Settings:
    """Return the settings with the steps of the schedule, which may end after the run."""
    steps = settings[backend.key("steps")]
    decay = settings.get(f"{backend.name}.training.decay_steps")
    if decay is None or not isinstance(decay.value, int) or not isinstance(steps.value, int):
        return settings
    longer = replace(steps, value=max(steps.value, decay.value))
    return {**settings, backend.key("steps"): longer}


def _require_keys(settings: Settings, backend: Backend, file: Path) -> None:
    of_backend = [backend.key(short) for short in ("steps", "seq_len", "local_batch")]
    for key in (*_NEEDED, *of_backend):
        if key in settings:
            continue
        hint = f"set {key}"
        if key == "model.family":
            hint += f" to one of {', '.join(families())}"
        elif key.startswith(("ranks", "assets.")):
            hint += ", or add `uses: [shared/data.yaml]`, which sets it"
        raise InputError(f"{key} is missing", where=f"{file}:1:1", hint=hint)


def _require_lora(settings: Settings, backend: Backend) -> None:
    if settings["mode"].value == "lora":
        return
    for key, setting in settings.items():
        native = key.removeprefix(f"{backend.name}.")
        if setting.typed and native != key and native.startswith("lora."):
            raise InputError(
                f"{native} has no effect in another mode than LoRA",
                where=setting.origin,
                hint="--mode lora",
            )


def _rules(backend: Backend) -> dict[str, Rule]:
    rules = dict(recipe_rules())
    for key, rule in model_rules().items():
        rules[f"model.{key}"] = rule
    for key, rule in backend_rules(backend.name).items():
        rules[f"{backend.name}.{key}"] = rule
    return rules


def _check_key(key: str, setting: Setting, rules: Mapping[str, Rule], backend: Backend) -> None:
    native = key.removeprefix(f"{backend.name}.")
    if native != key and native in backend.owned:
        raise InputError(
            f"{key} is set by primus", where=setting.origin, hint=f"use {backend.owned[native]}"
        )
    if key not in rules:
        raise _unknown(key, setting, rules, backend)
    _check_type(key, setting, rules[key])


def _check_type(key: str, setting: Setting, rule: Rule) -> None:
    objection = rule.objection(setting.value)
    if objection is not None:
        raise InputError(f"{key} {objection}", where=setting.origin)


def _check_written(written: Settings, rules: Mapping[str, Rule], backend: Backend) -> None:
    """Check what an override replaces, or a case that does not hold sets."""
    for key, setting in written.items():
        native = key.removeprefix(f"{backend.name}.")
        is_list = native in backend.tried and isinstance(setting.value, list)
        if key in rules and not is_list:
            _check_type(key, setting, rules[key])


def _unknown(key: str, setting: Setting, rules: Mapping[str, Rule], backend: Backend) -> InputError:
    native = key.removeprefix(f"{backend.name}.")
    name_here = read_values(_OTHER_NAMES).data.get(native)
    if name_here:
        return InputError(f"there is no key {key!r}; here it is {name_here}", where=setting.origin)
    section = native.partition(".")[0]
    if section != backend.name and section in backends():
        return InputError(
            f"{native} is not a key of the backend {backend.name}",
            where=setting.origin,
            hint=f"--backend {section} has it",
        )
    having = backends_with(native)
    if having:
        return InputError(
            f"there is no key {key!r}",
            where=setting.origin,
            hint=f"{native} is a setting of --backend {' or '.join(having)}",
        )
    # Compared without the prefix, which makes any two keys of a section similar.
    prefix = f"{backend.name}."
    hint = f"the keys of {backend.name} are those of its own configuration at the pinned version"
    names = [rule.removeprefix(prefix) for rule in rules] + [*backend.keys, *backend.degrees]
    if key.startswith("model."):
        prefix = "model."
        hint = f"a model is described by {', '.join(_parts_of_model())}"
        names = list(model_rules())
    near = nearest(key.removeprefix(prefix), names)
    for name in names:
        if f"{prefix}{name}" in rules:
            near = near.replace(repr(name), repr(f"{prefix}{name}"))
    message = f"there is no key {key!r}{near}"
    return InputError(message, where=setting.origin, hint=None if near else hint)


def _parts_of_model() -> list[str]:
    parts: dict[str, None] = {}
    for field in model_rules():
        part, _, rest = field.partition(".")
        parts[f"{part}.*" if rest else part] = None
    return list(parts)
