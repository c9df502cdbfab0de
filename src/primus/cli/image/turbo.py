"""Manage optimizations for training runs and kernels compiled ahead of time.

`list` shows the values for `primus train --turbo`, whether this machine supports them, and the kernels.
`compile` compiles the kernels of the catalogue.
`check` runs each kernel forward and backward on this machine's GPU, compares it with plain PyTorch and counts
compilations. Without a GPU, or with --pretend, it requests all kernels as if a GPU were present, and runs none. It also
verifies the C compiler that Triton needs to launch kernels.
`interpret` runs small kernels on the CPU with Triton's interpreter and compares them with plain PyTorch. Exit code 1: a
kernel was compiled, failed, or gave a wrong result; 3: torch, Triton or a library is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from primus.aot.catalogue import Kernel, load_catalogue
from primus.aot.gpu import Gpu
from primus.cli.arguments import folder
from primus.cli.image.common import offered
from primus.errors import HostError, InputError
from primus.gpus.detect import detect
from primus.gpus.table import generation, load_table
from primus.system import compiler
from primus.system.mounts import IMAGE_FILE
from primus.terminal import Screen, counted
from primus.turbo.optimizations import Optimization, optimizations, state

EXAMPLE = "primus turbo check --gpu mi300x --pretend"

_BAKED = "/opt/primus/triton"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("what", choices=("list", "compile", "check", "interpret"), help="what to do")
    gpu = parser.add_argument("--gpu", metavar="NAME", help="target whose GPU to use (default: the image's)")
    gpu.completer = lambda **_: offered("gpu")  # type: ignore[attr-defined]
    kernel = parser.add_argument(
        "--kernel", action="append", default=[], metavar="NAME", help="only this kernel of the catalogue; repeatable"
    )
    kernel.completer = lambda **_: [one.name for one in load_catalogue().kernels]  # type: ignore[attr-defined]
    parser.add_argument(
        "--out",
        type=folder("--out"),
        metavar="DIR",
        help=f"compile: output folder (default: ${{PRIMUS_TRITON_BAKED}} or {_BAKED})",
    )
    parser.add_argument("--pretend", action="store_true", help="check: request the kernels but run none")
    parser.add_argument("--all", action="store_true", help="check: run every call of the catalogue, also on a real GPU")
    parser.add_argument("--json", action="store_true", help="print one JSON document and no progress")


def run(options: argparse.Namespace) -> int:
    """Run the requested action. Returns 0 or 1. Raises InputError, CheckFailed and HostError."""
    if options.what == "list":
        return _list(options)
    verbs = {"compile": _compile, "check": _check, "interpret": _interpret}
    try:
        return verbs[options.what](options)
    except ModuleNotFoundError as error:
        raise HostError(f"{error.name} is not installed here", hint="run it in an image that contains it") from error


def _list(options: argparse.Namespace) -> int:
    kernels = _kernels(options, None)
    arch = _arch(options)
    offered = [] if options.kernel else [(one, state(one, arch)) for one in optimizations().values()]
    if options.json:
        document = {
            "kernels": [_described(k) for k in kernels],
            "optimizations": [_described(one) | {"state": how} for one, how in offered],
        }
        print(json.dumps(document, ensure_ascii=False))
        return 0
    screen = Screen.of()
    if offered:
        print(
            "\n".join(screen.wrap("Optimizations of a training run (primus train RECIPE --turbo auto|off|NAME,…)"))
            + "\n"
        )
    for one, how in offered:
        lines = screen.wrap(f"{one.name}  ({one.provider}; {how})", hanging="    ")
        for text in (one.title, one.gain, f"needs: {_needs(one)}", f"tested by: {one.test}"):
            lines += screen.wrap(text, "    ")
        print("\n".join(lines))
    if offered:
        print("\nKernels that are compiled ahead of time\n")
    for kernel in kernels:
        lines = screen.wrap(f"{kernel.name}  ({kernel.component}: {kernel.entry})", hanging="    ")
        for text in (kernel.title, f"needs: {kernel.needs}", f"excludes: {kernel.excludes}"):
            lines += screen.wrap(text, "    ")
        print("\n".join(lines))
    return 0


def _described(entry: Kernel | Optimization) -> dict[str, Any]:
    return asdict(entry)


def _needs(one: Optimization) -> str:
    """The requirements of an optimization as one line."""
    parts = [f"backend {', '.join(one.backends)}", f"precision {', '.join(one.precisions)}"]
    parts += [f"family {', '.join(one.families)}"] * bool(one.families)
    parts += [f"GPU {', '.join(one.archs or one.vendors)}"] * bool(one.archs or one.vendors)
    parts += [f"packages {', '.join(one.packages)}"] * bool(one.packages)
    parts += [
        f"{key}={str(wanted).lower() if isinstance(wanted, bool) else wanted}" for key, wanted in one.settings.items()
    ]
    parts += [f"{kind.upper()} {degree}" for kind, degree in one.degrees.items()]
    parts += ["weights sharded over ranks"] * one.sharded
    return "; ".join(parts)


def _arch(options: argparse.Namespace) -> str | None:
    """Return the architecture of --gpu, or of this machine's GPU; None if there is neither."""
    name = options.gpu or detect().generation
    return generation(name).arch if name else None


