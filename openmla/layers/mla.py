"""MLAAttention: the attention layer of every MLA model except DeepSeek V4."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from openmla.attention import (
    AbsorbedWeights,
    Projected,
    RawProjections,
    Selection,
    attend_step,
    check_inputs,
    select_step,
)
from openmla.attention.quantized import quantize_into
from openmla.attention.write import read_rows, rotate
from openmla.cache import LayerCache, LayerScales
from openmla.cache.scales import kind_in_layer
from openmla.config import MLAConfig, check_layer_number
from openmla.config.families import FAMILIES
from openmla.errors import ConfigError, ShapeError, UnsupportedError, check_kind
from openmla.layers.eight_bits import (
    absorb_eight_bits,
    check_absorbed_format,
    expands_better,
    keep_eight_bits,
    largest_error,
)
from openmla.layers.indexer import Indexer
from openmla.layers.linear import apply_linear
from openmla.layers.log_scale import LogScale
from openmla.layers.norm import GatedNorm, RMSNorm, latent_norm
from openmla.layers.output_proj import check_taken, output_buffers, output_format, project_output
from openmla.layers.rope import RopeTable
from openmla.layers.weights import (
    absorb,
    decode_weight,
    expands_itself,
    is_plain,
    refuse_unabsorbable,
)
from openmla.plan import Plan

EXPAND_BY = ("auto", "linear", "copy")


def _into_place(kept: Tensor | None, fresh: Tensor) -> Tensor:
    """Copy fresh values over the old ones if they fit: captured graphs read that address."""
    if kept is None or kept.shape != fresh.shape or kept.dtype != fresh.dtype:
        return fresh
    with torch.inference_mode():  # the old tensor may be an inference tensor
        return kept.copy_(fresh)


def _linear(width: int, out: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(width, out, bias=bias).requires_grad_(False)


def _rename_gate(layer: MLAAttention, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Load GigaChat 3.5's gate_proj as g_proj, as it is called in other checkpoints."""
    name = f"{prefix}gate_proj.weight"
    if layer.g_proj is not None and name in state:
        state[f"{prefix}g_proj.weight"] = state.pop(name)


