"""explain(): what a plan does, why, and in how many bytes, in lines for people."""

from __future__ import annotations

from openmla.backends import BACKENDS, kernel_of, launches, slower, why_not
from openmla.cache import cache_bytes, shown_bytes
from openmla.cache.format import get_format
from openmla.config import INDEXED_RATIO
from openmla.plan.explanation import DETAIL, OP, Explanation, Line
from openmla.plan.forms import decode_threshold
from openmla.plan.rows import num_rows
from openmla.plan.types import CompressedPlan, Plan, PrefillPlan, SparsePlan
from openmla.plan.workspace import LOGITS_BYTES, MASK_BYTES

# whose kernels decide whether a row's bits are its own; the others treat every row by itself
_INVARIANT = (
    "project_heads", "mqa_paged", "mqa_sparse", "mha_ragged", "mha_masked", "index_logits",
    "compress_kv",
)  # fmt: skip
_PARTS = ("entries", "padding", "window", "state", "total")


def explain(plan: Plan, finished: bool) -> Explanation:
    """`finished`: rows come normalised and rotated, as an attached model's and an engine's do."""
    finished = finished or plan.config.is_external
    lines: list[Line] = []
    if plan.decode is not None:
        decode = plan.decode
        what = f"{len(decode.seq_lens)} requests, up to {decode.max_query_len} queries each"
        lines.append(Line("absorbed", f"{what}{_few_keys(plan)}", _why(plan, "absorbed")))
    if plan.prefill is not None:
        lines.append(_expanded(plan, plan.prefill))
    if plan.sparse is not None:
        lines += _sparse(plan, plan.sparse)
    if plan.compressed is not None:
        lines += _compressed(plan, plan.compressed)
    if plan.prefill_dtype is not None:
        lines.append(_eight_bits(plan))
    if plan.batch_invariant:
        lines.append(_invariant(plan, finished))
    if plan.query_dtype is not None:
        static = plan.query_dtype == "fp8_static"
        scale = "one calibrated scale per layer" if static else "a scale per token and head"
        lines.append(Line("queries", f"absorbed ones in e4m3, {scale}; outputs bf16"))
    if plan.output is not None:
        lines.append(_output(plan, plan.output))
    if plan.padding:
        what = f"{plan.padding} tokens of no request: nothing read, outputs 0"
        lines.append(Line("padding", what))
    return Explanation([*lines, *_reads(plan), *_ops(plan, finished), *_launches(plan, finished)])


def _invariant(plan: Plan, finished: bool) -> Line:
    """By which kernels a row's bits are its own, and where its keys are cut."""
    parts = []
    for op in _INVARIANT:
        if op in plan.backends and _calls(plan, op, finished):
            name = plan.backends[op]
            kernel = kernel_of(plan.problem(op), name)
            parts.append(f"{op} by {name}{f' ({kernel})' if kernel else ''}")
    return Line(
        "invariant",
        f"a row's bits are its own: keys in runs of {plan.run_length}, contexts cut at their own "
        f"positions; {', '.join(parts)}",
    )


def _eight_bits(plan: Plan) -> Line:
    """What of a step is in fp8 because it was asked for."""
    if "quantize_heads" not in plan.backends:
        return Line("fp8", "asked for, but nothing is expanded")
    rows = ", rows of the cache as they are stored" if plan.keeps_codes else ""
    return Line(
        "fp8",
        "expanded queries and keys in e4m3, asked for: a scale per row and head of queries, per "
        f"head of keys; values and probabilities in 16 bits{rows}",
    )


def _output(plan: Plan, output: str) -> Line:
    """Which op ends the tokens of each form."""
    parts = [f"{form} by {plan.ends[form]}" for form in plan.ends if plan.routes.get(form)]
    gated = ", after the gate" if plan.config.head_gate else ""
    return Line("output", f"{output}: {', '.join(parts) or 'no tokens'}{gated}")


def _expanded(plan: Plan, prefill: PrefillPlan) -> Line:
    chunks = prefill.chunks if prefill.one_shot is None else (prefill.one_shot,)
    gathered = max((chunk.num_keys for chunk in chunks), default=0)
    rows = prefill.rows
    new = num_rows(rows)
    keys = gathered if prefill.one_shot is not None else max(gathered, new)
    held = plan.expanded_bytes(gathered, keys, new)
    count = f", {len(prefill.chunks)} context chunks" if prefill.chunks else ""
    what = f"{shown_bytes(held)} at most: rows gathered, keys and values of up to {keys}"
    return Line(
        "expanded",
        f"{prefill.query_start_loc.shape[0] - 1} requests, up to {prefill.max_query_len} queries "
        f"each, {prefill.route}{count}{_few_keys(plan)}",
        _why(plan, "expanded"),
        below=(Line("holds", what, width=DETAIL),),
    )


