"""What tests of training share. They also run inside an image, where torch is."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
