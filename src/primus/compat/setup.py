"""``pytorch_benchmark_setup.sh`` and ``make download_assets``: nothing is installed; what is there is looked at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from primus.compat.tables import commands
from primus.errors import HostError, InputError

__all__ = ["Library", "download", "libraries"]


@dataclass(frozen=True, kw_only=True)
class Library:
    """One library that the script installed: its version here, or why none is needed (``because``)."""

    name: str
    version: str | None
    because: str

    @property
    def missing(self) -> bool:
        """Whether it is needed and not installed."""
        return self.version is None and not self.because


def libraries() -> list[Library]:
    """All of them, in the document's order."""
    found = []
    for name, what in commands()["setup"].items():
        try:
            installed: str | None = version(what["needs"]) if "needs" in what else None
        except PackageNotFoundError:
            installed = None
        found.append(Library(name=name, version=installed, because=what.get("because", "")))
    return found


def download(environment: Mapping[str, str]) -> list[str]:
    """Bring the models and data sets of the benchmarks into Hugging Face's cache; the folders they lie in.

    Two of the models are gated: InputError without ``HF_TOKEN``. HostError when a library is missing or the hub does
    not answer.
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
