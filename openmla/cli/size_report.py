"""What `openmla size` found, as a table, as JSON, as a picture; numbers say what they count."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

from openmla.cache import latent_formats, shown_bytes
from openmla.plan.roofline import Machine, Predicted
from openmla.plan.sizes import Split, Step, TokenBytes, room, token_bytes


class Row(NamedTuple):
    """So many ranks: what fits on all of them, and a step of one of them."""

    ranks: int
    fits: int  # tokens of context, of all requests together
    step: Predicted | None  # None where heads do not divide among so many


class Report(NamedTuple):
    """Everything that is shown, however it is shown."""

    model: str
    step: Step
    machine: Machine
    token: TokenBytes
    weights: float  # bytes of the whole model
    read_weights: float  # of them, a step's
    memory_share: float
    block_size: int
    fixed: int  # bytes of V4's windows and compressor states
    rows: list[Row]
    asked: Row

    @property
    def gpu_weights(self) -> float:
        """Bytes of weights on each GPU."""
        own = self.step.ranks.heads == "own"
        return self.weights / self.step.ranks.size if own else self.weights

    @property
    def wanted(self) -> int:
        """Tokens of context that the step's requests have."""
        return self.step.batch * self.step.context


def render(report: Report) -> str:
    """For people."""
    step, asked = report.step, report.asked
    assert asked.step is not None  # what was asked for and cannot be is refused before
    config, W, share = step.config, step.ranks.size, report.memory_share
    gpus = f"{W} GPUs, each" if W > 1 else "one GPU"
    room = max(share * report.machine.memory - report.gpu_weights, 0)
    blocks = f"of all requests together, in blocks of {report.block_size} on each GPU"
    lines = [
        f"{report.model} ({config.num_layers} layers, {config.num_heads} heads) on {gpus} "
        f"{_machine(report.machine)}",
        "",
        _line("a token of context", _bytes(report.token.total), _token_text(report)),
        _line("weights", _bytes(report.gpu_weights), _weights_text(report)),
        _line("room for a cache", _bytes(room), f"{share:.0%} of a GPU's memory less its weights"),
    ]
    if report.fixed:
        lines.append(_line("windows and states", _bytes(report.fixed), "of this step's requests"))
    lines += [
        _line("tokens that fit", f"{asked.fits:,}", blocks),
        "",
        f"A decode step of {_requests(step)} takes at least:",
        _line("memory", _bytes(asked.step.moved), _moved_text(asked.step)),
        _line("sent", _bytes(sum(asked.step.sent.values())), _sent_text(asked.step, W)),
        _line("time", f"{_us(asked.step.time)} us", _time_text(report, asked.step)),
        "",
        *_table(report),
        "",
        *_notes(report),
    ]
    return "\n".join(lines)


def _line(name: str, value: str, text: str) -> str:
    return f"{name:<20}{value:>14}  {text}"


def _requests(step: Step) -> str:
    batch, keys = step.batch, step.context
    return f"{batch:,} request{'s' * (batch > 1)}, {keys:,} key{'s' * (keys > 1)} each,"


def _bytes(num_bytes: float) -> str:
    return shown_bytes(num_bytes) if num_bytes < 1024 * 2**30 else f"{num_bytes / 2**40:.2f} TiB"


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:,.1f}" if seconds == 0 or seconds >= 1e-6 else f"{1e6 * seconds:.3f}"


def _machine(machine: Machine) -> str:
    parts = [
        f"of {machine.memory / 1e9:g} GB",
        f"{machine.bandwidth / 1e9:,.0f} GB/s",
        f"{machine.flops / 1e12:,.0f} TFLOP/s in bf16",
    ]
    if machine.link is not None:
        parts.append(f"a link of {machine.link / 1e9:g} GB/s one way")
    return ", ".join(parts)


def _token_text(report: Report) -> str:
    step = report.step
    what = "entries" if step.config.compressor is not None else "rows"
    text = f"{what} in {step.format}, all layers"
    if report.token.keys:
        keys = f"indexer keys in {step.index_format}"
        text += f": {_bytes(report.token.latent)}, and {_bytes(report.token.keys)} of {keys}"
    return text + ("; held by one of the GPUs" if step.ranks.size > 1 else "")


def _weights_text(report: Report) -> str:
    if not report.weights:
        return "none counted: give --weights-gib"
    whole = f"of {_bytes(report.weights)}"
    return f"on each GPU, {whole}" if report.step.ranks.heads == "own" else "whole, on each GPU"


