"""Every shell command of README, CONTRIBUTING and the site runs in a small project; the record
counts how.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import noxfile
import pytest
import yaml
from docs.site.__main__ import written
from docs.site.models import INTRO
from docs.site.reference import commands as reference

import gits
from primus_images.cli.main import parser_of
from primus_images.gpus import detect
from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from primus_images.versions.lock import Lock, dumps
from project_kit import Kit, make_project
from proof_kit import finished_run, kept, sparse_weights

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks/results/documented-commands.json"
# Folders in the pages' commands. Here they are below a temporary one.
FOLDERS = re.compile(r"(?<![\w$.}/])/(?=(?:data|models|shared|weights)\b)")
RULES = yaml.safe_load(
    (ROOT / "tests/fixtures/documented_commands.yaml").read_text(encoding="utf-8")
)
HERE = "tests/unit/test_docs_commands.py"


def documented() -> list[tuple[str, str]]:
    """Page and command of each line of a shell block."""
    names = [
        "README.md",
        *(name for name in written() if not name.startswith(("benchmarks/", "CHANGELOG"))),
    ]
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in names}
    texts |= {"reference/commands.md": "\n".join(reference()), "models.md": INTRO}
    blocks = [
        (name, block)
        for name in texts
        for block in re.findall(r"^```sh\n(.*?)^```", texts[name], re.M | re.S)
    ]
    lines = [
        (name, line) for name, block in blocks for line in block.replace("\\\n", " ").splitlines()
    ]
    shown = [
        (name, line)
        for name in texts
        for line in re.findall(r"^```console\n\$ (.+)", texts[name], re.M)
    ]
    return [(name, " ".join(line.partition("  #")[0].split())) for name, line in lines + shown]


def how(page: str, command: str) -> tuple[str, str]:
    """Whether CI runs a command, and the test that does, or the reason why not."""
    if page == "README.md" and command == "./dev tests":
        return "run", ".ci/run"
    for kind in ("run by", "not run"):
        for start, why in RULES[kind].items():
            if command.startswith(start):
                return kind.removesuffix(" by"), why
    pages = [name for name, text in COMMANDS if name in RULES["run by"] and text == command]
    if pages and not command.startswith(("primus validate", "docker")):
        return "run", RULES["run by"][pages[0]]
    verb = re.search(r"(?<!/)\bprimus ([\w-]+)", command)
    stood_in = ".venv" in command or command.startswith(
        ("docker", "./dev", "nox", "podman", "srun")
    )
    dry = stood_in or (verb and verb[1] in RULES["dry run"])
    return "dry run" if dry and "--dry-run" not in command else "run", HERE


COMMANDS = documented()


def test_the_record_counts_them(request: pytest.FixtureRequest) -> None:
    ways = {f"{page}: {command}": how(page, command) for page, command in COMMANDS}
    kinds = Counter(kind for kind, _ in ways.values())
    record = {
        "generated": "by pytest tests/unit/test_docs_commands.py --regenerate-golden; do not edit",
        "commands": len(ways),
        **{
            kind: dict(Counter(by for what, by in ways.values() if what == kind))
            for kind in ("run", "dry run")
        },
        "not run": {
            command: reason for command, (kind, reason) in ways.items() if kind == "not run"
        },
    }
    if request.config.getoption("--regenerate-golden"):
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    assert json.loads(RECORD.read_text(encoding="utf-8")) == record
    assert kinds["not run"] <= 0.05 * len(ways)
    for what, test in RULES["run by"].items():
        words = what.rpartition("/")[2] if what.endswith(".md") else '", "'.join(what.split()[1:])
        assert words in (ROOT / test).read_text(), f"{test} does not run {what}"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with two releases in its store, and the files that pages name."""
    root = tmp_path_factory.mktemp("world")
    kit = make_project(root)
    shutil.copytree(ROOT / "recipes", root / "recipes", dirs_exist_ok=True)
    for name in ("cpu", "mi300x", "mi355x"):
        text = (root / "images/demo.yaml").read_text()
        kit.write(f"images/{name}.yaml", text + "recipes: [llama3-proxy, mistral-7b]\n")
    pins = (root / "versions.yaml").read_text()
    for number in ("10", "11", "12"):
        text = pins.replace("v26.11", f"v26.{number}").replace("opt/alpha", f"opt/alpha{number}")
        kit.write("versions.yaml", text)
        for words in (
            ("init", "-q"),
            ("add", "versions.yaml", "images"),
            ("commit", "-q", "-m", number),
        ):
            gits.git(root, *words)
        kit.build("cpu", "mi300x")
    experiment = "examples/megatron/configs/MI300X/qwen3_14B-BF16-pretrain.yaml"
    for checkout in (root, root / "Primus"):
        shutil.copytree(ROOT / "tests/fixtures/primus", checkout, dirs_exist_ok=True)
        shutil.copytree(ROOT / "images/workspace/Primus", checkout, dirs_exist_ok=True)
        (checkout / experiment).parent.mkdir(parents=True)
        shutil.copy(checkout / "experiments/llama.yaml", checkout / experiment)
    for folder in ("data/tokenizer", "models/llama-3.1-8b", "models/mine", "weights"):
        shutil.copytree(ROOT / "recipes/assets/tokenizer", root / folder)
        shutil.copy(
            ROOT / "recipes/published/meta-llama--Llama-3.1-8B.json", root / folder / "config.json"
        )
        sparse_weights(root / folder)
    (recipe,) = re.findall(
        r"```yaml\n(.*?)```", (ROOT / "docs/recipes.md").read_text(encoding="utf-8"), re.S
    )
    kit.write("my-model.yaml", recipe)
    for name in ("data/corpus.jsonl", "rows/rows.jsonl", "prose.txt", "chats.jsonl"):
        kit.write(
            name, '{"text": "To be, or not to be.", "content": "That is the question."}\n' * 100
        )
    for name in ("before", "after", "mine"):
        finished_run(root / "runs" / name)
    kept(root / "runs/mine/checkpoint/step-10", resolve("llama3.1-8b", (), Choices(gpu="mi300x")))
    kit.write(
        "shared/preflight/node-1.json",
        kit.primus("preflight", "--quick", "--expect", "0", "--json").out,
    )
    kit.write(
        "images/locks/local/cpu.json", dumps(Lock(target="cpu", channel="local", pins={}, files=()))
    )
    for name, text in RULES["files"].items():
        kit.write(name, text)
    kit.write("dev", '#!/bin/sh\nsession=$1\nshift\nexec nox -s "$session" "$@"\n').chmod(0o755)
    stand_in = f"#!{sys.executable} -IS\n" + (ROOT / "tests/fixtures/stand_in").read_text(
        encoding="utf-8"
    )
    for name in [
        *(f"programs/{program}" for program in RULES["programs"]),
        ".venv/bin/pip",
        ".venv/bin/nox",
    ]:
        kit.write(name, stand_in).chmod(0o755)
    return root


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_a_documented_command_runs(
    page: str, command: str, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if command.startswith("git ") and how(page, command)[1] != HERE:
        return  # it changes the repository, in the project of that test
    monkeypatch.chdir(world)
    calls = tmp_path / "calls"
    environment = {
        "PATH": f"{world}/programs:/usr/bin:/bin",
        "CALLS": str(calls),
        "HOME": str(tmp_path),
    }
    text = FOLDERS.sub(f"{world}/", command)
    subprocess.run(["bash", "-euo", "pipefail", "-c", text], check=True, env=environment)
    machine = detect.DetectedGpus(
        vendor="amd", names=("AMD Instinct MI300X",) * 8, generation="mi300x"
    )
    monkeypatch.setattr(detect, "_amd", lambda root: machine)
    monkeypatch.setenv("PATH", f"{world}/programs:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "kubectl"))
    for program, *words, variables in map(
        json.loads, calls.read_text().splitlines() if calls.exists() else ()
    ):
        if program == "primus-cli":
            assert Kit(world).primus("compat", program, *words).code == 0
        if program == "docker":
            at = next(n for n, word in enumerate(words) if word.startswith("rocm/primus:"))
            assert {word for word in words[1:at] if word.startswith("-")} <= {*RULES["docker run"]}
        session = noxfile.COMMANDS.get(words[1]) if program == "nox" else None
        verb, *options = [*session[0], *words[3:]] if session else words
        if program == "primus" or session:
            parser_of(verb).parse_args(options)
        if program == "primus" and how(page, command)[1] == HERE:
            for name in variables.keys() - environment.keys() - {"PWD", "SHLVL", "_"}:
                monkeypatch.setenv(name, variables[name])
            inside = verb == "run"
            verb, *options = options[options.index("--") + 2 :] if inside else words
            dry = ["--dry-run"] * (verb in RULES["dry run"] and "--dry-run" not in options)
            if verb == "prove":  # the small project has no target for a GPU
                options += ["--project", str(ROOT)]
            at = options.index("--") if "--" in options else len(options)
            result = Kit(world).primus(verb, *options[:at], *dry, *options[at:])
            assert result.code in (0, RULES["exit code"].get(verb, 0)), result.err
