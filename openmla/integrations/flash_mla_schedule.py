"""FlashMLA's schedules as placeholders: openmla's kernels balance themselves on the device."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor

from openmla.hardware import multiprocessors
from openmla.integrations.drop_in import DropInError


@dataclasses.dataclass
class FlashMLASchedMeta:
    """The result of get_mla_metadata(), for calls of one shape. openmla's kernels balance
    themselves on the device, so lengths may change between calls; the tensors are not changed."""

    @dataclasses.dataclass
    class Config:
        b: int
        s_q: int
        h_q: int
        page_block_size: int
        h_k: int
        causal: bool
        is_fp8_kvcache: bool
        topk: int | None
        extra_page_block_size: int | None
        extra_topk: int | None
        enable_batch_invariant: bool = False

    have_initialized: bool = False
    config: Config | None = None
    tile_scheduler_metadata: Tensor | None = None
    num_splits: Tensor | None = None
    # not a field: the config and its values, compared as one
    made_for: ClassVar[tuple[Config | None, tuple[Any, ...]]] = (None, ())

    def fill(self, shape: tuple[Any, ...]) -> None:
        """Fill the schedule in the first call."""
        if not self.have_initialized:
            self.config = self.Config(*shape)
            self.have_initialized = True
            vars(self)["made_for"] = (self.config, shape)


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[Any, Tensor | None]:
    """Return (FlashMLASchedMeta, None) without arguments. With the arguments of earlier releases
    (cache_seqlens, num_q_tokens_per_head_k, num_heads_k, ...), return the pair of tensors that
    those returned, which engines copy around. flash_mla_with_kvcache accepts either."""
    if not args and not kwargs:
        return FlashMLASchedMeta(), None
    names = ("cache_seqlens", "num_q_tokens_per_head_k", "num_heads_k", "num_heads_q")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if not isinstance(given.get("cache_seqlens"), Tensor):
        raise DropInError(
            "get_mla_metadata: cache_seqlens must be a tensor where arguments are given, "
            f"got {type(given.get('cache_seqlens')).__name__}."
        )
    per_head = given.get("num_q_tokens_per_head_k", given.get("num_heads_per_head_k", 1))
    return get_mla_decoding_metadata(
        given["cache_seqlens"], per_head or 1, given.get("num_heads_k", 1) or 1
    )


def get_mla_decoding_metadata(
    seqlens_k: Tensor,  # [b] i32
    num_q_tokens_per_head_k: int,
    h_k: int,
    h_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
    use_legacy: bool = False,
) -> tuple[Tensor, Tensor]:  # [parts, 8] i32, [b+1] i32
    """A placeholder schedule of the right shapes, with no request split; openmla ignores it."""
    parts = multiprocessors(seqlens_k.device) // h_k // -(-num_q_tokens_per_head_k // 64)
    one_each = torch.arange(seqlens_k.shape[0] + 1, dtype=torch.int32, device=seqlens_k.device)
    return seqlens_k.new_zeros((max(parts, 1), 8), dtype=torch.int32), one_each


def check_schedule(schedule: Any, num_splits: Any, shape: tuple[Any, ...]) -> None:
    """Check that a schedule is used for calls of one shape; older pairs of tensors are ignored."""
    if isinstance(schedule, Tensor):
        return
    if not isinstance(schedule, FlashMLASchedMeta):
        raise DropInError(
            "flash_mla_with_kvcache: tile_scheduler_metadata must be what get_mla_metadata() "
            f"returned, got {type(schedule).__name__}."
        )
    if num_splits is not None:
        raise DropInError(
            "flash_mla_with_kvcache: num_splits must be None beside a FlashMLASchedMeta, "
            f"got {type(num_splits).__name__}."
        )
    if schedule.config is None:
        return
    config, made_for = schedule.made_for
    if config is not schedule.config:  # set by other code
        made_for = tuple(vars(schedule.config).values())
    if made_for != shape:
        fields = dataclasses.fields(FlashMLASchedMeta.Config)
        field, made, now = next(
            (field.name, made, now)
            for field, made, now in zip(fields, made_for, shape, strict=True)
            if made != now
        )
        raise DropInError(
            f"flash_mla_with_kvcache: {field} must be {made}, as in the first call with this "
            f"tile_scheduler_metadata, got {now}. Take a new one from get_mla_metadata()."
        )
