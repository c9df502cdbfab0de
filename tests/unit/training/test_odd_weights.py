"""Odd weights and configs: trained with the same weights and logits as transformers loads, or refused with the place.

Needs torch and transformers, as in an image.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file  # noqa: E402

from primus.errors import InputError  # noqa: E402
from primus.recipes.resolve import resolve  # noqa: E402
from primus.recipes.setting import Choices  # noqa: E402
from primus.recipes.weights import config_of, nearest_recipe  # noqa: E402
from primus.training.finetune import backend, models  # noqa: E402
from primus.training.loop import weights  # noqa: E402

ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}  # fmt: skip
SIZES: dict[str, Any] = {
    "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 8192, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": None,
}  # fmt: skip
Q, EMBEDDING, HEAD = "model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight", "lm_head.weight"
OWN = """
uses: [shared/data.yaml, shared/finetune.yaml]
name: own
description: a model of another family
supports: {{finetune: {{full: [bf16]}}}}
model: {{family: {family}, qkv_bias: {bias}}}
"""
Tensors = dict[str, Any]
Change = Callable[[Tensors], object]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for kind, extra in {"llama": {}, "mistral": {"sliding_window": 16}, "qwen2": {}}.items():
        torch.manual_seed(1)
        config = transformers.AutoConfig.for_model(kind, **SIZES, **extra)
        folders[kind] = tmp_path_factory.mktemp(kind)
        transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folders[kind])
    return folders


def written(
    source: Path, folder: Path, change: Change | None, keys: dict[str, Any], drop: tuple[str, ...] = ()
) -> Path:
    folder.mkdir()
    tensors = load_file(source / "model.safetensors")
    if change:
        change(tensors)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    config = {**json.loads((source / "config.json").read_text()), **keys}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing torch for each case would take minutes."""

    def here(command: list[str], **_: Any) -> SimpleNamespace:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            models.main(*command[-2:])
        return SimpleNamespace(stdout=printed.getvalue(), stderr="", returncode=0)

    monkeypatch.setattr(backend, "subprocess", SimpleNamespace(run=here))


def ours(folder: Path) -> Any:
    """What a run would train: the model with its weights, or InputError."""
    words = [f"weights={folder}", "assets.tokenizer=mock", "assets.corpus=mock", "seq_len=64"]
    choices = Choices(backend="finetune", mode="full", gpu="cpu")
    kind = config_of(folder)[1]["model_type"]
    # No recipe of these families fine-tunes all weights yet; the backend does.
    own = folder.parent / "own.yaml"
    own.write_text(OWN.format(family=kind, bias=str(kind == "qwen2").lower()))
    recipe = resolve(str(own) if kind in ("mistral", "qwen2") else nearest_recipe(folder).recipe, words, choices)
    backend.check_weights(recipe)
    causal = models.causal_model(recipe.architecture, backend.FinetuneConfig(), folder)
    weights.materialize(causal, torch.device("cpu"))
    causal.tie_weights()
    models.init(models.FineTuned(causal, 64), 1, weights.Files(folder))
    return causal.eval()


def theirs(folder: Path) -> Any:
    """What transformers loads if it objects to nothing, or None."""
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, dtype=torch.float32, local_files_only=True
        )
    except Exception:  # noqa: BLE001 - it raises many kinds
        return None
    return None if any(report.values()) or hasattr(model, "hf_quantizer") else model.eval()


def add(name: str, *shape: int, dtype: Any = None) -> Change:
    return lambda tensors: tensors.update({name: torch.ones(shape, dtype=dtype or torch.bfloat16)})


def cast(dtype: Any, name: str = Q) -> Change:
    return lambda tensors: tensors.update({name: tensors[name].to(dtype)})


def everything(dtype: Any) -> Change:
    return lambda tensors: tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})


def cut(name: str, *slices: slice) -> Change:
    return lambda tensors: tensors.update({name: tensors[name][slices]})


def without(part: str) -> Change:
    return lambda tensors: [tensors.pop(name) for name in [*tensors] if part in name]


def renamed(old: str, new: str) -> Change:
    return lambda tensors: [tensors.update({n.replace(old, new): tensors.pop(n)}) for n in [*tensors] if old in n]


def both(*changes: Change) -> Change:
    return lambda tensors: [change(tensors) for change in changes]


def tied(tensors: Tensors) -> None:
    tensors[HEAD] = tensors[EMBEDDING].clone()


