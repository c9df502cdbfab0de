"""What docs/old-lines.md says of each line and promise of the five documents, run."""

import inspect
import os
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from docs.old_lines import COMMANDS, LINES, cells, kind_of, text
from docs.site.published import outcomes

from primus_images.cli.main import main
from primus_images.cli.verb import parser_of
from primus_images.compat import workloads
from primus_images.compat.commands import requested
from primus_images.errors import InputError, PrimusError
from primus_images.gpus.detect import DetectedGpus
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from primus_images.system import fabric
from primus_images.training.run import ranks
from primus_images.training.run.job import Job

ROOT = Path(__file__).resolve().parents[3]
WORKSPACE = ROOT / "images" / "workspace"
LLAMA = "examples/megatron/configs/llama3.1_8B-pretrain.yaml"
ALL = LINES["kinds"] | {
    f"{row['document']}:{row['line']} {row['says']}": row for row in LINES["promises"]
}
Shell = pytest.MonkeyPatch
Captured = pytest.CaptureFixture[str]


def run(capsys: Captured, *words: str) -> tuple[int, str]:
    """Run primus. Returns its exit code, and what it says."""
    capsys.readouterr()
    code = main(list(words))
    out, err = capsys.readouterr()
    return code, out + err


def exported(command: str) -> tuple[str, str]:
    """The variable that a line of a shell exports, and its value."""
    words = shlex.split(command, comments=True)
    assert words[0] == "export"
    name, _, value = " ".join(words[1:]).partition("=")
    return name, value


def trained(words: list[str], gpu: str = "mi300x", exp: str = LLAMA) -> Recipe:
    request = requested("run_pretrain.sh", words, {"EXP": exp})
    choices = Choices(**{**vars(request.choices), "gpu": gpu})
    return resolve(request.recipe, request.words, choices)


# -- command lines: a check gets the entry of old_commands.yaml, and its own arguments -------------


def host_verb(_: Any, words: list[str]) -> None:
    parser_of(words[0]).parse_args(words[1:])


def folder(entry: Any) -> None:
    at = shlex.split(entry["command"])[1].removeprefix("/workspace").strip("/")
    done = subprocess.run(["sh", "-c", f"cd {WORKSPACE}/{at}"], check=False)
    assert done.returncode == 0


def already_cloned(entry: Any) -> None:
    name = "MAD" if "MAD" in entry["command"] else "Primus"
    assert any((WORKSPACE / name).rglob("*.sh"))
    assert all("git" in base.packages for base in project().versions.bases.values())


def project() -> Any:
    from primus_images.plan.project import Project

    return Project.find(ROOT)


