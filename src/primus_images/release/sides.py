"""What `primus diff` compares: images, pins and published releases.

An image is in the store or in a registry. Pins are those of the checkout or of a git revision.
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
from typing import Any, NamedTuple

from primus_images.engine.workshop import root_of_image
from primus_images.errors import InputError, PrimusError, did_you_mean
from primus_images.gates.check import failures
from primus_images.gates.examined import (
    Finding,
    GateReport,
    LayerFacts,
    examine_layer,
    observe,
)
from primus_images.oci.layer import walk
from primus_images.oci.store import Store, digest_of
from primus_images.plan.project import Project
from primus_images.plan.resolve import ResolvedTarget, resolve
from primus_images.progress import Progress
from primus_images.release import golden
from primus_images.release.artifact import DAMAGED, WITHDRAWAL, Document, damage
from primus_images.release.documents import GATES, LOCK, SPDX, VALIDATION
from primus_images.release.git import git
from primus_images.release.history import (
    Release,
    key_of,
    load_history,
    newest_first,
    pin_names,
    pins,
    select,
    spread,
)
from primus_images.release.records import records_of
from primus_images.release.reference import reference
from primus_images.release.registry import Repository
from primus_images.release.statement import BUNDLE, payload
from primus_images.release.withdrawal import withdrawal_text, withdrawals
from primus_images.sandbox.container import LayerRef
from primus_images.terminal import bytes_text, say
from primus_images.training.judge.record import Record
from primus_images.versions.lock import Lock, LockedFile, loads
from primus_images.yamlfile import flat, parse, read

Part = Mapping[str, str]
_REGISTRY = re.compile(r"(?:localhost|[^/:]+\.[^/:]+|[^/:]+(?=:[0-9]))(?::[0-9]+)?/[^:@]+[:@].+")
_PINS = "io.primus.pins."
_RECIPES = "opt/primus/recipes"
_OWN = "primus-images"
# A patch of a release is on a branch of its own.
_BRANCHES = ("--branches", "--remotes")
_FOLDERS = ("refs/heads", "refs/remotes")
# What a comparison needs of a revision, and not the rest of the repository.
_OF_REVISION = ("versions.yaml", "images/", "recipes/", golden.FOLDER)


@dataclass(frozen=True, kw_only=True)
class Side:
    """What is known of one side.

    ``parts`` are name → value per section, without those that it does not state. ``curves`` are
    its golden curves, if any. ``layers`` are name → layer, if their blobs are in a store.
    ``withdrawn`` says that it was withdrawn, and why. ``records`` are its validations.
    """

    release: Release
    parts: Mapping[str, Part] = field(default_factory=dict)
    curves: golden.Curves | None = None
    layers: Mapping[str, LayerRef] = field(default_factory=dict)
    withdrawn: str = ""
    records: Sequence[Record] = ()


def side(word: str, project: Project | None, target: str = "") -> Side:
    """Return what :func:`_side` finds, and whether the project says that it was withdrawn."""
    result = _side(word, project, target)
    if project is None or result.withdrawn:
        return result
    known = withdrawals(project.root)
    tag = result.release.tag
    withdrawal = known.get(tag) or known.get(f"{tag}-{target}")
    if withdrawal is None:
        return result
    ours = result.release.image == project.versions.image.name
    if not ours and withdrawal.digest != result.release.digest:
        return result
    return replace(result, withdrawn=withdrawal.sentence)


def _side(word: str, project: Project | None, target: str) -> Side:
    """Return what ``word`` names: an image, a published release, pins, or a revision.

    The first of these that knows the name decides. Of pins that name no target, only those of
    ``target`` are meant, if it is not empty. Raises InputError, with what there is, if none knows
    the name.
    """
    bare = word
    # A file of pins that cannot be read hides no release of the history.
    if project is not None and ":" in word:
        bare = word.removeprefix(f"{project.versions.image.name}:")
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
    plain = bare.removesuffix("-preview")
    names = pin_names(project.versions, project.target_names())
    if plain in names:
        # The first two name no target.
        pinned = target if plain in names[:2] else plain.partition("-")[2]
        return _of_pins(project, pinned, "versions.yaml")
    revision = _of_revision(project.root, plain, target)
    if revision is None:
        raise _unknown(word, names, sorted(project.workspace.store.images()))
    return revision


def _unknown(word: str, names: Sequence[str], images: Sequence[str]) -> InputError:
    published = [release.name for release in newest_first(load_history().releases)]
    near = did_you_mean(word, dict.fromkeys([*names, *images, *published]), most=3)
    return InputError(
        f"no release, image or git revision is called {word!r}: versions.yaml pins {names[0]}, "
        f"the store has {', '.join(images) or 'no image'}, and {published[-1]} to {published[0]} "
        "were published",
        hint=near or "primus releases lists the published ones, and git log the revisions",
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
    raise InputError(
        f"{word} stands for {len(names)} images: {', '.join(names)}",
        hint=f"name one, for example {names[-1]}",
    )


def files(side: Side, other: Side, store: Store) -> Part:
    """Return path → size and hash of each file in the layers that ``other`` does not share.

    Bytecode is left out.
    """
    shared = {layer.digest for layer in other.layers.values()}
    result = {}
    for layer in side.layers.values():
        if layer.digest in shared:
            continue
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
    return match[1] if match else ""


def _of_pins(project: Project, target: str, origin: str) -> Side:
    names = [target] if target else project.target_names()
    targets = [resolve(project, name) for name in names]
    name = project.versions.release
    if target:
        name = f"{name}-{target}"
    release = pins(project.versions, targets, name, origin=f"pins of {origin}")
    # An image does not tell from which folder it has its local components.
    components = dict(release.components)
    for component, entry in project.versions.components.items():
        if entry.pins[0].path and key_of(component) in components:
            components[key_of(component)] = "local"
    return Side(
        release=replace(release, components=components),
        parts=_pinned_parts(project.root, targets),
        curves=_curves_of_pins(project.root, targets),
    )


def _pinned_parts(root: Path, targets: Sequence[ResolvedTarget]) -> dict[str, Part]:
    packages = []
    environment = []
    downloads = {}
    for target in targets:
        for key, value in target.environment.items():
            environment.append((key, value, target.name))
        if target.lock:
            for file in _in_image(target.lock):
                packages.append((file.name, file.version, target.name))
            size = sum(file.size for file in target.lock.distinct)
            downloads[f"files of {target.name}"] = bytes_text(size)
    recipes = [(path.stem, read(path).data) for path in sorted((root / "recipes").glob("*.yaml"))]
    parts: dict[str, Part] = {
        "environment": spread(environment),
        "recipes": _recipes(recipes),
    }
    if all(map(_is_locked, targets)):
        parts |= {"packages": spread(packages), "downloads": downloads}
    return parts


def _is_locked(target: ResolvedTarget) -> bool:
    """Whether the packages of a target are known: it has a lock that fits, or needs none."""
    if target.lock is None:
        return not target.request.asks
    return not target.stale


def _curves_of_pins(root: Path, targets: Sequence[ResolvedTarget]) -> golden.Curves | None:
    for target in filter(_is_locked, targets):
        files = target.lock.files if target.lock else ()
        curves = golden.of_pins(root, target.ref, files)
        if curves:
            return curves
    return None


def _curves_of_image(
    project: Project, ref: str, records: Sequence[Record], packages: Part
) -> golden.Curves | None:
    """Return the curves of an image: of its own validations, or recorded with its packages."""
    measured = golden.of_records(ref, records)
    if measured.curves:
        return measured
    curves = golden.load(project.root, ref)
    if curves is None:
        return None
    for package, version in curves.versions.items():
        if packages.get(package, version) != version:
            return None
    return curves


def _in_image(lock: Lock) -> Iterator[LockedFile]:
    for file in lock.files:
        of_build = (file.base or "").endswith(" build")
        if file.kind != "layer" and not of_build:
            yield file


def _commit_of(root: Path, word: str) -> str:
    """Return the commit that ``word`` names, or the last one with the release of that name.

    It is empty without one.
    """
    name = word.removesuffix(f"-{target_of(word)}")
    for revision in dict.fromkeys((word, name)):
        options = ("--verify", "--quiet", "--end-of-options")
        commit = git(root, "rev-parse", *options, f"{revision}^{{commit}}")
        if commit:
            return commit.decode().strip()
    line = rf"""^release: ["']?{re.escape(name)}["']?( .*)?$"""
    touched = ("log", "-1", "--format=%H", "-G", line)
    for place in ("HEAD", *_BRANCHES):
        last = git(root, *touched, place, "--", "versions.yaml").decode().strip()
        if last:
            return _last_commit_of(root, line, last, place)
    return ""


def _last_commit_of(root: Path, line: str, last: str, place: str) -> str:
    """Return the last commit of the release that ``line`` begins.

    ``last`` is the last commit of a place that touched this line.
    """
    versions = git(root, "show", f"{last}:./versions.yaml").decode()
    if re.search(line, versions, re.M) is None:  # it wrote the next release
        return git(root, "rev-parse", f"{last}^").decode().strip()
    if place == "HEAD":
        return git(root, "rev-parse", "HEAD").decode().strip()
    words = ("--contains", last, "--sort=-committerdate", "--count=1", "--format=%(objectname)")
    return git(root, "for-each-ref", *words, *_FOLDERS).decode().strip()


def past_releases(project: Project) -> Iterator[Release]:
    """Yield the releases before that of versions.yaml, each as of its last commit."""
    words = ("log", "--format=", "-p", "-U0", "-G", "^release: ", "HEAD", *_BRANCHES)
    history = git(project.root, *words, "--", "versions.yaml").decode()
    names = re.findall(r"""^[+]release: ["']?(v[0-9]+(?:\.[0-9]+)+)""", history, re.M)
    for name in dict.fromkeys(names):
        if name == project.versions.release:
            continue
        try:
            old = _of_revision(project.root, name, "")
        except InputError as error:  # of another version of primus
            unread = f"pins of {error.where}, which cannot be read"
            yield Release(image=project.versions.image.name, tag=name, components={}, origin=unread)
        else:
            if old:
                yield old.release


def _of_revision(root: Path, word: str, target: str) -> Side | None:
    """Return the pins of the commit that ``word`` names, or of the last one with this release.

    None without one.
    """
    commit = _commit_of(root, word)
    if not commit:
        return None
    short = commit[:12]
    hint = f"compare it with the primus of {short}"
    with tempfile.TemporaryDirectory(prefix="primus-revision-") as folder:
        try:
            _extract(root, short, Path(folder))
            return _of_pins(Project(Path(folder)), target_of(word) or target, f"commit {short}")
        except tarfile.TarError as error:
            raise InputError(str(error), where=short, hint=hint) from None
        except PrimusError as error:
            where = f"{short}:{error.where or 'versions.yaml'}"
            raise InputError(error.message, where=where, hint=error.hint or hint) from None


def _extract(root: Path, commit: str, folder: Path) -> None:
    """Write the files of a commit that a comparison needs to ``folder``."""
    with tarfile.open(fileobj=io.BytesIO(git(root, "archive", commit))) as archive:
        members = [member for member in archive if member.name.startswith(_OF_REVISION)]
        # Before Python 3.11.4, extractall has no argument for it.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(folder, members)


class _Image(NamedTuple):
    """The name of an image, and the room that it is in."""

    name: str
    tag: str
    digest: str
    origin: str


def _of_store(project: Project, ref: str) -> Side:
    store = project.workspace.store
    root = root_of_image(store, project.workspace.unpacked, ref, ref=ref)
    digest = str(store.images()[ref]["digest"])
    image = _Image(project.versions.image.name, ref, digest, "image of the store")
    names = _layer_names(root.config, [layer.digest for layer in root.layers])
    layers = dict(zip(names, root.layers, strict=True))
    parts = _parts_of_config(root.config, {name: layer.size for name, layer in layers.items()})
    packages: dict[str, str] = {}
    recipes: list[tuple[str, Any]] = []
    for step, layer in zip(root.config.get("history", ()), root.layers, strict=True):
        facts = _facts(project, ref, layer, step["comment"])
        of_base = step["created_by"].startswith("primus image ")
        for item in facts.stated:
            # Other sides know what a lock names: neither packages of a base nor the project's own.
            locked = item.kind == "wheel" or (item.kind == "deb" and not of_base)
            if locked and item.name != _OWN:
                packages[item.name] = item.version
        if _RECIPES in facts.folders:
            recipes += _recipes_in(layer, store)
    parts |= {"packages": packages, "recipes": _recipes(recipes)}
    record = store.record("targets", ref.partition("-")[2]) or {}
    if record.get("digest") == image.digest:
        parts["gates"] = _failed_gates(record.get("failed", ()))
    output = project.root / "out/validation" / target_of(ref)
    records = records_of(output, digest_of(root.config_bytes))
    return Side(
        release=_release(root.config, image, layers.values()),
        parts=parts,
        curves=_curves_of_image(project, ref, records, packages),
        records=records,
        layers=layers,
    )


def _facts(project: Project, ref: str, layer: LayerRef, key: str) -> LayerFacts:
    """Return what the gates see in a layer. Another version of primus may have written it."""
    store = project.workspace.store
    ours = store.layer(key)
    if ours:
        return examine_layer(project.workspace, ref, ours, Progress())
    return observe(walk(layer, store.blob_path(layer.digest)))


def _recipes_in(layer: LayerRef, store: Store) -> Iterator[tuple[str, Any]]:
    for member in walk(layer, store.blob_path(layer.digest)):
        if re.fullmatch(f"{_RECIPES}/[^/]+[.]yaml", member.path):
            yield Path(member.path).stem, parse(member.text(), member.path).data


class _Blob(NamedTuple):
    digest: str
    size: int


def _of_registry(name: str, tag: str) -> Side:
    registry = Repository.to_read(name)
    digest = registry.digest(tag)
    if digest is None:
        raise registry.lacks(tag)
    image = _Image(name, tag, digest, "image of the registry")
    manifest, config = registry.image(digest)
    rows = manifest.get("layers") or ()
    layers = [_Blob(row["digest"], int(row["size"])) for row in rows]
    names = _layer_names(config, [layer.digest for layer in layers])
    sizes = {name: layer.size for name, layer in zip(names, layers, strict=True)}
    parts = _parts_of_config(config, sizes)
    records = []
    withdrawn = []
    for document in registry.documents(digest):
        try:
            if document.media_type == BUNDLE:
                words = payload(document.data)
                if words["predicateType"] == WITHDRAWAL:
                    withdrawn.append(words["predicate"])
            if _described(document) not in ("", digest, manifest["config"]["digest"]):
                say(f"! {document.name} of {name}@{digest} is about another image, and is left out")
                continue
            parts |= _part_of_document(document)
            if document.media_type == VALIDATION:
                records.append(Record.of(json.loads(document.data)))
        except DAMAGED as error:
            reason = damage(error)
            raise InputError(
                f"{document.name} of {name}@{digest} was not written by primus: {reason}",
                hint="publish the image again",
            ) from None
    release = _release(config, image, layers)
    curves = golden.of_records(release.reference, records)
    sentence = withdrawal_text(withdrawn)
    if sentence:
        sentence += " (its signature is not verified here)"
    return Side(
        release=release,
        parts=parts,
        curves=curves if curves.curves else None,
        withdrawn=sentence,
        records=records,
    )


def _described(document: Document) -> str:
    """Return the digest of the image, or of its config, that a document is about.

    Empty for a document that names none.
    """
    if document.media_type == GATES:
        return str(json.loads(document.data)["digest"])
    if document.media_type == VALIDATION:
        return str(json.loads(document.data)["image"]["content"])
    if document.media_type == SPDX:
        whole = json.loads(document.data)["packages"][0]
        return f"sha256:{whole['checksums'][0]['checksumValue']}"
    return ""


def _part_of_document(document: Document) -> dict[str, Part]:
    if document.media_type == LOCK:
        lock = loads(document.data, document.name)
        return {"packages": {file.name: file.version for file in _in_image(lock)}}
    if document.media_type == GATES:
        # The store keeps only what fails.
        return {"gates": _failed_gates(failures(_reports(json.loads(document.data))))}
    if document.media_type == SPDX:
        licences = {}
        for package in json.loads(document.data)["packages"]:
            if "externalRefs" in package:
                licences[package["name"]] = package["licenseDeclared"]
        return {"licences": licences}
    return {}


def _layer_names(config: Mapping[str, Any], digests: Sequence[str]) -> list[str]:
    """Return the names of an image's layers; parts of the digests if others made the image."""
    steps = []
    for step in config.get("history") or ():
        if not step.get("empty_layer"):
            steps.append(str(step.get("created_by", "")))
    if len(steps) != len(digests) or not all(step.startswith("primus ") for step in steps):
        return [digest[7:19] for digest in digests]
    return [step.split(" ", 2)[2] for step in steps]


def _release(
    config: Mapping[str, Any], image: _Image, layers: Iterable[LayerRef | _Blob]
) -> Release:
    pinned = {}
    labels = (config.get("config") or {}).get("Labels") or {}
    for label, version in labels.items():
        if label.startswith(_PINS):
            pinned[key_of(label.removeprefix(_PINS))] = str(version)
    return Release(
        image=image.name,
        tag=image.tag,
        date=str(config.get("created", ""))[:10] or None,
        digest=image.digest,
        content_size_bytes=sum(layer.size for layer in layers) or None,
        components=pinned,
        origin=image.origin,
    )


def _parts_of_config(config: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Part]:
    environment = {}
    for entry in (config.get("config") or {}).get("Env") or ():
        name, _, value = entry.partition("=")
        environment[name] = value
    layers = {name: bytes_text(size) for name, size in sizes.items()}
    return {"layers": layers, "environment": environment}


def _failed_gates(sentences: Iterable[str]) -> dict[str, str]:
    rows: dict[str, str] = {}
    for sentence in sentences:
        gate, _, reason = sentence.partition(": ")
        rows[gate] = reason
    return rows


def _reports(outcome: Mapping[str, Any]) -> Iterator[GateReport]:
    for gate in outcome["gates"]:
        findings = [Finding(**finding) for finding in gate["findings"]]
        yield GateReport(gate=gate["gate"], summary=gate["summary"], findings=findings)


def _recipes(documents: Iterable[tuple[str, Any]]) -> Part:
    """Return ``recipe: setting`` → value; a setting of a case is followed by the case.

    Reasons are left out.
    """
    rows: dict[str, str] = {}
    for name, data in documents:
        whole = {key: value for key, value in data.items() if key != "cases"}
        for case in (whole, *(data.get("cases") or ())):
            conditions = [
                f"{key} {_word(value)}" for key, value in (case.get("when") or {}).items()
            ]
            when = f" ({', '.join(conditions)})" if conditions else ""
            settings = {
                key: value for key, value in case.items() if key not in ("when", "because", "tuned")
            }
            for key, value in flat(settings):
                rows[f"{name}: {key}{when}"] = _word(value)
    return rows


def _word(value: Any) -> str:
    if isinstance(value, list):
        return "/".join(map(_word, value))
    return str(value)
