"""Debian suites: which ones a base takes packages from, and what apt must be told so that it does.

A base stands on one suite. A package written as ``name/suite`` comes from that other suite, and nothing else does
unless its own suite lacks it: a base on sid may take ROCm from experimental without taking experimental's C library.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# Without pockets and never released; an archive frozen at some day keeps them past the date their index is valid to.
ROLLING = ("sid", "experimental")
# Debian's architectures, and the names that the kernel and wheels have for them.
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


def name_of(package: str) -> str:
    """The package of an entry: ``librccl1/experimental`` → ``librccl1``."""
    return package.partition("/")[0]


def suites_of(suite: str, packages: Sequence[str]) -> tuple[str, ...]:
    """The base's own suite first, then those its packages name."""
    return tuple(dict.fromkeys((suite, *(s for p in packages if (s := p.partition("/")[2])))))


def preferences(suite: str, packages: Sequence[str]) -> str:
    """apt preferences under which each package comes from its suite.

    apt's own ``name/suite`` on the command line would also let what the package needs come from there.
    """
    others = suites_of(suite, packages)[1:]
    # Priority 1: apt takes such a package only where no other version of it exists.
    rules = [("*", other, 1) for other in others]
    rules += [(name, other, 990) for name, _, other in (p.partition("/") for p in packages) if other]
    return "".join(f"Package: {name}\nPin: release {_release(s)}\nPin-Priority: {n}\n\n" for name, s, n in rules)


def _release(suite: str) -> str:
    # experimental's codename is another word; pockets carry their own after the suite's.
    return f"a={suite}" if suite == "experimental" else f"n={suite}*"


def upstream(version: str) -> str:
    """The upstream part of a Debian version: ``1:3.11.2-6+deb12u9`` → ``3.11.2``."""
    bare = version.partition(":")[2] or version
    return re.split(r"[+~]", bare.rpartition("-")[0] or bare)[0]
