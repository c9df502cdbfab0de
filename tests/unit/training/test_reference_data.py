"""Samples are found by number, whole, and the reference finds the same ones in code of its own."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
for name in ("torchtitan", "megatron", "peft", "diffusers"):
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)

from safetensors.torch import save_file  # noqa: E402
from tiny_runs import import_torchtitan  # noqa: E402

from primus_images.recipes.architecture import (  # noqa: E402
    Architecture,
    DiffusionTransformer,
)
from primus_images.recipes.resolve import resolve  # noqa: E402
from primus_images.recipes.setting import Choices  # noqa: E402
from primus_images.training.backends import text  # noqa: E402
from primus_images.training.backends.flux.latents import Images, packed  # noqa: E402
from primus_images.training.backends.loop import data as loop  # noqa: E402
from primus_images.training.backends.loop.config import LoopConfig, read_job  # noqa: E402
from primus_images.training.backends.loop.data import Documents, Mock  # noqa: E402
from primus_images.training.backends.loop.session import samples_of, terms_of  # noqa: E402
from primus_images.training.judge.reference import data as reference  # noqa: E402
from primus_images.training.run import fingerprint, ranks  # noqa: E402
from primus_images.training.run.job import Job  # noqa: E402
from primus_images.training.text.tokens import Tokens  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass
class Loading:
    """torchtitan's settings of its loader."""

    num_workers: int = 0
    persistent_workers: bool = False
    prefetch_factor: int | None = None
    pin_memory: bool = False


WORDS = "steps=3 local_batch=2 global_batch=4 ranks=1"
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is two and two?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And three?"},
    {"role": "assistant", "content": "Seven, of course."},
]
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}</s>{% endgeneration %}{% else %}"
    "{{ message['content'] }}{% endif %}\n{% endfor %}"
)
ROWS: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": f"A small text of number {number}, and more. " * 3} for number in range(12)],
    "prompt and completion": [
        {"prompt": f"What is {number}?", "completion": f" It is {number} again." * 2}
        for number in range(12)
    ],
    "messages": [{"messages": CHAT[: 3 + 2 * (number % 2)]} for number in range(12)],
    "conversations": [
        {
            "conversations": [
                {"from": "human", "value": f"How many are {number}?"},
                {"from": "gpt", "value": f"As many as {number}, I think."},
            ]
        }
        for number in range(12)
    ],
    "instruction": [
        {"instruction": f"Count to {number}.", "input": "now", "output": "One, two, three."}
        for number in range(12)
    ],
}


def both(folder: Path, rows: str, backend: str, mode: str, words: str) -> Iterator[tuple[Any, Any]]:
    """Yield the batches of our loop, and those of the reference, of three steps."""
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in ROWS[rows]))
    (folder / "template.jinja").write_text(TEMPLATE)
    choices = Choices(backend=backend, mode=mode, gpu="cpu", proxy=True)
    overrides = f"{WORDS} assets.corpus={corpus} {words}".format(folder=folder).split()
    recipe = resolve("llama3.1-8b", overrides, choices)
    job = Job(name="x", recipe=recipe, output=folder / "run")
    (folder / "run/cache").mkdir(parents=True)
    text.check(recipe)
    text.tokenize(job, None, lambda _line: None)
    (folder / "run/job.json").write_text(ranks.job_file(job))
    rank = read_job(folder / "run")
    packing = bool(recipe.find("finetune.packing", False))
    ours = loop.text(rank, packing=packing)
    theirs = reference.samples(json.loads((folder / "run/job.json").read_text()))
    for step in (1, 2, 3):
        yield ours.batch(4 * step - 4, 4), theirs.batch(step, 0)


