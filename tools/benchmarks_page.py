"""The benchmarks page of the site: tables and plots from the JSON of bench/results/.

Numbers are only compared within one file, which is one run. Roofline curves use the ops' own
cost() with the bandwidth and bf16 throughput that the GPU vendor publishes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from openmla.cli.gpus import SIZED
from openmla.cli.roofline import roof
from openmla.config import PRESETS
from openmla.ops.mqa_paged import cost as paged_cost
from openmla.ops.mqa_sparse import cost as sparse_cost

Data = dict[str, Any]
BASELINES = {
    "flashmla": "FlashMLA",
    "gather+flashmla": "gather + FlashMLA",
    "fa3": "FA3 (vLLM)",
    "fa3 eager": "FA3 (vLLM) eager",
    "cuDNN, padded": "cuDNN padded",
    "cuDNN, one by one": "cuDNN per request",
    "deep_gemm": "DeepGEMM",
    "torch.topk": "torch.topk",
    "torch.topk, unsorted": "unsorted torch.topk",
    "deep_gemm, torch.topk": "DeepGEMM + torch.topk",
    "deep_gemm, unsorted": "DeepGEMM + unsorted torch.topk",
    "transformers": "transformers",
    "static": "compiled transformers",
    "two ops": "two openmla ops",
    "torch's quantiser": "torch's quantizer",
    "bf16, torch.bmm": "torch.bmm in bf16",
    "bf16, torch.bmm and cat": "torch.bmm + cat in bf16",
}
# Contenders of openmla, the default first.
OURS = ("captured", "openmla", "gluon", "triton", "one op", "fp8, a scale per head")
OURS_COLOR, BASELINE_COLOR, ROOFLINE_COLOR = "#3b5bbf", "#d9822b", "#7a8794"


class Duel(NamedTuple):
    """One shape of one run: openmla's time, and that of the fastest baseline in it."""

    shape: str
    ours: float
    baseline: float
    against: str

    @property
    def ratio(self) -> float:
        return self.baseline / self.ours


class Group(NamedTuple):
    """Rows of a results file that one table shows."""

    title: str
    file: str
    pattern: str  # matched against the whole shape
    command: str
    what: str = ""  # the kind of rows, in files with several kinds per shape


GROUPS = (
    Group("sparse decode, fp8_ds_mla, top 2048", "triton_latent_h200", r"sparse-decode.*",
          "python3 -m bench.latent"),
    Group("V4 decode, window and entries", "triton_latent_h200", r"v4-decode.*",
          "python3 -m bench.latent"),
    Group("dense decode, bf16", "latent_dense_h200", r"dense-decode.*", "python3 -m bench.latent"),
    Group("dense decode, 1 or 3 draft tokens", "latent_dense_h200", r"dense-verify.*",
          "python3 -m bench.latent"),
    Group("dense decode, fp8 cache", "latent_dense_fp8_h200", r".*",
          "python3 -m bench.latent --only dense-decode-fp8"),
    Group("dense decode, served shapes, bf16", "serving_h200", r"serving-(decode|several).*",
          "python3 -m bench.latent --only serving"),
    Group("dense decode, served shapes, fp8 cache", "serving_h200", r"serving-fp8.*",
          "python3 -m bench.latent --only serving"),
    Group("sparse decode, served shapes", "serving_h200", r"serving-sparse.*",
          "python3 -m bench.latent --only serving"),
    Group("V4 decode, served shapes", "serving_h200", r"serving-v4.*",
          "python3 -m bench.latent --only serving"),
    Group("sparse prefill, top 2048", "sparse_prefill_h200", r".*", "python3 -m bench.latent"),
    Group("dense prefill, expanded", "mha_h200", r".*", "python3 -m bench.mha"),
    Group("indexer: scores", "indexer_h200", r".*", "python3 -m bench.indexer", "scores"),
    Group("indexer: top-k", "indexer_h200", r".*", "python3 -m bench.indexer", "choice"),
    Group("indexer: scores and top-k", "indexer_h200", r".*", "python3 -m bench.indexer", "both"),
    Group("quantized outputs, one launch", "outputs_h200", r".*", "python3 -m bench.outputs"),
    Group("fp8 weights", "absorbed_h200", r".*", "python3 -m bench.absorbed"),
    Group("whole model, decode, CUDA graph", "generate_h200", r".*",
          "openmla bench generate --model v2-lite --keys 32768 --batch 8 --static"),
)  # fmt: skip


