"""Names of GPU architectures: how they appear in files and paths, and which code runs on which GPU."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from primus.yamlfile import read_values

_TABLE = cast("dict[str, Any]", read_values(Path(__file__).with_name("archs.yaml")).data)
# EF_AMDGPU_MACH of e_flags → processor.
MACH: Mapping[int, str] = {int(number, 16): name for number, name in _TABLE["mach"].items()}
# A generic processor's code runs on each of these.
_GENERIC: Mapping[str, Sequence[str]] = _TABLE["generic"]

# Longest first: in MIOpen's names digits of the compute unit count follow the arch directly (gfx942130, gfx90a6e).
_NAME = "|".join(sorted(set(MACH.values()), key=lambda n: (-len(n), n)))
_ENTRY = r"(gfx[0-9a-f]+(?:(?:-[0-9]+)*-generic)?|amdgcnspirv)((?::[a-z]+[+-])*)$"


def in_path(path: str) -> tuple[str, ...]:
    """Return the architectures in a path, in order. ``gfx94X``, a family, stands for gfx942."""
    if "gfx" not in path:
        return ()
    return tuple(dict.fromkeys(re.findall(_NAME, re.sub("gfx94[xX]", "gfx942", path))))


def in_entry_id(entry: str) -> str | None:
    """Return the target of a bundle's entry (``hip-amdgcn-amd-amdhsa--gfx942:xnack-`` → ``gfx942:xnack-``) or None."""
    if entry.startswith("host"):
        return None
    match = re.search(_ENTRY, entry)
    return match[0] if match else None


def of_flags(flags: int, abi: int) -> str:
    """Return the target of an AMDGPU ELF with these ``e_flags`` and this ABI version, with required features."""
    name = MACH.get(flags & 0xFF, f"unknown mach {flags & 0xFF:#x}")
    if abi >= 2:  # Two bits each since code object V4: 0 unsupported, 1 any, 2 off, 3 on.
        for feature, bits in (("sramecc", flags >> 10 & 3), ("xnack", flags >> 8 & 3)):
            if bits >= 2:
                name += f":{feature}{'+' if bits == 3 else '-'}"
    return name


def runs_on(targets: Iterable[str], arch: str) -> bool:
    """Whether code for one of ``targets`` runs on a GPU of ``arch``.

    Instinct GPUs have ECC memory and, by default, XNACK off. Code that requires the opposite is not loaded. SPIR-V is
    compiled when it is loaded.
    """
    for target in targets:
        name, _, features = target.partition(":")
        if name == "amdgcnspirv" and arch.startswith("gfx"):
            return True
        fits = name == arch or arch in _GENERIC.get(name, ())
        if fits and not {"xnack+", "sramecc-"} & set(features.split(":")):
            return True
    return False
