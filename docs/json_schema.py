"""JSON Schema of file formats, from the dataclasses that declare them
(:mod:`primus_images.schema`).
"""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, Union, cast

from primus_images.schema import fields_of, hints_of, notes_of

# A YAML editor reads 26.11 as a number where primus reads text.
_TYPES: dict[type, str | list[str]] = {
    str: ["string", "number"],
    int: "integer",
    float: "number",
    bool: "boolean",
}


def summary_of(documented: object) -> str:
    """Return the first paragraph of a docstring on one line."""
    return " ".join((documented.__doc__ or "").split("\n\n")[0].split())


def json_schema(cls: type, *, title: str) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of the file format that ``cls`` declares."""
    definitions: dict[str, Any] = {}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        "description": "Generated from the code by `nox -s docs`; do not edit.",
        **_schema(cls, definitions, {}),
        "$defs": dict(sorted(definitions.items())),
    }


def _schema(hint: Any, defs: dict[str, Any], meta: Mapping[str, Any]) -> dict[str, Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        (inner,) = (a for a in args if a is not type(None))
        # The reader accepts null for such a value, so an editor must not report it as an error.
        return {"anyOf": [_schema(inner, defs, meta), {"type": "null"}]}
    if dataclasses.is_dataclass(hint):
        cls = cast(type, hint)
        if cls.__name__ not in defs:
            defs[cls.__name__] = {}
            hints, notes, required, properties = hints_of(cls), notes_of(cls), [], {}
            for word, field in fields_of(cls).items():
                inner = _schema(hints[field.name], defs, notes[word])
                properties[word] = {"description": notes[word].get("doc", ""), **inner}
                if (
                    field.default is dataclasses.MISSING
                    and field.default_factory is dataclasses.MISSING
                ):
                    required.append(word)
            defs[cls.__name__] = {
                "type": "object",
                "description": summary_of(cls),
                "properties": properties,
                "required": required,
                "additionalProperties": False,
            }
        return {"$ref": f"#/$defs/{cls.__name__}"}
    if origin is tuple:
        least = {"minItems": meta["least"]} if meta.get("least") else {}
        return {"type": "array", "items": _schema(args[0], defs, meta), **least}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": _schema(args[1], defs, meta)}
    if origin is typing.Literal:
        return {"enum": list(args)}
    return _scalar_schema(hint, meta)


def _scalar_schema(hint: Any, meta: Mapping[str, Any]) -> dict[str, Any]:
    if meta.get("pattern"):
        return {"type": "string", "pattern": f"^(?:{meta['pattern']})$"}
    return {"type": _TYPES[hint]}