def _few_keys(plan: Plan) -> str:
    """Why requests of a sparse model are dense."""
    indexer = plan.config.indexer
    return f", of no more than {indexer.topk} keys: dense" if indexer is not None else ""


def _why(plan: Plan, form: str) -> str:
    """Why the requests of a form have it: told to, bound to, or by cost."""
    forced = _forced(plan, form)
    if forced:
        return forced
    config, problem = plan.config, plan.problem("cache_write")
    found = []
    for b in plan.routes.get(form, ()):
        n, S = plan.query_lens[b], plan.seq_lens[b]
        if n and b not in plan.bounded:
            bits = max(S, 1).bit_length() - 1
            format, device = problem.format, problem.device
            itemsize, length = problem.dtype.itemsize, plan.run_length
            most = decode_threshold(config, format, itemsize, device, bits, length)
            found.append((n / most, n, S, most))
    if not found:
        return "nothing to expand: no new tokens"
    _, n, S, most = max(found) if form == "absorbed" else min(found)  # the nearest to the other
    unknown = len(plan.bounded.intersection(plan.routes[form]))
    others = f"; lengths of {unknown} requests only the device knows" if unknown else ""
    return (
        f"cost: {n} new tokens over {S} keys; over about so many expanding pays from "
        f"{most + 1}{others}"
    )


def _forced(plan: Plan, form: str) -> str:
    if plan.form == "captured":
        return "a captured graph replays one form, into= takes the absorbed one"
    if plan.form != "auto":
        return f"asked for: form={plan.form!r}"
    asking = {b for b in plan.routes.get(form, ()) if plan.query_lens[b]}
    if asking and asking <= plan.bounded:
        return "only the device knows the lengths: nothing else can be planned"
    return ""


def _sparse(plan: Plan, sparse: SparsePlan) -> list[Line]:
    assert plan.config.indexer is not None
    K, expanded = plan.config.indexer.topk, sparse.num_rows - sparse.num_absorbed
    keys = max((chunk.num_keys for chunk in sparse.chunks), default=max(plan.seq_lens, default=0))
    forced = _forced(plan, "chosen")
    scores = "none: the caller chooses, the cache has no index rows"
    if sparse.chunks:
        scores = (
            f"in {len(sparse.chunks)} chunks of {_mib(sparse.score_bytes)} at most "
            f"(bound {_mib(LOGITS_BYTES)})"
        )
    lines = [
        Line("sparse", f"{sparse.num_rows} tokens choose {K} of up to {keys} keys each"),
        Line("scores", scores),
    ]
    if sparse.num_absorbed:
        what = (
            f"{sparse.num_absorbed} tokens, absorbed, over their own rows, in "
            f"{len(sparse.query_chunks)} chunks"
        )
        why = forced or f"cost: {K} rows gathered for each are cheaper than all keys"
        lines.append(Line("chosen", what, why))
    if expanded:
        rows = max(chunk.num_keys for chunk in sparse.masked)
        why = _forced(plan, "masked") or f"cheaper than {K} rows gathered for each"
        what = (
            f"{expanded} tokens, expanded: {why}; "
            f"{len(sparse.masked)} chunks of up to {rows} keys, {_mib(sparse.mask_bytes)} of "
            f"mask at most (bound {_mib(MASK_BYTES)})"
        )
        lines.append(Line("masked", what))
    parts = {name: size for name, size in plan.sparse_bytes().items() if size}
    listed = ", ".join(f"{name} {_mib(size)}" for name, size in parts.items())
    total = _mib(sum(parts.values()))
    lines.append(Line("workspace", f"{total} at most, beside what a backend holds: {listed}"))
    return lines


