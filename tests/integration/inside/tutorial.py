"""Run by Python with torch. Commands of the tutorial, and of data, export and chat, as they are
written, on a tiny model.
"""

import json
import os
import re
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pages
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

from primus_images.cli.verb import VERBS
from primus_images.errors import InputError
from primus_images.recipes.load import folder
from primus_images.training.backends.finetune.talk import Talk

MODELS = "/models/"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}{{ "
    "eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
}


def tiny(where: Path) -> None:
    shutil.copytree(folder() / "assets/tokenizer", where)
    settings = where / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(where)


with TemporaryDirectory() as name:
    here = Path(name)
    tiny(here / "models/llama-3.1-8b")
    os.chdir(here)
    steps = pages.blocks("chats.md")
    steps.append(("python", 'import os; os.symlink("chats", "runs/mine")'))
    training = (pages.DOCS / "training.md").read_text(encoding="utf-8")
    lines = re.findall(r"^primus (?:data|export) .+", training, re.M)
    lines += [VERBS[verb].example for verb in ("data", "chat", "export")]
    for kind, block in steps + [("sh", line) for line in lines]:
        shutil.rmtree(here / "models/mine", ignore_errors=True)
        text = block.replace(MODELS, f"{here}/models/")
        output = pages.run(kind, text, "Do you ship abroad?\n")
        if block.startswith("primus chat"):
            assert output.endswith("\n"), "an answer, which may be empty, ends its line"
        if " data " in block:
            assert (
                "6 chats in messages" in output
                and "⟦Yes, within 30 days.<|end_of_text|>⟧" in output
            )
    folders = (here / "models/llama-3.1-8b", here / "runs/chats/weights", here / "models/mine")
    before, after, exported = (load_file(folder / "model.safetensors") for folder in folders)
    assert {n: t.shape for n, t in exported.items()} == {n: t.shape for n, t in before.items()}
    assert {n: t.shape for n, t in after.items()} == {n: t.shape for n, t in before.items()}
    assert any((after[n] != before[n]).any() for n in after), "nothing was trained"
    talk = Talk(here / "runs/chats/weights")
    hello = [{"role": "user", "content": "Do you ship abroad?"}]
    talk._model.config.max_position_embeddings = 40
    talk.reply(hello, 100, print)  # up to the last position
    for turns, template, words in (
        (hello * 10, talk._tokenizer.chat_template, "the model takes 40, with its answer"),
        (hello, "{{ raise_exception('no system') }}", "refuses the chat: no system"),
    ):
        talk._tokenizer.chat_template = template
        try:
            talk.reply(turns, 100, print)
        except InputError as error:
            assert words in str(error), error
        else:
            raise AssertionError(words)
    summary = json.loads((here / "runs/chats/result.json").read_text())["summary"]
    assert summary["eval_loss"] and summary["last_loss"] < summary["first_loss"], summary
