"""Which ranks the rows of a weight are gathered from, for the evidence of a run."""

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from torch import distributed as dist  # noqa: E402
from torch.distributed.tensor import (  # noqa: E402
    DTensor,
    Placement,
    Replicate,
    Shard,
    init_device_mesh,
)
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from primus_images.training.judge import witness  # noqa: E402

ROWS, COLUMNS = Shard(0), Shard(1)
COPY = Replicate()


@pytest.fixture(autouse=True)
def ranks() -> Iterator[None]:
    """The first of six ranks, which hears nothing of the others."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=6)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("placements", "size"),
    [
        ([ROWS, COPY], 2),
        ([COPY, ROWS], 3),
        ([ROWS, ROWS], None),
        ([COPY, COPY], None),
        ([COPY, COLUMNS], None),
    ],
)
def test_rows_come_from_the_only_dimension_that_divides_them(
    placements: list[Placement], size: int | None
) -> None:
    mesh = init_device_mesh("cpu", (2, 3))
    tensor = DTensor.from_local(torch.ones(2, 2), mesh, placements, run_check=False)
    group = witness._group_of_rows(tensor)
    assert (group and group.size()) == size


def test_a_plain_tensor_is_whole() -> None:
    assert witness._group_of_rows(torch.ones(2)) is None
