"""Check a machine, or compare several."""

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from primus_images.cli.verb import answer, note, refuse_others
from primus_images.errors import InputError
from primus_images.files import write_file
from primus_images.recipes.choose import CPU, among, values_of
from primus_images.system import nodes, preflight as checks
from primus_images.system.host import Finding, Host, name_here
from primus_images.terminal import Screen, counted


def preflight(options: argparse.Namespace) -> int:
    """Check this machine before a job: GPUs, rights, driver, memory, disk, limits and network."""
    if options.nodes:
        refuse_others(options, "preflight", "--nodes", ("one machine",))
        return _compare(options)
    if not options.root.is_dir():
        raise InputError(
            f"{options.root} is not a folder", hint="--root takes the root folder of a machine"
        )
    here = options.root == Path("/")
    for word, value in (("--benchmark", options.benchmark), ("--burn-in", options.burn_in)):
        if value and (options.quick or not here):
            raise InputError(
                f"{word} cannot be used with {'--quick' if options.quick else '--root'}"
            )
    host = Host(root=options.root, output=options.output.absolute())
    folder = next(path for path in (host.output, *host.output.parents) if path.exists())
    if not folder.is_dir():
        raise InputError(f"--output: {folder} is not a folder")
    if options.gpu is not None:
        among(
            "GPU",
            options.gpu,
            [name for name in values_of("gpu") if name != CPU],
            f"--gpu {options.gpu}",
        )
    findings = [
        *checks.preflight(host),
        *checks.expected(host, options.expect, options.gpu, options.expect_nics),
    ]
    measurements: list[nodes.Measurement] = []
    if not options.quick and here:
        findings.append(checks.disk_speed(folder))
    if options.benchmark:
        more, measurements = nodes.benchmark(host)
        findings += more
    if options.burn_in:
        findings += nodes.burn_in(host, options.burn_in, partial(note, options))
    node = nodes.Node(
        name=name_here(),
        gpus=host.gpus.names,
        driver=host.gpus.driver,
        findings=tuple(findings),
        measurements=tuple(measurements),
    )
    verdict = f"{node.name}: " + (
        counted(len(node.problems), "problem") if node.problems else "ready"
    )
    if options.html:
        write_file(options.html, nodes.page([node], []))
    return answer(options, node.document(), [*_lines(findings), verdict], passed=not node.problems)


def _compare(options: argparse.Namespace) -> int:
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
    verdict = f"{counted(len(compared), 'node')}: " + (f"{bad} with problems" if bad else "ready")
    lines = Screen.of().table(table, head=("", "node", "GPUs", "verdict"))
    return answer(options, document, [*lines, verdict], passed=passed)


def _lines(findings: list[Finding]) -> Iterator[str]:
    screen = Screen.of()
    for finding in findings:
        yield from screen.wrap(
            f"{nodes.MARKS[finding.level]} {finding.check}: {finding.message}", hanging="  "
        )
        yield from screen.wrap(finding.remedy, "  → ", "    ") if finding.remedy else ()
