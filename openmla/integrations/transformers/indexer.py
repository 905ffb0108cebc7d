"""Lightning indexers of transformers' sparse models: uses their projections, not their scoring.

An indexer module projects, normalizes and rotates as before. Its query and weights are captured
from the linears that make them, and its keys from the cache it hands them to. It then scores a
single key, which costs nothing and is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from openmla.attention import IndexInputs
from openmla.errors import UnsupportedError

if TYPE_CHECKING:
    from openmla.integrations.transformers.attachment import Attachment


@dataclass
class IndexerWatch:
    """Keeps what one indexer module computes in the current pass."""

    attachment: Attachment
    layer: int
    before: Any = None
    followed: dict[str, tuple[nn.Module, Any]] = field(default_factory=dict)

    def hook(self, indexer: nn.Module) -> None:
        """Watch an indexer until remove()."""
        self.before = indexer.register_forward_pre_hook(self._before, with_kwargs=True)
        self._follow(indexer)

    def remove(self) -> None:
        self.before.remove()
        for _, handle in self.followed.values():
            handle.remove()

    def _follow(self, indexer: nn.Module) -> None:
        """Hook the modules that make query and weights, again if an adapter has replaced one."""
        query = "softmax_scaling" if self.attachment.config.layer(self.layer).log_scale else "wq_b"
        for name, keep in ((query, self._keep_query), ("weights_proj", self._keep_weights)):
            linear = getattr(indexer, name)
            known = self.followed.get(name)
            if known is not None and known[0] is linear:
                continue
            with self.attachment.lock:  # only one thread may hook it
                known = self.followed.get(name)
                if known is None or known[0] is not linear:
                    if known is not None:
                        known[1].remove()
                    self.followed[name] = (linear, linear.register_forward_hook(keep))

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._follow(module)
        indexer = self.attachment.config.layer(self.layer).indexer
        assert indexer is not None
        place = 1 if indexer.own_query else 2  # without the low-rank query before it
        rotation = args[place] if len(args) > place else kwargs["position_embeddings"]
        self.attachment.current.index_rotation = rotation

    def _keep_query(self, module: nn.Module, args: Any, out: Tensor) -> None:
        self.attachment.current.index_query = out

    def _keep_weights(self, module: nn.Module, args: Any, out: Tensor) -> None:
        self.attachment.current.index_weights = out

    def take(self, k_idx: Tensor, picked: Tensor | None) -> IndexInputs:
        """This pass's inputs, with tokens packed; k_idx [B, S, DI] is rotated already."""
        indexer = self.attachment.config.layer(self.layer).indexer
        current = self.attachment.current
        assert indexer is not None
        rotation, query = current.index_rotation, current.index_query
        weights = current.index_weights
        if rotation is None or query is None or weights is None:
            raise UnsupportedError(
                "attach: this version of transformers calls the indexer in another way than the "
                "supported versions, 5.17 to 5.23. Install one of these."
            )
        HI, DI = indexer.num_heads, indexer.head_dim
        q_idx = self._rotated(query.view(*query.shape[:2], HI, DI), rotation).flatten(0, 1)
        wide = torch.promote_types(q_idx.dtype, torch.float32)
        w_idx = weights.flatten(0, 1).to(wide) * (HI**-0.5 * DI**-0.5)
        keys = k_idx.flatten(0, 1)
        current.index_rotation = current.index_query = current.index_weights = None
        if picked is not None:
            q_idx, w_idx, keys = q_idx[picked], w_idx[picked], keys[picked]
        return IndexInputs(q_idx, w_idx, keys)

    def _rotated(self, q: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate like transformers rotates its keys: pairs end up first members first."""
        config = self.attachment.config.layer(self.layer)
        indexer, R = config.indexer, config.qk_rope_head_dim
        assert indexer is not None
        if R == 0:
            return q
        cos, sin = (part.unsqueeze(2) for part in rotation)
        if indexer.rope_side == "first":
            turned, rest = q[..., :R], q[..., R:]
        else:
            rest, turned = q[..., :-R], q[..., -R:]
        if indexer.pairing == "pairs":
            turned = torch.cat([turned[..., 0::2], turned[..., 1::2]], dim=-1)
        first, second = turned.chunk(2, dim=-1)
        turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
        parts = [turned, rest] if indexer.rope_side == "first" else [rest, turned]
        return torch.cat(parts, dim=-1)


def keep_latents(kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces a module's expand_kv: latents go to the cache unexpanded."""
    return kv_nope, k_rot
