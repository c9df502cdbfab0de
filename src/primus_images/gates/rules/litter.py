"""No secrets, logins, caches or paths of the build machine are in the image.

Everyone can download the files of a published package. A key in such a layer is a warning, and a
path of its maker's machine is nothing. In a layer whose files this project made both are errors.
"""

from primus_images.gates.contents import Trace, secrets_in
from primus_images.gates.examined import Examined, Finding, GateReport, machine_paths
from primus_images.plan.action import Action

# Those of a published package are not this project's fault.
_PUBLISHED = ("secret", "build path")


def judge(examined: Examined) -> GateReport:
    """Return errors for secrets in the image's settings, and for what must leave its files."""
    findings = []
    paths = machine_paths(examined.workspace)
    here = tuple(path.decode("utf-8", "replace") for path in paths)
    for action in examined.image.plan.layers:
        layer = action.name
        traces = examined.facts[layer].traces
        for trace in traces:
            message = f"{trace.rule}: {trace.seen}"
            is_ours = _is_ours(action, trace, here)
            if is_ours or trace.rule not in _PUBLISHED:
                findings.append(Finding("error", message, layer, trace.path))
            elif trace.rule == "secret":
                message += " (as its package is published)"
                findings.append(Finding("warning", message, layer, trace.path))
    kinds = secrets_in(examined.image.config)
    for kind in dict.fromkeys(kinds):
        message = f"secret: {kind} in the image's settings"
        findings.append(Finding("error", message, path="config"))
    return GateReport(summary="secrets, logins, caches, build paths", findings=findings)


def _is_ours(action: Action, trace: Trace, here: tuple[str, ...]) -> bool:
    """Whether this project made the file, and not a package's publisher or a source's author."""
    if action.kind == "wheels" and action.needs:
        # The only home folder that a build sees is root's. A file with another one's path got it
        # from its source, as AITER's compiled kernels do.
        of_source = trace.rule == "build path" and trace.seen.startswith("/home/")
        return not of_source or trace.seen.startswith(here)
    if action.kind == "debs":
        # Packages install their own files below /usr, such as libgnutls with the key for its
        # self-test. Keys that are generated when a package is installed are in /etc or /var.
        return trace.rule != "secret" or not trace.path.startswith("usr/")
    return action.kind not in ("image", "wheels", "kernels")
