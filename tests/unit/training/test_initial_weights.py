"""Weights that fine-tuning begins with, and what it exports: objections, conversions, a talk."""

import contextlib
import io
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
for name in ("torchtitan", "megatron", "peft", "diffusers"):
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)

from safetensors.torch import load_file, save_file  # noqa: E402
from tiny_runs import ended, folder  # noqa: E402

from primus_images.errors import InputError  # noqa: E402
from primus_images.recipes.architecture import architecture  # noqa: E402
from primus_images.training.backends.finetune import (  # noqa: E402
    backend,
    conversion,
    entry,
    export,
    models,
    objections,
)
from primus_images.training.backends.finetune.talk import Talk  # noqa: E402
from primus_images.training.backends.loop import process  # noqa: E402
from primus_images.training.backends.loop.config import read_job  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

RUN = "finetune-full"
UP = "model.layers.1.mlp.up_proj.weight"


def here(command: list[str], **_: Any) -> SimpleNamespace:
    """Check weights in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        objections.main(*command[4:])
    return SimpleNamespace(stdout=printed.getvalue(), stderr="", returncode=0)


@pytest.fixture
def weights(tmp_path: Path) -> Iterator[Path]:
    shutil.copytree(folder(RUN) / "weights", tmp_path / "weights")
    with mock.patch.object(backend, "subprocess", SimpleNamespace(run=here)):
        yield tmp_path / "weights"


def config(**values: Any) -> Callable[[Path], None]:
    def change(weights: Path) -> None:
        file = weights / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def tensors(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def write(weights: Path) -> None:
        file = weights / "model.safetensors"
        content = load_file(file)
        change(content)
        save_file(content, file, metadata={"format": "pt"})

    return write


def damaged(weights: Path) -> None:
    file = weights / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def test_weights_of_the_same_model_are_accepted(weights: Path) -> None:
    model = ended(RUN).job.recipe.architecture
    backend.check(weights, model)
    assert list(objections.objections(weights, model)) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (config(model_type="vit"), "of type vit, and the recipe's family is llama3"),
        (config(rms_norm_eps=0.5), "0.5"),
        (config(attention_dropout=0.25), "attention_dropout is 0.25 in the weights, and 0.0 in"),
        (config(tie_word_embeddings=True), "tie"),
        (tensors(lambda content: content.pop(UP)), UP),
        (tensors(lambda content: content.update({UP: content[UP][:, :40].contiguous()})), UP),
        (tensors(lambda content: content.update(other=torch.ones(1))), "other"),
        (damaged, "model.safetensors"),
    ],
)
def test_other_weights_are_refused(
    weights: Path, change: Callable[[Path], None], words: str
) -> None:
    change(weights)
    with pytest.raises(InputError) as caught:
        backend.check(weights, ended(RUN).job.recipe.architecture)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("change", "whys"),
    [
        (config(model_type="nothing"), ["has no models of type nothing"]),
        (
            config(attention_dropout=0.25),
            ["attention_dropout is 0.25 in the weights, and 0.0 in the recipe's model"],
        ),
        (
            config(tie_word_embeddings=True),
            [
                "tie_word_embeddings is True in the weights, and False in the recipe's model",
                "config.json ties the output layer to the embedding, but lm_head.weight differs "
                "from model.embed_tokens.weight",
            ],
        ),
        (
            tensors(lambda content: [content.pop(UP), content.pop("model.norm.weight")]),
            [
                f"the weights lack {UP} and 1 more tensors",
                f"lack {UP}",
                "lack model.norm.weight",
            ],
        ),
        (
            tensors(lambda content: content.update(b=torch.ones(1), a=torch.ones(1))),
            ["transformers' model has no place for a and 1 more tensors"],
        ),
        (
            tensors(lambda content: content.update({UP: content[UP][:, :40].contiguous()})),
            [f"{UP} is [48, 40] in the file, and [48, 48] in the model of config.json"],
        ),
    ],
)
def test_objections_name_every_tensor_and_setting(
    weights: Path, change: Callable[[Path], None], whys: list[str]
) -> None:
    change(weights)
    yielded = list(objections.objections(weights, ended(RUN).job.recipe.architecture))
    assert len(yielded) == len(whys), yielded
    for objection, why in zip(yielded, whys, strict=True):
        assert why in objection.why


def test_an_encoder_sees_what_follows(weights: Path) -> None:
    from transformers import BertConfig, BertLMHeadModel

    small = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=16)
    BertLMHeadModel(small).save_pretrained(weights)
    (weights / "model.safetensors.index.json").unlink(missing_ok=True)
    unknown = architecture({"family": "other", "vocab_size": 16})
    first = next(objections.objections(weights, unknown))
    assert "sees the words that follow, so it does not learn to predict them" in first.why
    config(is_decoder=True)(weights)
    for objection in objections.objections(weights, unknown):
        assert "sees the words" not in objection.why


def test_weights_are_loaded_as_transformers_loads_them(weights: Path) -> None:
    model = ended(RUN).job.recipe.architecture
    loaded = conversion.Loaded(weights)
    plain = load_file(weights / "model.safetensors")
    for key, tensor in plain.items():
        assert key in loaded
        assert torch.equal(loaded.rows_of(key)(0, len(tensor)), tensor)
        assert torch.equal(loaded.rows_of(key)(1, 2), tensor[1:2])
    assert "other" not in loaded
    causal = models.causal_model(model, "sdpa", weights)
    assert not conversion.are_converted(weights, causal, model)
    files = conversion.files_of(weights, causal, model)
    assert type(files) is not conversion.Loaded


def test_model_of_no_family_is_converted_if_a_tensor_has_another_name(weights: Path) -> None:
    known = ended(RUN).job.recipe.architecture
    causal = models.causal_model(known, "sdpa", weights)
    unknown = architecture({"family": "other", "vocab_size": known.vocab_size})
    assert not unknown.has_formula
    assert not conversion.are_converted(weights, causal, unknown)
    tensors(lambda content: content.update(renamed=content.pop(UP)))(weights)
    assert conversion.are_converted(weights, causal, unknown)


@pytest.mark.parametrize("run", [RUN, "finetune-lora"])
def test_exported_model_talks(run: str) -> None:
    talk = Talk(folder(run) / "weights")
    parts: list[str] = []
    assert not talk.chats
    said = talk.reply([{"role": "user", "content": "Two and two are"}], 5, parts.append)
    assert said == "".join(parts).strip()
    again = talk.reply([{"role": "user", "content": "Two and two are"}], 2, parts.append)
    assert said.startswith(again[:1])
    longest = talk._model.config.max_position_embeddings
    text = "word " * longest
    with pytest.raises(InputError, match=f"and the model takes {longest}, with its answer"):
        talk.reply([{"role": "user", "content": text}], 5, parts.append)


def test_template_that_refuses_a_chat_is_named(weights: Path) -> None:
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('none') }}{% endif %}"
    (weights / "chat_template.jinja").write_text(template + "{{ messages[-1]['content'] }}")
    talk = Talk(weights)
    assert talk.chats
    shown: list[str] = []
    assert talk.reply([{"role": "user", "content": "Two"}], 1, shown.append) is not None
    with pytest.raises(InputError, match="the chat template refuses the chat: none"):
        talk.reply([{"role": "system", "content": "Two"}], 1, shown.append)


class Stop(Exception):
    """The end of what a test needs of a rank."""


@pytest.mark.parametrize("compiled", [True, False])
def test_compiled_blocks_of_fine_tuning_keep_fewer_activations(compiled: bool) -> None:
    job = read_job(folder(RUN))
    job = replace(job, training=replace(job.training, compile=compiled))
    calls: list[str] = []

    def shard(*_: object, **__: object) -> None:
        calls.append("shard")
        raise Stop

    with (
        mock.patch.object(process, "keep_fewer_activations", lambda: calls.append("fewer")),
        mock.patch.object(entry, "shard", shard),
        pytest.raises(Stop),
    ):
        entry.main(job, torch.device("cpu"))
    assert calls == ["fewer", "shard"][not compiled :]


def test_partitioner_and_graphs_are_set_for_the_compiler() -> None:
    import torch._functorch.config as functorch
    from torch._inductor import config as inductor

    with functorch.patch({}), inductor.patch({}):
        before = dict(inductor.unsafe_marked_cacheable_functions)
        process.keep_graphs()
        added = inductor.unsafe_marked_cacheable_functions.keys() - before.keys()
        assert added == {
            "torch.nn.attention._backend_from_string",
            "torch.nn.attention._sdpa_kernel",
        }
        inductor.unsafe_marked_cacheable_functions = before


def test_attention_of_a_job_is_that_of_its_first_optimization() -> None:
    job = read_job(folder(RUN))
    settings = job.section(backend.FinetuneConfig)
    for turbo, name in (
        ((), "sdpa"),
        (("packed-attention",), "primus_packed"),
        (("flash-attention-2",), "primus_attention"),
        (("flash-attention-2", "packed-attention-4"), "primus_packed"),
    ):
        assert entry._attention(replace(job, turbo=turbo), settings) == name
    wide = [entry._is_wide(layer) for layer in ("lm_head", "a.lora_A.b", "model.up_proj")]
    assert wide == [True, True, False]


def test_ranks_of_a_machine_load_converted_weights_one_after_another(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(entry.dist, "barrier", lambda: events.append("wait"))
    monkeypatch.setattr(entry.initial, "init", lambda *_: events.append("load"))
    monkeypatch.setattr(entry.conversion, "Loaded", lambda _: None)
    job: Any = ended(RUN).job.recipe
    of_rank: Any = SimpleNamespace(model=job.architecture, training=SimpleNamespace(seed=1))
    entry._init(mock.Mock(), of_rank, weights, converted=True)
    assert events == ["wait", "load", "wait", "wait"]


@pytest.mark.parametrize("run", [RUN, "finetune-gemma3"])
def test_exported_settings_have_rotary_bases_by_older_names(run: str, tmp_path: Path) -> None:
    model = ended(run).job.recipe.architecture
    causal = models.causal_model(model, "sdpa")
    file = tmp_path / "config.json"
    file.write_text(causal.config.to_json_string(use_diff=False))
    export._add_older_names(file)
    settings = json.loads(file.read_text())
    rope = settings["rope_parameters"]
    whole = rope.get("full_attention", rope)
    assert settings["rope_theta"] == whole["rope_theta"] > 10_000
