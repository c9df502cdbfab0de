"""docs/models.md, docs/gpus.md, and the generated parts of docs/old-commands.md."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path

from primus.compat.commands import documented_paths
from primus.compat.translate import Entry as Translation
from primus.compat.translate import keys
from primus.compat.translate import table as compat_table
from primus.gpus.generation import Arch, Generation, Peak, Table, Variable
from primus.recipes.architecture import Architecture, readable
from primus.recipes.catalogue import Entry, entries
from primus.recipes.recipe import Recipe
from primus.recipes.resolve import resolve
from primus.recipes.setting import Choices
from primus.release.markdown import section, table
from primus.schema import build
from primus.yamlfile import read

_FILE = Path(__file__).with_name("published.yaml")
_NONE = "–"
_MODELS_INTRO = """\
Each model is one file in [recipes](../recipes). `primus list` prints the table below. `primus show NAME` prints the
resolved settings, each with its file and line. The commands name the GPU, so you can try them on any machine with
`--dry-run`. On a machine with that GPU, you can omit `--gpu`.

Every model also has a proxy: a small model with few layers and short sequences that uses the same code. `--proxy`
trains it on a CPU in seconds and needs no weights.

Batch sizes and sequence lengths come from the documents in the last column. A dash means that no document publishes
the combination, and the figure is ours. If documents disagree, the command of the newest page takes precedence over the
file that it names and over files of other dates. The section of the model then lists the figures of each document."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One document."""

    id: str
    title: str


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One published configuration: a command, or a row of the table of the document ``source``.

    ``nodes`` are machines of eight GPUs. ``batch`` counts sequences or images per GPU and forward pass, and
    ``global_batch`` those of one step over all GPUs. ``with_`` are overrides, if it is not the recipe's default.
    """

    recipe: str
    backend: str
    mode: str
    precision: str
    gpus: tuple[str, ...]
    nodes: int
    source: str
    seq_len: int | None = None
    batch: int | None = None
    global_batch: int | None = None
    with_: tuple[str, ...] = ()
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class Published:
    """published.yaml: documents and their figures."""

    sources: tuple[Source, ...]
    cells: tuple[Cell, ...]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The recipe resolved for one cell on one GPU. ``differing`` are the published figures that differ from it."""

    cell: Cell
    gpu: str
    recipe: Recipe
    differing: tuple[int, ...]


@cache
def load_published() -> Published:
    """Read the file that ships with this package."""
    return build(Published, read(_FILE, _FILE.name))


def outcomes(cells: tuple[Cell, ...] | None = None) -> Iterator[Outcome]:
    """Resolve every published cell for each of its GPUs. Raises InputError if one does not resolve."""
    for cell in load_published().cells if cells is None else cells:
        for gpu in cell.gpus:
            choices = Choices(backend=cell.backend, mode=cell.mode, precision=cell.precision, gpu=gpu, nodes=cell.nodes)
            recipe = resolve(cell.recipe, cell.with_, choices)
            # Image models have no sequence length to compare.
            figures = (recipe.seq_len if cell.seq_len else None, recipe.local_batch, recipe.global_batch)
            pairs = zip((cell.seq_len, cell.batch, cell.global_batch), figures, strict=True)
            differing = tuple(there for there, here in pairs if there is not None and there != here)
            yield Outcome(cell=cell, gpu=gpu, recipe=recipe, differing=differing)


@cache
def models_page() -> str:
    """Return docs/models.md."""
    published, cells = load_published(), tuple(outcomes())
    whole = [entry for entry in entries() if not entry.only_proxy]
    sections = [(name, list(group)) for name, group in groupby(whole, key=lambda entry: entry.recipe)]
    lines = [
        "<!-- Generated from recipes and src/primus/release/published.yaml by `nox -s docs`; do not edit. -->",
        "# Supported models",
        "",
        *_MODELS_INTRO.splitlines(),
        "",
        *_overview(sections),
        "",
    ]
    for name, group in sections:
        lines += _model_section(name, group, [o for o in cells if o.cell.recipe == name])
    return "\n".join([*lines, *_matrix(published, cells), ""])


