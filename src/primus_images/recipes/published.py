"""Where a model differs from its publisher's, by ``recipes/published/OWNER--NAME.json``."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from re import IGNORECASE, compile as pattern
from typing import Any

from primus_images.errors import InputError
from primus_images.files import read_bytes
from primus_images.recipes.architecture import size
from primus_images.recipes.family import Family, described, families_of, family, uncomputed
from primus_images.recipes.faults import Fault
from primus_images.recipes.load import beside
from primus_images.recipes.recipe import Recipe
from primus_images.yamlfile import spell

_NUMBER = pattern(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?", IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A field of the recipe's model (``key``, without ``model.``) that is not as published.

    ``name`` is the publisher's name of it. ``intended``: the user typed it, or the recipe's reason
    for it names both values.
    """

    key: str
    name: str
    here: Any
    published: Any
    intended: bool


def facts_of(recipe: Recipe) -> Mapping[str, Any] | None:
    """Return the facts of the publisher's ``config.json``, and ``parameters``, of all its files.

    None if there is no file of the recipe's ``model.hf_repo``, or if the model is described by the
    weights that the run starts from.
    """
    repo = recipe.find("model.hf_repo", "")
    origin = recipe.settings["model.family"].origin
    of_weights = not origin.startswith(tuple(f"{file}:" for file in recipe.files))
    file = _file(recipe, repo)
    if not repo or of_weights or not file.is_file():
        return None
    try:
        facts = json.loads(read_bytes(file))
        return {"parameters": int(facts["parameters"]), **facts}
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = repr(error)[:178]
        raise InputError(
            f"not facts of a model: {reason}",
            where=file,
            hint="it holds the facts of config.json, and `parameters`",
        ) from None


def _file(recipe: Recipe, repo: str) -> Path:
    name = repo.replace("/", "--")
    return beside(recipe.path, f"published/{name}.json")


def differences(recipe: Recipe, facts: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield where the model is not as published. A proxy has other sizes, but the same parts."""
    model = recipe.architecture
    for key, name, value in described(family(model.family), facts, recipe.path):
        of_scaling = key.startswith("rope_scaling.") and key != "rope_scaling.kind"
        if of_scaling and model.rope_scaling.kind == "none":
            continue
        here = attrgetter(key)(model)
        published = value
        if key == "head_dim":
            here = model.head_size
            published = value or model.hidden_size // max(1, model.heads)
        is_part = not _is_number(published) or bool(here) != bool(published)
        if here != published and (is_part or not recipe.get("proxy", bool)):
            intended = _is_intended(recipe, key, here, published)
            yield Difference(key=key, name=name, here=here, published=published, intended=intended)


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool | str)


def _is_intended(recipe: Recipe, key: str, here: Any, published: Any) -> bool:
    setting = recipe.settings.get(f"model.{key}")
    if recipe.settings["model.family"].deliberate:
        return True
    if setting is None:
        return False
    numbers = _NUMBER.findall(setting.because)
    named = {float(number.replace(",", "")) for number in numbers}
    by_user = setting.typed or setting.deliberate
    return by_user or (_is_number(published) and {here, published} <= named)


def kind_faults(recipe: Recipe) -> Iterator[Fault]:
    """Yield the family, if the publisher's model is of another one."""
    known = family(recipe.architecture.family)
    facts = facts_of(recipe)
    if facts is None:
        return
    kind = facts.get("model_type", "")
    if kind != known.transformers:
        repo = recipe.get("model.hf_repo", str)
        why = f"{known.name}, but {repo} has model_type = {kind or 'none'} in its config.json"
        remedy = "CONTRIBUTING.md says how to add a family"
        for name in families_of(kind)[:1]:
            remedy = f"model.family={name}"
        yield "model.family", why, remedy


def published_faults(recipe: Recipe) -> Iterator[Fault]:
    """Yield each field that is not as published, unless the user or the recipe's reason says so."""
    facts = facts_of(recipe)
    if facts is None:
        return
    known = family(recipe.architecture.family)
    repo = recipe.get("model.hf_repo", str)
    for name, why in uncomputed(known, facts):
        yield "model.hf_repo", f"{name} of {repo}: {why}", None
    apart = list(differences(recipe, facts))
    for difference in apart:
        if not difference.intended:
            yield _fault(difference, known, facts, repo)
    total = size(recipe.architecture).total
    if apart or _has_own_sizes(recipe) or total == facts["parameters"]:
        return
    why = f"the model has {total:,} parameters, the files of {repo} {facts['parameters']:,}"
    yield "model.family", why, "one size is wrong here and in the published file"


def _has_own_sizes(recipe: Recipe) -> bool:
    if recipe.get("proxy", bool):
        return True
    settings = recipe.settings.items()
    return any(setting.typed for key, setting in settings if key.startswith("model."))


def _fault(difference: Difference, known: Family, facts: Mapping[str, Any], repo: str) -> Fault:
    name = difference.name
    published = spell(difference.published)
    place = "its config.json"
    if name not in facts and known.defaults.get(name) == difference.published:
        place = f"`defaults` of families/{known.name}.yaml"
    why = f"{spell(difference.here)}, but {repo} has {name} = {published} in {place}"
    remedy = f"model.{difference.key}={published}"
    if _is_number(difference.published):
        remedy += ", or a case whose `because` names both"
    return f"model.{difference.key}", why, remedy


def origin_of_sizes(recipe: Recipe) -> Iterator[str]:
    """Yield in a sentence whether the model is as published; nothing for a proxy."""
    repo = recipe.find("model.hf_repo", "")
    if recipe.get("proxy", bool):
        return
    if facts_of(recipe) is not None:
        yield another_model(recipe) or f"as published by {repo}"
    elif repo:
        yield f"not compared with {repo}: there is no published/{_file(recipe, repo).name}"
    else:
        yield "not compared with a publisher: model.hf_repo names none"


def another_model(recipe: Recipe) -> str:
    """Return how the model differs from its publisher's; "" if it does not, or for a proxy."""
    facts = facts_of(recipe)
    if facts is None or recipe.get("proxy", bool):
        return ""
    apart = [
        f"{difference.key} {spell(difference.here)}, not {spell(difference.published)}"
        for difference in differences(recipe, facts)
    ]
    if not apart:
        return ""
    return f"another model than {recipe.get('model.hf_repo', str)}: {'; '.join(apart)}"
