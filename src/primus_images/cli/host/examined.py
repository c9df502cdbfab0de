"""The image that a verb examines."""

from primus_images.cli.host.common import SingleOptions, resolved_target
from primus_images.gates.examined import Examined, examine
from primus_images.plan.layers import plan_images
from primus_images.plan.resolve import ResolvedTarget
from primus_images.progress import choose_progress


def examined_target(options: SingleOptions) -> tuple[ResolvedTarget, Examined]:
    """Resolve the requested target, and examine the layers of its image.

    Raises InputError if it is not built.
    """
    resolved, workspace = resolved_target(options)
    (plan,) = plan_images([resolved], workspace.stats)
    with choose_progress(options.json) as progress:
        return resolved, examine(plan, workspace, progress)