@pytest.mark.parametrize(
    ("rows", "backend", "mode", "words"),
    [
        ("text", "fsdp", "pretrain", "seq_len=32"),
        ("text", "finetune", "full", "seq_len=32"),
        ("text", "finetune", "full", "seq_len=64 finetune.packing=true"),
        ("prompt and completion", "finetune", "full", "seq_len=64"),
        ("prompt and completion", "finetune", "lora", "seq_len=160 finetune.packing=true"),
        (
            "messages",
            "finetune",
            "full",
            "seq_len=160 assets.chat_template={folder}/template.jinja",
        ),
        (
            "messages",
            "finetune",
            "full",
            "seq_len=400 finetune.packing=true assets.chat_template={folder}/template.jinja",
        ),
        (
            "conversations",
            "finetune",
            "full",
            "seq_len=160 assets.chat_template={folder}/template.jinja",
        ),
        ("instruction", "finetune", "full", "seq_len=160"),
        ("text", "fsdp", "pretrain", "seq_len=32 eval.fraction=0.2"),
    ],
)
def test_reference_finds_the_samples_of_the_loop(
    tmp_path: Path, rows: str, backend: str, mode: str, words: str
) -> None:
    seen = set()
    for ours, theirs in both(tmp_path, rows, backend, mode, words):
        assert torch.equal(ours["input_ids"], theirs["inputs"])
        assert torch.equal(ours["labels"], theirs["labels"])
        if "positions" in ours:
            assert torch.equal(ours["positions"], theirs["positions"])
        trained = theirs["labels"] != -100
        assert trained.any()
        # Of chats and answers, only what the model says is trained.
        assert rows == "text" or not trained.all()
        seen |= {tuple(row) for row in theirs["inputs"].tolist()}
    assert len(seen) > 1


def test_a_pass_sees_every_sample_once() -> None:
    tokens = Tokens(tokens=np.arange(101, dtype=np.uint32), ends=np.asarray([101]))
    data = Documents(tokens, seq_len=10, seed=3)
    assert data.samples == tokens.samples(10, packing=False) == 10
    passes = [data.batch(turn * 10, 10) for turn in range(2)]
    for batch in passes:
        assert sorted(batch["input_ids"][:, 0].tolist()) == list(range(0, 100, 10))
        assert torch.equal(batch["labels"], batch["input_ids"] + 1)
        assert terms_of(batch) == 100
    assert not torch.equal(passes[0]["input_ids"], passes[1]["input_ids"])
    again = Documents(tokens, seq_len=10, seed=3).batch(13, 1)
    assert torch.equal(again["input_ids"], passes[1]["input_ids"][3:4])


def test_answers_are_samples_of_their_own() -> None:
    mask, ends = np.ones(30, np.uint8), np.asarray([6, 9, 30])
    mask[[0, 1, *range(6, 9), 9, 10]] = 0
    tokens = Tokens(tokens=np.arange(100, 130, dtype=np.uint32), ends=ends, mask=mask)
    batch = Documents(tokens, seq_len=8, seed=3).batch(0, 2)
    rows = sorted(zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True))
    assert rows == [
        ([100, 101, 102, 103, 104, 0, 0, 0], [-100, 102, 103, 104, 105, -100, -100, -100]),
        ([109, 110, 111, 112, 113, 114, 115, 116], [-100, 111, 112, 113, 114, 115, 116, 117]),
    ]
    assert terms_of(batch) == 11