class Results:
    """The JSON files of a folder, read once each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}

    def file(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = json.loads((self.folder / f"{name}.json").read_text())
        return self._files[name]

    def rows(self, name: str) -> list[dict[str, Any]]:
        found = self.file(name)
        return list(found["rows"] if isinstance(found, dict) else found)

    def others(self) -> list[str]:
        """Files with times that no group covers."""
        names = {path.stem for path in self.folder.glob("*.json")}
        return sorted(names - {group.file for group in GROUPS} - {"compatibility"})

    def times(self, group: Group) -> dict[str, dict[str, float]]:
        """shape -> contender -> microseconds."""
        found: dict[str, dict[str, float]] = {}
        for row in self.rows(group.file):
            asked = not group.what or row["what"] == group.what
            if asked and re.fullmatch(group.pattern, row["shape"]):
                found.setdefault(row["shape"], {})[row["contender"]] = _us(row)
        return found

    def duels(self, group: Group) -> list[Duel]:
        duels = []
        for shape, times in self.times(group).items():
            ours = next(times[name] for name in OURS if name in times)
            against = min((name for name in times if name in BASELINES), key=times.__getitem__)
            duels.append(Duel(shape, ours, times[against], BASELINES[against]))
        return duels


def _us(row: dict[str, Any]) -> float:
    return float(row["us"] if "us" in row else row["median_us"])


# Plots: the plotted numbers, and how to draw them. The digest of the numbers is stored in the
# picture, so that a test can detect a stale one without drawing.


def _against_transformers(results: Results) -> Data:
    rows = {row["contender"]: row for row in results.rows("generate_h200")}
    batch, keys = 8, 32768
    if rows["captured"]["shape"] != f"{batch} tokens of the whole model, each over {keys} keys":
        raise ValueError(f"generate_h200.json: unexpected shape {rows['captured']['shape']!r}")
    config = PRESETS["deepseek-v2-lite"]
    width = config.qk_head_dim + config.v_head_dim
    cache = {"bf16": 2 * config.latent_dim, "fp8_ds_mla": 656}
    gb = {name: batch * keys * config.num_layers * row / 1e9 for name, row in cache.items()}
    return {
        "speed": {
            "transformers": batch / rows["transformers"]["median_us"] * 1e6,
            "transformers, compiled": batch / rows["static"]["median_us"] * 1e6,
            "openmla, no CUDA graph": batch / rows["openmla"]["median_us"] * 1e6,
            "openmla, CUDA graph": batch / rows["captured"]["median_us"] * 1e6,
        },
        "memory": {
            "transformers": [gb["bf16"], batch * keys * config.num_heads * width * 2 / 1e9],
            "openmla, bf16": [gb["bf16"], 0.0],
            "openmla, fp8_ds_mla": [gb["fp8_ds_mla"], 0.0],
        },
        "machine": results.file("generate_h200")["machine"].split(", commit")[0],
    }


def _draw_against_transformers(figure: Any, data: Data) -> None:
    speed, memory = figure.subplots(2, 1)
    colors = [BASELINE_COLOR, OURS_COLOR, OURS_COLOR]
    names, values = list(data["speed"]), list(data["speed"].values())
    bars = speed.barh(names, values, height=0.6, color=[BASELINE_COLOR, *colors])
    ratios = [f"{value:.0f} ({value / values[0]:.2f}x)" for value in values[1:]]
    speed.bar_label(bars, [f"{values[0]:.0f}", *ratios], padding=4)
    speed.set_xlim(0, 1.3 * max(values))
    speed.set_title("Decode, tokens/s (measured)", fontsize=11, loc="left")
    names = list(data["memory"])
    cache, expanded = ([data["memory"][name][i] for name in names] for i in (0, 1))
    memory.barh(names, cache, height=0.6, color=colors)
    memory.barh(names[:1], expanded[:1], left=cache[:1], height=0.6, color="none",
                edgecolor=BASELINE_COLOR, hatch="///")  # fmt: skip
    totals = [sum(data["memory"][name]) for name in names]
    for place, total in enumerate(totals):
        memory.annotate(f"{total:.1f}", (total, place), (4, 0),
                        textcoords="offset points", va="center")  # fmt: skip
    memory.set_xlim(0, 1.3 * max(totals))
    memory.set_title("KV cache, GB (computed); hatched: a layer's K and V", fontsize=11, loc="left")
    for axes in (speed, memory):
        axes.invert_yaxis()


def _ratios(results: Results) -> Data:
    return {group.title: [d.ratio for d in results.duels(group)] for group in GROUPS}


def _draw_ratios(figure: Any, data: Data) -> None:
    axes = figure.subplots()
    names = list(data)[::-1]
    for place, name in enumerate(names):
        values = data[name]
        colors = [OURS_COLOR if value >= 1 else BASELINE_COLOR for value in values]
        axes.scatter(values, [place] * len(values), c=colors, s=26, alpha=0.65, linewidths=0)
    axes.axvline(1, color=ROOFLINE_COLOR, linewidth=1.2)
    axes.set_xscale("log")
    ticks = [0.5, 0.7, 1, 1.5, 2, 3, 5, 8]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(names)), names)
    axes.grid(axis="y", alpha=0.3)
    axes.set_xlabel("time of the fastest baseline / time of openmla (above 1, openmla is faster)")
    axes.set_title("One dot per shape, one H200", fontsize=12)


def _curves(results: Results, group: int, pattern: str, x: int, panel: int, cost: Any) -> Data:
    """panel -> {"openmla", "FlashMLA", "roofline"}: lists of (x, us); x and panel are groups of
    `pattern`."""
    panels: Data = {}
    for duel in results.duels(GROUPS[group]):
        found = re.fullmatch(pattern, duel.shape)
        if found is None:
            continue
        bound = roof(cost(*map(int, found.groups())), SIZED["h200"]) * 1e6
        lines = panels.setdefault(found[panel], {"openmla": [], duel.against: [], "roofline": []})
        for name, us in (
            ("openmla", duel.ours),
            (duel.against, duel.baseline),
            ("roofline", bound),
        ):
            lines.setdefault(name, []).append([int(found[x]), us])
    return panels


def _draw_curves(figure: Any, panels: Data, titles: str, xlabel: str, title: str) -> None:
    colors = {"openmla": OURS_COLOR, "roofline": ROOFLINE_COLOR}
    for axes, (name, lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0],
                                   panels.items(), strict=True):  # fmt: skip
        for line, points in lines.items():
            xs, ys = zip(*sorted(points), strict=True)
            style = "--" if line == "roofline" else "-"
            label = "roofline (computed)" if line == "roofline" else line
            axes.plot(xs, ys, style, marker="" if line == "roofline" else "o", markersize=4,
                      color=colors.get(line, BASELINE_COLOR), label=label)  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        crowded = len(panels) > 3
        shown = [value for value in xs if not crowded or 2 * value not in xs]
        axes.set_xticks(shown, [str(value) for value in shown])
        axes.minorticks_off()
        low, high = axes.get_ylim()
        digits = (1, 2, 5) if high > 10 * low else (1, 1.5, 2, 3, 4, 5, 7)
        places = [digit * 10**power for power in range(4) for digit in digits]
        ticks = [place for place in places if low <= place <= high]
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.grid(alpha=0.3)
        axes.set_title(titles.format(name), fontsize=10)
        axes.set_xlabel(xlabel)
    figure.axes[0].set_ylabel("microseconds")
    figure.axes[0].legend(fontsize=8)
    figure.suptitle(title, fontsize=12)


def _sparse(results: Results) -> Data:
    def cost(H: int, B: int) -> Any:
        return sparse_cost(2048 * B, B, H=H, D=576, C=512, format="fp8_ds_mla", itemsize=2)

    return _curves(results, 0, r"sparse-decode-fp8_ds_mla-h(\d+)-b(\d+)", 2, 1, cost)


def _v4(results: Results) -> Data:
    def cost(H: int, B: int, K: int) -> Any:
        return sparse_cost((128 + K) * B, B, H=H, D=512, C=512, format="fp8_dsv4", itemsize=2)

    return _curves(results, 1, r"v4-decode-h(\d+)-b(\d+)-k(\d+)", 2, 1, cost)


def _dense_heads(results: Results) -> Data:
    def cost(H: int, B: int, S: int) -> Any:
        return paged_cost([1] * B, [S] * B, H=H, D=576, C=512, causal=True, format="bf16",
                          itemsize=2)  # fmt: skip

    shapes = {"64 requests of 4096": r"64)x(4096", "1 request of 131072": r"1)x(131072",
              "128 requests of 2048": r"128)x(2048"}  # fmt: skip
    return {
        name: panel
        for name, shape in shapes.items()
        for panel in _curves(
            results, 2, rf"dense-decode-bf16-h(\d+)-({shape})", 1, 3, cost
        ).values()
    }


def _routes(results: Results) -> Data:
    panels: Data = {}
    for row in results.rows("routes_h200"):
        H, _, after = map(int, re.findall(r"\d+", row["shape"])[:3])
        lines = panels.setdefault(str(H), {"gathered": [], "masked": []})
        lines["gathered"].append([after, row["absorbed"] / 1e3])
        lines["masked"].append([after, row["expanded"] / 1e3])
    return panels


def _draw_routes(figure: Any, panels: Data) -> None:
    colors = {"gathered": OURS_COLOR, "masked": "#6aa84f"}
    for axes, (name, lines) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for line, points in lines.items():
            xs, ys = zip(*sorted(points), strict=True)
            axes.plot(xs, ys, "o-", markersize=4, color=colors[line], label=line)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(xs, [f"{value}k" for value in xs])
        ticks = [3, 5, 10, 30] if name == "16" else [15, 30, 100, 250]
        axes.set_yticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.set_title(f"{name} heads", fontsize=10)
        axes.set_xlabel("tokens of context before the prompt")
    figure.axes[0].set_ylabel("milliseconds")
    figure.axes[0].legend(fontsize=8)
    figure.suptitle("Sparse prefill of 8192 tokens by both routes, H200", fontsize=12)


class Plot(NamedTuple):
    data: Callable[[Results], Data]
    draw: Callable[[Any, Data], None]
    size: tuple[float, float]


def _curve_plot(data: Callable[[Results], Data], *words: str) -> Plot:
    return Plot(data, lambda figure, panels: _draw_curves(figure, panels, *words), (9, 3.4))


PLOTS = {
    "against-transformers": Plot(_against_transformers, _draw_against_transformers, (7, 4.2)),
    "bench-ratios": Plot(_ratios, _draw_ratios, (9, 4.6)),
    "bench-sparse-decode": _curve_plot(
        _sparse, "{} heads", "requests", "Sparse decode, top 2048, fp8_ds_mla, H200"
    ),
    "bench-dense-decode": _curve_plot(
        _dense_heads, "{} keys", "heads", "Dense decode by heads, bf16, H200"
    ),
    "bench-v4-decode": _curve_plot(
        _v4, "{} heads", "requests", "V4 decode, window and selected entries, fp8_dsv4, H200"
    ),
    "bench-context": Plot(_routes, _draw_routes, (9, 3.4)),
}


def digest(data: Data) -> str:
    """Digest of a plot's numbers, stored in its picture."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def draw_plots(results: Results, folder: Path) -> None:
    """Draw every plot as SVG."""
    import matplotlib
    from matplotlib.figure import Figure

    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": "openmla",
        "axes.facecolor": "#fcfcfc",
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    for name, plot in PLOTS.items():
        data = plot.data(results)
        with matplotlib.rc_context(style):
            figure = Figure(figsize=plot.size, facecolor="#fcfcfc", layout="constrained")
            plot.draw(figure, data)
            told = {"Date": None, "Description": f"data {digest(data)}"}
            figure.savefig(folder / f"{name}.svg", metadata=told)


