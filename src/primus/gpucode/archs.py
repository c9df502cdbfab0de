"""Names of GPU architectures: how they appear in files and paths, and which code runs on which GPU."""

from __future__ import annotations

import re
from collections.abc import Iterable

# EF_AMDGPU_MACH of e_flags → processor. Source: "AMDGPU ELF header e_flags" in LLVM's AMDGPUUsage.
MACH = {
    0x2C: "gfx900", 0x2D: "gfx902", 0x2E: "gfx904", 0x2F: "gfx906", 0x30: "gfx908", 0x31: "gfx909", 0x32: "gfx90c",
    0x33: "gfx1010", 0x34: "gfx1011", 0x35: "gfx1012", 0x36: "gfx1030", 0x37: "gfx1031", 0x38: "gfx1032",
    0x39: "gfx1033", 0x3D: "gfx1035", 0x3E: "gfx1034", 0x3F: "gfx90a", 0x40: "gfx940", 0x41: "gfx1100",
    0x42: "gfx1013", 0x43: "gfx1150", 0x44: "gfx1103", 0x45: "gfx1036", 0x46: "gfx1101", 0x47: "gfx1102",
    0x48: "gfx1200", 0x49: "gfx1250", 0x4A: "gfx1151", 0x4B: "gfx941", 0x4C: "gfx942", 0x4E: "gfx1201",
    0x4F: "gfx950", 0x51: "gfx9-generic", 0x52: "gfx10-1-generic", 0x53: "gfx10-3-generic", 0x54: "gfx11-generic",
    0x55: "gfx1152", 0x57: "gfx1154", 0x58: "gfx1153", 0x59: "gfx12-generic", 0x5A: "gfx1251",
    0x5B: "gfx12-5-generic", 0x5F: "gfx9-4-generic", 0x22: "gfx700", 0x23: "gfx701", 0x28: "gfx801", 0x29: "gfx802",
    0x2A: "gfx803",
}  # fmt: skip
# A generic processor's code runs on each of these. Source: "AMDGPU generic processors" in LLVM's AMDGPUUsage.
_GENERIC = {
    "gfx9-4-generic": ("gfx940", "gfx941", "gfx942", "gfx950"),
    "gfx12-5-generic": ("gfx1250", "gfx1251"),
}

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