def test_made_up_tokens_can_be_learned_and_are_the_references() -> None:
    batch = Mock(seed=1, seq_len=512, vocabulary=1024).batch(0, 8)
    assert batch["input_ids"].max() < 1024
    steps = ((batch["labels"] - batch["input_ids"]) // 4) % 256
    assert set(steps.flatten().tolist()) == {1, 3, 7, 19}
    other = Mock(seed=2, seq_len=512, vocabulary=1024).batch(0, 8)
    assert not torch.equal(batch["input_ids"], other["input_ids"])


def test_a_fingerprint_is_of_samples_and_not_of_how_they_are_divided() -> None:
    tokens = Tokens(tokens=np.arange(101, dtype=np.uint32), ends=np.asarray([101]))
    data = Documents(tokens, seq_len=10, seed=3)

    def of(*batches: tuple[int, int]) -> str:
        parts = [samples_of(data.batch(first, count)) for first, count in batches]
        return fingerprint.written(fingerprint.added(parts))

    whole = of((0, 8))
    assert whole == of((0, 4), (4, 4)) == of((6, 2), (0, 6)) == of(*((row, 1) for row in range(8)))
    assert len({of((1, 8)), of((0, 7)), of((0, 9)), of((0, 7), (0, 1)), whole}) == 5
    inputs, labels = (data.batch(0, 2)[name] for name in ("input_ids", "labels"))
    first = fingerprint.of_samples(inputs, labels)
    assert first == fingerprint.of_samples(inputs.flip(0), labels.flip(0))
    changed = labels.clone()
    changed[1, 4] = -100
    exchanged = [(labels, inputs), (inputs.flip(1), labels), (inputs.flip(0), labels)]
    for pair in ((inputs, changed), *exchanged):
        assert fingerprint.of_samples(*pair) != first
    # What a run of an earlier version recorded must stay comparable.
    assert (whole, fingerprint.added([2**63, 5]), fingerprint.written(-1)) == (
        "bfc83ddbcac8747b",
        5 - 2**63,
        "f" * 16,
    )


def test_latents_are_packed_as_flux_packs_them() -> None:
    from diffusers import FluxPipeline

    latents = torch.randn(3, 4, 8, 6)
    theirs = FluxPipeline._pack_latents(latents, 3, 4, 8, 6)
    assert torch.equal(torch.stack([packed(one) for one in latents]), theirs)


def test_cached_latents_are_read_with_their_own_noise(tmp_path: Path) -> None:
    model = Architecture(
        family="flux", dit=DiffusionTransformer(in_channels=16, image_size=64, text_tokens=3)
    )
    training = LoopConfig(seq_len=16 + 3, seed=1)
    kept = {
        "latents": torch.randn(3, 4, 8, 8),
        "text": torch.randn(3, 3, 5),
        "pooled": torch.randn(3, 6),
    }
    save_file(kept, tmp_path / "some.safetensors")
    rank: Any = SimpleNamespace(model=model, training=training, assets={"corpus": str(tmp_path)})
    data = Images(rank)
    batches = [data.batch(first, 3) for first in (0, 3)]
    job = {
        "backend": "flux",
        "config": {"training.micro_batch_size": 3, "training.seed": 1},
        "accumulation": 1,
        "data_parallel": 1,
        "assets": {"corpus": str(tmp_path)},
        "model": {"dit": {}},
    }
    for step, seen in enumerate(batches, 1):
        judged = reference.samples(job).batch(step, 0)
        assert judged.keys() == seen.keys()
        assert all(torch.equal(judged[key], seen[key]) for key in seen)
        assert seen["latents"].shape == seen["noise"].shape == (3, 16, 16)
        assert ((seen["time"] > 0) & (seen["time"] < 1)).all()
        assert terms_of(seen) == 3
    images = {tuple(one.flatten().tolist()) for one in batches[0]["latents"]}
    assert images == {tuple(packed(one).flatten().tolist()) for one in kept["latents"]}
    noises = torch.cat([batch["noise"] for batch in batches]).flatten(1)
    assert len({tuple(noise.tolist()) for noise in noises}) == 6


@pytest.mark.parametrize("done", [0, 3])
@pytest.mark.parametrize(
    ("ranks", "accumulation", "workers"), [(1, 1, 0), (1, 4, 1), (2, 2, 2), (4, 1, 0)]
)
def test_ranks_of_torchtitan_share_the_samples_of_a_step(
    tmp_path: Path, ranks: int, accumulation: int, workers: int, done: int
) -> None:
    """So a run goes on where it stopped, also on another number of ranks."""
    import_torchtitan()
    from primus_images.training.backends.torchtitan.data import loader_of

    tokens = Tokens(tokens=np.arange(101, dtype=np.uint32), ends=np.asarray([40, 101]))
    stream = Tokens(tokens=tokens.tokens, ends=tokens.ends[-1:])
    steps = Documents(stream, 10, seed=3).batch(0, 48)["input_ids"].unflatten(0, (6, 8))
    tokens.tokens.tofile(tmp_path / "train.tokens")
    tokens.ends.tofile(tmp_path / "train.ends")
    (tmp_path / "cache").symlink_to(tmp_path)
    job = {
        "output": str(tmp_path),
        "assets": {"corpus": "some.jsonl"},
        "accumulation": accumulation,
        "data_parallel": ranks,
    }
    training = SimpleNamespace(
        local_batch_size=8 // ranks // accumulation,
        seq_len=10,
        dataloader=Loading(num_workers=workers),
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
        assert torch.equal(labels, inputs + 1)
        shares.append(inputs.unflatten(0, (3, -1)))
    assert torch.equal(torch.cat(shares, dim=1), steps[done : done + 3])
