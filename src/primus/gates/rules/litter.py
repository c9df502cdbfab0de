"""No secrets, insecure apt settings, caches or paths of the build machine are in the image.

Everyone can download the files of a published package. A key or a path of its maker's machine in such a layer is a
warning or a note. In a layer whose files this project made it is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from primus.gates.contents import Rule, Trace, secrets_in
from primus.gates.examined import Examined, Finding, GateReport, Severity, machine_paths

_FIXED: dict[Rule, Severity] = {"insecure apt": "error", "credentials": "error", "cache": "error"}


def judge(examined: Examined) -> GateReport:
    """Judge the traces in the image's files, and secrets in its settings (environment, labels, history)."""
    actions = examined.image.plan.layers
    published = {a.name for a in actions if a.kind in ("image", "wheels", "kernels") and not a.needs}
    bases = {a.name for a in actions if a.kind == "debs"}
    built = {a.name for a in actions if a.kind == "wheels" and a.needs}
    here = tuple(path.decode("utf-8", "replace") for path in machine_paths(examined.workspace))

    def is_ours(layer: str, trace: Trace) -> bool:
        # The only home folder that a build sees is root's. A file with another one's path got it from its source, as
        # AITER's compiled kernels do.
        if layer in built and trace.rule == "build path" and trace.seen.startswith("/home/"):
            return trace.seen.startswith(here)
        # Packages install their own files below /usr, such as libgnutls with the key for its self-test. Keys that are
        # generated when a package is installed are in /etc or /var.
        packaged = layer in bases and trace.rule == "secret" and trace.path.startswith("usr/")
        return layer not in published and not packaged

    report = litter([(layer, facts.traces) for layer, facts in examined.facts.items()], is_ours)
    in_settings = tuple(
        Finding(severity="error", path="config", message=f"secret: {what} in the image's settings")
        for what in dict.fromkeys(secrets_in(examined.image.config))
    )
    return replace(report, findings=(*report.findings, *in_settings))


def litter(layers: Iterable[tuple[str, Iterable[Trace]]], is_ours: Callable[[str, Trace], bool]) -> GateReport:
    """Return errors for what must be removed. Traces from published packages are a warning, or one note per layer.

    ``is_ours`` returns, for a layer and a trace in it, whether the build created the file.
    """
    findings: list[Finding] = []
    for layer, traces in layers:
        paths: dict[str, str] = {}
        for trace in traces:
            ours = is_ours(layer, trace)
            severity = _FIXED.get(trace.rule) or ("error" if ours else "warning")
            if trace.rule == "build path" and not ours:
                paths.setdefault(trace.path, trace.seen)
                continue
            message = f"{trace.rule}: {trace.seen}" + ("" if severity == "error" else " (as its package is published)")
            findings.append(Finding(severity=severity, layer=layer, path=trace.path, message=message))
        if paths:
            first = next(iter(paths))
            message = f"{len(paths)} published files name the machine they were made on, as {paths[first]}"
            findings.append(Finding(severity="note", layer=layer, path=first, message=message))
    return GateReport(summary="secrets, apt settings, caches, build paths", findings=tuple(findings))
