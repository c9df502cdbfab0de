"""Proof that a run asking for the catalogue's kernels compiles nothing: on the GPU that is here, or as if one were.

Kernels are looked for through the cache manager that the environment names, as any program's are; what it does not
find is compiled into an empty folder, and both Triton and that folder tell.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from primus.aot.ask import ask, ask_pretending
from primus.aot.asked import Answer
from primus.aot.catalogue import Case, Kernel
from primus.aot.gpu import Gpu
from primus.errors import CheckFailed

__all__ = ["Verdict", "baked_index", "check"]

_LAUNCHER = ".so"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was asked for where, and what of it was not there. ``launchers`` counts host stubs, which hold no kernel."""

    arch: str
    real: bool
    calls: int
    answer: Answer

    @property
    def missing(self) -> tuple[str, ...]:
        """Each kernel that had to be compiled, in a few words."""
        return tuple(f"{one.kernel} ({one.function}; {one.case})" for one in self.answer.compiled)

    @property
    def passed(self) -> bool:
        """Whether everything asked for was there and nothing failed or was made."""
        made = [name for name in self.answer.made if not name.endswith(_LAUNCHER)]
        return bool(self.answer.asked) and not (self.answer.compiled or self.answer.failures or made)

    def as_json(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        return {
            "arch": self.arch,
            "real": self.real,
            "triton": triton.__version__,
            "torch": torch.__version__,
            "calls": self.calls,
            "kernels": len(self.answer.asked),
            "missing": [asdict(one) for one in self.answer.compiled],
            "failures": list(self.answer.failures),
            "launchers": sum(name.endswith(_LAUNCHER) for name in self.answer.made),
            "passed": self.passed,
        }


def baked_index(root: Path, arch: str) -> dict[str, Any]:
    """What was compiled for ``arch`` with the Triton that is here. Raises CheckFailed where nothing was."""
    path = root / triton.__version__ / arch / "index.json"
    if not path.is_file():
        raise CheckFailed(
            f"no kernels for {arch} and Triton {triton.__version__} lie in {root}",
            hint="primus turbo compile makes them",
        )
    index: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return index


def check(cases: Sequence[Case], gpu: Gpu, *, real: bool, say: Callable[[str], None] = lambda _: None) -> Verdict:
    """Ask for every case; on a real GPU the first case of each kernel and shape is compared with plain PyTorch too."""
    compared: set[tuple[Kernel, str]] = set()

    def first(case: Case) -> bool:
        known = (case.kernel, case.shape.name) in compared
        compared.add((case.kernel, case.shape.name))
        return not known

    answer = ask(cases, compare=first, say=say) if real else ask_pretending(cases, gpu, say=say)
    return Verdict(arch=gpu.arch, real=real, calls=len(cases), answer=answer)
