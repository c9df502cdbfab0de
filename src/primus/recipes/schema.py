"""Which keys a recipe may hold and of which type. The backend's part is read from the backend's own source.

torchtitan declares its configuration as dataclasses. Their source is parsed, not imported: importing it loads
torch, which takes seconds, and a typing mistake deserves its answer at once.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from primus.recipes.model import WORDS, Value

__all__ = ["OWNED", "RECIPE", "Rule", "dataclass_rules", "torchtitan_model_rules", "torchtitan_rules"]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What one key accepts: type names (``int``, ``str``, ``list`` ...), or one of ``choices``."""

    types: frozenset[str]
    choices: tuple[str, ...] = ()

    def objection(self, value: Value) -> str | None:
        """Why ``value`` is not accepted, as the end of a sentence; None when it is."""
        if self.choices and isinstance(value, str):
            return None if value in self.choices else f"must be one of {', '.join(self.choices)}, not {value!r}"
        given = "None" if value is None else type(value).__name__
        accepted = self.types | ({"int"} if "float" in self.types else frozenset())
        if given in accepted or not self.types:
            return None
        named = " or ".join(sorted(WORDS.get(name, name) for name in self.types))
        return f"must be {named}, not {value!r}"


def _rule(kind: str, *choices: str) -> Rule:
    return Rule(types=frozenset({kind}), choices=choices)


RECIPE: Mapping[str, Rule] = {
    "name": _rule("str"),
    "description": _rule("str"),
    "model.name": _rule("str"),
    "backend": _rule("str", "torchtitan"),
    "mode": _rule("str", "pretrain"),
    "precision": _rule("str", "fp32", "bf16"),
    "ranks": _rule("int"),
    "assets.tokenizer": _rule("str"),
    "assets.corpus": _rule("str"),
    "validation.resume_at": _rule("int"),
    "validation.accumulation": _rule("int"),
    "validation.warmup_steps": _rule("int"),
    "validation.first_loss_tolerance": _rule("float"),
    "validation.loss_drop": _rule("float"),
    "validation.grad_norm_jump": _rule("float"),
    "validation.repeat_tolerance": _rule("float"),
    "validation.resume_tolerance": _rule("float"),
    "validation.accumulation_tolerance": _rule("float"),
}

# Keys of the backend that primus sets itself, with what to use instead.
OWNED: Mapping[str, str] = {
    "torchtitan.job.dump_folder": "--output",
    "torchtitan.job.config_file": "the recipe",
    "torchtitan.model.name": "model.name",
    "torchtitan.model.flavor": "model.args",
    "torchtitan.model.hf_assets_path": "assets.tokenizer",
    "torchtitan.training.dataset": "assets.corpus",
    "torchtitan.training.dataset_path": "assets.corpus",
    "torchtitan.metrics.log_freq": "nothing: every step is logged, or a lost step would not show",
    "torchtitan.metrics.disable_color_printing": "nothing: the log is read by a program",
    "torchtitan.checkpoint.initial_load_path": "--resume-from",
}


@cache
def torchtitan_rules() -> Mapping[str, Rule] | None:
    """Keys below ``torchtitan.`` at the installed version; None when torchtitan is not installed."""
    source = _source("torchtitan", "config/job_config.py")
    return dataclass_rules(source, "JobConfig") if source else None


@cache
def torchtitan_model_rules(model: str) -> Mapping[str, Rule] | None:
    """Keys below ``model.args.`` for one of torchtitan's models; None when that cannot be known here."""
    source = _source("torchtitan", f"models/{model}/model/args.py")
    return dataclass_rules(source, "TransformerModelArgs") if source else None


def _source(package: str, inner: str) -> str | None:
    spec = find_spec(package)
    for location in (spec.submodule_search_locations or []) if spec else []:
        file = Path(location) / inner
        if file.is_file():
            return file.read_text(encoding="utf-8")
    return None


def dataclass_rules(source: str, root: str) -> dict[str, Rule]:
    """The fields of dataclass ``root`` in Python ``source``, nested dataclasses with dotted names."""
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    rules: dict[str, Rule] = {}

    def walk(name: str, prefix: str) -> None:
        for field in classes[name].body:
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            key = f"{prefix}{field.target.id}"
            if isinstance(field.annotation, ast.Name) and field.annotation.id in classes:
                walk(field.annotation.id, f"{key}.")
                continue
            types: set[str] = set()
            choices: list[str] = []
            _read(field.annotation, types, choices)
            rules[key] = Rule(types=frozenset(types), choices=tuple(choices))

    walk(root, "")
    return rules


def _read(annotation: ast.expr, types: set[str], choices: list[str]) -> None:
    match annotation:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            _read(left, types, choices)
            _read(right, types, choices)
        case ast.Constant(value=None):
            types.add("None")
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            items: Iterable[ast.expr] = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            choices.extend(str(item.value) for item in items if isinstance(item, ast.Constant))
            types.add("str")
        case ast.Subscript(value=ast.Name(id=name)) | ast.Name(id=name):
            types.add(name)
        case _:
            types.clear()
