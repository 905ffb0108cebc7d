"""200 requests of random lengths that arrive at random, 30 of them aborted, through the server."""

from __future__ import annotations

import asyncio
import json
import random
import time
from contextlib import suppress
from typing import Any

from tests.vllm.checkpoints import FOLDER, VOCABULARY, checkpoint
from tests.vllm.engine import GPU_VARIABLES
from tests.vllm.reference import regrets
from tools.demo_vllm import Server, wait_for

REQUESTS, ABORTED, TURNS = 200, 30, 3
MODEL = "gpu-v3"
GRAPHS = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}
OPTIONS = (
    "--dtype", "bfloat16", "--skip-tokenizer-init", "--seed", "0", "--enable-prefix-caching",
    "--max-model-len", "4096", "--max-num-seqs", "64",
    "--gpu-memory-utilization", "0.3",  # vLLM measures what is left for the KV cache
    "--compilation-config", json.dumps(GRAPHS),
)  # fmt: skip


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


async def ask(session: Any, request: dict[str, Any]) -> list[int]:
    """Tokens as the server streams them. A client that hangs up aborts its request."""
    body = {
        "model": "demo", "prompt": request["prompt"], "max_tokens": request["new"],
        "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True,
    }  # fmt: skip
    got: list[int] = []

    async def stream() -> None:
        async with session.post("/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                data = line.removeprefix(b"data: ").strip()
                if data and data != b"[DONE]":
                    got.extend(json.loads(data)["choices"][0]["token_ids"])

    with suppress(TimeoutError):
        await asyncio.wait_for(stream(), request["aborted"])
    return got


async def storm(server: Server) -> dict[str, Any]:
    from aiohttp import ClientSession, TCPConnector

    asked, best, tokens = requests(), float("inf"), []
    address = f"http://127.0.0.1:{server.port}"
    async with ClientSession(address, connector=TCPConnector(limit=0)) as session:
        for _ in range(TURNS):
            began, tasks = time.perf_counter(), []
            for request in asked:
                await asyncio.sleep(request["after"])
                tasks.append(asyncio.create_task(ask(session, request)))
            tokens = await asyncio.gather(*tasks)
            best = min(best, (time.perf_counter() - began) / sum(map(len, tokens)))
            await asyncio.sleep(0.5)
            # refused while any request holds a block
            async with session.post("/reset_prefix_cache") as answer:
                assert (await answer.json())["success"], "blocks are lost"
    return {"tokens per second": 1 / best, "tokens": tokens}


RECORD = FOLDER / "gpu-load.json"


def load(judge: str = "both") -> list[str]:
    """Prints throughput and what a float32 model says of the tokens; returns what failed."""
    failed = [] if judge == "only" else storms()
    if judge != "later":
        failed += check()
    return failed


def storms() -> list[str]:
    """One server after the other, by openmla and by the backend that vLLM takes by itself."""
    seen, failed = {}, []
    variables = {**GPU_VARIABLES, "OMP_NUM_THREADS": "4", "VLLM_SERVER_DEV_MODE": "1"}
    for backend in ("CUSTOM", ""):
        chosen = ("--attention-backend", backend) if backend else ()
        name = f"gpu-load-{backend or 'own'}"
        server = Server(name, checkpoint(MODEL), *OPTIONS, *chosen, variables=variables)
        try:
            wait_for([server], quiet=True)
            answer = seen[backend] = asyncio.run(storm(server))
        except Exception as error:
            failed.append(f"load {backend}: {error!r}; see {server.log}")
            continue
        finally:
            server.close()
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
