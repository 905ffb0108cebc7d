"""Batch: the input of one step, in host integers: lengths, block table, slots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import sub

import torch
from torch import Tensor

from openmla.cache import as_integer
from openmla.errors import ShapeError

MOST_POSITIONS = 2**31 - 1
_TENSORS = {
    "block_table": "[B, M] int32",
    "slot_mapping": "[T] int64",
    "device_seq_lens": "[B] int32",
    "window_table": "[B, M] int32",
    "state_slots": "[B] int32",
}


@dataclass(frozen=True)
class Batch:
    """The requests of one step, in the caller's order. Make a plan of it with make_plan().

    B is the number of requests and T the number of tokens in the step. Tables and slots may be on
    the CPU or on the cache's device. On the CPU, their values are checked, and they are uploaded
    with the plan. On the device, they are used as they are.

    Attributes:
        query_lens: B numbers of new tokens: a list, a numpy array or a CPU tensor. 0 is allowed and
            costs nothing.
        seq_lens: B lengths of the requests, including the new tokens.
        block_table: [B, M] int32 blocks of each request. For layers with a window, a row may be a
            ring buffer, as in window_table. For DeepSeek V4, blocks of entries and indexer keys,
            one column per block_size tokens.
        slot_mapping: [T] int64 slots of the new tokens; -1 is not written. None for DeepSeek V4.
        device_seq_lens: [B] int32 lengths on the device, for callers that do not know them on the
            host. `seq_lens` are then upper bounds.
        window_table: [B, M] int32, DeepSeek V4 only: blocks of recent rows. A row is a ring buffer:
            position p is in block window_table[b, (p // BS) % M]. It must have room for the tokens
            of the step and the window before them.
        state_slots: [B] int32, DeepSeek V4 only: compressor states; -1 for a request without tokens
            in this step.
        exact: B booleans: the requests whose `seq_lens` is the true length in spite of
            `device_seq_lens`. They are checked and planned as usual. The other requests are not
            checked against their lengths and can only decode (for example draft tokens after an
            unknown number of accepted ones). None: no length is exact.
        padding: tokens that belong to no request, the last ones of the T. Their slots are -1, and
            their outputs are 0.
        causal: False for a part of the keys (attend_partial): every token sees all seq_lens keys of
            its request, which may be fewer than its new tokens, or none. Nothing is written, so
            slot_mapping is None.

    Raises:
        ShapeError: lengths, shapes, dtypes or values do not fit each other.

    ```python
    import openmla

    pool = openmla.BlockPool(num_blocks=8, block_size=16)
    pool.take({"a": 20, "b": 33})
    batch = openmla.Batch(
        query_lens=[20, 1],  # a prompt of 20 tokens, and a decode step at length 33
        seq_lens=[20, 33],
        block_table=pool.block_table(["a", "b"]),
        slot_mapping=pool.slot_mapping([("a", 0, 20), ("b", 32, 33)]),
    )
    ```
    """

    query_lens: Sequence[int]  # B of them
    seq_lens: Sequence[int]  # B of them
    block_table: Tensor  # [B, M] i32
    slot_mapping: Tensor | None = None  # [T] i64, -1: do not write
    device_seq_lens: Tensor | None = None  # [B] i32
    window_table: Tensor | None = None  # [B, M] i32
    state_slots: Tensor | None = None  # [B] i32, -1: no tokens in this step
    exact: Sequence[bool] | None = None  # B of them, beside device_seq_lens; None: no length is
    padding: int = 0  # tokens of no request, the last of the T
    causal: bool = True
    # the batch's identity, whatever its values
    key: object = field(default_factory=object, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        query_lens = _integers("query_lens", self.query_lens)
        seq_lens = _integers("seq_lens", self.seq_lens)
        object.__setattr__(self, "query_lens", query_lens)
        object.__setattr__(self, "seq_lens", seq_lens)
        padding = as_integer(self.padding)
        if padding is None or padding < 0:
            raise ShapeError(
                f"batch: padding must be an integer of at least 0, got {self.padding!r}."
            )
        object.__setattr__(self, "padding", padding)
        B, T = len(query_lens), sum(query_lens) + padding
        if len(seq_lens) != B:
            raise ShapeError(
                f"batch: seq_lens must have B={B} lengths like query_lens, got {len(seq_lens)}."
            )
        if min(query_lens, default=0) < 0:
            b = next(b for b, n in enumerate(query_lens) if n < 0)
            raise ShapeError(f"batch: query_lens[{b}] must not be negative, got {query_lens[b]}.")
        self._check_part(T)
        if self.causal and min(map(sub, seq_lens, query_lens), default=0) < 0:
            b = next(b for b in range(B) if seq_lens[b] < query_lens[b])
            raise ShapeError(
                f"batch: seq_lens[{b}] must include its {query_lens[b]} new tokens, "
                f"got {seq_lens[b]}."
            )
        if max(seq_lens, default=0) > MOST_POSITIONS:
            b = next(b for b in range(B) if seq_lens[b] > MOST_POSITIONS)
            raise ShapeError(
                f"batch: seq_lens[{b}] must be at most {MOST_POSITIONS} (int32), got {seq_lens[b]}."
            )
        for name in _TENSORS:
            given = getattr(self, name)
            if not isinstance(given, Tensor) and (given is not None or name == "block_table"):
                raise ShapeError(
                    f"batch: {name} must be a {_TENSORS[name]} tensor, got {type(given).__name__}."
                )
        table = self.block_table
        if table.dim() != 2 or table.shape[0] != B or table.dtype != torch.int32:
            raise ShapeError(
                f"batch: block_table must be [B, M] int32 with B={B}, "
                f"got {tuple(table.shape)} {table.dtype}."
            )
        slots = self.slot_mapping
        if slots is not None and (slots.shape != (T,) or slots.dtype != torch.int64):
            raise ShapeError(
                f"batch: slot_mapping must be [T] int64 with T={T}, "
                f"got {tuple(slots.shape)} {slots.dtype}."
            )
        for name in ("device_seq_lens", "state_slots"):
            each = getattr(self, name)
            if each is not None and (each.shape != (B,) or each.dtype != torch.int32):
                raise ShapeError(
                    f"batch: {name} must be [B] int32 with B={B}, "
                    f"got {tuple(each.shape)} {each.dtype}."
                )
        if self.exact is not None:
            object.__setattr__(self, "exact", _flags(self.exact, B))
            if self.device_seq_lens is None:
                raise ShapeError(
                    "batch: exact must be None without device_seq_lens: all seq_lens are exact."
                )
        ring = self.window_table
        blocks = table if ring is None else ring
        if self.causal and max(query_lens, default=0) and blocks.dim() == 2 and not blocks.shape[1]:
            b = next(b for b, n in enumerate(query_lens) if n)
            name, tables = ("block_table",) * 2 if ring is None else ("window_table", "tables")
            raise ShapeError(
                f"batch: {name} has no blocks for the {query_lens[b]} new tokens of request {b}. "
                f"Call pool.take() for them before pool.{tables}()."
            )
        if ring is not None and (
            ring.dim() != 2 or ring.shape[0] != B or ring.dtype != torch.int32
        ):
            raise ShapeError(
                f"batch: window_table must be [B, M] int32 with B={B}, "
                f"got {tuple(ring.shape)} {ring.dtype}."
            )
        if (ring is None) != (self.state_slots is None):
            missing = "window_table" if ring is None else "state_slots"
            raise ShapeError(
                f"batch: {missing} is missing: DeepSeek V4 needs window_table and state_slots. "
                "Pass those of CompressedPool.tables()."
            )
        if ring is not None and slots is not None:
            raise ShapeError(
                "batch: slot_mapping must be None with a window_table, which determines the slots."
            )

    def _check_part(self, T: int) -> None:
        """Check a batch with causal=False, and give it slots that write nothing."""
        if not isinstance(self.causal, bool):
            raise ShapeError(f"batch: causal must be True or False, got {self.causal!r}.")
        if self.causal:
            return
        for name in ("slot_mapping", "window_table"):
            if getattr(self, name) is not None:
                why = "which writes nothing" if name == "slot_mapping" else "not used with V4"
                raise ShapeError(f"batch: {name} must be None with causal=False, {why}.")
        if min(self.seq_lens, default=0) < 0:
            b = next(b for b, S in enumerate(self.seq_lens) if S < 0)
            raise ShapeError(f"batch: seq_lens[{b}] must not be negative, got {self.seq_lens[b]}.")
        object.__setattr__(self, "slot_mapping", torch.full((T,), -1, dtype=torch.int64))

    def __repr__(self) -> str:
        longest, M = max(self.seq_lens, default=0), self.block_table.shape[1]
        bound, B = "", len(self.query_lens)
        if self.device_seq_lens is not None:
            some = "" if self.exact is None else f" of {len(self.bounded)} requests"
            bound = f", lengths{some} on the device, these are bounds"
        padded = f" and {self.padding} of padding" if self.padding else ""
        return (
            f"Batch({B} requests, {sum(self.query_lens)} query tokens{padded}, longest "
            f"context {longest}, tables of {M} blocks{bound})"
        )

    @property
    def num_tokens(self) -> int:
        """T, including padding."""
        return sum(self.query_lens) + self.padding

    @cached_property
    def read_lens(self) -> Sequence[int]:
        """The most keys that a step reads of each request: 0 for a request without new tokens."""
        if 0 not in self.query_lens:
            return self.seq_lens
        return [S if n else 0 for n, S in zip(self.query_lens, self.seq_lens, strict=True)]

    @cached_property
    def bounded(self) -> frozenset[int]:
        """The requests whose seq_lens are upper bounds."""
        if self.device_seq_lens is None:
            return frozenset()
        flags = self.exact or [False] * len(self.query_lens)
        return frozenset(b for b, known in enumerate(flags) if not known)


def _integers(name: str, values: Sequence[int] | Tensor) -> tuple[int, ...]:
    if isinstance(values, Tensor):
        if values.device.type != "cpu" or values.dim() != 1 or values.is_floating_point():
            raise ShapeError(
                f"batch: {name} must be a list or a 1-D integer CPU tensor, "
                f"got {tuple(values.shape)} {values.dtype} on {values.device}."
            )
        return tuple(values.tolist())
    if not isinstance(values, Iterable):
        raise ShapeError(f"batch: {name} must be a list of integers, got {values!r}.")
    given = tuple(values)
    if set(map(type, given)) <= {int}:  # every step comes here: the check stays in C
        return given
    lens = tuple(map(as_integer, given))  # numpy's
    if None in lens:
        raise ShapeError(f"batch: {name} must be integers, got {given[lens.index(None)]!r}.")
    return lens  # type: ignore[return-value]


def _flags(values: Sequence[bool] | Tensor, B: int) -> tuple[bool, ...]:
    on_device = isinstance(values, Tensor) and values.device.type != "cpu"
    given = values.tolist() if hasattr(values, "tolist") and not on_device else values
    if not isinstance(given, list | tuple) or set(map(type, given)) - {bool}:
        raise ShapeError(f"batch: exact must be a list of booleans, got {values!r}.")
    if len(given) != B:
        raise ShapeError(f"batch: exact must have B={B} booleans, got {len(given)}.")
    return tuple(given)