def _compressed(plan: Plan, step: CompressedPlan) -> list[Line]:
    config = plan.config
    assert config.compressor is not None
    requests = step.query_start_loc.shape[0] - 1
    lines = [
        Line(
            "window",
            f"{step.num_rows} tokens of {requests} requests, each its last "
            f"{config.compressor.window} rows",
            "absorbed is the only form: the latent is key and value",
        )
    ]
    if step.ratio and step.chunks:
        assert config.indexer is not None
        lines += [
            Line(
                "entries",
                f"one per {step.ratio} tokens, {config.indexer.topk} of up to "
                f"{step.max_entries} chosen by each token",
            ),
            Line(
                "scores",
                f"in {len(step.chunks)} chunks of {_mib(step.score_bytes)} at most "
                f"(bound {_mib(LOGITS_BYTES)}), selection "
                f"{_mib(4 * config.indexer.topk * step.num_rows)}",
            ),
        ]
    elif step.ratio:
        few = ""
        if step.ratio == INDEXED_RATIO and config.indexer is not None:
            few = f" (no more than {config.indexer.topk})"
        what = f"one per {step.ratio} tokens, all of up to {step.max_entries}{few}"
        lines.append(Line("entries", f"{what}: no list is made"))
    return lines + _caches(plan)


def _caches(plan: Plan) -> list[Line]:
    """What all layers of a V4 model keep, by kind."""
    if plan.geometry is None:
        return []
    geometry = plan.geometry
    kinds = cache_bytes(plan.config, geometry)
    tokens = geometry.num_blocks * geometry.block_size
    what = (
        f"{tokens} tokens in blocks of {geometry.block_size}, {geometry.format} and "
        f"{geometry.index_format}; windows and states of {geometry.num_states} requests"
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
        f"entries {sums[0] / 2**30:.2f} GiB and padding {_mib(sums[1])} grow with context; "
        f"window and state, {_mib(sums[2] + sums[3])}, do not; {sums[4] / 2**30:.2f} GiB in all"
    )
    return [Line("cache", what, below=tuple(Line("", line) for line in lines))]


def _reads(plan: Plan) -> list[Line]:
    """Bytes of cache that one layer's attention reads, by who reads them."""
    if plan.compressed is not None:
        return []
    query_lens, seq_lens, config = plan.query_lens, plan.seq_lens, plan.config
    rows = {"absorbed": sum(seq_lens[b] for b in plan.routes.get("absorbed", ()) if query_lens[b])}
    if plan.prefill is not None:
        one_shot = plan.prefill.one_shot
        chunks = plan.prefill.chunks if one_shot is None else (one_shot,)
        rows["expanded"] = sum(chunk.num_keys for chunk in chunks)
    keys = 0
    if plan.sparse is not None and config.indexer is not None:
        K, chosen = config.indexer.topk, plan.routes.get("chosen", ())
        lens = [(query_lens[b], seq_lens[b]) for b in chosen]
        less = 1 if plan.causal else 0
        rows["chosen"] = sum(min(S - i * less, K) for n, S in lens for i in range(n))
        rows["masked"] = sum(chunk.num_keys for chunk in plan.sparse.masked)
        if _scored(plan):
            keys = sum(seq_lens[b] for b in (*chosen, *plan.routes.get("masked", ())))
    row_bytes = get_format(plan.problem("cache_write").format).row_bytes(config.latent_dim)
    sizes = {name: count * row_bytes for name, count in rows.items() if count}
    if keys and config.indexer is not None:
        layout = get_format(plan.problem("index_write").format)
        sizes["index keys"] = keys * layout.row_bytes(config.indexer.head_dim)
    listed = ", ".join(f"{name} {shown_bytes(size)}" for name, size in sizes.items())
    most = " at most" if plan.bounded else ""
    total = shown_bytes(sum(sizes.values()))
    return [Line("reads", f"{total} of cache a layer{most}{f': {listed}' if listed else ''}")]


def _ops(plan: Plan, finished: bool) -> list[Line]:
    """The ops that run, by whom, and why not by a better one."""
    lines = []
    for problem in plan.problems:
        if _calls(plan, problem.op, finished):
            chosen = plan.backends[problem.op]
            lost = "asked for"
            if plan.requested.get(problem.op, "auto") == "auto":
                better = BACKENDS[problem.op][: BACKENDS[problem.op].index(chosen)]
                reasons = {name: why_not(problem, name) or slower(problem, name) for name in better}
                lost = "; ".join(f"not {name}: {reason}" for name, reason in reasons.items())
            kernel = kernel_of(problem, chosen)
            ran = f"{chosen}, {kernel}" if kernel else chosen
            lines.append(Line(problem.op, ran, lost, width=OP))
    return lines


