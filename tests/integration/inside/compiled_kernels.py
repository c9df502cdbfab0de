"""Our own Triton kernels compile for the architectures that are named. Triton's compiler needs no
GPU.
"""

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from primus_images.turbo import experts, fp8_kernels, kernels

KERNELS = {
    name: value
    for module in (experts, fp8_kernels, kernels)
    for name, value in vars(module).items()
    if isinstance(value, triton.JITFunction) and value.__module__ == module.__name__
}
# Called by kernels, and compiled with them.
PARTS = {"_larger", "_cut", "_bytes", "_store_both", "_swiglu_gradients", "_tile"}


def calls(arch: str, gradients: bool) -> dict[str, tuple[dict[str, str], dict[str, Any]]]:
    """Kernel → the types of its arguments, and its constants, as a run on ``arch`` calls it, with
    or without ``gradients``.
    """
    fp8, gradient = ("fp8e4b8", "fp8e5b16") if arch == "gfx942" else ("fp8e4nv", "fp8e5")
    swiglu = {"gate": "*bf16", "up": "*bf16"}
    flat = {"BLOCK": 4096, "BLOCKS": 4}
    tile = {"ROWS": 64, "COLUMNS": 64}
    sizes = {"rows": "i32", "columns": "i32"}
    alone = {"ALONE": arch == "sm_90"}
    made = triton.language.float8e4b8 if arch == "gfx942" else triton.language.float8e4nv
    return {
        "_cross_entropy": (
            {
                "logits": "*bf16",
                "labels": "*i64",
                "losses": "*fp32",
                "stride": "i32",
                "columns": "i32",
            },
            {"IGNORED": -100, "BLOCK": 8192},
        ),
        "_cast_fp8": (
            {"x": "*fp32", "scale": "*fp32", "out": f"*{fp8}", "count": "i32"},
            {"LARGEST": 448.0, "BLOCK": 4096},
        ),
        "_copy_in": (
            {"grad": "*bf16", "out": "*fp32", "share": "i32", "width": "i32", "at": "i32"},
            {"BLOCK": 4096},
        ),
        "_sum_of_ranks": (
            {"shares": "*bf16", "out": "*fp32", "count": "i32"},
            {"RANKS": 8, "BLOCK": 4096},
        ),
        "_cast_both": (
            {
                "x": "*bf16",
                "scale": "*fp32",
                "rows_out": f"*{gradient}",
                "columns_out": "*u8",
                **sizes,
            },
            {"LARGEST": 57344.0, **alone, **tile},
        ),
        "_spread": (
            {
                "x": "*bf16",
                "choices": "*i32",
                "weights": "*fp32",
                "experts": "*bf16",
                "out": "*bf16",
                "gradient": "*fp32",
                "width": "i32",
            },
            {"PER_TOKEN": 6, "WEIGHTED": True, "BLOCK": 2048},
        ),
        "_add_up": (
            {
                "experts": "*bf16",
                "rows": "*i32",
                "weights": "*fp32",
                "base": "*bf16",
                "out": "*bf16",
                "width": "i32",
            },
            {"PER_TOKEN": 6, "WEIGHTED": True, "BASED": True, "BLOCK": 2048},
        ),
        "_flip": ({"x": "*u8", "out": "*u8", **sizes}, tile),
        "_largest": (
            {**swiglu, "grad": "*bf16", "largest": "*fp32", "count": "i32"},
            flat | {"GRADIENTS": gradients},
        ),
        "_swiglu_cast": (
            {**swiglu, "scale": "*fp32", "out": f"*{fp8}", "count": "i32"},
            {"LARGEST": 240.0, "BLOCK": 4096},
        ),
        "_swiglu_backward": (
            {
                **swiglu,
                "grad": "*bf16",
                "gate_scale": "*fp32",
                "up_scale": "*fp32",
                "made_scale": "*fp32",
                "gate_rows": f"*{gradient}",
                "gate_columns": "*u8",
                "up_rows": f"*{gradient}",
                "up_columns": "*u8",
                "made_columns": "*u8",
                **sizes,
            },
            {"LARGEST": 57344.0, "LARGEST_MADE": 240.0, "MADE": made, **alone, **tile},
        ),
    }


def code(name: str, arch: str, gradients: bool) -> bytes:
    """The machine code of a kernel."""
    signature, constants = calls(arch, gradients)[name]
    source = ASTSource(
        KERNELS[name], signature | dict.fromkeys(constants, "constexpr"), constexprs=constants
    )
    target = GPUTarget("hip", arch, 64) if arch.startswith("gfx") else GPUTarget("cuda", 90, 32)
    compiled = triton.compile(
        source, target=target, options={"num_warps": 16 if name == "_cross_entropy" else 8}
    )
    return compiled.asm.get("hsaco") or compiled.asm["cubin"]


names = sorted(KERNELS.keys() - PARTS)
assert len(names) >= 10, names
for arch in sys.argv[1:]:
    for name in names:
        for gradients in (False, True) if name == "_largest" else (True,):
            assert code(name, arch, gradients), (arch, name)
