"""The pages of models and GPUs: what the recipes resolve to on each GPU, and the table of
generations.
"""

from collections.abc import Iterator, Sequence
from functools import cache

from docs.site.published import Outcome, load_published, outcomes
from primus_images.gpus.table import Generation, Table, load_table
from primus_images.recipes.architecture import readable
from primus_images.recipes.load import Entry, entries
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.resolve import resolve
from primus_images.recipes.rules import holds
from primus_images.recipes.setting import Choices
from primus_images.release.diff import section, table

_NONE = "–"
INTRO = """\
Each model is one file in the folder `recipes`. `primus list` prints them, and `primus show NAME`
prints the resolved settings, each with its file and line. To train one, name what the row names; on
a machine with the GPU, you can omit `--gpu`, and with `--dry-run` you can try the command on any
machine:

```sh
primus train llama3.1-8b --backend megatron --precision fp8 --gpu mi355x
```

Every model also has a proxy: a small model with few layers and short sequences that uses the same
code. `--proxy` trains it on a CPU in seconds and needs no weights.

The columns of GPUs contain sequences (or images) per GPU and forward pass, and per step of all GPUs
of all nodes. Bold figures were published by one of the documents below; others are ours. If
documents disagree, the command of the newest page takes precedence over the file that it names and
over files of other dates. Below the table of a family are the reasons for figures that no document
publishes or on which documents disagree."""


@cache
def models_page() -> str:
    """Return the page of models: per family, one row for each backend, mode, precision, nodes and
    sequence.
    """
    sources, cells = load_published().sources, tuple(outcomes())
    differing = sum(bool(o.differing) for o in cells)
    families: dict[str, dict[str, list[Entry]]] = {}
    for entry in entries():
        if not entry.only_proxy:
            families.setdefault(entry.architecture.family, {}).setdefault(entry.recipe, []).append(
                entry
            )
    lines = [
        "# Supported models",
        "",
        *INTRO.splitlines(),
        "",
        f"The documents publish {len(cells)} combinations of model, GPU, precision, backend and "
        "nodes. All of them "
        f"resolve: {len(cells) - differing} to the published figures, {differing} to other "
        "figures for the reason "
        "given below the table of the model's family.",
        "",
        *(f"- `{source.id}`: {source.title}" for source in sources),
        "",
    ]
    for family, models in sorted(families.items()):
        lines += [f"## {family}", "", *(_model(name, ways[0]) for name, ways in models.items()), ""]
        reasons: dict[str, list[Recipe]] = {}
        body = [
            row
            for ways in models.values()
            for entry in ways
            for row in _rows(entry, cells, reasons)
        ]
        lines += table(
            ("recipe", "backend", "precision", "nodes", "sequence", *load_table().imaged), body
        )
        lines += ["", *(f"- {_where(recipes)}: {because}" for because, recipes in reasons.items())]
        lines += [""] if reasons else []
    return "\n".join(lines)


def _model(name: str, entry: Entry) -> str:
    model, count = entry.architecture, entry.size
    active = "" if count.active == count.total else f", {readable(count.active)} active per token"
    source = f"; `{model.hf_repo}`" if model.hf_repo else ""
    return f"- `{name}`: {entry.description}, {readable(count.total)} parameters{active}{source}"


def _rows(
    entry: Entry, cells: Sequence[Outcome], reasons: dict[str, list[Recipe]]
) -> Iterator[tuple[str, ...]]:
    """Yield the rows of one backend and mode. Its figures are sequences per GPU and per step;
    published ones are bold.

    A recipe that sets another sequence length on one GPU has a row for each length.
    """
    rows: dict[tuple[str, int, str], dict[str, str]] = {}
    ours = [
        o
        for o in cells
        if (o.cell.recipe, o.cell.backend, o.cell.mode) == (entry.recipe, entry.backend, entry.mode)
    ]
    for precision, able in entry.precisions.items():
        for gpu in filter(load_table().imaged.__contains__, able):
            mine = [o for o in ours if (o.gpu, o.cell.precision) == (gpu, precision)]
            for nodes in (None, *sorted({o.cell.nodes for o in mine})):
                choices = Choices(
                    backend=entry.backend,
                    mode=entry.mode,
                    precision=precision,
                    gpu=gpu,
                    nodes=nodes,
                )
                recipe = resolve(entry.recipe, (), choices)
                key = (
                    precision,
                    recipe.get("nodes", int),
                    str(recipe.seq_len) if recipe.architecture.vocab_size else _NONE,
                )
                if gpu in (row := rows.setdefault(key, {})):
                    continue
                for because in dict.fromkeys(
                    s.because for s in recipe.settings.values() if s.because
                ):
                    reasons.setdefault(because, []).append(recipe)
                published = any(
                    o.cell.batch and o.cell.nodes == key[1] and not o.differing and not o.cell.with_
                    for o in mine
                )
                batch = f"**{recipe.local_batch}**" if published else str(recipe.local_batch)
                row[gpu] = f"{batch}, {recipe.global_batch}" if holds(recipe) else "too large"
    for (precision, count, sequence), row in rows.items():
        figures = (row.get(gpu, _NONE) for gpu in load_table().imaged)
        yield (
            f"`{entry.recipe}`",
            f"{entry.backend} {entry.mode}",
            precision,
            str(count),
            sequence,
            *figures,
        )


