"""Ahead-of-time compilation of kernels, and whether they run in the interpreter."""

from __future__ import annotations

import json
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
from openmla.hardware import capability

# Shared memory limit of one program, by compute capability; AMD targets by their gfx number.
SHARED_MEMORY = {
    80: 163 << 10,
    86: 99 << 10,
    89: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
    120: 99 << 10,
    121: 99 << 10,
    942: 64 << 10,
}
# Pointers into buffers that a plan or its caller slices: Triton must not recompile a kernel when a
# slice happens to start on, or off, 16 bytes.
DO_NOT_SPECIALIZE_ON_ALIGNMENT = (
    "query_start_loc", "key_start_loc", "row_start_loc", "seq_lens", "starts",
    "ends", "row_starts", "row_lens", "row_lens_1", "row_lens_2", "key_starts", "key_lens",
    "block_table", "table_1", "table_2", "slot_mapping", "state_slots", "positions", "rows",
    "clamped",
)  # fmt: skip
# Integer arguments that are multiples of 16 for every released model: strides over rows, heads and
# pages, and the width of a row. At launch Triton finds that out from the value and vectorises;
# ahead of time there is no value, so a kernel that names a stride so is compiled as if it were
# aligned.
MULTIPLES_OF_16 = frozenset(
    ("page", "page_1", "page_2", "row_stride", "row_1", "row_2", "W_1", "W_2", "rows_stride_1",
     "rows_stride_2", "q_token", "q_head", "k_head", "v_head", "x_token", "x_head", "out_token",
     "out_head", "other_out_token", "other_out_head", "out_stride", "kv_stride", "kv_c_stride",
     "k_pe_stride", "k_raw_stride", "score_stride", "bias_stride", "state_slot", "state_row",
     "values_stride", "w_head", "w_line")
)  # fmt: skip
TARGETS = tuple(SHARED_MEMORY)
COMPILED = ("triton", "gluon")  # backends with ahead-of-time builds
GFX942 = 942  # AMD's CDNA3, as a number so that one table holds all targets
ARCH_SPECIFIC = (90, 100, 120, 121)  # compiled as sm_90a and so on, as Triton does

# In a kernel's TTGIR: a linear layout and its bases of lanes; a reduction's axis and layout.
LANES = re.compile(r"^(#\w+) = #ttg\.linear<.*?\blane = (\[.*?\]), \w+ = ", re.M)
REDUCTIONS = re.compile(
    r'"tt\.reduce"\(.*?<\{axis = (\d+) : i32.*?\}\) : \(tensor<[^,]*, (.*?)>[,)]', re.S
)


class Build(NamedTuple):
    """One kernel and everything fixed at compile time."""

    name: str
    kernel: Any
    signature: Mapping[str, str]  # argument: Triton type, "constexpr" for the constants
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int
    capability: int  # the target
    fp_fusion: bool  # as at launch: Triton's default depends on the version
    maxnreg: int | None = None


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return bool(knobs.runtime.interpret)


def assembly() -> bool:
    """Whether kernels may use inline PTX."""
    return not interpreted() and torch.version.hip is None


def target_name(capability: int) -> str:
    return "gfx942" if capability == GFX942 else f"sm_{capability}"


def capability_of(device: torch.device) -> int:
    """Compute capability, e.g. 90; the interpreter passes for SM90."""
    if device.type != "cuda":
        return 90
    if torch.version.hip is not None:
        return GFX942
    found = capability(device)  # which torch.cuda.get_device_capability takes longer for
    assert found is not None
    return 10 * found[0] + found[1]


def nearest_target(capability: int) -> int:
    """The newest known target that is not newer than the device."""
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
    """At least 1. Triton's own costs microseconds, and launches call this several times."""
    return 1 << (max(n, 1) - 1).bit_length()


def signature_of(
    kernel: Any, constants: Mapping[str, Any], types: Mapping[str, str]
) -> dict[str, str]:
    """Triton types of a kernel's arguments; integers where nothing is said."""
    return {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }


class Report(NamedTuple):
    """Resources of a compiled kernel."""

    registers: int
    spills: int  # bytes stored
    shared: int
    serialized: bool = False  # ptxas had to serialise WGMMAs that could overlap
    scattered: int = 0  # reductions that Triton 3.6 gets wrong, see scattered_reductions()


def compile_build(build: Build) -> Report:
    """Compile without a GPU; registers and spills as the target's assembler reports them."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    amd = build.capability == GFX942
    target = GPUTarget("hip", "gfx942", 64) if amd else GPUTarget("cuda", build.capability, 32)
    attrs = {}
    index = {name: i for i, name in enumerate(build.kernel.arg_names)}
    for name, kind in build.signature.items():
        aligned = kind.startswith("*") or name in MULTIPLES_OF_16
        specialized = not build.kernel.params[index[name]].do_not_specialize
        if kind != "constexpr" and kind != "fp32" and aligned and specialized:
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
    if amd:
        log = compiled.asm["amdgcn"]
        patterns = (r"\.vgpr_count: +(\d+)", r"\.vgpr_spill_count: +(\d+)")
    else:
        log = _ptxas(compiled.asm["ptx"], build)
        patterns = (r"Used (\d+) registers", r"(\d+) bytes spill stores")
    registers, spills = (int(re.findall(pattern, log)[-1]) for pattern in patterns)
    if amd:
        spills *= 4  # counted in registers, of 4 bytes
    serialized = "wgmma.mma_async instructions are serialized" in log
    scattered = scattered_reductions(compiled.asm["ttgir"])
    return Report(registers, spills, compiled.metadata.shared, serialized, scattered)


def scattered_reductions(ttgir: str) -> int:
    """How many reductions run over lanes of a warp that are not neighbours: lanes of another axis
    lie between them. Triton 3.6 reduces as many neighbouring lanes instead, without an error. Only
    linear layouts, which reshapes make, can have them."""
    lanes = {name: json.loads(bases) for name, bases in LANES.findall(ttgir)}
    found = 0
    for number, layout in REDUCTIONS.findall(ttgir):
        axis = int(number)
        for dim in re.findall(r"dim = (\d+)", layout):  # that a slice leaves out, outermost first
            axis += axis >= int(dim)
        bases = lanes.get(re.findall(r"#\w+", layout)[-1], [])
        used = "".join("1" if basis[axis] else "0" for basis in bases)
        found += "0" in used.strip("0")
    return found


def _ptxas(text: str, build: Build) -> str:
    """ptxas' report on a kernel's PTX, called as Triton calls it."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as ptx:
        ptx.write(text)
        ptx.flush()
        arch = build.capability
        suffix = "a" if arch in ARCH_SPECIFIC else ""
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


def builds_of(op: str, backend: str) -> Iterator[Build]:
    """The ahead-of-time builds of an op's kernels, over all targets."""
    for spec in import_module(f"openmla.backends.{backend}.{op}").SPECS:
        yield from spec.builds()


def all_builds() -> Iterator[Build]:
    for op, backends in BACKENDS.items():
        for backend in COMPILED:
            if backend in backends:
                yield from builds_of(op, backend)
