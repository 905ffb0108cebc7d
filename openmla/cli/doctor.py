"""`openmla doctor`: the machine, the versions, and which backend runs which op, or why not.

Imports only the standard library first and guards every probe: on a broken machine the report still
prints, with the error in place of what could not be determined.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from openmla.cli.terminal import filled

if TYPE_CHECKING:
    from openmla.cli.gpus import GPU

PACKAGES = (
    "openmla",
    "torch",
    "triton",
    "transformers",
    "safetensors",
    "flash_mla",
)
# The lowest and the highest version that tests have run with; bench/results/compatibility.json
# lists the runs. vLLM's are in openmla.integrations.vllm.
TESTED = {"torch": ("2.11", "2.15"), "triton": ("3.6", "3.9"), "transformers": ("5.17", "5.23")}
DENSE_DECODE = "mqa_paged"  # the row that the verdict names
ISA_SWITCH = "ONEDNN_MAX_CPU_ISA"
ISA_VALUE = "AVX512_CORE_BF16"
MATMUL = (
    "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); "
    "raise SystemExit(0 if (a @ a)[0, 0] == 64 else 3)"
)


def run_doctor(arguments: Sequence[str]) -> int:
    """Print the report, which always succeeds, or compile."""
    from openmla.cli.gpus import GPUS, TARGETS, target
    from openmla.cli.options import Parser

    parser = Parser(
        prog="openmla doctor",
        description="Report what this machine can run, and why not the rest.",
    )
    known = f"a GPU ({', '.join(GPUS)}) or a target ({', '.join(TARGETS)})"
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--target", type=target, metavar="GPU",
        help=f"report for a GPU that this machine need not have, {known} (default: this machine)",
    )  # fmt: skip
    parser.add_argument(
        "--compile", type=lambda text: text if text == "all" else target(text).target,
        metavar="GPU",
        help="compile every kernel, for a GPU or target as of --target, or for all of them (all); "
        "this needs no GPU",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if options.compile:
        from openmla.cli.compile import run_compile

        return run_compile(options.compile)
    if options.target:
        print("\n".join(_of_target(options.target)))
        return 0
    report = examine()
    print(json.dumps(report, indent=2) if options.json else render(report))
    return 0


def _of_target(gpu: GPU) -> list[str]:
    """The ops section for a GPU that need not be installed."""
    rows = ops_on(gpu)
    units = f"{gpu.multiprocessors} multiprocessors"
    lines = filled(f"{gpu.title} ({gpu.target}): {_summary(rows)}")
    lines += filled(_status(gpu.target))
    title = f"ops on {gpu.target}, {units} (bf16, DeepSeek shapes)"
    return lines + _section(title, {op: _backends(cells) for op, cells in rows.items()})


def ops_on(gpu: GPU) -> dict[str, dict[str, str]]:
    """ops_of() for a GPU of the table: all backends for NVIDIA's, Triton's kernels for AMD's."""
    if gpu.target.startswith("sm_"):
        digits = int(gpu.target.removeprefix("sm_"))
        return ops_of("cuda", divmod(digits, 10), gpu.multiprocessors)
    rows = ops_of("cuda", None, gpu.multiprocessors)
    others = "runs on NVIDIA GPUs only"
    portable = ("triton", "reference")
    return {
        op: {name: cell for name, cell in cells.items() if name in portable}
        | {name: others for name in cells if name not in portable}
        for op, cells in rows.items()
    }


def _status(target: str) -> str:
    from openmla.cli.gpus import RAN, TARGETS

    compiled = "compiled, never run" if target in TARGETS else "neither compiled nor run"
    return f"Kernels for {target}: {RAN.get(target, compiled)}."


