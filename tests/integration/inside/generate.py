"""Run by Python with transformers and PEFT, and without this project: exported weights load and write text."""

from __future__ import annotations

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

folder = sys.argv[1]
if (Path(folder) / "adapter_config.json").is_file():
    from peft import AutoPeftModelForCausalLM

    model = AutoPeftModelForCausalLM.from_pretrained(folder)
else:
    model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
written = model.generate(**tokenizer("The carpenter asked", return_tensors="pt"), max_new_tokens=8)
assert written.shape[1] > 8
assert model.generation_config.eos_token_id == tokenizer.eos_token_id
assert not any(name.startswith("primus.") for name in sys.modules)
print(tokenizer.decode(written[0]))