def _moved_text(step: Predicted) -> str:
    parts = {"weights": step.weights} if step.weights else {}
    parts |= {op: cost.bytes for op, cost in step.costs.items()}
    shown = ", ".join(f"{name} {_bytes(size)}" for name, size in parts.items())
    return f"read or written by a GPU: {shown}"


def _sent_text(step: Predicted, W: int) -> str:
    if not step.sent:
        return "one GPU has all keys"
    shown = ", ".join(f"{name} {_bytes(size)}" for name, size in step.sent.items())
    return f"by a GPU to the {W - 1} others: {shown}; {step.collectives} collectives"


def _time_text(report: Report, step: Predicted) -> str:
    parts = [f"weights {_us(step.weights_time)}"] if step.weights else []
    parts.append(f"attention {_us(step.attention_time)}")
    parts += [f"link {_us(step.link_time)}"] if step.sent else []
    rate = report.step.batch / step.time
    return f"{', '.join(parts)}; {rate:,.0f} tokens a second of all requests"


HEADER: tuple[str, ...] = (
    "ranks",
    "tokens fit",
    "memory",
    "sent",
    "weights us",
    "attention",
    "link",
    "step us",
)


def _table(report: Report) -> list[str]:
    table = [HEADER]
    for row in report.rows:
        if row.step is None:
            continue  # a note says why
        times = (row.step.weights_time, row.step.attention_time, row.step.link_time, row.step.time)
        table.append(
            (
                f"{row.ranks}",
                f"{row.fits:,}{'*' if row.fits < report.wanted else ' '}",
                _bytes(row.step.moved),
                _bytes(sum(row.step.sent.values())),
                *map(_us, times),
            )
        )
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["   ".join(map(str.rjust, cells, widths)) for cells in table]


def _refused(report: Report) -> str:
    return f"{report.step.config.num_heads} heads do not divide among so many; give --heads all."


def _notes(report: Report) -> list[str]:
    """What the table leaves out."""
    notes = [
        "Memory and sent: bytes of one GPU in a step. Step: weights and each op's bytes at the "
        "memory's speed, or",
        "its flops at that of matrix products if that is longer, then what is sent; nothing "
        "overlaps, nothing waits.",
        "On an H200 attention took 1.1 to 3.1 times that where it is 50 us or more a layer, and "
        "more below (docs/size.md).",
    ]
    if any(row.fits < report.wanted for row in report.rows if row.step is not None):
        notes.append(f"* less than the {report.wanted:,} tokens of this step.")
    refused = [str(row.ranks) for row in report.rows if row.step is None]
    if refused:
        notes.append(f"Not for {', '.join(refused)} ranks: {_refused(report)}")
    if report.machine.link is None and len(report.rows) > 1:
        notes.append("Sending takes no time here: give --link-gbps.")
    if report.step.config.compressor is not None:
        notes.append(
            "Ranks share V4's entries of ratio 4; every rank has all else "
            "(docs/context-parallel-v4.md)."
        )
    if report.step.context > report.step.config.max_positions:
        notes.append(
            f"The model has {report.step.config.max_positions:,} positions, fewer than these keys."
        )
    return notes


def as_json(report: Report) -> dict[str, Any]:
    """For programs: bytes, seconds, counts; "counts" says of what."""
    step = report.step
    return {
        "model": report.model,
        "layers": step.config.num_layers,
        "heads": step.config.num_heads,
        "format": step.format,
        "index_format": step.index_format if step.config.indexer is not None else None,
        "batch": step.batch,
        "context": step.context,
        "block_size": report.block_size,
        "gpu": report.machine._asdict(),
        "memory_share": report.memory_share,
        "weights_bytes": report.weights,
        "read_weights_bytes": report.read_weights,
        "heads_of_a_rank": step.ranks.heads,
        "schedule": step.ranks.schedule,
        "fixed_bytes": report.fixed,
        "token_bytes": {**report.token._asdict(), "total": report.token.total},
        "asked": _row_json(report, report.asked),
        "rows": [_row_json(report, row) for row in report.rows],
        "counts": COUNTS,
    }


COUNTS = {
    "token_bytes": "cache of one token of context in all layers, on the one rank that has it",
    "gpu": "one GPU: bytes, bytes a second, bf16 flops a second, bytes a second out, seconds",
    "fixed_bytes": "V4's windows and compressor states, of the step's requests, on each rank",
    "weights_bytes": "the whole model's; of read_weights_bytes, those a step reads",
    "tokens_that_fit": "context of all requests together on all ranks",
    "memory_bytes": "read or written by one rank in a step, by op, all layers",
    "flops": "of one rank in a step, by op, all layers",
    "sent_bytes": "that leave one rank in a step, all layers and tokens, by what they are",
    "seconds": "the least time of a step by the roofline; nothing overlaps, nothing waits",
}


