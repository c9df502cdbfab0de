"""Predicted states of a rank against the sizes that megatron-core itself allocated."""

import json
from pathlib import Path

import pytest

from primus_images.recipes.resolve import resolve
from primus_images.recipes.rules import USABLE, fits, predict
from primus_images.recipes.rules.megatron import stage_memory
from primus_images.recipes.rules.stages import stages
from primus_images.recipes.setting import Choices

RESULTS = Path(__file__).parents[3] / "benchmarks/results"
ROWS = json.loads((RESULTS / "megatron-memory.json").read_text())["rows"]
RUNS_WITH_ENGINE = json.loads((RESULTS / "megatron-te-4xh200.json").read_text())["results"]


def megatron(name, *words, gpu="mi355x", nodes=1):
    choices = Choices(backend="megatron", precision="bf16", gpu=gpu, nodes=nodes)
    return resolve(name, words, choices)


@pytest.mark.parametrize(
    "row", ROWS, ids=lambda row: " ".join([row["recipe"], *row["words"], str(row["stage"])])
)
def test_states_are_within_2_percent_of_megatrons_own(row):
    batch = ("training.micro_batch_size=1", "training.global_batch_size=12288")
    recipe = megatron(row["recipe"], *batch, *row["words"], nodes=row["nodes"])
    predicted = stage_memory(recipe, stages(recipe)[row["stage"]], 1)
    sizes = {name: getattr(predicted, name) for name in row["bytes"]}
    assert sizes == pytest.approx(row["bytes"], rel=0.02)


def test_every_kind_of_layout_is_compared():
    words = " ".join(word for row in ROWS for word in row["words"])
    for kind in ("tp=", "pp=", "ep=", "use_distributed_optimizer=false", "virtual_pipeline"):
        assert kind in words


def test_experts_are_shared_out_and_the_rest_is_not():
    whole = predict(megatron("mixtral-8x7b", "ep=1")).weights
    shared = predict(megatron("mixtral-8x7b", "ep=8")).weights
    experts = 2 * 32 * 8 * 3 * 4096 * 14336
    assert whole - shared == pytest.approx(experts * 7 / 8)


def test_a_run_with_standing_gradients_is_never_tight():
    memory = predict(megatron("llama3.1-8b"))
    assert memory.standing
    assert memory.least == memory.peak
    assert fits(memory, memory.peak)
    # Between the usable share and the whole GPU, there is nothing to give back.
    assert not fits(memory, memory.peak * (USABLE + 1) / 2)


@pytest.mark.parametrize(
    ("words", "standing"),
    [
        (("training.global_batch_size=16",), True),
        (("training.global_batch_size=8",), False),
    ],
)
def test_gradients_of_fsdp2_stand_only_while_micro_batches_add_to_them(words, standing):
    off = ("ddp.use_distributed_optimizer=false", "ddp.overlap_grad_reduce=false")
    recipe = megatron("llama3.1-8b", "torch_fsdp2=true", "local_batch=1", *off, *words)
    assert predict(recipe).standing is standing


@pytest.mark.parametrize("gpu", ["mi300x", "mi325x", "mi355x"])
@pytest.mark.parametrize("model", ["llama2-70b", "llama3-70b", "llama3.1-70b", "qwen2.5-72b"])
def test_fsdp2_of_70b_with_recomputation_is_possible_on_one_node(model, gpu):
    """As in Primus's own files: all layers are recomputed, and Transformer Engine computes the
    loss.
    """
    words = (
        "tp=1",
        "torch_fsdp2=true",
        "ddp.use_distributed_optimizer=false",
        "ddp.overlap_grad_reduce=false",
        "model.recompute_granularity=full",
        "model.recompute_method=block",
        "model.recompute_num_layers=80",
        "model.cross_entropy_loss_fusion=true",
        "model.cross_entropy_fusion_impl=te",
        "training.micro_batch_size=3",
        "training.global_batch_size=24",
    )
    recipe = megatron(model, *words, gpu=gpu)
    total = {"mi300x": 191.98, "mi325x": 255.98, "mi355x": 287.98}[gpu] * 2**30
    assert fits(predict(recipe), USABLE * total)


@pytest.mark.parametrize(
    ("words", "layers"),
    [
        (("pp=4",), [8, 8, 8, 8]),
        (
            (
                "pp=4",
                "model.num_layers_in_first_pipeline_stage=7",
                "model.num_layers_in_last_pipeline_stage=5",
            ),
            [7, 10, 10, 5],
        ),
        (
            (
                "pp=2",
                "model.account_for_embedding_in_pipeline_split=true",
                "model.account_for_loss_in_pipeline_split=true",
            ),
            [16, 16],
        ),
    ],
)
def test_layers_of_each_stage(words, layers):
    made = stages(megatron("llama3.1-8b", *words))
    assert [len(stage.layers) for stage in made] == layers


