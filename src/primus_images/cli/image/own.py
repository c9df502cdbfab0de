"""Primus's own options among the words of an old command."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from primus_images.cli.verb import Options, parser_of_shared


@dataclass(frozen=True, kw_only=True)
class OwnOptions(Options):
    """The options that ``verbs.yaml`` shares under ``old``."""

    dry_run: bool
    proxy: bool
    allow_unmapped: bool
    primus_root: Path | None
    precision: str | None
    output: str | None
    gpu: str | None


def own_options(command: str, words: Sequence[str]) -> tuple[OwnOptions, list[str]]:
    """Return the options of primus among the words of ``command``, and the other words."""
    namespace, others = parser_of_shared("old", command).parse_known_args(words)
    return OwnOptions(**vars(namespace)), others