def _compile(options: argparse.Namespace) -> int:
    from primus.aot.bake import bake

    gpu = _gpu(options)
    out = options.out or _folder()
    cases = list(load_catalogue().cases(_kernels(options, gpu.vendor)))
    requested = bake(cases, gpu, out, str(out.absolute()), progress=_progress(options))
    document = {"arch": gpu.arch, "kernels": len(requested), "calls": len(cases), "folder": str(out)}
    if options.json:
        print(json.dumps(document))
    else:
        print(
            f"{counted(len(requested), 'kernel')} for {gpu.arch}, requested by {counted(len(cases), 'call')}, in {out}"
        )
    return 0


def _check(options: argparse.Namespace) -> int:
    from primus.aot.pages import load

    load("triton", "torch")
    import torch

    from primus.aot.check import baked_index, check

    gpu, real = _gpu(options), torch.cuda.is_available() and not options.pretend
    index = baked_index(_folder(), gpu.arch)
    baked = {one["kernel"] for one in index["kernels"]}
    cases = list(
        load_catalogue().cases([k for k in _kernels(options, gpu.vendor) if options.kernel or k.name in baked])
    )
    if real and not options.all:
        recorded = {one["case"] for one in index["kernels"]}
        cases = [case for case in cases if case.label in recorded]
    verdict = check(cases, gpu, real=real, progress=_progress(options))
    # A PyTorch build for CPUs launches no kernel.
    if (torch.version.cuda or torch.version.hip) and (why := compiler.fault(os.environ)):
        verdict = verdict.with_failure(f"Triton cannot launch kernels: {why}")
    if options.json:
        print(json.dumps(verdict.as_json(), ensure_ascii=False))
    else:
        how = f"ran on {gpu.arch}" if real else f"were requested as if {gpu.arch} were present"
        print(f"{len(verdict.answer.requested)} kernels of {verdict.calls} calls {how}; ", end="")
        print(f"{len(verdict.missing)} had to be compiled, {len(verdict.answer.failures)} failed")
        for line in (*(f"missing: {name}" for name in verdict.missing), *verdict.answer.failures):
            print(f"  ✗ {line}")
    return 0 if verdict.passed else 1


def _interpret(options: argparse.Namespace) -> int:
    from primus.aot.interpret import interpret

    rows = []
    for case, fault in interpret(_kernels(options, None)):
        rows.append({"case": case.label, "fault": fault})
        if not options.json:
            print(f"{'✗' if fault else '✓'} {case.label}{': ' + fault if fault else ''}", flush=True)
    passed = not any(one["fault"] for one in rows)
    if options.json:
        print(json.dumps({"cases": rows, "passed": passed}, ensure_ascii=False))
    return 0 if passed else 1


def _folder() -> Path:
    return Path(os.environ.get("PRIMUS_TRITON_BAKED", _BAKED))


def _kernels(options: argparse.Namespace, vendor: str | None) -> Sequence[Kernel]:
    known = {k.name: k for k in load_catalogue().kernels}
    for name in options.kernel:
        if name not in known:
            raise InputError(f"no kernel is called {name!r}", hint="primus turbo list shows them")
    return [
        k for k in known.values() if (not options.kernel or k.name in options.kernel) and vendor in (None, *k.vendors)
    ]


def _gpu(options: argparse.Namespace) -> Gpu:
    """Return the GPU of --gpu, or the one that the image is for. Raises InputError if there is neither."""
    name = options.gpu
    if name is None and IMAGE_FILE.is_file():
        name = json.loads(IMAGE_FILE.read_text(encoding="utf-8"))["target"]
    known = {g.name for g in load_table().generations}
    if name is None or (options.gpu is None and name not in known):
        raise InputError("no GPU is given", hint="--gpu NAME: " + ", ".join(sorted(known)))
    chosen = generation(name)
    return Gpu(arch=chosen.arch, units=chosen.compute_units)


def _progress(options: argparse.Namespace) -> Any:
    def say(line: str) -> None:
        if not options.json and line.startswith(" "):
            print(line, file=sys.stderr, flush=True)

    return say
