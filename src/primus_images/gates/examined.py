"""The input of a gate, an image with facts about its layers, and its output, a report.

Facts are collected in one pass over the files of a layer, while the layer is written. They depend
only on the layer's bytes and on the rules, so they are cached by its digest and the hash of this
package's code: a check reads no blob, and after a change of a rule every blob is read. Only the
machine that made a layer can find its own paths in it.
"""

import contextlib
import io
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import IO, Literal, NamedTuple

from primus_images.errors import InputError
from primus_images.files import read_sealed, write_sealed
from primus_images.gates import contents
from primus_images.gates.contents import Code, Library, Stated, Trace
from primus_images.gates.rules import rules_hash
from primus_images.oci.layer import reference, walk
from primus_images.oci.store import Layer
from primus_images.oci.tar import Member
from primus_images.plan.action import Composed, ImagePlan, stored
from primus_images.plan.project import Workspace
from primus_images.progress import Progress
from primus_images.schema import build_typed
from primus_images.versions.lock import normalised

# Files that a gate reads as text are short; even the dpkg status of a large image is well below
# this limit.
_TEXT_SIZE = 32 << 20
_IN_MEMORY = 16 << 20

Severity = Literal["error", "warning", "note"]


@dataclass(kw_only=True)
class LayerFacts:
    """Facts about a layer.

    ``folders`` maps each folder to the bytes of its files, ``unreadable`` paths to reasons.
    ``copyrights`` maps Debian packages, and ``wheel NAME``, to the text about their licences, or to
    a package with the same one.
    """

    folders: dict[str, int] = field(default_factory=dict)
    code: list[Code] = field(default_factory=list)
    libraries: list[Library] = field(default_factory=list)
    stated: list[Stated] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)
    copyrights: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """One sentence about one thing. An ``error`` fails the gate.

    ``layer`` and ``path`` may be empty. ``path`` is a path in the image without a leading slash or,
    for gates that judge the pins, ``file:line:col`` of the project.
    """

    severity: Severity
    message: str
    layer: str = ""
    path: str = ""


@dataclass(frozen=True, kw_only=True)
class GateReport:
    """One gate's result.

    ``summary`` states briefly what was examined, so that an empty list of findings is not misread.
    ``gate`` is the gate's name, which :func:`primus_images.gates.check.judge` adds.
    """

    summary: str
    findings: Sequence[Finding] = ()
    gate: str = ""

    @property
    def errors(self) -> list[Finding]:
        """The findings that fail the gate."""
        return [finding for finding in self.findings if finding.severity == "error"]

    @property
    def passed(self) -> bool:
        """Whether no finding is an error."""
        return not self.errors


class Examined(NamedTuple):
    """An image, the facts about its layers by name (bottom first), and its workspace."""

    image: Composed
    facts: Mapping[str, LayerFacts]
    workspace: Workspace

    @property
    def arch(self) -> str | None:
        """The GPU architecture that the image is for; None for an image without one."""
        return self.image.plan.resolved.arch

    @property
    def python(self) -> str:
        """The version of the image's Python."""
        resolved = self.image.plan.resolved
        base = resolved.request.bases.get(resolved.choice.base or "")
        if base is None:
            return resolved.request.python
        return base.python


def observe(
    members: Iterable[Member], machine_paths: Sequence[bytes] = (), scratch: Path | None = None
) -> LayerFacts:
    """Examine every member once.

    ``machine_paths`` are paths of the build machine, which no file may contain. Large files are
    copied to the folder ``scratch``, or to that for temporary files.
    """
    facts = LayerFacts()
    for member in members:
        folder, _, name = member.path.rpartition("/")
        facts.traces += contents.path_traces(member.path, member.kind)
        if member.kind == "symlink" and folder == "usr/share/doc":
            facts.copyrights[name] = member.link.rpartition("/")[2]
        if member.kind == "file":
            facts.folders[folder] = facts.folders.get(folder, 0) + member.size
            with _contents(member, scratch) as (stream, data):
                facts.traces += contents.traces_in(member.path, data, machine_paths)
                _observe_file(facts, member, stream, data)
    return facts


