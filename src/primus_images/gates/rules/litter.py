"""No secrets, insecure apt settings, caches or paths of the build machine are in the image.

Everyone can download the files of a published package. A key in such a layer is a warning, and a
path of its maker's machine is nothing. In a layer whose files this project made both are errors.
"""

from primus_images.gates.contents import Rule, Trace, secrets_in
from primus_images.gates.examined import Examined, Finding, GateReport, Severity, machine_paths
from primus_images.plan.action import Action

_FIXED: dict[Rule, Severity] = {"insecure apt": "error", "credentials": "error", "cache": "error"}


def judge(examined: Examined) -> GateReport:
    """Return errors for secrets in the image's settings, and for traces in its files that must be
    removed.
    """
    findings = list[Finding]()
    here = tuple(path.decode("utf-8", "replace") for path in machine_paths(examined.workspace))
    for action in examined.image.plan.layers:
        layer = action.name
        for trace in examined.facts[layer].traces:
            ours = _is_ours(action, trace, here)
            severity = _FIXED.get(trace.rule) or ("error" if ours else "warning")
            if trace.rule == "build path" and not ours:
                continue
            message = f"{trace.rule}: {trace.seen}" + (
                "" if severity == "error" else " (as its package is published)"
            )
            findings.append(
                Finding(severity=severity, layer=layer, path=trace.path, message=message)
            )
    findings += [
        Finding(severity="error", path="config", message=f"secret: {what} in the image's settings")
        for what in dict.fromkeys(secrets_in(examined.image.config))
    ]
    return GateReport(
        summary="secrets, apt settings, caches, build paths", findings=tuple(findings)
    )


def _is_ours(action: Action, trace: Trace, here: tuple[str, ...]) -> bool:
    """Whether this project made the file: neither the publisher of a package nor the author of a
    source did.
    """
    if action.kind == "wheels" and action.needs:
        # The only home folder that a build sees is root's. A file with another one's path got it
        # from its source, as AITER's compiled kernels do.
        of_source = trace.rule == "build path" and trace.seen.startswith("/home/")
        if of_source:
            return trace.seen.startswith(here)
        return True
    if action.kind == "debs":
        # Packages install their own files below /usr, such as libgnutls with the key for its
        # self-test. Keys that are generated when a package is installed are in /etc or /var.
        return trace.rule != "secret" or not trace.path.startswith("usr/")
    return action.kind not in ("image", "wheels", "kernels")
