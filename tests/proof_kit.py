"""What the reference writes of a run that it agrees with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Of one token.
FLOPS = 3e6


def evidence(seen: Mapping[int, tuple[float, float]]) -> dict[str, Any]:
    """The content of ``proof.json`` for step → (loss, gradient norm) of a healthy run in float32."""
    rows = [
        {
            "step": step, "data": [], "loss": loss, "grad_norm": norm, "rate": 0.01, "rates": [0.01],
            "own_gradient": True, "gaps": {"a.weight": (1e-6, "a.1.weight")}, "missing": [], "stale": [], "biases": [],
            "apart": [],
            "blocks": [
                {
                    "name": "logits", "balanced": False, "certain": 1.0, "typical": 1.0, "token": 1.0,
                    "token_at": [0, 0], "position": 1.0, "position_at": 0, "share": 0.0, "noise": 1e-6,
                },
            ],
            "used_norm": norm, "rounded": 0.0,
            "update": {"gap": 0.0, "name": ""}, "closest": 1.0, "regular": step == 1,
            "noise": {"loss": 1e-9, "grad_norm": 1e-8, "gaps": {"a.weight": (1e-7, "a.0.weight")}},
        }
        for step, (loss, norm) in seen.items()
    ]  # fmt: skip
    epsilon = {"share": 0.01, "rounding": 0.02, "deviation": 0.01, "biased": False, "eight": False}
    return {
        "precision": "fp32",
        "unseen": False,
        "on_cpu": True,
        "whole": True,
        "max_norm": 1.0,
        "summands": 2,
        "narrow_sums": False,
        "steps": rows,
        "parameters": {"missing": [], "odd": [], "count": 10, "trained": 10, "flops": FLOPS},
        "moved": [],
        "first": [],
        "saved": [],
        "constants": {"norm epsilon + 0.001": epsilon},
    }
