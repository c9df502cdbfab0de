"""docs/old-commands.md: the translation of each command, path and key of older documents."""

from __future__ import annotations

import re
from collections.abc import Sequence

from primus.compat.presets import known_versions
from primus.compat.tables import Entry, commands, documented_paths, keys

__all__ = ["old_commands_page"]


def old_commands_page() -> str:
    """Return the page in Markdown."""
    table = commands()
    return "\n".join(
        [
            "<!-- Generated from src/primus/compat/*.yaml by `nox -s docs`; do not edit. -->",
            "# Commands of older documents",
            "",
            "Commands of AMD's documents (Primus and PyTorch v25.10, Primus and Megatron v25.7, PyTorch training v25.2 "
            "and v25.3, Primus's examples) work unchanged inside the image. Each one prints the equivalent "
            "`primus train` command and runs it. For example, on any machine:",
            "",
            "```sh",
            "EXP=examples/megatron/configs/llama3.1_8B-pretrain.yaml primus compat run_pretrain.sh --proxy",
            "```",
            "",
            "`tests/fixtures/old_commands.yaml` contains every command line of these documents, with its expected "
            "translation.",
            "",
            "These options can be added anywhere among a command's own options:",
            "",
            "- `--dry-run` (or `PRIMUS_DRY_RUN=1`) shows the run and starts nothing.",
            "- `--proxy` (or `PRIMUS_PROXY=1`) trains a small model with the same code on any machine. Without it, a "
            "machine without a GPU is refused.",
            "- `--gpu NAME` (or `PRIMUS_GPU`) and `--precision NAME` override the GPU and the precision.",
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
            "`EXP` is the name of a recipe, a recipe file, a [Primus experiment](#experiment-files-and-options), "
            "or a path of the documents: `examples/BACKEND/configs/[GPU/]MODEL-[PRECISION-]pretrain.yaml`. Such a "
            "path does not need to exist. Without a precision, it means BF16. The machine's own GPU determines the "
            "settings; the GPU in the path is used only with `--dry-run` on a machine without a GPU.",
            "",
            *_rows(("backend", "model in the path", "recipe"), _stems()),
            "",
            *(f"- `{path.path}`: {path.says}." for path in documented_paths() if path.says),
            "",
            "## Experiment files and options",
            "",
            "`primus import-exp FILE --out RECIPE` converts a Primus experiment file to a recipe. With `EXP=FILE`, a "
            "command converts the file and trains the result. The conversion merges the file as Primus does: the "
            "preset, the model, and the file's overrides, in which null is a value. `--effective` prints the merged "
            "configuration, with the place that sets each key, for any model.",
            "",
            f"The defaults of Primus {', '.join(known_versions())} are included. `--primus VERSION` selects one of "
            "them, and `--primus FOLDER` reads the presets of a checkout. By default, a file in a checkout uses the "
            "presets of that checkout, and any other file those of the newest version that has all of its keys. "
            "`--nodes N` is the number of nodes that the file was written for, because its global batch is that of all "
            "nodes. The default is the smallest number that its parallel degrees fit.",
            "",
            "A key that no recipe can express is an error that names its line. `--allow-unmapped` leaves such keys "
            "out. The [comparison with Primus itself](benchmarks/primus-import.md) covers the examples of three "
            "versions. These differences do not depend on a key:",
            "",
            "- Data and initial weights use other random numbers, and batches come in another order.",
            "- Warm-up starts above 0: step n of w warm-up steps uses n ÷ (w + 1) of the learning rate. Megatron-LM "
            "uses (n − 1) ÷ w.",
            "- The embedding has the size of the model's vocabulary. Megatron-LM pads it to a multiple of 128 × TP.",
            "- Primus's presets choose kernels and fusions for Primus's own build of the backends. Here, the recipe "
            "and the image choose them, unless the file sets the key.",
            "- Mock data needs no tokenizer, so the model's tokenizer is not imported with it.",
            "- PyYAML reads `1e-5` as text and `yes` as true. Here, `1e-5` is a number and `yes` is text.",
            "",
            "The following table lists how keys and options are translated. Keys of Megatron Core and torchtitan that "
            "it does not list keep their names. An option with the value null has no effect.",
            "",
            *_rows(("backend", "key", "translation", "note"), _keys()),
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
                [(name, what.get("because", "used")) for name, what in table["setup"].items()],
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
    needs = [f"only together with {' or '.join(entry.needs)}"] if entry.needs else []
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
