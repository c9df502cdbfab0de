"""`primus check`: the gates on built images."""

from primus_images.cli.host.common import SeveralOptions, resolved_targets
from primus_images.cli.verb import answer
from primus_images.gates.check import judge, outcome_text
from primus_images.gates.examined import examine
from primus_images.plan.layers import plan_images
from primus_images.progress import choose_progress
from primus_images.terminal import Screen


def check(options: SeveralOptions) -> int:
    """Run every gate on a built image, using the contents of its layers."""
    targets, workspace = resolved_targets(options)
    with choose_progress(options.json) as progress:
        plans = plan_images(targets, workspace.stats)
        outcomes = [judge(examine(plan, workspace, progress)) for plan in plans]
    passed = all(outcome.passed for outcome in outcomes)
    document = {"images": [outcome.as_json() for outcome in outcomes], "passed": passed}
    text = "\n\n".join(outcome_text(outcome, Screen.of()) for outcome in outcomes)
    return answer(options, document, [text], passed=passed)