def _take_scales(layer: MLAAttention, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Remove cache scales, which are not parameters, from a state dict before it is checked."""
    found = {}
    for name in [name for name in state if name.startswith(prefix)]:
        kind = kind_in_layer(name.removeprefix(prefix))
        if kind is not None:
            found[kind] = state.pop(name)
    if found:
        layer.scales = LayerScales.of(found)


def check_tokens(
    where: str,
    hidden: Tensor,
    positions: Tensor,
    cache: LayerCache,
    plan: Plan,
    config: MLAConfig,
    weight: Tensor,
) -> None:
    """Raise unless the tokens fit the plan and the layer, which `weight` is a weight of."""
    if isinstance(cache, Plan) and isinstance(plan, LayerCache):
        raise ConfigError(
            f"{where}: cache and plan are swapped, got a Plan as cache. Pass (hidden, positions, "
            "cache, plan)."
        )
    check_kind(where, "cache", cache, LayerCache)
    check_kind(where, "plan", plan, Plan)
    T, width = plan.num_tokens, config.hidden_size
    for name, given in (("hidden", hidden), ("positions", positions)):
        if not isinstance(given, Tensor):
            raise ShapeError(f"{where}: {name} must be a tensor, got {type(given).__name__}.")
    if plan.config is not config and plan.config != config:
        raise ShapeError(
            f"{where}: plan must be made for this layer's config, got one for {plan.config}. Call "
            "make_plan(batch, layer.config, cache)."
        )
    for name, given, letters, shape in (
        ("hidden", hidden, "[T, hidden_size]", (T, width)),
        ("positions", positions, "[T]", (T,)),
    ):
        if given.shape != shape:
            raise ShapeError(
                f"{where}: {name} must be {letters} = {shape} for this plan, "
                f"got {tuple(given.shape)}."
            )
    if hidden.dtype != weight.dtype:
        raise ShapeError(
            f"{where}: hidden must be {weight.dtype} like the layer, got {hidden.dtype}. "
            "Convert one of them."
        )
    if positions.dtype != torch.int64:
        raise ShapeError(f"{where}: positions must be torch.int64, got {positions.dtype}.")
    device = plan.slot_mapping.device
    for name, given in (
        ("hidden", hidden),
        ("positions", positions),
        ("the layer", weight),
        *(("cache", part.data) for part in cache.parts[:1]),
    ):
        if given.device != device:
            raise ShapeError(
                f"{where}: {name} must be on {device} like the plan, got {given.device}. Call "
                ".to(), or plan with the cache of that device."
            )


class MLAAttention(nn.Module):
    """An MLA attention layer for inference, with the parameter names of Hugging Face checkpoints.

    No parameter requires grad. Load weights with load_state_dict(). You can replace kv_b_proj by a
    quantized linear: then call refresh_weights(), as after any other change of its weight.
    Attention multiplies by a decoded copy of it, of `copied_bytes`. Prefill calls the linear itself
    where that is cheaper; set `expand_by` to "linear" or "copy" to override that. Scales in a
    checkpoint are loaded into `scales`, for allocate_cache(format="fp8", kv_scale=layer.scales).

    Args:
        config: the model's dimensions. The layer's `config` is config.layer(layer).
        layer: number of the layer in the model. It decides the kind of layer, if there are several,
            and whether a sparse layer has an indexer, or shares the selection of an earlier layer.
        hadamard: whether the indexer rotates queries and keys by a Hadamard matrix. Read a cache
            the way it was written.
        rope_table: the RopeTable of another layer, to share its memory. Models with learned RoPE
            frequencies need RopeTable(config.rope, R, config.max_positions, alpha=...).
        absorbed_format: "fp8" multiplies absorbed tokens by w_uk and w_uv in e4m3. They are the
            weights of an fp8 kv_b_proj, or a copy with one scale per head, whose relative error is
            `absorbed_error`.

    Raises:
        ConfigError: the config has no hidden_size, or the layer number is not valid.
        UnsupportedError: the model needs MLAAttentionV4 or attach().

    ```python
    import openmla, torch

    config = openmla.PRESETS["tiny-v3"]
    layer = openmla.MLAAttention(config)
    cache = openmla.allocate_cache(config, num_blocks=8, block_size=16, format="fp32")
    pool = openmla.BlockPool(num_blocks=8, block_size=16)
    pool.take({"a": 20})
    table, slots = pool.block_table(["a"]), pool.slot_mapping([("a", 0, 20)])
    plan = openmla.make_plan(openmla.Batch([20], [20], table, slots), config, cache)
    with torch.inference_mode():
        out = layer(torch.randn(20, config.hidden_size), torch.arange(20), cache, plan)
    assert out.shape == (20, config.hidden_size)
    ```
    """

    def __init__(
        self,
        config: MLAConfig,
        *,
        layer: int = 0,
        hadamard: bool = False,
        rope_table: RopeTable | None = None,
        absorbed_format: str | None = None,
    ) -> None:
        super().__init__()
        check_absorbed_format("MLAAttention", absorbed_format)
        config.check_layer("MLAAttention")
        check_layer_number(layer)
        config = config.layer(layer)
        if config.compressor is not None:
            raise UnsupportedError(
                f"MLAAttention: {config.model_type} has a compressor. Use MLAAttentionV4."
            )
        family = FAMILIES.get(config.model_type)
        if family is not None and family.unknown_gate:
            raise UnsupportedError(
                f"MLAAttention: the output gate of {config.model_type} is not supported. Use "
                "attach()."
            )
        self.config = config
        self.indexer: Indexer | None = None
        if config.indexer is not None and not config.indexer.is_shared(layer):
            self.indexer = Indexer(config, hadamard=hadamard)
        hidden, H, E = config.hidden_size, config.num_heads, config.qk_head_dim
        C, R, bias = config.kv_lora_rank, config.qk_rope_head_dim, config.attention_bias
        if config.q_lora_rank is None:
            self.q_proj = _linear(hidden, H * E)
        else:
            self.q_a_proj = _linear(hidden, config.q_lora_rank, bias)
            self.q_a_layernorm = latent_norm(
                config.q_lora_rank, config.latent_eps, config.norm_gate
            )
            self.q_b_proj = _linear(config.q_lora_rank, H * E)
        self.reads = config.kv_source(layer)
        self.kv_a_proj_with_mqa: nn.Module | None = None
        self.kv_a_layernorm: RMSNorm | GatedNorm | None = None
        if self.reads == layer:
            self.kv_a_proj_with_mqa = _linear(hidden, C + R, bias)
            self.kv_a_layernorm = latent_norm(C, config.latent_eps, config.norm_gate)
        # Cast and moved with the layer, for one that has no norm.
        self.register_buffer("empty", torch.empty(0), persistent=False)
        self.empty: Tensor
        self.softmax_scaling = LogScale(H) if config.log_scale else None
        self.k_rope_only_layernorm = RMSNorm(R, config.latent_eps) if config.rope_norm else None
        self.kv_b_proj: nn.Module = _linear(C, H * (config.qk_nope_head_dim + config.v_head_dim))
        self.o_proj: nn.Module = _linear(H * config.v_head_dim, hidden, bias)
        self.g_proj: nn.Module | None = None
        if config.output_gate is not None:
            gates = H if config.output_gate == "head" else H * config.v_head_dim
            self.g_proj = _linear(hidden, gates)
        self.rope_table: RopeTable | None = None
        if config.rope.kind != "none":
            self.rope_table = RopeTable.shared(rope_table, config.rope, R, config.max_positions)
        self.expand_by = "auto"
        # Dense copy of a quantized kv_b_proj; a plain one is used in place.
        self.register_buffer("kv_b_dense", None, persistent=False)
        self.kv_b_dense: Tensor | None
        self.scales: LayerScales | None = None
        self.register_load_state_dict_pre_hook(_rename_gate)
        self.register_load_state_dict_pre_hook(_take_scales)
        # Data for absorbed_format="fp8", as bytes, which casts do not change.
        self.absorbed_format = absorbed_format
        self.register_buffer("kv_b_eight", None, persistent=False)
        self.kv_b_eight: Tensor | None
        self.register_load_state_dict_post_hook(lambda layer, _: layer.refresh_weights())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the layer computes in: that of its norms. Linears may be quantized."""
        return self.like.dtype

    @property
    def like(self) -> Tensor:
        """A tensor with the layer's dtype and device."""
        return self.empty if self.kv_a_layernorm is None else self.kv_a_layernorm.weight

    @property
    def output_format(self) -> str | None:
        """The format that o_proj quantizes its input to, for make_plan(output=layer.output_format).
        None if its input is 16-bit, as for a plain linear."""
        return output_format(self.o_proj)

    def refresh_weights(self) -> None:
        """Update the copies of kv_b_proj, decoded or in fp8, after its weight changed. They stay at
        the same address if they fit."""
        check_absorbed_format("MLAAttention", self.absorbed_format)
        if self.absorbed_format is not None:
            eight = keep_eight_bits(self.kv_b_proj, self.config, self.dtype)
            self.kv_b_dense, self.kv_b_eight = None, _into_place(self.kv_b_eight, eight)
            return
        self.kv_b_eight = None
        if is_plain(self.kv_b_proj):
            self.kv_b_dense = None
            return
        dense = decode_weight(self.kv_b_proj, self.config.kv_lora_rank, self.dtype)
        self.kv_b_dense = _into_place(self.kv_b_dense, dense)

    @property
    def absorbed(self) -> AbsorbedWeights:
        """The weights of kv_b_proj as attention uses them: views of its weight or of a copy."""
        refuse_unabsorbable(self.kv_b_proj, "MLAAttention: kv_b_proj")
        if self.absorbed_format is not None:
            return self._eight_bits()
        if self.kv_b_dense is None and not is_plain(self.kv_b_proj):
            self.refresh_weights()
        dense = self.kv_b_dense
        if dense is not None:
            by_itself = self._expands_itself(dense.device)
            return absorb(dense, self.config, self.kv_b_proj if by_itself else None)
        weight = getattr(self.kv_b_proj, "weight", None)
        assert isinstance(weight, Tensor)
        return absorb(weight, self.config)

    def _eight_bits(self) -> AbsorbedWeights:
        if self.kv_b_eight is None:
            self.refresh_weights()
        kept = self.kv_b_eight
        assert kept is not None
        by_itself = self._expands_itself(kept.device)
        if self.expand_by == "auto":
            by_itself = expands_better(self.kv_b_proj, kept, self.config)
        return absorb_eight_bits(self.kv_b_proj, kept, self.config, by_itself=by_itself)

    def _expands_itself(self, device: torch.device) -> bool:
        """Whether prefill calls a kv_b_proj that is not plain, or multiplies by its copy."""
        if self.expand_by not in EXPAND_BY:
            raise ConfigError(
                f"MLAAttention: expand_by must be one of {', '.join(map(repr, EXPAND_BY))}, "
                f"got {self.expand_by!r}."
            )
        if self.expand_by == "auto":
            return expands_itself(self.kv_b_proj, device)
        return self.expand_by == "linear"

    @property
    def copied_bytes(self) -> int:
        """Bytes of the copy of kv_b_proj, decoded or in fp8; 0 if its own weight is read. The copy
        is made with the first step at the latest."""
        return sum(copy.nbytes for copy in (self.kv_b_dense, self.kv_b_eight) if copy is not None)

    @property
    def absorbed_error(self) -> float:
        """The largest relative error (Frobenius norm) of a head's weights in an fp8 copy; 0 if
        there is no copy. Reading it waits for the device."""
        return 0.0 if self.kv_b_eight is None else largest_error(self.kv_b_eight, self.config)

    def _times(self, name: str, x: Tensor, plan: Plan) -> Tensor:
        """Apply one of the layer's linears."""
        return apply_linear(getattr(self, name), x, plan, f"MLAAttention: {name}")

    def project(
        self, hidden: Tensor, positions: Tensor, plan: Plan, cache: LayerCache | None = None
    ) -> tuple[Projected, RawProjections | None, Tensor | None]:
        """Return the projections as views, the raw tensors they view, and the low-rank query, if
        the model has one. The write normalizes and rotates the raw tensors. They are None if the
        projections are finished: a gated norm does not fit there, and a layer without rows of its
        own reads them from the cache."""
        config = self.config
        T, P, C = hidden.shape[0], config.qk_nope_head_dim, config.kv_lora_rank
        q_resid = None
        if config.q_lora_rank is None:
            q = self._times("q_proj", hidden, plan)
        else:
            q_resid = self.q_a_layernorm(self._times("q_a_proj", hidden, plan), plan.fixed_by)
            q = self._times("q_b_proj", q_resid, plan)
        q = q.view(T, config.num_heads, config.qk_head_dim)
        if config.q_factor != 1:
            q = q * config.q_factor
        if config.llama4_beta:
            turns = (positions / config.llama4_positions).floor()
            q = q * (1 + config.llama4_beta * torch.log1p(turns))[:, None, None].to(q.dtype)
        if self.softmax_scaling is not None:
            q = self.softmax_scaling(q, positions)
        table = None if self.rope_table is None else self.rope_table.table
        if plan.rope_offsets is not None:
            positions = positions + plan.rope_offsets
        norm = self.kv_a_layernorm
        if norm is None:
            assert cache is not None and cache.latent is not None
            kv_c, k_pe = read_rows(cache.latent, plan, q.dtype).split_with_sizes(
                (C, config.qk_rope_head_dim), -1
            )
            if table is not None:
                rotate(q[:, :, P:], None, positions, table, config.rope.pairing, plan)
            return Projected(q[:, :, :P], q[:, :, P:], kv_c, k_pe), None, q_resid
        latent = self._times("kv_a_proj_with_mqa", hidden, plan)
        projected = Projected(q[:, :, :P], q[:, :, P:], latent[:, :C], latent[:, C:])
        if self.k_rope_only_layernorm is not None:
            latent[:, C:] = self.k_rope_only_layernorm(latent[:, C:], plan.fixed_by)
        if isinstance(norm, RMSNorm):
            raw = RawProjections(
                q, latent, norm.weight, positions, table, config.rope.pairing, norm.eps,
                factor=config.latent_factor,
            )  # fmt: skip
            return projected, raw, q_resid
        latent[:, :C] = norm(latent[:, :C], plan.fixed_by) * config.latent_factor
        if table is not None:
            rotate(projected.q_pe, projected.k_pe, positions, table, config.rope.pairing, plan)
        return projected, None, q_resid

    def forward(
        self,
        hidden: Tensor,  # [T, hidden_size]
        positions: Tensor,  # [T] i64
        cache: LayerCache,
        plan: Plan,
    ) -> Tensor:  # [T, hidden_size]
        """Project, write the cache, attend, and project back.

        Across ranks, every rank calls this with the same tokens and its own share of the cache.

        Args:
            hidden: [T, hidden_size] hidden states of the plan's tokens, in the layer's dtype.
            positions: [T] int64 position of each token in its sequence.
            cache: the layer's cache. A layer that reads the rows of an earlier layer takes its own
                cache with those rows: cache.reading(the cache of that layer).
            plan: the plan of the step.

        Returns:
            [T, hidden_size].

        Raises:
            ShapeError: a tensor has a wrong shape, dtype or device. Nothing is written.
            ConfigError: cache, plan and layer do not match. Nothing is written.
        """
        return self.attend(hidden, positions, cache, plan)[0]

    def attend(
        self,
        hidden: Tensor,  # [T, hidden_size]
        positions: Tensor,  # [T] i64
        cache: LayerCache,
        plan: Plan,
        selection: Selection | None = None,
    ) -> tuple[Tensor, Selection | None]:
        """Same as forward(), and return the selection too, for later layers that share it.

        Args:
            hidden: same as in forward().
            positions: same as in forward().
            cache: same as in forward().
            plan: same as in forward().
            selection: the selection of an earlier layer, for a layer without an indexer. Between
                layers of two kinds, which have two plans, use carry_selection().
        """
        check_tokens("MLAAttention", hidden, positions, cache, plan, self.config, self.like)
        own = self.kv_a_layernorm is not None
        if cache.latent is None and not own:
            raise ConfigError(
                f"MLAAttention: cache has no rows: this layer reads those of layer {self.reads}. "
                "Call cache.reading(the cache of that layer)."
            )
        if self.indexer is not None and cache.index is None:
            raise ConfigError(
                "MLAAttention: cache has no index rows, and this layer has an indexer. Call "
                "allocate_cache(layer=...) with the layer's number."
            )
        if self.indexer is None and plan.chooses and selection is None:
            raise ConfigError(
                "MLAAttention: selection is missing: this layer has no indexer. Call "
                "layer.attend(selection=...) with the selection that an earlier layer's attend() "
                "returned."
            )
        if plan.output is not None:
            check_taken(self.o_proj, plan.output)
            if plan.batch_invariant:
                raise UnsupportedError(
                    "MLAAttention: output must be None with batch_invariant: the product of o_proj "
                    f"with quantized rows depends on the batch, got output={plan.output!r}."
                )
        absorbed = self.absorbed
        projected, raw, q_resid = self.project(hidden, positions, plan, cache)
        if self.indexer is not None:
            assert cache.index is not None
            check_inputs(projected, absorbed, cache, plan)  # before the indexer writes
            table = None if self.rope_table is None else self.rope_table.table
            index = self.indexer(hidden, q_resid, positions, table, cache.index, plan)
            selection = select_step(index, cache, plan)
        buffers = None
        if plan.output is not None:
            buffers = output_buffers(self.o_proj, plan.output, plan.num_tokens)
        direct = None if self.g_proj is not None else buffers
        out = attend_step(
            projected, absorbed, cache, plan, selection=selection, raw=raw, write=own, out=direct
        )
        if self.g_proj is not None:
            gate = torch.sigmoid(self._times("g_proj", hidden, plan).float()).to(out.dtype)
            T, H, _ = out.shape
            out = out * gate.view(T, H, gate.shape[1] // H)
            if buffers is not None:
                quantize_into(buffers, out, plan, {})
        if buffers is not None:
            return project_output(self.o_proj, buffers, self.dtype), selection
        return self._times("o_proj", out.flatten(1), plan), selection