# The page.


def benchmarks_page(results: Results) -> str:
    """The page as Markdown."""
    lines = [*_opening(), *_summary(results)]
    for title, text, picture in SECTIONS:
        lines += ["", f"## {title}", "", text, "", f"![{title}](images/{picture}.svg)"]
    lines += ["", *_whole_models(results), "", "## All rows", ""]
    lines += ["Times are in microseconds. The last column is the ratio defined above. Files"]
    lines += ["without that ratio follow as stored; their columns are the keys of the JSON.", ""]
    for group in GROUPS:
        lines += list(_all_rows(results, group))
    for name in results.others():
        lines += list(_other_rows(results, name))
    return "\n".join(lines).rstrip() + "\n"


def _opening() -> list[str]:
    return [
        "# Benchmarks",
        "",
        "openmla compared with other kernels on one H200, including the shapes where it is slower.",
        "The tables name the command behind each number. `make table` generates this page from",
        "`bench/results/*.json`.",
        "",
        "A ratio is the time of the fastest baseline divided by the time of openmla: above 1,",
        "openmla is faster. Both run in turns in one process, after all results have been checked.",
        "Numbers from different runs are never compared. Inputs are random. The roofline is the",
        "minimum time at a memory bandwidth of 4.8 TB/s and 989 TFLOP/s in bf16.",
        "",
        "## Summary",
        "",
        "![Ratio to the fastest baseline, one dot per shape](images/bench-ratios.svg)",
        "",
    ]


