"""Suites of Debian and Ubuntu: which ones a base takes packages from, and the apt preferences for that.

A base is built on one suite. A package written as ``name/suite`` comes from that other suite, and nothing else does
unless its own suite does not have it: a base on sid can take ROCm from experimental without taking experimental's C
library.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# Suites without pockets that are never released. A frozen archive keeps them beyond the date until which its index is
# valid.
ROLLING = ("sid", "experimental")
UBUNTU = ("noble",)
# Every supported suite → minor version of its glibc 2. A wheel that was built for a newer glibc does not work there.
GLIBC = {"bullseye": 31, "bookworm": 36, "trixie": 41, "forky": 41, "sid": 41, "experimental": 41, "noble": 39}
# Debian's architectures, and their names in the kernel and in wheels.
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


def name_of(package: str) -> str:
    """Return the package of an entry: ``librccl1/experimental`` → ``librccl1``."""
    return package.partition("/")[0]


def suites_of(suite: str, packages: Sequence[str]) -> tuple[str, ...]:
    """Return the base's own suite, then those that its packages name."""
    return tuple(dict.fromkeys((suite, *(s for p in packages if (s := p.partition("/")[2])))))


def preferences(suite: str, packages: Sequence[str]) -> str:
    """Return apt preferences with which each package comes from its suite.

    apt's own ``name/suite`` on the command line would also allow the package's dependencies to come from there.
    """
    others = suites_of(suite, packages)[1:]
    # Priority 1: apt uses such a package only if no other version of it exists.
    rules = [("*", other, 1) for other in others]
    rules += [(name, other, 990) for name, _, other in (p.partition("/") for p in packages) if other]
    return "".join(f"Package: {name}\nPin: release {_release(s)}\nPin-Priority: {n}\n\n" for name, s, n in rules)


def _release(suite: str) -> str:
    # experimental has another codename. Pockets have theirs after the suite's.
    return f"a={suite}" if suite == "experimental" else f"n={suite}*"


def upstream(version: str) -> str:
    """Return the upstream part of a Debian version: ``1:3.11.2-6+deb12u9`` → ``3.11.2``."""
    bare = version.partition(":")[2] or version
    return re.split(r"[+~]", bare.rpartition("-")[0] or bare)[0]
