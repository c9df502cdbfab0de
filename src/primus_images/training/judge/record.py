"""The record of a validation: what was run, in which image, on what, and what was found.

A record is written once, as JSON, and read by all that need evidence: the policy, statements and
their verification, golden curves, and reports.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from primus_images.schema import build_typed
from primus_images.training.judge.checks import Verdict

# What a record has as the GPU of jobs that ran on the CPU.
NO_GPU = "none"


@dataclass(frozen=True, kw_only=True)
class RecordedImage:
    """The bytes that ran: ``content`` is the digest of the config, which names all layers."""

    ref: str = ""
    manifest: str = ""
    content: str = ""


@dataclass(frozen=True, kw_only=True)
class RecordedRecipe:
    """The recipe that was trained, with all of its settings."""

    name: str
    backend: str
    mode: str
    precision: str
    gpu: str
    description: str = ""
    sha256: str
    ranks: int = 1
    assets: Mapping[str, str]
    settings: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What the suite finds of planted faults, and refuses of healthy runs, and when."""

    faults: int
    named: int
    healthy: int
    refused: int
    recorded: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RecordedSuite:
    """The suite that judged. ``reference`` is a hash of the code that it compares with."""

    sha256: str
    format: int
    reference: str
    rates: Rates | None = None


@dataclass(frozen=True, kw_only=True)
class RecordedJob:
    """A job of the suite. What follows ``ran`` is None if it was not run."""

    name: str
    command: tuple[str, ...] = ()
    ran: bool
    argv: tuple[str, ...] | None = None
    exit_code: int | None = None
    cause: str | None = None
    seconds: float | None = None
    exact: bool | None = None
    series: tuple[Mapping[str, Any], ...] | None = None

    @property
    def steps(self) -> tuple[Mapping[str, Any], ...]:
        """The figures of each step that was logged."""
        return self.series or ()


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The GPUs that the jobs got, as the driver names them, and its versions."""

    gpus: tuple[str, ...] = ()
    driver: str = ""
    firmware: str = ""


@dataclass(frozen=True, kw_only=True)
class Record:
    """The evidence of one validation.

    ``passed`` is true only if there are verdicts, all of them passed, and every planned job logged
    steps. ``made`` is in ISO 8601. ``gpu`` is a generation, or ``none``. ``versions``, ``facts``
    and ``measurements`` are those of the first job, empty if it did not run. ``gates`` are the
    findings of the gates in the image.
    """

    format: int
    made: str
    passed: bool
    target: str
    image: RecordedImage
    gpu: str
    recipe: RecordedRecipe
    wrap: str = ""
    suite: RecordedSuite
    versions: Mapping[str, str]
    facts: Mapping[str, Any]
    measurements: Mapping[str, Any]
    verdicts: tuple[Verdict, ...]
    jobs: tuple[RecordedJob, ...]
    engine: str = ""
    machine: Machine = Machine()
    gates: Mapping[str, Any] = field(default_factory=dict)
    not_run: tuple[str, ...] = ()

    @classmethod
    def of(cls, data: Any, name: str = "record") -> Self:
        """Return the record in the content of a file. Raises InputError if it is not one."""
        return build_typed(cls, data, name)

    @property
    def failed(self) -> tuple[Verdict, ...]:
        """The verdicts that did not pass."""
        return tuple(verdict for verdict in self.verdicts if not verdict.passed)

    @property
    def ran(self) -> tuple[str, ...]:
        """The names of the jobs that ran."""
        return tuple(job.name for job in self.jobs if job.ran)

    def as_json(self) -> dict[str, Any]:
        """Return the content of the file, without what a job or a run without a wrapper lacks."""
        # Tuples become lists, so that the content is equal to that of the file.
        content: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        if not self.wrap:
            del content["wrap"]
        for job in content["jobs"]:
            for key in [key for key, value in job.items() if value is None]:
                del job[key]
        return content
