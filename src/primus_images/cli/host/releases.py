"""`primus releases`: this project's releases, and the published images."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from primus_images.cli.verb import Options, answer
from primus_images.errors import InputError
from primus_images.plan.project import Project
from primus_images.plan.resolve import resolve
from primus_images.release.diff import release_list, release_page
from primus_images.release.history import (
    PINS,
    Release,
    load_history,
    pin_names,
    pins,
    select,
)
from primus_images.release.records import all_records, summary
from primus_images.release.sides import past_releases, side
from primus_images.release.withdrawal import Withdrawal, withdrawals
from primus_images.terminal import Screen
from primus_images.training.judge.record import Record


@dataclass(frozen=True, kw_only=True)
class ReleasesOptions(Options):
    """The options of ``releases``."""

    name: str | None
    project: Path | None


def names() -> list[str]:
    """Return the names and tags of the published releases."""
    releases = load_history().releases
    return sorted({release.name for release in releases} | {release.tag for release in releases})


def releases(options: ReleasesOptions) -> int:
    """List the releases of this project and the published images, or show one."""
    project = project_here(options.project)
    shown: tuple[Release, ...]
    if options.name is None:
        shown = load_history().releases
        if project:
            ours = (_pinned(project, project.versions.release), *past_releases(project))
            records = list(all_records(project.root / "out/validation"))
            withdrawn = withdrawals(project.root)
            shown = (*(_with_state(release, records, withdrawn) for release in ours), *shown)
        text = release_list(shown, Screen.of())
    else:
        shown = _named(options.name, project)
        text = "\n\n".join(release_page(release, Screen.of()) for release in shown)
    return answer(options, {"releases": [asdict(release) for release in shown]}, [text])


def project_here(folder: Path | None, store: Path | None = None) -> Project | None:
    """Return the project in ``folder`` or in this one, if any: the history needs none."""
    if folder or Project.here():
        return Project.find(folder, store=store)
    return None


def _with_state(
    release: Release, records: Sequence[Record], withdrawn: Mapping[str, Withdrawal]
) -> Release:
    """Return the release with its validations, and what was withdrawn of it."""
    notes = []
    for name, withdrawal in withdrawn.items():
        if name == release.tag or name.startswith(f"{release.tag}-"):
            notes.append(f"{name} was {withdrawal.sentence}.")
    validated = summary(records, release.tag)
    return replace(release, validated=validated, notes=(*notes, *release.notes))


def _named(word: str, project: Project | None) -> tuple[Release, ...]:
    try:
        return select(load_history(), word)
    except InputError:
        if project is None:
            raise
    bare = word.removeprefix(f"{project.versions.image.name}:")
    if bare in pin_names(project.versions, project.target_names()):
        release = _pinned(project, bare)
    else:
        release = side(word, project).release
    records = list(all_records(project.root / "out/validation"))
    return (_with_state(release, records, withdrawals(project.root)),)


def _pinned(project: Project, name: str) -> Release:
    release = project.versions.release
    if name in (PINS, release):
        name = release
        targets = project.target_names()
    else:
        targets = [name.removeprefix(f"{release}-")]
    return pins(project.versions, [resolve(project, target) for target in targets], name)
