"""The pages in ``docs/benchmarks/`` about timings on one machine. Every figure comes from a committed result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from primus.release.markdown import measured_on, met, table

_RESULTS = "benchmarks/results"
_BUILDERS = "both builders in one run, alternating, on the same files"


def benchmark_page(result: Mapping[str, Any]) -> str:
    """Return the page that compares the engine with BuildKit."""
    work = result["workload"]
    title = "The engine compared with BuildKit" + (" (quick run: no result)" if result["quick"] else "")
    return "\n".join(
        [
            *_head(result, "engine", title),
            f"- Synthetic graph: {work['components']} components, each one {work['blob_megabytes']} MB file of random "
            f"bytes and {work['small_files_per_component']} small files; a folder of recipes; no base image",
            f"- A child process starts with its parent's peak memory, so figures below "
            f"{result['memory_floor_megabytes']:g} MB are meaningless",
            *_table(result),
        ]
    )


def assembly_page(result: Mapping[str, Any]) -> str:
    """Return the page that compares the assembly of one image with `docker build`."""
    sizes = {name: value / 1e9 for name, value in result["sizes"].items()}
    return "\n".join(
        [
            *_head(
                result, f"{result['target']}-assembly", f"Assembly of {result['target']} compared with `docker build`"
            ),
            f"- Both start with every file on disk: the imported base and {result['sizes']['wheels']} wheels "
            f"({sizes['wheel_bytes']:.2f} GB), including any that was built from source. Both install the same wheels "
            "and compile their bytecode; ours leaves out the tests of libraries. Neither compiles kernels. "
            "`docker build` reads the wheels through a bind mount and runs one `pip install --no-index --no-deps`",
            f"- Ours creates {result['sizes']['layers']} compressed layers, {sizes['compressed_bytes']:.2f} GB "
            f"({sizes['unpacked_bytes']:.2f} GB unpacked), ready to push. `docker build` creates "
            f"{sizes['docker_bytes']:.2f} GB unpacked, and compresses them when it pushes",
            "- Peak memory is measured in one more run each, including all child processes; for `docker build`, it is "
            "that of the daemon",
            *_table(result),
        ]
    )


def launcher_page(result: Mapping[str, Any]) -> str:
    """Return the page about the startup time of training."""
    heads = ("what", "primus train", "torchtitan alone", "difference", "bar", "met")
    rows = [
        [row["name"], *(_figure(row.get(key), "s") for key in ("ours", "bare", "overhead")), _bar(row), met(row)]
        for row in result["rows"]
    ]
    return "\n".join(
        [
            *_head(result, "launcher", "Startup of a training run", "in one run in the `cpu` image, alternating"),
            f"- `{result['commands']['ours']}` compared with `{result['commands']['bare']}`, with the same "
            "configuration. Time is measured from the start of the command until the last rank enters torchtitan's "
            "`Trainer.__init__` and logs `Starting job`; the time stamp of that line counts. Both are stopped then",
            "- The difference is between two consecutive runs; the bar applies to its median",
            "",
            *table(heads, rows),
            "",
        ]
    )


def _head(result: Mapping[str, Any], source: str, title: str, how: str = _BUILDERS) -> list[str]:
    load = result["load_average"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return [
        f"<!-- Generated from {_RESULTS}/{source}.json by `nox -s docs`; do not edit. -->",
        f"# {title}",
        "",
        f"Measured on {result['date']} by `{result['command']}`: {how}. Figures are medians, with the fastest and the "
        "slowest run in parentheses.",
        "",
        measured_on(result["machine"]),
        f"- Versions: {versions}",
        f"- Load average before {_load(load['before'])}, after {_load(load['after'])}",
    ]


def _table(result: Mapping[str, Any]) -> list[str]:
    return [
        "",
        *table(("what", "ours", "BuildKit", "ours ÷ BuildKit", "bar", "met"), map(_row, result["rows"])),
        "",
    ]


def _row(row: Mapping[str, Any]) -> tuple[str, ...]:
    unit = row["unit"]
    ratio = f"{row['ratio']:.2f}×" if "ratio" in row else "–"
    return row["name"], _figure(row.get("ours"), unit), _figure(row.get("buildkit"), unit), ratio, _bar(row), met(row)


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
        return f"≤ {bar['times']:g}× one target in the same rounds{seen}"
    return f"≤ {bar['seconds']:g} s" if "seconds" in bar else f"≤ {bar['megabytes']:g} MB"


def _load(values: Sequence[float]) -> str:
    return " / ".join(f"{v:.2f}" for v in values)


def turbo_page(result: Mapping[str, Any]) -> str:
    """Return the page that compares runs with different optimizations."""
    host = result["host"]
    runs = [run for run in result["results"] if run["kind"] == "speed"]
    rows = [
        (
            f"`{name}`", str(len(mine)), f"{median([r['tokens_per_second'] for r in mine]):,.0f}",
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
            *(["## Kernels on the GPU", "", *table(("case", "correct", "figures"), kernels), ""] if kernels else []),
            "```sh",
            *result["commands"],
            "```",
            "",
        ]
    )


def _figures(one: Mapping[str, Any]) -> str:
    """Return the figures of one kernel's case as one line."""
    shown = [f"{key} {value:g}" for key, value in one.items() if isinstance(value, float) and key != "seconds"]
    off = one.get("off", {})
    shown += (
        [f"{key} off by {value:.2g}" for key, value in off.items() if isinstance(value, float)]
        if isinstance(off, dict)
        else []
    )
    return ", ".join(shown) or str(one.get("error", ""))[:120]
