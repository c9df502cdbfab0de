"""All generated files of the repository, from one function, so that --check and writing cannot disagree."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from primus.errors import InputError
from primus.gates.rules import gates
from primus.gpus.table import load_table
from primus.plan.project import Project
from primus.plan.resolve import resolve, resolve_all
from primus.plan.target import Target
from primus.release.backend_keys import backend_keys
from primus.release.gate_record import load_gate_records, lock_mark
from primus.release.history import load_history
from primus.release.markdown import table
from primus.release.models_page import models_page
from primus.release.pages import gpu_page, old_commands_parts
from primus.release.show import page
from primus.schema import json_schema
from primus.terminal import bytes_text
from primus.versions.components import Versions


def generated(root: Path) -> dict[str, str]:
    """Return path in the repository → text, for every generated file."""
    project = Project.find(root)
    targets = resolve_all(project, project.target_names())
    schemas = {
        "versions": json_schema(Versions, title="versions.yaml: the file of pins"),
        "image": json_schema(Target, title="images/<target>.yaml: the contents of one image"),
    }
    files = {
        f"docs/schemas/{name}.json": json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
        for name, schema in schemas.items()
    }
    files |= {
        "docs/releases.md": page(load_history()),
        "docs/gpus.md": gpu_page(load_table()),
        "docs/models.md": models_page(),
        "README.md": _filled(root, "README.md", {"targets": _targets(root)}),
    }
    for name, parts in {"docs/old-commands.md": old_commands_parts(), "docs/gates.md": {"gates": _gates()}}.items():
        if (root / name).exists():
            files[name] = _filled(root, name, parts)
    locks = [target.lock for target in targets if target.lock]
    files |= backend_keys(root, project.versions, locks, project.workspace.files)
    return files


def stale(root: Path) -> dict[str, str]:
    """Return path → new text of the generated files that are missing or out of date."""

    def current(path: Path) -> str | None:
        return path.read_text(encoding="utf-8") if path.exists() else None

    return {name: text for name, text in generated(root).items() if current(root / name) != text}


def write(root: Path) -> tuple[str, ...]:
    """Write the files that are out of date. Returns their paths."""
    files = stale(root)
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tuple(files)


def _filled(root: Path, name: str, parts: Mapping[str, Sequence[str]]) -> str:
    """Return the text of a written page with new lines between each comment that names a part and the next ``end``."""
    text = (root / name).read_text(encoding="utf-8")
    for part, lines in parts.items():
        begin, end = f"<!-- {part} -->\n", "<!-- end -->"
        head, opened, rest = text.partition(begin)
        _, closed, tail = rest.partition(end)
        if not opened or not closed:
            raise InputError(f"the markers {begin.strip()} and {end} are missing", where=name)
        text = head + begin + "\n".join([*lines, ""]) + end + tail
    return text


def _gates() -> list[str]:
    rules = gates().items()
    return table(
        ("gate", "what must hold"), [(name, str(rule.__doc__).partition("\n")[0].rstrip(".")) for name, rule in rules]
    )


def _targets(root: Path) -> list[str]:
    records = load_gate_records(root)
    rows = []
    for name in Project(root).target_names():
        for channel in Project(root).target(name).channels:
            resolved = resolve(Project(root, channel=channel), name)
            lock, preview = resolved.lock, resolved.choice.preview
            status = "not locked yet" if lock is None else "stale lock" if resolved.stale else "locked"
            files, image = ("–", "–"), ("–", "not checked yet")
            if lock is not None:
                files = (f"{len(lock.distinct)}", f"{sum(file.size for file in lock.distinct) / 1e6:,.0f} MB")
                record = records.get(name, {"channel": None, "lock": None})
                if (record["channel"], record["lock"]) == (channel, lock_mark(resolved.lock_path)):
                    failed = [gate["gate"] for gate in record["gates"] if not gate["passed"]]
                    size = bytes_text(sum(layer["bytes"] for layer in record["layers"]))
                    image = (size, f"fails {', '.join(failed)}" if failed else f"all {len(record['gates'])} pass")
            rows.append((f"`{name}`", channel, *files, *image, f"{status}{f'; preview: {preview}' if preview else ''}"))
    return table(("target", "channel", "files in the lock", "size of the files", "image", "gates", "status"), rows)
