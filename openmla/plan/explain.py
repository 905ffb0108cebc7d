"""explain(): what a plan does, why, and how many bytes it takes, in lines for people."""

from __future__ import annotations

from openmla.backends import BACKENDS, kernel_of, launches, slower, why_not
from openmla.backends.choice import backend_for
from openmla.cache import cache_bytes, shown_bytes
from openmla.cache.format import get_format
from openmla.config import INDEXED_RATIO
from openmla.plan.explanation import DETAIL, OP, Explanation, Line, counted
from openmla.plan.forms import decode_threshold
from openmla.plan.options import thawed
from openmla.plan.rows import num_rows
from openmla.plan.types import (
    Absorbed,
    Across,
    Expanded,
    Group,
    Plan,
    Select,
    latent_row,
    num_words,
)
from openmla.plan.workspace import LOGITS_BYTES, MASK_BYTES
from openmla.ranks import Ranks

# whose kernels decide whether a row's bits are its own; the others treat every row by itself
_INVARIANT = (
    "project_heads", "mqa_paged", "mqa_sparse", "mha_ragged", "mha_masked", "index_logits",
    "compress_kv",
)  # fmt: skip
_PARTS = ("entries", "padding", "window", "state", "total")


def explain(plan: Plan, finished: bool) -> Explanation:
    """`finished`: rows come normalized and rotated, as an attached model's and an engine's do."""
    finished = finished or plan.config.is_external
    lines = [] if plan.ranks is None else [_rank(plan, plan.ranks)]
    if plan.config.compressor is not None:
        lines += _compressed(plan)
    else:
        dense = [group for group in plan.groups if group.form in ("absorbed", "expanded")]
        lines += [_dense(plan, group) for group in dense]
        lines += _sparse(plan)
    if plan.prefill_dtype is not None:
        lines.append(_eight_bits(plan))
    if plan.batch_invariant:
        lines.append(_invariant(plan, finished))
    if plan.query_dtype is not None:
        static = plan.query_dtype == "fp8_static"
        scale = "one calibrated scale per layer" if static else "a scale per token and head"
        lines.append(Line("queries", f"absorbed queries in e4m3, {scale}; outputs in bf16"))
    if plan.output is not None:
        lines.append(_output(plan, plan.output))
    padding = plan.num_tokens - sum(plan.query_lens)
    if padding and not plan.captured:
        lines.append(
            Line("padding", f"{counted(padding, 'token')} of no request: reads nothing, outputs 0")
        )
    return Explanation([*lines, *_reads(plan), *_ops(plan, finished), *_launches(plan, finished)])


def _invariant(plan: Plan, finished: bool) -> Line:
    """By which kernels a row is batch-invariant, and where its keys are split."""
    parts = []
    for op in _INVARIANT:
        call = plan.calls.get(op)
        if call is not None and _calls(plan, op, finished):
            name, kernel = call.backend, kernel_of(call.problem, call.backend)
            parts.append(f"{op} by {name}{f' ({kernel})' if kernel else ''}")
    return Line(
        "invariant",
        f"results do not depend on the batch: keys are split every {plan.run_length} tokens, "
        f"contexts at fixed positions; {', '.join(parts)}",
    )


def _eight_bits(plan: Plan) -> Line:
    """What a step computes in fp8 because of prefill_dtype."""
    if "quantize_heads" not in plan.calls:
        return Line("fp8", "prefill_dtype='fp8' has no effect: nothing is expanded in this step")
    rows = "; rows of the cache are read as stored" if plan.keeps_codes else ""
    return Line(
        "fp8",
        "expanded queries and keys in e4m3 (prefill_dtype='fp8'): a scale per query and head, and "
        f"per head of keys; values and probabilities in 16 bits{rows}",
    )


def _output(plan: Plan, output: str) -> Line:
    """Which op writes the outputs of each form."""
    parts = [f"{group.form} by {group.end}" for group in plan.groups if len(group.requests)]
    gated = ", after the gate" if plan.config.output_gate else ""
    return Line("output", f"{output}: {', '.join(parts) or 'no tokens'}{gated}")


