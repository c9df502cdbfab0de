"""Every ``primus`` command of README and docs: each is accepted, and jobs are resolved and rendered (``--dry-run``)."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from primus.cli.main import VERBS, main, parser_of

ROOT = Path(__file__).parents[2]
OTHERS = ("README.md", "CONTRIBUTING.md", "src/primus/compat/README.md")
PAGES = [*(ROOT / name for name in OTHERS), *sorted(ROOT.glob("docs/*.md"))]
RENDERED = {"train", "finetune", "launch", "compat", "tune"}
READ = {"plan", "list", "show", "fit", "project", "releases"}  # as they are written
CLUSTER = [["k8s", name] for name in ("status", "logs", "delete", "nodes")]  # need one; test_kubernetes.py has it
# Absolute folders in the pages; here they are below a temporary one.
FOLDERS = ("/data/tokenizer", "/models/llama-3.1-8b", "/models/mine", "/weights")

LLAMA31 = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip


def commands(page: Path) -> list[tuple[str, dict[str, str]]]:
    """Each ``primus`` command of the shell blocks, from the verb on, with the variables set before it."""
    found = []
    for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", "").splitlines():
            words = shlex.split(line, comments=True)
            if "primus" in words:
                at = words.index("primus")
                variables = dict(word.split("=", 1) for word in words[:at] if re.match(r"[A-Z_]+=", word))
                found.append((shlex.join(words[at + 1 :]), variables))
    return found


# The example of each verb is on the page of commands.
EXAMPLES = [(verb, parser_of(verb).epilog or "") for verb in VERBS]
COMMANDS = [
    pytest.param(words, variables, id=f"{page.name}: {words}") for page in PAGES for words, variables in commands(page)
] + [
    pytest.param(example.removeprefix("example: primus ").partition(" > ")[0], {}, id=f"{verb} --help")
    for verb, example in EXAMPLES
]


def test_commands_were_found() -> None:
    assert len(COMMANDS) > 30


@pytest.mark.parametrize(("command", "variables"), COMMANDS)
def test_a_documented_command_is_accepted(
    command: str, variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verb, *words = shlex.split(command)
    parser_of(verb).parse_args(words)
    if verb in READ and "./my-model.yaml" not in words:
        monkeypatch.chdir(ROOT)
        assert main([verb, *words]) == 0
        return
    if verb not in RENDERED | READ or words[:2] in CLUSTER or words[0] == "gemm":
        return
    monkeypatch.chdir(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for folder in FOLDERS:
        shutil.copytree(ROOT / "recipes/assets/tokenizer", tmp_path / folder.removeprefix("/"))
        (tmp_path / folder.removeprefix("/") / "config.json").write_text(json.dumps(LLAMA31))
    (recipe,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/recipes.md").read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "my-model.yaml").write_text(recipe, encoding="utf-8")
    for name in ("data/corpus.jsonl", "rows/rows.jsonl", "prose.txt", "chats.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "To be, or not to be.", "content": "That is the question."}\n' * 100)
    words = [re.sub(r"(=|^)(/(data|models|weights))", rf"\1{tmp_path}\2", word) for word in words]
    words = ["real-rope,fused-adamw" if word == "NAME,NAME" else word for word in words]
    if "--resume-from" in words:  # needs a checkpoint that a job wrote
        at = words.index("--resume-from")
        del words[at : at + 2]
    if verb in ("train", "finetune", "tune") and not {"--gpu", "--proxy"} & set(words):
        words += ["--gpu", "h200" if "flash-attention-4" in command else "mi300x"]
    dry = () if verb in READ or "--dry-run" in words else ("--dry-run",)
    assert main([verb, *words, *dry]) == 0
