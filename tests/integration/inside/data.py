"""Run by Python with torch. Samples are found by number, whole, in another order on each pass."""

from __future__ import annotations

import numpy as np
import torch

from primus.training.flux.latents import packed
from primus.training.loop.data import Packed, mock


def check_a_pass_sees_every_sample_once() -> None:
    data = Packed(np.arange(101, dtype=np.uint32), seq_len=10, seed=3)
    passes = [data.batch(turn * 10, 10) for turn in range(2)]
    for batch in passes:
        starts = sorted(batch["input_ids"][:, 0].tolist())
        assert starts == list(range(0, 100, 10)), starts
        assert torch.equal(batch["labels"], batch["input_ids"] + 1), "labels are not the next tokens"
        assert data.terms(batch) == 100
    assert not torch.equal(passes[0]["input_ids"], passes[1]["input_ids"]), "both passes have one order"
    again = Packed(np.arange(101, dtype=np.uint32), seq_len=10, seed=3).batch(13, 1)
    assert torch.equal(again["input_ids"], passes[1]["input_ids"][3:4]), "a sample depends on those before it"


def check_made_up_tokens_can_be_learned() -> None:
    batch = mock(seed=1, seq_len=512, vocabulary=1024).batch(0, 8)
    assert batch["input_ids"].max() < 1024
    steps = ((batch["labels"] - batch["input_ids"]) // 4) % 256
    assert set(steps.flatten().tolist()) == {1, 3, 7, 19}
    other = mock(seed=2, seq_len=512, vocabulary=1024).batch(0, 8)
    assert not torch.equal(batch["input_ids"], other["input_ids"])


def check_latents_are_packed_as_flux_packs_them() -> None:
    from diffusers import FluxPipeline

    latents = torch.randn(3, 4, 8, 6)
    theirs = FluxPipeline._pack_latents(latents, 3, 4, 8, 6)
    assert torch.equal(torch.stack([packed(one) for one in latents]), theirs)


check_a_pass_sees_every_sample_once()
check_made_up_tokens_can_be_learned()
check_latents_are_packed_as_flux_packs_them()
