"""Variables of Transformer Engine that select the attention of Megatron's layers."""

import os
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
for name in ("torchtitan", "megatron", "peft", "diffusers"):
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)

from tiny_runs import ended  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(("backend", "flash"), [("auto", "0"), ("fused", None)])
def test_variables_select_the_attention_if_the_job_does_not(
    backend: str, flash: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A run imports Megatron after the patches for a CPU.
    assert ended("megatron").exit_code == 0
    from megatron.core.transformer.enums import AttnBackend

    from primus_images.training.backends.megatron import model

    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    monkeypatch.delenv("NVTE_FUSED_ATTN", raising=False)
    transformer: Any = SimpleNamespace(attention_backend=AttnBackend[backend])
    with model._automatic_attention(transformer):
        assert "NVTE_FLASH_ATTN" not in os.environ, "Megatron asserts that it is 1"
    assert os.environ.get("NVTE_FLASH_ATTN") == flash
    assert "NVTE_FUSED_ATTN" not in os.environ