def _summary(rows: dict[str, dict[str, str]]) -> str:
    """Which backend decodes, and how many ops run on kernels or on the reference."""
    first = {row: next((n for n in cells if _runs(cells[n])), None) for row, cells in rows.items()}
    ops: dict[str, set[str | None]] = {}
    for row, name in first.items():
        ops.setdefault(row.split()[0], set()).add(name)
    running = [names for names in ops.values() if None not in names]
    slow = sum("reference" in names for names in running)
    by = first[DENSE_DECODE]
    kernel = rows[DENSE_DECODE][by][5:] if by else ""
    decode = f"dense decode by {by}{f' ({kernel})' if kernel else ''}" if by else "no dense decode"
    reference = f" ({slow} by the slow PyTorch reference)" if slow else ""
    return f"{decode}, {len(running)} of {len(ops)} ops run{reference}."


def _runs(cell: str) -> bool:
    return cell.startswith("yes")


def examine() -> dict[str, Any]:
    """Results of all probes, or a sentence that starts with `failed:`, and the verdict."""
    report = {
        "machine": _guarded(_machine),
        "packages": _guarded(_packages),
        "vllm": _guarded(_vllm),
        "gpus": _guarded(_gpus),
        "cpu_bf16": _guarded(_cpu_bf16),
        "ops": _guarded(_ops),
        "untested": _guarded(_untested),
        "advice": _guarded(_advice),
    }
    return {"verdict": verdict(report), **report}


def verdict(report: dict[str, Any]) -> list[str]:
    """Summarize a report: where openmla runs, on which backend, and what prevents more."""
    ops, gpus, untested = report["ops"], report["gpus"], report["untested"]
    lines = []
    if isinstance(ops, str) or isinstance(gpus, str):
        lines.append("What runs is unknown, because a check failed. See below.")
    elif not gpus or "cuda" not in ops:
        lines.append(f"CPU only: {_summary(ops['cpu'])} No GPU found.")
    else:
        target = gpus[0]["architecture"].replace("SM", "sm_")
        lines += [f"{gpus[0]['name']} ({target}): {_summary(ops['cuda'])}", _status(target)]
    if report["advice"] is not None:
        advice = report["advice"]
        lines.append(f"{advice[0].upper()}{advice[1:]}.")
    lines.append(f"bf16 on this CPU: {report['cpu_bf16']}.")
    if isinstance(untested, str):
        lines.append(f"Versions: {untested}.")
    elif untested:
        found = ", ".join(f"{name} {text}" for name, text in untested.items())
        lines.append(f"Untested versions: {found}.")
    else:
        lines.append("All versions are within the tested ranges.")
    return lines


def _untested() -> dict[str, str]:
    """Packages whose version is outside the tested range, and that range."""
    from openmla.integrations.vllm import KNOWN, installed

    found = {}
    for name, (oldest, newest) in TESTED.items():
        version = _packages()[name]
        if version and not _numbers(oldest) <= _numbers(version) <= _numbers(newest):
            found[name] = f"{version} (tested: {oldest} to {newest})"
    vllm = installed()
    if vllm is not None and not vllm[1].startswith(KNOWN):
        found["vllm"] = f"{vllm[1]} (tested: {', '.join(start + 'x' for start in KNOWN)})"
    return found


def _numbers(version: str) -> tuple[int, ...]:
    """Parse 2.13.0+cpu as (2, 13)."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def _guarded(probe: Callable[[], Any]) -> Any:
    try:
        return probe()
    except Exception as error:  # the report must print even if anything is broken
        return f"failed: {type(error).__name__}: {error}"


def _machine() -> dict[str, Any]:
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "cpu": _guarded(_cpu_name),
        "cores": os.cpu_count(),
        "memory_gib": _guarded(_memory_gib),
    }


def _cpu_name() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _memory_gib() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def _packages() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    if found["openmla"] is None:
        from openmla import __version__

        found["openmla"] = f"{__version__} (not installed, running from the source folder)"
    if found["triton"] is None and find_spec("triton") is not None:  # ROCm's and XPU's wheels
        from openmla.backends.requirements import version_of

        found["triton"] = version_of("triton")
    return found


def _vllm() -> str | None:
    """vLLM's version, and whether the plugin is active; None without vLLM."""
    from openmla.integrations.vllm import installed, why_not

    found = installed()
    if found is None:
        return None
    allowed = os.environ.get("VLLM_PLUGINS")
    points = metadata.entry_points(group="vllm.general_plugins", name="openmla")
    reason = why_not(found[1])
    if reason is None and not points:
        reason = "openmla is not installed as a package, so vLLM does not find it."
    if reason is None and allowed is not None and "openmla" not in allowed.split(","):
        reason = f"openmla is not in VLLM_PLUGINS={allowed}."
    active = "the openmla plugin is active. Select it with --attention-backend CUSTOM"
    return f"{' '.join(found)}: {reason or active}"


