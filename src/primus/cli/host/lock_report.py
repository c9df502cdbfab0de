"""The report of ``primus lock --report``: every request to a source and its answer, without logins."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from primus import __version__
from primus.errors import InputError, PrimusError
from primus.files import write_file
from primus.plan.resolve import ResolvedTarget
from primus.versions.traffic import Request, listening

FORMAT = 1


@dataclass
class Report:
    """Collects requests and messages, target by target; :meth:`write` writes the file."""

    path: Path
    command: str
    outcome: str = "interrupted"
    rows: list[dict[str, Any]] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    @contextmanager
    def of(self, resolved: ResolvedTarget) -> Iterator[None]:
        """Record the requests made for one target while the context is open."""
        with listening(self.messages.append) as requests:
            try:
                yield
            finally:
                self.rows += [self._row(resolved, request) for request in tuple(requests)]

    def _row(self, resolved: ResolvedTarget, request: Request) -> dict[str, Any]:
        component, place = resolved.pin_of(request.about)
        row = request.row()
        return {"target": resolved.name, "pin": component, "where": place, **row}

    @contextmanager
    def written(self) -> Iterator[None]:
        """Write the file when the context ends, also after an error. Raises InputError if it cannot be written."""
        self.write()
        try:
            yield
            self.outcome = "locked"
        except PrimusError as error:
            self.outcome = f"failed: {error}"
            raise
        finally:
            self.write()

    def write(self) -> None:
        """Write the report so far, without logins in URLs. Raises InputError if the file cannot be written."""
        document = {
            "format": FORMAT,
            "command": self.command,
            "outcome": self.outcome,
            "host": {"system": platform.platform(), "python": platform.python_version(), "primus": __version__}
            | {name: _version(name) for name in ("pip", "uv", "requests", "urllib3")},
            "asked": self.rows,
            "said": self.messages,
        }
        text = json.dumps(document, ensure_ascii=False, indent=1) + "\n"
        try:
            write_file(self.path, re.sub(r"(://)[^/@\s\"]+@", r"\1", text))
        except OSError as error:
            raise InputError(
                f"the report cannot be written to {self.path}: {error.strerror}",
                hint="name another file: --report FILE",
            ) from None


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
