"""Captures a model's decode step as one CUDA graph and replays it for later tokens.

To decode one token, a model launches thousands of small kernels, and the host's launches are the
bottleneck. A step of one new token per row always has the same shapes: only the values in its
inputs and in the plan's buffers differ. Therefore the model's own forward is captured once over
fixed tensors. A later step takes blocks, fills the buffers and replays the graph. Prefill and
everything else run the model's forward as before.

Python runs only during capture. Weights that are replaced between generations are noticed, and so
are adapters that are switched at any time; another number that changes inside a module is not.
Therefore, unless capture was requested, a model with hooks inside is left alone. Threads take
turns: one graph's tensors serve one step at a time, and graphs for other batch sizes share its
memory (graphs.py).
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from openmla.cache import LayerCache
from openmla.errors import UnsupportedError
from openmla.integrations.transformers.graphs import GraphMemory, has_graphs
from openmla.integrations.transformers.masks import read_mask
from openmla.integrations.transformers.paged_layer import PagedLayer
from openmla.parallel import rank_buffers
from openmla.plan import plan_buffers

if TYPE_CHECKING:
    from openmla.integrations.transformers.attachment import Attachment
    from openmla.integrations.transformers.session import Session

UNDERSTOOD = (
    "attention_mask",
    "cache_position",
    "input_ids",
    "logits_to_keep",
    "past_key_values",
    "position_ids",
    "return_dict",
    "use_cache",
)
KEPT = 4  # graphs, each for another batch size: the most recently used


class Recorded(NamedTuple):
    """One graph, with its inputs and outputs."""

    ids: Tensor  # [B, 1]
    positions: Tensor  # [B, 1]
    buffers: dict[int, dict[str, Tensor]]  # the plans' buffers, by kind of layer
    blocks: int  # columns of block tables that are not rings
    places: tuple[int, ...]  # addresses of caches and angles; the graph is invalid if they move
    weights: tuple[int, ...]  # their addresses; checked once per generation
    decoded: tuple[tuple[Any, Tensor], ...]  # kv_b_proj that is not plain, decoded
    switches: tuple[Any, ...]  # state of adapters
    graph: Any  # None on a CPU, which runs the step instead
    logits: Tensor  # [B, 1, vocabulary]
    result: type  # the return type of the model's forward, which would keep the cache alive


class CapturedDecode:
    """Replaces a model's forward and replays steps of one token per row.

    `asked`: capture was requested, so an obstacle is an error. Otherwise the model's own forward
    runs instead. `hooks` are the inner hooks that attach() installed.
    """

    def __init__(
        self, model: nn.Module, attachment: Attachment, *, asked: bool, hooks: set[int]
    ) -> None:
        self.model, self.attachment, self.asked, self.hooks = model, attachment, asked, hooks
        self.recordable = True
        self.forward = model.forward
        self.recorded: dict[int, Recorded] = {}  # by batch size, the most recently used last
        self.memory: GraphMemory | None = None  # shared by the CUDA graphs
        self.recordings = 0
        self.served: Callable[[], Session | None] = lambda: None  # the session of the last step
        self.rows = 0  # batch size of that step
        self.adapters: list[Any] = []  # modules, as of the last capture
        update_wrapper(self, self.forward)  # generate() reads the signature
        model.forward = self

    def remove(self) -> None:
        """Restore the model's own forward."""
        del self.model.forward
        self._drop()

    def _drop(self) -> None:
        """Drop all graphs, and with the last of them the memory they share."""
        self.recorded, self.memory = {}, None

    def __deepcopy__(self, memo: dict[int, Any]) -> CapturedDecode:
        """For a copy of the model, which captures its own graphs."""
        twin = copy(self)
        memo[id(self)] = twin
        twin.model = deepcopy(self.model, memo)
        twin.attachment = deepcopy(self.attachment, memo)
        twin.forward = deepcopy(self.forward, memo)
        twin.served = lambda: None
        twin._drop()
        return twin

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.forward(*args, **kwargs)
        with self.attachment.lock:
            layers = [] if args else _decoding(self.attachment, kwargs, self.asked)
            if not layers or not self._may(layers[0].session):
                self.served = lambda: None  # repeat the checks made once per generation
                return self.forward(*args, **kwargs)
            return self._step(layers, kwargs)

    def _step(self, layers: list[PagedLayer], kwargs: dict[str, Any]) -> Any:
        """Run one new token per row: replay a graph, or capture one if none fits."""
        session = layers[0].session
        try:
            return self._replay(layers, kwargs)
        except BaseException:
            if session.unfinished:  # the step had begun
                session.fail()
            raise

    def _replay(self, layers: list[PagedLayer], kwargs: dict[str, Any]) -> Any:
        past, session = kwargs["past_key_values"], layers[0].session
        ids, columns = kwargs["input_ids"], [layer.columns for layer in layers]
        positions = kwargs["position_ids"].expand(ids.shape)
        self.attachment.current.positions = positions
        caches = self._begin(session, layers, ids)
        recorded = self._fitting(session, ids, caches)
        if recorded is None:
            try:
                recorded = self._record(past, session, layers, caches, ids, positions)
            except BaseException:
                self._drop()  # torch does not accept a pool again whose only capture failed
                raise
        else:
            recorded.ids.copy_(ids)
            recorded.positions.copy_(positions)
            self._plan(session, layers, caches, recorded.buffers, ids.device)
            if recorded.graph is not None:
                recorded.graph.replay()
            else:
                out = self._pass(recorded.ids, recorded.positions, past, session, layers)
                recorded.logits.copy_(out.logits)
        self._keep(recorded)
        for layer, seen in zip(layers, columns, strict=True):
            layer.steps, layer.columns = session.steps, seen + 1
        session.finish()
        return recorded.result(logits=recorded.logits.clone(), past_key_values=past)

    def _fitting(self, session: Session, ids: Tensor, caches: list[LayerCache]) -> Recorded | None:
        """The graph for this batch size, if it is still valid. If not, drop all graphs: caches or
        weights have moved, or the graph is too small, and the next one needs the memory."""
        rows = ids.shape[0]
        known = self.served() is session and self.rows == rows
        self.served, self.rows = weakref.ref(session), rows
        recorded = self.recorded.get(rows)
        if recorded is None:
            return None
        same = known or (
            recorded.weights == _weights(self.model) and _same_decoded(recorded, session)
        )
        serves = same and _serves(recorded, session, ids, caches)
        if not serves or recorded.switches != _switches(self.adapters):
            self._drop()
            return None
        return recorded

    def _keep(self, recorded: Recorded) -> None:
        """Keep only the most recent graphs: they share memory, but each graph itself takes some."""
        rows = recorded.ids.shape[0]
        self.recorded.pop(rows, None)
        self.recorded[rows] = recorded
        while len(self.recorded) > KEPT:
            del self.recorded[next(iter(self.recorded))]

    def _may(self, session: Session) -> bool:
        """Whether Python can be skipped; checked once per generation."""
        if self.attachment.awaits_scales:  # measured values are read on the host
            return False
        if self.asked or self.served() is session:
            return True
        return self.recordable and inner_hooks(self.model) <= self.hooks

    def _begin(self, session: Session, layers: list[PagedLayer], ids: Tensor) -> list[LayerCache]:
        """Take blocks for the new tokens; _decoding() has checked the mask."""
        session.begin(ids.shape[0], 1, None)
        dtype = session.dtype
        assert dtype is not None  # prefill has set it
        with self.attachment.using_caches(ids.device):
            return [self.attachment.cache(layer.layer, ids.device, dtype) for layer in layers]

    def _plan(
        self,
        session: Session,
        layers: list[PagedLayer],
        caches: list[LayerCache],
        buffers: dict[int, dict[str, Tensor]],
        device: torch.device,
    ) -> None:
        """Write the step's plan into the buffers of each kind of layer."""
        assert session.dtype is not None
        session.plans = {}
        found = self._of_a_kind(layers, caches, session.dtype)
        rings = [
            each.get("window_table", each["block_table"])
            for kind, each in buffers.items()
            if self.attachment.config.layer(found[kind][0]).sliding_window
        ]
        if rings:  # the number of ring columns is fixed in the graph
            session.describe(window_columns=rings[0].shape[1])
        for kind, (layer, cache) in found.items():
            session.plan(layer, cache, device, session.dtype, into=buffers[kind])

    def _of_a_kind(
        self, layers: list[PagedLayer], caches: list[LayerCache], dtype: torch.dtype
    ) -> dict[int, tuple[int, LayerCache]]:
        """The first layer of each kind, and its cache, to plan with."""
        numbers = [paged.layer for paged in layers]
        kinds = map(self.attachment.config.kind, numbers)
        found: dict[int, tuple[int, LayerCache]] = {}
        for kind, number, cache in zip(kinds, numbers, caches, strict=True):
            if kind not in found:
                own = self.attachment.config.layer(number)
                if own.indexer is not None and own.compressor is None and cache.index is None:
                    assert cache.latent is not None
                    rows = cache.latent.data
                    cache = self.attachment.with_index(cache, rows.device, dtype)
                found[kind] = number, cache
        return found

    def _pass(
        self, ids: Tensor, positions: Tensor, past: Any, session: Session, layers: list[PagedLayer]
    ) -> Any:
        """Run the model's forward over fixed tensors; the caller keeps the counts."""
        for layer in layers:
            layer.steps = session.steps - 1
        return self.forward(
            input_ids=ids,
            position_ids=positions,
            past_key_values=past,
            use_cache=True,
            logits_to_keep=1,
        )

    def _record(
        self,
        past: Any,
        session: Session,
        layers: list[PagedLayer],
        caches: list[LayerCache],
        ids: Tensor,
        positions: Tensor,
    ) -> Recorded:
        B, needed = ids.shape[0], _most_blocks(session)
        # at most twice the current number: this sizes the graph and limits how often it is
        # recaptured
        blocks = 1 << (needed - 1).bit_length()
        config = self.attachment.config
        assert session.dtype is not None
        with torch.inference_mode(False):  # written repeatedly, with and without inference mode
            buffers: dict[int, dict[str, Tensor]] = {}
            sizes = {"max_requests": B, "max_tokens": B, "max_blocks": blocks}
            for kind, (layer, cache) in self._of_a_kind(layers, caches, session.dtype).items():
                own, ranks = config.layer(layer), self.attachment.ranks
                sizes["max_blocks"] = self.attachment.ring_columns if own.window else blocks
                if ranks is not None:
                    sharded = {"max_tokens": B, "max_blocks": blocks}
                    buffers[kind] = rank_buffers(own, cache, ranks, **sharded)
                    continue
                beside = None if own.compressor is None else next(iter(buffers.values()), None)
                buffers[kind] = plan_buffers(own, cache, **sizes, beside=beside)
            ids, positions = ids.clone(), positions.clone()
        self._plan(session, layers, caches, buffers, ids.device)
        columns = [layer.columns for layer in layers]
        graph, self.recordings = None, self.recordings + 1
        self.adapters = [m for m in self.model.modules() if hasattr(m, "_disable_adapters")]

        def step() -> Any:
            out = self._pass(ids, positions, past, session, layers)
            for layer, seen in zip(layers, columns, strict=True):
                layer.columns = seen
            return out

        if has_graphs(ids.device):
            with _experts_one_by_one(self.model):
                graph, out = self._capture(step, ids.device, B, blocks)
        else:
            out = step()
        logits = out.logits
        if graph is None:  # written repeatedly, like ids
            with torch.inference_mode(False):
                logits = out.logits.clone()
        decoded = tuple(session.decoded.values())
        return Recorded(
            ids, positions, buffers, blocks, _places(caches, self.attachment), _weights(self.model),
            decoded, _switches(self.adapters), graph, logits, type(out),
        )  # fmt: skip

    def _capture(
        self, step: Callable[[], Any], device: torch.device, rows: int, blocks: int
    ) -> tuple[Any, Any]:
        """Capture what a step launches, then launch it once. A failed capture is retried once, in
        memory of its own: the cause may be what other code of the process did meanwhile. The retry
        skips the warm-up, since other ranks may be past that."""
        if self.memory is None or not self.memory.holds(device, rows, blocks):
            self._drop()
            self.memory = GraphMemory(device, rows, blocks)
        self.memory.warm_up(step)
        try:
            try:
                graph, out = self.memory.record(step)
            except RuntimeError:
                self._drop()  # do not reuse a pool in which a capture failed
                self.memory = GraphMemory(device, rows, blocks)
                graph, out = self.memory.record(step)
        except RuntimeError as reason:
            self._drop()
            said = str(reason).partition("\n")[0]  # CUDA's messages continue with advice
            message = (
                f"attach: the decode step of this model cannot be captured: {said.rstrip('.')}. "
            )
            if self.asked:
                message += "Remove capture=True (openmla generate: --no-capture)."
                raise UnsupportedError(message) from reason
            warnings.warn(f"{message}It runs without a graph.", stacklevel=2)
            self.recordable = False
            return None, step()
        graph.replay()
        with self.attachment.using_caches(device):  # on this stream, not the warm-up's
            return graph, out


