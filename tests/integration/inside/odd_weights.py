"""Odd weights and configs: trained as transformers loads them, with the same logits, or refused with the place."""

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import torch
from cases import here, try_all
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Mxfp4Config,
)

from primus.errors import InputError
from primus.recipes.family import OTHER
from primus.recipes.resolve import resolve
from primus.recipes.setting import Choices
from primus.recipes.weights import config_of, fitting_families, nearest_recipe
from primus.training.finetune import backend, models
from primus.training.loop import weights

ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}  # fmt: skip
SIZES: dict[str, Any] = {
    "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 8192, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
# Types of models that no family has: scaled logits, buffers of routers, other norms, recurrent layers, capped logits.
FOREIGN: dict[str, dict[str, Any]] = {
    "granite": {"logits_scaling": 8.0}, "olmo2": {}, "phi3": {}, "gemma2": {"head_dim": 16},
    "llama4_text": {"num_local_experts": 4, "head_dim": 16, "intermediate_size_mlp": 96, "attention_chunk_size": 16},
    "glm4_moe": {**EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "gpt_oss": {"num_experts_per_tok": 2, "num_local_experts": 4, "head_dim": 16},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "head_dim": 16},
    "deepseek_v3": {**EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "q_lora_rank": 32,
                    "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
                    "num_key_value_heads": 4},
}  # fmt: skip
LAYER = "model.layers.0.self_attn"
Q, EMBEDDING, HEAD = f"{LAYER}.q_proj.weight", "model.embed_tokens.weight", "lm_head.weight"
OWN = """
uses: [shared/data.yaml, shared/finetune.yaml]
name: own
description: a model of another family
supports: {{finetune: {{full: [bf16]}}}}
model: {{family: {family}, qkv_bias: {bias}}}
"""
Tensors = dict[str, Any]
Change = Callable[[Tensors], object]


@cache
def plain(kind: str) -> Path:
    torch.manual_seed(1)
    more = {"sliding_window": 16} if kind in ("mistral", "gemma3_text") else FOREIGN.get(kind, {})
    more = more | {"head_dim": 16} if kind == "gemma3_text" else more
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | {"pad_token_id": 0} | more))
    for name in dict(model.named_buffers()).keys() & model.state_dict().keys():
        model.get_buffer(name).uniform_(-0.1, 0.1)
    folder = Path(mkdtemp())
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def written(where: Path, kind: str = "llama", change: Change | None = None, keys: dict[str, Any] | None = None) -> Path:
    folder = where / "w"
    folder.mkdir()
    tensors = load_file(plain(kind) / "model.safetensors")
    if change:
        change(tensors)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain(kind) / "config.json").read_text()) | (keys or {})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def ours(folder: Path) -> Any:
    """What a run would train: the model with its weights, or InputError."""
    words = [f"weights={folder}", "assets.tokenizer=mock", "assets.corpus=mock", "seq_len=64"]
    kind = config_of(folder)[1]["model_type"]
    # No recipe of these families fine-tunes all weights yet; the backend does.
    own = folder.parent / "own.yaml"
    own.write_text(OWN.format(family=kind, bias=str(kind == "qwen2").lower()))
    name = str(own) if kind in ("mistral", "qwen2") else nearest_recipe(folder).recipe
    words += [f"model.family={OTHER}"] if fitting_families(kind) == [OTHER] else []
    recipe = resolve(name, words, Choices(backend="finetune", mode="full", gpu="cpu"))
    backend.check_weights(recipe)
    causal = models.causal_model(recipe.architecture, "sdpa", folder)
    weights.materialize(causal, torch.device("cpu"))
    causal.tie_weights()
    models.init(models.FineTuned(causal, 64), 1, weights.Files(folder))
    return causal.eval()


def theirs(folder: Path) -> Any:
    """What transformers loads if it objects to nothing, or None."""
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, dtype=torch.float32, local_files_only=True
        )
    except Exception:  # noqa: BLE001 - it raises many kinds
        return None
    return None if any(report.values()) or hasattr(model, "hf_quantizer") else model.eval()


def add(name: str, *shape: int, dtype: Any = None) -> Change:
    return lambda tensors: tensors.update({name: torch.ones(shape, dtype=dtype or torch.bfloat16)})


def cast(dtype: Any, part: str = "") -> Change:
    return lambda tensors: tensors.update({name: t.to(dtype) for name, t in tensors.items() if part in name})


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


