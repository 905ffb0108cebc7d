"""Another engine: its own rope, pages and softmax inside a transformers model, and its mistakes.

Shares no code with openmla.bisect: what it dumps is what it computed on its way.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from openmla.bisect import Dump, Settings

BLOCK = 8
FP8 = torch.float8_e4m3fn


class Engine:
    """Runs the attention of a dense or sparse model, one prompt; `fault` happens in `layer`."""

    def __init__(
        self,
        model: Any,
        *,
        fault: str = "",
        layer: int = 1,
        fp8: bool = False,
        latent: bool = False,
    ) -> None:
        self.model, self.fault, self.layer, self.fp8, self.latent = model, fault, layer, fp8, latent
        self.seen: dict[str, Tensor] = {}
        config = model.config
        self.P, self.R, self.C = (
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
            config.kv_lora_rank,
        )
        self.K: int | None = getattr(config, "index_topk", None)

    def dump(self, tokens: Tensor) -> Dump:
        """A pass over the tokens, with this engine in the place of every attention module."""
        modules = [layer.self_attn for layer in self.model.model.layers]
        for module in modules:
            module.forward = self._forward_of(module)
        try:
            self.logits = self.model(tokens[None], use_cache=False).logits
        finally:
            for module in modules:
                del module.forward
        self.seen["tokens"] = tokens
        settings = Settings(
            model_type=self.model.config.model_type,
            cache_format="fp8" if self.fp8 else "",
            block_size=str(BLOCK),
        )
        return Dump(self.seen, settings)

    def _forward_of(self, module: Any) -> Any:
        def forward(hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
            wrong = self.fault if module.layer_idx == self.layer else ""
            return self._attend(module, hidden_states[0], wrong)[None], None

        return forward

    def _attend(self, module: Any, hidden: Tensor, wrong: str) -> Tensor:
        keep = {"hidden_in": hidden}
        T, P, C = len(hidden), self.P, self.C
        q_a = keep["q_a"] = module.q_a_proj(hidden)
        q_resid = keep["q_a_normed"] = module.q_a_layernorm(q_a)
        q = keep["q"] = module.q_b_proj(q_resid).view(T, -1, P + self.R)
        kv_a = keep["kv_a"] = module.kv_a_proj_with_mqa(hidden)
        kv_c = keep["kv_c"] = module.kv_a_layernorm(kv_a[:, :C])
        first = 1 if wrong == "rope off by one position" else 0
        halves = wrong == "rope pairing swapped"
        q_pe = keep["q_pe"] = self._turn(q[..., P:], first, halves)
        k_pe = keep["k_pe"] = self._turn(kv_a[:, None, C:], first, halves)[:, 0]
        rows = torch.cat([kv_c, k_pe], dim=-1)
        rows = self._through_cache(rows, keep, wrong)
        seen = torch.ones(T, T, dtype=torch.bool).tril()
        if wrong == "row start off by one":
            seen[:, 0] = False
        if self.K is not None:
            seen &= self._choose(module.indexer, hidden, q_resid, keep, wrong)
        out = self._softmax(module, q[..., :P], q_pe, rows, seen, keep, wrong)
        keep["out"] = out
        output = keep["output"] = module.o_proj(out.flatten(1))
        self.seen.update({f"layers.{module.layer_idx}.{k}": v for k, v in keep.items()})
        return output

    def _turn(self, x: Tensor, first: int, halves: bool) -> Tensor:
        """Complex numbers times e^(i angle), in float32."""
        rotary = self.model.model.rotary_emb
        places = torch.arange(first, first + len(x), dtype=torch.float32)
        angles = torch.outer(places, rotary.inv_freq.float())[:, None]
        turn = torch.polar(torch.full_like(angles, rotary.attention_scaling), angles)
        if halves:
            a, b = x.float().chunk(2, dim=-1)
            turned = torch.complex(a, b) * turn
            return torch.cat([turned.real, turned.imag], dim=-1).to(x.dtype)
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)

    def _through_cache(self, rows: Tensor, keep: dict[str, Tensor], wrong: str) -> Tensor:
        """Written to blocks in an order of their own, read through the table."""
        T, width = rows.shape
        blocks = -(-T // BLOCK)
        table = torch.arange(blocks).flip(0)
        pages = rows.new_zeros((blocks, BLOCK, width))
        scale = 2.0 * float(rows.abs().max()) / 448
        stored = (rows.float() / scale).to(FP8) if self.fp8 else rows
        if self.fp8:
            pages = pages.to(FP8)
        for t in range(T):
            pages[table[t // BLOCK], t % BLOCK] = stored[t]
        if wrong == "one wrong block in a block table":
            table[2] = table[4]
        if wrong == "fp8 scale wrong":
            scale *= 1.25
        found = torch.stack([pages[table[t // BLOCK], t % BLOCK] for t in range(T)])
        if wrong != "one wrong block in a block table" or self.fp8:
            keep["cache"] = found
        else:  # an engine whose dump reads the cache by another table than its kernel
            keep["cache"] = rows
        if self.fp8:
            keep["kv_scale"] = torch.tensor(scale)
        return (found.float() * scale).to(rows.dtype) if self.fp8 else found

    def _choose(
        self, indexer: Any, hidden: Tensor, q_resid: Tensor, keep: dict[str, Tensor], wrong: str
    ) -> Tensor:
        T, R, K = len(hidden), self.R, self.K
        assert K is not None
        q = keep["index_q"] = indexer.wq_b(q_resid).view(T, indexer.n_heads, -1)
        k = keep["index_k"] = indexer.wk(hidden)
        k = keep["index_k_normed"] = indexer.k_norm(k)
        q = torch.cat([self._turn(q[..., :R], 0, True), q[..., R:]], dim=-1)
        if wrong != "index keys not rotated":
            turned = self._turn(k[:, None, :R], 0, True)[:, 0]
            k = torch.cat([turned, k[:, R:]], dim=-1)
        keep["index_q_rotated"], keep["index_k_rotated"] = q, k
        weights = keep["index_weights"] = indexer.weights_proj(hidden)
        products = torch.einsum("thd,sd->ths", q.float(), k.float()).relu()
        scale = indexer.n_heads**-0.5 * indexer.head_dim**-0.5
        scores = torch.einsum("ths,th->ts", products, weights.float()) * scale
        keep["index_scores"] = scores
        hidden_keys = torch.ones(T, T, dtype=torch.bool).triu(1)
        best = scores.masked_fill(hidden_keys, -math.inf).topk(min(K, T), dim=1).indices
        if wrong == "index rows start off by one":
            best = best + 1
        own = torch.arange(T)[:, None]
        chosen = keep["chosen"] = best.masked_fill(best > own, -1).int()
        picked = torch.zeros(T, T + 1, dtype=torch.bool)
        return picked.scatter_(1, chosen.long().masked_fill(chosen < 0, T), True)[:, :T]

    def _softmax(
        self,
        module: Any,
        q_nope: Tensor,
        q_pe: Tensor,
        rows: Tensor,
        seen: Tensor,
        keep: dict[str, Tensor],
        wrong: str,
    ) -> Tensor:
        C, P, dtype = self.C, self.P, rows.dtype
        scale = 1.0 if wrong == "softmax scale forgotten" else module.scaling
        kv_b = module.kv_b_proj.weight.view(q_nope.shape[1], -1, C)
        latent = torch.einsum("thp,hpc->thc", q_nope.float(), kv_b[:, :P].float()).to(dtype)
        q = torch.cat([latent, q_pe], dim=-1).float()
        logits = torch.einsum("thd,sd->ths", q, rows.float()) * scale
        logits = logits.masked_fill(~seen[:, None], -math.inf)
        lse = logits.logsumexp(-1)
        probs = logits.softmax(-1).nan_to_num(0.0).to(dtype)
        out = torch.einsum("ths,sc->thc", probs.float(), rows[:, :C].float()).to(dtype)
        keep["lse"] = lse / math.log(2) if wrong == "lse in base 2" else lse
        if self.latent:
            keep["out_latent"] = out
        return torch.einsum("thc,hvc->thv", out.float(), kv_b[:, P:].float()).to(dtype)
