"""docs/gpus.md: the table of GPU generations, and their environment with its reasons."""

from __future__ import annotations

from collections.abc import Sequence

from primus.gpus.generation import Arch, Generation, Peak, Table, Variable
from primus.release.markdown import table

__all__ = ["gpu_page"]

_NONE = "–"


def gpu_page(known: Table) -> str:
    """The page in Markdown."""
    archs = {a.arch: a for a in known.archs}
    baked = [v for v in known.environment if v.value is not None]
    unset = [v for v in known.environment if v.value is None]
    return "\n".join(
        [
            "<!-- Generated from src/primus/gpus/generations.yaml by `nox -s docs`; do not edit. -->",
            "# GPUs",
            "",
            "What is known of each GPU that has an image. A peak is dense, in TFLOP/s of one GPU; where no source has "
            "one, no MFU is printed, and neither is one for a GPU that is not in this table. A GPU is recognised by "
            "its whole product name or by its PCI device id, never by its architecture, which other products share.",
            "",
            "## Generations",
            "",
            *table(
                ("target", "GPU", "architecture", "units", "memory", "bandwidth", "FP8", "MX"),
                [_generation(g, archs[g.arch]) for g in known.generations],
            ),
            "",
            "## Peaks",
            "",
            *table(
                ("GPU", "dtype", "TFLOP/s", "source"),
                [(g.title, p.dtype, _figure(p), p.source) for g in known.generations for p in g.peaks],
            ),
            "",
            *(f"- {g.title}: {note}" for g in known.generations for note in g.notes),
            "",
            "## Architectures",
            "",
            "The two FP8 formats differ in bias: bytes of one read as the other are wrong by a factor of two, and "
            "nothing fails.",
            "",
            *table(
                ("architecture", "FP8", "largest", "MX formats", "sources", "also the architecture of"),
                [
                    (
                        a.arch,
                        a.fp8,
                        str(a.fp8_largest),
                        ", ".join(a.mx) or "none",
                        f"FP8: {a.fp8_source}. MX: {a.mx_source}",
                        ", ".join(a.others) or _NONE,
                    )
                    for a in known.archs
                ],
            ),
            "",
            "## Names and sources",
            "",
            *table(
                ("target", "names that tools print", "PCI device ids", "source of units and memory"),
                [
                    (f"`{g.name}`", ", ".join(g.names), ", ".join(g.device_ids) or _NONE, g.source)
                    for g in known.generations
                ],
            ),
            "",
            "## Environment",
            "",
            "A target file with `gpu: mi355x` bakes these in for that GPU; its own `environment` goes over them, and "
            "`docker run -e` over everything.",
            "",
            *table(
                ("variable", "value", "for", "reason", "same value in"),
                [(f"`{v.name}`", f"`{v.value}`", _for(v), v.why, _agreeing(v)) for v in _sorted(baked)],
            ),
            "",
            "## Left unset on purpose",
            "",
            *table(
                ("variable", "for", "reason", "elsewhere", "decision"),
                [(f"`{v.name}`", _for(v), v.why, _others(v), v.choice or _NONE) for v in _sorted(unset)],
            ),
            "",
            "## Where sources disagree",
            "",
            *table(
                ("variable", "for", "here", "elsewhere", "decision"),
                [
                    (f"`{v.name}`", _for(v), f"`{v.value}`", _others(v), v.choice or _NONE)
                    for v in _sorted(baked)
                    if v.disagreeing
                ],
            ),
            "",
        ]
    )


def _generation(gpu: Generation, arch: Arch) -> tuple[str, ...]:
    memory, bandwidth = f"{gpu.memory.gb:g} GB", f"{gpu.memory.tb_s:g} TB/s"
    mx = ", ".join(arch.mx) or "none"
    return f"`{gpu.name}`", gpu.title, gpu.arch, str(gpu.compute_units), memory, bandwidth, arch.fp8, mx


def _figure(peak: Peak) -> str:
    return "not known" if peak.tflops is None else f"{peak.tflops:,g}"


def _sorted(variables: Sequence[Variable]) -> list[Variable]:
    return sorted(variables, key=lambda v: (v.name, v.for_))


def _for(variable: Variable) -> str:
    return ", ".join(variable.for_)


def _agreeing(variable: Variable) -> str:
    return "; ".join(s.by for s in variable.stated if s.value == variable.value) or _NONE


def _others(variable: Variable) -> str:
    return "; ".join(f"`{s.value}`: {s.by}" for s in variable.disagreeing)
