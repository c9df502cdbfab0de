"""All generated files of the repository, from one function, so that --check and writing cannot disagree."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from primus.errors import InputError
from primus.gpus.table import load_table
from primus.plan.project import Project
from primus.plan.resolve import resolve, resolve_all
from primus.plan.target import Target
from primus.release.backend_keys import backend_keys
from primus.release.faults_page import faults_page, input_faults_page
from primus.release.gate_record import load_gate_records, lock_mark
from primus.release.gates_page import gates_page
from primus.release.gpu_page import gpu_page
from primus.release.gpu_results_page import gpu_results_page
from primus.release.history import History, load_history
from primus.release.inputs import Inputs
from primus.release.markdown import table
from primus.release.memory_page import memory_page
from primus.release.models_page import models_page
from primus.release.old_commands_page import old_commands_parts
from primus.release.primus_import_page import primus_import_page
from primus.release.published import Published
from primus.release.show import page
from primus.release.sizes import CHANNEL, estimates, load_sizes, sizes_page
from primus.release.slurm_events_page import fleet_page, slurm_events_page
from primus.release.timing_pages import assembly_page, benchmark_page, launcher_page, turbo_page
from primus.schema import json_schema
from primus.terminal import bytes_text
from primus.versions.components import Versions

_RESULTS = "benchmarks/results"
_OLD_COMMANDS = "docs/old-commands.md"
_GENERATIONS = "benchmarks/results/generations.json"


def generated(project: Path) -> dict[str, str]:
    """Return path in the repository → text, for every generated file."""
    here = Project.find(project)
    targets = resolve_all(here, here.target_names())
    locks = [one.lock for one in targets if one.lock]
    files = {
        "docs/schemas/versions.json": _json(json_schema(Versions, title="versions.yaml: the file of pins")),
        "docs/schemas/image.json": _json(json_schema(Target, title="images/<target>.yaml: the contents of one image")),
        "docs/schemas/releases.json": _json(json_schema(History, title="the published releases")),
        "docs/schemas/release_inputs.json": _json(json_schema(Inputs, title="the inputs of the published images")),
        "docs/schemas/published.json": _json(json_schema(Published, title="the figures that source documents publish")),
        "docs/releases.md": page(load_history()),
        "docs/gpus.md": gpu_page(load_table()),
        "docs/models.md": models_page(),
        "README.md": _filled(project, "README.md", {"targets": _targets(project)}),
    }
    if (project / _OLD_COMMANDS).exists():
        files[_OLD_COMMANDS] = _filled(project, _OLD_COMMANDS, old_commands_parts())
    files |= backend_keys(project, here.versions, locks, here.workspace.files)
    if (
        page_of_gates := _from_result(project, _GENERATIONS, partial(gates_page, load_gate_records(project)))
    ) is not None:
        files["docs/gates.md"] = page_of_gates
    released = [name for name in here.target_names() if CHANNEL in here.target(name).channels]
    if found := estimates(project, resolve_all(Project(project, channel=CHANNEL), released)):
        files["docs/sizes.md"] = sizes_page(found, load_sizes())
    for results in sorted((project / _RESULTS).glob("*.json")):
        page_of = _page_of(results.stem)
        if page_of and (text := _from_result(project, f"{_RESULTS}/{results.name}", page_of)) is not None:
            files[f"docs/benchmarks/{results.stem}.md"] = text
    return files


def _page_of(result: str) -> Callable[[Any], str] | None:
    """Return what makes the page of a result, chosen by its name or the end of its name, or None."""
    return None if result in _WITHOUT_PAGE else _PAGES.get(result) or _PAGES.get(result.rpartition("-")[2])


def _from_result(project: Path, name: str, make: Callable[[Any], str]) -> str | None:
    """Return the page that ``make`` creates from a result, or None if there is no result."""
    path = project / name
    if not path.exists():
        return None
    try:
        return make(json.loads(path.read_text(encoding="utf-8")))
    except (json.JSONDecodeError, KeyError, TypeError, IndexError) as error:
        hint = "run the command in its field `command` to create it again"
        raise InputError(f"not a benchmark result: {error}", where=name, hint=hint) from None


def stale(project: Path) -> tuple[str, ...]:
    """Return the paths of generated files that are missing or out of date."""

    def current(path: Path) -> str | None:
        return path.read_text(encoding="utf-8") if path.exists() else None

    return tuple(name for name, text in generated(project).items() if current(project / name) != text)


def write(project: Path) -> tuple[str, ...]:
    """Write the files that are out of date. Returns their paths."""
    files = generated(project)
    names = stale(project)
    for name in names:
        path = project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files[name], encoding="utf-8")
    return names


def _filled(project: Path, name: str, parts: Mapping[str, Sequence[str]]) -> str:
    """Return the text of a written page with new lines between each comment that names a part and the next ``end``."""
    text = (project / name).read_text(encoding="utf-8")
    for part, lines in parts.items():
        begin, end = f"<!-- {part} -->\n", "<!-- end -->"
        head, found, rest = text.partition(begin)
        _, closed, tail = rest.partition(end)
        if not found or not closed:
            raise InputError(f"the markers {begin.strip()} and {end} are missing", where=name)
        text = head + begin + "\n".join([*lines, ""]) + end + tail
    return text


def _targets(root: Path) -> list[str]:
    records = load_gate_records(root)
    rows = []
    for name in Project(root).target_names():
        for channel in Project(root).target(name).channels:
            resolved = resolve(Project(root, channel=channel), name)
            lock, preview = resolved.lock, resolved.choice.preview
            fresh = lock is not None and not resolved.stale
            fetched = lock.distinct if lock else ()
            files = (f"{len(fetched)}", f"{sum(f.size for f in fetched) / 1e6:,.0f} MB") if lock else ("–", "–")
            status = "locked" if fresh else "stale lock" if lock else "not locked yet"
            record = records.get(name, {"channel": None, "lock": None})
            image = ("–", "not checked yet")
            if lock is not None and (record["channel"], record["lock"]) == (channel, lock_mark(resolved.lock_path)):
                failed = [gate["gate"] for gate in record["gates"] if not gate["passed"]]
                size = bytes_text(sum(layer["bytes"] for layer in record["layers"]))
                image = (size, f"fails {', '.join(failed)}" if failed else f"all {len(record['gates'])} pass")
            rows.append((f"`{name}`", channel, *files, *image, f"{status}{f'; preview: {preview}' if preview else ''}"))
    return table(("target", "channel", "files in the lock", "size of the files", "image", "gates", "status"), rows)


def _json(data: object) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


_WITHOUT_PAGE = {"healthy-gpu"}  # linked from docs/validation.md, though its name ends like that of a run on GPUs
_PAGES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "engine": benchmark_page,
    "assembly": assembly_page,
    "faults": faults_page,
    "fleet": fleet_page,
    "gpu": gpu_results_page,
    "import": primus_import_page,
    "input-faults": input_faults_page,
    "launcher": launcher_page,
    "memory": memory_page,
    "slurm-events": slurm_events_page,
    "turbo": turbo_page,
}
