"""What `primus diff` compares: images of the store or a registry, pins of any git revision,
published releases.
"""

import hashlib
import io
import json
import re
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from primus_images.engine.workshop import root_of_image
from primus_images.errors import InputError, PrimusError, did_you_mean
from primus_images.gates.examined import examine_layer, observe
from primus_images.oci.layer import walk
from primus_images.oci.store import Store
from primus_images.plan.project import Project
from primus_images.plan.resolve import resolve
from primus_images.progress import Progress
from primus_images.release import golden
from primus_images.release.documents import GATES, LOCK, VALIDATION, git
from primus_images.release.history import (
    IMAGE,
    Release,
    key_of,
    load_history,
    newest_first,
    pin_names,
    pins,
    select,
    spread,
)
from primus_images.release.registry import Repository, plain_http, reference
from primus_images.sandbox.container import LayerRef
from primus_images.terminal import bytes_text
from primus_images.versions.lock import Lock, LockedFile, loads
from primus_images.versions.remotes import skopeo
from primus_images.yamlfile import flat, parse, read

Part = Mapping[str, str]
_REGISTRY = re.compile(r"(?:localhost|[^/:]+\.[^/:]+|[^/:]+(?=:[0-9]))(?::[0-9]+)?/[^:@]+[:@].+")
_PINS = "io.primus.pins."
_RECIPES = "opt/primus/recipes"
# What a comparison needs of a revision, and not the rest of the repository.
_OF_REVISION = ("versions.yaml", "images/", "recipes/", golden.FOLDER)


@dataclass(frozen=True, kw_only=True)
class Side:
    """What is known of one side. ``parts`` are name → value per section, without those that it does
    not state.

    ``curves`` is a file of golden curves, or empty. ``layers`` are name → layer, if their blobs are
    in a store.
    """

    release: Release
    parts: Mapping[str, Part] = field(default_factory=dict)
    curves: Mapping[str, Any] = field(default_factory=dict)
    layers: Mapping[str, LayerRef] = field(default_factory=dict)


def side(word: str, project: Project | None, target: str = "") -> Side:
    """Return what ``word`` names: an image of the store, a published release, pins, an image of a
    registry, a revision.

    The first of these that knows the name decides. Of pins that name no target, only those of
    ``target`` are meant, if it is not empty. Raises InputError, with what there is, if none knows
    the name.
    """
    bare = word.removeprefix(f"{IMAGE}:")
    if project is not None and bare in project.workspace.store.images():
        return _of_store(project, bare)
    if _REGISTRY.fullmatch(word):
        name, tag, digest = reference(word, "the image")
        return _of_registry(name, digest or tag)
    try:
        releases = select(load_history(), word)
    except InputError:
        if project is None:
            raise
    else:
        return Side(release=one_of(releases, word))
    names = pin_names(project.versions, project.target_names())
    plain = bare.removesuffix("-preview")
    if plain in names:
        return _of_pins(
            project, target if plain in names[:2] else plain.partition("-")[2], "versions.yaml"
        )
    revision = _of_revision(project.root, plain, target)
    if revision is not None:
        return revision
    images = sorted(project.workspace.store.images())
    published = [release.name for release in newest_first(load_history().releases)]
    near = did_you_mean(word, dict.fromkeys([*names, *images, *published]), most=3)
    pinned = names[0]
    images_text = ", ".join(images) or "no image"
    first = published[-1]
    last = published[0]
    hint = near or "primus releases lists the published ones, and git log the revisions"
    raise InputError(
        f"no release, image or git revision is called {word!r}: versions.yaml pins "
        f"{pinned}, the store has {images_text}, and {first} to {last} were published",
        hint=hint,
    )


