"""Checking that a run of the catalogue's kernels compiles nothing, on this machine's GPU or as if there were one.

Triton looks up kernels through the cache manager that the environment names, as in any program. A kernel that is not
found is compiled to an empty folder; both Triton's listener and that folder show it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton

from primus.aot.catalogue import Case, Kernel
from primus.aot.gpu import Gpu
from primus.aot.requested import Answer
from primus.aot.requests import request_all, request_pretending
from primus.errors import CheckFailed

_LAUNCHER = ".so"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The outcome of a check. ``real`` means that the kernels ran on a GPU; ``calls`` is the number of cases."""

    arch: str
    real: bool
    calls: int
    answer: Answer

    def with_failure(self, message: str) -> Verdict:
        """The same with one failure more."""
        return replace(self, answer=replace(self.answer, failures=(*self.answer.failures, message)))

    @property
    def missing(self) -> tuple[str, ...]:
        """A short description of each kernel that had to be compiled."""
        return tuple(f"{one.kernel} ({one.function}; {one.case})" for one in self.answer.compiled)

    @property
    def passed(self) -> bool:
        """Whether every requested kernel was found, and nothing failed or was compiled. Host stubs do not count."""
        made = [name for name in self.answer.made if not name.endswith(_LAUNCHER)]
        return bool(self.answer.requested) and not (self.answer.compiled or self.answer.failures or made)

    def as_json(self) -> dict[str, Any]:
        """Return the data for ``--json``. ``launchers`` counts host stubs, which contain no kernel."""
        return {
            "arch": self.arch,
            "real": self.real,
            "triton": triton.__version__,
            "torch": torch.__version__,
            "calls": self.calls,
            "kernels": len(self.answer.requested),
            "missing": [asdict(one) for one in self.answer.compiled],
            "failures": list(self.answer.failures),
            "launchers": sum(name.endswith(_LAUNCHER) for name in self.answer.made),
            "passed": self.passed,
        }


def baked_index(root: Path, arch: str) -> dict[str, Any]:
    """Return the index of the kernels for ``arch`` and the installed Triton. Raises CheckFailed if there is none."""
    path = root / triton.__version__ / arch / "index.json"
    if not path.is_file():
        raise CheckFailed(
            f"{root} contains no kernels for {arch} and Triton {triton.__version__}",
            hint="primus turbo compile creates them",
        )
    index: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return index


def check(cases: Sequence[Case], gpu: Gpu, *, real: bool, progress: Callable[[str], None] = lambda _: None) -> Verdict:
    """Request every case. On a real GPU, compare the first case of each kernel and shape with plain PyTorch."""
    compared: set[tuple[Kernel, str]] = set()

    def first(case: Case) -> bool:
        known = (case.kernel, case.shape.name) in compared
        compared.add((case.kernel, case.shape.name))
        return not known

    answer = (
        request_all(cases, compare=first, progress=progress)
        if real
        else request_pretending(cases, gpu, progress=progress)
    )
    return Verdict(arch=gpu.arch, real=real, calls=len(cases), answer=answer)
