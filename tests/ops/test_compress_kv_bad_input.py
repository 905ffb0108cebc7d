"""compress_kv: bad input gets one sentence and changes no byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from openmla.errors import ConfigError, ShapeError
from openmla.ops import compress_kv
from openmla.testing import Inputs, strided
from tests.ops.compress_kv_cases import cut
from tests.ops.compress_kv_story import Feed, PoolCase, Step, Story
from tests.ops.contract import broken, page_bytes, put


def base_inputs() -> tuple[Story, Inputs]:
    """A step of three requests that finish entries 1; 0, 1 and 2; none."""
    steps: tuple[Step, ...] = ((Feed(0, 6),), (Feed(0, 3), Feed(1, 13), Feed(2, 2)))
    story = Story(PoolCase("bad", steps, "bf16"), "cpu").play("reference", steps[:1])
    return story, story.step(steps[1])


BAD_INPUT: list[tuple[dict[str, Any], str]] = [
    ({"cache": lambda t: t.float()}, "cache must be torch.bfloat16 for format bf16, got"),
    ({"state": lambda t: t[:, 1:]}, "state must have V>=7 rows each, got 6"),
    ({"state": lambda t: t.bfloat16()}, "state must be torch.float32 with kv torch.bfloat16, got"),
    ({"state": lambda t: t.double()}, "state must be torch.float32 with kv torch.bfloat16, got"),
    ({"kv": lambda t: t.float()}, "score must be torch.float32 with kv torch.float32, got torch."),
    ({"kv": lambda t: t.double()}, "score must be torch.float64 with kv torch.float64, got torch."),
    ({"score": lambda t: t.half()}, "score must be torch.bfloat16 with kv torch.bfloat16, got"),
    ({"table": lambda t: t.bfloat16()}, "table must be float32 or float64, got torch.bfloat16"),
    ({"table": lambda t: t[:, 1:]}, "table must have an even R of at most D=16, got 3"),
    ({"table": lambda t: t.repeat(1, 5)}, "table must have an even R of at most D=16, got 20"),
    ({"positions": put((3,), -1)}, "positions must be within the table's 0..13, got -1..12"),
    ({"table": lambda t: t[:12]}, "positions must be within the table's 0..11, got 0..12"),
    ({"positions": put((4,), 2)}, "positions of a request must be"),
    ({"positions": put((2,), 7)}, "positions of a request must be"),
    ({"query_start_loc": put((0,), 1)}, "query_start_loc must start with 0, got [1, 3, 16, 18]"),
    ({"query_start_loc": put((2,), 2)}, "query_start_loc must not fall, got [0, 3, 2, 18]"),
    ({"query_start_loc": put((2,), -1)}, "query_start_loc must not fall, got [0, 3, -1, 18]"),
    ({"query_start_loc": lambda t: -t}, "query_start_loc must not fall, got [0, -3, -16, -18]"),
    (
        {"query_start_loc": lambda t: torch.tensor([0, 3, 2**31 - 1, -(2**31)]).int()},
        "query_start_loc must not fall, got [0, 3, 2147483647, -2147483648]",
    ),
    ({"query_start_loc": put((3,), 21)}, "query_start_loc must end within the 20 rows of kv, got"),
    ({"block_table": lambda t: t[:, :0]}, "block_table must"),
    ({"block_table": put((0, 0), -2)}, "block_table[0, 0] must be a block of the cache (0..8), g"),
    ({"block_table": put((1, 0), 9)}, "block_table[1, 0] must be a block of the cache (0..8), g"),
    ({"state_slots": put((2,), 5)}, "state_slots must be below 5, got 5"),
    ({"state_slots": lambda t: t * 0 + 3}, "state_slots must name each slot once, got 3 twice"),
    ({"ratio": 2}, "bias must be [ratio, CD]"),
    ({"overlap": False}, "state must be [NS, V, SW]"),
    ({"ratio": 0, "bias": lambda t: t[:0]}, "ratio must be positive, got 0"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_INPUT)
def test_bad_input_changes_nothing(changes: dict[str, Any], message: str) -> None:
    story, inputs = base_inputs()
    before = page_bytes(story.cache), page_bytes(story.state)
    with pytest.raises(ShapeError) as error:
        broken(inputs, **changes).run(compress_kv, backend="reference")
    assert f"compress_kv: {message}" in str(error.value)
    assert torch.equal(page_bytes(story.cache), before[0])
    assert torch.equal(page_bytes(story.state), before[1])


def test_the_base_of_bad_input_is_good() -> None:
    story, inputs = base_inputs()
    inputs.run(compress_kv, backend="reference")
    assert story.entries().isfinite().all() and len(story.entries()) == 2 + 3


def test_widths_that_cannot_be() -> None:
    story = Story(PoolCase("", cut(4), D=24, hadamard=True))
    with pytest.raises(ShapeError, match="compress_kv: hadamard needs D to be a power of two, got"):
        story.step(story.case.steps[0]).run(compress_kv, backend="reference")
    for format in ("fp8_dsv4", "index_fp8"):
        story = Story(PoolCase("", cut(4), format, D=128))
        inputs = broken(story.step(story.case.steps[0]), cache=strided)
        with pytest.raises(ShapeError, match="compress_kv: each block must be contiguous for fo"):
            inputs.run(compress_kv, backend="reference")


@pytest.mark.parametrize(
    ("format", "message"),
    [
        ("int4", "format 'int4' is not known. Known: fp32, bf16"),
        ("fp8_dsv4", "format fp8_dsv4 needs rows of a multiple of 64 values, at least 128, got 16"),
        ("fp8_ds_mla", "format fp8_ds_mla needs latents of at least 128 values, got 16"),
    ],
)
def test_formats_that_cannot_be(format: str, message: str) -> None:
    story, inputs = base_inputs()
    before = page_bytes(story.cache)
    with pytest.raises(ConfigError) as error:
        broken(inputs, format=format).run(compress_kv, backend="reference")
    assert message in str(error.value)
    assert torch.equal(page_bytes(story.cache), before)
