"""The form of a request follows cost(), not a constant."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from openmla import PRESETS
from openmla.backends import Problem, choose_backend, efficiency
from openmla.plan.forms import choose_absorbed, choose_sparse_absorbed, decode_threshold


def threshold(name: str, S: int, device: str = "cuda") -> int:
    return decode_threshold(PRESETS[name], "bf16", 2, device, S.bit_length() - 1)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v2-lite", "glm-4.7-flash", "mistral-4"])
def test_decoding_is_absorbed_and_long_prefill_expanded(name: str, device: str) -> None:
    for S in (1, 64, 4096, 131072):
        assert threshold(name, S, device) >= 1
    forms = choose_absorbed(
        PRESETS[name],
        [1, 4, 4096, 8192],
        [100_000, 8192, 4096, 65536],
        format="bf16",
        itemsize=2,
        device=device,
    )
    assert forms == [True, True, False, False]


def test_threshold_nears_the_crossover_of_the_flops() -> None:
    """V3 at long context: expanding a key costs as much as 171 absorbed queries save."""
    assert 150 <= threshold("deepseek-v3", 131072) <= 190
    assert 150 <= threshold("deepseek-v2-lite", 131072) <= 190


def test_threshold_differs_by_model() -> None:
    assert len({threshold(n, 65536) for n in ("deepseek-v3", "glm-4.7-flash", "mistral-4")}) == 3


@pytest.mark.parametrize("H", [16, 64, 128])
def test_sm90_gathers_sooner_with_many_heads(H: int) -> None:
    """Its kernel of 64 heads makes up for what 2048 rows for every token cost."""
    pytest.importorskip("triton")
    config = replace(PRESETS["deepseek-v3.2"], num_heads=H)
    what: Any = {"format": "bf16", "dtype": torch.bfloat16, "device": "cuda"}
    shape: Any = {"dtype": torch.bfloat16, "format": "bf16", "H": H, "D": 576, "C": 512}
    for capability in ((8, 0), (9, 0), (10, 0)):
        where: Any = {"device": "cuda", "capability": capability, "multiprocessors": 132}
        gathering = Problem("mqa_sparse", tokens=8192, kinds=("slots",), **where, **shape)
        masking = Problem("mha_masked", **where, **shape, E=192, V=128)
        shares = (
            efficiency(gathering, choose_backend(gathering)),
            efficiency(masking, choose_backend(masking)),
        )
        near = choose_sparse_absorbed(config, 8192, 10240, **what, efficiencies=shares)
        assert near == (capability == (9, 0) and H > 16)
        assert choose_sparse_absorbed(config, 8192, 40960, **what, efficiencies=shares)


@pytest.mark.parametrize("device", ["mps", "xpu", "meta", "a device nobody knows"])
@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v3.2"])
def test_devices_without_kernels_choose_as_a_cpu(name: str, device: str) -> None:
    what: Any = {"format": "bf16", "itemsize": 2}
    lens = [1, 4, 300, 4096], [5000, 8192, 9000, 4096]
    chosen, expected = (
        choose_absorbed(PRESETS[name], *lens, device=where, **what) for where in (device, "cpu")
    )
    assert chosen == expected and True in chosen and False in chosen
    if PRESETS[name].indexer is not None:
        for n in (64, 8192):
            routes = {
                choose_sparse_absorbed(
                    PRESETS[name],
                    n,
                    10240,
                    device=where,
                    efficiencies=(1.0, 1.0),
                    format="bf16",
                    dtype=torch.bfloat16,
                )
                for where in (device, "cpu")
            }
            assert len(routes) == 1
