"""docs/gpus.md, and the generated parts of docs/old-commands.md."""

from __future__ import annotations

import re

from primus.compat.commands import documented_paths
from primus.compat.translate import Entry, keys
from primus.compat.translate import table as compat_table
from primus.gpus.generation import Arch, Generation, Peak, Table, Variable
from primus.release.markdown import section, table

_NONE = "–"


def gpu_page(gpus: Table) -> str:
    """Return the page in Markdown."""
    archs = {arch.arch: arch for arch in gpus.archs}
    variables = sorted(gpus.environment, key=lambda v: (v.name, v.for_))
    baked = [v for v in variables if v.value is not None]
    lines = [
        "<!-- Generated from src/primus/gpus/generations.yaml by `nox -s docs`; do not edit. -->",
        "# GPUs",
        "",
        "The GPUs that have an image. Peaks are dense, in TFLOP/s of one GPU. If no source gives a peak, or a GPU "
        "is not in this table, no MFU is printed. A GPU is identified by its full product name or its PCI device "
        "id, never by its architecture, which other products share.",
        "",
        *section(
            "Generations",
            ("target", "GPU", "architecture", "units", "memory", "bandwidth", "FP8", "MX"),
            [_generation(gpu, archs[gpu.arch]) for gpu in gpus.generations],
        ),
        *section(
            "Peaks",
            ("GPU", "dtype", "TFLOP/s", "source"),
            [(gpu.title, p.dtype, _figure(p), p.source) for gpu in gpus.generations for p in gpu.peaks],
        ),
        *(f"- {gpu.title}: {note}" for gpu in gpus.generations for note in gpu.notes),
        "",
        *section(
            "Architectures",
            ("architecture", "FP8", "largest", "MX formats", "sources", "also the architecture of"),
            [
                (a.arch, a.fp8, a.fp8_largest, ", ".join(a.mx) or "none", f"FP8: {a.fp8_source}. MX: {a.mx_source}",
                 ", ".join(a.others) or _NONE)
                for a in gpus.archs
            ],
            "The two FP8 formats have different exponent biases. Bytes of one format read as the other are wrong by a "
            "factor of two, without an error.",
        ),
        *section(
            "Names and sources",
            ("target", "names that tools print", "PCI device ids", "source of units and memory"),
            [
                (f"`{gpu.name}`", ", ".join(gpu.names), ", ".join(gpu.device_ids) or _NONE, gpu.source)
                for gpu in gpus.generations
            ],
        ),
        *section(
            "Environment",
            ("variable", "value", "for", "reason", "same value in"),
            [(f"`{v.name}`", f"`{v.value}`", ", ".join(v.for_), v.why, _agreeing(v)) for v in baked],
            "The image of a target file with `gpu: mi355x` sets the variables for that GPU. The target's own "
            "`environment` overrides them, and `docker run -e` overrides everything.",
        ),
        *section(
            "Left unset on purpose",
            ("variable", "for", "reason", "elsewhere", "decision"),
            [
                (f"`{v.name}`", ", ".join(v.for_), v.why, _others(v), v.choice or _NONE)
                for v in variables
                if v.value is None
            ],
        ),
        *section(
            "Where sources disagree",
            ("variable", "for", "here", "elsewhere", "decision"),
            [
                (f"`{v.name}`", ", ".join(v.for_), f"`{v.value}`", _others(v), v.choice or _NONE)
                for v in baked
                if v.disagreeing
            ],
        ),
    ]  # fmt: skip
    return "\n".join(lines)


def _generation(gpu: Generation, arch: Arch) -> tuple[str, ...]:
    memory, bandwidth = f"{gpu.memory.gb:g} GB", f"{gpu.memory.tb_s:g} TB/s"
    mx = ", ".join(arch.mx) or "none"
    return f"`{gpu.name}`", gpu.title, gpu.arch, str(gpu.compute_units), memory, bandwidth, arch.fp8, mx


def _figure(peak: Peak) -> str:
    return "not known" if peak.tflops is None else f"{peak.tflops:,g}"


def _agreeing(variable: Variable) -> str:
    return "; ".join(s.by for s in variable.stated if s.value == variable.value) or _NONE


def _others(variable: Variable) -> str:
    return "; ".join(f"`{s.value}`: {s.by}" for s in variable.disagreeing)


def old_commands_parts() -> dict[str, list[str]]:
    """Return the name of each generated part of the page → its lines."""
    tables = compat_table("commands")
    return {
        "commands": table(
            ("command", "in /workspace", "what it does now"),
            [(f"`{name}`", what["folder"] or "–", what["does"]) for name, what in tables["scripts"].items()],
        ),
        "models": table(("backend", "model in the path", "recipe"), _stems()),
        "paths": [f"- `{path.path}`: {path.says}." for path in documented_paths() if path.says],
        "keys": table(("backend", "key", "translation", "note"), _keys()),
        "report": table(("-m", "-t", "recipe", "backend"), _report()),
        "report-notes": [f"- {line}: {says}." for line, says in tables["report"]["says"].items()],
        "configurations": table(
            ("configuration", "recipe", "sequence length"),
            [(f"`{name}`", what["recipe"], str(what["seq_len"])) for name, what in tables["configs"].items()],
        ),
        "tags": table(
            ("tag", "recipe", "backend"),
            [(f"`{name}`", what["recipe"], what["backend"]) for name, what in tables["tags"].items()],
        ),
        "libraries": table(
            ("library", "here"), [(name, what.get("because", "used")) for name, what in tables["setup"].items()]
        ),
    }


def _stems() -> list[tuple[str, str, str]]:
    rows = []
    for what in documented_paths():
        stem = what.path.rpartition("/")[2].removesuffix("-pretrain.yaml")
        if what.gpu is None and not re.search(r"-(BF16|FP8|MXFP8)$", stem):
            more = ", ".join(f"{key}={value}" for key, value in what.settings.items())
            rows.append((what.backend, f"`{stem}`", what.recipe + (f" with {more}" if more else "")))
    return rows


def _keys() -> list[tuple[str, str, str, str]]:
    everywhere = keys("every")
    rows = [("all", f"`{key}`", *_became(entry)) for key, entry in everywhere.items()]
    for backend in ("megatron", "torchtitan"):
        rows += [
            (backend, f"`{key}`", *_became(entry)) for key, entry in keys(backend).items() if key not in everywhere
        ]
    return rows


def _became(entry: Entry) -> tuple[str, str]:
    target = f"`--{entry.choice}`" if entry.choice else f"`{entry.to}`" if entry.to else "left out"
    values = [
        f"{word} → {'nothing' if value is None else str(value).lower()}" for word, value in (entry.values or {}).items()
    ]
    needs = [f"only together with {' or '.join(entry.needs)}"] if entry.needs else []
    return target, "; ".join([*values, *needs, *([entry.because] if entry.because else [])])


def _report() -> list[tuple[str, str, str, str]]:
    report = compat_table("commands")["report"]
    return [
        (name, mode, what["recipe"], what["backends"][kind])
        for name, what in report["models"].items()
        for mode, kind in report["modes"].items()
        if kind in what["backends"]
    ]
