"""Formats the results of `openmla size` as a table, as JSON, and as a picture."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

from openmla.cache import latent_formats, shown_bytes
from openmla.cli.pictures import COLORS, INK, label_decades, picture, short_count, short_time
from openmla.cli.roofline import Machine, Predicted
from openmla.cli.sizes import Split, Step, TokenBytes, room, token_bytes
from openmla.cli.terminal import filled, shown_time
from openmla.cli.weights import Weights
from openmla.plan.explanation import counted


class Row(NamedTuple):
    """A number of ranks: the context that fits on all of them, and a step of one of them."""

    ranks: int
    fits: int  # tokens of context, over all requests
    step: Predicted | None  # None if heads cannot be divided among that many ranks


class Report(NamedTuple):
    """Everything to show, in any output format."""

    model: str
    step: Step
    machine: Machine
    token: TokenBytes
    weights: Weights | None  # the whole model's; None if unknown
    memory_share: float
    block_size: int
    fixed: int  # bytes of V4's windows and compressor states
    rows: list[Row]
    asked: Row

    @property
    def gpu_weights(self) -> float:
        """Bytes of weights on each GPU, 0 if unknown."""
        total = self.weights.total if self.weights else 0.0
        return total / self.step.ranks.size if self.step.ranks.heads == "own" else total

    @property
    def wanted(self) -> int:
        """Tokens of context in the step's requests."""
        return self.step.batch * self.step.context


def render(report: Report) -> str:
    """The report as text."""
    step, asked = report.step, report.asked
    assert asked.step is not None  # an impossible request has raised before
    config, W, share = step.config, step.ranks.size, report.memory_share
    room = max(share * report.machine.memory - report.gpu_weights, 0)
    blocks = f"tokens of all requests together, in blocks of {report.block_size} on each GPU"
    layers, heads = counted(config.num_layers, "layer"), counted(config.num_heads, "head")
    lines = [
        *filled(
            f"{report.model} ({layers}, {heads}) on {W if W > 1 else 'one'} "
            f"GPU{'s, each' if W > 1 else ''} {_machine(report.machine)}."
        ),
        *filled(_verdict(report)),
        "",
        *_line("a token of context", _bytes(report.token.total), _token_text(report)),
        *_line("weights", *_weights_text(report)),
        *_line("room for the cache", _bytes(room), _room_text(report)),
    ]
    if report.fixed:
        lines += _line("windows and states", _bytes(report.fixed), "for the requests of this step")
    lines += [
        *_line(_fits(report), f"{asked.fits:,}", blocks),
        "",
        *filled(f"A decode step of {_requests(step)} takes at least:"),
        *_line("memory", _bytes(asked.step.moved), _moved_text(asked.step)),
        *_line("sent", _bytes(sum(asked.step.sent.values())), _sent_text(asked.step, W)),
        *_line("time", shown_time(asked.step.time), _time_text(report, asked.step)),
        "",
        *_table(report),
        "",
        *(line for text in _notes(report) for line in filled(text)),
    ]
    return "\n".join(lines)


def _line(name: str, value: str, text: str) -> list[str]:
    return filled(text, f"{name:<20}{value:>12}  ")


def _verdict(report: Report) -> str:
    """Whether the step's requests fit; no claim if the size of the weights is unknown."""
    tokens = f"{report.wanted:,} tokens of context"
    if report.weights is None:
        return (
            "The size of the weights is unknown and not included, so this report cannot say "
            f"whether the model fits with {tokens}. Give --weights-gib."
        )
    about = " (estimated)" if report.weights.source.startswith("estimated") else ""
    if report.asked.fits >= report.wanted:
        return f"The weights{about} and {tokens} fit."
    share = report.memory_share
    alone = ""
    if report.gpu_weights > share * report.machine.memory:
        alone = f", for the weights alone exceed {share:.0%} of the memory"
    enough = [row.ranks for row in report.rows if row.step and row.fits >= report.wanted]
    more = f" {enough[0]} GPUs are enough." if enough else ""
    return f"The weights{about} and {tokens} do not fit{alone}.{more}"


def _requests(step: Step) -> str:
    each = " each" if step.batch > 1 else ""
    return f"{counted(step.batch, 'request')} with {counted(step.context, 'key')}{each}"


def _bytes(num_bytes: float) -> str:
    return shown_bytes(num_bytes) if num_bytes < 1024 * 2**30 else f"{num_bytes / 2**40:.2f} TiB"


