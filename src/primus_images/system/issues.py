"""Known issues of the versions in an image, from a table with their sources."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import eq, ge, gt, le, lt
from pathlib import Path
from typing import Literal

from primus_images.gpus.table import load_table, words_for
from primus_images.schema import WrongValue, build
from primus_images.yamlfile import read

FILE = Path(__file__).with_name("known-issues.yaml")
_COMPARE = {"<": lt, "<=": le, "==": eq, ">=": ge, ">": gt}
_BOUND = r"(<=?|==|>=?)([0-9][0-9A-Za-z.+]*)"
STATUS = "var/lib/dpkg/status"


@dataclass(frozen=True, kw_only=True)
class Issue:
    """One known issue; the file explains its fields."""

    component: str
    versions: str
    with_: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()
    symptom: str
    source: str
    until: str | None
    severity: Literal["note", "refuse"] = "note"

    def __str__(self) -> str:
        end = ""
        if self.until:
            end = f"; until {self.until}"
        return f"{self.component} {self.versions}: {self.symptom} ({self.source}){end}"


@dataclass(frozen=True, kw_only=True)
class _Table:
    issues: tuple[Issue, ...]

    def __post_init__(self) -> None:
        groups: set[str] = set()
        for gpu in load_table().generations:
            groups |= words_for(gpu.name)
        for index, issue in enumerate(self.issues):
            strange = [word for word in issue.gpus if word not in groups]
            if strange:
                raise WrongValue(
                    f"{strange[0]!r} is no GPU, architecture or vendor", "issues", index, "gpus"
                )


@cache
def _table(path: Path) -> tuple[Issue, ...]:
    return build(_Table, read(path, path.name)).issues


def issues(
    versions: Mapping[str, str | None], gpus: Collection[str], path: Path | None = None
) -> list[Issue]:
    """Return the known issues of these versions of components and packages on these GPUs.

    A version may be several, as in ``2.13.0 (cpu), 2.12.0 (mi300x)``.
    """
    here = {}
    for name, version in versions.items():
        component = re.sub("[ _]", "-", name.lower())
        here[component] = version or ""
    known = []
    for issue in _table(path or FILE):
        if _has_versions(issue, here) and _has_gpu(issue, gpus):
            known.append(issue)
    return known


def _has_versions(issue: Issue, here: Mapping[str, str]) -> bool:
    """Whether all components that an issue names have versions that it concerns."""
    needed = {issue.component: issue.versions, **issue.with_}
    for name, bounds in needed.items():
        version = here.get(name, "")
        if not _matches(version, bounds):
            return False
    return True


def _has_gpu(issue: Issue, gpus: Collection[str]) -> bool:
    if not issue.gpus:
        return True
    words: set[str] = set()
    for gpu in gpus:
        words |= words_for(gpu)
    return not words.isdisjoint(issue.gpus)


def debs(status: str) -> dict[str, str]:
    """Return package → version of the text of dpkg's :data:`STATUS`."""
    return dict(re.findall(r"^Package: (\S+)\n(?:.+\n)*?Version: (\S+)", status, re.M))


def _matches(text: str, versions: str) -> bool:
    """Whether one of the versions in ``text`` is within all bounds; ``*`` has none."""
    several = [part.split(" ")[0] for part in text.split(", ") if part]
    if versions == "*":
        return bool(several)
    bounds = re.findall(_BOUND, versions)
    return any(_is_within(version, bounds) for version in several)


def _is_within(version: str, bounds: Sequence[tuple[str, str]]) -> bool:
    return all(_holds(version, sign, bound) for sign, bound in bounds)


def _holds(version: str, sign: str, bound: str) -> bool:
    if sign == "==":
        return version == bound
    numbers = _numbers(version)
    limit = _numbers(bound)
    if not numbers or not limit:
        return False
    return bool(_COMPARE[sign](numbers, limit))


def _numbers(version: str) -> list[int]:
    """Return the numbers of a version, none for another text.

    Zeros at the end do not count, nor does the epoch of a Debian package.
    """
    match = re.match(r"(?:[0-9]+:)?v?([0-9]+(?:\.[0-9]+)*?)(?:\.0)*(?![0-9.])", version)
    if match is None:
        return []
    return [int(number) for number in match[1].split(".")]