def _where(recipes: Sequence[Recipe]) -> str:
    """Return the runs of a reason, as in ``llama3.1-8b megatron bf16, fp8 on mi325x``."""
    ways: dict[tuple[str, str, int], tuple[dict[str, None], dict[str, None]]] = {}
    for recipe in recipes:
        precisions, able = ways.setdefault(
            (recipe.name, recipe.backend, recipe.get("nodes", int)), ({}, {})
        )
        precisions[recipe.precision] = able[recipe.gpu] = None
    return "; ".join(
        f"{name} {backend} {', '.join(precisions)} on {', '.join(able)}"
        + (f" × {nodes} nodes" if nodes > 1 else "")
        for (name, backend, nodes), (precisions, able) in ways.items()
    )


def gpu_page(content: Table) -> str:
    """Return the page of GPUs."""
    archs = {arch.arch: arch for arch in content.archs}
    variables = sorted(content.environment, key=lambda v: (v.name, v.for_))
    lines = [
        "# GPUs",
        "",
        "The GPUs that recipes can be resolved for. Peaks are dense, in TFLOP/s of one GPU. If "
        "no source gives a peak, "
        "or a GPU is not in this table, no MFU is printed. A GPU is identified by its full "
        "product name or its PCI "
        "device id, never by its architecture, which other products share. generations.yaml has "
        "the source of each "
        "figure.",
        "",
        *section(
            "Generations",
            (
                "target",
                "GPU",
                "architecture",
                "units",
                "memory",
                "bandwidth",
                "peaks",
                "PCI device ids",
            ),
            [_generation(gpu) for gpu in content.generations],
        ),
        *(f"- {gpu.title}: {note}" for gpu in content.generations for note in gpu.notes),
        *(
            f"- {gpu.title} has no image: {gpu.no_image}."
            for gpu in content.generations
            if gpu.no_image
        ),
        "",
        *section(
            "Architectures",
            ("architecture", "FP8", "MX formats", "sources", "also the architecture of"),
            [
                (
                    a.arch,
                    a.fp8,
                    ", ".join(a.mx) or "none",
                    f"FP8: {a.fp8_source}. MX: {a.mx_source}",
                    ", ".join(a.others) or _NONE,
                )
                for a in archs.values()
            ],
            "The two FP8 formats have different exponent biases. Bytes of one format read as "
            "the other are wrong by a "
            "factor of two, without an error.",
        ),
        *section(
            "Environment",
            ("variable", "value", "for", "reason", "same value in", "elsewhere", "decision"),
            [
                (
                    f"`{v.name}`",
                    "unset" if v.value is None else f"`{v.value}`",
                    ", ".join(v.for_),
                    v.why,
                    "; ".join(s.by for s in v.stated if s.value == v.value) or _NONE,
                    "; ".join(f"`{s.value}`: {s.by}" for s in v.stated if s.value != v.value)
                    or _NONE,
                    v.choice or _NONE,
                )
                for v in variables
            ],
            "The image of a target file with `gpu: mi355x` sets the variables for that GPU. The "
            "target's own "
            "`environment` overrides them, and `docker run -e` overrides everything.",
        ),
    ]
    return "\n".join(lines)


def _generation(gpu: Generation) -> tuple[str, ...]:
    peaks = ", ".join(
        f"{p.dtype} " + ("not known" if p.tflops is None else f"{p.tflops:,g}") for p in gpu.peaks
    )
    memory, bandwidth = f"{gpu.memory.gb:g} GB", f"{gpu.memory.tb_s:g} TB/s"
    ids = ", ".join(gpu.device_ids) or _NONE
    return (
        f"`{gpu.name}`",
        gpu.title,
        gpu.arch,
        str(gpu.compute_units),
        memory,
        bandwidth,
        peaks,
        ids,
    )
