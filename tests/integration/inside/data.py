"""Run by Python with torch. Samples are found by number, whole, in another order on each pass."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from primus.errors import InputError
from primus.recipes.architecture import Architecture, DiffusionTransformer
from primus.training.corpus import Corpus, check, documents
from primus.training.flux.backend import FluxConfig
from primus.training.flux.latents import Cached, packed
from primus.training.loop.config import LoopConfig
from primus.training.loop.data import Mock, Packed
from primus.training.reference.data import _documents as reference_documents
from primus.training.reference.data import samples as reference_samples


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

    model = Architecture(family="flux", dit=DiffusionTransformer(in_channels=16, image_size=64, text_tokens=3))
    training = LoopConfig(seq_len=16 + 3, seed=1)
    given: Any = SimpleNamespace(model=model, training=training)
    stored = {"latents": torch.randn(3, 4, 8, 8), "text": torch.randn(3, 3, 5), "pooled": torch.randn(3, 6)}
    with TemporaryDirectory() as folder:
        save_file(stored, Path(folder) / "some.safetensors")
        data = Cached(given, FluxConfig(), Path(folder))
        batch = data.batch(0, 3)
        again = data.batch(3, 3)
        job = {
            "backend": "flux", "config": {"training.micro_batch_size": 3, "training.seed": 1}, "accumulation": 1,
            "data_parallel": 1, "assets": {"corpus": folder}, "model": {"dit": {}},
        }  # fmt: skip
        for step, seen in ((1, batch), (2, again)):
            judged = reference_samples(job).batch(step, 0)
            assert judged.keys() == seen.keys()
            assert all(torch.equal(judged[name], seen[name]) for name in seen), "the reference reads other images"
    found = {tuple(one.flatten().tolist()) for one in batch["latents"]}
    assert found == {tuple(packed(one).flatten().tolist()) for one in stored["latents"]}, "a pass misses an image"
    assert batch["latents"].shape == batch["noise"].shape == (3, 16, 16)
    assert data.terms(batch) == 3
    assert ((batch["time"] > 0) & (batch["time"] < 1)).all()
    noises = torch.cat([batch["noise"], again["noise"]]).flatten(1)
    assert len({tuple(noise.tolist()) for noise in noises}) == 6, "noise is used twice"


def check_chat_messages_and_parquet_are_read() -> None:
    import pyarrow as pa
    from pyarrow.parquet import write_table

    chat = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Two."}]
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{{ eos_token }}"
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": template}
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        (folder / "chat.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
        write_table(pa.table({"messages": [chat, chat]}), folder / "chat.parquet")
        write_table(pa.table({"text": ["a", "", "b"], "n": [1, 2, 3]}), folder / "plain.parquet")
        write_table(pa.table({"body": ["a", None]}), folder / "null.parquet")
        (folder / "cut.parquet").write_bytes((folder / "plain.parquet").read_bytes()[:-20])

        def read(file: str, column: str | None = None) -> list[str]:
            corpus = Corpus(path=folder / file, column=column, tokenizer=folder)
            check(corpus)
            return list(documents(corpus))

        said = "[user] How many?\n[assistant] Two.\n"
        assert read("chat.jsonl") == [said]
        assert read("chat.parquet") == [said, said]
        assert read("plain.parquet") == ["a", "b"]
        (folder / "marks.txt").write_bytes("\ufeffone\r\ntwo\r\n \n\n three\n\nfour".encode())
        (folder / "lines.jsonl").write_text('{"text": "a\u2028b"}\n\n{"text": " "}\n{"text": "c"}', "utf-8")
        (folder / "many").mkdir()
        for kept in ("b", "_hidden", "a"):
            (folder / "many" / f"{kept}.json").write_text(json.dumps({"text": kept}))
        for file in ("chat.jsonl", "chat.parquet", "plain.parquet", "marks.txt", "lines.jsonl", "many"):
            job = {"assets": {"corpus": str(folder / file), "tokenizer": str(folder)}, "column": None}
            assert reference_documents(job, 0) == read(file), file
        for file, column, words in (
            ("null.parquet", None, "row 1: expected the column 'text', found body"),
            ("null.parquet", "body", "row 2: expected text or chat messages"),
            ("plain.parquet", "n", "row 1: expected text or chat messages"),
            ("cut.parquet", None, "cannot be read as Parquet"),
        ):
            try:
                read(file, column)
            except InputError as error:
                assert words in str(error), error
            else:
                raise AssertionError(f"{file} was read")


check_a_pass_sees_every_sample_once()
check_chat_messages_and_parquet_are_read()
check_cached_latents_are_read_with_their_own_noise()
check_made_up_tokens_can_be_learned()
check_latents_are_packed_as_flux_packs_them()
