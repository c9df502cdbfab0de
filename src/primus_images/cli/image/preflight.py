"""Check a machine, or compare several."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from primus_images.cli.verb import Options, answer, note, refuse_others
from primus_images.errors import InputError
from primus_images.files import write_file
from primus_images.recipes.choose import CPU, among, values_of
from primus_images.system import nodes, preflight as checks
from primus_images.system.host import Finding, Host, name_here
from primus_images.terminal import Screen, counted


@dataclass(frozen=True, kw_only=True)
class PreflightOptions(Options):
    """The options of ``preflight``."""

    quick: bool
    benchmark: bool
    burn_in: float | None
    expect: int | None
    gpu: str | None
    expect_nics: int | None
    root: Path
    output: Path
    nodes: Sequence[Path]
    html: Path | None

    @property
    def here(self) -> bool:
        """Whether the machine is the one that this process runs on."""
        return self.root == Path("/")


def preflight(options: PreflightOptions) -> int:
    """Check this machine before a job: GPUs, rights, driver, memory, disk, limits and network."""
    if options.nodes:
        refuse_others(options, "preflight", "--nodes", ("one machine",))
        return _compare(options)
    _check(options)
    node = _node(Host(root=options.root, output=options.output.absolute()), options)
    verdict = "ready"
    if node.problems:
        verdict = counted(len(node.problems), "problem")
    if options.html:
        write_file(options.html, nodes.page([node], []))
    lines = [*_lines(node.findings), f"{node.name}: {verdict}"]
    return answer(options, node.document(), lines, passed=not node.problems)


def _check(options: PreflightOptions) -> None:
    if not options.root.is_dir():
        raise InputError(
            f"{options.root} is not a folder", hint="--root takes the root folder of a machine"
        )
    for word, value in (("--benchmark", options.benchmark), ("--burn-in", options.burn_in)):
        if value and options.quick:
            raise InputError(f"{word} cannot be used with --quick")
        if value and not options.here:
            raise InputError(f"{word} cannot be used with --root")
    if not _existing(options.output).is_dir():
        raise InputError(f"--output: {_existing(options.output)} is not a folder")
    if options.gpu is not None:
        gpus = [name for name in values_of("gpu") if name != CPU]
        among("GPU", options.gpu, gpus, f"--gpu {options.gpu}")


def _existing(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def _node(host: Host, options: PreflightOptions) -> nodes.Node:
    findings = [
        *checks.preflight(host),
        *checks.expected(host, options.expect, options.gpu, options.expect_nics),
    ]
    measurements: list[nodes.Measurement] = []
    if not options.quick and options.here:
        findings.append(checks.disk_speed(_existing(options.output)))
    if options.benchmark:
        slow, measurements = nodes.benchmark(host)
        findings += slow
    if options.burn_in:
        findings += nodes.burn_in(host, options.burn_in, partial(note, options))
    return nodes.Node(
        name=name_here(),
        gpus=host.gpus.names,
        driver=host.gpus.driver,
        findings=tuple(findings),
        measurements=tuple(measurements),
    )


def _compare(options: PreflightOptions) -> int:
    compared = [nodes.read(path) for path in options.nodes]
    between = nodes.compare(compared)
    passed = not between and not any(node.problems for node in compared)
    if options.html:
        write_file(options.html, nodes.page(compared, between))
    document = {
        "passed": passed,
        "nodes": [node.document() for node in compared],
        "between": [{"node": name, **asdict(finding)} for name, finding in between],
    }
    table = nodes.rows(compared, between)
    bad = sum(row[0] != nodes.MARKS["ok"] for row in table)
    verdict = "ready"
    if bad:
        verdict = f"{bad} with problems"
    lines = Screen.of().table(table, head=("", "node", "GPUs", "verdict"))
    lines.append(f"{counted(len(compared), 'node')}: {verdict}")
    return answer(options, document, lines, passed=passed)


def _lines(findings: Sequence[Finding]) -> Iterator[str]:
    screen = Screen.of()
    for finding in findings:
        message = f"{nodes.MARKS[finding.level]} {finding.check}: {finding.message}"
        yield from screen.wrap(message, hanging="  ")
        if finding.remedy:
            yield from screen.wrap(finding.remedy, "  → ", "    ")
