"""One vLLM engine in a process of its own, asked through pipes; several may run side by side.

An `Engine` starts this file as a module, which makes vLLM's engine and answers each line of JSON
with another until its input ends. All that vLLM prints goes to a log.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from tests.vllm.checkpoints import FOLDER, ROOT, checkpoint, dtype_of

VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",  # AMX, where it is masked, kills bf16 products
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that the scheduler's blocks can be counted
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
}
GPU_VARIABLES = {
    "OMP_NUM_THREADS": "2",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}
# what an engine is started with unless a case says otherwise
USUAL: dict[str, Any] = {
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "kv_cache_memory_bytes": 64 << 20,
    "skip_tokenizer_init": True,
    "disable_log_stats": False,
    "seed": 0,
}
COMMAND = (sys.executable, "-m", "tests.vllm.engine")
OURS = {"attention_backend": "CUSTOM"}


class EngineFailed(RuntimeError):
    """The process of an engine ended, or its answer was an error; its last words."""


class Engine:
    """vLLM with these options on a checkpoint; `ask` it, then close it. `pretend` is a version that
    vLLM says it has."""

    def __init__(
        self,
        name: str,
        model: str,
        options: dict[str, Any] | None = None,
        variables: dict[str, str] | None = None,
        pretend: str = "",
    ) -> None:
        logs = FOLDER / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self.log = logs / f"{name}.log"
        arguments = {**USUAL, "model": str(checkpoint(model)), "dtype": dtype_of(model)}
        arguments |= options or {}
        answers, write = os.pipe()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*COMMAND, str(write), json.dumps(arguments), pretend],
                cwd=ROOT,
                env={**os.environ, **VARIABLES, **(variables or {})},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[write],
                text=True,
            )
        os.close(write)
        self.answers = os.fdopen(answers)

    def ask(self, what: str, **arguments: Any) -> Any:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: what it said last is told below
            print(json.dumps({"do": what, **arguments}), file=self.process.stdin, flush=True)
        line = self.answers.readline()
        if not line:
            self.process.wait()
            raise EngineFailed(f"the engine ended; {self.log}:\n{last_words(self.log)}")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        self.answers.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def last_words(log: Path, lines: int = 25) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def backend_of(worker: Any) -> str:
    """The class of a worker's layers, which may be in another process."""
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    found = {each.get_attn_backend() for each in layers if isinstance(each, MLAAttention)}
    (backend,) = found
    return f"{backend.__module__}.{backend.__qualname__}"


