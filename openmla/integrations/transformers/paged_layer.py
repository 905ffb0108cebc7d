"""PagedLayer: one layer of past_key_values. Reordering rows moves block tables, no bytes."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from openmla.errors import ConfigError, UnsupportedError
from openmla.integrations.transformers.attachment import Attachment
from openmla.integrations.transformers.session import Session


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of past_key_values: the number of columns, and the session that holds the rows."""

    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, session: Session, layer: int) -> None:
        super().__init__()
        self.session, self.layer = session, layer
        self.columns = self.steps = 0
        self.is_initialized = True
        self.latents: tuple[Tensor, Tensor] | None = None
        self.index_keys: Tensor | None = None  # [B, S, DI]
        if session.leader is None:
            session.leader = layer

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedLayer:
        twin = PagedLayer(deepcopy(self.session, memo), self.layer)
        twin.columns, twin.steps = self.columns, self.steps
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "attach: the cache of an attached model cannot be pickled, because its rows are in the "
            "model's block pool. Save the tokens and run them again."
        )

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: caches belong to the attachment."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Hold this pass's latents for the attention function.

        The module's return value is ignored. V4's module concatenates it with its entries, so for
        V4 it is one row.
        """
        attachment = self.session.attachment
        if attachment.detached:
            raise ConfigError(
                "attach: this cache was made before detach(model) and can no longer be used. Make "
                "a new one."
            )
        current = attachment.current
        if current.awaited is not self:
            raise ConfigError(
                "attach: this cache belongs to an attached model, but it was passed to a model "
                "that is not attached. Make a new cache for that model."
            )
        self.latents = (key_states, value_states)  # [B, 1, S, C], [B, 1, S, R]
        current.awaited, current.storing = None, self
        if attachment.config.compressor is None:
            return key_states, value_states
        return key_states[:, :, :1], value_states[:, :, :1]

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Hold this pass's indexer keys too, and return one for the indexer to score."""
        self.index_keys = indexer_key_states
        return indexer_key_states[:, :1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def get_seq_length(self) -> int:
        return self.columns

    def get_max_length(self) -> int:
        return -1

    def _leads(self) -> bool:
        return self.session.leader == self.layer and bool(self.session.requests)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self._leads():
            self.session.reorder_rows(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        if self._leads():
            rows = torch.arange(len(self.session.requests))[indices.cpu()]
            self.session.reorder_rows(rows.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self._leads():
            rows = torch.arange(len(self.session.requests)).repeat_interleave(repeats)
            self.session.reorder_rows(rows.tolist())

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens. A positive number is the length to keep, an older convention."""
        given = int(tokens_to_remove)  # assisted decoding passes a tensor
        surplus = -given if given <= 0 else max(self.columns - given, 0)
        surplus = min(surplus, self.columns)
        if self._leads():
            self.session.truncate(surplus)
        self.columns -= surplus

    def reset(self) -> None:
        if self.session.leader == self.layer:
            self.session.clear()
        self.columns = 0

    def offload(self) -> None:
        raise UnsupportedError(
            "attach: offloading is not supported for the cache of an attached model."
        )


def install_layer(attachment: Attachment, layer: int, past: Cache) -> None:
    """Put a paged layer into a cache object that does not have one yet; it awaits its update."""
    layers = past.layers
    while len(layers) <= layer:
        layers.append(DynamicLayer())
    present = layers[layer]
    if isinstance(present, PagedLayer):
        if present.session.attachment is not attachment:
            raise ConfigError(
                "attach: this cache belongs to another attached model. Make a new one."
            )
        _expect_rows(attachment, present)
        return
    reads = attachment.config.kv_source(layer) != layer
    dummy = reads and type(present).__name__ == "DummyLayer"  # since transformers 5.23
    if not dummy and present.is_initialized and present.get_seq_length() > 0:
        raise ConfigError(
            f"attach: this cache has {present.get_seq_length()} tokens from before attach(). Make "
            "a new one."
        )
    # V4's own layers are windows together with a compressor's state
    windowed = attachment.config.layer(layer).sliding_window > 0
    usual = type(present) in (DynamicLayer, DynamicIndexedLayer)
    if not (usual or dummy) and not (windowed and isinstance(present, DynamicSlidingWindowLayer)):
        raise UnsupportedError(
            f"attach: caches of {type(present).__name__} are not supported. Remove "
            "cache_implementation, or pass a DynamicCache(): its rows go to a paged pool, whose "
            "size you can set with attach(num_blocks=...)."
        )
    session = next((entry.session for entry in past.layers if isinstance(entry, PagedLayer)), None)
    fresh = PagedLayer(session or Session(attachment), layer)
    past.layers[layer] = fresh
    _expect_rows(attachment, fresh)


def _expect_rows(attachment: Attachment, paged: PagedLayer) -> None:
    """Note which layer's module attends next. It stores rows first, if they are its own."""
    if attachment.config.kv_source(paged.layer) == paged.layer:
        attachment.current.awaited = paged
    else:
        attachment.current.storing = paged