@contextmanager
def _experts_one_by_one(model: Any) -> Iterator[None]:
    """Run experts as generate() does when it samples (though not with beams): grouping experts by
    the tokens routed to them would synchronize with the host."""
    found = model.get_experts_implementation()
    model.set_experts_implementation(
        {key: "batched_mm" if how == "grouped_mm" else how for key, how in found.items()}
    )
    try:
        yield
    finally:
        model.set_experts_implementation(found)


def inner_hooks(model: nn.Module) -> set[int]:
    """Python that others put inside: the ids of hooks, and -1 for modules that accelerate wrapped.
    Hooks of the model itself run around its forward, captured or not."""
    found: set[int] = set()
    for module in model.modules():
        if module is not model:
            found.update(module._forward_hooks, module._forward_pre_hooks)
            if hasattr(module, "_hf_hook"):
                found.add(-1)
    return found


def _decoding(attachment: Attachment, kwargs: dict[str, Any], strict: bool) -> list[PagedLayer]:
    """The cache's layers if this is one of generate()'s steps with one token per row, else none."""
    ids, positions = kwargs.get("input_ids"), kwargs.get("position_ids")
    past = kwargs.get("past_key_values")
    others = (value for name, value in kwargs.items() if name not in UNDERSTOOD)
    asked = any(value is not None and value is not False for value in others)
    asked = asked or kwargs.get("is_causal") is not None or not attachment.is_followed()
    if asked or kwargs.get("return_dict") is False or kwargs.get("use_cache") is False:
        return []
    if ids is None or ids.shape[1] != 1 or positions is None or past is None:
        return []
    layers = [layer for layer in past.layers if isinstance(layer, PagedLayer)]
    if len(layers) != len(attachment.modules):
        return []
    if len(past.layers) > len(layers):
        if not strict:
            return []
        raise UnsupportedError(
            "attach: capture is not supported for models whose other layers keep a state. Remove "
            "capture=True."
        )
    session = layers[0].session
    if session.attachment is not attachment or attachment.detached:
        return []
    if session.unfinished or len(session.requests) != ids.shape[0]:
        return []
    if any(layer.steps != session.steps for layer in layers):
        return []
    if read_mask(ids.shape[0], 1, kwargs.get("attention_mask"), session.columns) is not None:
        return []  # a column is no token, or tokens are hidden: not the step that was captured
    devices = {key[0] for key in session.plans}
    if len(devices) > 1:
        if not strict:
            return []
        raise UnsupportedError(
            f"attach: capture is not supported for layers on several devices, got "
            f"{', '.join(sorted(map(str, devices)))}. Remove capture=True."
        )
    return layers if devices else []  # a copied cache has not had a pass of its own yet


