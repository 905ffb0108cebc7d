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

# Most shared memory one program may take, by compute capability.
SHARED_MEMORY = {
    80: 163 << 10,
    86: 99 << 10,
    89: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
    120: 99 << 10,
}
TARGETS = tuple(SHARED_MEMORY)


class Build(NamedTuple):
    """One kernel with everything that is fixed when it is compiled."""

    name: str
    kernel: Any
    signature: Mapping[str, str]  # argument: Triton type, "constexpr" for the constants
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int
    capability: int  # the target it is meant for


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return bool(knobs.runtime.interpret)


def capability_of(device: torch.device) -> int:
    """Compute capability as two digits, 90 for what the interpreter pretends to be."""
    if device.type != "cuda":
        return 90
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
    return triton.next_power_of_2(n)


class Report(NamedTuple):
    """What a compiled kernel takes."""

    registers: int
    spills: int  # bytes stored
    shared: int


def compile_build(build: Build) -> Report:
    """Compile for a target without a GPU; registers and spills are what ptxas says."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    arch = build.capability
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
                "kv_c_",
                "k_",
                "v_",
                "x_",
                "out_",
                "other_out_",
            )
        )
        if kind != "constexpr" and kind != "fp32" and aligned:
            attrs[(index[name],)] = [["tt.divisibility", 16]]
    constants = {(index[name],): value for name, value in build.constants.items()}
    kind = GluonASTSource if isinstance(build.kernel, GluonJITFunction) else ASTSource
    source = kind(build.kernel, dict(build.signature), constants, attrs)
    options = {"num_warps": build.num_warps, "num_stages": build.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as ptx:
        ptx.write(compiled.asm["ptx"])
        ptx.flush()
        suffix = "a" if arch in (90, 100, 120) else ""
        command = [
            get_ptxas(arch).path,
            "-v",
            f"--gpu-name=sm_{arch}{suffix}",
            ptx.name,
            "-o",
            "/dev/null",
        ]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    patterns = (r"Used (\d+) registers", r"(\d+) bytes spill stores")
    registers, spills = (int(re.findall(pattern, said)[-1]) for pattern in patterns)
    return Report(registers, spills, compiled.metadata.shared)


def all_builds() -> Iterator[Build]:
    """What every kernel of this folder is compiled for, targets and rows."""
    for op, backends in BACKENDS.items():
        if "triton" in backends:
            yield from import_module(f"openmla.backends.triton.{op}").builds()