def scaled(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = torch.ones(1)


def rope(**keys: Any) -> dict[str, Any]:
    return {"rope_parameters": None, "rope_scaling": keys or None, "rope_theta": 500000.0}


BIAS = "model.layers.0.self_attn.q_proj.bias"
# name → family, change of the tensors, keys of config.json
SAME: dict[str, tuple[str, Change | None, dict[str, Any]]] = {
    "plain": ("llama", None, {}),
    "mistral": ("mistral", None, {}),
    "qwen2": ("qwen2", None, {}),
    "float32": ("llama", everything(torch.float32), {}),
    "float16": ("llama", everything(torch.float16), {}),
    "float64": ("llama", cast(torch.float64), {}),
    "mixed dtypes": ("llama", cast(torch.float32), {}),
    "tied without a head": ("llama", without("lm_head"), {"tie_word_embeddings": True}),
    "tied with an equal head": ("llama", tied, {"tie_word_embeddings": True}),
    "tied qwen2": ("qwen2", without("lm_head"), {"tie_word_embeddings": True}),
    "the body of a model, tied": ("llama", both(without("lm_head"), renamed("model.", "")),
                                  {"tie_word_embeddings": True}),
    "old rotary buffers": ("llama", add("model.layers.0.self_attn.rotary_emb.inv_freq", 8), {}),
    "llama3 rope, old keys": ("llama", None, rope(**ROPE)),
    "llama3 rope, key type": ("llama", None, rope(**{"type" if k == "rope_type" else k: v for k, v in ROPE.items()})),
    "no rope scaling, old keys": ("llama", None, rope()),
    "default rope, old keys": ("llama", None, rope(rope_type="default")),
    "yarn": ("llama", None, rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=2048)),
    "yarn with betas": ("qwen2", None, rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=2048,
                                            beta_fast=16.0, beta_slow=2.0)),
    "gelu": ("llama", None, {"hidden_act": "gelu"}),
    "swish": ("llama", None, {"hidden_act": "swish"}),
    "other epsilon": ("llama", None, {"rms_norm_eps": 1e-3}),
    "sliding window null": ("mistral", None, {"sliding_window": None}),
    "unused window": ("qwen2", None, {"sliding_window": 4096, "max_window_layers": 21, "use_sliding_window": False}),
    "unknown keys": ("llama", None, {"made_by": "me", "pretraining_tp": 2}),
    "other architectures": ("llama", None, {"architectures": ["Other"]}),
    "special tokens outside": ("llama", None, {"eos_token_id": [1, 9999]}),
    "kv heads null": ("llama", lambda t: [add(f"model.layers.{n}.self_attn.{p}_proj.weight", 64, 64)(t)
                                          for n in range(2) for p in "kv"], {"num_key_value_heads": None}),
}  # fmt: skip
REFUSED: dict[str, tuple[str, Change | None, dict[str, Any], str]] = {
    "FP8 with scales": ("llama", scaled, {}, "F8_E4M3"),
    "compressed-tensors": ("llama", scaled, {"quantization_config": {"quant_method": "compressed-tensors"}}, "quantiz"),
    "fp8": ("llama", scaled, {"quantization_config": {"quant_method": "fp8"}}, "quantized"),
    "bitsandbytes": ("llama", cast(torch.uint8), {"quantization_config": {"load_in_4bit": True}}, "quantiz"),
    "gptq": ("llama", add("model.layers.0.self_attn.q_proj.qweight", 8, 64, dtype=torch.int32),
             {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
    "awq": ("llama", None, {"quantization_config": {"quant_method": "awq"}}, "awq"),
    "packed integers": ("llama", add("model.layers.0.self_attn.q_proj.qweight", 8, 64, dtype=torch.int32), {}, "I32"),
    "int8": ("llama", cast(torch.int8), {}, f"{Q} is I8"),
    "uint8": ("llama", cast(torch.uint8), {}, f"{Q} is U8"),
    "bool": ("llama", cast(torch.bool), {}, f"{Q} is BOOL"),
    "more rows": ("llama", both(add(EMBEDDING, 1032, 64), add(HEAD, 1032, 64)), {}, r"\[1032, 64\].*\[1024, 64\]"),
    "fewer rows": ("llama", cut(EMBEDDING, slice(1000)), {}, r"\[1000, 64\].*\[1024, 64\]"),
    "more kv heads": ("llama", add("model.layers.1.self_attn.k_proj.weight", 64, 64), {}, r"\[64, 64\].*\[32, 64\]"),
    "a norm of one": ("llama", add("model.norm.weight", 1), {}, r"\[1\].*\[64\]"),
    "a scalar norm": ("llama", add("model.norm.weight"), {}, r"\[\].*\[64\]"),
    "a transposed matrix": ("llama", lambda t: t.update({"model.layers.0.mlp.up_proj.weight":
                            t["model.layers.0.mlp.up_proj.weight"].T}), {}, r"\[64, 96\].*\[96, 64\]"),
    "a bias": ("llama", add(BIAS, 64), {}, BIAS),
    "an extra layer": ("llama", add("model.layers.2.mlp.up_proj.weight", 96, 64), {}, "model.layers.2.mlp.up_proj"),
    "an extra norm": ("llama", add("model.layers.0.self_attn.q_norm.weight", 16), {}, "q_norm"),
    "a score head": ("llama", add("score.weight", 2, 64), {}, "score.weight"),
    "adapters inside": ("llama", add("model.layers.0.self_attn.q_proj.lora_A.weight", 4, 64), {}, "lora_A"),
    "no head": ("llama", without("lm_head"), {}, "lack lm_head.weight"),
    "no embedding": ("llama", without("embed"), {}, "lack model.embed_tokens.weight"),
    "a layer less": ("llama", without("layers.1."), {}, r"lack model.layers.1\S+ and 8 more"),
    "no bias of qwen2": ("qwen2", without("q_proj.bias"), {}, "q_proj.bias"),
    "an untied head": ("llama", None, {"tie_word_embeddings": True}, "ties the output layer"),
    "the body of a model": ("llama", both(without("lm_head"), renamed("model.", "")), {}, "lack lm_head.weight"),
    "other names": ("llama", renamed("self_attn", "attention"), {}, "attention"),
    "fewer layers in config": ("llama", None, {"num_hidden_layers": 1}, "no place for model.layers.1"),
    "more layers in config": ("llama", None, {"num_hidden_layers": 3}, "lack model.layers.2"),
    "other width": ("llama", None, {"hidden_size": 128, "head_dim": 16}, "in the file"),
    "other ffn": ("llama", None, {"intermediate_size": 128}, r"\[64, 96\].*\[64, 128\]"),
    "other heads": ("llama", None, {"num_key_value_heads": 4}, r"\[32, 64\].*\[64, 64\]"),
    "of mistral, in a config of qwen2": ("mistral", None, {"model_type": "qwen2"}, "config.json|bias"),
    "of qwen2, in a config of llama": ("qwen2", None, {"model_type": "llama"}, "bias|layer_types"),
    "gpt2": ("llama", None, {"model_type": "gpt2"}, "gpt2"),
    "no model type": ("llama", None, {"model_type": None}, "None"),
    "mlp bias": ("llama", lambda t: [add(f"model.layers.{n}.mlp.{p}_proj.bias", 64 if p == "down" else 96)(t)
                                     for n in range(2) for p in ("up", "gate", "down")], {"mlp_bias": True}, "bias"),
    "attention bias": ("llama", None, {"attention_bias": True}, "attention_bias"),
    "dropout": ("llama", None, {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
    "no length": ("llama", None, {"max_position_embeddings": None}, "max_position_embeddings"),
    "length as text": ("llama", None, {"max_position_embeddings": "8192"}, "max_position_embeddings"),
    "no act": ("llama", None, {"hidden_act": "mish2"}, "mish2"),
    "linear rope": ("llama", None, rope(rope_type="linear", factor=2.0), "linear"),
    "dynamic rope": ("llama", None, rope(rope_type="dynamic", factor=2.0), "dynamic"),
    "longrope": ("llama", None, rope(rope_type="longrope", factor=2.0, short_factor=[1.0] * 8, long_factor=[1.0] * 8),
                 "longrope"),
    "unknown rope": ("llama", None, rope(rope_type="su"), "su"),
    "rope as text": ("llama", None, {"rope_parameters": None, "rope_scaling": "yarn"}, "rope_scaling"),
    "llama3 rope without its numbers": ("llama", None, rope(rope_type="llama3", factor="8"), "factor"),
    "yarn with its own factor of attention": ("llama", None, rope(rope_type="yarn", factor=4.0, attention_factor=0.5,
                                              original_max_position_embeddings=2048), "rope_parameters"),
    "a window of some layers": ("qwen2", None, {"use_sliding_window": True, "sliding_window": 16,
                                                "max_window_layers": 1, "layer_types": None}, "config.json"),
    "heads that do not divide": ("llama", None, {"num_key_value_heads": 3}, "kv_heads|num_key_value_heads"),
    "heads of zero": ("llama", None, {"num_attention_heads": 0}, "num_attention_heads"),
    "a fraction of layers": ("llama", None, {"num_hidden_layers": 2.5}, "num_hidden_layers"),
    "vocabulary as text": ("llama", None, {"vocab_size": "1024"}, "vocab_size"),
    "vocabulary of the tokens only": ("llama", None, {"vocab_size": 1000}, r"\[1024, 64\].*\[1000, 64\]"),
}  # fmt: skip
# These transformers loads, and primus does not train.
STRICTER = {
    "int8", "uint8", "bool", "an untied head", "mlp bias", "dropout", "linear rope", "dynamic rope",
    "longrope", "yarn with its own factor of attention", "a window of some layers",
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_the_same_weights_as_transformers(plain: dict[str, Path], tmp_path: Path, name: str) -> None:
    family, change, keys = SAME[name]
    folder = written(plain[family], tmp_path / "w", change, keys)
    wanted, found = theirs(folder), ours(folder)
    assert wanted is not None
    state = found.state_dict()
    for key, tensor in wanted.state_dict().items():
        assert torch.equal(state[key], tensor), key
    tokens = torch.arange(48).reshape(1, -1) * 7 % 1024
    torch.testing.assert_close(found(tokens).logits, wanted(tokens).logits, rtol=0, atol=0)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_its_place(plain: dict[str, Path], tmp_path: Path, name: str) -> None:
    family, change, keys, told = REFUSED[name]
    folder = written(plain[family], tmp_path / "w", change, keys)
    with pytest.raises(InputError, match=told) as refused:
        ours(folder)
    assert refused.value.where, refused.value
    assert str(folder) in refused.value.where
    assert (theirs(folder) is not None) == (name in STRICTER)


def sharded(folder: Path) -> dict[str, Any]:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    for number, half in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in half}, folder / f"part-{number}.safetensors", {"format": "pt"})
    rows = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": rows}))
    return rows


def stale(folder: Path) -> None:
    """An index of other weights beside the whole file."""
    whole = (folder / "model.safetensors").read_bytes()
    sharded(folder)
    for part in folder.glob("part-*"):
        save_file({n: t * 0 for n, t in load_file(part).items()}, part, {"format": "pt"})
    (folder / "model.safetensors").write_bytes(whole)


def old_shards(folder: Path) -> None:
    sharded(folder)
    save_file({"x": torch.ones(1)}, folder / "part-9.safetensors", {"format": "pt"})


def spoilt(file: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        sharded(folder)
        (folder / file).write_bytes(change((folder / file).read_bytes()))

    return spoil


@pytest.mark.parametrize("lay_out", [sharded, stale, old_shards], ids=lambda change: change.__name__)
def test_the_same_files_as_transformers(plain: dict[str, Path], tmp_path: Path, lay_out: Any) -> None:
    folder = written(plain["llama"], tmp_path / "w", None, {})
    lay_out(folder)
    for key, tensor in theirs(folder).state_dict().items():
        assert torch.equal(ours(folder).state_dict()[key], tensor), key


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (spoilt("part-0.safetensors", lambda data: data[:-2]), "truncated"),
        (spoilt("part-0.safetensors", lambda data: data + b"more"), "damaged"),
        (spoilt("part-0.safetensors", lambda data: data[:9]), "damaged"),
        (spoilt("part-0.safetensors", lambda _: b""), "damaged"),
        (spoilt("part-0.safetensors", lambda data: data.replace(b"BF16", b"F32 ", 1)), "F32 "),
        (spoilt("part-0.safetensors", lambda data: data.replace(b"[96,64]", b"[64,96]", 1)), r"\[64, 96\]|damaged"),
        (spoilt("part-0.safetensors", lambda data: data.replace(b"[96,64]", b"[96,65]", 1)), "damaged"),
        (spoilt("model.safetensors.index.json", lambda data: data[:-5]), "index of the weights cannot be read"),
        (spoilt("model.safetensors.index.json", lambda data: data.replace(b"part-1", b"part-7")), "lack part-7"),
        (spoilt("model.safetensors.index.json", lambda data: data.replace(b"part-1", b"part-0")), "the weights lack"),
        (lambda folder: (sharded(folder), (folder / "model.safetensors.index.json").unlink()), "no safetensors files"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), "pickle"),
    ],
)  # fmt: skip
def test_damaged_files_are_named(plain: dict[str, Path], tmp_path: Path, spoil: Any, told: str) -> None:
    folder = written(plain["llama"], tmp_path / "w", None, {})
    spoil(folder)
    with pytest.raises(InputError, match=told) as refused:
        ours(folder)
    assert str(folder) in str(refused.value)


def test_a_run_refuses_in_a_process_of_its_own(
    plain: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    with pytest.raises(InputError, match=BIAS):
        ours(written(plain["llama"], tmp_path / "w", add(BIAS, 64), {}))