def nothing_to_install(_: Any) -> None:
    for file in WORKSPACE.rglob("requirements.txt"):
        words = ["-m", "pip", "install", "--no-index", "--disable-pip-version-check", "-r"]
        done = subprocess.run(
            [sys.executable, *words, str(file)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "Successfully installed" not in done.stdout


def shim(entry: Any, words: list[str] | None = None) -> None:
    script, *rest = shlex.split(entry["command"].replace("\\\n", " "))
    if script == "bash":
        script, *rest = rest
    name = script.rpartition("/")[2]
    assert list(WORKSPACE.rglob(name))
    with pytest.raises(PrimusError) as caught:
        requested(name, rest, {})
    assert caught.value.exit_code == 3
    assert caught.value.hint
    if words:
        parser_of(words[0]).parse_args(words[1:])


def docker_image(entry: Any, monkeypatch: Shell, capsys: Captured) -> None:
    name, _ = exported(entry["command"])
    monkeypatch.setenv(name, "r.example/ours:v26.11-mi300x")
    monkeypatch.setenv("EXP", LLAMA)
    monkeypatch.delenv("SLURM_NODEID", raising=False)
    code, says = run(capsys, "compat", "run_slurm_pretrain.sh", "--gpu", "mi300x")
    assert code == 3
    assert "--image r.example/ours:v26.11-mi300x" in says


def read_by_wrappers(entry: Any) -> None:
    name, value = exported(entry["command"])
    if name.startswith("PRIMUS") and not value.isdigit():
        value = "0"  # ${NAME:-0} in a shell that has no NAME
    without = {"EXP": LLAMA, "NNODES": "1", "PRIMUS_HIPBLASLT_TUNING_STAGE": "0"}
    before = requested("run_pretrain.sh", [], without)
    after = requested("run_pretrain.sh", [], without | {name: value})
    assert (before != after) == (without.get(name) != value)


def of_ranks(entry: Any, tmp_path: Path) -> None:
    name, value = exported(entry["command"])
    words = ("assets.tokenizer=hf:meta-llama/Llama-3.1-8B", "assets.corpus=hf:Salesforce/wikitext")
    recipe = resolve("llama3.1-8b", words, Choices(gpu="mi300x", backend="fsdp", mode="pretrain"))
    job = Job(name="x", recipe=recipe, output=tmp_path)
    assert ranks.environment(job, {name: value})[name] == value


def usage(_: Any, capsys: Captured) -> None:
    code, says = run(capsys, "compat", "run_k8s_pretrain.sh")
    assert code == 2
    assert "--url" in says


def preflight(_: Any, part: str, monkeypatch: Shell, capsys: Captured) -> None:
    code, says = run(capsys, "preflight")
    assert code in (0, 1)
    assert part.lower() in says.lower()


def host_setting(entry: Any) -> None:
    rows = (ROOT / "src/primus_images/system/settings.yaml").read_text(encoding="utf-8")
    assert f"remedy: {entry['command']}\n" in rows


def downloads(_: Any, *names: str, capsys: Captured) -> None:
    for words in (["download_assets"], ["pytorch_benchmark_setup.sh", "--download"]):
        code, says = run(capsys, "compat", *words)
        assert code == 3
        assert all(name in says for name in names)


def pinned(_: Any, name: str) -> None:
    for target in project().target_names():
        from primus_images.plan.resolve import resolve as resolve_target

        assert name in resolve_target(project(), target).pins


def read_numa(entry: Any) -> None:
    words = shlex.split(entry["command"])
    if not Path(words[1]).exists():
        pytest.skip("this kernel has no NUMA balancing")
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.strip().isdigit()


def set_up(entry: Any, capsys: Captured) -> None:
    code, says = run(capsys, "compat", *shlex.split(entry["command"]))
    assert (code, says) == (
        0,
        "nothing to install: the image has the libraries of all its recipes\n",
    )


def tuning(entry: Any, monkeypatch: Shell, capsys: Captured) -> None:
    for name, value in entry["given"].items():
        monkeypatch.setenv(name, value)
    code, says = run(capsys, "compat", "run_slurm_pretrain.sh", "--dry-run", "--gpu", "mi300x")
    assert code == 0
    assert f"primus tune gemm --stage={entry['tuned']} llama2-7b" in says


def asks(entry: Any, capsys: Captured) -> None:
    words = shlex.split(entry["command"].replace("\\\n", " "))[1:]
    code, says = run(capsys, "compat", *words, "--dry-run")
    method, _, path = entry["asks"].partition(" ")
    assert code == 0
    assert says.startswith(f"{method} http://api.example.com{path}\n")


# -- promises --------------------------------------------------------------------------------------


def exp(_: Any, environment: dict[str, str], recipe: str, backend: str) -> None:
    request = requested("run_pretrain.sh", [], environment)
    choices = Choices(**{**vars(request.choices), "gpu": "mi300x"})
    found = resolve(request.recipe, request.words, choices)
    assert (found.name, found.backend) == (recipe, backend)


def service(_: Any, words: list[str], path: list[str], value: Any) -> None:
    usual = ["--url", "http://x", "create", "--exp", "llama2-7b", "--image", "r.example/ours"]
    body: Any = workloads.query([*usual, *words], {}).body
    for key in path:
        body = body[key]
    assert body == value
    for missing in ("--exp", "--image"):
        at = usual.index(missing)
        with pytest.raises(InputError, match=f"{missing} is missing"):
            workloads.query([*usual[:at], *usual[at + 2 :]], {})


def tuning_without_gpu(
    _: Any, stage: str, says: str, monkeypatch: Shell, capsys: Captured, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EXP", "examples/megatron/configs/llama2_7B-pretrain.yaml")
    monkeypatch.setenv("PRIMUS_HIPBLASLT_TUNING_STAGE", stage)
    code, said = run(capsys, "compat", "run_pretrain.sh", "--gpu", "cpu", "--proxy")
    assert code == 2
    assert says in said


def key(_: Any, words: list[str], name: str, value: Any, tmp_path: Path) -> None:
    prefix = tmp_path / "mine_text_document"
    for suffix in (".bin", ".idx"):
        prefix.with_suffix(suffix).touch()
    given = [str(prefix) if word == "PREFIX" else word for word in words]
    recipe = trained(given)
    assert recipe.settings[name].value == (str(prefix) if value == "PREFIX" else value)


def dataset(_: Any, tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text('{"text": "a"}\n')
    for name in ("text.jsonl", "mine_text_document"):
        for suffix in (".bin", ".idx"):
            (tmp_path / f"mine_text_document{suffix}").touch()
        recipe = trained(["--mock_data", "false", "--train_data_path", str(tmp_path / name)])
        corpus = recipe.asset("corpus")
        assert corpus is not None and corpus.is_file()
    with pytest.raises(InputError, match="is not a file or a folder"):
        trained(["--mock_data", "false", "--train_data_path", "/path/to/your/dataset"])


def left_out(_: Any, words: list[str], name: str) -> None:
    says = requested("run_pretrain.sh", words, {"EXP": LLAMA}).says
    assert any(sentence.startswith(f"{name} is left out: ") for sentence in says)


def needs_nodes(_: Any, monkeypatch: Shell, capsys: Captured) -> None:
    monkeypatch.setenv("EXP", "examples/megatron/configs/llama3.1_70B-pretrain.yaml")
    words = ("compat", "run_pretrain.sh", "--fp8", "hybrid", "--dry-run", "--gpu", "mi300x")
    for nodes, layers in (("1", 40), ("2", 80)):
        monkeypatch.setenv("NNODES", nodes)
        monkeypatch.setenv("NODE_RANK", "0")
        monkeypatch.setenv("MASTER_ADDR", "node0")
        monkeypatch.setenv("RDZV_ID", "7")
        code, says = run(capsys, *words)
        assert code == 0, says
        assert ("layers 40, not 80" in says) == (layers == 40)


def detected_interface(_: Any, monkeypatch: Shell, tmp_path: Path) -> None:
    monkeypatch.setattr(fabric, "interface_towards", lambda _: "eth7")
    recipe = resolve("llama3.1-8b", (), Choices(gpu="mi300x", backend="megatron", nodes=2))
    job = Job(name="x", recipe=recipe, output=tmp_path)
    node = {"NODE_RANK": "0", "MASTER_ADDR": "node0", "RDZV_ID": "7"}
    found = ranks.environment(job, node)
    assert (found["NCCL_SOCKET_IFNAME"], found["GLOO_SOCKET_IFNAME"]) == ("eth7", "eth7")
    own = ranks.environment(job, {**node, "NCCL_SOCKET_IFNAME": "mine"})
    assert own["NCCL_SOCKET_IFNAME"] == "mine"


def precision(_: Any, words: list[str], word: str) -> None:
    assert trained(words).precision == word
    assert trained([]).precision == "bf16"


def launcher(_: Any) -> None:
    request = requested("launcher.py", [], {})
    choices = Choices(**{**vars(request.choices), "gpu": "mi300x"})
    assert resolve(request.recipe, request.words, choices).local_batch == 10
    parser_of("tune").parse_args(["throughput", "flux.1-dev"])


def batch(_: Any, gpu: str, size: int) -> None:
    request = requested("run_llama_train.sh", [], {})
    choices = Choices(**{**vars(request.choices), "gpu": gpu})
    recipe = resolve(request.recipe, request.words, choices)
    assert (recipe.local_batch, recipe.seq_len) == (size, 8192)


def libraries(_: Any, names: list[str], others: list[str]) -> None:
    from primus_images.plan.resolve import resolve as resolve_target

    lock = resolve_target(project(), "cpu").lock
    assert lock is not None
    wheels = {file.name for file in lock.of("wheel")}
    assert wheels.issuperset(names)
    assert wheels.isdisjoint(others)


def report(_: Any, mode: str, model: str, datatype: str, backend: str) -> None:
    words = ["-t", mode, "-m", model, "-p", datatype]
    request = requested("pytorch_benchmark_report.sh", words, {})
    choices = Choices(**{**vars(request.choices), "gpu": "mi300x"})
    found = resolve(request.recipe, request.words, choices)
    assert (found.backend, found.precision) == (backend, datatype.lower())


CHECKS: dict[str, Callable[..., None]] = {
    name: value for name, value in list(globals().items()) if callable(value)
}
ROWS = [(kind_of(entry), entry) for entry in COMMANDS if kind_of(entry) in LINES["kinds"]]
ROWS += [(name, row) for name, row in ALL.items() if "says" in row]


@pytest.mark.parametrize(
    ("name", "entry"), ROWS, ids=[f"{e['document'].partition('.')[0]}:{e['line']}" for _, e in ROWS]
)
def test_a_line_does_here_what_the_page_says(
    name: str, entry: dict[str, Any], request: pytest.FixtureRequest, monkeypatch: Shell
) -> None:
    monkeypatch.setattr("primus_images.gpus.detect.detect", lambda *_: DetectedGpus())
    monkeypatch.setattr("primus_images.cli.image.compat.detect", lambda *_: DetectedGpus())
    row = ALL[name]
    check = CHECKS[row["check"]]
    fixtures = {"monkeypatch", "capsys", "tmp_path"} & inspect.signature(check).parameters.keys()
    check(entry, *row.get("takes", ()), **{it: request.getfixturevalue(it) for it in fixtures})


@pytest.mark.parametrize(
    "outcome", list(outcomes(cells())), ids=lambda o: f"{o.cell.recipe}-{o.gpu}-{o.cell.source}"
)
def test_a_published_batch_is_the_recipes(outcome: Any) -> None:
    assert not outcome.differing or outcome.cell.note


def test_no_line_is_without_an_answer_and_few_have_a_part_of_one() -> None:
    given = [ALL[name] for name, _ in ROWS]
    assert {row["here"] for row in given} <= {"as printed", "translated", "in part"}
    in_part = Counter(row["of"] for row in given if row["here"] == "in part")
    assert set(in_part) <= {"a server", "a GPU", "the host"}
    assert sum(in_part.values()) <= 12
    trains = [entry for entry in COMMANDS if "resolves" in entry]
    assert len(trains) + len(ROWS) == len(COMMANDS) + len(LINES["promises"])
    assert (len(COMMANDS), len(LINES["promises"]) >= 45, len(cells()) >= 64) == (164, True, True)


def test_the_page_is_made_from_these() -> None:
    page = (ROOT / "docs" / "old-lines.md").read_text(encoding="utf-8")
    assert page == text()


def test_a_checkout_has_primus_cli_where_amds_has_it() -> None:
    for place in ("Primus/primus-cli", "Primus/runner/primus-cli"):
        script = WORKSPACE / place
        assert os.access(script, os.X_OK)
        assert script.resolve() == (WORKSPACE / "bin/primus-cli").resolve()
    assert yaml.safe_load((ROOT / "tests/fixtures/old_lines.yaml").read_text()) == LINES