def _dense(plan: Plan, group: Group) -> Line:
    """Requests that attend to all their keys."""
    count, part = len(group.requests), group.part
    if part is None:
        assert group.across is not None
        what = f"{counted(count, 'request')}, {counted(num_rows(group.rows), 'token')}"
        what += ", each rank over its own keys"
        return Line(group.form, f"{what}, {_merged(group.across)}", _why(plan, group))
    if isinstance(part, Absorbed) and plan.config.window:
        what = f"{counted(count, 'request')}, {counted(num_rows(group.rows), 'token')}, each over "
        what += f"its last {counted(plan.config.window, 'key')}, in "
        return Line("absorbed", what + counted(len(part.cuts), "chunk"), _why(plan, group))
    if isinstance(part, Absorbed):
        what = f"{counted(count, 'request')}, {_most(part.max_query_len)}{_few_keys(plan)}"
        return Line("absorbed", what, _why(plan, group))
    longest = max(plan.query_lens[b] for b in group.requests)
    chunks = ""
    if part.chunks and part.new_rows is None:
        chunks = f", {counted(len(part.chunks), 'context chunk')}"
    keys, held = expanded_size(plan, group)
    what = f"at most {shown_bytes(held)}: gathered rows, and keys and values of up to "
    what += counted(keys, "token")
    below = [Line("holds", what, width=DETAIL)]
    if group.across is not None:
        what = f"{counted(num_rows(group.across.rows), 'token')}, {_merged(group.across)}"
        why = "attended to in place, which is cheaper than gathering it"
        below.append(Line("context", what, why, width=DETAIL))
    brought = [chunk.brought.num_rows for chunk in part.chunks if chunk.brought is not None]
    if brought and plan.ranks is not None:
        size = shown_bytes(plan.ranks.workspace.num_bytes)
        what = f"gathered from all ranks in {counted(len(brought), 'chunk')}, "
        what += f"{counted(sum(brought), 'row')} from each, "
        why = "cheaper than attending to it in place and merging"
        below.append(Line("context", f"{what}in a workspace of {size}", why, width=DETAIL))
    return Line(
        "expanded",
        f"{counted(count, 'request')}, {_most(longest)}, {part.route}{chunks}{_few_keys(plan)}",
        _why(plan, group),
        below=tuple(below),
    )


def _merged(across: Across) -> str:
    return f"merged across ranks by {across.schedule}"


def _most(queries: int) -> str:
    return f"up to {counted(queries, 'query')} each"


def _rank(plan: Plan, ranks: Ranks) -> Line:
    """How keys and heads are sharded, and what this rank sends."""
    shard, dtype = ranks.shard, plan.problem("cache_write").dtype
    dealt = f"positions in runs of {shard.interleave}"
    if plan.config.compressor is not None:
        dealt = "entries in whole blocks"
    owned = (
        "heads sharded and gathered to attend"
        if ranks.heads == "own"
        else "all heads on every rank"
    )
    sent = shown_bytes(plan.sent_bytes(dtype))
    return Line("rank", f"{shard.rank} of {shard.size}, {dealt}, {owned}, sends {sent} per layer")


def _candidates(plan: Plan, select: Select) -> list[Line]:
    """What ranks exchange to select keys together."""
    if not select.offered:
        return []
    sent = shown_bytes(plan.selection_bytes())
    what = f"from {counted(select.offered, 'candidate')} per rank and token, sends {sent} per "
    return [Line("selected", f"{what}layer that selects")]


def expanded_size(plan: Plan, group: Group) -> tuple[int, int]:
    """The most keys of an expanded group that are expanded at once, and the bytes held by that."""
    part, new = group.part, num_rows(group.rows)
    assert isinstance(part, Expanded)
    gathered = max((chunk.num_keys for chunk in part.chunks), default=0)
    keys = gathered if part.new is None else max(gathered, new)
    return keys, expanded_bytes(plan, gathered, keys, new)


