"""Publish the image ``demo`` of a project: `python -m benchmarks.publish_once PROJECT REPOSITORY`.

`python -m benchmarks.publish` times it, so it imports nothing else. What a policy needs is left
out.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from primus_images.plan.layers import plan_image
from primus_images.plan.project import Project
from primus_images.plan.resolve import resolve
from primus_images.progress import Progress
from primus_images.release.policy import Policy
from primus_images.release.publish import Needs, prepare, publish


def main(root: str, repository: str) -> None:
    """Publish the built image of the project in ``root``, and print what was sent."""
    project = Project(Path(root))
    plan = plan_image(resolve(project, "demo"), project.workspace.stats)
    needs = Needs(records=project.root / "none", policy=Policy(), preview=False)
    ready = prepare(plan, project.workspace, needs, Progress())
    done = publish(replace(ready, objections=()), project.workspace.store, repository, Progress())
    layers = {layer.blob.digest for layer in ready.image.layers}
    print(
        json.dumps(
            {
                **done,
                "layers": sorted(layers),
                "config": json.loads(ready.image.manifest)["config"]["digest"],
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
