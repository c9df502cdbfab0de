"""What publishers say of their models, and where a recipe differs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from primus.errors import InputError
from primus.files import read_bytes
from primus.recipes.architecture import size
from primus.recipes.family import described, families_of, family
from primus.recipes.faults import Fault
from primus.recipes.load import beside
from primus.recipes.recipe import Recipe
from primus.yamlfile import spell

_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?", re.IGNORECASE)


class Difference(NamedTuple):
    """A field of the recipe's model (without ``model.``) that is not as published.

    ``meant``: it was typed, or the recipe's reason for it names the published value.
    """

    key: str
    mine: Any
    theirs: Any
    field: str
    meant: bool


def facts_of(recipe: Recipe) -> Mapping[str, Any] | None:
    """Return ``published/OWNER--NAME.json`` of the recipe's ``model.hf_repo``: facts of its ``config.json``.

    ``parameters`` is the number that its files hold. None if there is no such file, or if the model is described by the
    weights that the run starts from.
    """
    repo = recipe.find("model.hf_repo", "")
    origin = recipe.settings["model.family"].origin
    if not repo or not any(origin.startswith(f"{file}:") for file in recipe.files):
        return None
    file = beside(recipe.path, f"published/{repo.replace('/', '--')}.json")
    if not file.is_file():
        return None
    try:
        facts = json.loads(read_bytes(file))
        return {"parameters": int(facts["parameters"]), **facts}
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = "it holds the facts of config.json, and `parameters`"
        raise InputError(f"not facts of a model: {error!r}"[:200], where=str(file), hint=hint) from None


def differences(recipe: Recipe, facts: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield where the recipe's model is not as published. A proxy has sizes of its own, so only its kind counts."""
    model = recipe.architecture
    for key, field, value in described(family(model.family), facts, recipe.path):
        mine, theirs, setting = attrgetter(key)(model), value, recipe.settings.get(f"model.{key}")
        if key == "head_dim":
            mine, theirs = model.head_size, value or model.hidden_size // max(1, model.heads)
        if mine == theirs or (recipe.get("proxy", bool) and not isinstance(theirs, bool | str)):
            continue
        because = setting.because if setting else ""
        named = {float(number.replace(",", "")) for number in _NUMBER.findall(because)}
        typed = setting is not None and setting.origin.startswith("command line")
        yield Difference(key, mine, theirs, field, typed or theirs in named)


def kind_faults(recipe: Recipe) -> Iterator[Fault]:
    """Yield the family, if the publisher's model is of another one."""
    known, facts, repo = family(recipe.architecture.family), facts_of(recipe), recipe.find("model.hf_repo", "")
    if facts is not None and (kind := facts.get("model_type", "")) != known.transformers:
        fitting = [f"model.family={name}" for name in families_of(kind)]
        why = f"{known.name}, but {repo} has model_type = {kind or 'none'} in its config.json"
        yield "model.family", why, (fitting or ["CONTRIBUTING.md says how to add a family"])[0]


def published_faults(recipe: Recipe) -> Iterator[Fault]:
    """Yield each field that is not as its publisher says, unless the user or the recipe's reason says so."""
    facts, model, repo = facts_of(recipe), recipe.architecture, recipe.find("model.hf_repo", "")
    if facts is None:
        return
    apart = list(differences(recipe, facts))
    for one in apart:
        if not one.meant:
            why = f"{spell(one.mine)}, but {repo} has {one.field} = {spell(one.theirs)} in its config.json"
            hint = f"model.{one.key}={spell(one.theirs)}, or a case whose `because` names the published value"
            yield f"model.{one.key}", why, hint
    typed = any(key.startswith("model.") and s.origin.startswith("command line") for key, s in recipe.settings.items())
    if not (apart or typed or recipe.get("proxy", bool)) and (total := size(model).total) != facts["parameters"]:
        yield "model.family", f"the model has {total:,} parameters, the files of {repo} {facts['parameters']:,}", None


def origin_of_sizes(recipe: Recipe) -> Iterator[str]:
    """Yield in sentences whether the model is as published; nothing for a proxy, or if no publisher is named."""
    repo = recipe.find("model.hf_repo", "")
    if not repo or recipe.get("proxy", bool):
        return
    if (facts := facts_of(recipe)) is None:
        yield f"not compared with {repo}: there is no published/{repo.replace('/', '--')}.json"
        return
    apart = [f"{one.key} {spell(one.mine)}, not {spell(one.theirs)}" for one in differences(recipe, facts)]
    yield f"differs from {repo}: {'; '.join(apart)}" if apart else f"as published by {repo}"
