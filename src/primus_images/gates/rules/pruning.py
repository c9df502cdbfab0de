"""The image holds no GPU code for other architectures."""

from primus_images.gates.contents import Code, is_kernel_file
from primus_images.gates.examined import Examined, Finding, GateReport
from primus_images.gpucode.elf import in_path, runs_on
from primus_images.terminal import bytes_text

_FORMS = ("code object", "bundle", "kernel pack")


def judge(examined: Examined) -> GateReport:
    """Return one warning per layer with kernel files of other architectures.

    So is one per library whose fat binary has code for them.
    """
    arch = examined.arch
    if arch is None:
        return GateReport(summary="no GPU architecture to prune for")
    findings = []
    total = 0
    total_size = 0
    libraries = 0
    for layer, facts in examined.facts.items():
        idle = [code for code in facts.code if _is_for_others(code, arch)]
        if idle:
            size = sum(code.size for code in idle)
            total += len(idle)
            total_size += size
            message = f"{len(idle)} kernel files, {bytes_text(size)}, are not for {arch}"
            first = min(code.path for code in idle)
            findings.append(Finding("warning", message, layer, first))
        for code in facts.code:
            others = [target for target in code.targets if not runs_on([target], arch)]
            if code.form == "fat binary" and others:
                libraries += 1
                message = f"it also holds code for {', '.join(others)}"
                findings.append(Finding("warning", message, layer, code.path))
    summary = f"{total} kernel files for other architectures, {bytes_text(total_size)}"
    if libraries:
        noun = "library" if libraries == 1 else "libraries"
        summary += f"; code for them in {libraries} {noun}"
    return GateReport(summary=summary, findings=findings)


def _is_for_others(code: Code, arch: str) -> bool:
    targets = in_path(code.path)
    if not targets and code.form in _FORMS:
        targets = code.targets
    return is_kernel_file(code.path) and bool(targets) and not runs_on(targets, arch)
