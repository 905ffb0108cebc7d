"""Session: the requests of one past_key_values, one per batch row."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from openmla.attention import AbsorbedWeights, Selection
from openmla.cache import BlockPool, CompressedPool, LayerCache, PoolGroup
from openmla.errors import ConfigError, ShapeError, UnsupportedError
from openmla.integrations.transformers.attachment import Attachment
from openmla.integrations.transformers.compressed import check_positions
from openmla.integrations.transformers.masks import (
    Runs,
    add_runs,
    hide_tokens,
    num_tokens,
    read_mask,
    runs_of,
)
from openmla.integrations.transformers.offload import brought_in
from openmla.layers.eight_bits import absorb_eight_bits, expands_better, keep_eight_bits
from openmla.layers.weights import (
    Known,
    absorb,
    decode_weight,
    expands_itself,
    is_plain,
    parts_of,
    refuse_unabsorbable,
    state_of,
)
from openmla.plan import Batch, Plan, make_plan
from openmla.plan.upload import upload


class Entry(NamedTuple):
    """Queries of one row: tokens start..stop-1 of a request, or one query that only `looks`: it
    sees the request's tokens and is not one of them."""

    request: int
    start: int
    stop: int
    looks: bool = False

    @property
    def query_len(self) -> int:
        return 1 if self.looks else self.stop - self.start