def _row_json(report: Report, row: Row) -> dict[str, Any]:
    if row.step is None:
        return {"ranks": row.ranks, "refused": _refused(report)}
    step = row.step
    return {
        "ranks": row.ranks,
        "tokens_that_fit": row.fits,
        "fits": row.fits >= report.wanted,
        "memory_bytes": {
            "weights": step.weights,
            **{op: cost.bytes for op, cost in step.costs.items()},
            "total": step.moved,
        },
        "flops": {op: cost.flops for op, cost in step.costs.items()},
        "sent_bytes": {**step.sent, "total": sum(step.sent.values())},
        "collectives": step.collectives,
        "seconds": {
            "weights": step.weights_time,
            "attention": step.attention_time,
            "link": step.link_time,
            "total": step.time,
        },
    }


def draw(report: Report, path: str) -> None:
    """Memory over context by format; context and time over ranks; logarithmic axes."""
    from matplotlib import pyplot

    rows = [(row.ranks, row.fits, row.step) for row in report.rows if row.step is not None]
    ranks = [size for size, _, _ in rows]
    figure, (first, left, right) = pyplot.subplots(1, 3, figsize=(15, 4.4))
    _draw_memory(first, report)
    fitting = [fits or math.nan for _, fits, _ in rows]  # 0 is not on such an axis
    left.plot(ranks, fitting, "o-", markersize=3, label="that fit")
    left.axhline(report.wanted, color="grey", linestyle=":", label="of this step")
    left.set(title="Context that fits", xlabel="ranks", ylabel="tokens, of all requests together")
    for name, times in (
        ("step", [step.time for _, _, step in rows]),
        ("weights", [step.weights_time for _, _, step in rows]),
        ("attention", [step.attention_time for _, _, step in rows]),
        ("link", [step.link_time for _, _, step in rows]),
    ):
        if any(times):
            style = "ko-" if name == "step" else "o--"
            us = [1e6 * time or math.nan for time in times]  # nothing to draw on such an axis
            right.plot(ranks, us, style, markersize=3, label=name)
    right.set(title="Least time of a decode step", xlabel="ranks", ylabel="us")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ranks, [str(size) for size in ranks], fontsize=7)
        axes.legend(fontsize=8)
    step = report.step
    figure.suptitle(
        f"{report.model}, {step.format}, {step.batch} requests of {step.context:,} keys",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_memory(axes: Any, report: Report) -> None:
    """Bytes of the step's requests, all layers, by format; what others keep, and what there is."""
    step = report.step
    config, batch = step.config, step.batch
    longest = max(config.max_positions, step.context, 2048)
    contexts = [2**n for n in range(10, longest.bit_length()) if 2**n < longest] + [longest]
    sizes: dict[tuple[float, int], list[str]] = {}  # formats that take the same share a line
    for format in latent_formats(config):
        each = replace(step, format=format, ranks=Split())
        key = token_bytes(each).total, room(each, report.block_size).fixed
        sizes.setdefault(key, []).append(format)
    for (token, fixed), formats in sizes.items():
        gib = [(fixed + batch * S * token) / 2**30 for S in contexts]
        style = "o-" if step.format in formats else "-"
        too = " (as plain transformers)" if "bf16" in formats else ""
        axes.plot(contexts, gib, style, markersize=3, label=f"{', '.join(formats)}{too}")
    name = "expanded keys and values, 16 bits"
    values = config.num_heads * (config.qk_head_dim + config.v_head_dim)
    if config.compressor is not None:
        name, values = "a row per token, not compressed, 16 bits", config.latent_dim
    gib = [batch * S * config.num_layers * 2 * values / 2**30 for S in contexts]
    axes.plot(contexts, gib, "k--", label=name)
    W = step.ranks.size
    usable = W * max(report.memory_share * report.machine.memory - report.gpu_weights, 0) / 2**30
    if usable:
        there = "of one GPU" if W == 1 else f"of {W} GPUs"
        axes.axhline(usable, color="grey", linestyle=":", label=f"room for a cache, {there}")
    axes.set(title=f"Cache of {batch} request{'s' * (batch > 1)}", ylabel="GiB", yscale="log")
    axes.set(xlabel="tokens of context of each")
    axes.set_xscale("log", base=2)
    ticks = contexts[:: -(-len(contexts) // 8)]
    axes.set_xticks(ticks, [f"{S // 1024}k" for S in ticks], fontsize=7)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.55)  # room for the legend
    axes.legend(fontsize=7, loc="upper left")
