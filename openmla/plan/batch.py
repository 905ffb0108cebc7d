"""Batch: what this step asks for, in host integers: lengths, block table, slots."""

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
    """B requests, in the caller's order; request b brings query_lens[b] new tokens.

    `seq_lens` counts a request's tokens including the new ones. Lengths are lists, numpy arrays or
    CPU tensors.
    `block_table` and `slot_mapping` may be on the CPU, where their values are checked and from
    where they are uploaded with the plan, or on the device, where they are taken as they are.

    A caller whose true lengths exist on the device only gives them as `device_seq_lens`, of every
    request, and upper bounds as `seq_lens`. `exact` says of which requests `seq_lens` is the true
    length all the same: those are checked and planned as ever. The others, drafted tokens behind
    an unknown number of accepted ones, are not checked against their lengths and decode only.

    `padding` tokens stand behind those of the requests and belong to none: nothing is written or
    read for them, their slots are -1 and their outputs 0. A request of no tokens costs nothing
    either, whatever its length.

    V4 takes no slot_mapping but a `window_table`, whose rows are rings: position p of a request is
    in block window_table[b, (p // BS) % M] of raw rows, which so need room for a step's tokens and
    the window before them; and `state_slots`, the compressor states of the requests. block_table
    is that of entries and indexer keys, a column per block_size tokens.

    `causal=False` is of a part of the keys (attend_partial): every token sees all seq_lens of its
    request, be they fewer than the new tokens or none, and none of them is new. Nothing is written,
    so there is no slot_mapping.
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
            raise ShapeError(f"batch: seq_lens must be B={B} lengths, got {len(seq_lens)}.")
        if min(query_lens, default=0) < 0:
            b = next(b for b, n in enumerate(query_lens) if n < 0)
            raise ShapeError(f"batch: query_lens[{b}] must not be negative, got {query_lens[b]}.")
        self._check_part(T)
        if self.causal and min(map(sub, seq_lens, query_lens), default=0) < 0:
            b = next(b for b in range(B) if seq_lens[b] < query_lens[b])
            raise ShapeError(
                f"batch: seq_lens[{b}] must be at least its {query_lens[b]} query tokens, "
                f"got {seq_lens[b]}."
            )
        if max(seq_lens, default=0) > MOST_POSITIONS:
            b = next(b for b in range(B) if seq_lens[b] > MOST_POSITIONS)
            raise ShapeError(
                f"batch: seq_lens[{b}] must fit int32, {MOST_POSITIONS} at most, got {seq_lens[b]}."
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
                raise ShapeError("batch: exact must not be given without device_seq_lens.")
        ring = self.window_table
        if ring is not None and (
            ring.dim() != 2 or ring.shape[0] != B or ring.dtype != torch.int32
        ):
            raise ShapeError(
                f"batch: window_table must be [B, M] int32 with B={B}, "
                f"got {tuple(ring.shape)} {ring.dtype}."
            )
        if (ring is None) != (self.state_slots is None):
            raise ShapeError("batch: window_table and state_slots must be given together.")
        if ring is not None and slots is not None:
            raise ShapeError(
                "batch: slot_mapping must not be given with a window_table, which says it all."
            )

    def _check_part(self, T: int) -> None:
        """What holds without causality; gives such a batch slots that write nothing."""
        if not isinstance(self.causal, bool):
            raise ShapeError(f"batch: causal must be True or False, got {self.causal!r}.")
        if self.causal:
            return
        for name in ("slot_mapping", "window_table"):
            if getattr(self, name) is not None:
                why = "of which nothing is written" if name == "slot_mapping" else "V4 has no parts"
                raise ShapeError(f"batch: {name} must not be given with causal=False: {why}.")
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
        """T, padding included."""
        return sum(self.query_lens) + self.padding

    @cached_property
    def read_lens(self) -> Sequence[int]:
        """Most keys a step reads of each request: none of one without tokens."""
        if 0 not in self.query_lens:
            return self.seq_lens
        return [S if n else 0 for n, S in zip(self.query_lens, self.seq_lens, strict=True)]

    @cached_property
    def bounded(self) -> frozenset[int]:
        """Requests whose seq_lens are upper bounds: only the device knows their lengths."""
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
        raise ShapeError(f"batch: exact must be a list of B={B} booleans, got {values!r}.")
    if len(given) != B:
        raise ShapeError(f"batch: exact must be B={B} booleans, got {len(given)}.")
    return tuple(given)
