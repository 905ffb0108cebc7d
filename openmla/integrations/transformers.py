"""attach(): run the MLA layers of a loaded Hugging Face model on this package.

Only public doors of transformers are used. Every MLA attention module projects, normalises, rotates
and computes its output as before; in between it asks its cache to store the new latents and a named
attention function to attend. attach() registers that function ("openmla", with a mask function that
never builds a square mask), puts paged layers into the cache objects as they come by, and names the
function in the model's config. No class is patched and no parameter copied.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from openmla.attention import Absorbed, Projected, attend_step
from openmla.backends import all_backends
from openmla.cache import BlockPool, LayerCache, allocate_cache
from openmla.cache.format import get_format
from openmla.config import MLAConfig
from openmla.errors import CacheFullError, ConfigError, ShapeError, UnsupportedError
from openmla.layers.weights import absorb, decode_weight, is_plain
from openmla.ops import mha_ragged
from openmla.plan import Batch, Plan, make_plan

NAME = "openmla"
FIRST_BLOCKS = 64  # of a pool that may grow
NATURAL_FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
SUPPORTED = (
    "axk1",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "kimi_k25",
    "kimi_linear",
    "longcat_flash",
    "minicpm3",
    "mistral4",
    "youtu",
)
REFUSED = {
    "axk2": "its attention is sparse and gated",
    "deepseek_v32": "sparse attention is not here yet",
    "deepseek_v4": "its compressed attention is not here yet",
    "glm5_next": "its pooled sparse attention is not here yet",
    "glm_moe_dsa": "sparse attention is not here yet",
    "hy_v4": "its attention is sparse, gated and has a sink",
}


@dataclass(eq=False)
class Attachment:
    """Everything attach() set up on one model: the shared block pool, caches per layer, options."""

    config: MLAConfig
    modules: list[nn.Module]
    pool: BlockPool
    format: str | None  # None: the model's dtype
    backend: str
    workspace_tokens: int | None
    may_grow: bool
    caches: dict[int, LayerCache] = field(default_factory=dict)
    detached: bool = False
    positions: Tensor | None = None  # of the pass under way, as the model was given them
    last_plan: Plan | None = None
    storing: PagedLayer | None = None  # the layer that stored latents and awaits its attention
    handles: list[Any] = field(default_factory=list)
    previous: list[tuple[Any, Any]] = field(default_factory=list)
    names: Any = field(default_factory=count)

    def take(self, wanted: dict[int, int]) -> list[tuple[int, int]]:
        """Blocks for new tokens; a pool that may grow does so instead of being full."""
        while True:
            try:
                return self.pool.take(wanted)
            except CacheFullError:
                if not self.may_grow:
                    raise
                self.pool.grow(2 * self.pool.num_blocks)

    def cache(self, layer: int, device: torch.device, dtype: torch.dtype) -> LayerCache:
        """One layer's cache, as many blocks as the pool has by now."""
        format = self.format or NATURAL_FORMATS.get(dtype)
        if format is None:
            raise UnsupportedError(
                f"attach: a {dtype} model has no cache format of its own. Give cache_format."
            )
        kept = self.caches.get(layer)
        if kept is None:
            kept = allocate_cache(
                self.config,
                num_blocks=self.pool.num_blocks,
                block_size=self.pool.block_size,
                format=format,
                device=device,
            )
        assert kept.latent is not None
        if kept.latent.format != format or kept.latent.data.device != device:
            raise ConfigError(
                f"attach: the cache is {kept.latent.format} on {kept.latent.data.device}, the "
                f"model wants {format} on {device} now. Call detach(model), then attach(model)."
            )
        if kept.latent.num_blocks < self.pool.num_blocks:
            kept = LayerCache(latent=kept.latent.grown(self.pool.num_blocks))
        self.caches[layer] = kept
        return kept

    def used_bytes(self) -> int:
        """Bytes of the blocks that requests hold, over all layers."""
        blocks = self.pool.num_blocks - self.pool.num_free
        total = 0
        for cache in self.caches.values():
            assert cache.latent is not None
            total += blocks * cache.latent.data[0].numel() * cache.latent.data.element_size()
        return total


