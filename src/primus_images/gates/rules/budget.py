"""The image's compressed size stays within the budget of its target."""

from primus_images.gates.examined import Examined, Finding, GateReport
from primus_images.terminal import bytes_text


def judge(examined: Examined) -> GateReport:
    """Compare the size with the target's ``budget_gb``. An error lists the largest layers."""
    image = examined.image
    resolved = examined.image.plan.resolved
    summary = f"{bytes_text(image.size)} compressed"
    if resolved.budget_gb is None:
        return GateReport(summary=summary)
    budget = round(resolved.budget_gb * 1e9)
    findings: tuple[Finding, ...] = ()
    if image.size > budget:
        ranked = sorted(image.rows, key=lambda pair: -pair[1].blob.size)
        largest = ", ".join(
            f"{action.name} {bytes_text(layer.blob.size)}" for action, layer in ranked[:5]
        )
        message = (
            f"the image has {bytes_text(image.size)}, its budget is {bytes_text(budget)}: {largest}"
        )
        channel = resolved.choice.channel
        if channel in resolved.target.budgets_gb:
            key = ("budgets_gb", channel)
        else:
            key = ("budget_gb",)
        findings = (Finding(severity="error", path=resolved.place(*key), message=message),)
    return GateReport(summary=f"{summary} of {bytes_text(budget)}", findings=findings)
