"""Run by Python with torch. Documents are packed whole, mixed by weights, and counted."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from primus_images.recipes.architecture import Architecture, MixtureOfExperts
from primus_images.training.backends.finetune.models import FineTuned, config_of
from primus_images.training.backends.loop.data import Documents
from primus_images.training.backends.loop.session import terms_of
from primus_images.training.text.tokens import Tokens, mix, packs, stored


def check_held_out_documents_that_are_trained_are_counted() -> None:
    trained, held_out = (
        Tokens(tokens=np.asarray(tokens, np.uint32), ends=np.asarray(ends))
        for tokens, ends in (([1, 2, 3, 1, 2], [2, 3, 5]), ([1, 2, 9, 1, 2, 3], [2, 3, 5, 6]))
    )
    assert held_out.repeated(trained) == 3, "documents 0, 2 and 3"


def check_corpora_are_mixed_evenly_by_their_weights() -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        sizes = {"train-0": 6, "train-1": 2, "train-2": 4}
        for first, (part, count) in enumerate(sizes.items(), 1):
            documents = [[100 * first + number, 0] for number in range(count)]
            mask = np.asarray([1, 0] * count, np.uint8)
            np.asarray(documents, np.uint32).tofile(folder / f"{part}.tokens")
            np.arange(2, 2 * count + 1, 2, dtype=np.int64).tofile(folder / f"{part}.ends")
            if part == "train-0":
                mask.tofile(folder / f"{part}.mask")
        mix(folder, [("train-0", 0.5), ("train-1", 2.5), ("train-2", 1.0)])
        mixed = stored(folder)
        firsts = [int(mixed.tokens[end - 2]) for end in mixed.ends]
        assert sorted(firsts) == [100, 102, 104, 200, 200, 200, 201, 201, 300, 301, 302, 303]
        assert all({number // 100 for number in firsts[at : at + 6]} == {1, 2, 3} for at in (0, 6))
        masks = {
            number: mixed.mask[end - 2 : end].tolist()
            for number, end in zip(firsts, mixed.ends, strict=True)
        }
        assert masks[100] == [1, 0] and masks[201] == [1, 1], masks
        assert sorted(file.name for file in folder.iterdir()) == [
            "train.ends",
            "train.mask",
            "train.tokens",
        ]


FAMILIES = {
    "llama3": Architecture(family="llama3"),
    "mistral": Architecture(family="mistral", window=5),
    "qwen2": Architecture(family="qwen2", qkv_bias=True),
    "mixtral": Architecture(
        family="mixtral", moe=MixtureOfExperts(experts=4, top_k=2, ffn_size=48, auxiliary_loss=1.0)
    ),
}
SIZES = {
    "layers": 2,
    "hidden_size": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn_size": 48,
    "vocab_size": 40,
    "max_seq_len": 64,
}


def check_packed_documents_are_trained_as_alone(attention: Any, *, masked: bool) -> None:
    """The same sum of losses and the same gradients, with and without a mask of the tokens that are
    trained.
    """
    generator = np.random.default_rng(5)
    ends = generator.integers(2, 12, 40).cumsum()
    mask = (generator.random(int(ends[-1])) < 0.6).astype(np.uint8) if masked else None
    tokens = Tokens(
        tokens=generator.integers(0, 40, int(ends[-1]), dtype=np.uint32), ends=ends, mask=mask
    )
    results = []
    for architecture in FAMILIES.values():
        torch.manual_seed(1)
        model = FineTuned(
            AutoModelForCausalLM.from_config(config_of(replace(architecture, **SIZES), attention)),
            64,
        )
        for packing in (False, True):
            data = Documents(tokens, 16, 1, packing=packing)
            batch = data.batch(0, data.samples)
            assert data.samples == tokens.samples(16, packing=packing) or (
                mask is None and not packing
            )
            assert not packing or data.samples * 16 < 1.2 * ends[-1], "the samples are not filled"
            model.zero_grad()
            loss = model(**batch)
            loss.backward()
            results.append(
                (terms_of(batch), loss, *(parameter.grad for parameter in model.parameters()))
            )
        for alone, packed_ones in zip(*results[-2:], strict=True):
            torch.testing.assert_close(packed_ones, alone, rtol=1e-5, atol=1e-5)


def check_packs_are_full_and_hold_each_document_once() -> None:
    lengths = np.random.default_rng(1).integers(1, 65, 20_000).tolist()
    samples = packs(lengths, 64)
    assert sorted(number for sample in samples for number in sample) == list(range(len(lengths)))
    assert max(sum(lengths[number] for number in sample) for sample in samples) <= 64
    assert len(samples) * 64 < 1.02 * sum(lengths)


for mechanism in ("sdpa", "eager"):
    for some in (False, True):
        check_packed_documents_are_trained_as_alone(mechanism, masked=some)
check_packs_are_full_and_hold_each_document_once()
check_held_out_documents_that_are_trained_are_counted()
check_corpora_are_mixed_evenly_by_their_weights()
