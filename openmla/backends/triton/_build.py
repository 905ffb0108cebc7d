"""How kernels are compiled ahead of time, and whether they are interpreted."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs

from openmla.backends import BACKENDS

# Most shared memory one program may take, by compute capability; AMD's targets by their number.
SHARED_MEMORY = {
    80: 163 << 10,
    86: 99 << 10,
    89: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
    120: 99 << 10,
    942: 64 << 10,
}
# Pointers into what a plan or its caller cuts to size: where they begin is no reason for another
# kernel.
PLANNED = (
    "query_start_loc", "key_start_loc", "row_start_loc", "seq_lens", "split_starts", "starts",
    "ends", "row_starts", "row_lens", "row_lens_1", "row_lens_2", "key_starts", "key_lens",
    "block_table", "table_1", "table_2", "slot_mapping", "state_slots", "positions",
)  # fmt: skip
TARGETS = tuple(SHARED_MEMORY)
COMPILED = ("triton", "gluon")  # backends whose kernels are built ahead of time
GFX942 = 942  # AMD's CDNA3, of the same family of numbers so that one table holds all


class Build(NamedTuple):
    """One kernel with everything that is fixed when it is compiled."""

    name: str
    kernel: Any
    signature: Mapping[str, str]  # argument: Triton type, "constexpr" for the constants
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int
    capability: int  # the target it is meant for
    fp_fusion: bool  # as its launch has it: Triton's default depends on the version
    maxnreg: int | None = None


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return bool(knobs.runtime.interpret)


def assembly() -> bool:
    """Whether kernels may hold lines of NVIDIA's assembly."""
    return not interpreted() and torch.version.hip is None


def target_name(capability: int) -> str:
    return "gfx942" if capability == GFX942 else f"sm_{capability}"


def capability_of(device: torch.device) -> int:
    """Compute capability as two digits, 90 for what the interpreter pretends to be."""
    if device.type != "cuda":
        return 90
    if torch.version.hip is not None:
        return GFX942
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def nearest_target(capability: int) -> int:
    """The newest known target that is not newer than a device."""
    return max((target for target in TARGETS if target <= capability), default=TARGETS[0])


TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """At least 1. Triton's own takes microseconds, several times in every launch."""
    return 1 << (max(n, 1) - 1).bit_length()


class Report(NamedTuple):
    """What a compiled kernel takes."""

    registers: int
    spills: int  # bytes stored
    shared: int
    in_turn: bool = False  # matrix products that could overlap wait for one another


def compile_build(build: Build) -> Report:
    """Compile for a target without a GPU; registers and spills are what its assembler says."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    amd = build.capability == GFX942
    target = GPUTarget("hip", "gfx942", 64) if amd else GPUTarget("cuda", build.capability, 32)
    attrs = {}
    index = {name: i for i, name in enumerate(build.kernel.arg_names)}
    for name, kind in build.signature.items():
        aligned = kind.startswith("*") or name.startswith(
            (
                "page",
                "row_",
                "q_",
                "W_",
                "rows_stride",
                "kv_",
                "score_",
                "bias_",
                "state_",
                "k_",
                "v_",
                "x_",
                "out_",
                "other_out_",
            )
        )
        plain = build.kernel.params[index[name]].do_not_specialize
        if kind != "constexpr" and kind != "fp32" and aligned and not plain:
            attrs[(index[name],)] = [["tt.divisibility", 16]]
    constants = {(index[name],): value for name, value in build.constants.items()}
    if amd and "ASM" in index:
        constants[(index["ASM"],)] = False
    kind = GluonASTSource if isinstance(build.kernel, GluonJITFunction) else ASTSource
    source = kind(build.kernel, dict(build.signature), constants, attrs)
    options: dict[str, Any] = {
        "num_warps": build.num_warps,
        "num_stages": build.num_stages,
        "enable_fp_fusion": build.fp_fusion,
    }
    if build.maxnreg is not None and not amd:
        options["maxnreg"] = build.maxnreg
    compiled = triton.compile(source, target=target, options=options)
    patterns = (r"\.vgpr_count: +(\d+)", r"\.vgpr_spill_count: +(\d+)")
    said = compiled.asm["amdgcn"] if amd else ""
    if not amd:
        patterns = (r"Used (\d+) registers", r"(\d+) bytes spill stores")
        said = _ptxas(compiled.asm["ptx"], build)
    registers, spills = (int(re.findall(pattern, said)[-1]) for pattern in patterns)
    in_turn = "wgmma.mma_async instructions are serialized" in said
    return Report(registers, 4 * spills if amd else spills, compiled.metadata.shared, in_turn)


def _ptxas(text: str, build: Build) -> str:
    """What the assembler says of a kernel's text, called as Triton calls it."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as ptx:
        ptx.write(text)
        ptx.flush()
        arch = build.capability
        suffix = "a" if arch in (90, 100, 120) else ""
        command = [
            get_ptxas(arch).path,
            "-v",
            *([] if build.fp_fusion else ["--fmad=false"]),
            f"--gpu-name=sm_{arch}{suffix}",
            ptx.name,
            "-o",
            "/dev/null",
        ]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def all_builds() -> Iterator[Build]:
    """What every kernel of this folder is compiled for, targets and rows."""
    for op, backends in BACKENDS.items():
        for backend in COMPILED:
            if backend in backends:
                yield from import_module(f"openmla.backends.{backend}.{op}").builds()
