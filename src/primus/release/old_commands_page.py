"""docs/old-commands.md: what each command, path and key of the older documents became."""

from __future__ import annotations

import re
from collections.abc import Sequence

from primus.compat.presets import known_versions
from primus.compat.tables import Entry, commands, documented_paths, keys

__all__ = ["old_commands_page"]


def old_commands_page() -> str:
    """The page in Markdown."""
    table = commands()
    return "\n".join(
        [
            "<!-- Generated from src/primus/compat/*.yaml by `nox -s docs`; do not edit. -->",
            "# Old commands",
            "",
            "Commands of AMD's documents (Primus and PyTorch v25.10, Primus and Megatron v25.7, PyTorch training v25.2 "
            "and v25.3, Primus's examples) work inside the image as they are written. Each one says which "
            "`primus train` it stands for, and trains that. Every command line of these documents is in "
            "`tests/fixtures/old_commands.yaml`, with what it must resolve to.",
            "",
            "`--dry-run` shows the run and starts nothing. `--proxy` (or `PRIMUS_PROXY=1`) trains the small model of "
            "the same code path on any machine; without it a machine without a GPU is refused. `--gpu NAME` and "
            "`--precision NAME` choose. All of them may stand among a command's own words.",
            "",
            "## Commands",
            "",
            *_rows(
                ("command", "in /workspace", "what it does now"),
                [(f"`{name}`", what["folder"] or "–", what["does"]) for name, what in table["scripts"].items()],
            ),
            "",
            "## EXP",
            "",
            "`EXP` may be a recipe's name, a recipe, or a file of your own for Primus (below). A path of the documents "
            "needs no file: `examples/BACKEND/configs/[GPU/]MODEL-[PRECISION-]pretrain.yaml`, where a path without a "
            "precision means BF16. GPU decides only where nothing is started: settings are those of the machine's own.",
            "",
            *_rows(("backend", "model in the path", "recipe"), _stems()),
            "",
            *(f"- `{path.path}`: {path.says}." for path in documented_paths() if path.says),
            "",
            "## Options, and experiments of your own",
            "",
            "`primus import-exp FILE --out RECIPE` turns an experiment file of Primus into a recipe; `EXP=FILE` does "
            "so in passing. It imports what Primus would train with: Primus's preset, its model, and over them the "
            "file's overrides, in which a null is a value. `--effective` prints that whole configuration, each key "
            "with the place that decides it, for any model.",
            "",
            f"The defaults of Primus {', '.join(known_versions())} come with this package. `--primus VERSION` chooses "
            "one; `--primus FOLDER` reads the presets of a checkout. A file that lies in a checkout takes that one's, "
            "another file those of the newest version that has all of its keys. `--nodes N` says for how many nodes "
            "the file was written, since its global batch is theirs together; by default they are as few as its "
            "parallel degrees need.",
            "",
            "What no recipe can hold is named with its line, and refused unless `--allow-unmapped` is given. "
            "[Measured against Primus itself](benchmarks/primus-import.md) on the examples of three versions. Some "
            "differences have no key:",
            "",
            "- Data and first weights come from other random numbers, and batches in another order.",
            "- Warm-up begins above 0: step n of w warm-up steps has n ÷ (w + 1) of the rate, with Megatron-LM "
            "(n − 1) ÷ w.",
            "- The embedding has the model's vocabulary. Megatron-LM pads it to a multiple of 128 × TP.",
            "- Primus's presets choose kernels and fusions for its own build of the backends. Here the recipe and the "
            "image choose them, unless the file itself sets the key.",
            "- Mock tokens need no tokenizer, so with mock data the model's is not imported.",
            "- PyYAML reads `1e-5` as text and `yes` as true. Here `1e-5` is a number and `yes` is text.",
            "",
            "Keys and options become these. Keys of Megatron Core and torchtitan that are not here keep their names. "
            "An option whose value is null changes nothing.",
            "",
            *_rows(("backend", "key", "became", "note"), _keys()),
            "",
            "## pytorch_benchmark_report.sh",
            "",
            *_rows(("-m", "-t", "recipe", "backend"), _report()),
            "",
            *(f"- {line}: {says}." for line, says in table["report"]["says"].items()),
            "",
            "## train_fsdp.py",
            "",
            *_rows(
                ("configuration", "recipe", "sequence length"),
                [(f"`{name}`", what["recipe"], str(what["seq_len"])) for name, what in table["configs"].items()],
            ),
            "",
            "## MAD's tags",
            "",
            *_rows(
                ("tag", "recipe", "backend"),
                [(f"`{name}`", what["recipe"], what["backend"]) for name, what in table["tags"].items()],
            ),
            "",
            "## Libraries of pytorch_benchmark_setup.sh",
            "",
            *_rows(
                ("library", "here"),
                [(name, what.get("because", "looked for")) for name, what in table["setup"].items()],
            ),
            "",
        ]
    )


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
    needs = [f"only beside {' or '.join(entry.needs)}"] if entry.needs else []
    return target, "; ".join([*values, *needs, *([entry.because] if entry.because else [])])


def _report() -> list[tuple[str, str, str, str]]:
    table = commands()["report"]
    return [
        (name, mode, what["recipe"], what["backends"][kind])
        for name, what in table["models"].items()
        for mode, kind in table["modes"].items()
        if kind in what["backends"]
    ]


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines]