def one_of(releases: Sequence[Release], word: str) -> Release:
    """Return the only release in ``releases``. Tags with the same published table count as one.

    Raises InputError, with the choices, if several remain.
    """
    references = {release.reference for release in releases}
    distinct = [release for release in releases if release.same_as not in references]
    if len(distinct) == 1:
        return distinct[0]
    names = [release.reference for release in distinct]
    names_text = ", ".join(names)
    example = names[-1]
    raise InputError(
        f"{word} stands for {len(names)} images: {names_text}",
        hint=f"name one, for example {example}",
    )


def files(side: Side, other: Side, store: Store) -> Part:
    """Return path → size and hash of each file in the layers that ``other`` does not share; without
    bytecode.
    """
    shared = {layer.digest for layer in other.layers.values()}
    result = {}
    for layer in (layer for layer in side.layers.values() if layer.digest not in shared):
        for member in walk(layer, store.blob_path(layer.digest)):
            if member.kind == "file" and not member.path.endswith(".pyc"):
                digest = hashlib.sha256()
                for chunk in member.chunks:
                    digest.update(chunk)
                result[member.path] = f"{member.size:,} bytes, {digest.hexdigest()[:8]}"
    return result


def target_of(word: str) -> str:
    """Return the target in the name of an image, such as v26.11-cpu; empty if there is none."""
    match = re.search(r"v[0-9.]+-([^/@]+?)(-preview)?$", word)
    if match:
        return match[1]
    return ""


def _of_pins(project: Project, target: str, origin: str) -> Side:
    targets = [resolve(project, name) for name in ([target] if target else project.target_names())]
    packages = ((f.name, f.version, t.name) for t in targets if t.lock for f in _in_image(t.lock))
    parts = {
        "packages": spread(packages),
        "downloads": {
            f"files of {t.name}": bytes_text(sum(f.size for f in t.lock.distinct))
            for t in targets
            if t.lock
        },
        "environment": spread(
            (key, value, t.name) for t in targets for key, value in t.environment.items()
        ),
        "recipes": _recipes(
            (p.stem, read(p).data) for p in sorted((project.root / "recipes").glob("*.yaml"))
        ),
    }
    name = "-".join(filter(None, (project.versions.release, target)))
    release = pins(project.versions, targets, name, origin=f"pins of {origin}")
    # An image does not tell from which folder it has its local components.
    local = {
        key_of(name) for name, item in project.versions.components.items() if item.pins[0].path
    }
    components = {
        name: "local" if name in local else version for name, version in release.components.items()
    }
    recorded = (c for t in targets for c in golden.recorded(project.root, t.name + t.choice.suffix))
    return Side(
        release=replace(release, components=components), parts=parts, curves=next(recorded, {})
    )


def _in_image(lock: Lock) -> list[LockedFile]:
    return [f for f in lock.files if f.kind != "layer" and not (f.base or "").endswith(" build")]


def commit_of(root: Path, word: str) -> str:
    """Return the commit that ``word`` names, or the last one with the release of that name; empty
    without one.
    """
    name = word.removesuffix(f"-{target_of(word)}")
    for revision in dict.fromkeys((word, name)):
        commit = git(
            root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}"
        )
        if commit:
            return commit.decode().strip()
    line = rf"""^release: ["']?{re.escape(name)}["']?( .*)?$"""
    last = git(root, "log", "-1", "--format=%H", "-G", line, "--", "versions.yaml").decode().strip()
    if not last:
        return ""
    # The last commit that touched the line wrote the next release, unless the release is that of
    # HEAD.
    ended = not re.search(line, git(root, "show", f"{last}:./versions.yaml").decode(), re.M)
    return git(root, "rev-parse", f"{last}^" if ended else "HEAD").decode().strip()


