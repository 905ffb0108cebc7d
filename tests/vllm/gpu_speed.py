"""Prefill and decode in the engine, openmla and vLLM's own backends in turn on one GPU."""

from __future__ import annotations

import json
from statistics import median, quantiles
from typing import Any

from tests.vllm.checkpoints import FOLDER
from tests.vllm.engine import GPU_VARIABLES, Engine

# by model: requests x tokens that each has at first
SHAPES = {
    "speed-16": "1x1024,1x8192,1x32768,16x1024,16x8192,16x32768,64x1024,64x4096,64x8192,"
    "128x1024,128x4096",
    "speed-128": "1x1024,1x32768,16x1024,16x8192,64x1024,64x4096,128x1024",
    "speed-16-fp8": "1x1024,1x32768,16x1024,16x8192,64x8192,128x4096",
    "speed-v3.2": "1x1024,1x32768,16x1024,16x8192,64x4096",
}
WINDOWS, STEPS = 16, 20  # of decode steps, in turn
CORES = [0, 1, 2, 3]  # for every engine: one works at a time
GRAPHS = {
    "mode": 0,
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "cudagraph_capture_sizes": [1, 16, 64, 128],
}
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "max_model_len": 33792,
    "max_num_seqs": 128,
    "max_num_batched_tokens": 16384,
    "kv_cache_memory_bytes": 8 << 30,  # all engines are up at once
    "gpu_memory_utilization": 0.05,
    "enforce_eager": False,
    "disable_log_stats": True,
    "compilation_config": GRAPHS,
}
# by model: names of engines, and what they are started with
FP8 = {"kv_cache_dtype": "fp8"}
UNBROKEN = {"VLLM_USE_BREAKABLE_CUDAGRAPH": "0"}
ENGINES: dict[str, dict[str, dict[str, Any]]] = {
    "speed-16": {
        "openmla": {"attention_backend": "CUSTOM"},
        "FLASH_ATTN_MLA": {"attention_backend": "FLASH_ATTN_MLA"},
        "TRITON_MLA": {"attention_backend": "TRITON_MLA"},
    },
    "speed-128": {
        "openmla": {"attention_backend": "CUSTOM"},
        "FLASH_ATTN_MLA": {"attention_backend": "FLASH_ATTN_MLA"},
        "FLASHMLA": {"attention_backend": "FLASHMLA"},
    },
    "speed-16-fp8": {
        "openmla": {"attention_backend": "CUSTOM", **FP8},
        "openmla, fp8 queries": {"attention_backend": "CUSTOM", **FP8}
        | {"additional_config": {"openmla": {"query_dtype": "fp8"}}},
        "TRITON_MLA": {"attention_backend": "TRITON_MLA", **FP8},
    },
    "speed-v3.2": {
        "openmla": {"attention_backend": "CUSTOM", "kv_cache_dtype": "fp8_ds_mla"},
        "FLASHMLA_SPARSE": {"attention_backend": "FLASHMLA_SPARSE", "kv_cache_dtype": "fp8_ds_mla"},
    },
}


def speed(models: list[str], shapes: str = "") -> list[str]:
    """Prints a table for each model and writes it; returns what failed. All engines start at once,
    then one at a time works."""
    variables = {**GPU_VARIABLES, "OMP_NUM_THREADS": "4"}
    # the same graphs for all; openmla's drop-in where DeepGEMM is missing
    sparse = {**UNBROKEN, "OPENMLA_AS_DEEP_GEMM": "1"}
    started: dict[str, dict[str, Engine]] = {}
    failed: list[str] = []
    try:
        for model in models:
            for who, given in ENGINES[model].items():
                log = f"{model}-{who}".replace(" ", "-").replace(",", "")
                more = variables | (sparse if "v3.2" in model else {})
                made = Engine(log, model.removesuffix("-fp8"), {**OPTIONS, **given}, more)
                started.setdefault(model, {})[who] = made
        for model, engines in started.items():
            for who, engine in list(engines.items()):
                try:
                    engine.ask("open_shape", requests=2, length=512, new=64)
                    engine.ask("end")
                    engine.ask("pin", cores=CORES)
                except RuntimeError as error:
                    failed.append(f"{model} {who}: {error}")
                    del engines[who]
        for model, engines in started.items():
            measure(model, engines, shapes)
    finally:
        for engines in started.values():
            for engine in engines.values():
                engine.close()
    return failed


