"""The attention and mask functions that transformers calls by the name "openmla"."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from openmla.attention import Projected, Selection, attend_step, select_step
from openmla.errors import ConfigError, UnsupportedError
from openmla.integrations.transformers.attachment import Attachment
from openmla.integrations.transformers.compressed import attend_v4
from openmla.integrations.transformers.masks import read_mask
from openmla.ops import mha_ragged

if TYPE_CHECKING:
    from openmla.integrations.transformers.paged_layer import PagedLayer


def openmla_attention(
    module: nn.Module,
    query: Tensor,  # [B, H, S, P + R]
    key: Tensor,  # [B, H, 1, P + R] and not looked at; whole sequences where there is no cache
    value: Tensor,
    attention_mask: Tensor | None,  # [B, columns] or None
    **kwargs: Any,
) -> tuple[Tensor, None]:  # [B, S, H, V]
    """The attention function transformers calls by name."""
    attachment = getattr(module, "openmla", None)
    if not isinstance(attachment, Attachment):
        raise ConfigError(
            "attach: attention 'openmla' was chosen without attach(model). A model that shares its "
            "config object with an attached one needs its own copy."
        )
    if kwargs.get("dropout"):
        raise UnsupportedError("attach: attention dropout is for training. Call model.eval().")
    if torch.is_grad_enabled() and query.requires_grad:
        raise UnsupportedError(
            "attach: there is no backward here. Run under torch.no_grad() or inference_mode()."
        )
    B, H, S, E = query.shape
    current = attachment.current
    layer, current.storing = current.storing, None
    if attachment.config.indexer is not None:
        attention_mask = _padding_of(attention_mask)
        if layer is not None and current.own_cache is not None:
            _refuse_packed(current.positions, attention_mask)
    q = query.transpose(1, 2).reshape(B * S, H, E)
    if layer is None:
        return _without_cache(attachment, q, key, value, attention_mask), None
    session = layer.session
    if layer.steps == session.steps:
        session.begin(B, S, attention_mask)
    layer.steps = session.steps
    layer.columns += S
    with attachment.using_caches(query.device):
        out = _attend(attachment, module, layer, query, kwargs.get("s_aux"))
    if module is attachment.modules[-1]:
        session.finish()
    picked = session.picked
    return _unpacked(out, None if picked is None else picked.to(out.device), B, S), None


def _attend(
    attachment: Attachment, module: nn.Module, layer: PagedLayer, query: Tensor, sink: Tensor | None
) -> Tensor:  # [T, H, V] of the tokens that are not padding
    session = layer.session
    B, H, S, E = query.shape
    q = query.transpose(1, 2).reshape(B * S, H, E)
    if attachment.config.compressor is not None:
        assert sink is not None  # every V4 module has one
        return attend_v4(layer, query, sink)
    cache = attachment.cache(layer.layer, query.device, query.dtype)
    plan = session.plan(cache, query.device, query.dtype)
    assert layer.latents is not None
    kv_c, k_pe = (part.flatten(0, 1) for part in layer.latents)
    layer.latents = None
    picked = session.picked
    if picked is not None:
        picked = picked.to(query.device)
        q, kv_c, k_pe = q[picked], kv_c[picked], k_pe[picked]
    P = attachment.config.qk_nope_head_dim
    absorbed = session.absorbed(module, layer.layer, query.dtype)
    if layer.index_keys is not None:
        index = attachment.watches[layer.layer].take(layer.index_keys, picked)
        layer.index_keys = None
        session.selection = select_step(index, cache, plan)
    selection = session.selection
    if selection is not None and selection.positions.device != query.device:
        assert plan.sparse is not None  # the same step, planned for another device
        selection = Selection(
            selection.positions.to(query.device),
            selection.lens.to(query.device),
            selection.rows.to(query.device),
            plan.sparse.row_lens,
        )
    if module is attachment.modules[-1]:
        session.selection = None  # a kept cache does not keep it
    return attend_step(
        Projected(q[..., :P], q[..., P:], kv_c, k_pe),
        absorbed,
        cache,
        plan,
        selection=selection,
        sink=None if sink is None else sink.float(),
    )


def _padding_of(mask: Tensor | None) -> Tensor | None:
    """The padding mask that openmla_sparse_mask hung onto the mask it made."""
    if mask is None or not hasattr(mask, "openmla_padding"):
        raise UnsupportedError(
            "attach: the attention mask was copied or replaced on its way to the layers, and the "
            "padding with it. Square masks and layers on several devices are not supported here."
        )
    padding: Tensor | None = mask.openmla_padding
    return padding


def _refuse_packed(positions: Tensor | None, padding: Tensor | None) -> None:
    """Several sequences in one row, told by positions alone, would attend to one another."""
    if padding is not None or positions is None or positions.shape[-1] == 1:
        return
    if len(_packed_lens(positions)) > positions.shape[0]:
        raise UnsupportedError(
            "attach: sequences packed into one row are not supported for sparse models. "
            "Give them as rows of a batch."
        )


def _unpacked(out: Tensor, picked: Tensor | None, B: int, S: int) -> Tensor:
    """Tokens back in their batch rows; padding rows are 0."""
    if picked is not None:
        whole = out.new_zeros((B * S, *out.shape[1:]))
        whole[picked] = out
        out = whole
    return out.reshape(B, S, *out.shape[1:])


def _without_cache(
    attachment: Attachment, q: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> Tensor:
    """A forward pass without past_key_values: the module expanded everything itself."""
    B, H, S, _ = key.shape
    columns, positions = read_mask(B, S, mask, [[] for _ in range(B)]), attachment.current.positions
    picked, lens = torch.arange(B * S), [S] * B
    if columns is not None:
        picked = columns.new.flatten().nonzero().flatten()
        lens = columns.new.sum(dim=1).tolist()
    elif mask is None and positions is not None:
        lens = _packed_lens(positions.expand(B, S))
    picked = picked.to(q.device)
    k, v = (part.transpose(1, 2).reshape(B * S, H, -1)[picked] for part in (key, value))
    start_loc = torch.tensor([0, *lens], dtype=torch.int32).cumsum(0).int().to(q.device)
    out, _ = mha_ragged(
        q[picked],
        k,
        v,
        start_loc,
        start_loc,
        scale=attachment.config.scale,
        causal=True,
        max_query_len=max(lens),
        max_key_len=max(lens),
    )
    return _unpacked(out, picked, B, S)


def _packed_lens(positions: Tensor) -> list[int]:
    """Sequences packed into one row: a new one begins wherever positions do not go on by one."""
    flat = positions.flatten().tolist()
    S = positions.shape[1]
    starts = [t for t in range(len(flat)) if t % S == 0 or flat[t] != flat[t - 1] + 1]
    return [stop - start for start, stop in pairwise([*starts, len(flat)])]


def openmla_mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """The padding mask as it is, [B, columns]; a square mask is never made."""
    return attention_mask


def openmla_sparse_mask(
    *args: Any, attention_mask: Tensor | None = None, device: Any = None, **kwargs: Any
) -> Tensor:
    """A mask of one bit, which is what an indexer may look at; the padding mask rides on it."""
    mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)
    mask.openmla_padding = attention_mask  # type: ignore[attr-defined]
    return mask
