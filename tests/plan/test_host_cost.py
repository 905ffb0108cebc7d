"""What a plan costs the host: few torch operations, and as many for any number of requests.

The meta device stands for a GPU: what is done there is a launch, and there is one upload.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from openmla import PRESETS, Batch, LayerCache, MLAConfig, allocate_cache, make_plan, plan_buffers
from tests.plan import dense, v4
from tests.plan.captured import tensors_of

KINDS = ("tiny-v3", "tiny-v3.2", 0, 4, 128)  # presets, V4's compress ratios
# by kind: operations of a plan, and of the update of a captured one
MOST = {"tiny-v3": (22, 24), "tiny-v3.2": (34, 31), 0: (31, 28), 4: (53, 48), 128: (40, 37)}


class Operations(TorchDispatchMode):
    """Counts torch's operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))


def counted(call: Callable[[], object]) -> Counter[str]:
    call()  # what is found once is found here
    with Operations() as operations:
        call()
    return operations.names


def make_step(kind: str | int, B: int, n: int) -> tuple[Batch, MLAConfig, LayerCache]:
    """B requests of n new tokens and of different lengths, past what they choose."""
    query_lens, seq_lens = [n] * B, [160 + 3 * b for b in range(B)]
    if isinstance(kind, str):
        config, batch = PRESETS[kind], dense.make_batch(query_lens, seq_lens)
        cache = allocate_cache(config, num_blocks=8192, block_size=4, format="fp32", device="meta")
        return batch, config, cache
    sizes: Any = {
        "num_blocks": 4 * B,
        "max_requests": B,
        "max_tokens": 600 + 8 * B,
        "device": "meta",
    }
    cache = v4.make_cache(kind, **sizes)
    return v4.make_batch(cache, query_lens, seq_lens), v4.CONFIG, cache


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 5])
def test_a_plan_is_a_few_operations_however_many_requests(kind: str | int, n: int) -> None:
    found = {}
    for B in (1, 48, 64):  # one has no table with rows of different lengths
        batch, config, cache = make_step(kind, B, n)
        names = counted(lambda: make_plan(batch, config, cache))  # noqa: B023
        assert names["aten._to_copy.default"] <= 2  # one upload, and positions as int64
        found[B] = names.total()
    assert found[48] == found[64] and max(found.values()) <= MOST[kind][0], found


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_of_a_captured_plan_is_a_few_operations(kind: str | int) -> None:
    found = {}
    for B in (1, 48, 64):  # one has no table with rows of different lengths
        batch, config, cache = make_step(kind, B, 1)
        columns = batch.block_table.shape[1]
        into = plan_buffers(config, cache, max_requests=B, max_tokens=B, max_blocks=columns)
        if isinstance(kind, int):
            rings = into["window_table"].shape[1]
            lens = list(batch.query_lens), list(batch.seq_lens)
            batch = v4.make_batch(cache, *lens, window_columns=rings)
        found[B] = counted(lambda: make_plan(batch, config, cache, into=into)).total()  # noqa: B023
    assert found[48] == found[64] and max(found.values()) <= MOST[kind][1], found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {}, {"form": "absorbed"}, {"form": "expanded"}, {"batch_invariant": True},
        {"form": "expanded", "workspace_tokens": 16},
        {"form": "expanded", "workspace_tokens": 16, "output": "fp8"}, {"form": "chosen"},
    ],
    ids=str,
)  # fmt: skip
def test_no_tensor_of_a_plan_stays_on_the_host(kind: str | int, options: dict[str, Any]) -> None:
    """Requests of one, several and many tokens in turns, so that a form's rows are apart."""
    if isinstance(kind, int) and options.keys() & {"form", "output"}:
        options = {"form": "absorbed"}  # V4 has no other
    if kind != "tiny-v3.2" and options.get("form") == "chosen":
        options = {}
    batch, config, cache = make_step(kind, 6, 3)
    if isinstance(kind, str):
        batch = dense.make_batch([1, 30, 2, 40, 0, 1], [160, 163, 5, 40, 9, 170])
    found = list(tensors_of(make_plan(batch, config, cache, **options)))
    assert len(found) >= 4 and all(tensor.is_meta for tensor in found)
