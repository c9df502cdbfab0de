"""Ranks on CPUs find each other, and exchange 16-bit floats that gloo may lack."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import distributed as dist  # noqa: E402

from primus_images.training.backends import gloo  # noqa: E402
from primus_images.training.backends.loop import process  # noqa: E402

VARIABLES = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
    "PRIMUS_LAUNCH": "7",
    "GLOO_SOCKET_IFNAME": "lo",
}


@pytest.fixture(autouse=True)
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    # Also what a test changes without the fixture.
    monkeypatch.setenv("USE_LIBUV", "1")
    stores = [*gloo._OPEN_STORES]
    yield
    gloo._OPEN_STORES[:] = stores
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_dtypes_that_gloo_lacks_are_exchanged_as_float32(
    capfd: pytest.CaptureFixture[str],
) -> None:
    gloo._say.cache_clear()
    assert not gloo.lacks(torch.float32)
    assert gloo.lacks(torch.float8_e4m3fn)
    try:
        assert gloo.complete(always=True) == (torch.bfloat16, torch.float16)
        assert "no bfloat16" not in capfd.readouterr().err
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        for dtype in (torch.bfloat16, torch.float32):
            tensor = torch.tensor([1.5, 2.5], dtype=dtype)
            dist.all_reduce(tensor)
            dist.broadcast(tensor, 0)
            assert tensor.tolist() == [1.5, 2.5]
            assert tensor.dtype == dtype
            whole = torch.zeros(2, dtype=dtype)
            dist.all_gather_into_tensor(whole, tensor)
            assert whole.tolist() == [1.5, 2.5]
            parts = [torch.zeros(2, dtype=dtype)]
            dist.all_gather(parts, tensor)
            assert parts[0].tolist() == [1.5, 2.5]
            share = torch.zeros(2, dtype=dtype)
            dist.reduce_scatter_tensor(share, tensor)
            assert share.tolist() == [1.5, 2.5]
        said = capfd.readouterr().err
        assert said.count("this PyTorch's gloo has no bfloat16: ranks exchange float32") == 1
    finally:
        gloo._KEPT.clear()


def test_rank_0_notes_the_port_of_its_store(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    gloo.choose_store(tmp_path)
    port = os.environ["MASTER_PORT"]
    assert int(port) > 0
    assert os.environ["USE_LIBUV"] == "1"
    # Another rank reads it, and another attempt has one of its own.
    os.environ["MASTER_PORT"] = "0"
    os.environ["RANK"] = "1"
    gloo.choose_store(tmp_path)
    assert os.environ["MASTER_PORT"] == port
    os.environ |= {"RANK": "0", "PRIMUS_LAUNCH": "8"}
    gloo.choose_store(tmp_path)
    assert os.environ["MASTER_PORT"] != port


def test_ranks_of_several_machines_have_the_store_of_torchrun(tmp_path: Path) -> None:
    os.environ["WORLD_SIZE"] = "2"
    gloo.choose_store(tmp_path)
    assert os.environ["MASTER_PORT"] == "0"


@pytest.mark.parametrize(("message", "value"), [("built without libuv", "0"), ("other", "1")])
def test_store_does_without_libuv_if_torch_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str, value: str
) -> None:
    os.environ["WORLD_SIZE"] = "2"

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(dist, "TCPStore", refuse)
    if value == "1":
        with pytest.raises(RuntimeError, match="other"):
            gloo.choose_store(tmp_path)
    else:
        gloo.choose_store(tmp_path)
    assert os.environ["USE_LIBUV"] == value


def test_a_rank_on_a_cpu_has_one_thread_and_the_loopback_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    completed: list[int] = []
    monkeypatch.setattr(gloo, "complete", lambda: completed.append(torch.get_num_threads()))
    threads = torch.get_num_threads()
    try:
        process.use_cpu()
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        process.use_cpu()
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"
        assert completed == [1, 1]
    finally:
        torch.set_num_threads(threads)
    gib, share = process.peak_memory(torch.device("cpu"))
    assert 0.05 < gib < 64
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    assert share == pytest.approx(100 * gib / whole)
