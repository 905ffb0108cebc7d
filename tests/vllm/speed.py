"""Prefill and decode beside vLLM's own backend, at 8192 keys: two engines in two processes that
take turns, on a checkpoint with heads as wide as V3's."""

from __future__ import annotations

from statistics import median

from tests.vllm.cases import prompts_of
from tests.vllm.engine import OURS, Engine
from tests.vllm.untouched import NOT_LOADED

KEYS = 8192
STEPS, TURNS = 4, 4  # decode steps a turn, turns of each engine
OPTIONS = {
    "max_model_len": KEYS + 256,
    "max_num_batched_tokens": KEYS
    + 256,  # as vLLM's own is made to take, so that both prefill alike
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 1 << 30,
}
OWN = "vLLM's own"


def measure(engines: dict[str, Engine], requests: int) -> dict[str, tuple[float, float]]:
    """Seconds of prefill and of a decode step, by engine."""
    prompts = prompts_of([KEYS] * requests, seed=7)
    prefill = {who: engine.ask("fill", prompts=prompts, new=200) for who, engine in engines.items()}
    steps: dict[str, list[float]] = {who: [] for who in engines}
    for turn in range(TURNS):
        for who in list(engines)[:: 1 if turn % 2 else -1]:
            # the first step of a turn finds the other engine's rows in the caches of the CPU
            steps[who] += engines[who].ask("decode", steps=1 + STEPS)[1:]
    for engine in engines.values():
        engine.ask("drop")
    return {who: (prefill[who], median(steps[who])) for who in engines}


def speed() -> str:
    """A table; decode must be as fast as vLLM's own at least."""
    variables = {"OMP_NUM_THREADS": "2"}
    engines = {
        OWN: Engine("speed-own", "large", OPTIONS, {**variables, **NOT_LOADED}),
        "openmla": Engine("speed", "large", {**OPTIONS, **OURS}, variables),
    }
    lines = [f"{'requests':>8}  {'phase':10} {OWN:>12} {'openmla':>10} {'ratio':>6}"]
    fast = True
    try:
        for engine in engines.values():  # both have run once before either is measured
            engine.ask("generate", prompts=prompts_of([256], seed=8), new=4)
        for requests in (1, 8):
            seconds = measure(engines, requests)
            for phase, name in enumerate(("prefill", "decode")):
                own, ours = seconds[OWN][phase], seconds["openmla"][phase]
                unit, factor = ("s", 1.0) if name == "prefill" else ("ms", 1e3)
                fast &= name == "prefill" or ours <= own
                lines.append(
                    f"{requests:8}  {name:10} {own * factor:9.1f} {unit:2} "
                    f"{ours * factor:7.1f} {unit:2} {own / ours:5.2f}x"
                )
    finally:
        for engine in engines.values():
            engine.close()
    table = "\n".join(["", *lines])
    assert fast, f"decode is slower than vLLM's own:{table}"
    return table