def transposed(tensors: Tensors) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].T


def rope(**keys: Any) -> dict[str, Any]:
    return {"rope_parameters": None, "rope_scaling": keys or None, "rope_theta": 500000.0}


BODY = both(without("lm_head"), renamed("model.", ""))
BIAS = f"{LAYER}.q_proj.bias"
TIED = {"tie_word_embeddings": True}
# name → family, change of the tensors, keys of config.json
SAME: dict[str, tuple[str, Change | None, dict[str, Any]]] = {
    "mistral": ("mistral", None, {"sliding_window": None}),
    "float32": ("llama", cast(torch.float32), {}),
    "float64 and bfloat16": ("llama", cast(torch.float64, Q), {}),
    "tied without a head": ("llama", without("lm_head"), TIED),
    "tied with an equal head": ("llama", tied, TIED),
    "tied qwen2": ("qwen2", without("lm_head"), TIED),
    "the body of a model, tied": ("llama", BODY, TIED),
    "old rotary buffers": ("llama", add(f"{LAYER}.rotary_emb.inv_freq", 8), {}),
    "llama3 rope, old keys": ("llama", None, rope(**ROPE)),
    "llama3 rope, key type": ("llama", None, rope(**{"type" if k == "rope_type" else k: v for k, v in ROPE.items()})),
    "default rope, old keys": ("llama", None, rope(rope_type="default")),
    "yarn with betas": ("qwen2", None, rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=2048,
                                            beta_fast=16.0, beta_slow=2.0)),
    "gelu": ("llama", None, {"hidden_act": "gelu"}),
    "other epsilon": ("llama", None, {"rms_norm_eps": 1e-3}),
    "unused window": ("qwen2", None, {"sliding_window": 4096, "max_window_layers": 21, "use_sliding_window": False}),
    "labels of a classifier": ("llama", None, {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}),
    "float16, a config of float32": ("llama", cast(torch.float16), {"dtype": "float32"}),
    "swish": ("llama", None, {"hidden_act": "swish"}),
    "no scaling, old keys": ("llama", None, rope()),
    "linear rope": ("llama", None, rope(rope_type="linear", factor=2.0)),
    "gpt-oss": ("gpt_oss", None, {}),
    "gpt-oss, old keys": ("gpt_oss", None, {"layer_types": None, **rope(rope_type="yarn", factor=8.0,
                          original_max_position_embeddings=1024)}),
    "gemma": ("gemma3_text", without("lm_head"), {}),
    "gemma, old keys": ("gemma3_text", without("lm_head"), {**rope(rope_type="linear", factor=8.0),
                        "rope_local_base_freq": 5000.0, "layer_types": None, "sliding_window_pattern": 2}),
    "no size of heads": ("llama", None, {"head_dim": None}),
    "layer types": ("qwen2", None, {"layer_types": ["full_attention"] * 2}),
    "no quantization": ("llama", None, {"quantization_config": None}),
    "a rotary buffer at the top": ("llama", add("model.rotary_emb.inv_freq", 8), {}),
    "unknown keys": ("llama", None, {"made_by": "me", "pretraining_tp": 2, "architectures": ["Other"]}),
    "special tokens outside": ("llama", None, {"eos_token_id": [1, 9999]}),
    "kv heads null": ("llama", both(*(add(f"model.layers.{n}.self_attn.{p}_proj.weight", 64, 64)
                                      for n in range(2) for p in "kv")), {"num_key_value_heads": None}),
}  # fmt: skip
REFUSED: dict[str, tuple[str, Change | None, dict[str, Any], str]] = {
    "FP8 with scales": ("llama", scaled, {}, "F8_E4M3"),
    "compressed-tensors": ("llama", scaled, {"quantization_config": {"quant_method": "compressed-tensors"}}, "quantiz"),
    "bitsandbytes": ("llama", cast(torch.uint8, Q), {"quantization_config": {"load_in_4bit": True}}, "quantiz"),
    "gptq": ("llama", add(f"{LAYER}.q_proj.qweight", 8, 64, dtype=torch.int32),
             {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
    "packed integers": ("llama", add(f"{LAYER}.q_proj.qweight", 8, 64, dtype=torch.int32), {}, "I32"),
    "int8": ("llama", cast(torch.int8, Q), {}, f"{Q} is I8"),
    "more rows": ("llama", both(add(EMBEDDING, 1032, 64), add(HEAD, 1032, 64)), {}, r"\[1032, 64\].*\[1024, 64\]"),
    "more kv heads": ("llama", add("model.layers.1.self_attn.k_proj.weight", 64, 64), {}, r"\[64, 64\].*\[32, 64\]"),
    "a norm of one": ("llama", add("model.norm.weight", 1), {}, r"\[1\].*\[64\]"),
    "a scalar norm": ("llama", add("model.norm.weight"), {}, r"\[\].*\[64\]"),
    "a transposed matrix": ("llama", transposed, {}, r"\[64, 96\].*\[96, 64\]"),
    "a bias": ("llama", add(BIAS, 64), {}, BIAS),
    "an extra layer": ("llama", add("model.layers.2.mlp.up_proj.weight", 96, 64), {}, "model.layers.2.mlp.up_proj"),
    "a score head": ("llama", add("score.weight", 2, 64), {}, "score.weight"),
    "adapters inside": ("llama", add(f"{LAYER}.q_proj.lora_A.weight", 4, 64), {}, "lora_A"),
    "no head": ("llama", without("lm_head"), {}, "lack lm_head.weight"),
    "a layer less": ("llama", without("layers.1."), {}, r"lack model.layers.1\S+ and 8 more"),
    "no bias of qwen2": ("qwen2", without("q_proj.bias"), {}, "q_proj.bias"),
    "an untied head": ("llama", None, TIED, "ties the output layer"),
    "the body of a model": ("llama", BODY, {}, "lack lm_head.weight"),
    "other names": ("llama", renamed("self_attn", "attention"), {}, "attention"),
    "fewer layers in config": ("llama", None, {"num_hidden_layers": 1}, "no place for model.layers.1"),
    "other width": ("llama", None, {"hidden_size": 128, "head_dim": 16}, "in the file"),
    "other heads": ("llama", None, {"num_key_value_heads": 4}, r"\[32, 64\].*\[64, 64\]"),
    "of mistral, in a config of qwen2": ("mistral", None, {"model_type": "qwen2"}, "config.json|bias"),
    "of qwen2, in a config of llama": ("qwen2", None, {"model_type": "llama"}, "bias|layer_types"),
    "no model type": ("llama", None, {"model_type": None}, "no type of model"),
    "mlp bias": ("llama", both(*(add(f"model.layers.{n}.mlp.{p}_proj.bias", 64 if p == "down" else 96)
                                 for n in range(2) for p in ("up", "gate", "down"))), {"mlp_bias": True}, "bias"),
    "dropout": ("llama", None, {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
    "no act": ("llama", None, {"hidden_act": "mish2"}, "mish2"),
    "names of torch.compile": ("llama", renamed("model.", "_orig_mod.model."), {}, "_orig_mod.model"),
    "a head for several tokens": ("llama", add("mtp.layers.0.weight", 4), {}, "mtp.layers.0.weight"),
    "a mask among the weights": ("llama", add(f"{LAYER}.bias", 1, 1, 8, 8), {}, f"{LAYER}.bias"),
    "FP8 of the other kind": ("llama", cast(torch.float8_e5m2, Q), {}, "F8_E5M2"),
    "an epsilon as text": ("llama", None, {"rms_norm_eps": "1e-5"}, "norm_eps must be a number, not '1e-5'"),
    "layers that are true": ("llama", None, {"num_hidden_layers": True}, "must be a whole number"),
    "tying that is null": ("llama", None, {"tie_word_embeddings": None}, "must be true or false"),
    "layer types of fewer layers": ("qwen2", None, {"layer_types": ["full_attention"]}, "validate_layer_type"),
    "half of the positions": ("llama", None, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "dynamic rope": ("llama", None, rope(rope_type="dynamic", factor=2.0), "dynamic"),
    "layers with windows in another order": ("gemma3_text", without("lm_head"), {
        "layer_types": ["full_attention", "sliding_attention"]}, "window_pattern"),
    "another activation of gemma": ("gemma3_text", without("lm_head"), {"hidden_activation": "silu"}, "activation"),
    "capped logits": ("gemma3_text", without("lm_head"), {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    "attention to both sides": ("gemma3_text", without("lm_head"), {"use_bidirectional_attention": True}, "bidirect"),
    "longrope": ("llama", None, rope(rope_type="longrope", factor=2.0, short_factor=[1.0] * 8, long_factor=[1.0] * 8),
                 "longrope"),
    "unknown rope": ("llama", None, rope(rope_type="su"), "su"),
    "llama3 rope without its numbers": ("llama", None, rope(rope_type="llama3", factor="8"), "factor"),
    "yarn with its own factor of attention": ("llama", None, rope(rope_type="yarn", factor=4.0, attention_factor=0.5,
                                              original_max_position_embeddings=2048), "rope_parameters"),
    "a window of some layers": ("qwen2", None, {"use_sliding_window": True, "sliding_window": 16,
                                                "max_window_layers": 1, "layer_types": None}, "config.json"),
    "heads that do not divide": ("llama", None, {"num_key_value_heads": 3}, "kv_heads|num_key_value_heads"),
    "a fraction of layers": ("llama", None, {"num_hidden_layers": 2.5}, "num_hidden_layers"),
}  # fmt: skip
# These transformers loads, and primus does not train.
STRICTER = {
    "int8", "FP8 of the other kind", "half of the positions", "an untied head", "mlp bias", "dropout", "dynamic rope",
    "longrope", "yarn with its own factor of attention", "a window of some layers",
    "layers with windows in another order", "another activation of gemma", "capped logits", "attention to both sides",
}  # fmt: skip


def check_same(case: str, where: Path) -> None:
    folder = written(where, *SAME[case])
    wanted, model = theirs(folder), ours(folder)
    state = model.state_dict()
    for key, tensor in wanted.state_dict().items():
        assert torch.equal(state[key], tensor), key
    tokens = torch.arange(48).reshape(1, -1) * 7 % 1024
    torch.testing.assert_close(model(tokens).logits, wanted(tokens).logits, rtol=0, atol=0)


def check_foreign(case: str, where: Path) -> None:
    """Trained with transformers' own logits; adapters are exported as PEFT loads them."""
    folder, tokens = plain(case), torch.arange(96).reshape(2, -1) * 7 % 1024
    model, wanted = ours(folder), theirs(folder)
    state = model.state_dict()
    assert all(torch.equal(state[key], tensor) for key, tensor in wanted.state_dict().items())
    logits = wanted(tokens).logits
    loss = functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="sum")
    torch.testing.assert_close(models.WholeLogits(model, 64)(tokens, tokens), loss, rtol=0, atol=0)
    targets = ["q_proj", "v_proj"] if case == "falcon_h1" else []  # PEFT refuses some layers of Mamba
    lora = models.WholeLogits(models.adapted(model, backend.LoraConfig(rank=4, targets=targets)), 64)
    weights.materialize(lora, torch.device("cpu"))
    models.init(lora, 1, weights.Files(folder))
    added = {name: p for name, p in lora.model.named_parameters() if p.requires_grad}
    for name, parameter in added.items():
        torch.nn.init.normal_(parameter.data, 0, 0.1 if ".lora_B." in name else 1.0)
    models.write(lora, where / "adapters", added, None)
    again = PeftModel.from_pretrained(wanted, where / "adapters")
    torch.testing.assert_close(again(tokens).logits, lora.model(tokens).logits, rtol=0, atol=1e-5)
    assert float((lora.model(tokens).logits - logits).abs().max()) > 1e-3


def check_part(case: str, where: Path) -> None:
    """The language model of a model of several parts is trained, and exported alone."""
    text = SIZES | {"head_dim": 16, "sliding_window": 16, "pad_token_id": 0}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    torch.manual_seed(1)
    config = Gemma3Config(text_config=text, vision_config=vision, image_token_index=7)
    wanted = Gemma3ForConditionalGeneration(config).eval()
    wanted.save_pretrained(where / "w")
    if case == "names as published":
        file = where / "w/model.safetensors"
        names = {f"model.{part}": part for part in ("vision_tower", "multi_modal_projector")}
        names["model.language_model."] = "language_model.model."
        tensors = load_file(file)
        for old, new in names.items():
            renamed(old, new)(tensors)
        save_file(tensors, file, {"format": "pt"})
    model, tokens = ours(where / "w"), torch.arange(8, 48)[None]
    assert torch.equal(model(tokens).logits, wanted(tokens).logits)
    models.write(models.FineTuned(model, 64), where / "out", model.state_dict(), None)
    assert torch.equal(theirs(where / "out")(tokens).logits, model(tokens).logits)


def check_packed(_case: str, where: Path) -> None:
    """gpt-oss as published: the experts are in MXFP4, and are dequantized as transformers does it."""

    def pack(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("experts.gate_up_proj") or name.endswith("down_proj")]:
            experts, columns, rows = tensors.pop(name).shape
            tensors[f"{name}_blocks"] = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(118, 122, (experts, rows, columns // 32), dtype=torch.uint8)

    folder = written(where, "gpt_oss", pack, {"quantization_config": {"quant_method": "mxfp4"}})
    dequantized = Mxfp4Config(dequantize=True)
    wanted = AutoModelForCausalLM.from_pretrained(folder, quantization_config=dequantized).float()
    model = ours(folder)
    state = model.state_dict()
    assert all(torch.equal(state[key], tensor) for key, tensor in wanted.state_dict().items())
    models.write(models.WholeLogits(model, 64), where / "out", state, None)
    assert torch.equal(theirs(where / "out")(torch.arange(48)[None]).logits, model(torch.arange(48)[None]).logits)


def refused(folder: Path, words: str) -> None:
    try:
        ours(folder)
    except InputError as error:
        assert str(folder) in str(error.where), error.where
        assert re.search(words, str(error)), error
    else:
        raise AssertionError("it was trained")


def check_refused(case: str, where: Path) -> None:
    *change, words = REFUSED[case]
    folder = written(where, *change)
    refused(folder, words)
    assert (theirs(folder) is not None) == (case in STRICTER), "transformers"


def sharded(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    for number, half in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in half}, folder / f"part-{number}.safetensors", {"format": "pt"})
    rows = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": rows}))


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


def index(change: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    def shard(folder: Path) -> None:
        sharded(folder)
        content = json.loads((folder / INDEX).read_text())
        change(content["weight_map"])
        (folder / INDEX).write_text(json.dumps(content))

    return shard


def linked(folder: Path) -> None:
    """As in the hub's cache."""
    (folder / "model.safetensors").rename(folder.parent / "blob")
    (folder / "model.safetensors").symlink_to("../blob")


FILES = {
    "sharded": sharded, "stale": stale, "old shards": old_shards, "linked": linked,
    "an index that names another part": index(lambda names: names.update({Q: names[EMBEDDING], EMBEDDING: names[Q]})),
    "an index that leaves a tensor out": index(lambda names: names.pop(Q)),
    "an index of a tensor that is nowhere": index(lambda names: names.update({"ghost.weight": names[Q]})),
}  # fmt: skip
PART, INDEX = "part-0.safetensors", "model.safetensors.index.json"
# name → the file, its change, words of the sentence
DAMAGED: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "cut": (PART, lambda data: data[:-2], "truncated"),
    "more behind it": (PART, lambda data: data + b"more", "damaged"),
    "a cut header": (PART, lambda data: data[:9], "damaged"),
    "another dtype": (PART, lambda data: data.replace(b"BF16", b"F32 ", 1), "F32 "),
    "another shape": (PART, lambda data: data.replace(b"[96,64]", b"[96,65]", 1), "damaged"),
    "a cut index": (INDEX, lambda data: data[:-5], "index of the weights cannot be read"),
    "an absent part": (INDEX, lambda data: data.replace(b"part-1", b"part-7"), "lack part-7"),
    "half of the tensors": (INDEX, lambda data: data.replace(b"part-1", b"part-0"), "the weights lack"),
}


def check_files(case: str, where: Path) -> None:
    folder = written(where)
    FILES[case](folder)
    state = ours(folder).state_dict()
    for key, tensor in theirs(folder).state_dict().items():
        assert torch.equal(state[key], tensor), key


def check_damaged(case: str, where: Path) -> None:
    folder = written(where)
    sharded(folder)
    file, spoil, words = DAMAGED[case]
    (folder / file).write_bytes(spoil((folder / file).read_bytes()))
    refused(folder, words)


def check_a_process_of_its_own(_case: str, where: Path) -> None:
    """As a run refuses. All other cases check the weights in this process."""
    backend.subprocess = run
    refused(written(where, "llama", add(BIAS, 64)), BIAS)


run = backend.subprocess
backend.subprocess = SimpleNamespace(run=here)
try_all((
    (check_foreign, FOREIGN), (check_packed, ["gpt_oss"]), (check_part, ["", "names as published"]),
    (check_same, SAME), (check_refused, REFUSED),
    (check_files, FILES), (check_damaged, DAMAGED), (check_a_process_of_its_own, ["a bias"]),
))  # fmt: skip
