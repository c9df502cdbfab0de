"""docs/old-commands.md: the translation of each command, path and key of older documents."""

from __future__ import annotations

import re

from primus.compat.presets import known_versions
from primus.compat.tables import Entry, commands, documented_paths, keys
from primus.release.markdown import table


def old_commands_parts() -> dict[str, list[str]]:
    """Return the name of each generated part of the page → its lines."""
    known = commands()
    return {
        "commands": table(
            ("command", "in /workspace", "what it does now"),
            [(f"`{name}`", what["folder"] or "–", what["does"]) for name, what in known["scripts"].items()],
        ),
        "models": table(("backend", "model in the path", "recipe"), _stems()),
        "paths": [f"- `{path.path}`: {path.says}." for path in documented_paths() if path.says],
        "versions": [", ".join(known_versions())],
        "keys": table(("backend", "key", "translation", "note"), _keys()),
        "report": table(("-m", "-t", "recipe", "backend"), _report()),
        "report-notes": [f"- {line}: {says}." for line, says in known["report"]["says"].items()],
        "configurations": table(
            ("configuration", "recipe", "sequence length"),
            [(f"`{name}`", what["recipe"], str(what["seq_len"])) for name, what in known["configs"].items()],
        ),
        "tags": table(
            ("tag", "recipe", "backend"),
            [(f"`{name}`", what["recipe"], what["backend"]) for name, what in known["tags"].items()],
        ),
        "libraries": table(
            ("library", "here"), [(name, what.get("because", "used")) for name, what in known["setup"].items()]
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
    known = commands()["report"]
    return [
        (name, mode, what["recipe"], what["backends"][kind])
        for name, what in known["models"].items()
        for mode, kind in known["modes"].items()
        if kind in what["backends"]
    ]