class Session:
    """The requests behind one past_key_values object: one per batch row, for all layers."""

    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment
        self.requests: list[int] = []
        self.columns: list[list[tuple[bool, int]]] = []  # per row: runs of (is a token, how many)
        self.decoded: dict[int, Tensor] = {}  # quantised kv_b_proj by layer, as it was here first
        self.steps = 0
        self.leader: int | None = None  # the layer whose cache calls move requests
        self.copies: list[tuple[int, int]] = []
        self.batch: Batch | None = None
        self.picked: Tensor | None = None  # tokens that are not padding, None: all
        self.plans: dict[torch.device, Plan] = {}
        weakref.finalize(self, _free_requests, attachment.pool, self.requests)

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        """A copy shares every block until one of the two writes."""
        twin = Session(self.attachment)
        memo[id(self)] = twin
        twin.steps, twin.leader = self.steps, self.leader
        twin.requests += self._shared(range(len(self.requests)))
        twin.columns = [list(runs) for runs in self.columns]
        return twin

    def _shared(self, rows: Sequence[int]) -> list[int]:
        fresh = [next(self.attachment.names) for _ in rows]
        for row, name in zip(rows, fresh, strict=True):
            self.attachment.pool.share(self.requests[row], name)
        return fresh

    def select(self, rows: Sequence[int]) -> None:
        """Row i becomes a copy of what row rows[i] was; no byte moves."""
        fresh = self._shared(rows)
        _free_requests(self.attachment.pool, self.requests)
        self.requests[:] = fresh
        self.columns = [list(self.columns[row]) for row in rows]

    def truncate(self, num_columns: int) -> None:
        """Drop the last columns of every row; some of them may be padding."""
        pool = self.attachment.pool
        for request, runs in zip(self.requests, self.columns, strict=True):
            surplus, tokens = num_columns, 0
            while surplus > 0 and runs:
                is_token, length = runs.pop()
                dropped = min(length, surplus)
                surplus -= dropped
                tokens += dropped if is_token else 0
                if dropped < length:
                    runs.append((is_token, length - dropped))
            pool.truncate(request, pool.seq_len(request) - tokens)

    def clear(self) -> None:
        _free_requests(self.attachment.pool, self.requests)
        self.requests.clear()
        self.columns.clear()

    def absorbed(self, module: nn.Module, layer: int, dtype: torch.dtype) -> Absorbed:
        """The module's kv_b_proj: views of its weight, or a quantised one decoded.

        Decoded once per session, so that adapters and weights may change between generations.
        """
        linear = module.kv_b_proj
        assert isinstance(linear, nn.Module)
        if is_plain(linear):
            weight = linear.weight
        else:
            C = self.attachment.config.kv_lora_rank
            if layer not in self.decoded:
                self.decoded[layer] = decode_weight(linear, C, dtype)
            weight = self.decoded[layer]
        assert isinstance(weight, Tensor)
        return absorb(weight, self.attachment.config)

    def begin(self, B: int, S: int, mask: Tensor | None) -> None:
        """A new forward pass: find padding, take blocks, describe the batch."""
        pool = self.attachment.pool
        fresh = not self.requests
        requests = [next(self.attachment.names) for _ in range(B)] if fresh else self.requests
        if len(requests) != B:
            raise ShapeError(
                f"attach: the cache holds {len(requests)} sequences, got a batch of {B}."
            )
        spans = _new_spans(B, S, mask, [pool.seq_len(request) for request in requests])
        starts = [pool.seq_len(request) for request in requests]
        new_lens = [stop - start for start, stop in spans]
        self.copies = self.attachment.take(dict(zip(requests, new_lens, strict=True)))
        if fresh:
            self.requests += requests
            self.columns = [[] for _ in requests]
        for runs, (start, stop) in zip(self.columns, spans, strict=True):
            new_runs = ((False, start), (True, stop - start), (False, S - stop))
            runs += [run for run in new_runs if run[1] > 0]
        ends = [start + n for start, n in zip(starts, new_lens, strict=True)]
        self.batch = Batch(
            query_lens=new_lens,
            seq_lens=ends,
            block_table=pool.block_table(requests),
            slot_mapping=pool.slot_mapping(list(zip(requests, starts, ends, strict=True))),
        )
        self.picked = None
        if sum(new_lens) < B * S:
            rows = [torch.arange(b * S + i, b * S + j) for b, (i, j) in enumerate(spans)]
            self.picked = torch.cat(rows)
        self.plans = {}
        self.steps += 1

    def plan(self, cache: LayerCache, device: torch.device, dtype: torch.dtype) -> Plan:
        """This pass's plan: made for the first layer, reused by the others on its device."""
        if device not in self.plans:
            assert self.batch is not None
            self.plans[device] = make_plan(
                self.batch,
                self.attachment.config,
                cache,
                dtype=dtype,
                backend=self.attachment.backend,
                workspace_tokens=self.attachment.workspace_tokens,
            )
            self.attachment.last_plan = self.plans[device]
        return self.plans[device]


def _free_requests(pool: BlockPool, requests: Sequence[int]) -> None:
    for request in requests:
        pool.free(request)


