"""Reads transformers' attention masks: which columns of a batch are tokens, and which are not."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from openmla.errors import ShapeError, UnsupportedError

LEAST_COLUMNS = 1 << 12  # columns of the first weight table, which doubles if too short
Runs = list[tuple[bool, int]]  # a row's columns so far: runs of (is a token, how many)

_made: dict[tuple[int, torch.device], Tensor] = {}  # _weights()


class Columns(NamedTuple):
    """A mask that carries more information than "everything is a token"."""

    new: Tensor  # [B, S] bool on the CPU: which of the new columns are tokens
    hidden: list[list[int]]  # per row: positions of cached tokens to hide from now on


def read_mask(
    B: int, S: int, mask: Tensor | None, cached: Sequence[Runs], *, generating: bool = False
) -> Columns | None:
    """Read a mask [B, columns] over S new columns and the cached ones before them.

    Returns None if nothing changes: every new column is a token, and the cached ones are what they
    were. A 64-bit hash shows that, so a step of one token per row reads only B integers back from a
    GPU. Columns that are not tokens may be anywhere; while `generating`, a row with tokens must end
    with one, unless it is alone: an assistant's mask hides every token that looks like padding.
    """
    if mask is None:
        return None
    if mask.dim() != 2:
        refuse_square(mask)
    past = sum(length for _, length in cached[0]) if cached else 0
    if mask.shape[0] != B or mask.shape[1] not in (S, past + S):
        raise ShapeError(
            f"attach: attention_mask must be [{B}, {past + S}], as {past} columns are cached, got "
            f"{tuple(mask.shape)}."
        )
    whole = mask.shape[1] > S  # else it covers the new columns only
    sums_before = _sums_before(_table_len(mask.shape[1]))
    expected = [_hash_of([*(runs if whole else ()), (True, S)], sums_before) for runs in cached]
    hashes, real = _read(mask)
    if hashes == expected:
        return None
    if real is None:
        real = mask.to(torch.bool).cpu()
    if generating and B > 1 and bool((~real[:, -1] & real.any(dim=1)).any()):
        raise ShapeError(
            "attach: generate() needs prompts that are padded on the left, got right padding. "
            'Set tokenizer.padding_side = "left".'
        )
    hidden = _hidden(real[:, :past], cached) if whole else [[] for _ in cached]
    return Columns(real[:, -S:], hidden)


def refuse_square(mask: Tensor) -> NoReturn:
    """Raise for a mask that is not one flag per column."""
    raise UnsupportedError(
        f"attach: attention_mask must be [batch, columns], got {tuple(mask.shape)}: masks per "
        "query are not supported. Call detach(model) to use one."
    )


def _hashes(mask: Tensor) -> Tensor:
    """For each row the sum of its tokens' weights, modulo 2^64; [B]."""
    weights = _weights(_table_len(mask.shape[1]), mask.device)[: mask.shape[1]]
    return (mask.to(torch.bool) * weights).sum(dim=1)


def _table_len(num_columns: int) -> int:
    return max(1 << (num_columns - 1).bit_length(), LEAST_COLUMNS)


def _weights(length: int, device: torch.device) -> Tensor:
    """A pseudorandom 64-bit number for each column (splitmix64): no two sets of columns that occur
    in practice have the same sum. Made once per device."""
    found = _made.get((length, device))
    if found is None:
        with torch.inference_mode(False):
            found = torch.arange(1, length + 1, device=device) * -0x61C8864680B583EB
            for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
                shifted = (found >> shift) & ((1 << (64 - shift)) - 1)  # zeros in, no sign bits
                found = (found ^ shifted) * factor
        if type(found) is Tensor:  # do not keep a tracer's fake tensor for eager passes
            _made[length, device] = found
    return found


@cache
def _sums_before(length: int) -> array[int]:
    """For each column the sum of the weights before it."""
    weights = _weights(length, torch.device("cpu"))
    return array("q", [0, *weights.cumsum(0).tolist()])


class Begun(NamedTuple):
    """A pending copy to the host, of a whole mask or of its _hashes()."""

    host: Tensor
    copied: Any  # the event after the copy
    whole: bool


def begin_reading(mask: Tensor | None, num_queries: object) -> None:
    """Start to copy what read_mask() will need, before layers are launched: waiting for the copy
    then does not wait for them. In prefill it is the mask itself, which may well have padding."""
    if mask is None or not mask.is_cuda or mask.dim() != 2 or torch.compiler.is_compiling():
        return
    if torch.cuda.is_current_stream_capturing():
        return
    whole = isinstance(num_queries, int) and num_queries > 1
    with torch.cuda.device(mask.device):
        source = mask.to(torch.bool) if whole else _hashes(mask)
        host = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
        host.copy_(source, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
    mask.openmla_begun = Begun(host, copied, whole)  # type: ignore[attr-defined]


def _read(mask: Tensor) -> tuple[list[int], Tensor | None]:
    """_hashes(), and the mask [B, columns] on the CPU if available. Uses the copy that
    begin_reading() made, once: the same mask object may come again with other values."""
    begun: Begun | None = getattr(mask, "openmla_begun", None)
    if begun is None:
        return _hashes(mask).tolist(), None
    del mask.openmla_begun  # type: ignore[attr-defined]
    begun.copied.synchronize()
    if not begun.whole:
        return begun.host.tolist(), None
    return _hashes(begun.host).tolist(), begun.host


def _hidden(now: Tensor, cached: Sequence[Runs]) -> list[list[int]]:
    """Positions of cached tokens that a mask now hides."""
    hidden = []
    for b, runs in enumerate(cached):
        tokens = torch.tensor([is_token for is_token, length in runs for _ in range(length)])
        shown = now[b]
        if bool((shown & ~tokens).any()):
            column = int((shown & ~tokens).nonzero()[0])
            raise ShapeError(
                f"attach: attention_mask[{b}, {column}] must be 0: the column was masked when it "
                "was cached, so its token has no cached row."
            )
        hidden.append((~shown)[tokens].nonzero().flatten().tolist())
    return hidden


def _hash_of(runs: Runs, sums_before: array[int]) -> int:
    """_hashes() of a row with these runs."""
    column = total = 0
    for is_token, length in runs:
        if is_token:
            total += sums_before[column + length] - sums_before[column]
        column += length
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def num_tokens(runs: Runs) -> int:
    return sum(length for is_token, length in runs if is_token)


def add_runs(runs: Runs, new: Runs) -> None:
    """Append columns to a row. Runs of one kind are merged, or each token would add a run."""
    for is_token, length in new:
        if runs and runs[-1][0] == is_token:
            length += runs.pop()[1]
        runs.append((is_token, length))


def runs_of(columns: Sequence[bool]) -> Runs:
    """Convert columns to runs."""
    return [(is_token, len(list(group))) for is_token, group in groupby(columns)]


def hide_tokens(runs: Runs, positions: Sequence[int]) -> Runs:
    """A row's runs, with the tokens at some positions marked as not tokens."""
    columns = [is_token for is_token, length in runs for _ in range(length)]
    places = [column for column, is_token in enumerate(columns) if is_token]
    for position in positions:
        columns[places[position]] = False
    return runs_of(columns)
