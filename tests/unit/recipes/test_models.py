"""The recipes of all models: what the documents publish, every GPU, proxies, sizes, and that none
repeats another.
"""

import re

import pytest
from docs.site.models import models_page
from docs.site.published import Cell, Outcome, load_published, outcomes

from primus_images.gpus.table import load_table
from primus_images.recipes import load
from primus_images.recipes.architecture import architecture, readable, size
from primus_images.recipes.load import Entry, entries, gpus
from primus_images.recipes.resolve import resolve
from primus_images.recipes.rules import USABLE, fits, gpu_bytes, holds, largest_batch, predict
from primus_images.recipes.setting import Choices

ENTRIES = list(entries())
# On these, every recipe has a batch. Others may be too small for some, which `primus list` leaves
# out there.
LARGE = ("mi300x", "mi325x", "mi350x", "mi355x", "h200")
WHOLE = [entry for entry in ENTRIES if not entry.only_proxy]


def way(entry: Entry) -> str:
    return f"{entry.recipe} {entry.backend} {entry.mode}"


def cell_name(cell: Cell) -> str:
    return (
        f"{cell.recipe} {cell.backend} {cell.precision} {cell.gpus[0]} {cell.nodes} "
        f"{cell.source} {cell.seq_len}"
    )


def reason(outcome: Outcome) -> str:
    return outcome.recipe.settings[outcome.recipe.knows.key("local_batch")].because


def explained(outcome: Outcome) -> bool:
    """Whether the recipe's reason names every published figure that differs from the recipe."""
    return all(
        re.search(rf"(?<![\d.]){figure}(?![\d])", reason(outcome)) for figure in outcome.differing
    )


@pytest.mark.parametrize("cell", load_published().cells, ids=cell_name)
def test_what_is_published_resolves_to_the_same_or_says_why_not(cell: Cell) -> None:
    found = list(outcomes((cell,)))
    assert [outcome.gpu for outcome in found] == list(cell.gpus)
    for outcome in found:
        assert outcome.recipe.precision == cell.precision
        assert outcome.recipe.world_size == 8 * cell.nodes
        assert explained(outcome), (
            f"published {outcome.differing}, and the reason is: {reason(outcome)!r}"
        )


def test_few_differ() -> None:
    """Most are as published: a recipe that differs everywhere with one long reason would pass the
    test above.
    """
    found = list(outcomes())
    assert len(found) >= 141
    assert sum(bool(outcome.differing) for outcome in found) <= 8


@pytest.mark.parametrize("entry", WHOLE, ids=way)
def test_every_way_to_train_resolves_on_every_gpu_and_starts_there(entry: Entry) -> None:
    assert entry.gpus == gpus()
    refused: dict[str, int] = {}
    for precision, some in entry.precisions.items():
        for gpu in some:
            choices = Choices(backend=entry.backend, mode=entry.mode, precision=precision, gpu=gpu)
            recipe = resolve(entry.recipe, (), choices)
            assert (recipe.backend, recipe.mode, recipe.precision) == (
                entry.backend,
                entry.mode,
                precision,
            )
            assert recipe.name == entry.recipe == entry.path.stem
            assert recipe.accumulation >= 1
            if not fits(predict(recipe), there := USABLE * (gpu_bytes(gpu) or 0)) and (
                gpu in LARGE or holds(recipe)
            ):
                refused[f"{precision} {gpu}"] = largest_batch(recipe, there)
    assert not refused, (
        f"they need a case with the batch named here, or more nodes where it is 0: {refused}"
    )


@pytest.mark.parametrize("entry", ENTRIES, ids=way)
def test_every_model_has_a_small_proxy_of_its_own_kind(entry: Entry) -> None:
    choices = Choices(backend=entry.backend, mode=entry.mode, gpu="cpu", proxy=True)
    proxy = resolve(entry.recipe, (), choices)
    small = proxy.architecture
    assert (proxy.precision, proxy.world_size) == ("fp32", 2)
    assert size(small).total < 3_000_000, (
        "add a case `when: {proxy: true}` with the sizes of a small model"
    )
    assert proxy.seq_len <= 128
    body = load.read(entry.path).settings
    whole = architecture(
        {k.removeprefix("model."): s.value for k, s in body.items() if k.startswith("model.")}
    )
    assert small.family == whole.family
    if small.family == "flux":
        return
    assert small.vocab_size == 1024, "the tokenizer that recipes carry along has so many words"
    if not entry.only_proxy and not whole.mla.kv_lora_rank:
        assert small.heads * whole.kv_heads == small.kv_heads * whole.heads, (
            "the same share of grouped queries"
        )
    assert (small.qkv_bias, small.qk_norm) == (whole.qkv_bias, whole.qk_norm)
    assert bool(small.mla.q_lora_rank) == bool(whole.mla.q_lora_rank)
    assert bool(small.mla.kv_lora_rank) == bool(whole.mla.kv_lora_rank)
    assert small.rope_scaling.kind == whole.rope_scaling.kind
    for name in ("experts", "shared_experts", "dense_layers"):
        assert bool(getattr(small.moe, name)) == bool(getattr(whole.moe, name)), name
    assert (small.moe.groups > 1) == (whole.moe.groups > 1)
    assert (small.moe.score, small.moe.normalize_top_k) == (
        whole.moe.score,
        whole.moe.normalize_top_k,
    )
    if whole.moe.experts:
        assert small.moe.top_k < small.moe.experts
        assert proxy.degree("ep") == (2 if "ep" in proxy.knows.degrees else 1), (
            "experts are shared out, as on GPUs"
        )


def test_the_window_of_a_proxy_is_shorter_than_its_sequences() -> None:
    proxy = resolve("mistral-7b", (), Choices(gpu="cpu", proxy=True))
    assert 0 < proxy.architecture.window < proxy.seq_len


def test_active_parameters() -> None:
    active = {entry.recipe: readable(entry.size.active) for entry in ENTRIES}
    assert active["mixtral-8x7b"] == "12.9 B"
    # Published as 21 and 37 billion.
    assert active["deepseek-v2"] == "21.4 B"
    assert active["deepseek-v3"] == "37.6 B"


def test_the_page_shows_what_every_recipe_resolves_to() -> None:
    page = models_page()
    head = (
        next(line for line in page.splitlines() if line.startswith("| recipe |"))
        .strip("| ")
        .split(" | ")[5:]
    )
    assert tuple(head) == load_table().imaged
    rows = re.findall(
        r"^\| `(\S+)` \| (\w+) (\w+) \| (\w+) \| (\d+) \| \S+ \| (.+) \|$", page, re.M
    )
    name, backend, mode, precision, nodes, cells = rows[0]
    for gpu, figures in zip(load_table().imaged, cells.split(" | "), strict=True):
        recipe = resolve(
            name,
            (),
            Choices(backend=backend, mode=mode, precision=precision, gpu=gpu, nodes=int(nodes)),
        )
        assert figures.replace("*", "") == f"{recipe.local_batch}, {recipe.global_batch}"
    assert {row[:3] for row in rows} == {
        (entry.recipe, entry.backend, entry.mode) for entry in WHOLE
    }
    for source in load_published().sources:
        assert f"`{source.id}`: {source.title}" in page
    assert "the v25.10 page, whose FP8 command trains in BF16" in page
