"""`primus release`: an image for other tools."""

from dataclasses import dataclass
from pathlib import Path

from primus_images.cli.host.common import SourceOptions, open_project
from primus_images.cli.verb import Options, answer
from primus_images.errors import InputError
from primus_images.files import write_file
from primus_images.plan.project import Project
from primus_images.plan.resolve import ResolvedTarget, resolve
from primus_images.release.mad import mad_files
from primus_images.release.reference import require_repository


@dataclass(frozen=True, kw_only=True)
class ReleaseOptions(SourceOptions, Options):
    """The options of ``release``."""

    format: str
    folder: Path
    target: str | None
    repository: str | None


def release(options: ReleaseOptions) -> int:
    """Write what madengine needs to train the recipes of an image."""
    project = open_project(options)
    target = _built_target(project, options.target)
    if options.folder.exists() and any(options.folder.iterdir()):
        raise InputError(f"{options.folder} is not empty", hint="name a new folder")
    repository = options.repository or project.versions.image.name
    if options.repository:
        require_repository(repository, "--from")
    # podman reads no name with both a tag and a digest.
    digest = project.workspace.store.images()[target.ref]["digest"]
    reference = f"{repository}@{digest}"
    paths = []
    for name, text in mad_files(target, reference).items():
        path = options.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, text)
        paths.append(str(path))
    document = {"image": reference, "files": paths}
    return answer(options, document, [reference, *(f"  → {path}" for path in paths)])


def _built_target(project: Project, requested: str | None) -> ResolvedTarget:
    """Return the target ``requested``, or the only one whose image the store has."""
    names = [requested] if requested else project.target_names()
    images = project.workspace.store.images()
    targets = [resolve(project, name) for name in names]
    built = [target for target in targets if target.ref in images]
    pinned = project.versions.release
    if not built:
        raise InputError(
            f"the store has no such image of {pinned}",
            hint=f"primus build {requested or 'TARGET'}",
        )
    if len(built) > 1:
        listed = ", ".join(target.name for target in built)
        raise InputError(
            f"the store has images for {listed} of {pinned}", hint="choose one with --target"
        )
    return built[0]