def _summary(results: Results) -> Iterator[str]:
    yield "| | shapes | faster | ratio: worst | median | best | fastest baseline | command |"
    yield "| --- | --: | --: | --: | --: | --: | --- | --- |"
    for group in GROUPS:
        duels = sorted(results.duels(group), key=lambda duel: duel.ratio)
        middle = duels[len(duels) // 2].ratio
        faster = sum(duel.ratio >= 1 for duel in duels)
        baselines = ", ".join(sorted({duel.against for duel in duels}))
        worst, best = duels[0].ratio, duels[-1].ratio
        numbers = f"{len(duels)} | {faster} | {worst:.2f} | {middle:.2f} | {best:.2f}"
        yield f"| {group.title} | {numbers} | {baselines} | `{group.command}` |"


SECTIONS = (
    (
        "Sparse decode by batch size",
        "Keys are split across the GPU's multiprocessors, which helps small batches. FlashMLA "
        "supports 64 or 128 heads; fewer heads are padded for it.",
        "bench-sparse-decode",
    ),
    (
        "V4 decode by batch size",
        "Tokens attend to a window of 128 rows and to 512 selected entries (1024 with 128 heads), "
        "with a sink.",
        "bench-v4-decode",
    ),
    (
        "Dense decode by number of heads",
        "Dense decode is memory-bound up to 64 heads and compute-bound at 128. openmla is slower "
        "than FlashMLA for large batches of equal lengths, and faster for one long request.",
        "bench-dense-decode",
    ),
    (
        "Sparse prefill by context length",
        "Gathering the selected rows takes about the same time at any context length. The time for "
        "masking all keys grows with it. The planner picks the cheaper one "
        "(`python3 -m bench.routes`).",
        "bench-context",
    ),
)


def _whole_models(results: Results) -> Iterator[str]:
    yield "## Whole models"
    yield ""
    yield "![Decode speed and memory compared with transformers](images/against-transformers.svg)"
    yield ""
    yield "Conditions: DeepSeek-V2-Lite's dimensions with 8 of its 64 experts, random weights,"
    yield "bf16, 8 requests of 32,768 tokens, one H200, one run. transformers runs with SDPA:"
    yield "eagerly with a dynamic cache, or compiled, that is with a static cache and torch.compile"
    yield "(`cache_implementation='static'`), which is the strictest baseline. Without a CUDA"
    yield "graph openmla depends on the host: it had 1.67x in another run. Memory is computed from"
    yield "tensor shapes: the cache of all layers and, for transformers, the"
    yield "keys and values of one layer, which it expands again for every token."
    yield ""
    yield "Time to first token in ms (`python3 -m bench.first_token`):"
    yield ""
    yield "| prompts | openmla | transformers | ratio |"
    yield "| --- | --: | --: | --: |"
    for row in results.rows("first_token_h200"):
        ours, theirs = (row[name]["median_ms"] for name in ("openmla", "transformers"))
        yield f"| {row['case']} | {ours:.1f} | {theirs:.1f} | {theirs / ours:.2f} |"
    yield ""
    yield "Host time of one op call outside a CUDA graph in microseconds (`python3 -m bench.host`):"
    yield ""
    yield "| call | openmla | FlashMLA | ratio |"
    yield "| --- | --: | --: | --: |"
    cases: dict[str, dict[str, float]] = {}
    for row in results.rows("host_h200"):
        cases.setdefault(row["case"], {})[row["contender"]] = row["us"]
    for case, times in cases.items():
        ours, theirs = times["openmla"], times["flashmla"]
        yield f"| {case} | {ours:.0f} | {theirs:.0f} | {theirs / ours:.2f} |"


def _all_rows(results: Results, group: Group) -> Iterator[str]:
    times = results.times(group)
    names = list(dict.fromkeys(name for found in times.values() for name in found))
    machine = results.file(group.file)["machine"]
    yield f'<details markdown="1"><summary>{group.title}</summary>'
    yield ""
    yield f"`{group.file}.json`: {machine}"
    yield ""
    yield f"| shape | {' | '.join(BASELINES.get(name, name) for name in names)} | ratio |"
    yield "| --- |" + " --: |" * (len(names) + 1)
    ratios = {duel.shape: duel.ratio for duel in results.duels(group)}
    for shape, found in times.items():
        cells = " | ".join(f"{found[name]:.1f}" if name in found else "" for name in names)
        yield f"| {shape} | {cells} | {ratios[shape]:.2f} |"
    yield ""
    yield "</details>"
    yield ""


def _other_rows(results: Results, name: str) -> Iterator[str]:
    """A file's contents, one line per row; the numbers of a part have its name in front."""
    rows = [dict(_flat(row)) for row in results.rows(name)]
    names = list(dict.fromkeys(key for row in rows for key in row))
    found = results.file(name)
    machine = found.get("machine", "") if isinstance(found, dict) else ""
    yield f'<details markdown="1"><summary>{name}.json</summary>'
    yield ""
    if machine:
        yield machine
        yield ""
    yield f"| {' | '.join(names)} |"
    yield "| --- |" + " --: |" * (len(names) - 1)
    for row in rows:
        yield f"| {' | '.join(row.get(key, '') for key in names)} |"
    yield ""
    yield "</details>"
    yield ""


def _flat(row: dict[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for key, value in row.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{key} ")
        else:
            yield before + key, f"{value:.4g}" if isinstance(value, float) else str(value)


def write_benchmarks_page(results_dir: Path, docs_dir: Path) -> None:
    """Write docs_dir/benchmarks.md and its plots, in docs_dir/images, from results_dir/*.json."""
    results = Results(results_dir)
    page = benchmarks_page(results)  # may raise before anything is written
    draw_plots(results, docs_dir / "images")
    (docs_dir / "benchmarks.md").write_text(page)