def test_interleaved_stages_alternate():
    recipe = megatron("llama3.1-8b", "pp=2", "model.virtual_pipeline_model_parallel_size=2")
    first, last = stages(recipe)
    assert first.layers == (*range(8), *range(16, 24))
    assert last.layers == (*range(8, 16), *range(24, 32))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("ranks=6", "pp=3", "training.global_batch_size=48"), "3 stages cannot have equally many"),
        (("model.virtual_pipeline_model_parallel_size=2",), "need PP of 2 or more"),
        (("pp=2", "model.virtual_pipeline_model_parallel_size=3"), "cannot have 3 chunks"),
    ],
)
def test_layers_that_megatron_cannot_share_out_are_refused(words, named):
    from primus_images.errors import InputError

    with pytest.raises(InputError, match=named):
        megatron("llama3.1-8b", *words)


def test_moments_and_gradients_have_their_own_types():
    wide = predict(megatron("llama3.1-8b"))
    narrow = predict(
        megatron(
            "llama3.1-8b",
            "optimizer.use_precision_aware_optimizer=true",
            "optimizer.exp_avg_dtype=bf16",
            "optimizer.exp_avg_sq_dtype=bf16",
            "ddp.grad_reduce_in_fp32=false",
        )
    )
    # Two moments and the lower half of the weight, 2 bytes each, in place of three times 4.
    assert narrow.optimizer == wide.optimizer / 2
    assert narrow.gradients == wide.gradients / 2


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_run_with_transformer_engine_is_predicted_within_1_percent(precision):
    """Measured with Transformer Engine on four H200s."""
    measured = [
        run["summary"]["memory_gib"]
        for run in RUNS_WITH_ENGINE
        if run["name"] == f"megatron-{precision}"
    ]
    words = ["ranks=4", "training.global_batch_size=16", "training.micro_batch_size=1"]
    choices = Choices(backend="megatron", precision=precision, gpu="mi300x", nodes=1)
    peak = predict(resolve("llama3.1-8b", words, choices)).peak
    assert [peak / 2**30] * len(measured) == pytest.approx(measured, rel=0.01)
    assert measured


def test_weights_in_fp8_are_kept_only_by_layers_that_are_not_recomputed():
    words = (
        "model.recompute_granularity=full",
        "model.recompute_method=block",
        "model.recompute_num_layers=24",
    )
    choices = Choices(backend="megatron", precision="fp8", gpu="mi300x", nodes=1)
    kept = predict(resolve("llama3.1-8b", words, choices))
    off = "model.disable_parameter_transpose_cache=true"
    dropped = predict(resolve("llama3.1-8b", (*words, off), choices))
    products = 2 * 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    # Of 32 layers, 8 are not recomputed, and one is at a time.
    saved = kept.activations - dropped.activations
    assert saved == pytest.approx(products * 23 / 32, rel=1e-3)


def test_a_layout_of_chunks_recomputes_layers_of_each():
    block = ("model.recompute_granularity=full", "model.recompute_method=block")
    words = (*block, "model.recompute_num_layers=4", "pp=4", "training.micro_batch_size=1")
    layout = 'model.pipeline_model_parallel_layout="Et*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4,L"'
    virtual = "model.virtual_pipeline_model_parallel_size=2"
    by_layout = predict(megatron("llama3.1-8b", *words, layout, nodes=2))
    assert by_layout == predict(megatron("llama3.1-8b", *words, virtual, nodes=2))
    some = predict(megatron("llama3.1-8b", *words, nodes=2))
    # Half as many layers are kept if each stage has two chunks of which 4 layers are recomputed.
    assert by_layout.activations < some.activations / 2


def test_what_is_recomputed_exists_once_whatever_is_in_flight():
    words = (
        "model.recompute_granularity=full",
        "model.recompute_method=block",
        "model.recompute_num_layers=8",
        "training.micro_batch_size=1",
        "training.global_batch_size=64",
    )
    first, *_, last = stages(megatron("llama3.1-8b", "pp=4", *words))
    recipe = megatron("llama3.1-8b", "pp=4", *words)
    assert (first.in_flight, last.in_flight) == (4, 1)
    more = stage_memory(recipe, first, 1).activations - stage_memory(recipe, last, 1).activations
    # Three more micro-batches keep the inputs of 8 layers, in BF16.
    assert more == pytest.approx(3 * 8 * 8192 * 4096 * 2)
