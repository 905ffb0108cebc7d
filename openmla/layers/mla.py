"""MLAAttention: of V2, V3, R1, V3.2, Kimi, GLM, LongCat, Ling 3.0, MiniCPM3, Mistral 4."""

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
from openmla.layers.norm import RMSNorm
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
    """Fresh values where the old ones are, for graphs that read there; if they fit."""
    if kept is None or kept.shape != fresh.shape or kept.dtype != fresh.dtype:
        return fresh
    with torch.inference_mode():  # where the old ones may have been made
        return kept.copy_(fresh)


def _linear(width: int, out: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(width, out, bias=bias).requires_grad_(False)


def _take_scales(layer: MLAAttention, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Scales of a cache are no parameters: out of what is loaded, before names are compared."""
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
    dtype: torch.dtype,
) -> None:
    """A layer's tokens are as planned, and of its own dtype."""
    check_kind(where, "cache", cache, LayerCache)
    check_kind(where, "plan", plan, Plan)
    T, width = plan.num_tokens, config.hidden_size
    for name, given in (("hidden", hidden), ("positions", positions)):
        if not isinstance(given, Tensor):
            raise ShapeError(f"{where}: {name} must be a tensor, got {type(given).__name__}.")
    if hidden.shape != (T, width):
        raise ShapeError(
            f"{where}: hidden must be [T, {width}] with T={T} as planned, "
            f"got {tuple(hidden.shape)}."
        )
    if hidden.dtype != dtype:
        raise ShapeError(
            f"{where}: hidden must be {dtype} like the layer, got {hidden.dtype}. "
            "Convert one of them."
        )
    if positions.shape != (T,):
        raise ShapeError(
            f"{where}: positions must be [T] with T={T} as planned, got {tuple(positions.shape)}."
        )
    if plan.config is not config and plan.config != config:
        raise ShapeError(f"{where}: plan must be made for this layer's config.")


class MLAAttention(nn.Module):
    """One attention layer; parameter names are those of Hugging Face checkpoints.

    Weights are for inference: no parameter requires grad. `kv_b_proj` may be replaced by a
    quantised linear; call refresh_weights() after that, and after changing its weight in any way
    but load_state_dict(). Attention multiplies by a decoded copy of it, of `copied_bytes`; prefill
    calls the linear itself where that is cheaper, by `expand_by`: "auto", or "linear" or "copy" to
    have it so. With absorbed_format="fp8" absorbed rows multiply by w_uk and w_uv in e4m3: an fp8
    kv_b_proj's own, or a copy with one scale per head, also of `copied_bytes`, whose weights are
    off by `absorbed_error`. `layer` is its number in the model, which decides whether a sparse
    layer has an indexer of its own or shares the selection of an earlier one. `rope_table` is
    another layer's, to share it. `scales` are what a checkpoint has of them, for
    allocate_cache(format="fp8", kv_scale=layer.scales).
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
        if config.compressor is not None:
            raise UnsupportedError(
                f"MLAAttention: {config.model_type} needs another layer. Use MLAAttentionV4."
            )
        family = FAMILIES.get(config.model_type)
        if family is not None and family.output_gate:
            raise UnsupportedError(
                f"MLAAttention: {config.model_type} gates its output, this layer does not. "
                "attach() runs it."
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
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.latent_eps)
            self.q_b_proj = _linear(config.q_lora_rank, H * E)
        self.kv_a_proj_with_mqa = _linear(hidden, C + R, bias)
        self.kv_a_layernorm = RMSNorm(C, config.latent_eps)
        self.kv_b_proj: nn.Module = _linear(C, H * (config.qk_nope_head_dim + config.v_head_dim))
        self.o_proj: nn.Module = _linear(H * config.v_head_dim, hidden, bias)
        self.g_proj = _linear(hidden, H) if config.head_gate else None
        self.rope_table: RopeTable | None = None
        if config.rope.kind != "none":
            self.rope_table = RopeTable.shared(rope_table, config.rope, R, config.max_positions)
        self.expand_by = "auto"
        # dense weights of a quantised kv_b_proj; a plain one is used in place
        self.register_buffer("kv_b_dense", None, persistent=False)
        self.kv_b_dense: Tensor | None
        self.scales: LayerScales | None = None
        self.register_load_state_dict_pre_hook(_take_scales)
        # what absorbed_format="fp8" keeps beside kv_b_proj, as bytes: casts leave it alone
        self.absorbed_format = absorbed_format
        self.register_buffer("kv_b_eight", None, persistent=False)
        self.kv_b_eight: Tensor | None
        self.register_load_state_dict_post_hook(lambda layer, _: layer.refresh_weights())

    @property
    def dtype(self) -> torch.dtype:
        """What the layer computes in: its norms', for any of its linears may be quantised."""
        return self.kv_a_layernorm.weight.dtype

    @property
    def output_format(self) -> str | None:
        """What o_proj quantises its input to, for make_plan(output=): attention then hands it over
        quantised. None where it takes 16 bits, as a plain one does."""
        return output_format(self.o_proj)

    def refresh_weights(self) -> None:
        """Decode a quantised kv_b_proj again, or put any into eight bits; a copy stays in place."""
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
        """kv_b_proj as attention uses it: views of its weight, or of the decoded one, or of eight
        bits."""
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
                f"MLAAttention: expand_by must be one of {', '.join(EXPAND_BY)}, "
                f"got {self.expand_by!r}."
            )
        if self.expand_by == "auto":
            return expands_itself(self.kv_b_proj, device)
        return self.expand_by == "linear"

    @property
    def copied_bytes(self) -> int:
        """What is kept beside kv_b_proj: the decoded copy of a quantised one, or the one in eight
        bits; 0 where its own weight is read. Absorbed rows need it, so it is made with the first
        step at the latest."""
        return sum(copy.nbytes for copy in (self.kv_b_dense, self.kv_b_eight) if copy is not None)

    @property
    def absorbed_error(self) -> float:
        """How far a copy in eight bits is off: the relative error (Frobenius) of the head that is
        furthest off. 0 where there is none. Waits for the device."""
        return 0.0 if self.kv_b_eight is None else largest_error(self.kv_b_eight, self.config)

    def _times(self, name: str, x: Tensor, plan: Plan) -> Tensor:
        """One of the layer's linears."""
        return apply_linear(getattr(self, name), x, plan, f"MLAAttention: {name}")

    def project(
        self, hidden: Tensor, positions: Tensor, plan: Plan
    ) -> tuple[Projected, RawProjections, Tensor | None]:
        """What attention takes, what is still to be done to it, and the low-rank query if any."""
        config = self.config
        T, P = hidden.shape[0], config.qk_nope_head_dim
        q_resid = None
        if config.q_lora_rank is None:
            q = self._times("q_proj", hidden, plan)
        else:
            q_resid = self.q_a_layernorm(self._times("q_a_proj", hidden, plan), plan.fixed_by)
            q = self._times("q_b_proj", q_resid, plan)
        q = q.view(T, config.num_heads, config.qk_head_dim)
        latent = self._times("kv_a_proj_with_mqa", hidden, plan)
        if config.q_factor != 1:
            q = q * config.q_factor
        if config.llama4_beta:
            turns = (positions / config.llama4_positions).floor()
            q = q * (1 + config.llama4_beta * torch.log1p(turns))[:, None, None].to(q.dtype)
        table = None if self.rope_table is None else self.rope_table.table
        if plan.rope_offsets is not None:
            positions = positions + plan.rope_offsets
        norm = self.kv_a_layernorm
        raw = RawProjections(
            q, latent, norm.weight, positions, table, config.rope.pairing, norm.eps,
            factor=config.latent_factor,
        )  # fmt: skip
        C = config.kv_lora_rank
        return Projected(q[:, :, :P], q[:, :, P:], latent[:, :C], latent[:, C:]), raw, q_resid

    def forward(
        self,
        hidden: Tensor,  # [T, hidden_size]
        positions: Tensor,  # [T] i64
        cache: LayerCache,
        plan: Plan,
    ) -> Tensor:  # [T, hidden_size]
        """Project, write the cache, attend, project back; T is the plan's. Over ranks, every one
        of them calls it with the same tokens, and its own share of the cache."""
        return self.attend(hidden, positions, cache, plan)[0]

    def attend(
        self,
        hidden: Tensor,  # [T, hidden_size]
        positions: Tensor,  # [T] i64
        cache: LayerCache,
        plan: Plan,
        selection: Selection | None = None,
    ) -> tuple[Tensor, Selection | None]:
        """forward(), and the selection it used, for the layers after it that share it.

        A layer without an indexer of its own takes that of the layer before as `selection`.
        """
        check_tokens("MLAAttention", hidden, positions, cache, plan, self.config, self.dtype)
        if self.indexer is not None and cache.index is None:
            raise ConfigError("MLAAttention: cache must have index rows for this layer, got none.")
        if self.indexer is None and plan.chooses and selection is None:
            raise ConfigError(
                "MLAAttention: selection must be given, this layer has no indexer of its own."
            )
        if plan.output is not None:
            check_taken(self.o_proj, plan.output)
            if plan.batch_invariant:
                raise UnsupportedError(
                    "MLAAttention: plan must have no output with batch_invariant: how o_proj "
                    "multiplies quantised rows depends on how many there are."
                )
        absorbed = self.absorbed
        projected, raw, q_resid = self.project(hidden, positions, plan)
        if self.indexer is not None:
            assert q_resid is not None and cache.index is not None
            check_inputs(projected, absorbed, cache, plan)  # before the indexer writes
            index = self.indexer(hidden, q_resid, positions, raw.table, cache.index, plan)
            selection = select_step(index, cache, plan)
        buffers = None
        if plan.output is not None:
            buffers = output_buffers(self.o_proj, plan.output, plan.num_tokens)
        direct = None if self.g_proj is not None else buffers
        out = attend_step(
            projected, absorbed, cache, plan, selection=selection, raw=raw, out=direct
        )
        if self.g_proj is not None:
            gate = torch.sigmoid(self._times("g_proj", hidden, plan).float()).to(out.dtype)
            out = out * gate[:, :, None]
            if buffers is not None:
                quantize_into(buffers, out, plan, {})
        if buffers is not None:
            return project_output(self.o_proj, buffers, self.dtype), selection
        return self._times("o_proj", out.flatten(1), plan), selection
