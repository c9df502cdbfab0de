"""Licences as SPDX expressions, from what packages declare: metadata of wheels, and copyright files of Debian.

Nothing is guessed. A declaration that names no licence of SPDX's list, such as "BSD", becomes a reference to its own
words (``LicenseRef-…``).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path

from license_expression import ExpressionError, get_spdx_licensing

from primus.gates.examined import LayerFacts
from primus.yamlfile import read_values

_GNU = r"(A?GPL|LGPL|GFDL)[- ]?v?([0-9](?:\.[0-9])?)(?:\.0)?(\+|-or-later)?"
_SHORT = 60
_spdx = cache(get_spdx_licensing)


@dataclass
class Licences:
    """``declared`` maps ``wheel NAME`` and ``deb NAME`` to expressions, ``texts`` each LicenseRef in them to words, and
    ``sources`` Debian packages to name and version of their source.
    """

    declared: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)


def licences(facts: Mapping[str, LayerFacts]) -> Licences:
    """Return what the packages in the layers declare. A package that declares nothing is left out."""
    result = Licences()
    copyrights = {name: text for layer in facts.values() for name, text in layer.copyrights.items()}
    for item in (item for layer in facts.values() for item in layer.stated if item.kind in ("wheel", "deb")):
        if item.kind == "wheel":
            expression = _of_rows(item.licence, result.texts)
        else:
            result.sources[item.name] = item.source
            text = copyrights.get(item.name, "")
            expression = _of_copyright(copyrights.get(text, text), result.texts)
        if expression:
            result.declared[f"{item.kind} {item.name}"] = expression
    return result


def _of_rows(rows: Iterable[tuple[str, str]], texts: dict[str, str]) -> str:
    """Return the licence in the rows of a wheel's METADATA: License-Expression, else License, else classifiers."""
    fields: dict[str, list[str]] = {}
    for key, value in rows:
        fields.setdefault(key, []).append(value)
    if declared := fields.get("License-Expression"):
        return declared[0]
    words = [word for word in fields.get("License", ()) if word.upper() != "UNKNOWN"]
    words = words or [value.rpartition(" :: ")[2] for value in fields.get("Classifier", ())]
    return _all(_named(word, word, texts) for word in words)


def _of_copyright(text: str, texts: dict[str, str]) -> str:
    """Return the licences of all files, of a copyright file in Debian's format or, by reference, in any other."""
    if not text:
        return ""
    if "copyright-format/1.0" not in text[:800]:
        return _reference("copyright", text, texts)
    fields = r"^([A-Za-z-]+):[ \t]*(.*(?:\n[ \t].*)*)"
    stanzas = [dict(re.findall(fields, stanza, re.M)) for stanza in re.split(r"\n\s*\n", text)]
    licensed = [(name, whole) for s in stanzas if "License" in s for name, _, whole in [s["License"].partition("\n")]]
    bodies = {name.strip().lower(): whole for name, whole in licensed if whole.strip()}
    files = [s["License"].partition("\n")[0] for s in stanzas if "Files" in s and "License" in s]
    return _all(_words(name, bodies, texts) for name in dict.fromkeys(files))


def _words(name: str, bodies: Mapping[str, str], texts: dict[str, str]) -> str:
    """Translate ``GPL-2+ or Artistic, and Expat``: `or` binds before a comma."""

    def named(part: str) -> str:
        return _named(part, bodies.get(part.strip().lower(), part), texts)

    def alternatives(part: str) -> str:
        names = re.split(r"\s+(?:and/or|or)\s+", part)
        return " OR ".join(_all(map(named, re.split(r"\s+and\s+", n))) for n in names)

    return _all(map(alternatives, re.split(r",\s*(?:and\s+)?", name.strip())))


def _named(name: str, text: str, texts: dict[str, str]) -> str:
    name = name.strip().partition("\n")[0].strip()
    if gnu := re.fullmatch(_GNU, name):
        version = gnu[2] if "." in gnu[2] else f"{gnu[2]}.0"
        version = version if gnu[1] != "GFDL" else gnu[2]
        return f"{gnu[1]}-{version}-{'or-later' if gnu[3] else 'only'}"
    exact = _names().get(name.lower())
    return exact or (_expression(name) or _reference(name, text, texts) if name else "")


def _reference(name: str, text: str, texts: dict[str, str]) -> str:
    short = re.sub(r"[^A-Za-z0-9.]+", "-", name[:_SHORT]).strip("-")
    reference = f"LicenseRef-{short}-{sha256(text.encode()).hexdigest()[:8]}"
    texts[reference] = text
    return reference


def _expression(text: str) -> str:
    try:
        return str(_spdx().parse(text, validate=True, strict=True))
    except ExpressionError:
        return ""


@cache
def _names() -> dict[str, str]:
    names = read_values(Path(__file__).with_name("licences.yaml")).data
    return {**names, **{key.lower(): key for key in _spdx().known_symbols if not key.startswith("LicenseRef")}}


def _all(expressions: Iterable[str]) -> str:
    parts = dict.fromkeys(filter(None, expressions))
    return " AND ".join(f"({part})" if " OR " in part and len(parts) > 1 else part for part in parts)