def _launches(plan: Plan, finished: bool) -> list[Line]:
    """How many kernels a layer launches for its attention, as far as they are ours."""
    calls = {problem.op: _calls(plan, problem.op, finished) for problem in plan.problems}
    counts = {op: launches(op, plan.backends[op]) for op, called in calls.items() if called}
    known = {op: n * calls[op] for op, n in counts.items() if n is not None}
    if not known:
        return []
    others = [op for op, count in counts.items() if count is None]
    beside = f"; beside them what torch launches for {', '.join(others)}" if others else ""
    listed = ", ".join(f"{op} {count}" for op, count in known.items())
    told = f"up to {sum(known.values())} a layer and step: {listed}{beside}"
    return [Line("launches", told)]


def _in_one_launch(plan: Plan) -> bool:
    """Whether raw rows are finished and written by latent_write, as attention/write.py has it."""
    on_gpu = plan.problem("latent_write").device == "cuda"
    return plan.backends["latent_write"] != "reference" or not on_gpu


def _scored(plan: Plan) -> int:
    """Turns in which there is something to choose."""
    part = plan.sparse or plan.compressed
    if part is None or plan.config.indexer is None:
        return 0
    return sum(chunk.num_keys > plan.config.indexer.topk for chunk in part.chunks)


def _calls(plan: Plan, op: str, finished: bool) -> int:
    """How often a layer calls an op in this step."""
    chunks = len(plan.prefill.chunks) if plan.prefill is not None else 0
    one_shot = plan.prefill is not None and plan.prefill.one_shot is not None
    groups, contexts, query_chunks = 0, 0, 1
    if plan.sparse is not None:
        groups = sum(len(chunk.groups) for chunk in plan.sparse.masked)
        contexts, query_chunks = len(plan.sparse.masked), len(plan.sparse.query_chunks)
    step = plan.compressed
    turned = 0
    if not finished:
        turned = 0 if _in_one_launch(plan) else 2  # queries and rows
        # index queries and keys; V4: what comes out is turned back
        turned += step is not None or plan.config.indexer is not None
    if step is not None:
        turned += bool(step.chunks)  # index queries
    contexts_of = plan.prefill.chunks if plan.prefill is not None else ()
    ended = sum(chunk.ended is not None for chunk in contexts_of)
    merges = chunks
    if plan.ends.get("expanded") == "merge_quantize":
        merges = sum(chunk.continued is not None for chunk in contexts_of)
    one_launch = not finished and _in_one_launch(plan)
    new_keys = plan.prefill is not None and plan.prefill.route != "context"
    expanding = bool(new_keys + chunks)
    return {
        "latent_write": int(one_launch and plan.causal),
        "cache_write": int(not one_launch and plan.causal),
        "rope": turned,
        "compress_kv": 1 + (step is not None and step.ratio == INDEXED_RATIO),
        "cache_gather": chunks + one_shot + contexts,
        "mha_ragged": new_keys + chunks,
        "merge_states": merges + groups,
        "merge_quantize": ended,
        "project_quantize": (plan.decode is not None) + (plan.sparse is not None) * query_chunks,
        # queries once, keys each time
        "quantize_heads": expanding + bool(groups) + new_keys + chunks + contexts,
        "quantize_out": _quantized_apart(plan),
        "index_logits": _scored(plan),
        "index_topk": _scored(plan),
        "mqa_sparse": query_chunks,
        "quantize_queries": _projections(plan, query_chunks) // 2,
        "project_heads": _projections(plan, query_chunks) + new_keys + chunks + contexts,
        "pack_mask": groups,
        "mha_masked": groups,
    }.get(op, 1)


def _projections(plan: Plan, query_chunks: int) -> int:
    """Into latent space and out of it."""
    chosen = query_chunks if plan.sparse is not None and plan.sparse.num_absorbed else 0
    return 2 * ((plan.decode is not None) + chosen)


def _quantized_apart(plan: Plan) -> int:
    """Calls of quantize_out: what no other op ends, and padding."""
    forms = {form for form, op in plan.ends.items() if op == "quantize_out"}
    calls = sum(bool(plan.routes.get(form)) for form in forms) + bool(plan.padding)
    if plan.prefill is not None and "expanded" not in forms:
        calls += len(plan.prefill.alone)
    return calls


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
