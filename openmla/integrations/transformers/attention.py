"""The attention and mask functions that transformers calls by the name "openmla"."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from openmla.attention import Projected, attend_step
from openmla.errors import ConfigError, UnsupportedError
from openmla.integrations.transformers.session import Attachment, new_spans
from openmla.ops import mha_ragged


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
    layer, attachment.storing = attachment.storing, None
    q = query.transpose(1, 2).reshape(B * S, H, E)
    if layer is None:
        return _without_cache(attachment, q, key, value, attention_mask), None
    session = layer.session
    if layer.steps == session.steps:
        session.begin(B, S, attention_mask)
    layer.steps = session.steps
    layer.columns += S
    cache = attachment.cache(layer.layer, query.device, query.dtype)
    plan = session.plan(cache, query.device, query.dtype)
    assert cache.latent is not None and layer.latents is not None
    cache.latent.copy_blocks(session.copies)
    kv_c, k_pe = (part.flatten(0, 1) for part in layer.latents)
    layer.latents = None
    picked = session.picked
    if picked is not None:
        picked = picked.to(query.device)
        q, kv_c, k_pe = q[picked], kv_c[picked], k_pe[picked]
    P = attachment.config.qk_nope_head_dim
    absorbed = session.absorbed(module, layer.layer, query.dtype)
    out = attend_step(Projected(q[..., :P], q[..., P:], kv_c, k_pe), absorbed, cache, plan)
    return _unpacked(out, picked, B, S), None


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
    spans = [(b * S + i, b * S + j) for b, (i, j) in enumerate(new_spans(B, S, mask, [0] * B))]
    if mask is None and attachment.positions is not None:
        spans = _packed_spans(attachment.positions.expand(B, S))
    picked = torch.cat([torch.arange(i, j) for i, j in spans]).to(q.device)
    k, v = (part.transpose(1, 2).reshape(B * S, H, -1)[picked] for part in (key, value))
    lens = [stop - start for start, stop in spans]
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


def _packed_spans(positions: Tensor) -> list[tuple[int, int]]:
    """Sequences packed into one row: a new one begins wherever positions do not go on by one."""
    flat = positions.flatten().tolist()
    S = positions.shape[1]
    starts = [t for t in range(len(flat)) if t % S == 0 or flat[t] != flat[t - 1] + 1]
    return list(zip(starts, [*starts[1:], len(flat)], strict=True))


def openmla_mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """The padding mask as it is, [B, columns]; a square mask is never made."""
    return attention_mask
