"""A Primus experiment → the recipe that trains the same, with every difference named."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from primus.compat.merge import Merged
from primus.compat.presets import neutral, put
from primus.compat.tables import flavors, preset
from primus.compat.translate import Translation, translate_all
from primus.compat.words import Given, spelt
from primus.errors import InputError
from primus.recipes import load
from primus.recipes.backends import backend as known_backend
from primus.recipes.schema import backend_rules, model_rules
from primus.recipes.setting import Value
from primus.yamlfile import Scalar

_RANKS = 8


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A merged experiment file, the recipe of its model, and the settings that its model adds to that recipe."""

    merged: Merged
    recipe: str
    settings: Mapping[str, Scalar]

    @property
    def backend(self) -> str:
        """The backend that trains the experiment."""
        return self.merged.framework

    @property
    def effective(self) -> dict[str, Value]:
        """Key → value, as Primus merges them."""
        return {key: one.value for key, one in self.merged.keys.items()}

    @property
    def least_nodes(self) -> int:
        """The smallest number of nodes, with eight GPUs each, that its parallel degrees fit."""
        keys = {kind: key for kind, key in known_backend(self.backend).degrees.items() if kind != "replicas"}
        given = self.effective
        degree = {kind: _degree(given, key if key in given else key.rpartition(".")[2]) for kind, key in keys.items()}
        product, experts = degree["tp"] * degree["pp"] * degree["cp"], degree["ep"] * degree["pp"]
        ranks = math.lcm(_RANKS, product, experts)
        # torchtitan computes in less than float32 only if ranks remain to shard the weights over.
        whole = known_backend(self.backend).sharded_precision and ranks == degree["tp"] * degree["pp"]
        return ranks * (2 if whole else 1) // _RANKS

    def translated(self, more: Sequence[Given] = ()) -> Translation:
        """Translate the file's keys, overridden by ``more``, to settings of the recipe."""
        keys = dict(self.merged.keys)
        for one in more:
            put(keys, one.key, one)
        done = translate_all(self.backend, list(keys.values()), neutral(self.backend))
        done.settings = {**self.settings, **done.settings}
        done.choices.setdefault("precision", "bf16")
        for key in self._as_the_recipe(done):
            del done.settings[key]
        done.left_out += [f"{one}: the last value is used, as by Primus" for one in self.merged.repeated]
        named = {one.given.key for one in done.unmapped}
        for key in self.merged.absent:
            if key not in named:
                done.left_out.append(f"{key}: {self.merged.source} does not have this key and would refuse the file")
        return done

    def placed(self, error: InputError, done: Translation) -> InputError:
        """Return ``error``, which is about a setting, with the key of Primus and its place in the file instead."""
        setting = str(error.where).removeprefix("command line: ").partition("=")[0]
        key = done.sources.get(setting, "")
        if key not in self.merged.keys:
            return error
        return InputError(f"{key}: {error.message}", where=self.merged.keys[key].where, hint=error.hint)

    def _as_the_recipe(self, done: Translation) -> list[str]:
        """Return the settings from presets that equal the recipe's own values in all of its cases.

        The imported recipe does not need to repeat them.
        """
        recipe = load.read(load.find(self.recipe))
        facts = {"backend": self.backend, "mode": "pretrain", "precision": done.choices["precision"], "proxy": "false"}
        cases = [
            case.settings
            for case in recipe.cases
            if all(choice not in facts or facts[choice] in words for choice, words in case.when.items())
        ]
        same = []
        for key in done.preset & done.settings.keys():
            found = [settings[key].value for settings in (recipe.settings, *cases) if key in settings]
            first = recipe.settings[key].value if key in recipe.settings else _default(self.backend, key)
            if all(_same(value, done.settings[key]) for value in [first, *found]):
                same.append(key)
        return same


def experiment(merged: Merged) -> Experiment:
    """Find the recipe of a merged file's model. Raises InputError if there is none."""
    model = _by_flavor(merged) if merged.framework == "torchtitan" else merged.model
    recipe, settings = preset(merged.framework, model, merged.model_place)
    return Experiment(merged=merged, recipe=recipe, settings=settings)


def _degree(given: Mapping[str, Value], key: str) -> int:
    value = given.get(key)
    return value if isinstance(value, int) and value > 0 else 1


def _default(backend: str, key: str) -> Value:
    """Return the default of a key that a recipe does not set. It is null if the library computes the default."""
    section, _, name = key.partition(".")
    rules = backend_rules(backend) if section == backend else model_rules() if section == "model" else {}
    return rules[name].default if name in rules else None


def _same(one: object, other: object) -> bool:
    """Whether two values are equal, and both or neither are booleans: 1 equals 1.0, but not true."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _by_flavor(merged: Merged) -> str:
    """Return torchtitan's model by its name and flavor, because the name of the file may say otherwise."""
    flavor = " ".join(str(merged.keys[key].value) for key in ("model.name", "model.flavor") if key in merged.keys)
    known = flavors()
    if known.get(re.sub(r"-fp8$", "", merged.model)) in (flavor, None):
        return merged.model
    return next((model for model, its in known.items() if its == flavor), flavor)


def recipe_text(source: Experiment, done: Translation, nodes: int = 1) -> str:
    """Return the text of the recipe file. Its settings are a case, so that the proxy keeps its own sizes.

    ``nodes`` is the number of nodes that the experiment was written for. Its global batch is that of all of them.
    """
    batch = next((key for key in done.settings if key.endswith(".global_batch_size")), None)
    settings, file = dict(done.settings), source.merged.path.name
    several = f", nodes: {nodes}" if nodes > 1 else ""
    case = f"  - when: {{backend: {source.backend}, proxy: false"
    apart: list[str] = []
    lines = [
        f"# Imported from {file} by `primus import-exp`, with the presets of {source.merged.source}.",
        f"uses: [{source.recipe}.yaml]",
        f"name: {spelt(source.merged.name)}",
        f"description: {spelt(f'{source.recipe} as {file} has it')}",
        f"default: {{backend: {source.backend}, mode: pretrain, precision: {done.choices['precision']}{several}}}",
    ]
    if batch is not None and isinstance(whole := settings[batch], int) and whole > 0:
        if several:
            apart = [f"{case}{several}}}", f"    {batch}: {spelt(settings.pop(batch))}"]
        if whole % nodes == 0:
            lines.append(f"# The global batch is that of one node and grows with their number: {whole} on {nodes}.")
            settings[batch] = whole // nodes
    if settings:
        lines += ["cases:", f"{case}}}", *(f"    {key}: {spelt(value)}" for key, value in settings.items())]
    lines += apart
    lines += [f"# {sentence}" for sentence in done.left_out]
    lines += [f"# not expressible: {one.given.key}: {spelt(one.given.value)}" for one in done.unmapped]
    return "\n".join(lines) + "\n"
