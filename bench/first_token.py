"""The first token: generate(max_new_tokens=1), attached and with plain transformers and sdpa.

    python3 -m bench.first_token --out first_token.json
    python3 -m bench.first_token --only 8x2048 --rounds 15

On a GPU two random models (openmla/bench/generate.py), DeepSeek-V2-Lite with 8 of its experts and
"small", 8 layers of 32 heads with V3's widths, in bf16; on a CPU the demo, left-padded where its
prompts are uneven, in fp32 and bf16 with one and two threads. Both models have the same weights and
take turns, each going first in every other round; times are medians of a caller's wait. Logits are
compared beforehand. On a GPU a profile of one more call gives kernel times: of all kernels, of
those launched by the attention modules, projections included, and of the attention kernels.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._autograd import DeviceType

from bench.report import Report, script_parser
from openmla.bench.generate import LIMITS, make_model, weightless_copy
from openmla.bench.harness import relative_error, time_once
from openmla.cli.checkpoint import open_checkpoint
from openmla.cli.models import demo_prompt, load_model
from openmla.cli.options import whole
from openmla.integrations.transformers import attach

ROUNDS, WARM_UP = 9, 2
PROMPTS = ([8192], [32768], [2048] * 8)
DEMO_PROMPTS = ([3500], [2000], [96], [200, 700, 350, 512], [40, 900])
KERNELS = ("flash", "fmha", "mha", "sdpa", "attention", "expanded")  # in names of attention kernels
# A trained model's logits are closer together than a random model's, especially in bf16.
DEMO_LIMITS = {torch.bfloat16: 0.1, torch.float32: 1e-4}


class Case(NamedTuple):
    """Prompts for a model and its attached copy."""

    name: str
    plain: Any
    attached: Any
    lens: list[int]
    limit: float  # on the relative difference between logits
    threads: int = 0  # 0: unchanged


def gpu_cases(wants: Callable[[str], bool]) -> Iterator[Case]:
    for kind in ("v2-lite", "small"):
        named = {f"{kind} {shown(lens)}": lens for lens in PROMPTS}
        wanted = {name: lens for name, lens in named.items() if wants(name)}
        if not wanted:
            continue
        model = make_model(kind, "cuda", torch.bfloat16)
        attached = weightless_copy(model)
        attach(attached)
        for name, lens in wanted.items():
            yield Case(name, model, attached, lens, LIMITS[torch.bfloat16])


def cpu_cases(wants: Callable[[str], bool]) -> Iterator[Case]:
    for dtype_name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        model = load_model(open_checkpoint("demo"), "cpu", dtype_name, dense=True)
        attached = weightless_copy(model)
        attach(attached)
        for threads in (1, 2):
            for lens in DEMO_PROMPTS:
                name = f"demo {shown(lens)} {dtype_name} {threads} threads"
                if wants(name):
                    yield Case(name, model, attached, lens, DEMO_LIMITS[dtype], threads)


def shown(lens: Sequence[int]) -> str:
    even = len(set(lens)) == 1
    return f"{len(lens)}x{lens[0]}" if even else "+".join(map(str, lens))


def make_inputs(case: Case) -> dict[str, Tensor]:
    """Token ids and mask, padded on the left: parts of the demo's text, else random."""
    longest, device = max(case.lens), case.plain.device
    torch.manual_seed(0)
    ids = torch.randint(1, 256, (len(case.lens), longest))
    if case.name.startswith("demo"):
        text = demo_prompt().encode()
        ids = torch.tensor([list(text[i : i + longest]) for i in range(len(case.lens))])
    places = torch.arange(longest)
    mask = places >= longest - torch.tensor(case.lens)[:, None]
    return {
        "input_ids": ids.where(mask, 0).to(device),
        "attention_mask": mask.long().to(device),
    }


def first_token(model: Any, inputs: dict[str, Tensor], **options: Any) -> Any:
    return model.generate(**inputs, max_new_tokens=1, do_sample=False, **options)


