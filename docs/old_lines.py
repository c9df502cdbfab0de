"""docs/old-lines.md: what each line of the five older documents does here.

The page is made from the data that tests/unit/compat/test_old_lines.py and test_old_commands.py
run.
"""

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from docs.site.published import Cell, load_published, outcomes
from primus_images.compat.commands import requested
from primus_images.release.diff import section

_DATA = Path(__file__).resolve().parents[1] / "tests" / "fixtures"
COMMANDS: list[dict[str, Any]] = yaml.safe_load(
    (_DATA / "old_commands.yaml").read_text(encoding="utf-8")
)
LINES: dict[str, Any] = yaml.safe_load((_DATA / "old_lines.yaml").read_text(encoding="utf-8"))
# Document → its title, and its sources in docs/site/published.yaml.
_DOCUMENTS = {
    "primus-examples-readme.md": ("The README of Primus's examples", "quick_start"),
    "primus-megatron-v25.7.rst": ("Primus and Megatron-LM v25.7", "megatron_v25_7"),
    "primus-pytorch-v25.10.rst": ("Primus and PyTorch v25.10", "pytorch_v25_10"),
    "pytorch-training-v25.2.md": ("PyTorch training v25.2", "pytorch_v25_2"),
    "pytorch-training-v25.3.rst": ("PyTorch training v25.3", "pytorch_v25_3"),
}
_HEAD = ("line", "the document", "here", "what it does")
_KINDS = ("tuned", "asks", "refused")


def kind_of(entry: dict[str, Any]) -> str:
    """Return the name of an entry's row under ``kinds``, or ``resolves`` if it trains."""
    if "served" in entry:
        return str(entry["served"])
    return next((kind for kind in _KINDS if kind in entry), "resolves")


def cells() -> tuple[Cell, ...]:
    """Return the batches that the five documents publish."""
    sources = {source for _, source in _DOCUMENTS.values()}
    return tuple(cell for cell in load_published().cells if cell.source in sources)


def spoken(entry: dict[str, Any]) -> tuple[str, list[str], dict[str, str]]:
    """Return script, its words, and the environment of a line: what a shell makes of it."""
    line = re.sub(r"\\\n\s*", " ", entry.get("spelt", entry["command"])).split("|&")[0]
    words = shlex.split(line)
    given = dict(entry.get("given", {}))
    while words and re.match(r"[A-Z_]+=", words[0]):
        name, _, value = words.pop(0).partition("=")
        given[name] = value
    if words[0] == "torchrun":
        start = next(number for number, word in enumerate(words) if word.endswith(".py"))
        ranks = next(word for word in words if word.startswith("--nproc"))
        given["WORLD_SIZE"] = ranks.partition("=")[2]
        words = words[start:]
    elif words[0] in ("bash", "python"):
        words = words[1:]
    return words[0], words[1:], given


def text() -> str:
    """Return the page."""
    answers = Counter(_answer(entry)[0].partition(":")[0] for entry in COMMANDS)
    answers.update(row["here"] for row in LINES["promises"])
    counts = (
        f"{answers['as printed']} work as printed, {answers['translated']} translated, and "
        f"{answers['in part']} in part"
    )
    lines = [
        "<!-- Generated from tests/fixtures/old_commands.yaml, tests/fixtures/old_lines.yaml and "
        "docs/site/published.yaml by `nox -s docs`; do not edit. -->",
        "# Each line of older documents",
        "",
        f"The five documents have {len(COMMANDS)} command lines and settings, "
        f"{len(LINES['promises'])} promises, and {len(cells())} published batches. A test runs "
        "each of them, and this page is made from its data. Of lines and promises, "
        f"{counts}.",
        "",
        "- **As printed**: what the document says happens where the document types it.",
        "- **Translated**: another line, or none, has that result. It is named.",
        "- **In part**: something is missing because of a server, a GPU or the host.",
        "",
        "[Commands of older documents](../src/primus_images/compat/README.md) explains options and "
        "differences. Without a GPU, `--proxy` trains a small model by each line that trains.",
        "",
    ]
    for document, (title, source) in _DOCUMENTS.items():
        lines += section(title, _HEAD, list(_rows(document)))
        lines += section(
            f"{title}: promises",
            _HEAD,
            [
                (str(row["line"]), _code(row["says"]), _here(row), row.get("does", "the same"))
                for row in LINES["promises"]
                if row["document"] == document
            ],
        )
        lines += section(f"{title}: batches", _BATCHES, list(_batches(source)))
    return "\n".join(lines)


_BATCHES = ("recipe", "backend", "precision", "GPU", "nodes", "published", "here")


def _batches(source: str) -> Iterator[tuple[str, ...]]:
    chosen = tuple(cell for cell in cells() if cell.source == source)
    for outcome in outcomes(chosen):
        cell = outcome.cell
        published = [str(value) for value in (cell.batch, cell.global_batch) if value]
        here = "the same"
        if outcome.differing:
            here = cell.note or "another batch"
        yield (
            cell.recipe,
            cell.backend,
            cell.precision,
            outcome.gpu,
            str(cell.nodes),
            " of ".join(published) or "–",
            here,
        )


def _rows(document: str) -> Iterator[tuple[str, ...]]:
    for entry in COMMANDS:
        if entry["document"] == document:
            here, does = _answer(entry)
            yield str(entry["line"]), _code(entry.get("spelt", entry["command"])), here, does


def _answer(entry: dict[str, Any]) -> tuple[str, str]:
    """Return how a command line is answered, and what it does."""
    kind = kind_of(entry)
    if kind != "resolves":
        row = LINES["kinds"][kind]
        return _here(row), row["does"]
    script, words, given = spoken(entry)
    command = shlex.join(["primus", *requested(script, words, given).arguments()])
    if script.endswith("run_slurm_pretrain.sh"):
        submitted = command.replace("primus train", "primus launch slurm", 1)
        return "translated", f"`{submitted}` on a login node; in a job, as printed"
    if script == "madengine":
        return "translated", f"`{command}`; on the host, `primus release mad` makes MAD's files"
    return "as printed", f"`{command}`"


def _here(row: dict[str, Any]) -> str:
    if "of" in row:
        return f"in part: {row['of']}"
    return str(row["here"])


def _code(words: str) -> str:
    """Return words as code in a cell of a table."""
    plain = re.sub(r"\\?\s*\n\s*", " ", words).replace("|", "\\|")
    return f"`{plain}`"
