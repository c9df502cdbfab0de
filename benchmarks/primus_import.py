"""Compare `primus import-exp` with Primus itself, and generate the data of Primus's presets.

    python -m benchmarks.primus_import measure v25.10=CHECKOUT ... --out benchmarks/results/primus-import.json
    python -m benchmarks.primus_import presets v25.7=CHECKOUT v25.9=CHECKOUT v25.10=CHECKOUT

Each CHECKOUT is a folder with the sources of one version of Primus. Its own code merges its presets, models and example
experiments in a process and a virtual environment without this package; ``measure`` compares what
``primus import-exp`` makes of the same files, ``presets`` writes ``src/primus/compat/presets``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from benchmarks.same_arguments import compared
from primus.compat.experiment import experiment, recipe_text
from primus.compat.merge import Merged, merge
from primus.errors import InputError
from primus.recipes.resolve import resolve
from primus.recipes.setting import Choices
from primus.yamlfile import flat

ROOT = Path(__file__).parents[1]
OUT = ROOT / "benchmarks" / "results" / "primus-import.json"
_DATA = ROOT / "src" / "primus" / "compat" / "presets"
_FRAMEWORKS = ("megatron", "torchtitan")
# The base of every model of a framework. The data contain only what a model changes.
_BASE = {"megatron": "language_model", "torchtitan": ""}
# Presets that experiments for pre-training use.
_MODULES = ("pre_trainer", "trainer_base")
# The program that runs in the checkout's environment. It uses only Primus's code, except for this loop.
_REFERENCE = """
import json, os, sys, types
from pathlib import Path
checkout, scratch = Path(sys.argv[1]), sys.argv[2]
sys.path.insert(0, str(checkout))
os.chdir(scratch)
from primus.core.launcher.parser import PrimusParser
from primus.core.utils import yaml_utils
found = {"presets": {}, "experiments": {}}
for kind in ("modules", "models"):
    for framework in ("megatron", "torchtitan"):
        for path in sorted((checkout / "primus/configs" / kind / framework).rglob("*.yaml")):
            name = path.relative_to(checkout / "primus/configs").as_posix()
            found["presets"][name] = yaml_utils.parse_yaml(str(path))
for framework in ("megatron", "torchtitan"):
    for path in sorted((checkout / "examples" / framework).rglob("*.yaml")):
        name = path.relative_to(checkout).as_posix()
        try:
            merged = PrimusParser().parse(types.SimpleNamespace(config=str(path), exp=str(path)))
            module = merged.get_module_config("pre_trainer")
            found["experiments"][name] = {"merged": yaml_utils.nested_namespace_to_dict(module)}
        except Exception as error:
            found["experiments"][name] = {"refused": f"{type(error).__name__}: {error}"[:160]}
json.dump(found, open(sys.argv[3], "w"))
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or write the data of the presets. Returns 1 if too few files are equal, or if one differs without a
    message.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.primus_import", description=__doc__)
    parser.add_argument("what", choices=("measure", "presets"))
    parser.add_argument("checkouts", nargs="+", metavar="VERSION=CHECKOUT", help="oldest version first")
    parser.add_argument(
        "--commit", action="append", default=[], metavar="VERSION=COMMIT", help="the commit of a checkout without git"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="JSON file of `measure`")
    parser.add_argument("--at-least", type=float, default=0.95, metavar="SHARE", help="of equal files (default: 0.95)")
    args = parser.parse_args(argv)
    checkouts = {name: Path(path).resolve() for name, _, path in (word.partition("=") for word in args.checkouts)}
    commits = dict(word.split("=", 1) for word in args.commit)
    commits = {name: commits.get(name) or _commit(path) for name, path in checkouts.items()}
    with tempfile.TemporaryDirectory() as scratch:
        python = _environment(Path(scratch))
        references = {name: _reference(python, path, Path(scratch)) for name, path in checkouts.items()}
    if args.what == "presets":
        for framework in _FRAMEWORKS:
            (_DATA / f"{framework}.yaml").write_text(_data(framework, references, commits), encoding="utf-8")
        return 0
    rows = [_measured(name, checkouts[name], references[name]) | {"commit": commits[name]} for name in checkouts]
    names = " ".join(f"{name}=CHECKOUT" for name in checkouts)
    document = {
        "name": "primus-import",
        "date": date.today().isoformat(),
        "command": f"python -m benchmarks.primus_import measure {names}",
        "python": sys.version.split()[0],
        "versions": rows,
    }
    args.out.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for row in rows:
        print(
            f"{row['version']}: {row['files']} files: "
            + ", ".join(f"{n} {what}" for what, n in row["outcomes"].items())
        )
    silent = sum(row["trained_otherwise_in_silence"] for row in rows)
    return 0 if min(row["share"] for row in rows) >= args.at_least and not silent else 1


