"""The image holds no GPU code for other architectures."""

from primus_images.gates.contents import Code, is_kernel_file
from primus_images.gates.examined import Examined, Finding, GateReport
from primus_images.gpucode.elf import in_path, runs_on
from primus_images.terminal import bytes_text

_FORMS = ("code object", "bundle", "kernel pack")


def judge(examined: Examined) -> GateReport:
    """Return one warning per layer with kernel files of other architectures, and one per library
    whose fat binary has code for them.
    """
    arch = examined.arch
    if arch is None:
        return GateReport(summary="no GPU architecture to prune for")
    findings = []
    total = 0
    size = 0
    libraries = 0
    for layer, facts in examined.facts.items():
        idle = [c for c in facts.code if _is_for_others(c, arch)]
        if idle:
            total = total + len(idle)
            size = size + sum(c.size for c in idle)
            message = (
                f"{len(idle)} kernel files, {bytes_text(sum(c.size for c in idle))}, are "
                f"not for {arch}"
            )
            findings.append(
                Finding(
                    severity="warning", layer=layer, path=min(c.path for c in idle), message=message
                )
            )
        for code in facts.code:
            if code.form == "fat binary" and (
                others := [t for t in code.targets if not runs_on([t], arch)]
            ):
                libraries += 1
                message = f"it also holds code for {', '.join(others)}"
                findings.append(
                    Finding(severity="warning", layer=layer, path=code.path, message=message)
                )
    summary = f"{total} kernel files for other architectures, {bytes_text(size)}"
    if libraries:
        summary += f"; code for them in {libraries} {'library' if libraries == 1 else 'libraries'}"
    return GateReport(summary=summary, findings=tuple(findings))


def _is_for_others(code: Code, arch: str) -> bool:
    targets = in_path(code.path) or (code.targets if code.form in _FORMS else ())
    return is_kernel_file(code.path) and bool(targets) and not runs_on(targets, arch)
