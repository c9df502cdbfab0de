"""``docs/benchmarks/``: what was timed on one machine, as pages; every figure in them stands in the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from primus.release.markdown import table

__all__ = ["assembly_page", "benchmark_page", "launcher_page", "turbo_page"]

_RESULTS = "benchmarks/results"
_BUILDERS = "both builders in one run, turn by turn, on the same files"


def benchmark_page(result: Mapping[str, Any]) -> str:
    """The page about one benchmark run; every figure in it stands in the result."""
    work = result["workload"]
    title = "Engine against BuildKit" + (" (quick run: no result)" if result["quick"] else "")
    return "\n".join(
        [
            *_head(result, "engine", title),
            f"- Synthetic graph: {work['components']} components, each one {work['blob_megabytes']} MB file of random "
            f"bytes and {work['small_files_per_component']} small files; a folder of recipes; no base image",
            f"- A child process starts with its parent's peak memory: figures below "
            f"{result['memory_floor_megabytes']:g} MB would mean nothing",
            *_table(result),
        ]
    )


def assembly_page(result: Mapping[str, Any]) -> str:
    """The page about one image's assembly; every figure in it stands in the result."""
    sizes = {name: value / 1e9 for name, value in result["sizes"].items()}
    return "\n".join(
        [
            *_head(result, f"{result['target']}-assembly", f"Assembly of {result['target']} against `docker build`"),
            f"- Both start with every file on disk, the base imported and the {result['sizes']['wheels']} wheels "
            f"({sizes['wheel_bytes']:.2f} GB) there, one built from source among them if the image has one. Both lay "
            "out the same wheels and compile their bytecode, ours but for tests that libraries bring; "
            "neither compiles kernels. `docker build` "
            "sees the wheels through a bind mount and "
            "runs one `pip install --no-index --no-deps`",
            f"- Ours leaves {result['sizes']['layers']} compressed layers, {sizes['compressed_bytes']:.2f} GB "
            f"({sizes['unpacked_bytes']:.2f} GB unpacked), ready to push; `docker build` leaves "
            f"{sizes['docker_bytes']:.2f} GB unpacked and compresses when it pushes",
            "- Peak memory is of one more run each: ours with all it started, theirs the daemon with all it started",
            *_table(result),
        ]
    )


def launcher_page(result: Mapping[str, Any]) -> str:
    """The page about how fast training starts; every figure in it stands in the result."""
    heads = ("what", "primus train", "torchtitan alone", "difference", "bar", "met")
    rows = [
        [
            row["name"], *(_figure(row.get(key), "s") for key in ("ours", "bare", "overhead")), _bar(row),
            ("yes" if row["met"] else "**no**") if "met" in row else "–",
        ]
        for row in result["rows"]
    ]  # fmt: skip
    return "\n".join(
        [
            *_head(result, "launcher", "Starting a training run", "in one run in the `cpu` image, turn by turn"),
            f"- `{result['commands']['ours']}` against `{result['commands']['bare']}`, on the same configuration and "
            "both from the start of the command until the last rank enters torchtitan's `Trainer.__init__` and logs "
            "`Starting job`, at the time which that line says. Both are ended then",
            "- The difference is that of the two runs of one turn; its median is judged",
            "",
            *table(heads, rows),
            "",
        ]
    )


