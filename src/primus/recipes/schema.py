"""Which keys a recipe may hold and of which type. The backend's part is read from the backend's own source.

Libraries declare their configuration as dataclasses. Their source is parsed, not imported: importing it loads
torch, which takes seconds, and a typing mistake deserves its answer at once.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from primus.recipes.backends import Declared, backend
from primus.recipes.model import WORDS, Value

__all__ = ["RECIPE", "Rule", "backend_rules", "dataclass_rules", "model_rules"]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What one key accepts: type names (``int``, ``str``, ``list`` ...), or one of ``choices``. Empty: anything."""

    types: frozenset[str]
    choices: tuple[str, ...] = ()

    def objection(self, value: Value) -> str | None:
        """Why ``value`` is not accepted, as the end of a sentence; None when it is."""
        if self.choices and isinstance(value, str):
            return None if value in self.choices else f"must be one of {', '.join(self.choices)}, not {value!r}"
        given = "None" if value is None else type(value).__name__
        accepted = self.types | ({"int"} if "float" in self.types else frozenset())
        accepted |= {"list"} if "tuple" in accepted else frozenset()
        if given in accepted or not self.types:
            return None
        named = " or ".join(sorted(WORDS.get(name, name) for name in self.types))
        return f"must be {named}, not {value!r}"


def _rule(kind: str, *choices: str) -> Rule:
    return Rule(types=frozenset({kind}), choices=choices)


_TOLERANCES = (
    "first_loss_tolerance", "loss_drop", "grad_norm_jump", "repeat_tolerance", "resume_tolerance",
    "accumulation_tolerance", "layout_tolerance", "precision_tolerance", "throughput", "throughput_tolerance",
)  # fmt: skip

RECIPE: Mapping[str, Rule] = {
    "name": _rule("str"),
    "description": _rule("str"),
    "ranks": _rule("int"),
    "assets.tokenizer": _rule("str"),
    "assets.corpus": _rule("str"),
    "data.column": _rule("str"),
    "validation.resume_at": _rule("int"),
    "validation.accumulation": _rule("int"),
    "validation.warmup_steps": _rule("int"),
    **{f"validation.{name}": _rule("float") for name in _TOLERANCES},
}


def model_rules() -> Mapping[str, Rule]:
    """Keys below ``model.``: the fields of :class:`primus.recipes.architecture.Architecture`."""
    source = _source(Declared(package="primus", file="recipes/architecture.py", name="Architecture", under=""))
    return dataclass_rules(source or "", "Architecture")


@cache
def backend_rules(name: str) -> tuple[Mapping[str, Rule], tuple[str, ...]]:
    """Keys of a backend, without its name in front, and the sections that cannot be judged on this machine.

    A section is one whose library is not installed here; "" stands for the backend's whole.
    """
    rules: dict[str, Rule] = {}
    unjudged: list[str] = []
    for declared in backend(name).schema:
        source = _source(declared)
        prefix = f"{declared.under}." if declared.under else ""
        if source is None:
            unjudged.append(prefix)
            continue
        rules.update({prefix + key: rule for key, rule in dataclass_rules(source, declared.name).items()})
    return rules, tuple(unjudged)


def _source(declared: Declared) -> str | None:
    spec = find_spec(declared.package)
    for location in (spec.submodule_search_locations or []) if spec else []:
        file = Path(location) / declared.file
        if file.is_file():
            return file.read_text(encoding="utf-8")
    return None


def dataclass_rules(source: str, root: str) -> dict[str, Rule]:
    """The fields of dataclass ``root`` in Python ``source``, nested dataclasses with dotted names.

    Base classes that stand in the same source come before the class; others are declared apart.
    """
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    rules: dict[str, Rule] = {}

    def walk(name: str, prefix: str) -> None:
        for base in classes[name].bases:
            if isinstance(base, ast.Name) and base.id in classes:
                walk(base.id, prefix)
        for field in classes[name].body:
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            key = f"{prefix}{field.target.id}"
            if isinstance(field.annotation, ast.Name) and field.annotation.id in classes:
                walk(field.annotation.id, f"{key}.")
                continue
            types: set[str] = set()
            choices: list[str] = []
            anything = _read(field.annotation, types, choices)
            rules[key] = Rule(types=frozenset() if anything else frozenset(types), choices=tuple(choices))

    walk(root, "")
    return rules


_PLAIN = {"str", "int", "float", "bool", "list", "tuple"}


def _read(annotation: ast.expr, types: set[str], choices: list[str]) -> bool:
    """Note what ``annotation`` accepts; True when it holds a type that no YAML value can be judged by."""
    match annotation:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _read(left, types, choices) | _read(right, types, choices)
        case ast.Constant(value=None):
            types.add("None")
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            types.add("None")
            return _read(inner, types, choices)
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=several)):
            judged = [_read(item, types, choices) for item in several]  # all of them: each notes its type
            return any(judged)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            items: Iterable[ast.expr] = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            choices.extend(str(item.value) for item in items if isinstance(item, ast.Constant))
            types.add("str")
        case ast.Subscript(value=ast.Name(id=name)) | ast.Name(id=name):
            types.add(name.lower())
            return name.lower() not in _PLAIN
        case _:
            return True
    return False