def _new_spans(
    B: int, S: int, mask: Tensor | None, seq_lens: Sequence[int]
) -> list[tuple[int, int]]:
    """Which of the S new columns of each row are tokens; padding is on one side or both.

    A single new column on a GPU is taken as a token without looking: that would wait for it.
    """
    if mask is None or (S == 1 and mask.device.type != "cpu"):
        return [(0, S)] * B
    if mask.dim() != 2:
        raise UnsupportedError(
            f"attach: attention_mask must be [batch, columns], got {tuple(mask.shape)}. "
            "Square masks are not supported."
        )
    real = mask.to(torch.bool)
    if real.device.type == "cpu" and mask.shape[1] > S:
        cached = real[:, :-S].sum(dim=1).tolist()
        if cached != list(seq_lens):
            raise ShapeError(
                "attach: attention_mask must show the tokens that are cached, "
                f"{list(seq_lens)} per row, got {cached}."
            )
    new = real[:, -S:].int()
    lens, firsts = new.sum(dim=1).tolist(), new.argmax(dim=1).tolist()
    edges = new.diff(dim=1).abs().sum(dim=1).tolist()
    spans = []
    for b in range(B):
        if edges[b] > 2 or (edges[b] == 2 and bool(new[b, 0])):
            raise ShapeError(f"attach: attention_mask must not have holes, row {b} has one.")
        spans.append((firsts[b], firsts[b] + lens[b]))
    return spans


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's place in past_key_values: columns seen, and the session that holds the rows."""

    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, session: Session, layer: int) -> None:
        super().__init__()
        self.session, self.layer = session, layer
        self.columns = self.steps = 0
        self.is_initialized = True
        self.latents: tuple[Tensor, Tensor] | None = None
        if session.leader is None:
            session.leader = layer

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedLayer:
        from copy import deepcopy

        twin = PagedLayer(deepcopy(self.session, memo), self.layer)
        twin.columns, twin.steps = self.columns, self.steps
        return twin

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """There is nothing to initialise: caches belong to the attachment."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Hold this pass's latents for the attention function.

        The module expands what it gets back: one row, the least its reshapes can take.
        """
        if self.session.attachment.detached:
            raise ConfigError("attach: this cache was lost with detach(model). Make a new one.")
        self.latents = (key_states[:, 0], value_states[:, 0])  # [B, S, C], [B, S, R]
        self.session.attachment.storing = self
        return key_states[:, :, :1], value_states[:, :, :1]

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
            self.session.select(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        if self._leads():
            rows = torch.arange(len(self.session.requests))[indices.cpu()]
            self.session.select(rows.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self._leads():
            rows = torch.arange(len(self.session.requests)).repeat_interleave(repeats)
            self.session.select(rows.tolist())

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; a positive number is the length to keep, as it once was."""
        given = int(tokens_to_remove)  # assisted decoding passes a tensor
        surplus = -given if given <= 0 else max(self.columns - given, 0)
        surplus = min(surplus, self.columns)
        if self._leads():
            self.session.truncate(surplus)
        self.columns -= surplus

    def reset(self) -> None:
        if self._leads():
            self.session.clear()
        self.columns = 0

    def offload(self) -> None:
        raise UnsupportedError("attach: the paged cache cannot be offloaded.")


def _install(attachment: Attachment, layer: int, past: Cache) -> None:
    """Put a paged layer into a cache object that does not have one yet."""
    while len(past.layers) <= layer:
        past.layers.append(DynamicLayer())
    present = past.layers[layer]
    if isinstance(present, PagedLayer):
        if present.session.attachment is not attachment:
            raise ConfigError("attach: this cache belongs to another attached model.")
        return
    if present.is_initialized and present.get_seq_length() > 0:
        raise ConfigError("attach: the cache must be empty or made after attach(), got a full one.")
    if type(present) is not DynamicLayer:
        raise UnsupportedError(
            f"attach: caches of {type(present).__name__} are not supported. Use the default cache."
        )
    session = next((entry.session for entry in past.layers if isinstance(entry, PagedLayer)), None)
    past.layers[layer] = PagedLayer(session or Session(attachment), layer)


def _before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    attachment = module.openmla
    assert isinstance(attachment, Attachment)
    attachment.storing = None
    attachment.positions = kwargs.get("position_ids")
    implementation = module.config._attn_implementation
    if implementation != NAME:
        raise ConfigError(
            f"attach: the model's attention was set to {implementation!r} while attached. "
            "Call detach(model) first."
        )
    past = kwargs.get("past_key_values")
    if past is not None:
        _install(attachment, int(module.layer_idx), past)


def _refuse_right_padding(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """generate() continues from the last column, so padding there would be continued."""
    mask, keep = kwargs.get("attention_mask"), kwargs.get("logits_to_keep")
    generating = isinstance(keep, int) and keep == 1  # what generate() asks for
    if generating and isinstance(mask, Tensor) and mask.dim() == 2:
        ids = kwargs.get("input_ids")
        looking_is_free = mask.device.type == "cpu" or (ids is not None and ids.shape[1] > 1)
        if looking_is_free and bool((mask[:, 1:] < mask[:, :-1]).any()):
            raise ShapeError(
                "attach: prompts must be padded on the left to generate, got padding on the right. "
                'Set tokenizer.padding_side = "left".'
            )


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
    spans = [(b * S + i, b * S + j) for b, (i, j) in enumerate(_new_spans(B, S, mask, [0] * B))]
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


def attach(
    model: nn.Module,
    *,
    cache_format: str | None = None,
    block_size: int = 64,
    num_blocks: int | None = None,
    backend: str = "auto",
    workspace: int | None = None,
) -> list[nn.Module]:
    """Run a model's MLA layers here from now on; returns those attention modules.

    `cache_format` is a key of FORMATS, by default the model's own precision. `num_blocks` fixes the
    size of the block pool that all caches of this model share; without it the pool grows as
    needed. `workspace` is the context rows that prefill expands at once. Then generate(),
    pipeline() and bare forward passes work as before.
    """
    config = getattr(model, "config", None)
    model_type = getattr(config, "model_type", None)
    if model_type in REFUSED:
        raise UnsupportedError(f"attach: {model_type} is not supported: {REFUSED[model_type]}.")
    if model_type not in SUPPORTED:
        raise UnsupportedError(
            f"attach: {model_type!r} is not an MLA model known here. Known: {', '.join(SUPPORTED)}."
        )
    modules = [module for module in model.modules() if hasattr(module, "kv_a_proj_with_mqa")]
    if any(hasattr(module, "openmla") for module in modules):
        raise ConfigError("attach: the model is attached already. Call detach(model) first.")
    ours = MLAConfig.from_hf(config)
    for module in modules:
        if not math.isclose(float(module.scaling), ours.scale, rel_tol=1e-6):  # type: ignore[arg-type]
            raise ConfigError(
                f"attach: softmax scale must be {ours.scale} by the config, "
                f"got {module.scaling} in the model."
            )
    attachment = Attachment(
        config=ours,
        modules=modules,
        pool=BlockPool(FIRST_BLOCKS if num_blocks is None else num_blocks, block_size),
        format=cache_format,
        backend=backend,
        workspace_tokens=workspace,
        may_grow=num_blocks is None,
    )
    if cache_format is not None:
        get_format(cache_format)  # or its error
    if backend != "auto" and backend not in all_backends():
        raise ConfigError(
            f"attach: backend {backend!r} is not known. Known: auto, {', '.join(all_backends())}."
        )
    if workspace is not None and workspace < block_size:
        raise ConfigError(
            f"attach: workspace must be at least one block of {block_size} rows, got {workspace}."
        )
    text_config = modules[0].config
    if text_config._attn_implementation == NAME:  # type: ignore[union-attr]
        raise ConfigError(
            "attach: another attached model shares this config object. Give each its own copy."
        )
    AttentionInterface.register(NAME, openmla_attention)
    AttentionMaskInterface.register(NAME, openmla_mask)
    for module in modules:
        module.openmla = attachment  # type: ignore[assignment]
        handle = module.register_forward_pre_hook(_before_forward, with_kwargs=True)
        attachment.handles.append(handle)
    attachment.handles.append(
        model.register_forward_pre_hook(_refuse_right_padding, with_kwargs=True)
    )
    attachment.previous.append((text_config, text_config._attn_implementation))  # type: ignore[union-attr]
    text_config._attn_implementation = NAME  # type: ignore[union-attr]
    return modules


def detach(model: nn.Module) -> None:
    """Undo attach(): the model attends by itself again. Caches made in between are lost."""
    attachment = attachment_of(model)
    for handle in attachment.handles:
        handle.remove()
    for text_config, implementation in attachment.previous:
        text_config._attn_implementation = implementation
    for module in attachment.modules:
        del module.openmla
    attachment.detached = True


def attachment_of(model: nn.Module) -> Attachment:
    """What attach() set up on a model: its pool, caches and options."""
    for module in model.modules():
        attachment = getattr(module, "openmla", None)
        if isinstance(attachment, Attachment):
            return attachment
    raise ConfigError("attach: the model is not attached.")
