"""Run by Python with torch. The tutorial's commands, as they are written, on a tiny model."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

from primus.recipes.load import folder

PAGE = Path(__file__).parents[3] / "docs/chats.md"
WEIGHTS = "/models/llama-3.1-8b"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 1024, "rope_theta": 10000.0,
}  # fmt: skip


def tiny(where: Path) -> None:
    shutil.copytree(folder() / "assets/tokenizer", where)
    settings = where / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(where)


with TemporaryDirectory() as name:
    here = Path(name)
    tiny(here / "model")
    os.chdir(here)
    for kind, block in re.findall(r"^```(sh|python)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S):
        text = block.replace(WEIGHTS, str(here / "model"))
        words = ["-m", "primus.cli.main", *text.split()[1:]] if kind == "sh" else ["-c", text]
        output = subprocess.run([sys.executable, *words], stdout=subprocess.PIPE, text=True, check=True).stdout
        if " data " in block:
            assert "6 chats in messages" in output and "⟦Yes, within 30 days.<|end_of_text|>⟧" in output
    before, after = (load_file(here / part / "model.safetensors") for part in ("model", "runs/chats/weights"))
    assert {n: t.shape for n, t in after.items()} == {n: t.shape for n, t in before.items()}
    assert any((after[n] != before[n]).any() for n in after), "nothing was trained"
    summary = json.loads((here / "runs/chats/result.json").read_text())["summary"]
    assert summary["eval_loss"] and summary["last_loss"] < summary["first_loss"], summary
