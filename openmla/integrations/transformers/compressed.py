"""DeepSeek V4 in transformers: uses the compressors' projections, not their pooling and caches.

An attention module projects, normalizes, rotates, hands its raw rows to the cache and gets entries
from its compressor. attach() shadows the compressor's forward on the instance: it keeps the inputs
of the pooling for the attention function and returns no entries. The module then calls that
function, rotates its output back and projects it, as before.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from openmla.attention import CompressedInputs, IndexInputs, PoolInputs, attend_compressed
from openmla.errors import ShapeError
from openmla.integrations.transformers.offload import brought_in
from openmla.ops import rope

if TYPE_CHECKING:
    from openmla.integrations.transformers.attachment import Attachment
    from openmla.integrations.transformers.paged_layer import PagedLayer


class Compressible(NamedTuple):
    """What one layer's compressor computed in the current pass, for all columns of the batch."""

    pool_inputs: PoolInputs
    index_pool_inputs: PoolInputs | None = None
    index_query: Tensor | None = None  # [B * S, HI, DI], before rope
    index_weights: Tensor | None = None  # [B * S, HI]

    def picked(self, rows: Tensor) -> Compressible:
        """Select the tokens that are not padding."""

        def pick(part: PoolInputs | None) -> PoolInputs | None:
            return part and part._replace(kv=part.kv[rows], score=part.score[rows])

        pool_inputs = pick(self.pool_inputs)
        assert pool_inputs is not None
        query, weights = self.index_query, self.index_weights
        return Compressible(
            pool_inputs,
            pick(self.index_pool_inputs),
            query if query is None else query[rows],
            weights if weights is None else weights[rows],
        )


@dataclass(eq=False)
class CompressorStandIn:
    """Replaces a compressor's forward: computes the same projections and returns no entries."""

    attachment: Attachment
    compressor: nn.Module
    before: Any = None  # a forward that was already set on the instance

    def __post_init__(self) -> None:
        self.before = vars(self.compressor).get("forward")
        self.compressor.forward = self

    def __call__(
        self, hidden_states: Tensor, q_residual: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        hidden = hidden_states.flatten(0, 1)
        pool_inputs = _projected(self.compressor, hidden)
        indexer = getattr(self.compressor, "indexer", None)
        if indexer is None:
            self.attachment.current.compressible = Compressible(pool_inputs)
        else:
            config = self.attachment.config.indexer
            assert config is not None
            query = indexer.q_b_proj(q_residual.flatten(0, 1))
            self.attachment.current.compressible = Compressible(
                pool_inputs,
                _projected(indexer, hidden),
                query.view(-1, config.num_heads, config.head_dim),
                indexer.scorer.weights_proj(hidden),
            )
        nothing = hidden_states.new_zeros((hidden_states.shape[0], 1, 0, self._width()))
        return nothing, None

    def _width(self) -> int:
        return self.attachment.config.latent_dim

    def remove(self) -> None:
        if self.before is None:
            del self.compressor.forward
        else:
            self.compressor.forward = self.before


def _projected(compressor: Any, hidden: Tensor) -> PoolInputs:
    kv, score = compressor.kv_proj(hidden), compressor.gate_proj(hidden)
    with brought_in(compressor, compressor.kv_norm):
        return PoolInputs(kv, score, compressor.position_bias, compressor.kv_norm.weight)


def attend_v4(
    layer: PagedLayer,
    query: Tensor,  # [B, H, S, D], rotated
    sink: Tensor,  # [H]
) -> Tensor:  # [T, H, D], without padding tokens
    """Run one layer's step: rows, entries and attention over the session's caches."""
    session = layer.session
    attachment = session.attachment
    cache = attachment.cache(layer.layer, query.device, query.dtype)
    plan = session.plan(layer.layer, cache, query.device, query.dtype)
    assert plan.shared is not None and layer.latents is not None
    config = plan.config
    assert config.compressor is not None
    B, H, S, D = query.shape
    q = query.transpose(1, 2).reshape(B * S, H, D)
    raw = layer.latents[0].flatten(0, 2)
    layer.latents = None
    current = attachment.current
    inputs, current.compressible = current.compressible, None
    picked = session.picked_on(query.device)
    if picked is not None:
        q, raw = q[picked], raw[picked]
        inputs = inputs and inputs.picked(picked)
    if attachment.measured:
        attachment.measured[layer.layer].see("q", q)
    R, table, index = config.qk_rope_head_dim, None, None
    if cache.ratio:  # the module itself rotates queries and raw rows
        table = attachment.table(query.device)
    if inputs is not None and inputs.index_query is not None and plan.chooses:
        assert table is not None
        assert inputs.index_weights is not None and config.indexer is not None
        HI, DI = config.indexer.num_heads, config.indexer.head_dim
        q_idx = inputs.index_query
        turned = q_idx[:, :, DI - R :]
        positions, backend = plan.shared.positions, plan.backend("rope")
        rope(turned, positions, table, pairing="pairs", backend=backend)
        wide = torch.promote_types(q_idx.dtype, torch.float32)
        weights = inputs.index_weights.to(wide) * (HI**-0.5 * DI**-0.5)
        index = IndexInputs(q_idx, weights, None)
    given = CompressedInputs(
        q,
        raw,
        table=table,
        pool_inputs=inputs and inputs.pool_inputs,
        index=index,
        index_pool_inputs=inputs and inputs.index_pool_inputs,
    )
    out = attend_compressed(cache=cache, plan=plan, sink=sink.float(), **vars(given))
    attachment.tell(layer.layer, q, raw, cache, plan, index, None, out)
    return out


def with_positions(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Add positions to a padded batch without them: V4 counts a sequence's own tokens."""
    mask = kwargs.get("attention_mask")
    if kwargs.get("position_ids") is not None or not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    ids, embeds = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
    given = embeds if ids is None else ids
    if given is None:
        return None
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -given.shape[1] :]
    return args, {**kwargs, "position_ids": positions}


def check_positions(
    positions: Tensor | None,
    new: list[list[tuple[bool, int]]],
    lens: list[int],
    late: Collection[int],
) -> None:
    """Check that positions count the tokens of each sequence, unless that would be slow.

    `new` has the runs of each row's new columns (is a token, how many), `lens` the tokens before,
    and `late` the rows whose prompt was padding only: generate() counts those from 1.
    """
    if positions is None or (positions.device.type != "cpu" and positions.shape[-1] == 1):
        return
    rows = positions.expand(len(new), positions.shape[-1]).tolist()
    for b, before in enumerate(lens):
        tokens = [is_token for is_token, length in new[b] for _ in range(length)]
        given = list(compress(rows[b], tokens))
        first = before + (b in late)
        if given != list(range(first, first + len(given))):
            raise ShapeError(
                f"attach: position_ids must count the tokens of each sequence for deepseek_v4, and "
                f"row {b} continues at {before} with {len(given)} tokens, got {given[:4]}."
            )
