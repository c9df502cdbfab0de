"""Run by Python with torch. Samples are found by number, whole, in another order on each pass."""

from dataclasses import replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torchtitan.config.job_config import DataLoader as LoaderOptions
from transformers import AutoModelForCausalLM

from primus_images.recipes.architecture import Architecture, DiffusionTransformer, MixtureOfExperts
from primus_images.training.backends.finetune.models import FineTuned, config_of
from primus_images.training.backends.flux.latents import Images, packed
from primus_images.training.backends.loop.config import LoopConfig
from primus_images.training.backends.loop.data import Documents, Mock
from primus_images.training.backends.loop.session import samples_of, terms_of
from primus_images.training.backends.torchtitan.data import loader_of
from primus_images.training.judge.reference.data import samples as reference_samples
from primus_images.training.run import fingerprint
from primus_images.training.text.tokens import Tokens, mix, packs, stored


def check_a_pass_sees_every_sample_once() -> None:
    tokens = Tokens(tokens=np.arange(101, dtype=np.uint32), ends=np.asarray([101]))
    data = Documents(tokens, seq_len=10, seed=3)
    assert data.samples == tokens.samples(10, packing=False) == 10
    passes = [data.batch(turn * 10, 10) for turn in range(2)]
    for batch in passes:
        starts = sorted(batch["input_ids"][:, 0].tolist())
        assert starts == list(range(0, 100, 10)), starts
        assert torch.equal(batch["labels"], batch["input_ids"] + 1), (
            "labels are not the next tokens"
        )
        assert terms_of(batch) == 100
    assert not torch.equal(passes[0]["input_ids"], passes[1]["input_ids"]), (
        "both passes have one order"
    )
    again = Documents(tokens, seq_len=10, seed=3).batch(13, 1)
    assert torch.equal(again["input_ids"], passes[1]["input_ids"][3:4]), (
        "a sample depends on those before it"
    )


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


def check_made_up_tokens_can_be_learned() -> None:
    batch = Mock(seed=1, seq_len=512, vocabulary=1024).batch(0, 8)
    assert batch["input_ids"].max() < 1024
    steps = ((batch["labels"] - batch["input_ids"]) // 4) % 256
    assert set(steps.flatten().tolist()) == {1, 3, 7, 19}
    other = Mock(seed=2, seq_len=512, vocabulary=1024).batch(0, 8)
    assert not torch.equal(batch["input_ids"], other["input_ids"])


def check_latents_are_packed_as_flux_packs_them() -> None:
    from diffusers import FluxPipeline

    latents = torch.randn(3, 4, 8, 6)
    theirs = FluxPipeline._pack_latents(latents, 3, 4, 8, 6)
    assert torch.equal(torch.stack([packed(one) for one in latents]), theirs)


def check_cached_latents_are_read_with_their_own_noise() -> None:
    from safetensors.torch import save_file

    model = Architecture(
        family="flux", dit=DiffusionTransformer(in_channels=16, image_size=64, text_tokens=3)
    )
    training = LoopConfig(seq_len=16 + 3, seed=1)
    stored = {
        "latents": torch.randn(3, 4, 8, 8),
        "text": torch.randn(3, 3, 5),
        "pooled": torch.randn(3, 6),
    }
    with TemporaryDirectory() as folder:
        save_file(stored, Path(folder) / "some.safetensors")
        given: Any = SimpleNamespace(model=model, training=training, assets={"corpus": folder})
        data = Images(given)
        batch = data.batch(0, 3)
        again = data.batch(3, 3)
        job = {
            "backend": "flux",
            "config": {"training.micro_batch_size": 3, "training.seed": 1},
            "accumulation": 1,
            "data_parallel": 1,
            "assets": {"corpus": folder},
            "model": {"dit": {}},
        }
        for step, seen in ((1, batch), (2, again)):
            judged = reference_samples(job).batch(step, 0)
            assert judged.keys() == seen.keys()
            assert all(torch.equal(judged[name], seen[name]) for name in seen), (
                "the reference reads other images"
            )
    found = {tuple(one.flatten().tolist()) for one in batch["latents"]}
    assert found == {tuple(packed(one).flatten().tolist()) for one in stored["latents"]}, (
        "a pass misses an image"
    )
    assert batch["latents"].shape == batch["noise"].shape == (3, 16, 16)
    assert terms_of(batch) == 3
    assert ((batch["time"] > 0) & (batch["time"] < 1)).all()
    noises = torch.cat([batch["noise"], again["noise"]]).flatten(1)
    assert len({tuple(noise.tolist()) for noise in noises}) == 6, "noise is used twice"


def check_answers_are_samples_of_their_own() -> None:
    mask, ends = np.ones(30, np.uint8), np.asarray([6, 9, 30])
    mask[[0, 1, *range(6, 9), 9, 10]] = 0
    tokens = Tokens(tokens=np.arange(100, 130, dtype=np.uint32), ends=ends, mask=mask)
    data = Documents(tokens, seq_len=8, seed=3)
    batch = data.batch(0, 2)
    rows = sorted(zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True))
    assert rows == [
        ([100, 101, 102, 103, 104, 0, 0, 0], [-100, 102, 103, 104, 105, -100, -100, -100]),
        ([109, 110, 111, 112, 113, 114, 115, 116], [-100, 111, 112, 113, 114, 115, 116, 117]),
    ], rows
    assert terms_of(batch) == 11


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