def _overview(sections: Sequence[tuple[str, list[Entry]]]) -> list[str]:
    body = []
    for name, group in sections:
        ways = [f"{e.backend} {e.mode}: {', '.join(e.precisions)}" for e in group]
        body.append(
            (f"[{name}](#{_anchor(name)})", group[0].description, readable(group[0].size.total), "; ".join(ways))
        )
    return table(("recipe", "model", "parameters", "backends, modes, precisions"), body)


def _anchor(name: str) -> str:
    return name.replace(".", "")


def _model_section(name: str, group: Sequence[Entry], cells: Sequence[Outcome]) -> Iterator[str]:
    first = group[0]
    # Sizes are the same on every GPU, except for one published shortened run, so the first GPU's are shown.
    sample = _resolved(first, first.gpus[0], next(iter(first.precisions)))
    model = sample.architecture
    active = "" if first.size.active == first.size.total else f", {readable(first.size.active)} active per token"
    yield from (f"## {name}", "")
    yield f"{first.description}: {readable(first.size.total)} parameters{active}. {_sizes(model)}"
    if model.hf_repo:
        yield f"Hugging Face: `{model.hf_repo}`."
    yield from ("", "```sh", f"primus train {name} --proxy", "```", "")
    reasons: dict[str, list[Recipe]] = {}
    for entry in group:
        body = list(_rows(entry, cells, reasons))
        head = ("GPU", "precision", "nodes", "sequence", "per GPU", "per step", "command", "published by")
        yield from (f"### {name} with {entry.backend}, {entry.mode}", "", *table(head, body), "")
    if reasons:
        yield from (f"### {name}: missing and contradicting sources", "")
        yield from (f"- {_where(recipes)}: {because}" for because, recipes in reasons.items())
        yield ""


def _where(recipes: Sequence[Recipe]) -> str:
    """Return the runs that a reason applies to, as in ``megatron bf16, fp8 on mi325x``."""
    ways: dict[tuple[str, int], tuple[dict[str, None], dict[str, None]]] = {}
    for recipe in recipes:
        precisions, gpus = ways.setdefault((recipe.backend, recipe.get("nodes", int)), ({}, {}))
        precisions[recipe.precision] = None
        gpus[recipe.gpu] = None
    words = [
        f"{backend} {', '.join(precisions)} on {', '.join(gpus)}" + (f" × {nodes} nodes" if nodes > 1 else "")
        for (backend, nodes), (precisions, gpus) in ways.items()
    ]
    return "; ".join(words)


def _sizes(model: Architecture) -> str:
    parts = [f"{model.layers} layers", f"width {model.hidden_size}"]
    if model.family == "flux":
        parts = [f"{model.dit.double_layers} double and {model.dit.single_layers} single layers", parts[1]]
    parts.append(f"{model.heads} heads" + (f" ({model.kv_heads} of keys and values)" if model.kv_heads else ""))
    if model.mla.kv_lora_rank:
        parts[-1] = f"{model.heads} heads of latent attention"
    if model.moe.experts:
        shared = f" and {model.moe.shared_experts} shared" if model.moe.shared_experts else ""
        parts.append(f"{model.moe.experts} experts{shared}, {model.moe.top_k} active per token")
    if model.window:
        parts.append(f"a window of {model.window} tokens")
    if model.vocab_size:
        parts.append(f"vocabulary {model.vocab_size:,}")
    return ", ".join(parts)[:1].upper() + ", ".join(parts)[1:] + "."


def _resolved(entry: Entry, gpu: str, precision: str, nodes: int | None = None) -> Recipe:
    choices = Choices(backend=entry.backend, mode=entry.mode, precision=precision, gpu=gpu, nodes=nodes, proxy=False)
    return resolve(entry.recipe, (), choices)


