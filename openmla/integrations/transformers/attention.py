"""The attention and mask functions that transformers calls by the name "openmla"."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from openmla.attention import (
    Projected,
    Selection,
    attend_step,
    carry_selection,
    select_step,
)
from openmla.errors import ConfigError, UnsupportedError
from openmla.integrations.transformers.attachment import Attachment, check_scaling
from openmla.integrations.transformers.compressed import attend_v4
from openmla.integrations.transformers.masks import begin_reading, read_mask, refuse_square
from openmla.integrations.transformers.scales import measure_step
from openmla.ops import mha_ragged

if TYPE_CHECKING:
    from openmla.integrations.transformers.paged_layer import PagedLayer


# Keywords that do not affect the result of any attention function of transformers; a hook reads
# position_ids.
UNREAD = frozenset(
    (
        "cache_position", "indices", "input_ids", "mm_token_type_ids", "num_items_in_batch",
        "output_attentions", "output_hidden_states", "output_router_logits", "position_ids",
        "return_dict", "seq_idx", "token_type_ids", "use_cache",
    )
)  # fmt: skip


@torch.compiler.disable  # bookkeeping on the host, different in every pass
def openmla_attention(
    module: nn.Module,
    query: Tensor,  # [B, H, S, P + R]
    key: Tensor,  # ignored if a paged layer stored; else [B, H, T, P + R]
    value: Tensor,
    attention_mask: Tensor | None,  # [B, columns] or None
    *,
    scaling: float,
    s_aux: Tensor | None = None,  # one sink per head
    **others: Any,
) -> tuple[Tensor, None]:  # [B, S, H, V]
    """The attention function that transformers calls by name. Raises for keywords that are neither
    used nor known to have no effect (UNREAD)."""
    attachment = getattr(module, "openmla", None)
    _refuse_keywords(module, attachment, **others)
    if torch.is_grad_enabled() and query.requires_grad:
        raise UnsupportedError(
            "attach: openmla is inference-only and has no backward pass. Wrap the call in "
            "torch.inference_mode(), or call detach(model) to train."
        )
    B, _, S, _ = query.shape
    if not isinstance(attachment, Attachment):  # a layer built from an attached model's config
        if hasattr(attention_mask, "openmla_padding"):
            raise ConfigError(
                "attach: the model uses attention 'openmla_sparse' but is not attached: its config "
                "was copied from an attached model. Call openmla.attach(model)."
            )
        _refuse_sink(s_aux)
        return _expanded(query, key, value, attention_mask, None, float(scaling)), None
    config = attachment.config.layer(module.layer_idx)  # type: ignore[arg-type]
    check_scaling(scaling, config)
    current = attachment.current
    layer, current.storing = current.storing, None
    packed = None
    if attachment.partial_keys:
        attention_mask = _padding_of(attention_mask)
        if layer is not None and current.own_cache is not None and config.compressor is None:
            packed = _packed_lens(B, S, current.positions, attention_mask)
    if layer is None:
        _refuse_sink(s_aux)
        given = (attention_mask, current.positions, config.scale, current.generating)
        return _expanded(query, key, value, *given), None
    session = layer.session
    if layer.steps == session.steps:
        session.begin(B, S, attention_mask, packed)
    layer.steps = session.steps
    layer.columns += S
    if layer.latents is None:  # a layer without rows of its own is given another layer's
        layer.latents = (key, value)
    with attachment.using_caches(query.device):
        out = _attend(attachment, module, layer, query, s_aux)
    if module is attachment.modules[-1]:
        session.finish()
    return _unpacked(out, session.picked_on(out.device), B, S), None


def _refuse_keywords(
    module: nn.Module,
    attachment: Any,
    *,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> None:
    if dropout:
        raise UnsupportedError(
            f"attach: attention dropout must be 0, got {dropout}. Call model.eval()."
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if not is_causal:
        raise UnsupportedError(
            "attach: is_causal must be True, got False: bidirectional attention is not supported. "
            "Call detach(model) to use it."
        )
    config = None
    if isinstance(attachment, Attachment):
        config = attachment.config.layer(module.layer_idx)  # type: ignore[arg-type]
    if config is None or sliding_window != config.sliding_window:
        others["sliding_window"] = sliding_window
    for name, given in others.items():
        if given is not None and given is not False and name not in UNREAD:
            shown = type(given).__name__ if isinstance(given, Tensor) else repr(given)
            raise UnsupportedError(
                f"attach: attention keyword {name} is not supported, got {shown}. Remove it, or "
                "call detach(model)."
            )


def _refuse_sink(s_aux: Tensor | None) -> None:
    if s_aux is not None:
        raise UnsupportedError("attach: attention sinks (s_aux) need a cache. Pass use_cache=True.")


def _attend(
    attachment: Attachment, module: nn.Module, layer: PagedLayer, query: Tensor, sink: Tensor | None
) -> Tensor:  # [T, H, V], without padding tokens
    session, config = layer.session, attachment.config.layer(layer.layer)
    owns = attachment.config.kv_source(layer.layer) == layer.layer
    if config.compressor is not None:
        assert sink is not None  # every V4 module has one
        return attend_v4(layer, query, sink)
    assert layer.latents is not None
    (kv_c, k_pe), layer.latents = layer.latents, None
    q, kv_c, k_pe = query.transpose(1, 2).flatten(0, 1), kv_c.flatten(0, 2), k_pe.flatten(0, 2)
    picked = session.picked_on(query.device)
    if picked is not None:
        q, kv_c, k_pe = q[picked], kv_c[picked], k_pe[picked]
    q_nope, q_pe = q.split_with_sizes((config.qk_nope_head_dim, config.qk_rope_head_dim), -1)
    absorbed = session.absorbed(module, layer.layer, query.dtype)
    projected = Projected(q_nope, q_pe, kv_c, k_pe)
    if owns:
        measure_step(session, layer.layer, projected, absorbed)
    cache = attachment.cache(layer.layer, query.device, query.dtype)
    plan = session.plan(layer.layer, cache, query.device, query.dtype)
    index = None
    if layer.index_keys is not None:
        index = attachment.watches[layer.layer].take(layer.index_keys, picked)
        layer.index_keys = None
        session.selection, session.selected_by = select_step(index, cache, plan), plan
    selection = None if config.indexer is None else session.selection
    made_with = session.selected_by
    if made_with is not None and made_with.slot_mapping.device == query.device:
        selection = carry_selection(selection, made_with, cache, plan)
    if module is attachment.modules[-1]:
        session.selection = session.selected_by = None  # do not keep them alive in the cache
    if sink is not None:
        sink = sink.float()
    if selection is not None and selection.positions.device != query.device:
        if attachment.config.kinds:
            raise UnsupportedError(
                f"attach: layer {layer.layer} must be on {selection.positions.device}, the device "
                "of the layer whose selection it shares. Put all layers on one device."
            )
        assert plan.select is not None  # the same step, planned for another device
        selection = Selection(
            selection.positions.to(query.device),
            selection.lens.to(query.device),
            selection.rows.to(query.device),
            plan.select.row_lens,
        )
    out = attend_step(projected, absorbed, cache, plan, selection=selection, sink=sink, write=owns)
    if attachment.watcher is not None:
        rows = torch.cat([kv_c, k_pe], dim=-1)
        attachment.tell(layer.layer, q, rows, cache, plan, index, selection, out)
    assert isinstance(out, Tensor)
    return out


def _padding_of(mask: Tensor | None) -> Tensor | None:
    """The padding mask that openmla_sparse_mask attached to the mask it made."""
    if mask is None or not hasattr(mask, "openmla_padding"):
        if (
            mask is not None and mask.numel() > 1
        ):  # the mask that openmla_sparse_mask makes has one element
            refuse_square(mask)
        raise UnsupportedError(
            "attach: the attention mask was copied or replaced before it reached the layers, and "
            "its padding is lost. Put all layers on one device."
        )
    padding: Tensor | None = mask.openmla_padding
    return padding


def _unpacked(out: Tensor, picked: Tensor | None, B: int, S: int) -> Tensor:
    """Put tokens back into their batch rows; padding rows are 0."""
    if picked is not None:
        padded = out.new_zeros((B * S, *out.shape[1:]))
        padded[picked] = out
        out = padded
    return out.reshape(B, S, *out.shape[1:])


def _expanded(
    query: Tensor,  # [B, H, S, E]
    key: Tensor,  # [B, H, T, E], the last S are those of the queries
    value: Tensor,
    mask: Tensor | None,  # [B, T]
    positions: Tensor | None,
    scale: float,
    generating: bool = False,
) -> Tensor:  # [B, S, H, V]
    """Attend for a module that expanded K and V itself: without past_key_values, or with a cache
    that openmla does not manage (the draft layers of generate(use_mtp=True))."""
    B, H, S, _ = query.shape
    T = key.shape[2]
    found = read_mask(B, T, mask, [[] for _ in range(B)], generating=generating)
    seen = torch.ones((B, T), dtype=torch.bool) if found is None else found.new
    new = seen[:, T - S :]
    picked, rows = (columns.flatten().nonzero().flatten() for columns in (new, seen))
    lens, key_lens = new.sum(dim=1), seen.sum(dim=1)
    packed = _packed_lens(B, S, positions, mask) if S == T else None
    if packed is not None:
        lens = key_lens = torch.tensor(packed)
    out = query.new_zeros((B * S, H, value.shape[-1]))
    heads = (query, key, value)
    _attend_ragged(out, heads, (picked, lens), (rows, key_lens), scale, causal=True)
    # columns that are not tokens attend to the tokens before them and are never attended to
    counts = seen.cumsum(1)[:, T - S :]
    looking = (~new & (counts > 0)).flatten().nonzero().flatten()
    if len(looking) > 0:
        seen_by = torch.stack([looking // S, counts.flatten()[looking]], dim=1)
        groups, lens = seen_by.unique_consecutive(dim=0, return_counts=True)
        starts = key_lens.cumsum(0) - key_lens
        rows = torch.cat([rows[starts[b] : starts[b] + n] for b, n in groups.tolist()])
        _attend_ragged(out, heads, (looking, lens), (rows, groups[:, 1]), scale, causal=False)
    return out.view(B, S, H, -1)


def _attend_ragged(
    out: Tensor,  # [B * S, H, V]
    heads: tuple[Tensor, Tensor, Tensor],  # [B, H, S, E], [B, H, T, E], [B, H, T, V]
    queries: tuple[Tensor, Tensor],  # indices into B * S, and the count per group
    keys: tuple[Tensor, Tensor],  # the same for B * T
    scale: float,
    causal: bool,
) -> None:
    """Attend from each group's queries to its keys."""
    device = out.device
    (picked, lens), (rows, key_lens) = queries, keys
    picked, rows = picked.to(device), rows.to(device)
    q, k, v = (
        part.transpose(1, 2).flatten(0, 1)[where]
        for part, where in zip(heads, (picked, rows, rows), strict=True)
    )
    start_loc, key_start_loc = (
        torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int().to(device)
        for counts in (lens, key_lens)
    )
    out[picked], _ = mha_ragged(
        q,
        k,
        v,
        start_loc,
        key_start_loc,
        scale=scale,
        causal=causal,
        max_query_len=int(lens.max()),
        max_key_len=int(key_lens.max()),
    )


def _packed_lens(B: int, S: int, positions: Tensor | None, mask: Tensor | None) -> list[int] | None:
    """Lengths of sequences packed into rows, from positions alone: a new sequence begins wherever
    the positions do not increase by one. None: each row is one sequence."""
    if mask is not None or positions is None or S == 1:
        return None
    flat = positions.expand(B, S).flatten().tolist()
    starts = [t for t in range(len(flat)) if t % S == 0 or flat[t] != flat[t - 1] + 1]
    lens = [stop - start for start, stop in pairwise([*starts, len(flat)])]
    return lens if len(lens) > B else None


def openmla_mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """Return the padding mask [B, columns] unchanged; no square mask is made."""
    begin_reading(attention_mask, kwargs.get("q_length"))
    return attention_mask


def openmla_sparse_mask(
    *args: Any, attention_mask: Tensor | None = None, device: Any = None, **kwargs: Any
) -> Tensor:
    """Return a mask of one element, as an indexer needs, with the padding mask attached."""
    begin_reading(attention_mask, kwargs.get("q_length"))
    mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)
    mask.openmla_padding = attention_mask  # type: ignore[attr-defined]
    return mask
