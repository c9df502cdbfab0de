"""The image's compressed size stays within the budget of its target."""

from primus_images.gates.examined import Examined, Finding, GateReport
from primus_images.terminal import bytes_text


def judge(examined: Examined) -> GateReport:
    """Compare the size with the target's ``budget_gb``. An error lists the largest layers."""
    image = examined.image
    resolved = image.plan.resolved
    size = bytes_text(image.size)
    if resolved.budget_gb is None:
        return GateReport(summary=f"{size} compressed")
    budget = round(resolved.budget_gb * 1e9)
    summary = f"{size} compressed of {bytes_text(budget)}"
    if image.size <= budget:
        return GateReport(summary=summary)
    sizes = {action.name: layer.blob.size for action, layer in image.rows}
    ranked = sorted(sizes, key=lambda name: -sizes[name])
    largest = []
    for name in ranked[:5]:
        layer_size = bytes_text(sizes[name])
        largest.append(f"{name} {layer_size}")
    message = f"the image has {size}, its budget is {bytes_text(budget)}: {', '.join(largest)}"
    channel = resolved.choice.channel
    where = resolved.place("budget_gb")
    if channel in resolved.target.budgets_gb:
        where = resolved.place("budgets_gb", channel)
    finding = Finding("error", message, path=where)
    return GateReport(summary=summary, findings=[finding])
