"""`openmla doctor`: the machine, the versions, and which backend runs which op, or why not.

Standard library first and every probe guarded: on a broken machine the report still prints, with
what is broken in the place of what could not be found out.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from importlib import metadata
from importlib.util import find_spec
from typing import Any

PACKAGES = (
    "openmla",
    "torch",
    "triton",
    "transformers",
    "safetensors",
    "flash_mla",
)
WIDTH = 100  # of the report's lines
# Of A100, RTX 3090, RTX 4090, H100 and H200, B200, RTX 5090, DGX Spark.
MULTIPROCESSORS = {
    "sm_80": 108, "sm_86": 82, "sm_89": 128, "sm_90": 132, "sm_100": 148, "sm_120": 170,
    "sm_121": 48,
}  # fmt: skip
ISA_SWITCH = "ONEDNN_MAX_CPU_ISA"
ISA_VALUE = "AVX512_CORE_BF16"
MATMUL = (
    "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); "
    "raise SystemExit(0 if (a @ a)[0, 0] == 64 else 3)"
)


def run_doctor(arguments: Sequence[str]) -> int:
    """Print the report, which always succeeds, or compile."""
    from openmla.cli.options import Parser

    parser = Parser(prog="openmla doctor", description="What this machine can run, and why not.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--target", metavar="TARGET", help="which kernels a GPU would run, such as sm_80"
    )
    parser.add_argument(
        "--compile", metavar="TARGET", help="compile every kernel: all, or one such as sm_90"
    )
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


def _of_target(target: str) -> list[str]:
    """The ops section for a GPU that need not be there."""
    from openmla.errors import ConfigError

    if target not in MULTIPROCESSORS:
        raise ConfigError(
            f"doctor: --target must be one of {', '.join(MULTIPROCESSORS)}, got {target!r}."
        )
    digits = int(target.removeprefix("sm_"))
    rows = ops_of("cuda", divmod(digits, 10), MULTIPROCESSORS[target])
    title = f"ops on {target}, {MULTIPROCESSORS[target]} multiprocessors (bf16, DeepSeek's shapes)"
    return _section(title, {op: _backends(cells) for op, cells in rows.items()})[1:]


def examine() -> dict[str, Any]:
    """Every probe's answer, or a sentence that starts with `failed:`."""
    return {
        "machine": _guarded(_machine),
        "packages": _guarded(_packages),
        "vllm": _guarded(_vllm),
        "gpus": _guarded(_gpus),
        "cpu_bf16": _guarded(_cpu_bf16),
        "ops": _guarded(_ops),
        "advice": _guarded(_advice),
    }


def _guarded(probe: Callable[[], Any]) -> Any:
    try:
        return probe()
    except Exception as error:  # the report must print whatever is broken
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

        found["openmla"] = f"{__version__}, not installed: run from its folder"
    if found["triton"] is None and find_spec("triton") is not None:  # ROCm's and XPU's wheels
        from openmla.backends.requirements import version_of

        found["triton"] = version_of("triton")
    return found


def _vllm() -> str | None:
    """Which vLLM is there, and whether openmla takes part in it; None where there is none."""
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
    return f"{' '.join(found)}: {reason or 'openmla serves with --attention-backend CUSTOM'}"


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
        gpus.append(
            {
                "name": properties.name,
                "architecture": f"SM{major}{minor}",
                "multiprocessors": hardware.multiprocessors(device),
                "memory_gib": round(properties.total_memory / 2**30, 1),
                "shared_memory_kib": hardware.shared_memory(device) // 1024,
            }
        )
    return gpus


def _cpu_bf16() -> str:
    """Whether a bf16 matrix product survives here, tried in a child process."""
    if _matmul_survives(dict(os.environ)):
        setting = os.environ.get(ISA_SWITCH)
        return f"works with {ISA_SWITCH}={setting}" if setting else "works"
    if _matmul_survives({**os.environ, ISA_SWITCH: ISA_VALUE}):
        cure = f"export {ISA_SWITCH}={ISA_VALUE}"
        return f"dies with an illegal instruction; before Python starts: {cure}"
    return f"dies with an illegal instruction, also with {ISA_SWITCH}={ISA_VALUE}; use float32"


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
    """op -> its backends, the one that is taken first -> "yes", with the kernel where there are
    several, or why not."""
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
# What is asked about, DeepSeek's shapes for one token: V3's attention, V3.2's indexer, V4's rows.
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
    """The report as text for a person."""
    lines: list[str] = []
    for title in ("machine", "packages"):
        lines += _section(title, report[title])
    if report["vllm"] is not None:
        lines += _section("vllm", report["vllm"])
    gpus = report["gpus"]
    if gpus == []:
        gpus = "none that torch sees; everything here runs on the CPU too"
    if isinstance(gpus, str):
        lines += _section("gpus", gpus)
    else:
        for index, gpu in enumerate(gpus):
            lines += _section(f"gpu {index}", gpu)
    lines += _section("bf16 matrix products on this CPU", report["cpu_bf16"])
    ops = report["ops"]
    if isinstance(ops, str):
        lines += _section("ops", ops)
    for device, rows in {} if isinstance(ops, str) else ops.items():
        title = f"ops on {device} (bf16, DeepSeek's shapes; the first backend named is taken)"
        lines += _section(title, {op: _backends(cells) for op, cells in rows.items()})
    if report["advice"] is not None:
        lines += _section("advice", report["advice"])
    return "\n".join(lines).lstrip("\n")


def _section(title: str, content: Any) -> list[str]:
    """A title and, indented under it, a text or named values, none wider than a terminal."""
    if isinstance(content, str):
        return ["", title, *_wrapped("  ", content)]
    width = max(map(len, content), default=0)
    lines = ["", title]
    for name, value in content.items():
        text = "not installed" if value is None else str(value)
        lines += _wrapped(f"  {name:<{width}}  ", text)
    return lines


def _wrapped(start: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_on_hyphens=False,
    ) or [start.rstrip()]


def _backends(cells: dict[str, str]) -> str:
    """Those that can, best first, then why the others cannot."""
    able = {name: cell for name, cell in cells.items() if cell.startswith("yes")}
    others = [f"not {name}: {cell}" for name, cell in cells.items() if name not in able]
    shown = ", ".join(
        f"{name} ({cell[5:]})" if cell != "yes" else name for name, cell in able.items()
    )
    return f"{shown or 'none'} ({'; '.join(others)})" if others else shown or "none"