def _rows(entry: Entry, cells: Sequence[Outcome], reasons: dict[str, list[Recipe]]) -> Iterator[tuple[str, ...]]:
    """Yield one row per precision and GPU with the recipe's number of nodes, then one per other published number."""
    several: list[tuple[str, ...]] = []
    for precision, gpus in entry.precisions.items():
        for gpu in gpus:
            way = (gpu, entry.backend, entry.mode, precision)
            mine = [o for o in cells if (o.gpu, o.cell.backend, o.cell.mode, o.cell.precision) == way]
            usual = _resolved(entry, gpu, precision)
            others = sorted({o.cell.nodes for o in mine} - {usual.get("nodes", int)})
            yield _row(entry, usual, mine, reasons)
            several += [_row(entry, _resolved(entry, gpu, precision, nodes), mine, reasons) for nodes in others]
    yield from several


def _row(entry: Entry, recipe: Recipe, cells: Sequence[Outcome], reasons: dict[str, list[Recipe]]) -> tuple[str, ...]:
    gpu, precision, nodes = recipe.gpu, recipe.precision, recipe.get("nodes", int)
    for setting in recipe.settings.values():
        if setting.because:
            reasons.setdefault(setting.because, []).append(recipe)
    same = [
        o.cell.source for o in cells if o.cell.nodes == nodes and o.cell.batch and not o.differing and not o.cell.with_
    ]
    sequence = str(recipe.seq_len) if recipe.architecture.vocab_size else _NONE
    batches = (str(recipe.local_batch), str(recipe.global_batch))
    by = ", ".join(dict.fromkeys(same)) or _NONE
    return gpu, precision, str(nodes), sequence, *batches, f"`{_command(entry, recipe)}`", by


def _command(entry: Entry, recipe: Recipe) -> str:
    choices = recipe.choices if len(recipe.knows.modes) > 1 else replace(recipe.choices, mode=None)
    return " ".join(["primus train", entry.recipe, *replace(choices, proxy=None).words()]).replace("=", " ")


def _matrix(published: Published, cells: Sequence[Outcome]) -> Iterator[str]:
    differing = sum(bool(o.differing) for o in cells)
    yield from ("## Published figures", "")
    yield (
        f"The documents publish {len(cells)} combinations of model, GPU, precision, backend and nodes. All of them "
        f"resolve: {len(cells) - differing} to the published figures, {differing} to other figures for the reason "
        "given in the model's section."
    )
    yield ""
    yield from (f"- `{source.id}`: {source.title}" for source in published.sources)
    yield ""
    head = (
        "recipe", "backend", "mode", "precision", "GPU", "nodes",
        "by", "sequence", "per GPU", "per step", "here", "note",
    )  # fmt: skip
    body = []
    for outcome in cells:
        cell, recipe = outcome.cell, outcome.recipe
        figures = [_NONE if figure is None else str(figure) for figure in (cell.seq_len, cell.batch, cell.global_batch)]
        here = f"{recipe.seq_len} × {recipe.local_batch}, {recipe.global_batch}" if outcome.differing else "same"
        if not any((cell.seq_len, cell.batch, cell.global_batch)):
            here = f"{recipe.local_batch}, {recipe.global_batch}"
        words = f"with `{' '.join(cell.with_)}`" if cell.with_ else ""
        body.append(
            (
                f"`{cell.recipe}`", cell.backend, cell.mode, cell.precision, outcome.gpu, str(cell.nodes), cell.source,
                *figures, here, "; ".join(filter(None, (words, cell.note))) or _NONE,
            )
        )  # fmt: skip
    yield from table(head, body)


def gpu_page(gpus: Table) -> str:
    """Return docs/gpus.md."""
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


def _became(entry: Translation) -> tuple[str, str]:
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