def _head(result: Mapping[str, Any], source: str, title: str, how: str = _BUILDERS) -> list[str]:
    machine, load = result["machine"], result["load_average"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return [
        f"<!-- Generated from {_RESULTS}/{source}.json by `nox -s docs`; do not edit. -->",
        f"# {title}",
        "",
        f"Measured on {result['date']} by `{result['command']}`: {how}; medians, with the fastest and the slowest run "
        "in brackets.",
        "",
        f"- Machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB; {machine['system']}, "
        f"Linux {machine['kernel']}, Python {machine['python']}",
        f"- Versions: {versions}",
        f"- Load average before {_load(load['before'])}, after {_load(load['after'])}",
    ]


def _table(result: Mapping[str, Any]) -> list[str]:
    return [
        "",
        "| what | ours | BuildKit | ours ÷ BuildKit | bar | met |",
        "|---|---|---|---|---|---|",
        *(_row(row) for row in result["rows"]),
        "",
    ]


def _row(row: Mapping[str, Any]) -> str:
    unit = row["unit"]
    met = ("yes" if row["met"] else "**no**") if "met" in row else "–"
    ratio = f"{row['ratio']:.2f}×" if "ratio" in row else "–"
    cells = [row["name"], _figure(row.get("ours"), unit), _figure(row.get("buildkit"), unit), ratio]
    return "| " + " | ".join([*cells, _bar(row), met]) + " |"


def _figure(summary: Mapping[str, Any] | None, unit: str) -> str:
    if summary is None:
        return "–"
    digits = 0 if unit == "MB" else 3 if summary["median"] < 1 else 2
    low, high = f"{summary['min']:.{digits}f}", f"{summary['max']:.{digits}f}"
    return f"{summary['median']:.{digits}f} {unit} ({low}–{high}, n={summary['repeats']})"


def _bar(row: Mapping[str, Any]) -> str:
    bar = row.get("bar")
    if not bar:
        return "–"
    if "ratio" in bar:
        return f"≤ {bar['ratio']:g}× BuildKit"
    if "times" in bar:
        seen = f" ({_figure(row[bar['of']], row['unit'])}; is {row['value']:.2f}×)" if "value" in row else ""
        return f"≤ {bar['times']:g}× one target in the same turns{seen}"
    return f"≤ {bar['seconds']:g} s" if "seconds" in bar else f"≤ {bar['megabytes']:g} MB"


def _load(values: Sequence[float]) -> str:
    return " / ".join(f"{v:.2f}" for v in values)


def turbo_page(result: Mapping[str, Any]) -> str:
    """The page about optimizations measured one beside the other; every figure in it stands in the result."""
    host = result["host"]
    runs = [run for run in result["results"] if run["kind"] == "speed"]
    rows = [
        (
            f"`{name}`", str(len(mine)), f"{_median([r['tokens_per_second'] for r in mine]):,.0f}",
            f"{min(r['slowest'] for r in mine):,.0f}–{max(r['fastest'] for r in mine):,.0f}",
            f"{max(r['memory_gib'] for r in mine):.1f}", ", ".join(mine[0]["turbo"]) or "none",
        )
        for name in dict.fromkeys(run["name"] for run in runs)
        if (mine := [run for run in runs if run["name"] == name and run["passed"]])
    ]  # fmt: skip
    head = ("run", "processes", "tokens/s/GPU", "slowest to fastest step", "GiB", "optimizations")
    bars = [
        (one["name"], one["over"], f"{one['ratio']:.3f}", f"{one['bar']:.2f}", "yes" if one["met"] else "no")
        for one in result["ratios"]
    ]
    kernels = [(f"`{one['case']}`", "yes" if one["passed"] else "no", _figures(one)) for one in result["kernels"]]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(result["versions"].items()))
    environment = ", ".join(f"`{name}={value}`" for name, value in host["environment"].items())
    return "\n".join(
        [
            "<!-- Generated by `nox -s docs` from benchmarks/results; do not edit. -->",
            "",
            f"# {result.get('title', 'Optimizations on two H200s')}",
            "",
            result["what"],
            "",
            f"{result['date']}, {len(host['gpus'])} × {host['gpus'][0]}, Python {result['python']}, {versions}. "
            f"Set: {environment}.",
            "",
            *table(head, rows),
            "",
            result.get(
                "compared",
                "Tokens per second are the median over processes of each process's median step. All runs see the same "
                "text and the same number of tokens per optimizer step.",
            ),
            "",
            *table(("ratio", "over", "measured", "bar", "met"), bars),
            "",
            *(f"- {note}" for note in result["notes"]),
            "",
            *(["## Kernels on the GPU", "", *table(("case", "right", "figures"), kernels), ""] if kernels else []),
            "```sh",
            *result["commands"],
            "```",
            "",
        ]
    )


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _figures(one: Mapping[str, Any]) -> str:
    """The numbers of one kernel's case in a line."""
    shown = [f"{key} {value:g}" for key, value in one.items() if isinstance(value, float) and key != "seconds"]
    off = one.get("off", {})
    shown += (
        [f"{key} off by {value:.2g}" for key, value in off.items() if isinstance(value, float)]
        if isinstance(off, dict)
        else []
    )
    return ", ".join(shown) or str(one.get("error", ""))[:120]
