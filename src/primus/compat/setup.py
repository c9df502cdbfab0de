"""``pytorch_benchmark_setup.sh`` and ``make download_assets``: list libraries and download assets, install nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from primus.compat.tables import commands
from primus.errors import HostError, InputError


@dataclass(frozen=True, kw_only=True)
class Library:
    """One library that the script installed: its version here, or why it is not needed (``because``)."""

    name: str
    version: str | None
    because: str

    @property
    def missing(self) -> bool:
        """Whether it is needed and not installed."""
        return self.version is None and not self.because


def libraries() -> list[Library]:
    """Return all libraries, in the document's order."""
    found = []
    for name, what in commands()["setup"].items():
        try:
            installed: str | None = version(what["needs"]) if "needs" in what else None
        except PackageNotFoundError:
            installed = None
        found.append(Library(name=name, version=installed, because=what.get("because", "")))
    return found


def download(environment: Mapping[str, str]) -> list[str]:
    """Download the models and data sets of the benchmarks to Hugging Face's cache. Returns their folders.

    Raises InputError without ``HF_TOKEN``, because two models are gated, and HostError if a library is missing or the
    hub does not answer.
    """
    if not environment.get("HF_TOKEN"):
        raise InputError("HF_TOKEN is not set, and two of the models are gated", hint="export HF_TOKEN=…")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise HostError("huggingface_hub is not installed", hint="pip install huggingface_hub") from error
    folders = []
    for kind in ("models", "datasets"):
        for name in commands()["downloads"][kind]:
            try:
                folders.append(str(snapshot_download(name, repo_type=kind.removesuffix("s"))))
            except (OSError, ValueError) as error:
                raise HostError(f"{name} cannot be downloaded: {str(error).splitlines()[0]}") from error
    return folders