def _machine(machine: Machine) -> str:
    parts = [
        f"with {machine.memory / 1e9:g} GB",
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
    return text + ("; each token is on one of the GPUs" if step.ranks.size > 1 else "")


def _weights_text(report: Report) -> tuple[str, str]:
    weights, own = report.weights, report.step.ranks.heads == "own"
    if weights is None:
        return "not included", "their size is unknown; give --weights-gib"
    part = f"on each GPU, of {_bytes(weights.total)}" if own else "on each GPU, the whole model"
    return _bytes(report.gpu_weights), f"{part}, {weights.source}"


def _room_text(report: Report) -> str:
    less = "less its weights" if report.weights else "without weights"
    return f"{report.memory_share:.0%} of a GPU's memory {less}"


def _fits(report: Report) -> str:
    return "tokens that fit" if report.weights else "cache alone holds"


def _moved_text(step: Predicted) -> str:
    parts = {"weights": step.weights} if step.weights else {}
    parts |= {op: cost.bytes for op, cost in step.costs.items()}
    shown = ", ".join(f"{name} {_bytes(size)}" for name, size in parts.items())
    return f"read or written by a GPU: {shown}"


def _sent_text(step: Predicted, W: int) -> str:
    if not step.sent:
        return "one GPU has all keys" if W == 1 else "no layer's keys are shared"
    shown = ", ".join(f"{name} {_bytes(size)}" for name, size in step.sent.items())
    others = "the other one" if W == 2 else f"the {W - 1} others"
    return f"by a GPU to {others}: {shown}; {counted(step.collectives, 'collective')}"


def _time_text(report: Report, step: Predicted) -> str:
    parts = [f"weights {shown_time(step.weights_time)}"] if step.weights else []
    parts.append(f"attention {shown_time(step.attention_time)}")
    parts += [f"link {shown_time(step.link_time)}"] if step.sent else []
    rate = report.step.batch / step.time
    return f"{', '.join(parts)}; at most {rate:,.0f} tokens per second for all requests together"


def _table(report: Report) -> list[str]:
    fits = "tokens fit" if report.weights else "cache holds"
    table: list[tuple[str, ...]] = [
        ("ranks", f"{fits} ", "memory", "sent", "weights", "attention", "link", "step")
    ]
    for row in report.rows:
        if row.step is None:
            continue  # a note explains why
        times = (row.step.weights_time, row.step.attention_time, row.step.link_time, row.step.time)
        table.append(
            (
                f"{row.ranks}",
                f"{row.fits:,}{'*' if row.fits < report.wanted else ' '}",
                _bytes(row.step.moved),
                _bytes(sum(row.step.sent.values())),
                *map(shown_time, times),
            )
        )
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(map(str.rjust, cells, widths)) for cells in table]


def _refused(report: Report) -> str:
    heads = report.step.config.num_heads
    return f"{heads} heads do not divide among that many. Give --heads all."


def _notes(report: Report) -> list[str]:
    """Notes on what the table leaves out."""
    notes = [
        '"memory" and "sent" are bytes per GPU per step. Step time is a lower bound: for each op, '
        "the larger of bytes / bandwidth and FLOPs / peak throughput, plus weights and "
        "communication, with no overlap.",
        "On an H200, attention took 1.1 to 3.1 times its lower bound where that is 50 us or more "
        "per layer, and more times below (docs/size.md).",
    ]
    if report.weights is None:
        notes.append("Weights are not included: neither their memory nor the time to read them.")
    elif report.weights.read < report.weights.total:
        read = _bytes(report.weights.read)
        notes.append(
            f"A step reads at least {read} of weights, those of one token's experts if these are "
            "estimated. More tokens select more experts; give --read-gib."
        )
    if any(row.fits < report.wanted for row in report.rows if row.step is not None):
        notes.append(f"* less than the {report.wanted:,} tokens of this step.")
    refused = [str(row.ranks) for row in report.rows if row.step is None]
    if refused:
        notes.append(f"Not for {', '.join(refused)} ranks: {_refused(report)}")
    if report.machine.link is None and len(report.rows) > 1:
        notes.append("Communication time is not included; pass --link-gbps to model it.")
    if report.step.config.compressor is not None:
        notes.append(
            "Ranks share V4's entries of ratio 4; every rank has all other entries "
            "(docs/context-parallel-v4.md)."
        )
    if report.step.context > report.step.config.max_positions:
        most = report.step.config.max_positions
        notes.append(f"The context exceeds the model's {most:,} positions.")
    return notes