def check_a_fingerprint_is_of_samples_and_not_of_how_they_are_divided() -> None:
    tokens = Tokens(tokens=np.arange(101, dtype=np.uint32), ends=np.asarray([101]))
    data = Documents(tokens, seq_len=10, seed=3)

    def of(*batches: tuple[int, int]) -> str:
        parts = [samples_of(data.batch(first, count)) for first, count in batches]
        return fingerprint.written(fingerprint.added(parts))

    whole = of((0, 8))
    assert whole == of((0, 4), (4, 4)) == of((6, 2), (0, 6)) == of(*((row, 1) for row in range(8)))
    others = {of((1, 8)), of((0, 7)), of((0, 9)), of((0, 7), (0, 1)), whole}
    assert len(others) == 5, "other samples have the same fingerprint"
    inputs, labels = (data.batch(0, 2)[name] for name in ("input_ids", "labels"))
    first = fingerprint.of_samples(inputs, labels)
    assert first == fingerprint.of_samples(inputs.flip(0), labels.flip(0))
    changed = labels.clone()
    changed[1, 4] = -100
    exchanged = [(labels, inputs), (inputs.flip(1), labels), (inputs.flip(0), labels)]
    for pair in ((inputs, changed), *exchanged):
        assert fingerprint.of_samples(*pair) != first


# Samples of a step, and their length.
BATCH = 8
LENGTH = 10


def inputs_of_torchtitan(
    folder: str, ranks: int, accumulation: int, *, done: int, workers: int
) -> torch.Tensor:
    """The inputs of three steps behind the steps that are ``done``: [step, sample, token]."""
    job = {
        "output": folder,
        "assets": {"corpus": "some.jsonl"},
        "accumulation": accumulation,
        "data_parallel": ranks,
    }
    training = SimpleNamespace(
        local_batch_size=BATCH // ranks // accumulation,
        seq_len=LENGTH,
        dataloader=LoaderOptions(num_workers=workers),
    )
    config = SimpleNamespace(training=training, debug=SimpleNamespace(seed=3))
    shares = []
    for rank in range(ranks):
        loader = loader_of(job, rank, config)
        loader.load_state_dict({"steps": done})
        micro_batches = list(islice(iter(loader), 3 * accumulation))
        assert loader.state_dict() == {"steps": done + 3}
        inputs = torch.cat([batch["input"] for batch, _ in micro_batches])
        labels = torch.cat([labels for _, labels in micro_batches])
        assert torch.equal(labels, inputs + 1), "labels are not the next tokens"
        shares.append(inputs.unflatten(0, (3, -1)))
    return torch.cat(shares, dim=1)


def check_ranks_of_torchtitan_share_the_samples_of_a_step() -> None:
    """So a run goes on where it stopped, also on another number of ranks."""
    tokens = Tokens(tokens=np.arange(101, dtype=np.uint32), ends=np.asarray([40, 101]))
    stream = Tokens(tokens=tokens.tokens, ends=tokens.ends[-1:])
    wanted = Documents(stream, LENGTH, seed=3).batch(0, 6 * BATCH)["input_ids"]
    steps = wanted.unflatten(0, (6, BATCH))
    with TemporaryDirectory() as folder:
        tokens.tokens.tofile(Path(folder) / "train.tokens")
        tokens.ends.tofile(Path(folder) / "train.ends")
        (Path(folder) / "cache").symlink_to(folder)
        for ranks, accumulation, workers in ((1, 1, 0), (1, 4, 1), (2, 2, 2), (4, 1, 0)):
            for done in (0, 3):
                inputs = inputs_of_torchtitan(
                    folder, ranks, accumulation, done=done, workers=workers
                )
                assert torch.equal(inputs, steps[done : done + 3]), (ranks, accumulation, done)


for mechanism in ("sdpa", "eager"):
    for some in (False, True):
        check_packed_documents_are_trained_as_alone(mechanism, masked=some)
check_packs_are_full_and_hold_each_document_once()
check_a_pass_sees_every_sample_once()
check_a_fingerprint_is_of_samples_and_not_of_how_they_are_divided()
check_answers_are_samples_of_their_own()
check_cached_latents_are_read_with_their_own_noise()
check_held_out_documents_that_are_trained_are_counted()
check_made_up_tokens_can_be_learned()
check_ranks_of_torchtitan_share_the_samples_of_a_step()
check_corpora_are_mixed_evenly_by_their_weights()
check_latents_are_packed_as_flux_packs_them()