def _advice() -> str | None:
    """What to install for this machine's GPU, if anything."""
    import torch

    from openmla.backends.requirements import without_kernels

    return without_kernels("cuda") if torch.cuda.is_available() else None


def _gpus() -> list[dict[str, Any]]:
    import torch

    from openmla import hardware

    gpus = []
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        properties = torch.cuda.get_device_properties(index)
        major, minor = hardware.capability(device) or (0, 0)
        amd = getattr(properties, "gcnArchName", "") if torch.version.hip is not None else ""
        gpus.append(
            {
                "name": properties.name,
                "architecture": amd.split(":")[0] or f"SM{major}{minor}",
                "multiprocessors": hardware.multiprocessors(device),
                "memory_gib": round(properties.total_memory / 2**30, 1),
                "shared_memory_kib": hardware.shared_memory(device) // 1024,
            }
        )
    return gpus


def _cpu_bf16() -> str:
    """Whether bf16 matrix products work on this CPU, tested in a child process."""
    if _matmul_survives(dict(os.environ)):
        setting = os.environ.get(ISA_SWITCH)
        return f"works with {ISA_SWITCH}={setting}" if setting else "works"
    if _matmul_survives({**os.environ, ISA_SWITCH: ISA_VALUE}):
        cure = f"export {ISA_SWITCH}={ISA_VALUE}"
        return f"dies with an illegal instruction. Before you start Python: {cure}"
    return f"dies with an illegal instruction, also with {ISA_SWITCH}={ISA_VALUE}. Use float32"


def cpu_bf16_works() -> bool:
    """Whether bf16 matrix products run in this process's environment."""
    return _matmul_survives(dict(os.environ))


def _matmul_survives(environment: dict[str, str]) -> bool:
    child = subprocess.run(
        [sys.executable, "-c", MATMUL], env=environment, capture_output=True, text=True
    )
    if child.returncode == 0:
        return True
    if child.returncode == -signal.SIGILL:
        return False
    raise RuntimeError(f"bf16 probe ended with {child.returncode}: {child.stderr.strip()[-200:]}")


def _ops() -> dict[str, dict[str, dict[str, str]]]:
    """device -> op -> its backends, best first -> "yes", or why not; V3.2's shapes in bf16."""
    import torch

    from openmla import hardware

    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", 0)] if torch.cuda.is_available() else []
    return {
        device.type: ops_of(
            device.type, hardware.capability(device), hardware.multiprocessors(device)
        )
        for device in devices
    }


def ops_of(
    device: str, capability: tuple[int, int] | None, multiprocessors: int
) -> dict[str, dict[str, str]]:
    """op -> its backends, the default first -> "yes", with the kernel if there are several, or why
    not."""
    from openmla.backends import BACKENDS, kernel_of, slower, why_not

    rows = {}
    for name, shape in SHAPES.items():
        problem = problem_of(name.split()[0], device, capability, multiprocessors, **shape)
        cells: dict[str, str] = {}
        behind: dict[str, str] = {}
        for backend in BACKENDS[problem.op]:
            reason = why_not(problem, backend)
            if reason is not None:
                behind[backend] = reason
                continue
            kernel = kernel_of(problem, backend)
            able = behind if slower(problem, backend) else cells
            able[backend] = f"yes: {kernel}" if kernel else "yes"
        rows[name] = {**cells, **behind}
    return rows


