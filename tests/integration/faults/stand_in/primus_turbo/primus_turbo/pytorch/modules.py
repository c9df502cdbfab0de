"""Modules."""

import torch

from primus_turbo.pytorch.core.low_precision import Float8QuantConfig
from primus_turbo.pytorch.ops import gemm_fp8


class Float8Linear(torch.nn.Linear):
    """A linear layer whose products are computed in FP8."""

    def forward(self, x):
        flat = x.reshape(-1, self.in_features)
        out = gemm_fp8(
            flat, self.weight, trans_a=False, trans_b=True, out_dtype=x.dtype, config=self.config
        )
        return (out if self.bias is None else out + self.bias).view(
            *x.shape[:-1], self.out_features
        )

    @classmethod
    def from_float(cls, mod, config: Float8QuantConfig | None = None, inplace=True):
        assert inplace
        mod.__class__ = cls
        mod.config = config or Float8QuantConfig()
        return mod