class Driver:
    """The other end: vLLM's engine, and what it can be asked. Runs in the engine's process."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**arguments)
        self.engine = self.llm.llm_engine
        self.count = 0

    @property
    def pool(self) -> Any:
        return self.engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool

    def generate(self, prompts: list[list[int]], new: int, first: int = 0) -> dict[str, Any]:
        """Greedy tokens of all prompts at once, of the `first` of them before the others."""
        outputs = []
        for some in (prompts[:first], prompts[first:]):
            if some:
                inputs = [{"prompt_token_ids": prompt} for prompt in some]
                outputs += self.llm.generate(inputs, self.greedy(new), use_tqdm=False)
        return {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "hits": sum(output.num_cached_tokens or 0 for output in outputs),
            "preemptions": self.metric("vllm:num_preemptions"),
        }

    def greedy(self, new: int) -> Any:
        from vllm import SamplingParams

        return SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)

    def metric(self, name: str) -> int:
        found = [metric.value for metric in self.llm.get_metrics() if metric.name == name]
        assert len(found) == 1, f"vLLM has {len(found)} metrics called {name}"
        return int(found[0])

    def settings(self) -> dict[str, Any]:
        """What vLLM made of its options, and the class that attends."""
        config = self.engine.vllm_config
        (backend,) = set(self.llm.collective_rpc(backend_of))
        return {
            "backend": backend,
            "chunked prefill": config.scheduler_config.enable_chunked_prefill,
            "prefix caching": config.cache_config.enable_prefix_caching,
            "batched tokens": config.scheduler_config.max_num_batched_tokens,
            "block size": config.cache_config.block_size,
            "layout": config.cache_config.kv_cache_layout,
            "cache dtype": str(config.cache_config.cache_dtype),
            "blocks": config.cache_config.num_gpu_blocks,
        }

    def storm(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        """Requests that arrive and are aborted at given steps of the engine; their tokens."""
        free = self.pool.get_num_free_blocks()
        tokens: dict[str, list[int]] = {}
        waiting = sorted(requests, key=lambda request: request["arrives"])
        aborts = [request for request in requests if request["aborted"] is not None]
        step, running = 0, 0
        began = time.perf_counter()
        while waiting or self.engine.has_unfinished_requests():
            while waiting and waiting[0]["arrives"] <= step:
                request = waiting.pop(0)
                prompt = {"prompt_token_ids": request["prompt"]}
                name = f"{self.count}-{request['name']}"
                self.engine.add_request(name, prompt, self.greedy(request["new"]))
                tokens[name] = []
            gone = [f"{self.count}-{each['name']}" for each in aborts if each["aborted"] == step]
            self.engine.abort_request([name for name in gone if name in tokens])
            for output in self.engine.step():
                tokens[output.request_id] = list(output.outputs[0].token_ids)
            step, running = step + 1, max(running, self.engine.get_num_unfinished_requests())
        seconds = time.perf_counter() - began
        self.count += 1
        return {
            "tokens": {name.partition("-")[2]: each for name, each in tokens.items()},
            "seconds": seconds,
            "steps": step,
            "most at once": running,
            "free before": free,
            "free after": self.pool.get_num_free_blocks(),
            "preemptions": self.metric("vllm:num_preemptions"),
        }

    def fill(self, prompts: list[list[int]], new: int) -> float:
        """Seconds until every prompt has its first token; the requests go on living."""
        self.alive = [f"speed-{self.count}-{index}" for index in range(len(prompts))]
        self.count += 1
        began = time.perf_counter()
        for name, prompt in zip(self.alive, prompts, strict=True):
            self.engine.add_request(name, {"prompt_token_ids": prompt}, self.greedy(new))
        started: set[str] = set()
        while len(started) < len(prompts):
            started |= {output.request_id for output in self.engine.step()}
        return time.perf_counter() - began

    def decode(self, steps: int) -> list[float]:
        """Seconds of each of some steps that give every living request one token."""
        seconds = []
        for _ in range(steps):
            began = time.perf_counter()
            outputs = self.engine.step()
            seconds.append(time.perf_counter() - began)
            assert len(outputs) == len(self.alive), "a request ended before its time"
        return seconds

    def drop(self) -> int:
        self.engine.abort_request(self.alive)
        return int(self.pool.get_num_free_blocks())

    # on GPUs, where steps are scheduled ahead and one may bring no token

    def runs(self) -> dict[str, Any]:
        """How vLLM runs the model."""
        config = self.engine.vllm_config
        compilation = config.compilation_config
        return {
            "runner": "V2" if config.use_v2_model_runner else "V1",
            "graphs": str(compilation.cudagraph_mode).rpartition(".")[2],
            "cache": str(config.cache_config.cache_dtype),
            "drafted": self.counted("vllm:spec_decode_num_draft_tokens"),
            "accepted": self.counted("vllm:spec_decode_num_accepted_tokens"),
            "preemptions": self.counted("vllm:num_preemptions"),
        }

    def counted(self, name: str) -> int:
        return int(sum(metric.value for metric in self.llm.get_metrics() if metric.name == name))

    def open_shape(self, requests: int, length: int, new: int) -> float:
        """Seconds of prefill; the requests go on living, each for that many tokens."""
        import torch

        prompts = different_prompts(requests, length)
        torch.cuda.synchronize()
        seconds = self.fill(prompts, new)
        torch.cuda.synchronize()
        for _ in range(6):
            self.engine.step()
        return seconds

    def time_steps(self, steps: int) -> dict[str, float]:
        """Milliseconds of a decode step of all living requests, microseconds of its metadata."""
        import torch

        builds = watch_builds()
        for _ in range(2):  # caches of the CPU, which the other engines had
            self.engine.step()
        builds.clear()
        torch.cuda.synchronize()
        began, made = time.perf_counter(), 0
        for _ in range(steps):
            made += len(self.engine.step())
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - began) * len(self.alive) / max(made, 1)
        decode = [each.seconds for each in builds if each.tokens == each.requests]
        return {"decode ms": 1e3 * seconds, "build us": 1e6 * median(decode)}

    def pin(self, cores: list[int]) -> None:
        """Keep every thread of this process on some cores: all engines then have the same ones."""
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), cores)

    def time_mixed(self, requests: int, times: int = 6) -> float:
        """Microseconds for the metadata of a step in which two of so many requests are prompts."""
        self.fill([[2 + i % 900] * 700 for i in range(requests - 2)], 400)
        builds, seconds = watch_builds(), []
        for turn in range(times):
            for i in range(2):
                prompt = {"prompt_token_ids": [3 + i] * (200 + 100 * i)}
                self.engine.add_request(f"mixed-{self.count}-{turn}-{i}", prompt, self.greedy(1))
            builds.clear()
            for _ in range(4):
                self.engine.step()
            mixed = [each for each in builds if each.tokens > each.requests == requests]
            seconds += [each.seconds for each in mixed]
        self.end()
        return 1e6 * median(seconds) if seconds else float("nan")

    def end(self) -> None:
        self.drop()
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def profile(self, steps: int) -> dict[str, Any]:
        """Milliseconds per decode step of the living requests that the GPU is busy, by kernel."""
        return profile_gpu(lambda: [self.engine.step() for _ in range(steps)], steps)

    def profile_prefill(self, requests: int, length: int) -> dict[str, Any]:
        """The same of a whole prefill."""
        prompts = different_prompts(requests, length)
        return profile_gpu(lambda: self.fill(prompts, 8), 1)

    def host_profile(self, steps: int) -> list[tuple[str, float]]:
        """Where the host spends a decode step of the living requests: milliseconds in a function
        and what it calls, the largest first. Tracing makes all of them slower."""
        import cProfile
        import pstats

        traced = cProfile.Profile()
        traced.enable()
        for _ in range(steps):
            self.engine.step()
        traced.disable()
        table: Any = pstats.Stats(traced)
        spent = [
            (f"{Path(file).name}:{line} {function}", 1e3 * cumulative / steps)
            for (file, line, function), (_, _, _, cumulative, _) in table.stats.items()
        ]
        return sorted(spent, key=lambda each: -each[1])[:60]


def different_prompts(requests: int, length: int) -> list[list[int]]:
    return [[(i * 7919 + j * 104729) % 1000 + 2 for j in range(length)] for i in range(requests)]


def profile_gpu(work: Callable[[], object], steps: int) -> dict[str, Any]:
    """Milliseconds per step that the GPU is busy, and the kernels that take longest."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    spent: dict[str, float] = {}
    spans: list[tuple[float, float]] = []
    for event in seen.events():
        if event.device_type.name == "CUDA":
            name = event.name[:60]
            spent[name] = spent.get(name, 0.0) + event.device_time / 1e3 / steps
            spans.append((event.time_range.start, event.time_range.end))
    top = sorted(spent.items(), key=lambda each: -each[1])[:10]
    return {"busy ms": covered(spans) / 1e3 / steps, "top": top}


