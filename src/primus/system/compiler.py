"""The C and C++ compiler that training needs: Triton and torch.compile compile small files and load the result."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path


def missing(environment: Mapping[str, str], *, gpu: bool) -> str:
    """Return what a job that compiles lacks here, as a sentence; empty if it lacks nothing.

    Programs are found as Triton (for a ``gpu``) and PyTorch's inductor (for a CPU) find them.
    """
    if not compiler(environment, gpu=gpu):
        names, variable = ("neither gcc nor clang", "CC") if gpu else ("no g++", "CXX")
        return f"there is {names} on this machine, and {variable} names no other compiler"
    if not (header := headers() / "Python.h").is_file():
        return f"Python's headers are not on this machine: {header}"
    return ""


def compiler(environment: Mapping[str, str], *, gpu: bool) -> str | None:
    """Return the compiler that Triton (for a ``gpu``) or inductor (for a CPU) calls; None if there is none."""
    asked = environment.get("CC" if gpu else "CXX")
    names = (asked,) if asked else ("gcc", "clang") if gpu else ("g++",)
    path = environment.get("PATH", os.defpath)
    return next((found for name in names if (found := shutil.which(name, path=path))), None)


def headers() -> Path:
    """Return the folder in which Triton looks for Python.h."""
    scheme = sysconfig.get_default_scheme()
    # Debian's own scheme names a folder below /usr/local, which does not contain it.
    return Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"])
