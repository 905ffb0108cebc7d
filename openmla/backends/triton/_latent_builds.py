"""Ahead-of-time builds of latent attention: one per kind of segments, format, heads and target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from openmla.backends.triton import _few_heads as few_heads
from openmla.backends.triton import _few_heads_v4 as few_heads_v4
from openmla.backends.triton import _latent as kernels
from openmla.backends.triton import _launch, _launch_v3, _launch_v4
from openmla.backends.triton import _many_heads_v3 as many_heads_v3
from openmla.backends.triton import _many_heads_v4 as many_heads_v4
from openmla.backends.triton._build import GFX942, TARGETS, TYPES, Build
from openmla.backends.triton._tiles import LAYOUTS, PLAIN, Config, config_of, constants_of, shape_of


def latent_builds(*kinds: str) -> Iterator[Build]:
    """One build per kind of segments, format, number of heads and target."""
    for capability in TARGETS:
        for kind in kinds:
            parts = kind.split()
            formats = ("bf16", "fp8_dsv4") if len(parts) > 1 else ("bf16", "fp8", "fp8_ds_mla")
            for format in formats:
                D, C = (512, 512) if len(parts) > 1 else (576, 512)
                for H in (16, 128):
                    yield latent_build(capability, parts, format, H, D, C)


def latent_build(
    capability: int, kinds: Sequence[str], format: str, H: int, D: int, C: int,
    config: Config | None = None, dtype: torch.dtype = torch.bfloat16, split: bool = True,
    BS: int = 64,
) -> Build:  # fmt: skip
    shape = shape_of(dtype, [format], H, D, C)
    config = config or config_of(shape, capability, [(kind, format) for kind in kinds])
    BS = 1 if kinds == ["slots"] else BS  # as flattened() makes it
    constants = constants_of(
        shape, config, [(kind, format, BS) for kind in kinds], aligned=True,
        wide=False, causal=kinds[0] == "paged", sink=len(kinds) > 1 and not split, split=split,
    )  # fmt: skip
    stored = {PLAIN: TYPES[dtype]}.get(LAYOUTS[format], "u8")
    result = "fp32" if split else TYPES[dtype]
    types = {
        "q": TYPES[dtype],
        "positions": "i64",
        "cache_1": stored,
        "cache_2": stored,
        "out": result,
        **dict.fromkeys(("sink", "lse", "kv_scale_1", "kv_scale_2"), "fp32"),
        **dict.fromkeys(
            ("query_start_loc", "seq_lens", "split_starts", "rows_1", "row_lens_1", "table_1",
             "rows_2", "row_lens_2", "table_2"), "i32"),
    }  # fmt: skip
    signature = {}
    for name in kernels._latent_kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in types:
            signature[name] = "*" + types[name]
        else:
            signature[name] = "fp32" if name == "qk_scale" else "i32"
    return Build(
        f"latent-{'-'.join(kinds)}-{format}-H{H}-D{D}", kernels._latent_kernel, signature,
        constants, config.num_warps, config.num_stages, capability, _launch.FP_FUSION,
    )  # fmt: skip


def merge_builds() -> Iterator[Build]:
    """Runs the planner cut, and those cut by how busy the machine is."""
    for capability in TARGETS:
        for H, fixed in ((128, True), (16, False)):
            constants = _launch.merge_constants(64, 8, H, 512, sink=not fixed, fixed=fixed)
            types = {"out": "*bf16", "X": "i32"}
            signature = {
                name: "constexpr" if name in constants else types.get(name, "*fp32")
                for name in kernels._merge_runs_kernel.arg_names
            }
            yield Build(
                f"merge-runs-H{H}-{'fixed' if fixed else 'free'}", kernels._merge_runs_kernel,
                signature, constants, 4, 3, capability, _launch.FP_FUSION,
            )  # fmt: skip


def few_heads_builds() -> Iterator[Build]:
    for capability in TARGETS:
        if capability == GFX942:  # its matrix instructions are others
            continue
        for kind, BS in (("slots", 0), ("positions", 64)):
            constants = {"ROW": 164, "BS": BS, "H": 16, "SPLIT": True, "SINK": False, "BLOCK_N": 64}
            name = f"few-heads-{kind}-fp8_ds_mla-H16"
            yield heads_build(
                name, few_heads._few_heads_kernel, constants, capability, _launch_v3.FP_FUSION
            )


def many_heads_v3_builds() -> Iterator[Build]:
    for format, ROW in (("bf16", 288), ("fp8_ds_mla", 164)):
        odd, load = _launch_v3.REGISTERS[format == "fp8_ds_mla"]
        for kind, BS, split in (("slots", 0, False), ("positions", 64, True)):
            constants = {
                "PACKED": format == "fp8_ds_mla", "ROW": ROW, "BS": BS, "H": 128, "SPLIT": split,
                "SINK": not split, "ODD_REGISTERS": odd, "LOAD_REGISTERS": load,
            }  # fmt: skip
            name = f"many-heads-{kind}-{format}-H128"
            yield heads_build(
                name, many_heads_v3._many_heads_v3_kernel, constants, 90, _launch_v3.FP_FUSION
            )


def few_heads_v4_builds() -> Iterator[Build]:
    for capability in TARGETS:
        if capability == GFX942:  # its matrix instructions are others
            continue
        for kind, BS in (("positions", 64), ("prefix", 2)):
            constants = {
                "LISTED": kind == "positions", "BS_1": 64, "BS_2": BS, "H": 16, "SPLIT": True,
                "SINK": False, "BLOCK_N": 64,
            }  # fmt: skip
            name = f"few-heads-window-{kind}-fp8_dsv4-H16"
            yield heads_build(
                name, few_heads_v4._few_heads_v4_kernel, constants, capability, _launch_v4.FP_FUSION
            )


def many_heads_v4_builds() -> Iterator[Build]:
    odd, load = _launch_v4.REGISTERS
    for kind, BS in (("positions", 64), ("prefix", 2)):
        for H, split in ((64, False), (128, True)):
            constants = {
                "LISTED": kind == "positions", "BS_1": 64, "BS_2": BS, "H": H, "SPLIT": split,
                "SINK": not split, "ODD_REGISTERS": odd, "LOAD_REGISTERS": load,
            }  # fmt: skip
            name = f"many-heads-window-{kind}-fp8_dsv4-H{H}"
            yield heads_build(
                name, many_heads_v4._many_heads_v4_kernel, constants, 90, _launch_v4.FP_FUSION
            )


def heads_build(
    name: str, kernel: Any, constants: Mapping[str, Any], capability: int, fp_fusion: bool
) -> Build:
    """Of a kernel of 16 or 64 heads a program; they call the same things the same."""
    types = {
        **dict.fromkeys(("floats", "sink", "lse"), "*fp32"),
        **dict.fromkeys(("words", "words_1", "words_2", "names", "row_lens"), "*i32"),
        **dict.fromkeys(("query_start_loc", "table", "table_1", "table_2"), "*i32"),
        "q": "*bf16",
        "out": "*fp32" if constants["SPLIT"] else "*bf16",
        "positions": "*i64",
        "qk_scale": "fp32",
    }
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }
    return Build(name, kernel, signature, constants, 4, 1, capability, fp_fusion)
