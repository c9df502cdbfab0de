"""GEMM shapes from hipBLASLt's own log (``HIPBLASLT_LOG_MASK=32``): one ``hipblaslt-bench`` command line per call."""

from __future__ import annotations

import hashlib
import shlex
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from primus.errors import InputError

_PROGRAM = "hipblaslt-bench"
_NEEDED = ("-m", "-n", "-k")
# The library writes these after the sizes, so a line without them is truncated.
_WHOLE = frozenset({"--transA", "--transB", "--batch_count"})
# Options that affect the measurement, but not the product.
_MEASURING = frozenset({
    "-i", "--iters", "-j", "--cold_iters", "--rotating", "--algo_method", "--requested_solution", "--solution_index",
    "--skip_slow_solution_ratio", "--flush", "--use_gpu_timer", "--device", "-v", "--verify", "--print_kernel_info",
})  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One distinct GEMM: its options without those of the measurement, its number of calls, and its FLOPs per call."""

    options: tuple[tuple[str, str], ...]
    count: int
    flops: float

    @property
    def key(self) -> str:
        """A file name: equal for equal GEMMs."""
        return hashlib.sha256(repr(self.options).encode()).hexdigest()[:20]

    @property
    def words(self) -> list[str]:
        """The options as arguments of hipblaslt-bench."""
        return [word for name, value in self.options for word in ((name, value) if value else (name,))]

    @property
    def title(self) -> str:
        """A short description: m × n × k, and the type of the factors."""
        given = dict(self.options)
        batch = f" × {given['--batch_count']}" if given.get("--batch_count", "1") != "1" else ""
        kind = given.get("--a_type", given.get("-r", given.get("--precision", "")))
        return f"{given['-m']} × {given['-n']} × {given['-k']}{batch} {kind}".strip()


def _parsed(line: str) -> tuple[tuple[str, str], ...] | None:
    """Return the options of a logged call; None for any other line, or one that another process overwrote."""
    at = line.find(_PROGRAM)
    if at < 0 or line.count(_PROGRAM) > 1:
        return None
    try:
        words = shlex.split(line[at:])[1:]
    except ValueError:
        return None
    found: dict[str, str] = {}
    while words:
        name = words.pop(0)
        # A number can begin with a hyphen; it is a value, not an option.
        if not name.startswith("-") or name.lstrip("-")[:1].isdigit() or name in found:
            return None
        value = words[0] if words and (not words[0].startswith("-") or words[0][1:2].isdigit()) else ""
        found[name] = words.pop(0) if value else ""
    sizes = [found.get(name, "") for name in _NEEDED]
    if not all(size.isdigit() and int(size) > 0 for size in sizes) or not found.keys() >= _WHOLE:
        return None
    return tuple(sorted((name, value) for name, value in found.items() if name not in _MEASURING))


def _flops(options: tuple[tuple[str, str], ...]) -> float:
    given = dict(options)
    batch = given.get("--batch_count", "1")
    return 2.0 * int(given["-m"]) * int(given["-n"]) * int(given["-k"]) * (int(batch) if batch.isdigit() else 1)


def read_shapes(folder: Path) -> tuple[list[Shape], int]:
    """Return all distinct shapes of the logs in ``folder``, most total work first, and the number of unreadable lines.

    Raises InputError if there is no shape.
    """
    counts: Counter[tuple[tuple[str, str], ...]] = Counter()
    torn = 0
    for file in sorted(folder.glob("*.txt")):
        try:
            with file.open(encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    if not line.strip():
                        continue
                    # If the process was killed, its last line can be truncated at any point.
                    options = _parsed(line) if line.endswith("\n") else None
                    if options is None:
                        torn += 1
                    else:
                        counts[options] += 1
        except OSError as error:
            raise InputError(f"{file} cannot be read: {(error.strerror or '').lower()}") from error
    if not counts:
        raise InputError(
            f"no GEMM is logged in {folder}" + (f" ({torn} other lines)" if torn else ""),
            hint="the stage dump makes the log: primus tune gemm RECIPE --stage dump",
        )
    shapes = [Shape(options=options, count=count, flops=_flops(options)) for options, count in counts.items()]
    return sorted(shapes, key=lambda one: (-one.count * one.flops, one.options)), torn
