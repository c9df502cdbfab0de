"""The facts that a run leaves are those of what ran: its products, and a digest that any change of
weights changes.
"""

import os
from typing import Any

import torch

from primus_images.training.backends import gloo
from primus_images.training.run import facts


class Layer(torch.nn.Linear):
    """PyTorch does not compile its own modules alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def check_the_compilers_own_products_are_not_the_runs() -> None:
    """They made the check "precision" fail for FLUX in BF16: the compiler traces its linear layers
    in float32.
    """

    def compiler(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Any:
        torch.ones(8, 64) @ torch.ones(64, 64)
        return graph.forward

    def products() -> dict[str, int]:
        with facts.watching([layer], compiled=True) as seen:
            layer(torch.ones(8, 64, dtype=torch.bfloat16)).sum().backward()
        return dict(seen["matmul_dtypes"])

    layer = Layer(64, 64, dtype=torch.bfloat16)
    layer.compile(backend=compiler)
    compiling, compiled = products(), products()
    assert compiling == compiled
    assert "aten::mm float" not in compiling, compiling
    assert "aten::addmm BFloat16" in compiling, compiling


def digest(*weights: torch.Tensor) -> str:
    model = torch.nn.ParameterList(
        torch.nn.Parameter(weight, requires_grad=False) for weight in weights
    )
    return facts.digest([model])


def check_any_change_of_the_weights_changes_their_digest() -> None:
    first, second = torch.randn(33, 7), torch.randn(231)
    bit = first.clone()
    bit.view(torch.int32)[32, 6] ^= 1
    exchanged = second.clone()
    exchanged[[3, 200]] = exchanged[[200, 3]]
    other_shape, other_dtype, not_contiguous = (
        first.reshape(7, 33),
        first.view(torch.int32),
        first.t(),
    )
    digests = [
        digest(first, second),
        digest(bit, second),
        digest(first, exchanged),
        digest(second, first),
        digest(other_shape, second),
        digest(other_dtype, second),
        digest(not_contiguous, second),
        digest(first),
    ]
    assert len(set(digests)) == len(digests), digests
    assert digest(first.clone(), second.clone()) == digests[0]
    whole, *in_pieces = (facts.checksums(first, at_once).tolist() for at_once in (1000, 10, 1))
    assert in_pieces == [whole, whole]


check_the_compilers_own_products_are_not_the_runs()
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
torch.distributed.init_process_group(
    "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
)
torch.manual_seed(1)
check_any_change_of_the_weights_changes_their_digest()
gloo.leave()