_INDEX = {"format": "index_bf16", "H": 64, "D": 128}
_V4 = {"format": "fp8_dsv4", "D": 512, "kinds": ("window", "positions")}
# The shapes to check, DeepSeek's for one token: V3's attention, V3.2's indexer, V4's rows.
SHAPES: dict[str, dict[str, Any]] = {
    "cache_gather": {},
    "cache_write": {},
    "compress_kv": {},
    **dict.fromkeys(("index_logits", "index_logits_ragged", "index_select", "index_topk"), _INDEX),
    "index_write": _INDEX,
    "latent_write": {},
    "map_slots": {},
    "merge_quantize": {"format": "fp8_128"},
    "merge_states": {},
    "mha_masked": {},
    "mha_ragged": {},
    "mqa_paged": {},
    "mqa_sparse": {"kinds": ("slots",)},
    "mqa_sparse fp8_ds_mla": {"kinds": ("slots",), "format": "fp8_ds_mla"},
    "mqa_sparse fp8_ds_mla, 16 heads": {"kinds": ("slots",), "format": "fp8_ds_mla", "H": 16},
    "mqa_sparse fp8_dsv4": _V4,
    "mqa_sparse fp8_dsv4, 16 heads": {**_V4, "H": 16},
    "pack_mask": {},
    "project_heads": {"BS": 128, "E": 128, "V": 512},
    "project_quantize": {"format": "fp8_128", "BS": 512},
    "quantize_heads": {},
    "quantize_out": {"format": "fp8_128"},
    "quantize_queries": {},
    "rope": {"D": 64},
}


def problem_of(
    op: str,
    device: str,
    capability: tuple[int, int] | None,
    multiprocessors: int = 0,
    **shape: Any,
) -> Any:
    import torch

    from openmla.backends import Problem

    usual = {"format": "bf16", "H": 128, "D": 576, "C": 512, "E": 192, "V": 128, "BS": 64}
    return Problem(
        op=op,
        device=device,
        capability=capability,
        multiprocessors=multiprocessors,
        tokens=1,
        dtype=torch.float32 if op == "index_topk" else torch.bfloat16,
        **{**usual, **shape},
    )


def render(report: dict[str, Any]) -> str:
    """The report as text."""
    lines = [line for sentence in report["verdict"] for line in filled(sentence)]
    lines += _section("machine", report["machine"])
    packages, untested = report["packages"], report["untested"]
    if isinstance(packages, dict) and isinstance(untested, dict):
        packages = packages | {name: f"{text}, untested" for name, text in untested.items()}
    lines += _section("packages", packages)
    if report["vllm"] is not None:
        lines += _section("vllm", report["vllm"])
    gpus = report["gpus"]
    if gpus == []:
        gpus = "none found by PyTorch; every op also runs on the CPU"
    if isinstance(gpus, str):
        lines += _section("gpus", gpus)
    else:
        for index, gpu in enumerate(gpus):
            lines += _section(f"gpu {index}", gpu)
    ops = report["ops"]
    if isinstance(ops, str):
        lines += _section("ops", ops)
    for device, rows in {} if isinstance(ops, str) else ops.items():
        title = f"ops on {device} (bf16, DeepSeek shapes; the first backend listed is used)"
        lines += _section(title, {op: _backends(cells) for op, cells in rows.items()})
    return "\n".join(lines)


def _section(title: str, content: Any) -> list[str]:
    """A title followed by an indented text or named values, no wider than a terminal."""
    if isinstance(content, str):
        return ["", *filled(title), *filled(content, "  ")]
    column = max(map(len, content), default=0)
    lines = ["", *filled(title)]
    for name, value in content.items():
        text = "not installed" if value is None else str(value)
        lines += filled(text, f"  {name:<{column}}  ")
    return lines


def _backends(cells: dict[str, str]) -> str:
    """Available backends, best first, then why the others are not."""
    able = {name: cell for name, cell in cells.items() if _runs(cell)}
    others = [f"not {name}: {cell}" for name, cell in cells.items() if name not in able]
    shown = ", ".join(
        f"{name} ({cell[5:]})" if cell != "yes" else name for name, cell in able.items()
    )
    return f"{shown or 'none'} ({'; '.join(others)})" if others else shown or "none"
