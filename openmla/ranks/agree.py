"""check_agreement: checks with one small all-gather that every rank plans the same step.

Ranks that plan different steps would wait for each other, or add up unrelated numbers. Each rank
sends eight bytes per field. Tensors on a GPU are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from ctypes import string_at
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from openmla.errors import ConfigError
from openmla.ranks.collectives import Link, all_gather
from openmla.ranks.ranks import Ranks

FIELDS = (
    *("refused", "config", "cache", "ranks", "query_lens", "seq_lens", "padding"),
    *("block_table", "slot_mapping", "window_table", "state_slots", "options"),
)


@contextmanager
def agreeing(fields: dict[str, Any], ranks: Ranks | None, cache: object) -> Iterator[None]:
    """Compare `fields`, which the body fills, with those of the other ranks at the end. If this
    rank failed, its own error is raised."""
    if ranks is None or not getattr(ranks, "check", False):
        yield
        return
    fields["refused"] = True
    try:
        yield
        fields["refused"] = False
    finally:
        kept = getattr(cache, "latent", None) or getattr(cache, "window", None)
        device = getattr(kept, "data", torch.empty(0)).device
        try:
            check_agreement(fields, ranks.link, device)
        except ConfigError:
            if not fields["refused"]:
                raise


def check_agreement(fields: Mapping[str, Any], link: Link, device: torch.device) -> None:
    """Raise, on all ranks, unless all have the same fields. A rank whose planning failed sends the
    fields that it has with `refused` set, so that the others raise instead of waiting for it."""
    mine = torch.tensor([_digest(fields.get(name)) for name in FIELDS], dtype=torch.int64)
    every: list[list[int]] = all_gather(mine.to(device), link).tolist()
    fine = _digest(False)
    for rank, theirs in enumerate(every):
        if theirs[0] != fine:
            raise ConfigError(
                f"parallel: rank {rank} could not plan this step. See the error that it raised."
            )
    for rank, theirs in enumerate(every):
        for name, first, other in zip(FIELDS, every[0], theirs, strict=True):
            if first != other:
                raise ConfigError(
                    f"parallel: {name} must be the same on every rank, but ranks 0 and {rank} "
                    f"differ. On this rank it is {_shown(fields[name])}."
                )


def _digest(value: Any) -> int:
    """Hash a value to 64 bits; 0 for a tensor on a device."""
    if isinstance(value, Tensor):
        if not value.is_cpu:
            return 0
        value = value.contiguous()
        content = f"{tuple(value.shape)}".encode() + string_at(value.data_ptr(), value.nbytes)
    else:
        content = repr(value).encode()
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little", signed=True)


def _shown(value: Any) -> str:
    shown = repr(value.tolist() if isinstance(value, Tensor) and value.is_cpu else value)
    return shown if len(shown) <= 200 else f"{shown[:200]}..."