def _serves(recorded: Recorded, session: Session, ids: Tensor, caches: list[LayerCache]) -> bool:
    """Whether a graph fits this step: batch size, context, caches and weights are unchanged."""
    return (
        recorded.ids.shape == ids.shape
        and recorded.ids.device == ids.device
        and _most_blocks(session) <= recorded.blocks
        and recorded.places == _places(caches, session.attachment)
        and len(recorded.decoded) == len(session.decoded)
        and all(
            state == known
            for (state, _), (known, _) in zip(
                recorded.decoded, session.decoded.values(), strict=True
            )
        )
    )


def _weights(model: nn.Module) -> tuple[int, ...]:
    return tuple(parameter.data_ptr() for parameter in model.parameters())


def _same_decoded(recorded: Recorded, session: Session) -> bool:
    """Compare by value: an in-place write to a weight may leave no trace."""
    decoded = session.decoded.values()
    return len(recorded.decoded) == len(decoded) and all(
        one is other or torch.equal(one, other)
        for (_, one), (_, other) in zip(recorded.decoded, decoded, strict=True)
    )


def _switches(adapters: list[Any]) -> tuple[Any, ...]:
    """What peft's layers check before they add an adapter; compared in every step."""
    return tuple(
        (
            module._disable_adapters,
            str(module.active_adapter),
            str(getattr(module, "merged_adapters", "")),
            str(getattr(module, "scaling", "")),
            len(module._forward_pre_hooks),
        )
        for module in adapters
    )


def _most_blocks(session: Session) -> int:
    assert session.batch is not None
    return max(session.batch.block_table.shape[1], 1)


def _places(caches: list[LayerCache], attachment: Attachment) -> tuple[int, ...]:
    """Addresses and lengths: a cache that moved away and back but has grown must not match."""
    parts = [part.data for cache in caches for part in cache.parts]
    if attachment.config.compressor is not None:
        parts.append(attachment.table(parts[0].device))
    return tuple(number for part in parts for number in (part.data_ptr(), len(part)))