def as_json(report: Report) -> dict[str, Any]:
    """The report as JSON: bytes, seconds, counts; "counts" explains what they count."""
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
        "weights_bytes": report.weights.total if report.weights else None,
        "read_weights_bytes": report.weights.read if report.weights else None,
        "weights_source": report.weights.source if report.weights else None,
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
    "gpu": "one GPU: bytes, bytes/s, bf16 FLOP/s, bytes/s out, seconds of latency",
    "fixed_bytes": "V4's windows and compressor states for the step's requests, on each rank",
    "weights_bytes": "whole model; a step reads read_weights_bytes of them; null: unknown",
    "tokens_that_fit": "context of all requests together on all ranks, less weights if known",
    "memory_bytes": "read or written by one rank in a step, by op, all layers",
    "flops": "of one rank in a step, by op, all layers",
    "sent_bytes": "leave one rank in a step, all layers and tokens, by what they are",
    "seconds": "lower bound on a step's time by the roofline, with no overlap",
}


def _row_json(report: Report, row: Row) -> dict[str, Any]:
    if row.step is None:
        return {"ranks": row.ranks, "refused": _refused(report)}
    step = row.step
    return {
        "ranks": row.ranks,
        "tokens_that_fit": row.fits,
        "fits": row.fits >= report.wanted if report.weights else None,
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
    """Plot memory over context by format; context and time over ranks."""
    rows = [(row.ranks, row.fits, row.step) for row in report.rows if row.step is not None]
    ranks = [size for size, _, _ in rows]
    title = f"{report.model}, {report.step.format}, {_requests(report.step)}"
    with picture(path, 12.5, title) as figure:
        memory, context, time = figure.subplots(3, 1, height_ratios=[1.25, 1, 1])
        _draw_memory(memory, report)
        fitting = [fits or math.nan for _, fits, _ in rows]  # no 0 on a log axis
        context.plot(ranks, fitting, "o-", color=COLORS[0], ms=4, label=_fits(report))
        context.axhline(report.wanted, color=INK, ls=":", label="of this step")
        context.set(title="Context that fits", ylabel="tokens, all requests")
        for number, (name, times) in enumerate(
            {
                "step": [step.time for _, _, step in rows],
                "weights": [step.weights_time for _, _, step in rows],
                "attention": [step.attention_time for _, _, step in rows],
                "link": [step.link_time for _, _, step in rows],
            }.items()
        ):
            if any(times):
                us = [1e6 * each or math.nan for each in times]  # no 0 on a log axis
                style = "o-" if name == "step" else "o--"
                time.plot(ranks, us, style, color=COLORS[number], ms=4, label=name)
        time.set(title="Lower bound on the time of a decode step", xlabel="ranks")
        for axes, text in ((context, short_count), (time, short_time)):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(ranks, [str(size) for size in ranks])
            label_decades(axes.yaxis, text)
            axes.grid()
            axes.legend()


def _draw_memory(axes: Any, report: Report) -> None:
    """Bytes of the step's requests over all layers, by format; other memory use and capacity."""
    step = report.step
    config, batch = step.config, step.batch
    longest = max(config.max_positions, step.context, 2048)
    contexts = [2**n for n in range(10, longest.bit_length()) if 2**n < longest] + [longest]
    sizes: dict[tuple[float, int], list[str]] = {}  # formats of equal size share a line
    for format in latent_formats(config):
        each = replace(step, format=format, ranks=Split())
        key = token_bytes(each).total, room(each, report.block_size).fixed
        sizes.setdefault(key, []).append(format)
    for number, ((token, fixed), formats) in enumerate(sizes.items()):
        gib = [(fixed + batch * S * token) / 2**30 for S in contexts]
        style = "o-" if step.format in formats else "-"
        too = " (as plain transformers)" if "bf16" in formats else ""
        label = f"{', '.join(formats)}{too}"
        axes.plot(contexts, gib, style, color=COLORS[number], ms=4, label=label)
    name = "expanded keys and values, 16 bits"
    values = config.num_heads * (config.qk_head_dim + config.v_head_dim)
    if config.compressor is not None:
        name, values = "a row per token, not compressed, 16 bits", config.latent_dim
    gib = [batch * S * config.num_layers * 2 * values / 2**30 for S in contexts]
    axes.plot(contexts, gib, "--", color=INK, label=name)
    W = step.ranks.size
    usable = W * max(report.memory_share * report.machine.memory - report.gpu_weights, 0) / 2**30
    if usable:
        where = "one GPU" if W == 1 else f"{W} GPUs"
        less = "" if report.weights else ", weights not included"
        axes.axhline(usable, color=INK, ls=":", label=f"room for the cache on {where}{less}")
    axes.set(title=f"Cache of {counted(batch, 'request')}", yscale="log")
    axes.set(xlabel="tokens of context per request")
    axes.set_xscale("log", base=2)
    ticks = contexts[:: -(-len(contexts) // 8)]
    axes.set_xticks(ticks, [f"{S // 1024}k" for S in ticks])
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.55)  # room for the legend
    label_decades(axes.yaxis, lambda gib: f"{short_count(gib)} GiB")
    axes.grid()
    axes.legend(loc="upper left")
