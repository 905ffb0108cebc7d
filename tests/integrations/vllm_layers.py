"""Layers of the plugin with the tensors that vLLM gives them, and plain attention to compare with.

vLLM's types are stood in for (vllm_stand_ins.py), and must be installed before an Engine is made.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import openmla
from tests.integrations import vllm_stand_ins as stand_ins

BLOCKS, BLOCK_SIZE, MAX_BLOCKS = 40, 16, 8
H, P, R, V = 4, 32, 16, 24


class Engine:
    """Layers with vLLM's tensors, requests with their blocks, and what they should attend to."""

    def __init__(
        self, device: str, *, kv: str = "auto", C: int = 64, rope: int = R, heads: int = H,
        interleaved: bool = False, dtype: torch.dtype = torch.float32, **asked: Any,
    ) -> None:  # fmt: skip
        from openmla.integrations.vllm.builder import OpenMLABuilder
        from openmla.integrations.vllm.layer import OpenMLAImpl

        torch.manual_seed(0)
        self.device, self.dtype, self.C, self.R, self.heads = device, dtype, C, rope, heads
        self.config = stand_ins.CONFIG[0] = stand_ins.config(dtype=dtype, **asked)
        format = {"auto": str(dtype).removeprefix("torch."), "fp8": "fp8"}.get(kv, kv)
        layout = openmla.FORMATS[{"float32": "fp32", "bfloat16": "bf16"}.get(format, format)]
        stored = torch.uint8 if kv != "auto" else layout.dtype
        width = layout.width(C + rope)
        shape = (BLOCKS, 2, BLOCK_SIZE, width) if interleaved else (2, BLOCKS, BLOCK_SIZE, width)
        self.memory = torch.zeros(shape, dtype=stored, device=device)
        caches = self.memory.unbind(1 if interleaved else 0)
        kv_b = (torch.randn(heads * (P + V), C) / C**0.5).to(device, dtype)
        w_uk, w_uv = kv_b.view(heads, P + V, C).split([P, V], 1)
        self.w_uk, self.w_uv = w_uk, w_uv.transpose(1, 2)
        self.scale = 1.3 * (P + rope) ** -0.5
        self.layers = []
        for name, cache in enumerate(caches):
            layer = stand_ins.Layer(
                heads, C, P, rope, V, self.scale, self.w_uk, self.w_uv, cache,
                layer_name=str(name), _k_scale=torch.tensor(0.05 if kv == "fp8" else 1.0),
            )  # fmt: skip
            layer.impl = OpenMLAImpl(
                heads, C + rope, self.scale, 1, None, None, kv, None, "decoder", None,
                qk_nope_head_dim=P, v_head_dim=V,
            )  # fmt: skip
            self.layers.append(layer)
            self.config.compilation_config.static_forward_context[str(name)] = layer
        for layer in self.layers:
            layer.impl.process_weights_after_loading(dtype)
        self.builder = OpenMLABuilder(None, ["0", "1"], self.config, torch.device(device))
        self.free = list(range(1, BLOCKS))  # 0 is vLLM's null block
        # vLLM writes every step into the same tensors, which its graphs read
        self.fixed = {
            "query_start_loc": torch.zeros(9, dtype=torch.int32, device=device),
            "seq_lens": torch.zeros(8, dtype=torch.int32, device=device),
            "block_table": torch.zeros(8, MAX_BLOCKS, dtype=torch.int32, device=device),
            "slot_mapping": torch.zeros(128, dtype=torch.int64, device=device),
        }
        self.blocks: dict[str, list[int]] = {}
        self.rows: dict[str, Tensor] = {}  # [S, C + R], as they were given

    def common(self, wanted: dict[str, int], requests: int, tokens: int) -> Any:
        """The step's metadata, filled up to a graph's size as vLLM does."""
        query_lens = [*wanted.values(), *[0] * (requests - len(wanted))]
        slots = []
        table = torch.zeros(requests, MAX_BLOCKS, dtype=torch.int32)
        lens = [0] * requests
        for b, (name, n) in enumerate(wanted.items()):
            start = len(self.rows.get(name, ()))
            blocks = self.blocks.setdefault(name, [])
            while len(blocks) * BLOCK_SIZE < start + n:
                blocks.append(self.free.pop(5 % len(self.free)))
            table[b, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
            slots += [
                blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
                for p in range(start, start + n)
            ]
            lens[b] = start + n
        slots += [-1] * (tokens - len(slots))
        starts = torch.tensor([0, *query_lens]).cumsum(0).int()
        seq_lens = torch.tensor(lens, dtype=torch.int32)
        stale = seq_lens.clone()
        stale[len(wanted) :] = 999  # of requests that are gone
        on_device = []
        for name, value in zip(
            self.fixed, (starts, seq_lens, table, torch.tensor(slots)), strict=True
        ):
            on_device.append(self.fixed[name][: len(value)])
            on_device[-1].copy_(value)
        return stand_ins.CommonAttentionMetadata(
            on_device[0], starts, on_device[1], stale, requests, tokens, max(query_lens), max(lens),
            *on_device[2:],
        )  # fmt: skip

    def inputs(self, tokens: int) -> tuple[Tensor, Tensor]:
        q = torch.randn(tokens, self.heads, P + self.R).to(self.device, self.dtype)
        return q, torch.randn(tokens, self.C + self.R).to(self.device, self.dtype)

    def attend(
        self, metadata: Any, q: Tensor, rows: Tensor, out: Tensor, layer: int = 0,
        captured: bool = False, output_scale: Tensor | None = None,
    ) -> None:  # fmt: skip
        """vLLM's op. `captured`: with the arguments of a capture, in which there was no step."""
        kv_c, k_pe = rows.split([self.C, self.R], 1)
        impl = self.layers[layer].impl
        cache, scale = self.layers[layer].kv_cache, self.layers[layer]._k_scale
        stand_ins.CONTEXT[0] = SimpleNamespace(
            attn_metadata=dict.fromkeys("01", metadata),
            no_compile_layers=dict(zip("01", self.layers, strict=True)),
        )
        impl.do_kv_cache_update(kv_c, k_pe.unsqueeze(1), cache, None, "auto", scale)
        self.layers[layer].forward_impl(
            q, kv_c, k_pe.unsqueeze(1), cache, None if captured else metadata, output=out,
            output_scale=output_scale,
        )  # fmt: skip

    def step(self, wanted: dict[str, int], requests: int = 0, tokens: int = 0) -> Tensor:
        """One layer's step, checked; returns what it attended to."""
        tokens = tokens or sum(wanted.values())
        metadata = self.builder.build(0, self.common(wanted, requests or len(wanted), tokens))
        q, rows = self.inputs(tokens)
        out = torch.full((tokens, self.heads * V), torch.nan, device=self.device, dtype=self.dtype)
        self.attend(metadata, q, rows, out)
        self.check(wanted, q, rows, out)
        return out

    def check(self, wanted: dict[str, int], q: Tensor, rows: Tensor, out: Tensor) -> None:
        lossy = self.memory.dtype == torch.uint8 or self.dtype != torch.float32
        tolerance = 6e-2 if lossy else 2e-5
        at = 0
        for name, n in wanted.items():
            known = self.rows.get(name, rows[:0])
            self.rows[name] = torch.cat([known, rows[at : at + n]])
            expected = self.plain(q[at : at + n], self.rows[name])
            torch.testing.assert_close(
                out[at : at + n].double(), expected, rtol=tolerance, atol=tolerance
            )
            at += n
        assert not out[at:].any()

    def plain(self, q: Tensor, rows: Tensor) -> Tensor:
        """Every head's keys and values, causal, in float64."""
        q, rows = q.double(), rows.double()
        kv_c, k_pe = rows.split([self.C, self.R], 1)
        keys = torch.einsum("sc,hpc->hsp", kv_c, self.w_uk.double())
        keys = torch.cat([keys, k_pe.expand(self.heads, -1, -1)], -1)
        values = torch.einsum("sc,hcv->hsv", kv_c, self.w_uv.double())
        scores = torch.einsum("thd,hsd->hts", q, keys) * self.scale
        n, S = len(q), len(rows)
        hidden = torch.ones(n, S, dtype=torch.bool, device=q.device).triu(S - n + 1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hts,hsv->thv", weights, values).flatten(1)


class SparseEngine(Engine):
    """One layer whose tokens attend to the 32 keys that vLLM's indexer, with our class, chooses."""

    def __init__(self, device: str, **asked: Any) -> None:
        from openmla.integrations.vllm import models
        from openmla.integrations.vllm.layer import OpenMLAImpl

        options = {"openmla": {"index_format": "index_fp32"}}
        super().__init__(device, additional_config=options, **asked)
        self.indexer = models.DeepseekV32ForCausalLM(vllm_config=self.config).indexer.to(device)
        self.indexer.layer_name = "0"
        self.indexer.topk_indices_buffer = self.indexer.topk_indices_buffer.to(device)
        self.indexer.k_cache.kv_cache = torch.zeros(BLOCKS, BLOCK_SIZE, 128, device=device)
        layer = self.layers[0]
        layer.use_sparse, layer.indexer = True, self.indexer
        layer.impl = OpenMLAImpl(
            self.heads, 80, self.scale, 1, None, None, "auto", None, "decoder", None,
            qk_nope_head_dim=P, v_head_dim=V, topk_indices_buffer=self.indexer.topk_indices_buffer,
        )  # fmt: skip
        layer.impl.process_weights_after_loading(torch.float32)
        self.builder = type(self.builder)(None, ["0"], self.config, torch.device(device))
        self.keys = torch.zeros(0, 128, dtype=torch.float64, device=device)

    def forward(
        self, metadata: Any, hidden: Tensor, low: Tensor, q: Tensor, rows: Tensor, out: Tensor,
        captured: bool = False,
    ) -> None:  # fmt: skip
        """What vLLM's layer does: its indexer, then its attention."""
        stand_ins.CONTEXT[0] = SimpleNamespace(
            attn_metadata={"0": metadata}, no_compile_layers={"0": self.layers[0]}
        )
        self.indexer(hidden, low, None, lambda positions, q, k: (q, k))
        self.attend(metadata, q, rows, out, captured=captured)

    def check_last(self, hidden: Tensor, low: Tensor, q: Tensor, rows: Tensor, out: Tensor) -> None:
        """The last of one request's tokens, which sees all keys and chooses among them."""
        k, w = self.indexer.wk_weights_proj(hidden)[0].double().split([128, 4], -1)
        self.keys = torch.cat([self.keys, torch.nn.functional.layer_norm(k, (128,), eps=1e-6)])
        self.rows["a"] = torch.cat([self.rows.get("a", rows[:0]), rows])
        q_idx = self.indexer.wq_b(low[-1:])[0].double().view(4, 128)
        scores = (q_idx @ self.keys.T).relu().T @ w[-1]
        chosen = scores.topk(32).indices.sort().values
        expected = self.plain(q[-1:], self.rows["a"][chosen])
        assert len(self.keys) > 32
        torch.testing.assert_close(out[-1:].double(), expected, rtol=2e-4, atol=2e-4)