def _observe_file(facts: LayerFacts, member: Member, stream: IO[bytes], data: bytes | mmap) -> None:
    path = member.path
    is_elf = data[:4] == contents.ELF
    try:
        code = contents.code_in(path, stream, member.size)
        if code is not None:
            facts.code.append(code)
        if is_elf:
            library = contents.library_of(path, stream, member.size)
            if library is not None:
                facts.libraries.append(library)
            facts.stated += contents.stated_in_library(path, data)
    except ValueError as error:
        facts.unreadable[path] = str(error)
    if not is_elf and member.size <= _TEXT_SIZE:
        _observe_text(facts, path, data)


def _observe_text(facts: LayerFacts, path: str, data: bytes | mmap) -> None:
    copyright_file = contents.named("copyright", path)
    licence_file = contents.named("wheel_licence", path)
    if licence_file:
        words = data[:].decode("utf-8", "replace")
        facts.copyrights[f"wheel {normalised(licence_file['package'])}"] = words
        return
    if not (copyright_file or contents.states_versions(path) or contents.may_hold_login(path)):
        return
    text = data[:].decode("utf-8", "replace")
    facts.stated += contents.stated_in(path, text)
    facts.traces += contents.login_in(path, text)
    if copyright_file:
        facts.copyrights[copyright_file["package"]] = text


@contextlib.contextmanager
def _contents(member: Member, scratch: Path | None) -> Iterator[tuple[IO[bytes], bytes | mmap]]:
    """Yield the bytes of a file, to read and to search. A large file is on disk."""
    if member.size <= _IN_MEMORY:
        data = b"".join(member.chunks)
        yield io.BytesIO(data), data
        return
    with tempfile.TemporaryFile(dir=scratch) as copy:
        copy.writelines(member.chunks)
        copy.flush()
        with mmap(copy.fileno(), 0, access=ACCESS_READ) as mapped:
            yield copy, mapped


def machine_paths(workspace: Workspace) -> Sequence[bytes]:
    """Return the paths of this machine that no image may contain.

    Those that folders of an image may have are not among them.
    """
    paths = {workspace.folder.parent, workspace.store.root.absolute(), Path.home() / ".cache"}
    return sorted(str(path).encode() for path in paths if len(path.parts) > 3)


def _cache_path(workspace: Workspace, layer: Layer) -> Path:
    digest = layer.blob.digest.removeprefix("sha256:")
    return workspace.facts / f"{digest}-{rules_hash()[:16]}.json"


def save(workspace: Workspace, layer: Layer, facts: LayerFacts) -> None:
    """Write the facts about the layer to the cache.

    Failures are ignored: the next check reads the blob.
    """
    path = _cache_path(workspace, layer)
    with contextlib.suppress(OSError, InputError):
        digest = path.name.partition("-")[0]
        for of_other_rules in path.parent.glob(f"{digest}-*"):
            of_other_rules.unlink(missing_ok=True)
        write_sealed(path, asdict(facts))


def examine_layer(workspace: Workspace, name: str, layer: Layer, progress: Progress) -> LayerFacts:
    """Return the layer's facts: from the cache, or from the blob, whose digest is verified.

    Raises HostError if the blob cannot be read or is damaged.
    """
    path = _cache_path(workspace, layer)
    with contextlib.suppress(InputError):
        return build_typed(LayerFacts, read_sealed(path), path.name)
    progress.start(layer.blob.digest, f"examine {name}", None)
    blob = workspace.store.blob_path(layer.blob.digest)
    facts = observe(walk(reference(layer), blob), machine_paths(workspace))
    save(workspace, layer, facts)
    progress.finish(layer.blob.digest)
    return facts


def examine_image(image: Composed, workspace: Workspace, progress: Progress) -> Examined:
    """Examine every layer of the image, bottom first, as :func:`examine_layer` does."""
    facts = {
        action.name: examine_layer(workspace, action.name, layer, progress)
        for action, layer in image.rows
    }
    return Examined(image=image, facts=facts, workspace=workspace)


def examine(plan: ImagePlan, workspace: Workspace, progress: Progress) -> Examined:
    """Examine the stored image of the plan.

    Raises InputError if the store does not hold exactly this image.
    """
    image = stored(workspace.store, plan)
    if image is None:
        raise InputError(
            f"{plan.ref} is not built from the current versions.yaml and lock",
            hint=f"primus build {plan.resolved.name}",
        )
    return examine_image(image, workspace, progress)