def compare(case: Case, inputs: dict[str, Tensor]) -> tuple[float, int]:
    """The difference of the logits, and the number of equal tokens."""
    ours, theirs = (
        first_token(model, inputs, return_dict_in_generate=True, output_logits=True).logits[0]
        for model in (case.attached, case.plain)
    )
    return relative_error(ours, theirs), int((ours.argmax(-1) == theirs.argmax(-1)).sum())


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Time of one call, from an idle device to an idle device."""
    if device.type != "cuda":
        return time_once(call, "cpu")

    def finished() -> None:
        call()
        torch.cuda.synchronize()

    torch.cuda.synchronize()
    return time_once(finished, "cpu")


class Named:
    """Marks the kernels that attention modules launch in a profile."""

    def __init__(self, model: Any) -> None:
        self.open: list[Any] = []
        self.handles: list[Any] = []
        for layer in model.model.layers:
            module = layer.self_attn
            self.handles.append(module.register_forward_pre_hook(self._begin, prepend=True))
            self.handles.append(module.register_forward_hook(self._end))

    def _begin(self, *_: Any) -> None:
        self.open.append(torch.profiler.record_function("self_attn").__enter__())

    def _end(self, *_: Any) -> None:
        self.open.pop().__exit__(None, None, None)

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def profiled(model: Any, inputs: dict[str, Tensor]) -> dict[str, float]:
    """Milliseconds of kernel time in one call."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    named = Named(model)
    try:
        with torch.profiler.profile(activities=activities) as profile:
            first_token(model, inputs)
            torch.cuda.synchronize()
    finally:
        named.remove()
    inside = kernels = attention = 0.0
    for event in profile.events():
        if event.device_type == DeviceType.CPU:
            if event.name == "self_attn":
                inside += event.device_time_total
        elif event.name != "self_attn" and not getattr(event, "is_user_annotation", False):
            kernels += event.device_time_total
            if any(word in event.name.lower() for word in KERNELS):
                attention += event.device_time_total
    return {
        "kernels_ms": kernels / 1e3,
        "attention_modules_ms": inside / 1e3,
        "attention_kernels_ms": attention / 1e3,
    }


def measure(case: Case, rounds: int) -> dict[str, Any]:
    if case.threads:
        torch.set_num_threads(case.threads)
    inputs = make_inputs(case)
    apart, same = compare(case, inputs)
    row: dict[str, Any] = {"case": case.name, "apart": apart, "same": same}
    if apart > case.limit:
        print(f"{case.name:<34} WRONG: logits {apart:.1e} apart, at most {case.limit:.1e}")
        return row
    models = {"openmla": case.attached, "transformers": case.plain}
    seen: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(rounds + WARM_UP):
        names = list(models) if turn % 2 else list(models)[::-1]
        for name in names:
            model = models[name]
            spent = seconds(partial(first_token, model, inputs), model.device)
            if turn >= WARM_UP:
                seen[name].append(1e3 * spent)
    for name, times in seen.items():
        row[name] = {"median_ms": statistics.median(times), "min_ms": min(times)}
        if case.plain.device.type == "cuda":
            row[name] |= profiled(models[name], inputs)
    row["ratio"] = row["openmla"]["median_ms"] / row["transformers"]["median_ms"]
    print_row(row, len(case.lens))
    return row


def print_row(row: dict[str, Any], requests: int) -> None:
    ours, theirs = row["openmla"], row["transformers"]
    print(
        f"{row['case']:<34}{ours['median_ms']:>10.2f}{theirs['median_ms']:>10.2f} ms"
        f"{row['ratio']:>8.3f}   {row['same']} of {requests} tokens the same, "
        f"logits {row['apart']:.1e} apart",
        flush=True,
    )
    for name in (key for key in ours if key in theirs and key.startswith(("kernels", "attention"))):
        ratio = ours[name] / theirs[name] if theirs[name] else float("nan")
        label = name.removesuffix("_ms").replace("_", " ")
        print(f"  {label:<32}{ours[name]:>10.2f}{theirs[name]:>10.2f} ms{ratio:>8.3f}", flush=True)


def run(arguments: Sequence[str] | None = None) -> None:
    parser = script_parser("first_token", __doc__, "cases", "--out")
    parser.add_argument("--rounds", type=whole(1, 10**6), default=ROUNDS, help="7 or more to quote")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    header = f"{'':<34}{'openmla':>10}{'plain':>10}{'ratio':>11}"
    report = Report(parser, arguments, header, device=device)
    with torch.no_grad():
        for case in (gpu_cases if device == "cuda" else cpu_cases)(report.wants):
            report.rows.append(measure(case, report.options.rounds))
            report.save()
    if not report.rows:
        print(f"no case's name contains {report.options.only!r}", file=sys.stderr)


if __name__ == "__main__":
    run()
