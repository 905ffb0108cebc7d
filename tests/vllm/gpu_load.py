"""200 requests of random lengths that arrive at random, 30 of them aborted, through AsyncLLM."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

from tests.vllm.checkpoints import FOLDER, ROOT, VOCABULARY, checkpoint
from tests.vllm.engine import GPU_VARIABLES
from tests.vllm.reference import regrets

REQUESTS, ABORTED = 200, 30
MODEL = "gpu-v3"
OPTIONS: dict[str, Any] = {
    "max_model_len": 4096,
    "max_num_seqs": 64,
    "gpu_memory_utilization": 0.3,  # vLLM measures what is left for the KV cache
    "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]},
    "enable_prefix_caching": True,
    "skip_tokenizer_init": True,
    "seed": 0,
}


def requests() -> list[dict[str, Any]]:
    draw = random.Random(9)
    aborted = set(draw.sample(range(REQUESTS), ABORTED))
    return [
        {
            "prompt": [draw.randrange(2, VOCABULARY) for _ in range(int(2 ** draw.uniform(0, 11)))],
            "new": draw.randint(1, 120),
            "after": draw.expovariate(1 / 0.01),
            "aborted": draw.uniform(0.0, 0.6) if i in aborted else None,
        }
        for i in range(REQUESTS)
    ]


async def ask(engine: Any, name: str, request: dict[str, Any]) -> list[int]:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    asked = SamplingParams(
        temperature=0, max_tokens=request["new"], ignore_eos=True, detokenize=False,
        output_kind=RequestOutputKind.CUMULATIVE,
    )  # fmt: skip
    got: list[int] = []

    async def stream() -> None:
        prompt = {"prompt_token_ids": request["prompt"]}
        async for output in engine.generate(prompt, asked, name):
            got[:] = output.outputs[0].token_ids

    with suppress(TimeoutError):  # cancelled: vLLM aborts it
        await asyncio.wait_for(stream(), request["aborted"])
    return got


async def storm(backend: str) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    given = {"attention_backend": backend} if backend else {}
    made = AsyncEngineArgs(model=str(checkpoint(MODEL)), dtype="bfloat16", **OPTIONS, **given)
    engine = AsyncLLM.from_engine_args(made)
    asked, best, tokens = requests(), float("inf"), []
    for turn in range(3):
        began, tasks = time.perf_counter(), []
        for i, request in enumerate(asked):
            await asyncio.sleep(request["after"])
            tasks.append(asyncio.create_task(ask(engine, f"{turn}-{i}", request)))
        tokens = await asyncio.gather(*tasks)
        best = min(best, (time.perf_counter() - began) / sum(map(len, tokens)))
        await asyncio.sleep(0.5)
        # refused while any request holds a block
        assert await engine.reset_prefix_cache(), "blocks are lost"
    engine.shutdown()
    return {"tokens per second": 1 / best, "tokens": tokens}


RECORD = FOLDER / "gpu-load.json"


def load(judge: str = "both") -> list[str]:
    """Prints throughput and what a float32 model says of the tokens; returns what failed."""
    failed = [] if judge == "only" else storms()
    if judge != "later":
        failed += check()
    return failed


def storms() -> list[str]:
    seen, failed = {}, []
    for backend in ("CUSTOM", ""):
        variables = {**os.environ, **GPU_VARIABLES, "HF_HUB_OFFLINE": "1"}
        variables |= {"VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "4"}
        log = FOLDER / "logs" / f"gpu-load-{backend or 'own'}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as errors:
            done = subprocess.run(
                [sys.executable, "-m", "tests.vllm.gpu_load", backend],
                cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip
        if done.returncode:
            failed.append(f"load {backend}: see {log}\n{log.read_text()[-1500:]}")
            continue
        answer = seen[backend] = json.loads(done.stdout.splitlines()[-1])
        print(f"{backend or 'vLLM itself'}: {answer['tokens per second']:.0f} tokens/s", flush=True)
        RECORD.write_text(json.dumps(seen))
    return failed


def check() -> list[str]:
    seen, failed, asked = json.loads(RECORD.read_text()), [], requests()
    for backend, answer in seen.items():
        for i, (request, got) in enumerate(zip(asked, answer["tokens"], strict=True)):
            if request["aborted"] is None and len(got) != request["new"]:
                failed.append(f"load {backend}: request {i} has {len(got)} of {request['new']}")
        kept = [i for i, got in enumerate(answer["tokens"]) if got]
        given = [asked[i]["prompt"] for i in kept], [answer["tokens"][i] for i in kept]
        flat = [r for rs in regrets(MODEL, *given) for r in rs]
        answer["regret"] = max(flat), sum(flat) / len(flat)
        print(
            f"{REQUESTS} requests, {ABORTED} aborted, by {backend or 'vLLM itself'}: "
            f"{answer['tokens per second']:.0f} tokens/s, regret {max(flat):.3f} at most, "
            f"{answer['regret'][1]:.4f} on average, no block lost",
            flush=True,
        )
    if len(seen) == 2:
        if seen["CUSTOM"]["regret"][1] > 2 * seen[""]["regret"][1] + 0.01:
            failed.append("load: openmla's tokens are worse than those of vLLM's own backend")
        ratio = seen["CUSTOM"]["tokens per second"] / seen[""]["tokens per second"]
        print(f"openmla has {ratio:.2f} times the throughput")
    return failed


if __name__ == "__main__":
    print(json.dumps(asyncio.run(storm(sys.argv[1]))))
