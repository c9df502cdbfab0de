"""Sources outside pip's and apt's configuration: a channel's own indexes, image registries, git repositories.

They are probed first, all at the same time and for a few seconds, so that an unavailable source is reported at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from primus.errors import InputError
from primus.versions import registry, repository
from primus.versions.archive import ask_archive
from primus.versions.names import normalised
from primus.versions.reachable import HOST_DEADLINE_S, Probe, require_answers
from primus.versions.traffic import bare_url

if TYPE_CHECKING:
    from primus.versions.components import Versions
    from primus.versions.indexes import Indexes
    from primus.versions.lock import BaseRequest, LockedFile, Request


@dataclass(frozen=True, kw_only=True)
class Sources:
    """The sources of pins: index → address, base → image, commit → repository."""

    indexes: Mapping[str, str] = field(default_factory=dict)
    images: Mapping[str, str] = field(default_factory=dict)
    repositories: Mapping[str, str] = field(default_factory=dict)
    # Index → a package that is pinned there, which the probe requests.
    packages: Mapping[str, str] = field(default_factory=dict, compare=False)

    @classmethod
    def of_project(cls, versions: Versions, bases: Mapping[str, BaseRequest]) -> Sources:
        """Return every source in versions.yaml. ``bases`` are the bases and build roots of some targets."""
        pins = [pin for component in versions.components.values() for pin in component.pins]
        return cls(
            indexes={name: index.url for name, index in versions.indexes.items()},
            images={name: base.image for name, base in bases.items() if base.image},
            repositories={pin.commit: pin.git for pin in pins if pin.git and pin.commit},
            packages={
                name: normalised(package)
                for name, index in versions.indexes.items()
                for pin in reversed(pins)
                if pin.channel == index.channel and (package := pin.wheel or pin.sdist) and "{" not in package
            },
        )

    @classmethod
    def of_request(cls, request: Request) -> Sources:
        """Return the sources that one target needs."""
        return cls(
            indexes=request.indexes,
            images={name: base.image for name, base in request.bases.items() if base.image},
            repositories={one.commit: one.url for one in request.gits.values()},
            packages=dict.fromkeys(request.indexes, min(request.indexed)) if request.indexed else {},
        )

    def of_files(self, files: Iterable[LockedFile]) -> Sources:
        """Return the sources of these files. Raises InputError for a file from a source not in versions.yaml."""
        files = list(files)
        indexes, images, repositories = set[str](), set[str](), set[str]()
        for file in files:
            if file.index is not None:
                indexes.add(file.index)
            elif file.kind == "layer":
                images.add(file.base or "")
            elif file.kind == "git":
                repositories.add(file.file.removesuffix(".tar").rpartition("-")[2])
        lacking = [*(indexes - {*self.indexes}), *(images - {*self.images}), *(repositories - {*self.repositories})]
        if lacking:
            raise InputError(f"the lock names {lacking[0]}, but versions.yaml does not", hint="run `primus lock` again")
        return Sources(
            indexes={name: self.indexes[name] for name in sorted(indexes)},
            images={name: self.images[name] for name in sorted(images)},
            repositories={name: self.repositories[name] for name in sorted(repositories)},
            packages={file.index: file.name for file in files if file.index is not None},
        )

    def probes(self, indexes: Callable[[], Indexes]) -> dict[str, Probe]:
        """Return a probe for each source, by its name in messages.

        ``indexes`` returns the host's pip configuration, which also applies to the channel's own indexes.
        """
        found: dict[str, Probe] = {}
        # Starting pip takes a second or more, which must not count as the sources' time.
        host = indexes() if self.indexes else None
        for name, url in self.indexes.items():
            if host is not None:
                package = self.packages.get(name, "pip")
                found[f"the index {name} ({bare_url(url)})"] = partial(host.only(url).probe, package), package
        for image in self.images.values():
            found[f"the registry of {image.partition('@')[0]}"] = (
                partial(registry.probe, image),
                image.partition("@")[0],
            )
        for url in self.repositories.values():
            found[f"the repository {url}"] = partial(repository.probe, url), repository.short_name(url)
        return found


def ask_host(*, indexes: Indexes | None = None, python: Sequence[LockedFile] = (), suites: Iterable[str] = ()) -> None:
    """Probe the sources in this host's configuration: pip's indexes for ``python`` files, and the archive of
    ``suites``.

    Raises HostError within ``HOST_DEADLINE_S`` if none of pip's indexes answers, or if one of apt's mirrors does
    not.
    """
    if indexes is not None:
        urls = " and ".join(map(bare_url, indexes.remote))
        require_answers(
            {f"the Python index at {urls}": (partial(indexes.probe_any, python), "")},
            deadline=HOST_DEADLINE_S,
            hint="check the network, or point pip at a mirror (pip config set global.index-url URL)",
        )
    ask_archive(suites)