def past_releases(project: Project) -> Iterator[Release]:
    """Yield the releases before that of versions.yaml, each as of its last commit, from the history
    of that file.
    """
    words = ("log", "--format=", "-p", "-U0", "-G", "^release: ", "--", "versions.yaml")
    names = re.findall(
        r"""^[+]release: ["']?(v[0-9]+(?:\.[0-9]+)+)""", git(project.root, *words).decode(), re.M
    )
    for name in dict.fromkeys(names):
        if name != project.versions.release:
            try:
                old = _of_revision(project.root, name, "")
                yield from (old.release,) if old else ()
            except InputError as error:  # of another version of primus
                unread = f"pins of {error.where}, which cannot be read"
                yield Release(image=IMAGE, tag=name, components={}, origin=unread)


def extract(root: Path, commit: str, folder: Path, only: tuple[str, ...] = ("",)) -> None:
    """Write the files of a commit whose paths begin with one of ``only`` to ``folder``."""
    with tarfile.open(fileobj=io.BytesIO(git(root, "archive", commit))) as archive:
        # Before Python 3.11.4, extractall has no argument for it.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(folder, [member for member in archive if member.name.startswith(only)])


def _of_revision(root: Path, word: str, target: str) -> Side | None:
    """Return the pins of the commit that ``word`` names, or of the last one with this release; None
    without one.
    """
    commit = commit_of(root, word)
    if not commit:
        return None
    short = commit[:12]
    with tempfile.TemporaryDirectory(prefix="primus-revision-") as folder:
        try:
            extract(root, short, Path(folder), _OF_REVISION)
            return _of_pins(Project(Path(folder)), target_of(word) or target, f"commit {short}")
        except tarfile.TarError as error:
            raise InputError(
                str(error), where=short, hint=f"compare it with the primus of {short}"
            ) from None
        except PrimusError as error:
            hint = error.hint or f"compare it with the primus of {short}"
            raise InputError(
                error.message, where=f"{short}:{error.where or 'versions.yaml'}", hint=hint
            ) from None


def _of_store(project: Project, ref: str) -> Side:
    store = project.workspace.store
    root = root_of_image(store, project.workspace.unpacked, ref, ref=ref)
    digest = str(store.images()[ref]["digest"])
    history = root.config.get("history", ())
    layers = dict(
        zip(
            _layer_names(history, [layer.digest for layer in root.layers]), root.layers, strict=True
        )
    )
    packages: dict[str, str] = {}
    recipes: list[tuple[str, Any]] = []
    for step, ref_of_layer in zip(history, root.layers, strict=True):
        layer = store.layer(step["comment"])
        blob = store.blob_path(ref_of_layer.digest)
        # Another version of primus may have written the record.
        if layer:
            facts = examine_layer(project.workspace, ref, layer, Progress())
        else:
            facts = observe(walk(ref_of_layer, blob))
        packages |= {
            item.name: item.version for item in facts.stated if item.kind in ("wheel", "deb")
        }
        recipes += [
            (Path(member.path).stem, parse(member.text(), member.path).data)
            for member in (walk(ref_of_layer, blob) if _RECIPES in facts.folders else ())
            if re.fullmatch(f"{_RECIPES}/[^/]+[.]yaml", member.path)
        ]
    parts = {"packages": packages, "recipes": _recipes(recipes)}
    record = store.record("targets", ref.partition("-")[2]) or {}
    if record.get("digest") == digest:
        parts["gates"] = {
            s.partition(": ")[0]: s.partition(": ")[2] for s in record.get("failed", ())
        }
    found = _of_config(
        root.config,
        digest,
        IMAGE,
        ref,
        "image of the store",
        {n: ly.size for n, ly in layers.items()},
    )
    curves = golden.load(project.root, ref) or {}
    return Side(release=found.release, parts={**found.parts, **parts}, curves=curves, layers=layers)