def expanded_bytes(plan: Plan, gathered: int, keys: int, queries: int) -> int:
    """Bytes of gathered rows, of keys and values expanded from them or from new rows, and of whole
    keys; in fp8 also of queries, with a scale each, and of codes in 16 bits."""
    config, size = plan.config, plan.problem("cache_write").dtype.itemsize
    H, D, E = config.num_heads, config.latent_dim, config.qk_head_dim
    held = gathered * D * size
    if plan.keeps_codes:
        held = gathered * (D + config.kv_lora_rank * size)
    held += keys * H * (config.qk_nope_head_dim + config.v_head_dim) * size
    if plan.prefill_dtype is None:
        return held + keys * H * E * size
    return held + keys * H * E + queries * (H * E + 4 * (-(-H // 4) * 4))


def sparse_bytes(plan: Plan) -> dict[str, int]:
    """What tokens that select hold in one layer besides inputs and outputs, at most, by name."""
    select, config = plan.select, plan.config
    if select is None or config.indexer is None or config.compressor is not None:
        return {}
    chosen, masked = plan.listing, plan.group("masked")
    dtype, listed, most, rows, tokens = plan.problem("cache_write").dtype, select.num_rows, 0, 0, 0
    if chosen is not None:
        assert isinstance(chosen.part, Absorbed)
        listed += num_rows(chosen.rows) if plan.mapped else 0
        most = max(num_rows(cut) for cut in chosen.part.cuts)
    if masked is not None:
        assert isinstance(masked.part, Expanded)
        rows, tokens = max(chunk.num_keys for chunk in masked.part.chunks), num_rows(masked.rows)
    return {
        "scores": select.score_bytes,
        "selection": 4 * config.indexer.topk * listed,
        "latent queries": most * latent_row(config) * dtype.itemsize,
        "mask": mask_bytes(masked),
        "expanded keys": expanded_bytes(plan, rows, rows, tokens),
    }


def mask_bytes(group: Group | None) -> int:
    """The size of the largest mask of a masked group."""
    if group is None:
        return 0
    assert isinstance(group.part, Expanded)
    sizes = [
        4 * num_rows(ask.rows) * num_words(chunk.max_key_len)
        for chunk in group.part.chunks
        for ask in chunk.asks
    ]
    return max(sizes, default=0)


def _few_keys(plan: Plan) -> str:
    """Why requests of a sparse model are dense."""
    indexer = plan.config.indexer
    return f", dense: no more than {indexer.topk:,} keys" if indexer is not None else ""


def _why(plan: Plan, group: Group) -> str:
    """Why requests take a form: as asked for, for want of another, or by cost."""
    forced = _forced(plan, group)
    if forced:
        return forced
    config, problem = plan.config, plan.problem("cache_write")
    found = []
    for b in group.requests:
        n, S = plan.query_lens[b], plan.seq_lens[b]
        if n and b not in plan.bounded:
            bits = max(S, 1).bit_length() - 1
            format, device = problem.format, problem.device
            itemsize, length = problem.dtype.itemsize, plan.run_length
            most = decode_threshold(config, format, itemsize, device, bits, length)
            found.append((n / most, n, S, most))
    if not found:
        return "there are no new tokens to expand keys for"
    _, n, S, most = (
        max(found) if group.form == "absorbed" else min(found)
    )  # the nearest to the other
    unknown = len(plan.bounded.intersection(group.requests))
    others = ""
    if unknown:
        others = f"; the lengths of {counted(unknown, 'request')} are known only to the device"
    return (
        f"cheaper: {counted(n, 'new token')} over {counted(S, 'key')} (at this length, expanding "
        f"pays off from about {counted(most + 1, 'new token')}){others}"
    )


def _forced(plan: Plan, group: Group) -> str:
    if plan.captured:
        return "a captured graph replays one form, and into= uses the absorbed form"
    if plan.options.form != "auto":
        return f"asked for: form={plan.options.form!r}"
    asking = {b for b in group.requests if plan.query_lens[b]}
    if any(0 < plan.config.window < plan.seq_lens[b] for b in asking):
        return "the only form over a window: expanded keys are attended to from the first one"
    if asking and asking <= plan.bounded:
        return "the lengths are known only to the device, which leaves no other form"
    return ""


def _sparse(plan: Plan) -> list[Line]:
    """Tokens that select their keys."""
    select, indexer = plan.select, plan.config.indexer
    if select is None or indexer is None:
        return []
    K = indexer.topk
    keys = max((chunk.num_keys for chunk in select.chunks), default=max(plan.seq_lens, default=0))
    scores = "none: the caller selects keys, because the cache has no indexer keys"
    if select.chunks:
        scores = _scores(select)
    each = " each" if select.num_rows > 1 else ""
    tokens = counted(select.num_rows, "token")
    lines = [
        Line(
            "sparse", f"top-k selection for {tokens}: {K:,} of up to {counted(keys, 'key')}{each}"
        ),
        Line("scores", scores),
    ]
    chosen, masked = plan.listing, plan.group("masked")
    lines += _candidates(plan, select)
    if chosen is not None:
        assert isinstance(chosen.part, Absorbed)
        what = (
            f"{counted(num_rows(chosen.rows), 'token')}, absorbed, over their selected keys, in "
            f"{counted(len(chosen.part.cuts), 'chunk')}"
        )
        whole = plan.group("chosen")
        assert whole is not None
        what += "" if whole.across is None else f", {_merged(whole.across)}"
        why = _forced(plan, whole) or f"cheaper: {K:,} selected keys per token, not all keys"
        lines.append(Line("chosen", what, why))
    if masked is not None:
        assert isinstance(masked.part, Expanded)
        chunks = masked.part.chunks
        rows = max(chunk.num_keys for chunk in chunks)
        why = _forced(plan, masked) or f"cheaper than reading {K:,} selected keys per token"
        what = (
            f"{counted(num_rows(masked.rows), 'token')}, expanded, in "
            f"{counted(len(chunks), 'chunk')} of up to {counted(rows, 'key')}, mask of at most "
            f"{_mib(mask_bytes(masked))} (limit {_mib(MASK_BYTES)})"
        )
        if plan.ranks is not None:
            what += ", keys gathered from all ranks"
        lines.append(Line("masked", what, why))
    parts = {name: size for name, size in sparse_bytes(plan).items() if size}
    listed = ", ".join(f"{name} {_mib(size)}" for name, size in parts.items())
    total = _mib(sum(parts.values()))
    what = f"at most {total}, besides what a backend allocates: {listed}"
    lines.append(Line("workspace", what))
    return lines


def _compressed(plan: Plan) -> list[Line]:
    config, select, pool = plan.config, plan.select, plan.pool
    assert config.compressor is not None and config.indexer is not None and plan.shared is not None
    requests = plan.shared.query_start_loc.shape[0] - 1
    lines = [
        Line(
            "window",
            f"{counted(plan.num_tokens, 'token')} of {counted(requests, 'request')}, each over its "
            f"last {counted(config.compressor.window, 'row')}",
            "absorbed is the only form, because the latent is both key and value",
        )
    ]
    if pool is not None and select is not None:
        lines += [
            Line(
                "entries",
                f"one per {pool.ratio} tokens; each token selects {config.indexer.topk:,} of up to "
                f"{counted(pool.max_entries, 'entry')}",
            ),
            Line(
                "scores",
                f"{_scores(select)}, selection {_mib(4 * config.indexer.topk * select.num_rows)}",
            ),
            *_candidates(plan, select),
        ]
    elif pool is not None:
        few = ""
        if pool.ratio == INDEXED_RATIO:
            few = f": no more than {config.indexer.topk:,}, so that none are selected"
        entries = counted(pool.max_entries, "entry")
        what = f"one per {pool.ratio} tokens; each token sees all of up to {entries}{few}"
        lines.append(Line("entries", what))
    across = plan.groups[0].across
    if across is not None:
        what = (
            f"this rank's entries are attended to in place, {_merged(across)}, then with the window"
        )
        lines.append(Line("ranks", what))
    if plan.bring is not None:
        what = (
            f"entries gathered from all ranks, {counted(len(plan.bring.blocks), 'block')} from "
            f"each, {shown_bytes(plan.bring.num_bytes)} in total"
        )
        why = "cheaper than attending to them in place and merging"
        lines.append(Line("ranks", what, why))
    return lines + ([] if plan.ranks is not None else _caches(plan))  # which differ by ratio there


def _caches(plan: Plan) -> list[Line]:
    """What all layers of a V4 model keep, by kind."""
    if plan.geometry is None:
        return []
    geometry = plan.geometry
    kinds = cache_bytes(plan.config, geometry)
    tokens = geometry.num_blocks * geometry.block_size
    what = (
        f"{counted(tokens, 'token')} in blocks of {geometry.block_size}, {geometry.format} and "
        f"{geometry.index_format}; windows and states for {counted(geometry.num_states, 'request')}"
    )
    lines = [
        "ratio layers  B/token        entries      padding       window        state          total"
    ]
    for kind in kinds:
        lines.append(
            f"{kind.ratio:>5} {kind.num_layers:>6} {kind.token_bytes:>8g} "
            f"{kind.entries:>14} {kind.padding:>12} {kind.window:>12} {kind.state:>12} "
            f"{kind.total:>14}"
        )
    each = sum(kind.num_layers * kind.token_bytes for kind in kinds)
    sums = [sum(getattr(kind, name) for kind in kinds) for name in _PARTS]
    lines.append(
        f"total {sum(kind.num_layers for kind in kinds):>6} {each:>8g} "
        f"{sums[0]:>14} {sums[1]:>12} {sums[2]:>12} {sums[3]:>12} {sums[4]:>14}"
    )
    lines.append(
        f"entries ({sums[0] / 2**30:.2f} GiB) and padding ({_mib(sums[1])}) grow with the context; "
        f"windows and states ({_mib(sums[2] + sums[3])}) do not; {sums[4] / 2**30:.2f} GiB in total"
    )
    return [Line("cache", what, below=tuple(Line("", line) for line in lines))]


def _reads(plan: Plan) -> list[Line]:
    """Bytes of cache that one layer's attention reads, by group."""
    if plan.config.compressor is not None:
        return []
    query_lens, seq_lens, config, keys = plan.query_lens, plan.seq_lens, plan.config, 0
    rows = {}
    for group in plan.groups:
        if isinstance(group.part, Expanded):
            rows[group.form] = sum(chunk.num_keys for chunk in group.part.chunks)
        elif config.window:
            counts = [(query_lens[b], seq_lens[b]) for b in group.requests]
            rows[group.form] = sum(min(S - i, config.window) for n, S in counts for i in range(n))
        elif group.form == "absorbed":
            lens = [seq_lens[b] for b in group.requests if query_lens[b]]
            if plan.ranks is not None:
                lens = plan.ranks.shard.local_lens(lens)
            rows[group.form] = sum(lens)
        elif config.indexer is not None:
            K, less = config.indexer.topk, 1 if plan.causal else 0
            counts = [(query_lens[b], seq_lens[b]) for b in group.requests]
            rows[group.form] = sum(min(S - i * less, K) for n, S in counts for i in range(n))
        if group.selected is not None and _scored(plan):
            keys += sum(seq_lens[b] for b in group.requests)
    row_bytes = get_format(plan.problem("cache_write").format).row_bytes(config.latent_dim)
    sizes = {name: count * row_bytes for name, count in rows.items() if count}
    if keys and config.indexer is not None:
        layout = get_format(plan.problem("index_write").format)
        sizes["index keys"] = keys * layout.row_bytes(config.indexer.head_dim)
    listed = ", ".join(f"{name} {shown_bytes(size)}" for name, size in sizes.items())
    most = "at most " if plan.bounded else ""
    total = shown_bytes(sum(sizes.values()))
    return [Line("reads", f"{most}{total} of cache per layer{f': {listed}' if listed else ''}")]


def _ops(plan: Plan, finished: bool) -> list[Line]:
    """The ops that run, their backends, and why no better backend runs them."""
    lines, asked = [], thawed(plan.options.backend)
    for op, (problem, chosen, *_) in plan.calls.items():
        if _calls(plan, op, finished):
            lost = "asked for"
            if backend_for(op, asked) == "auto":
                better = BACKENDS[op][: BACKENDS[op].index(chosen)]
                reasons = {name: why_not(problem, name) or slower(problem, name) for name in better}
                lost = "; ".join(f"not {name}: {reason}" for name, reason in reasons.items())
            kernel = kernel_of(problem, chosen)
            ran = f"{chosen}, {kernel}" if kernel else chosen
            lines.append(Line(op, ran, lost, width=OP))
    return lines


def _launches(plan: Plan, finished: bool) -> list[Line]:
    """How many kernels of openmla a layer launches for its attention."""
    calls = {op: _calls(plan, op, finished) for op in plan.calls}
    counts = {op: launches(op, plan.calls[op].backend) for op, called in calls.items() if called}
    known = {op: n * calls[op] for op, n in counts.items() if n is not None}
    if not known:
        return []
    others = [op for op, count in counts.items() if count is None]
    besides = f"; also what torch launches for {', '.join(others)}" if others else ""
    listed = ", ".join(f"{op} {count}" for op, count in known.items())
    told = f"up to {sum(known.values())} per layer and step: {listed}{besides}"
    return [Line("launches", told)]


def _in_one_launch(plan: Plan) -> bool:
    """Whether raw rows are finished and written by latent_write, as attention/write.py has it."""
    on_gpu = plan.problem("latent_write").device == "cuda"
    return plan.backend("latent_write") != "reference" or not on_gpu


def _scored(plan: Plan) -> int:
    """Turns in which there is something to choose."""
    if plan.select is None or plan.config.indexer is None:
        return 0
    return sum(chunk.num_keys > plan.config.indexer.topk for chunk in plan.select.chunks)


def _calls(plan: Plan, op: str, finished: bool) -> int:
    """How often a layer calls an op in this step."""
    parts = [group.part for group in plan.groups]
    parts += [each.part for group in plan.groups if group.across for each in group.across.groups]
    expanded = [part for part in parts if isinstance(part, Expanded)]
    absorbed = [part for part in parts if isinstance(part, Absorbed)]
    reads = sum(max(len(part.cuts), 1) for part in absorbed)
    masked = [part for part in expanded if part.route == "masked"]
    dense = [part for part in expanded if part.route != "masked"]
    asks = sum(len(chunk.asks) for part in masked for chunk in part.chunks)
    new = sum(part.new is not None for part in dense)
    chunks = [chunk for part in dense for chunk in part.chunks]
    gathers = len(chunks) + sum(len(part.chunks) for part in masked)
    merges = sum(len(part.chunks) for part in dense if part.new_rows is None)
    if any(group.end == "merge_quantize" for group in plan.groups):
        merges = sum(chunk.continued is not None for chunk in chunks)
    v4 = plan.config.compressor is not None
    one_launch = not finished and _in_one_launch(plan)
    turned = 0
    if not finished:
        turned = 0 if one_launch else 2  # queries and rows
        # index queries and keys; V4: what comes out is turned back
        turned += v4 or plan.config.indexer is not None
    if v4:
        turned += plan.select is not None  # index queries
    projections = 0 if v4 else 2 * reads  # into latent space and out of it
    return {
        "latent_write": int(one_launch and plan.causal),
        "cache_write": int(not one_launch and plan.causal),
        "rope": turned,
        "compress_kv": 1 + (plan.ratio == INDEXED_RATIO),
        "cache_gather": gathers,
        "mha_ragged": new + len(chunks),
        "merge_states": merges + asks,
        "merge_quantize": sum(chunk.ended is not None for chunk in chunks),
        "project_quantize": reads,
        "quantize_heads": len(expanded) + new + gathers,  # queries once, keys each time
        "quantize_out": _quantized_apart(plan),
        "index_logits": _scored(plan),
        "index_topk": _scored(plan),
        "mqa_sparse": sum(max(len(part.cuts), 1) for part in absorbed if part.cuts or v4),
        "quantize_queries": projections // 2,
        "project_heads": projections + new + gathers,
        "pack_mask": asks,
        "mha_masked": asks,
    }.get(op, 1)


def _quantized_apart(plan: Plan) -> int:
    """Calls of quantize_out: what no other op ends, and padding."""
    calls = int(plan.padding > 0)
    for group in plan.groups:
        if group.end == "quantize_out":
            calls += bool(len(group.requests))
        elif isinstance(group.part, Expanded):
            calls += len(group.part.alone)
    return calls


def _scores(select: Select) -> str:
    chunks = counted(len(select.chunks), "chunk")
    return f"in {chunks} of at most {_mib(select.score_bytes)} (limit {_mib(LOGITS_BYTES)})"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