def _commit(checkout: Path) -> str:
    done = subprocess.run(["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _environment(scratch: Path) -> Path:
    """Create a virtual environment with PyYAML and Primus's reader only. Returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", scratch / "venv"], check=True)
    python = scratch / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", f"pyyaml=={yaml.__version__}"], check=True)
    return python


def _reference(python: Path, checkout: Path, scratch: Path) -> dict[str, Any]:
    made = scratch / "reference.json"
    command = [str(word) for word in (python, "-I", "-c", _REFERENCE, checkout, scratch, made)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={})
    found: dict[str, Any] = json.loads(made.read_text(encoding="utf-8"))
    return found


def _measured(version: str, checkout: Path, reference: Mapping[str, Any]) -> dict[str, Any]:
    """Measure one version: each example alone, outside the checkout, with the presets of this package."""
    counts: Counter[str] = Counter()
    differ: dict[str, Any] = {}
    keys: Counter[str] = Counter()
    for name, theirs in reference["experiments"].items():
        found = _one(version, checkout / name, theirs)
        counts[found["outcome"]] += 1
        keys += Counter(found.pop("keys", {}))
        if found["outcome"] != "trained alike":
            differ[name] = found
    files = sum(counts.values())
    unlike = counts["not merged"] + counts["merged otherwise"] + counts["refused by Primus alone"]
    return {
        "version": version,
        "files": files,
        "merged_as_primus": files - unlike,
        "share": round(1 - unlike / files, 4),
        "trained_otherwise_in_silence": counts["differs in silence"],
        "outcomes": dict(sorted(counts.items())),
        "keys": dict(sorted(keys.items())),
        "differ": differ,
    }


def _one(version: str, path: Path, theirs: Mapping[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        alone = Path(folder) / path.name
        alone.write_bytes(path.read_bytes())
        try:
            merged = merge(alone, {}, version=version)
        except InputError as error:
            return {"outcome": "refused by both" if "refused" in theirs else "not merged", "why": _said(error, folder)}
        if "refused" in theirs:
            # Primus refuses unknown keys; here they are listed.
            return {
                "outcome": "refused by both" if merged.absent else "refused by Primus alone",
                "absent": merged.absent,
            }
        wrong = _unequal(dict(flat(theirs["merged"])), {key: one.value for key, one in merged.keys.items()})
        if wrong:
            return {"outcome": "merged otherwise", "keys": {}, "differences": wrong}
        try:
            return _imported(Path(folder), merged)
        except InputError as error:
            return {"outcome": "merged alike, refused as a whole", "why": _said(error, folder)}


def _imported(folder: Path, merged: Merged) -> dict[str, Any]:
    """Write the recipe as `primus import-exp --allow-unmapped` does, resolve it, and compare."""
    source = experiment(merged)
    done = source.translated()
    written = folder / "imported.yaml"
    written.write_text(recipe_text(source, done, source.least_nodes), encoding="utf-8")
    recipe = resolve(str(written), (), Choices(gpu="mi300x", nodes=source.least_nodes))
    both, wrong = compared(source.effective, recipe)
    told = " ".join([*done.left_out, *(one.given.key for one in done.unmapped)])
    named = {key: pair for key, pair in wrong.items() if key in told}
    silent = {key: pair for key, pair in wrong.items() if key not in told}
    outcome = "trained alike" if not wrong else "trained alike, differences named"
    if done.unmapped:
        outcome = "merged alike, keys refused by name"
    if silent:
        outcome = "differs in silence"
    return {
        "outcome": outcome,
        "keys": {"merged": len(source.effective), "compared": both, "named": len(named), "silent": len(silent)},
        "unmapped": [str(one.given.key) for one in done.unmapped],
        "named": named,
        "silent": silent,
    }


def _unequal(theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    # Keys that Primus's parser adds itself.
    theirs = {key: value for key, value in theirs.items() if key not in ("name", "framework")}
    return {
        key: [theirs.get(key, "absent"), ours.get(key, "absent")]
        for key in sorted(theirs.keys() | ours.keys())
        if key not in theirs or key not in ours or _kind(theirs[key]) != _kind(ours[key])
    }


def _kind(value: Any) -> Any:
    """Return the value with its type, except that 1 and 1.0 are equal."""
    return [_kind(one) for one in value] if isinstance(value, list) else (isinstance(value, bool), value)


def _said(error: InputError, folder: str) -> str:
    return str(error).replace(f"{folder}/", "").splitlines()[0]


def _data(framework: str, references: Mapping[str, Mapping[str, Any]], commits: Mapping[str, str]) -> str:
    """Return the text of a framework's data: the oldest version complete, the others as differences."""
    lines = [
        "# Defaults of Primus's presets: key and value, by version. Written by `python -m benchmarks.primus_import "
        "presets`; do not edit.",
        "#",
        "# modules  what every key holds that a preset of primus/configs/modules sets; later versions: what changed",
        "# base     the same of the model that every model starts from",
        "# models   what a model changes of the base",
    ]
    before: dict[str, dict[str, Any]] = {"modules": {}, "base": {}, "models": {}}
    for version, reference in references.items():
        now = _layers(framework, reference["presets"])
        lines += [f"- version: {version}", f"  commit: {commits[version]}", "  modules:"]
        for name, keys in now["modules"].items():
            lines.append(f"    {name}:")
            lines += _change(before["modules"].get(name, {}), keys, 6)
        lines += ["  base:", *_change(before["base"], now["base"], 4), "  models:"]
        lines[-1] += "" if any(before["models"].get(n) != k for n, k in now["models"].items()) else " {}"
        for name, keys in now["models"].items():
            if before["models"].get(name) != keys:
                lines += _flow(name, keys, 4)
        gone = [name for name in before["models"] if name not in now["models"]]
        lines += _flow("gone", gone, 2) if gone else []
        before = now
    return "\n".join(lines) + "\n"


def _layers(framework: str, presets: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    def layers(kind: str) -> dict[str, dict[str, Any]]:
        head = f"{kind}/{framework}/"
        return {
            name.removeprefix(head).removesuffix(".yaml"): dict(flat(tree))
            for name, tree in presets.items()
            if name.startswith(head)
        }

    modules, models = layers("modules"), layers("models")
    base = models.get(_BASE[framework], {})
    for name, keys in models.items():
        missing = base.keys() - keys.keys()
        if missing and name != "primus_megatron_model":
            raise InputError(f"{name} lacks {min(missing)}, which {_BASE[framework]} has")
    return {
        "modules": {name: modules[name] for name in _MODULES if name in modules},
        "base": base,
        "models": {
            name: {key: value for key, value in keys.items() if key not in base or base[key] != value}
            for name, keys in models.items()
            if name != "primus_megatron_model"
        },
    }


def _change(before: Mapping[str, Any], now: Mapping[str, Any], indent: int) -> list[str]:
    gone = [key for key in before if key not in now]
    changed = {key: value for key, value in now.items() if key not in before or before[key] != value}
    return [*_flow("set", changed, indent), *(_flow("gone", gone, indent) if gone else [])]


def _flow(key: str, value: Any, indent: int) -> list[str]:
    """Return ``key`` and ``value`` as lines of YAML's flow style."""
    text = f"{key}: " + yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=112 - indent)
    lines = text.strip().splitlines()
    return [" " * (indent + 2 * (number > 0)) + line.strip() for number, line in enumerate(lines)]


if __name__ == "__main__":
    sys.exit(main())
