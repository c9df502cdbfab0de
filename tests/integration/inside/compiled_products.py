"""Print the products that the facts of a step name, for a layer whose compiler computes a product of its own."""

import json
from typing import Any

import torch

from primus.training import facts


def compiler(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Any:
    """As PyTorch's: it calls operators while it compiles, and in other dtypes than the layer's."""
    torch.ones(8, 64) @ torch.ones(64, 64)
    return graph.forward


def products() -> dict[str, int]:
    with facts.watching([layer], compiled=True) as seen:
        layer(torch.ones(8, 64, dtype=torch.bfloat16)).sum().backward()
    return dict(seen["matmul_dtypes"])


class Layer(torch.nn.Linear):
    """PyTorch does not compile its own modules alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


layer = Layer(64, 64, dtype=torch.bfloat16)
layer.compile(backend=compiler)
print(json.dumps([products(), products()]))
