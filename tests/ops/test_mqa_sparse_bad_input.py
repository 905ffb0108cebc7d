"""mqa_sparse: bad input gets one sentence, and inputs that require grad are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from openmla.errors import ConfigError, ShapeError, UnsupportedError
from openmla.ops import mqa_sparse
from openmla.testing import SparseCase, SparseInputs
from tests.ops.contract import put
from tests.ops.mqa_sparse_cases import POSITIONS, SINKS, WINDOW

PAIR = SparseCase("pair", (1, 1, 1), (33, 7, 70), WINDOW, POSITIONS, sink=SINKS)


def _broken(**changes: Any) -> SparseInputs:
    """PAIR's inputs with one argument replaced, changed by a function of itself, or left out."""
    inputs = PAIR.make()
    for name, change in changes.items():
        if name in inputs.scalars:
            inputs.scalars[name] = change
        elif change is None:
            del inputs.tensors[name]
        else:
            inputs.tensors[name] = change(inputs[name]) if callable(change) else change
    return inputs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_latent": lambda t: t[0]}, "q_latent must be [T, H, D], got (4, 40)"),
        ({"q_latent": lambda t: t.to(torch.int32)}, "q_latent must be e4m3, fp16, bf16, fp32"),
        ({"q_latent": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)}, "q_latent must"),
        ({"positions": lambda t: t.int()}, "positions must be int64, got torch.int32"),
        ({"positions": lambda t: t[:2]}, "positions must be [T] with T=3, got (2,)"),
        ({"positions": lambda t: t.to("meta")}, "positions must be on cpu, got meta"),
        ({"query_start_loc": lambda t: t.long()}, "query_start_loc must be int32"),
        ({"query_start_loc": put((0,), 1)}, "query_start_loc must start with 0"),
        ({"query_start_loc": put((1,), 3)}, "query_start_loc must not fall"),
        ({"query_start_loc": put((3,), 99)}, "query_start_loc must end within the 3 rows"),
        ({"cache": lambda t: t[:, :, :-1]}, "cache must be [N, BS, W] with W=40"),
        ({"cache": lambda t: t.half()}, "cache must be torch.bfloat16 for format bf16"),
        ({"cache": lambda t: t.to("meta")}, "cache must be on cpu, got meta"),
        ({"cache_2": lambda t: t[0]}, "cache must be [N, BS, W], got (16, 40)"),
        ({"kv_scale": lambda t: t.double()}, "kv_scale must be float32, got torch.float64"),
        ({"kv_scale_2": lambda t: t[None]}, "kv_scale must be [], got (1,)"),
        ({"block_table": lambda t: t.long()}, "block_table must be int32, got torch.int64"),
        ({"block_table": lambda t: t[:2]}, "block_table must be [B, M] with B=3"),
        ({"block_table_2": lambda t: t[0]}, "block_table must be [B, M], got (7,)"),
        ({"rows_2": lambda t: t.long()}, "rows must be int32, got torch.int64"),
        ({"rows_2": lambda t: t[:2]}, "rows must be [T, K] with T=3, got (2, 21)"),
        ({"rows_2": lambda t: t.T.contiguous().T}, "rows must be contiguous along its last"),
        ({"rows_2": lambda t: t.to("meta")}, "rows must be on cpu, got meta"),
        ({"row_lens_2": lambda t: t.long()}, "row_lens must be int32, got torch.int64"),
        ({"row_lens_2": lambda t: t[:2]}, "row_lens must be [T] with T=3, got (2,)"),
        ({"sink": lambda t: t[:3]}, "sink must be [H] with H=4, got (3,)"),
        ({"sink": lambda t: t.bfloat16()}, "sink must be float32, got torch.bfloat16"),
        ({"C": 41}, "C must be within 1..D=40, got 41"),
        ({"C": 0}, "C must be within 1..D=40, got 0"),
        ({"block_table": None}, "block_table must be given for kind window"),
        ({"block_table_2": None}, "block_table must be given for kind positions"),
        ({"rows_2": None}, "rows must be given for kind positions"),
        ({"row_lens_2": None}, "row_lens must be given for kind positions"),
    ],
)
def test_bad_input(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError) as error:
        _broken(**changes).run(mqa_sparse, backend="reference")
    assert f"mqa_sparse: {message}" in str(error.value)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (("window", 24), ("page", 0), "kind must be one of slots, positions, window, prefix, got"),
        (("", 24), ("positions", 0), "kind must be one of slots, positions, window, prefix, got"),
        (("window", 24), ("two words", 0), "kind must be one of slots, positions, window, prefix"),
        (("window", 0), ("positions", 0), "span must be given for kind window"),
        (("prefix", 0), ("positions", 0), "span must be given for kind prefix"),
        (("window", -4), ("positions", 0), "span must be positive, got -4"),
        (("window", 24), ("positions", 5), "span must not be given for kind positions"),
        (("window", 24), ("slots", 0), "block_table must not be given for kind slots"),
        (("window", 24), ("window", 3), "rows must not be given for kind window"),
        (("window", 24), ("prefix", 3), "rows must not be given for kind prefix"),
        (("positions", 0), ("positions", 0), "rows must be given for kind positions"),
    ],
)
def test_bad_kind(first: tuple[str, int], second: tuple[str, int], message: str) -> None:
    segments = [("bf16", *first), ("bf16", *second)]
    with pytest.raises((ShapeError, ConfigError)) as error:
        _broken(segments=segments).run(mqa_sparse, backend="reference")
    assert f"mqa_sparse: {message}" in str(error.value)


@pytest.mark.parametrize("format", ["fp4", "index_fp8", "", "fp8 ds"])
def test_unknown_format(format: str) -> None:
    with pytest.raises(ConfigError, match=f"cache: format '{format}' is not known.* Known: fp32"):
        _broken(segments=[(format, "window", 24), ("bf16", "positions", 0)]).run(
            mqa_sparse, backend="reference"
        )


def test_unknown_backend() -> None:
    with pytest.raises(ConfigError, match=r"mqa_sparse: backend 'cuda' is not known\. Known: auto"):
        _broken().run(mqa_sparse, backend="cuda")


@pytest.mark.parametrize("name", ["q_latent", "sink"])
def test_grad_is_refused(name: str) -> None:
    with torch.inference_mode(False):
        inputs = _broken(**{name: lambda t: t.clone().requires_grad_()})
        with pytest.raises(UnsupportedError, match=r"mqa_sparse: .* torch\.inference_mode\(\)"):
            inputs.run(mqa_sparse, backend="reference")