def _of_registry(name: str, tag: str) -> Side:
    registry = Repository(name)
    digest = registry.digest(tag)
    if digest is None:
        raise registry.lacks(tag)
    trust = "--tls-verify=true"
    if plain_http(name):
        trust = "--tls-verify=false"
    config = json.loads(skopeo("inspect", "--config", trust, f"docker://{name}@{digest}"))
    rows = json.loads(registry.manifest(digest) or b"{}").get("layers") or ()
    layers = {row["digest"]: int(row["size"]) for row in rows}
    sizes = dict(
        zip(_layer_names(config.get("history") or (), [*layers]), layers.values(), strict=True)
    )
    found = _of_config(config, digest, name, tag, "image of the registry", sizes)
    parts: dict[str, Part] = {}
    records = []
    for document in registry.documents(digest):
        try:
            if document.media_type == LOCK:
                parts["packages"] = {
                    f.name: f.version for f in _in_image(loads(document.data, document.name))
                }
            elif document.media_type == GATES:
                parts["gates"] = _gates(json.loads(document.data))
            elif document.media_type == VALIDATION:
                records += (
                    [record] if golden.curves_of([record := json.loads(document.data)], "") else []
                )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"{document.name} of {name}@{digest}"
            reason = f"{type(error).__name__} {error}"
            raise InputError(
                f"{what} was not written by primus: {reason}", hint="publish the image again"
            ) from None
    if records:
        curves = {"release": found.release.reference, "curves": golden.curves_of(records, "")}
    else:
        curves = {}
    return Side(release=found.release, parts={**found.parts, **parts}, curves=curves)


def _layer_names(history: Sequence[Mapping[str, Any]], digests: Sequence[str]) -> list[str]:
    steps = [str(step.get("created_by", "")) for step in history if not step.get("empty_layer")]
    if len(steps) != len(digests) or not all(step.startswith("primus ") for step in steps):
        return [digest[7:19] for digest in digests]
    return [step.split(" ", 2)[2] for step in steps]


def _of_config(
    config: Mapping[str, Any],
    digest: str,
    image: str,
    tag: str,
    origin: str,
    sizes: Mapping[str, int],
) -> Side:
    settings = config.get("config") or {}
    labels = settings.get("Labels") or {}
    pinned = {
        key_of(n[len(_PINS) :]): str(version)
        for n, version in labels.items()
        if n.startswith(_PINS)
    }
    date = str(config.get("created", ""))[:10] or None
    size = sum(sizes.values()) or None
    release = Release(
        image=image,
        tag=tag,
        date=date,
        digest=digest,
        content_size_bytes=size,
        components=pinned,
        origin=origin,
    )
    environment = dict(entry.partition("=")[::2] for entry in settings.get("Env") or ())
    layers = {name: bytes_text(size) for name, size in sizes.items()}
    return Side(release=release, parts={"layers": layers, "environment": environment})


def _gates(outcome: Mapping[str, Any]) -> dict[str, str]:
    rows: dict[str, str] = {}
    for gate in outcome["gates"]:
        rows[gate["gate"]] = ("" if gate["passed"] else "fails: ") + gate["summary"]
        errors = (f for f in gate["findings"] if f["severity"] == "error")
        rows |= {f"{gate['gate']} {error['path']}": error["message"] for error in errors}
    return rows


def _recipes(documents: Iterable[tuple[str, Any]]) -> Part:
    """Return ``recipe: setting`` → value; a setting of a case is followed by the case. Reasons are
    left out.
    """
    rows: dict[str, str] = {}
    for name, data in documents:
        cases = data.get("cases") or ()
        whole = {key: value for key, value in data.items() if key != "cases"}
        for case in (whole, *cases):
            conditions = ", ".join(
                f"{key} {_word(value)}" for key, value in (case.get("when") or {}).items()
            )
            when = ""
            if conditions:
                when = f" ({conditions})"
            settings = {
                key: value for key, value in case.items() if key not in ("when", "because", "tuned")
            }
            rows |= {f"{name}: {key}{when}": _word(value) for key, value in flat(settings)}
    return rows


def _word(value: Any) -> str:
    if isinstance(value, list):
        return "/".join(map(_word, value))
    return str(value)
