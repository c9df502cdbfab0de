"""Sharding of a model whose output layer is its embedding, in torchtitan 0.2.2.

torchtitan shards the embedding as one group and the output layer as another. Both have the same
weight, which can be in one group only: PyTorch 2.13 refuses it. Later versions of torchtitan make
one group of both (github.com/pytorch/torchtitan/pull/2522), and so does this.
"""

from typing import Any

from torch import nn

from primus_images.patch import replace


def patch() -> None:
    """Let torchtitan shard a tied embedding together with the output layer."""
    from torchtitan.models.llama4.infra import parallelize

    # torchtitan shards the embedding before the output layer.
    embeddings: list[nn.Module] = []

    def shard(module: Any, **options: Any) -> Any:
        if isinstance(module, nn.Embedding):
            embeddings.append(module)
            return module
        if isinstance(module, list):
            return fully_shard([*embeddings, *module], **options)
        return fully_shard(module, **options)

    fully_shard = replace(parallelize, "fully_shard", shard)