def measure(model: str, engines: dict[str, Engine], shapes: str) -> None:
    rows: list[dict[str, Any]] = []
    print(f"{model}: a decode step (GPU busy; metadata), prefill of all prompts", flush=True)
    for shape in (shapes or SHAPES[model]).split(","):
        requests, length = map(int, shape.split("x"))
        seen = measure_shape(engines, requests, length)
        rows.append({"shape": shape} | seen)
        print(line(shape, seen), flush=True)
        write(model, rows)
    if model in ("speed-16", "speed-v3.2"):
        mixed = {who: engine.ask("time_mixed", requests=64) for who, engine in engines.items()}
        rows.append({"mixed build us": mixed})
        print("  metadata of a mixed step of 64 requests, us:", mixed, flush=True)
    write(model, rows)


def measure_shape(engines: dict[str, Engine], requests: int, length: int) -> dict[str, Any]:
    """Prefill, the better of two; then the requests live in all engines at once, which decode in
    turn, and the median window counts; at last what the GPU and the host do in a step."""
    new = 40 + WINDOWS * (STEPS + 2)
    asked = {"requests": requests, "length": length, "new": new + 40}
    prefill: dict[str, list[float]] = {who: [] for who in engines}
    for who, engine in engines.items():
        prefill[who].append(engine.ask("open_shape", **asked))
        engine.ask("end")
    prompts = {"requests": requests, "length": length}
    busy = {who: engine.ask("profile_prefill", **prompts) for who, engine in engines.items()}
    for who in list(engines)[::-1]:
        engines[who].ask("end")
        prefill[who].append(engines[who].ask("open_shape", **asked))
    windows: dict[str, list[dict[str, float]]] = {who: [] for who in engines}
    for turn in range(WINDOWS):
        for who in list(engines)[:: 1 if turn % 2 else -1]:
            windows[who].append(engines[who].ask("time_steps", steps=STEPS))
    seen: dict[str, Any] = {}
    for who, engine in engines.items():
        decode = [each["decode ms"] for each in windows[who]]
        seen[who] = {
            "prefill s": min(prefill[who]),
            "prefill gpu": busy[who],
            "decode ms": median(decode),
            "decode ms, in turn": decode,
            "build us": median(each["build us"] for each in windows[who]),
            "gpu": engine.ask("profile", steps=8),
            "host": engine.ask("host_profile", steps=8),
        }
        engine.ask("end")
    return seen


def fastest(seen: dict[str, Any]) -> float:
    """Mean of the three fastest windows. On a shared host a core slows down for a while, and all of
    an engine's Python with it; medians depend on how often that happened."""
    return sum(sorted(seen["decode ms, in turn"])[:3]) / 3


def write(model: str, rows: list[dict[str, Any]]) -> None:
    (FOLDER / f"gpu-{model}.json").write_text(json.dumps(rows))


def line(shape: str, seen: dict[str, Any]) -> str:
    """Each engine's times, and how fast openmla is against the best of vLLM's own."""
    cells = []
    for who, each in seen.items():
        lower, _, upper = quantiles(each["decode ms, in turn"], n=4)
        cells.append(
            f"{who} {each['decode ms']:.3f} ms (half in {lower:.3f} to {upper:.3f}; GPU "
            f"{each['gpu']['busy ms']:.3f}; {each['build us']:.0f} us), {each['prefill s']:.3f} s "
            f"(GPU {each['prefill gpu']['busy ms'] / 1e3:.3f})"
        )
    own = [who for who in seen if not who.startswith("openmla")]
    if own and "openmla" in seen:
        ours = seen["openmla"]
        ratios = [
            min(seen[who][key] for who in own) / ours[key] for key in ("decode ms", "prefill s")
        ]
        busy = min(seen[who]["gpu"]["busy ms"] for who in own) / ours["gpu"]["busy ms"]
        best = min(fastest(seen[who]) for who in own) / fastest(ours)
        cells.append(
            f"ratio: decode {ratios[0]:.2f} ({best:.2f} in the fastest windows), GPU {busy:.2f}, "
            f"prefill {ratios[1]:.2f}"
        )
    return f"{shape:>8}  " + ";\n          ".join(cells)
