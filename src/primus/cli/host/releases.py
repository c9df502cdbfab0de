"""Verbs about releases: published ones, and what changed between them."""

import argparse
from dataclasses import asdict, replace

from primus.cli.host.common import PROJECT, SOURCE, STORE, open_project
from primus.cli.verb import JSON, answer, flag, folder, matching, option, verb
from primus.errors import InputError
from primus.files import write_file
from primus.plan.project import Project
from primus.plan.resolve import resolve
from primus.release.diff import diff as compare, diff_page, notes, release_list, release_page
from primus.release.history import IMAGE, PINS, Release, load_history, pin_names, pins, select
from primus.release.mad import mad_files
from primus.release.sides import files, side, target_of
from primus.system.issues import issues
from primus.terminal import Screen


@matching
def _releases() -> list[str]:
    return sorted({name for release in load_history().releases for name in (release.name, release.tag)})


@verb(
    option("name", nargs="?", metavar="NAME", help="a release or tag: v26.4, primus:v25.10", complete=_releases),
    PROJECT,
    JSON,
    example="primus releases v26.4",
)
def releases(args: argparse.Namespace) -> int:
    """List the published images, or show one: versions, sizes, digests, notes.

    Values that were not published are shown as not published; they are never taken from elsewhere. Inside a project,
    the pins of versions.yaml are listed first, as the next release.
    """
    history, project = load_history(), _project(args)
    if args.name is not None:
        shown = _choices(args.name, project)
        text = "\n\n".join(release_page(release, Screen.of()) for release in shown)
    else:
        shown = (*([_pinned(project, project.versions.release)] if project else []), *history.releases)
        text = release_list(shown, Screen.of())
    answer(args, {"releases": [asdict(release) for release in shown]}, [text])
    return 0


@verb(
    *(option(name, metavar=name.upper(), help=f"the {name}er side", complete=_releases) for name in ("old", "new")),
    PROJECT,
    STORE,
    flag("--markdown", "print release notes in Markdown"),
    JSON,
    example="primus diff v26.11-cpu v26.12-cpu",
)
def diff(args: argparse.Namespace) -> int:
    """Compare two releases: components, packages, sizes, files, environment, gates, recipes and golden curves.

    Either side is an image of the store (v26.11-cpu), a release that AMD published (v26.8), the current pins
    (versions.yaml, the release's name, or v26.11-cpu before it is built), an image of a registry
    (registry.example.com/rocm/primus:v26.11-cpu), or pins of a git revision (HEAD~3, a tag, an earlier release). Files
    are compared if both images are in the store.
    """
    project = _project(args)
    if project is not None:
        project.workspace.hold()
    target = target_of(args.old) or target_of(args.new)
    old, new = (side(word, project, target) for word in (args.old, args.new))
    if old.layers and new.layers and project is not None:
        pairs = ((old, new), (new, old))
        old, new = (
            replace(one, parts={**one.parts, "files": files(one, other, project.workspace.store)})
            for one, other in pairs
        )
    gpus = new.release.gpus or (target_of(args.new),)
    known_issues = issues({**new.parts.get("packages", {}), **new.release.components}, gpus)
    difference = compare(old, new, known_issues)
    text = notes(difference) if args.markdown else diff_page(difference, Screen.of())
    answer(args, asdict(difference), [text])
    return 0


@verb(
    option("format", choices=("mad",), help="mad: models of madengine"),
    option("folder", type=folder, metavar="DIR", help="new or empty folder to write"),
    option("--target", metavar="NAME", help="target of the image (default: the only one that is built)"),
    option("--from", dest="repository", default=IMAGE, metavar="REPOSITORY", help=f"where it is (default: {IMAGE})"),
    *SOURCE,
    JSON,
    example="primus release mad MAD --target mi300x",
)
def release(args: argparse.Namespace) -> int:
    """Write what madengine needs to train the recipes of an image: models.json, a Dockerfile, and a script.

    The Dockerfile names the built image by its digest, in the repository to which it is published. In DIR,
    `madengine run --tags primus_pyt_train_llama-3.1-8b` then runs, and writes perf.csv.
    """
    project = open_project(args)
    names = [args.target] if args.target else project.target_names()
    images = project.workspace.store.images()
    built = [target for name in names if (target := resolve(project, name)).ref in images]
    if len(built) != 1:
        several = ", ".join(target.name for target in built)
        hint = "choose one with --target" if built else f"primus build {args.target or 'TARGET'}"
        what = f"images for {several}" if built else "no such image"
        raise InputError(f"the store has {what} of {project.versions.release}", hint=hint)
    if args.folder.exists() and any(args.folder.iterdir()):
        raise InputError(f"{args.folder} is not empty", hint="name a new folder")
    # podman reads no name with both a tag and a digest.
    reference = f"{args.repository}@{images[built[0].ref]['digest']}"
    files = mad_files(built[0], reference)
    for name, text in files.items():
        (args.folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_file(args.folder / name, text)
    paths = [str(args.folder / name) for name in files]
    answer(args, {"image": reference, "files": paths}, [reference, *(f"  → {path}" for path in paths)])
    return 0


def _project(args: argparse.Namespace) -> Project | None:
    # The history does not need one.
    return Project.find(args.project, store=getattr(args, "store", None)) if args.project or Project.here() else None


def _pinned(project: Project, name: str) -> Release:
    release = project.versions.release
    tag = release if name == PINS else name
    targets = [tag.removeprefix(f"{release}-")] if tag != release else project.target_names()
    return pins(project.versions, [resolve(project, target) for target in targets], tag)


def _choices(word: str, project: Project | None) -> tuple[Release, ...]:
    names = pin_names(project.versions, project.target_names()) if project else ()
    try:
        return select(load_history(), word, also=names)
    except InputError:
        bare = word.removeprefix(f"{IMAGE}:")
        if project is None or bare not in names:
            raise
        return (_pinned(project, bare),)
