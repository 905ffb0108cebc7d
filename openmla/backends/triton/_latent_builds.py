"""Ahead-of-time builds of latent attention and of the kernel that merges runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from openmla.backends.triton import _latent as kernels
from openmla.backends.triton import _launch, _runs
from openmla.backends.triton._build import TARGETS, Build, signature_of
from openmla.backends.triton._tiles import (
    E4M3,
    EIGHT_BITS_ON,
    PLAIN,
    STORED_AS,
    config_of,
    constants_of,
    shape_of,
)


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
                    if capability in EIGHT_BITS_ON and parts == ["slots"] and format != "bf16":
                        yield latent_build(capability, parts, format, H, D, C, E4M3)


def wide_builds() -> Iterator[Build]:
    """Over the windows of dots3's sliding layers, whose latents are 1024 wide."""
    for capability in TARGETS:
        for format in ("bf16", "fp8", "fp8_ds_mla"):
            yield latent_build(capability, ["window"], format, 64, 1088, 1024)
            if capability in EIGHT_BITS_ON and format != "bf16":
                yield latent_build(capability, ["window"], format, 64, 1088, 1024, E4M3)


def latent_build(
    capability: int, kinds: Sequence[str], format: str, H: int, D: int, C: int,
    dtype: torch.dtype = torch.bfloat16,
) -> Build:  # fmt: skip
    shape = shape_of(dtype, [format], H, D, C)
    config = config_of(shape, capability, [(kind, format) for kind in kinds])
    BS = 1 if kinds == ["slots"] else 64  # as flattened() makes it
    constants = constants_of(
        shape, config, [(kind, format, BS) for kind in kinds], aligned=True, wide=False,
        sink=False, split=True, scales=2 * (dtype == E4M3),
    )  # fmt: skip
    kernel: Any = kernels._latent_kernel
    stored = "*bf16" if STORED_AS[format] == PLAIN else "*u8"
    types = {
        "q": "*u8" if dtype == E4M3 else "*bf16",
        "positions": "*i64",
        **dict.fromkeys(("cache_1", "cache_2"), stored),
        **dict.fromkeys(("out", "sink", "lse", "q_scale", "kv_scale_1", "kv_scale_2"), "*fp32"),
        **dict.fromkeys(
            ("query_start_loc", "rows_1", "row_lens_1", "table_1",
             "rows_2", "row_lens_2", "table_2"), "*i32"),
        "qk_scale": "fp32",
    }  # fmt: skip
    return Build(
        f"latent-{'-'.join(kinds)}-{format}{'-e4m3' * (dtype == E4M3)}-H{H}-D{D}", kernel,
        signature_of(kernel, constants, types), constants, config.num_warps, config.num_stages,
        capability, _launch.FP_FUSION,
    )  # fmt: skip


def merge_builds() -> Iterator[Build]:
    """Runs that the planner fixed, and runs that fill the machine."""
    for capability in TARGETS:
        for H, fixed in ((128, True), (16, False)):
            constants = _runs.merge_constants(64, 8, H, 512, sink=not fixed, fixed=fixed)
            types = {
                "out": "*bf16",
                **dict.fromkeys(("part", "part_lse", "sink", "lse"), "*fp32"),
            }
            yield Build(
                f"merge-runs-H{H}-{'fixed' if fixed else 'free'}", kernels._merge_runs_kernel,
                signature_of(kernels._merge_runs_kernel, constants, types), constants, 4, 3,
                capability, _runs.FP_FUSION,
            )  # fmt: skip
