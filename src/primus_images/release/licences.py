"""The licences that packages declare, as SPDX expressions.

They are in the metadata of wheels, and in the copyright files of Debian. ``licences.yaml`` has
common names and classifiers. None is guessed: what names no licence of SPDX's list, such as "BSD",
is a reference to its own words (``LicenseRef-…``).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path

from license_expression import ExpressionError, get_spdx_licensing

from primus_images.gates.examined import LayerFacts
from primus_images.versions.lock import normalised
from primus_images.yamlfile import read_values

_GNU = re.compile(r"(A?GPL|LGPL|GFDL)[- ]?v?([0-9](?:\.[0-9])?)(?:\.0)?(\+|-or-later)?")
_SHORT = 60
# What stands between two licences.
_SEVERAL = re.compile(r" *(?:/|,| and | or |&) *", re.I)
# Names of Debian's copyright files: a licence with other names in it, or with an exception.
_VARIANT = re.compile(r"(BSD-[234]-clause|Expat|MIT|ISC|zlib|Unicode)[-_ ](?!(?:and|or)\b).+", re.I)
_WITH = re.compile(r"(A?L?GPL-[0-9.]+\+?)[-, ]*(?:with[- ])?(.+?)[- ]exception.*", re.I)
# A file in free form refers to the licences that every Debian system has.
_COMMON = re.compile(r"/usr/share/common-licenses/([A-Za-z]+(?:-[0-9]+(?:\.[0-9]+)*)?)")
# A name and its abbreviation: ``GNU General Public License v3 (GPLv3)``.
_ABBREVIATED = re.compile(r"(.+) \(([^()]+)\)")
# The page of a licence, which ends with its name.
_PAGE = re.compile(
    r"https?://(?:www\.)?(?:opensource\.org/licen[cs]es?|spdx\.org/licenses|apache\.org/licenses)"
    r"/([^/]+?)(?:\.txt|\.html|\.php)?/?"
)
# SPDX's list, which takes 20 ms to read.
spdx_licensing = cache(get_spdx_licensing)


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
            text = fields["License-Expression"][0]
            return _expression(text) or self.named(text, text)
        names = [name for name in fields.get("License", ()) if name.upper() != "UNKNOWN"]
        classifiers = _licences_of(fields.get("Classifier", ()))
        # The classifiers may be clear where the field is not.
        if not names or (not _are_listed(names) and _are_listed(classifiers)):
            names = classifiers or names
        return _all_of([self.named(name, name) for name in names])

    def of_copyright(self, text: str) -> str:
        """Return the licences of all files that a copyright file of Debian names.

        A file in another form is a reference to its words.
        """
        if not text:
            return ""
        if "copyright-format/1.0" not in text[:800]:
            common = [listed_name(name) for name in dict.fromkeys(_COMMON.findall(text))]
            return _all_of(common) or self.reference("copyright", text)
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
        return listed_name(name) or self.reference(name, text)

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
                if unlisted(expression):
                    words = copyrights.get(f"wheel {package.name}", "")
                    expression = licence_in(words) or expression
            elif package.kind == "vendored":
                expression = result.of_wheel(package.licence)
                if expression:
                    owner = normalised(package.source)
                    result.declared[f"vendored {owner}/{package.name}"] = expression
                continue
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


def _licences_of(classifiers: Iterable[str]) -> list[str]:
    """Return the names of licences in classifiers, without those that only approve one."""
    names = []
    for classifier in classifiers:
        name = classifier.rpartition(" :: ")[2]
        if name not in ("OSI Approved", "DFSG approved"):
            names.append(name)
    return names


def _are_listed(names: Iterable[str]) -> bool:
    """Whether SPDX has all of these names."""
    return all(listed_name(name) for name in names)


def listed_name(name: str) -> str:
    """Return the expression of SPDX for the name of a licence; empty for what its list lacks."""
    name = " ".join(name.split()).rpartition(" :: ")[2]
    for reading in (_of_gnu, _of_list, _of_parts, _of_exception, _of_variant):
        expression = reading(name)
        if expression:
            return expression
    return ""


def _of_gnu(name: str) -> str:
    gnu = _GNU.fullmatch(name)
    if gnu is None:
        return ""
    family, version, later = gnu.groups()
    if "." not in version and family != "GFDL":
        version = f"{version}.0"
    suffix = "or-later" if later else "only"
    return f"{family}-{version}-{suffix}"


def _of_list(name: str) -> str:
    return licence_names().get(_key(name)) or _expression(name)


def _of_parts(name: str) -> str:
    """Return the licence of a name with its abbreviation, of a page, or of two names."""
    page = _PAGE.fullmatch(name)
    if page:
        return listed_name(page[1].replace("LICENSE-", "Apache-"))
    abbreviated = _ABBREVIATED.fullmatch(name)
    if abbreviated:
        short = listed_name(abbreviated[2])
        # A long name that the list lacks is explained by its abbreviation; one of another licence
        # contradicts it.
        return short if listed_name(abbreviated[1]) in ("", short) else ""
    several = _SEVERAL.split(name)
    if len(several) == 1:
        return ""
    # They may mean either or both. A policy refuses what either may be.
    parts = [listed_name(part) for part in several]
    return _all_of(parts) if all(parts) else ""


def _of_exception(name: str) -> str:
    exception = _WITH.fullmatch(name)
    if exception is None:
        return ""
    licence = listed_name(exception[1])
    words = re.sub(r"[- ][0-9.]+$", "", exception[2].lower())
    known = _names_in("exceptions").get(words)
    if licence and known:
        return _expression(f"{licence} WITH {known}") or licence
    return licence


def _of_variant(name: str) -> str:
    variant = _VARIANT.fullmatch(name)
    return licence_names().get(_key(variant[1]), "") if variant else ""


def _key(name: str) -> str:
    """Return the words that tell one name of a licence from others: ``apache 2`` of ``Apache-2.0``,
    ``The Apache License, Version 2.0`` and ``Apache2``.
    """
    text = re.sub(r"v(?:ersion)?[ .-]*(?=[0-9])", " ", name.lower())
    words = []
    for word in re.findall(r"[a-z]+|[0-9]+(?:\.[0-9]+)*|\+", text):
        if word not in ("the", "license", "licence"):
            words.append(re.sub(r"(?:\.0)+$", "", word))
    return " ".join(words)


def licence_in(text: str) -> str:
    """Return the licence whose words a text has; empty unless it is exactly one that is known."""
    words = " ".join(re.findall("[a-z0-9]+", text.lower()))
    known = []
    if "apache license version 2 0 january 2004" in words:
        known.append("Apache-2.0")
    if "permission is hereby granted free of charge to any person obtaining a copy" in words:
        known.append("MIT")
    if "redistribution and use in source and binary forms with or without modif" in words:
        clauses = "BSD-2-Clause"
        if "endorse or promote products" in words:
            clauses = "BSD-3-Clause"
        if "all advertising materials" in words:
            clauses = "BSD-4-Clause"
        known.append(clauses)
    return known[0] if len(known) == 1 else ""


def unlisted(expression: str) -> bool:
    """Whether an expression names no licence of SPDX's list, and is not in the public domain.

    What is not declared at all is unlisted, too.
    """
    names = re.findall(r"[A-Za-z0-9.+-]+", expression)
    words = [name for name in names if name not in ("AND", "OR", "WITH", "NOASSERTION")]
    for name in words:
        bare = name.removeprefix("LicenseRef-").lower()
        if bare == name.lower() or re.match(r"(public-domain|pd)(?![a-z])", bare):
            return False
    return True


@cache
def _expression(text: str) -> str:
    try:
        return str(spdx_licensing().parse(text, validate=True, strict=True))
    except ExpressionError:
        return ""


@cache
def licence_names() -> dict[str, str]:
    """Return SPDX's name of each licence by the words of its names.

    Common names of no standard are among them.
    """
    names = {_key(name): licence for name, licence in _names_in("licences").items()}
    for name in spdx_licensing().known_symbols:
        if not name.startswith("LicenseRef"):
            names[_key(name)] = name
    return names


@cache
def _names_in(part: str) -> dict[str, str]:
    """Return a part of ``licences.yaml``."""
    names: dict[str, str] = read_values(Path(__file__).with_name("licences.yaml")).data[part]
    return names


def _all_of(expressions: Sequence[str]) -> str:
    parts = list(dict.fromkeys(filter(None, expressions)))
    if len(parts) == 1:
        return parts[0]
    return " AND ".join(f"({part})" if " OR " in part else part for part in parts)
