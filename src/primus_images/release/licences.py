"""The licences that packages declare, as SPDX expressions.

They are in the metadata of wheels, and in the copyright files of Debian. None is guessed: what
names no licence of SPDX's list, such as "BSD", is a reference to its own words (``LicenseRef-…``).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path

from license_expression import ExpressionError, get_spdx_licensing

from primus_images.gates.examined import LayerFacts
from primus_images.yamlfile import read_values

_GNU = re.compile(r"(A?GPL|LGPL|GFDL)[- ]?v?([0-9](?:\.[0-9])?)(?:\.0)?(\+|-or-later)?")
_SHORT = 60
_spdx = cache(get_spdx_licensing)


@dataclass
class Licences:
    """What packages declare.

    ``declared`` maps ``wheel NAME`` and ``deb NAME`` to expressions, ``texts`` each LicenseRef in
    them to words, and ``sources`` Debian packages to name and version of their source.
    """

    declared: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def of_wheel(self, rows: Iterable[tuple[str, str]]) -> str:
        """Return the licence in the rows of a wheel's METADATA.

        License-Expression counts first, then License, then classifiers.
        """
        fields: dict[str, list[str]] = {}
        for key, value in rows:
            fields.setdefault(key, []).append(value)
        if fields.get("License-Expression"):
            return fields["License-Expression"][0]
        names = [name for name in fields.get("License", ()) if name.upper() != "UNKNOWN"]
        if not names:
            names = [value.rpartition(" :: ")[2] for value in fields.get("Classifier", ())]
        return _all_of([self.named(name, name) for name in names])

    def of_copyright(self, text: str) -> str:
        """Return the licences of all files that a copyright file of Debian names.

        A file in another form is a reference to its words.
        """
        if not text:
            return ""
        if "copyright-format/1.0" not in text[:800]:
            return self.reference("copyright", text)
        bodies: dict[str, str] = {}
        names = []
        for stanza in re.split(r"\n\s*\n", text):
            fields = dict(re.findall(r"^([A-Za-z-]+):[ \t]*(.*(?:\n[ \t].*)*)", stanza, re.M))
            if "License" not in fields:
                continue
            name, _, body = fields["License"].partition("\n")
            if body.strip():
                bodies[name.strip().lower()] = body
            if "Files" in fields:
                names.append(name)
        return _all_of([self._of_words(name, bodies) for name in dict.fromkeys(names)])

    def _of_words(self, name: str, bodies: Mapping[str, str]) -> str:
        """Translate ``GPL-2+ or Artistic, and Expat``: `or` binds before a comma."""
        parts = []
        for part in re.split(r",\s*(?:and\s+)?", name.strip()):
            alternatives = []
            for alternative in re.split(r"\s+(?:and/or|or)\s+", part):
                names = re.split(r"\s+and\s+", alternative)
                expressions = [self.named(n, bodies.get(n.strip().lower(), n)) for n in names]
                alternatives.append(_all_of(expressions))
            parts.append(" OR ".join(alternatives))
        return _all_of(parts)

    def named(self, name: str, text: str) -> str:
        """Return the expression for a licence called ``name``, whose words are ``text``."""
        name = name.strip().partition("\n")[0].strip()
        if not name:
            return ""
        gnu = _GNU.fullmatch(name)
        if gnu:
            family, version, later = gnu.groups()
            if "." not in version and family != "GFDL":
                version = f"{version}.0"
            suffix = "or-later" if later else "only"
            return f"{family}-{version}-{suffix}"
        return licence_names().get(name.lower()) or _expression(name) or self.reference(name, text)

    def reference(self, name: str, text: str) -> str:
        """Return a reference to the words ``text``, and keep them."""
        short = re.sub(r"[^A-Za-z0-9.]+", "-", name[:_SHORT]).strip("-")
        reference = f"LicenseRef-{short}-{sha256(text.encode()).hexdigest()[:8]}"
        self.texts[reference] = text
        return reference


def licences(facts: Mapping[str, LayerFacts]) -> Licences:
    """Return what the packages in the layers declare, without those that declare nothing."""
    result = Licences()
    copyrights: dict[str, str] = {}
    for layer in facts.values():
        copyrights |= layer.copyrights
    for layer in facts.values():
        for package in layer.stated:
            if package.kind == "wheel":
                expression = result.of_wheel(package.licence)
            elif package.kind == "deb":
                result.sources[package.name] = package.source
                # The text, or the name of a package with the same text.
                text = copyrights.get(package.name, "")
                expression = result.of_copyright(copyrights.get(text, text))
            else:
                continue
            if expression:
                result.declared[f"{package.kind} {package.name}"] = expression
    return result


@cache
def _expression(text: str) -> str:
    try:
        return str(_spdx().parse(text, validate=True, strict=True))
    except ExpressionError:
        return ""


@cache
def licence_names() -> dict[str, str]:
    """Return SPDX's name of each licence by its names in small letters.

    Common names of no standard are among them.
    """
    names: dict[str, str] = dict(read_values(Path(__file__).with_name("licences.yaml")).data)
    for key in _spdx().known_symbols:
        if not key.startswith("LicenseRef"):
            names[key.lower()] = key
    return names


def _all_of(expressions: Sequence[str]) -> str:
    parts = list(dict.fromkeys(filter(None, expressions)))
    if len(parts) == 1:
        return parts[0]
    return " AND ".join(f"({part})" if " OR " in part else part for part in parts)