def covered(spans: list[tuple[float, float]]) -> float:
    """How much of the time lies in some span: kernels that are launched early overlap."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return total


class Build:
    """A step's attention metadata, of all groups of layers, whoever made it."""

    def __init__(self, common: Any) -> None:
        self.starts, self.seconds = common.query_start_loc_cpu, 0.0
        self.requests, self.tokens = common.num_reqs, common.num_actual_tokens


BUILDS: list[Build] = []


def watch_builds() -> list[Build]:
    """From now on."""
    from vllm.v1.worker.utils import AttentionGroup

    real = AttentionGroup.build_metadata
    BUILDS.clear()
    if getattr(real, "is_watched", False):
        return BUILDS

    def build_metadata(group: Any, common: Any, *args: Any, **given: Any) -> Any:
        began = time.perf_counter()
        made = real(group, common, *args, **given)
        seconds = time.perf_counter() - began
        if not BUILDS or BUILDS[-1].starts is not common.query_start_loc_cpu:
            BUILDS.append(Build(common))
        BUILDS[-1].seconds += seconds
        return made

    build_metadata.is_watched = True  # type: ignore[attr-defined]
    AttentionGroup.build_metadata = build_metadata
    return BUILDS


def main() -> None:
    _, pipe, arguments, pretended = sys.argv
    answers = os.fdopen(int(pipe), "w")
    if pretended:
        import vllm

        vllm.__version__ = pretended
    if os.environ.get("OPENMLA_AS_DEEP_GEMM"):  # vLLM's sparse backends need DeepGEMM
        from openmla.integrations import deep_gemm

        deep_gemm.install(force=True)
    driver = Driver(json.loads(arguments))
    for line in sys.stdin:
        question = json.loads(line)
        answer = getattr(driver, question.pop("do"))(**question)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
