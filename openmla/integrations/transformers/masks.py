"""What transformers' attention masks say of a batch: which columns are tokens, which are not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openmla.errors import ShapeError, UnsupportedError

COUNT = 1 << 40  # more than columns can sum up to; 2^20 of them fit a sum of 64 bits
Runs = list[tuple[bool, int]]  # a row's columns so far: runs of (is a token, how many)


class Columns(NamedTuple):
    """A mask that says more than "everything is a token"."""

    new: Tensor  # [B, S] bool on the CPU: which of the new columns are tokens
    hidden: list[list[int]]  # per row: cached tokens, by position, that are hidden from now on


def read_mask(
    B: int, S: int, mask: Tensor | None, cached: Sequence[Runs], *, generating: bool = False
) -> Columns | None:
    """What a mask [B, columns] says of S new columns and of the cached ones before them.

    None where there is nothing to say: every new column is a token, and the cached ones are what
    they were. Their number and the sum of their places tell that, so a step of one token per row
    reads B integers back from a GPU and no more. Columns that are not tokens may be anywhere; while
    `generating`, a row with tokens must end with one, unless it is alone: an assistant's mask shows
    no token that looks like padding.
    """
    if mask is None:
        return None
    if mask.dim() != 2:
        raise UnsupportedError(
            f"attach: attention_mask must be [batch, columns], got {tuple(mask.shape)}. "
            "Square masks are not supported."
        )
    past = sum(length for _, length in cached[0]) if cached else 0
    if mask.shape[0] != B or mask.shape[1] not in (S, past + S):
        raise ShapeError(
            f"attach: attention_mask must be [{B}, {past + S}] with {past} columns cached, "
            f"got {tuple(mask.shape)}."
        )
    whole = mask.shape[1] > S  # or of the new columns only
    expected = [_count_and_sum([*(runs if whole else ()), (True, S)]) for runs in cached]
    sums, real = _read(mask)
    if sums == expected:
        return None
    if real is None:
        real = mask.to(torch.bool).cpu()
    if generating and B > 1 and bool((~real[:, -1] & real.any(dim=1)).any()):
        raise ShapeError(
            "attach: prompts must be padded on the left to generate, got padding on the right. "
            'Set tokenizer.padding_side = "left".'
        )
    hidden = _hidden(real[:, :past], cached) if whole else [[] for _ in cached]
    return Columns(real[:, -S:], hidden)


def _sums(mask: Tensor) -> Tensor:
    """Of every row the number of its tokens, times COUNT, and the sum of their columns; [B]."""
    weights = torch.arange(COUNT, COUNT + mask.shape[1], device=mask.device)
    return (mask.to(torch.bool) * weights).sum(dim=1)


class Begun(NamedTuple):
    """A copy on its way to the host: all of a mask, or _sums() of it."""

    host: Tensor
    copied: Any  # the event behind it
    whole: bool


def begin_reading(mask: Tensor | None, num_queries: object) -> None:
    """Start to copy what read_mask() will ask for, before layers are launched: waiting for it then
    does not wait for them. Of a prompt that is the mask itself, which may well have padding."""
    if mask is None or not mask.is_cuda or mask.dim() != 2 or torch.compiler.is_compiling():
        return
    if torch.cuda.is_current_stream_capturing():
        return
    whole = isinstance(num_queries, int) and num_queries > 1
    with torch.cuda.device(mask.device):
        source = mask.to(torch.bool) if whole else _sums(mask)
        host = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
        host.copy_(source, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
    mask.openmla_begun = Begun(host, copied, whole)  # type: ignore[attr-defined]


def _read(mask: Tensor) -> tuple[list[int], Tensor | None]:  # _sums(), and [B, columns] on the CPU
    """As begin_reading() copied it, once: a mask may be changed and come again."""
    begun: Begun | None = getattr(mask, "openmla_begun", None)
    if begun is None:
        return _sums(mask).tolist(), None
    del mask.openmla_begun  # type: ignore[attr-defined]
    begun.copied.synchronize()
    if not begun.whole:
        return begun.host.tolist(), None
    if bool(begun.host.all()):  # as most are
        return [_count_and_sum([(True, mask.shape[1])])] * mask.shape[0], begun.host
    return _sums(begun.host).tolist(), begun.host


def _hidden(now: Tensor, cached: Sequence[Runs]) -> list[list[int]]:
    """Cached tokens, by position, that a mask does not show any more."""
    hidden = []
    for b, runs in enumerate(cached):
        tokens = torch.tensor([is_token for is_token, length in runs for _ in range(length)])
        shown = now[b]
        if bool((shown & ~tokens).any()):
            column = int((shown & ~tokens).nonzero()[0])
            raise ShapeError(
                f"attach: attention_mask must not show what is not cached, column {column} of row "
                f"{b} was not a token when it came."
            )
        hidden.append((~shown)[tokens].nonzero().flatten().tolist())
    return hidden


def _count_and_sum(runs: Runs) -> int:
    """How many tokens a row has, times COUNT, and the sum of the columns they are in."""
    column = count = total = 0
    for is_token, length in runs:
        if is_token:
            count += length
            total += length * (2 * column + length - 1) // 2
        column += length
    return COUNT * count + total


def num_tokens(runs: Runs) -> int:
    return sum(length for is_token, length in runs if is_token)


def add_runs(runs: Runs, new: Runs) -> None:
    """Append columns to a row; runs of one kind become one, or each token would add a run."""
    for is_token, length in new:
        if runs and runs[-1][0] == is_token:
            length += runs.pop()[1]
        runs.append((is_token, length))


def runs_of(columns: Sequence[bool]) -> Runs:
    """Columns one by one, as runs."""
    return [(is_token, len(list(group))) for is_token, group in groupby(columns)]


def hide_tokens(runs: Runs, positions: Sequence[int]) -> Runs:
    """A row's runs with the tokens at some positions not tokens any more."""
    columns = [is_token for is_token, length in runs for _ in range(length)]
    places = [column for column, is_token in enumerate(columns) if is_token]
    for position in positions:
        columns[places[position]] = False
    return runs_of(columns)
