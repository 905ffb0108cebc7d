"""Ahead-of-time builds of latent attention: one per kind of segments, format, heads and target."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from openmla.backends.triton import _latent as kernels
from openmla.backends.triton import _launch
from openmla.backends.triton._build import TARGETS, TYPES, Build
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
