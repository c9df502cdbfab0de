"""The reference's models of one run, as its job describes them: exact, or rounded as the run's backend does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from primus.gpus.table import fp8_dtype, generation
from primus.recipes.architecture import Architecture, RopeScaling
from primus.recipes.known import CPU
from primus.training.reference.diffusion import Diffusion
from primus.training.reference.model import Dialect, Model, is_narrow
from primus.training.reference.names import BIAS, Tensors
from primus.training.reference.rounding import INNER, bfloat, exact

AnyModel = Model | Diffusion


class Models:
    """The models that repeat the run of ``job``, and the weights with which they compute."""

    def __init__(self, job: Mapping[str, Any], sizes: Architecture) -> None:
        self._job = job
        self.sizes = _as_trained(job, sizes)
        self.dialect = _dialect(job)
        self.exact = job["precision"] == "fp32"

    def model(self) -> AnyModel:
        """Return the model that repeats the run. FP8's rounding is large and known, so it is repeated as well."""
        if self.sizes.family == "flux":
            guidance = float(self._job["config"].get("guidance", 1.0))
            return Diffusion(self.sizes, guidance, entering=exact if self.exact else bfloat)
        return Model(self.sizes, self.dialect, eight=_eight(self._job))

    def rounding(self, grid: float = 1.0) -> AnyModel:
        """Return the model that rounds as the run's precision does.

        ``grid`` between 1 and 2 scales the numbers to which it rounds, which is another rounding of the same precision.
        """
        model = self.model()
        if not self.exact:
            model.between = lambda tensor: bfloat(tensor * grid) / grid
            on_cpu = self._job["gpu"] == CPU
            if isinstance(model, Model):
                model.inner = INNER[self._job["backend"]]
                # No fused kernel supports values of another size than keys.
                model.adding = on_cpu and not self.sizes.mla.kv_lora_rank
            elif on_cpu:
                # PyTorch keeps them as bfloat16 numbers on CPUs, and as float32 numbers on GPUs.
                model.keeping, model.adding = model.between, True
        return model

    def weights(self, weights: Tensors, dtype: torch.dtype) -> Tensors:
        """Return ``weights`` as the run computes with them, in ``dtype``, and the scale of adapters."""
        found = {name: (t if self._kept(name) else t.to(torch.bfloat16)).to(dtype) for name, t in weights.items()}
        if self._job["mode"] == "lora":
            config = self._job["config"]
            scale = float(config.get("lora.alpha", 32.0)) / float(config.get("lora.rank", 16))
            found[".adapter_scale"] = torch.tensor(scale, dtype=torch.float64)
        return found

    def _kept(self, name: str) -> bool:
        """Return whether the run computes with the weight ``name`` as it is stored, not rounded to bfloat16."""
        # torchtitan can gather weights in FP8, which it then rounds from float32.
        gathered = self._job["config"].get("quantize.linear.float8.enable_fsdp_float8_all_gather")
        eight = self._job["precision"] == "fp8" and gathered and is_narrow(name)
        return self.exact or name.endswith(BIAS) or bool(eight)


def _eight(job: Mapping[str, Any]) -> torch.dtype | None:
    """Return the FP8 format of the job's GPU; on a CPU, the standard one."""
    if job["precision"] != "fp8":
        return None
    name = "e4m3fn" if job["gpu"] == CPU else fp8_dtype(generation(job["gpu"]))
    found: torch.dtype = getattr(torch, f"float8_{name}")
    return found


def _dialect(job: Mapping[str, Any]) -> Dialect:
    if job["backend"] == "torchtitan":
        # Its experts are balanced by a bias in the router, not by a loss.
        return Dialect(softmax_mscale=True, bias_rate=job["model"]["moe"]["auxiliary_loss"], centered=True)
    moe = job["model"]["moe"]
    if job["backend"] == "megatron" and moe["experts"]:
        kind = str(job["config"].get("model.moe_router_load_balancing_type", "aux_loss"))
        return Dialect(
            balance={"seq_aux_loss": "sequence", "aux_loss": "batch"}.get(kind, "none"),
            group_best=max(1, moe["top_k"] // moe["top_groups"]),
            bias_rate=float(job["config"].get("model.moe_router_bias_update_rate", 1e-3))
            if moe["score"] == "sigmoid"
            else 0.0,
        )
    return Dialect()


def _as_trained(job: Mapping[str, Any], sizes: Architecture) -> Architecture:
    """Return the sizes as trained: torchtitan scales DeepSeek's positions only beyond the original length."""
    short = sizes.rope_scaling.original_max_position >= int(job["config"].get("training.seq_len", 0))
    if job["backend"] == "torchtitan" and sizes.rope_scaling.kind == "yarn" and short:
        return replace(sizes, rope_scaling=RopeScaling())
    return sizes
