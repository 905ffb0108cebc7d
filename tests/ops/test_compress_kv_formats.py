"""compress_kv: entries in the bytes of every format, and pages far into a cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from openmla.cache.format import get_format
from openmla.ops import compress_kv
from openmla.testing import INDEX_FORMATS, LATENT_FORMATS, poisoned_memory
from tests.ops.compress_kv_cases import cut
from tests.ops.compress_kv_story import PoolCase, Story, entry_bytes
from tests.ops.contract import backends, broken, page_bytes, put, run_or_skip


@pytest.mark.parametrize("backend", backends("compress_kv"))
@pytest.mark.parametrize("hadamard", [False, True], ids=["plain", "hadamard"])
@pytest.mark.parametrize(
    ("format", "D"),
    [*((name, 128) for name in (*LATENT_FORMATS, *INDEX_FORMATS)), ("fp8_dsv4", 512)],
)
def test_bytes_are_the_encoded_float32_entry(
    format: str, D: int, hadamard: bool, backend: str, device: str
) -> None:
    """What is stored is encode() of what fp32 would hold, in bf16 where the format is packed."""
    case = PoolCase("encoded", cut(13, 6), format, D=D, R=64, hadamard=hadamard)
    story = Story(case, device).play(backend)
    wide = Story(replace(case, format="fp32"), device).play(backend)
    layout, entries = get_format(format), wide.entries().float()
    encoded = layout.encode(entries.bfloat16() if layout.packed else entries, wide.kv_scale.cpu())
    pages = page_bytes(story.cache)
    for i, row in enumerate(encoded):
        block, offset = divmod(story.slot(0, i), case.BS)
        stored = torch.cat([pages[block, place] for place in entry_bytes(case, offset)])
        assert torch.equal(stored, row.view(torch.uint8))


@pytest.mark.parametrize("backend", backends("compress_kv"))
def test_blocks_beyond_int32(backend: str, device: str) -> None:
    """Pages past byte 2^31 of the cache. Memory is reserved, hardly any of it is touched."""
    N, BS, D = 57_400, 64, 512
    layout = get_format("fp8_dsv4")
    stride = layout.page_width(D, BS)
    with poisoned_memory(False):
        flat = torch.empty((N, stride), dtype=torch.uint8, device=device)
    assert (N - 1) * stride > 2**31 and N > 57_344
    far = flat[:, : BS * layout.width(D)].unflatten(1, (BS, -1))
    story = Story(PoolCase("near", cut(12), "fp8_dsv4", D=D, R=64, BS=BS), device)
    inputs = story.step(story.case.steps[0])
    other = inputs.clone()
    run_or_skip(compress_kv, inputs, backend)
    flat[-1] = 0xFF
    broken(other, cache=lambda _: far, block_table=put((0, 0), N - 1)).run(
        compress_kv, backend=backend
    )
    near = story.cache[story.blocks[0][0]]
    assert torch.equal(far[-1], near) and not bool((near[0] == 0xFF).all())
