"""Run by Python with transformers and PEFT, and without this project: exported weights load and
write text.
"""

import sys
from pathlib import Path

from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

for folder in sys.argv[1:]:
    adapters = (Path(folder) / "adapter_config.json").is_file()
    model = (AutoPeftModelForCausalLM if adapters else AutoModelForCausalLM).from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    written = model.generate(
        **tokenizer("The carpenter asked", return_tensors="pt"), max_new_tokens=8
    )
    assert written.shape[1] > 8
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    print(tokenizer.decode(written[0]))
assert not any(name.startswith("primus.") for name in sys.modules)