class Session:
    """The requests of one past_key_values object: one per batch row, for all layers."""

    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment
        self.requests: list[int] = []
        self.columns: list[Runs] = []  # per row
        self.late: set[int] = set()  # rows whose prompt was padding only
        # kv_b_proj that is not plain, by layer: its state when decoded, and the decoded weight
        self.decoded: dict[int, tuple[Any, Tensor]] = {}
        self.views: dict[int, AbsorbedWeights] = {}  # views of fp8 weights
        self.steps = 0
        self.leader: int | None = None  # the layer whose cache calls move requests
        self.entries: list[Entry] = []  # the current pass's queries
        self.batches: list[Batch] = []  # the step, in each of the attachment's pools; V4 has one
        self.picked: Tensor | None = None  # tokens that are not padding; None: all
        self.placed: dict[torch.device, Tensor] = {}  # `picked` on the layers' devices
        self.plans: dict[tuple[torch.device, int], Plan] = {}  # by device and kind of layer
        self.dtype: torch.dtype | None = None  # dtype of the last queries
        self.selection: Selection | None = None  # from the last layer that selected keys
        self.selected_by: Plan | None = None  # with this plan
        self.fresh = True  # the current pass is the first over its requests
        self.unfinished = False  # a pass has begun, and its last layer has not attended
        weakref.finalize(self, attachment.drop, self.requests)

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        """Make a copy that shares every block until one of the two writes."""
        twin = Session(self.attachment)
        memo[id(self)] = twin
        twin.steps, twin.leader, twin.dtype = self.steps, self.leader, self.dtype
        twin.requests += self._shared(range(len(self.requests)))
        twin.columns, twin.late = [list(runs) for runs in self.columns], set(self.late)
        return twin

    def _shared(self, rows: Sequence[int]) -> list[int]:
        for row in rows:
            if not 0 <= row < len(self.requests):
                raise ShapeError(
                    f"attach: rows of the cache must be in 0..{len(self.requests) - 1}, got {row}."
                )
        fresh = [next(self.attachment.request_ids) for _ in rows]
        with self.attachment.bookkeeping() as pool:
            for row, name in zip(rows, fresh, strict=True):
                pool.share(self.requests[row], name)
        return fresh

    def reorder_rows(self, rows: Sequence[int]) -> None:
        """Make row i a copy of the former row rows[i]; no bytes move."""
        fresh = self._shared(rows)
        self.attachment.drop(tuple(self.requests))
        self.requests[:] = fresh
        self.columns = [list(self.columns[row]) for row in rows]
        self.late = {b for b, row in enumerate(rows) if row in self.late}

    def truncate(self, num_columns: int) -> None:
        """Drop the last columns of every row; some of them may be padding."""
        columns = [list(runs) for runs in self.columns]
        dropped_tokens = [drop_columns(runs, num_columns) for runs in columns]
        with self.attachment.bookkeeping() as pool:
            lens = [
                pool.seq_len(request) - dropped
                for request, dropped in zip(self.requests, dropped_tokens, strict=True)
            ]
            for request, length in zip(self.requests, lens, strict=True):
                pool.check_truncate(request, length)
            for request, length in zip(self.requests, lens, strict=True):
                pool.truncate(request, length)
        self.columns = columns

    def clear(self) -> None:
        self._free()
        self.unfinished = False

    def fail(self) -> None:
        """Drop everything: a pass ended midway, and the layers hold different tokens."""
        self._free()
        self.attachment.current.session = None
        self.plans, self.batches, self.picked = {}, [], None
        self.selection = self.selected_by = None
        self.placed = {}

    def _free(self) -> None:
        self.attachment.drop(tuple(self.requests))
        self.requests.clear()
        self.columns.clear()

    def absorbed(self, module: nn.Module, layer: int, dtype: torch.dtype) -> AbsorbedWeights:
        """The module's current kv_b_proj: views of its weight, or the weight decoded.

        Both are reused until the linear changes: another weight, or an adapter that was switched on
        or off.
        """
        linear = module.kv_b_proj
        assert isinstance(linear, nn.Module)
        if self.attachment.absorbed_format is not None:
            return self._eight_bits(linear, layer, dtype)
        known = self.attachment.known.get(layer)
        if known is not None and known.still_holds(linear):
            return known.views
        refuse_unabsorbable(linear, f"attach: kv_b_proj of layer {layer}")
        with brought_in(*parts_of(linear)):
            plain = is_plain(linear)
            weight = linear.weight if plain else self._decoded(linear, layer, dtype)
        assert isinstance(weight, Tensor)
        by_itself = not plain and expands_itself(linear, weight.device)
        config = self.attachment.config.layer(layer)
        absorbed = absorb(weight, config, linear if by_itself else None)
        # do not keep tracers' fake tensors or what accelerate brings in
        if plain and isinstance(weight, nn.Parameter) and not hasattr(linear, "_hf_hook"):
            assert isinstance(linear, nn.Linear)
            self.attachment.known[layer] = Known(linear, weight, weight.data_ptr(), absorbed)
        return absorbed

    def _eight_bits(self, linear: nn.Module, layer: int, dtype: torch.dtype) -> AbsorbedWeights:
        """The module's kv_b_proj in fp8. Caches share the fp8 copy; changes are detected by value,
        as for decoded weights."""
        refuse_unabsorbable(linear, f"attach: kv_b_proj of layer {layer}")
        attachment, config = self.attachment, self.attachment.config.layer(layer)
        with brought_in(*linear.modules()):
            state, before = state_of(linear), self.decoded.get(layer)
            if before is not None and before[0] == state and layer in self.views:
                return self.views[layer]
            kept = keep_eight_bits(linear, config, dtype)
            kept = attachment.share_eight_bits(layer, kept)
            by_itself = expands_better(linear, kept, config)
            absorbed = absorb_eight_bits(linear, kept, config, by_itself=by_itself)
        self.decoded[layer], self.views[layer] = (state, kept), absorbed
        if absorbed.linear is None and absorbed.kv_b.dtype != dtype:
            decoded = absorbed.kv_b.numel() * dtype.itemsize
            attachment.expands_bytes = max(attachment.expands_bytes, decoded)
        return absorbed

    def _decoded(self, linear: nn.Module, layer: int, dtype: torch.dtype) -> Tensor:
        state = state_of(linear)
        if layer not in self.decoded or self.decoded[layer][0] != state:
            C = self.attachment.config.layer(layer).kv_lora_rank
            self.decoded[layer] = (state, decode_weight(linear, C, dtype))
            self.attachment.decoded(self.decoded[layer][1])
        return self.decoded[layer][1]

    def begin(
        self, B: int, S: int, mask: Tensor | None, packed: Sequence[int] | None = None
    ) -> None:
        """Begin a forward pass: find padding, take blocks, describe the batch.

        `packed`: lengths of the sequences packed into rows, if a row is not one sequence.
        """
        self._end_interrupted()
        if self.unfinished:
            raise ConfigError(
                "attach: the last forward pass with this cache failed midway, and its layers hold "
                "different tokens. Make a new cache."
            )
        attachment, fresh = self.attachment, not self.requests
        if packed is not None:
            B = len(packed)
        cached = [[] for _ in range(B)] if fresh else self.columns
        if len(cached) != B:
            raise ShapeError(
                f"attach: the batch must have as many rows as the cache, {len(cached)}, got {B}."
            )
        generating = attachment.current.generating
        found = read_mask(B, S, mask, cached, generating=generating)
        # in plain steps every row is one run: this is host time for every token
        new = [[(True, S)]] * B if found is None else [runs_of(row) for row in found.new.tolist()]
        if packed is not None:
            new = [[(True, length)] for length in packed]
        hidden = [[]] * B if found is None else found.hidden
        requests = [next(attachment.request_ids) for _ in range(B)] if fresh else self.requests
        with attachment.lock, attachment.bookkeeping() as pool:
            if isinstance(pool, CompressedPool):
                lens = [pool.seq_len(request) for request in requests]
                if fresh:
                    self.late = {b for b, runs in enumerate(new) if num_tokens(runs) == 0}
                late = set() if fresh else self.late
                check_positions(attachment.current.positions, new, lens, late)
                ends = [n + num_tokens(runs) for n, runs in zip(lens, new, strict=True)]
                attachment.reach(max(ends))
                for n, runs in zip(lens, new, strict=True):
                    if not runs[-1][0] and (n or (generating and num_tokens(runs))):
                        raise ShapeError(
                            "attach: attention_mask must be 1 in the last column of every row for "
                            "deepseek_v4, when generating or with cached tokens. Pad on the left."
                        )
            self._take(pool, requests, [num_tokens(runs) for runs in new], hidden)
            # from here on an exception invalidates the cache and frees its blocks
            attachment.current.session, self.unfinished = self, True
            self.fresh = fresh
            if fresh:
                self.requests += requests
                self.columns = cached
            self.entries, self.picked = self._entries(pool, requests, new, S)
            attachment.busy.update(requests)
            for b in range(B):
                if hidden[b]:
                    self.columns[b] = hide_tokens(self.columns[b], hidden[b])
                add_runs(self.columns[b], new[b])
            self.describe()
        self.plans, self.placed = {}, {}
        self.steps += 1

    def _end_interrupted(self) -> None:
        """Free what this thread's last pass had taken, if Ctrl-C ended it: torch calls no hooks
        then."""
        before = self.attachment.current.session
        if before is not None and before.unfinished:
            before.fail()

    def finish(self) -> None:
        """End the pass: its last layer has attended."""
        self.unfinished = False
        self.attachment.current.session = None
        self.attachment.busy.difference_update(self.requests)

    def _take(
        self,
        pool: BlockPool | PoolGroup,
        requests: Sequence[int],
        new_lens: Sequence[int],
        hidden: Sequence[Sequence[int]],
    ) -> None:
        """Take blocks for new tokens, all or nothing, and remove cached tokens that are now hidden.

        Tokens after a hidden one move up. Meanwhile a second request shares the blocks, so that
        none is overwritten before it is read.
        """
        if isinstance(pool, PoolGroup) and any(hidden):
            why = "rows before the window are gone, and none of it can move up"
            if isinstance(pool, CompressedPool):
                why = "an entry pools several tokens, and none can be removed"
            raise ShapeError(
                "attach: attention_mask must be 1 for cached tokens of "
                f"{self.attachment.config.model_type}: {why}. Run the tokens again with a new "
                "cache."
            )
        if self.attachment.ranks is not None and any(hidden):
            raise UnsupportedError(
                "attach: attention_mask must be 1 for cached tokens with a group: later tokens "
                "would have to move to other ranks. Run the tokens again with a new cache."
            )
        wanted, held = dict(zip(requests, new_lens, strict=True)), {}
        old, new = [], []  # the rows that move: (request, start, stop)
        try:
            for request, positions in zip(requests, hidden, strict=True):
                if not positions:
                    continue
                assert isinstance(pool, BlockPool)
                first, length = positions[0], pool.seq_len(request)
                rest = sorted(set(range(first, length)) - set(positions))
                held[request] = next(self.attachment.request_ids)
                pool.share(request, held[request])
                pool.truncate(request, first)
                old += [(held[request], position, position + 1) for position in rest]
                new.append((request, first, first + len(rest)))
                wanted[request] += len(rest)
            copies = self.attachment.take(wanted)
        except BaseException:
            for request, name in held.items():
                pool.free(request)
                pool.share(name, request)
                pool.free(name)
            raise
        if held:
            assert isinstance(pool, BlockPool)
            self.attachment.copy(copies, pool.slot_mapping(old), pool.slot_mapping(new))
        elif any(copies):
            self.attachment.copy(copies)
        for name in held.values():
            pool.free(name)

    def _entries(
        self,
        pool: BlockPool | PoolGroup,
        requests: Sequence[int],
        new: Sequence[Runs],
        S: int,
    ) -> tuple[list[Entry], Tensor | None]:
        """The pass's queries, and which columns of the batch they are; None: all, in order.

        Columns that are not tokens have queries too, because their output may be read: a draft
        token that looks like padding may be generate()'s last, and a classifier may pool one. Only
        before a row's first token there is nothing to attend to.
        """
        lens = [pool.seq_len(request) for request in requests]
        if all(len(runs) == 1 and runs[0][0] for runs in new):
            begins = [n - runs[0][1] for n, runs in zip(lens, new, strict=True)]
            return list(map(Entry, requests, begins, lens)), None
        # a V4 request has one state, for one run of queries
        looks = not isinstance(pool, CompressedPool)
        entries: list[Entry] = []
        picked: list[int] = []
        for b, request in enumerate(requests):
            stop = lens[b] - num_tokens(new[b])
            mine = [] if stop < lens[b] else [Entry(request, stop, stop)]
            column = 0
            for is_token, length in new[b]:
                columns = range(b * S + column, b * S + column + length)
                if is_token:
                    if mine and not mine[-1].looks:  # no `looks` query in between
                        mine[-1] = mine[-1]._replace(stop=stop + length)
                    else:
                        mine.append(Entry(request, stop, stop + length))
                    stop += length
                    picked += columns
                elif stop > 0 and looks:
                    mine += [Entry(request, stop, stop, looks=True)] * length
                    picked += columns
                column += length
            entries += mine
        return entries, torch.tensor(picked, dtype=torch.int64)

    @property
    def batch(self) -> Batch | None:
        """The step over rows that live as long as their request."""
        return self.batches[0] if self.batches else None

    def describe(self, window_columns: int = 0) -> None:
        """Describe the step from the requests' old lengths to their new ones, as Batches.
        `window_columns`: the least columns of rings."""
        pool, requests = self.attachment.pool, [entry.request for entry in self.entries]
        query_lens = [entry.query_len for entry in self.entries]
        ends = [entry.stop for entry in self.entries]
        if isinstance(pool, CompressedPool):
            tables = pool.tables(requests, window_columns=window_columns)
            self.batches = [Batch(query_lens, ends, **tables._asdict())]
            return
        self.batches, looking = [], any(entry.looks for entry in self.entries)
        for each in self.attachment.pools:
            columns = 0 if each.window is None else window_columns
            slots = each.slot_mapping([entry[:3] for entry in self.entries])
            if looking:
                stored = torch.tensor([not entry.looks for entry in self.entries])
                stored = stored.repeat_interleave(torch.tensor(query_lens))
                slots = torch.full(stored.shape, -1).masked_scatter(stored, slots)
            table = each.block_table(requests, num_columns=columns)
            self.batches.append(Batch(query_lens, ends, table, slots))

    def picked_on(self, device: torch.device) -> Tensor | None:
        """Indices of tokens that are not padding, None: all. Uploaded once for all layers of a
        pass, without waiting for what the first one has launched."""
        if self.picked is None:
            return None
        if device not in self.placed:
            (self.placed[device],) = upload((self.picked,), device)
        return self.placed[device]

    def plan(
        self,
        layer: int,
        cache: LayerCache,
        device: torch.device,
        dtype: torch.dtype,
        into: dict[str, Tensor] | None = None,
    ) -> Plan:
        """This pass's plan, shared by all layers of one kind on a device."""
        key = (device, self.attachment.config.kind(layer))
        self.dtype = dtype
        if key not in self.plans:
            config = self.attachment.config.layer(layer)
            if config.indexer is not None and config.compressor is None and cache.index is None:
                cache = self.attachment.with_index(cache, device, dtype)
            if config.indexer is not None and config.compressor is None and cache.index is None:
                raise UnsupportedError(
                    f"attach: the first layer on {device} must have its own indexer. Move it to "
                    "the device of the layer whose selection it shares."
                )
            first = not self.plans
            self.plans[key] = self._planned(layer, cache, device, dtype, into)
            self.attachment.planned(key[1], self.plans[key], first=first)
        return self.plans[key]

    def _planned(
        self,
        layer: int,
        cache: LayerCache,
        device: torch.device,
        dtype: torch.dtype,
        into: dict[str, Tensor] | None,
    ) -> Plan:
        attachment = self.attachment
        config, lifetime = attachment.config.layer(layer), attachment.lifetime(layer)
        shares = config.compressor is not None and attachment.ranks is None
        made = (plan for (place, _), plan in self.plans.items() if shares and place == device)
        beside = next(made, None)
        return make_plan(
            self.batches[lifetime],
            config,
            cache,
            dtype=dtype,
            backend=attachment.backend,
            workspace_tokens=None if into else attachment.workspace_tokens,
            batch_invariant=attachment.batch_invariant,
            query_dtype=attachment.query_dtype,
            prefill_dtype=None if into else attachment.prefill_dtype,
            into=into,
            beside=beside,
            ranks=attachment.ranks,
        )


def drop_columns(runs: Runs, num_columns: int) -> int:
    """Remove the last columns from a row's runs. Returns how many of them were tokens."""
    tokens = 0
    while num_columns > 0 and runs:
        is_token, length = runs.pop()
        dropped = min(length, num_columns)
        num_columns -= dropped
        tokens += dropped if is_token else 0
        if dropped < length:
            runs.append((is_token, length - dropped))
    return tokens
