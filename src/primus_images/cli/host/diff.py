"""`primus diff`: what changed between two releases."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from primus_images.cli.host.releases import project_here
from primus_images.cli.verb import Options, answer
from primus_images.release.diff import diff as compare, diff_page, notes
from primus_images.release.sides import files, side, target_of
from primus_images.system.issues import issues
from primus_images.terminal import Screen


@dataclass(frozen=True, kw_only=True)
class DiffOptions(Options):
    """The options of ``diff``."""

    old: str
    new: str
    project: Path | None
    store: Path | None
    markdown: bool


def diff(options: DiffOptions) -> int:
    """Compare two releases: what is inside them, and how they train."""
    project = project_here(options.project, options.store)
    if project is not None:
        project.workspace.hold()
    target = target_of(options.old) or target_of(options.new)
    old = side(options.old, project, target)
    new = side(options.new, project, target)
    if project is not None and old.layers and new.layers:
        store = project.workspace.store
        old_files = files(old, new, store)
        new_files = files(new, old, store)
        old = replace(old, parts={**old.parts, "files": old_files})
        new = replace(new, parts={**new.parts, "files": new_files})
    packages = {**new.parts.get("packages", {}), **new.release.components}
    gpus = new.release.gpus or (target_of(options.new),)
    difference = compare(old, new, issues(packages, gpus))
    if options.markdown:
        text = notes(difference)
    else:
        text = diff_page(difference, Screen.of())
    return answer(options, asdict(difference), [text])
