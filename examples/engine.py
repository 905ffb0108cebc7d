"""A small serving engine: continuous batching of many requests over one paged cache.

    python examples/engine.py                              20 requests to the demo model
    python examples/engine.py --requests 200 --blocks 30   more requests, and little memory

Start reading at Engine.step(): which requests run, which blocks they get, one forward, new tokens.
openmla provides the attention and the block pool; the rest of the model is transformers' own
modules.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import openmla

DEMO = Path(openmla.__file__).parent / "demo"
FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16"}


@dataclass(eq=False)
class Request:
    number: int  # the request's name in the pool
    prompt: list[int]
    max_new_tokens: int
    tokens: list[int] = field(default_factory=list)  # the prompt, then generated tokens


class PagedModel:
    """A Hugging Face model's weights over packed tokens: MLAAttention for its attention, one cache
    per layer, one plan for all of them."""

    def __init__(self, model: Any, num_blocks: int, block_size: int) -> None:
        self.model, weight = model, model.lm_head.weight
        self.device, format = weight.device, FORMATS[weight.dtype]
        self.config = openmla.MLAConfig.from_hf(model.config)
        sizes: Any = {"num_blocks": num_blocks, "block_size": block_size, "device": self.device}
        sizes |= {"format": format, "index_format": f"index_{format}"}
        self.caches, self.layers = [], []  # type: list[openmla.LayerCache], list[Any]
        for i, block in enumerate(model.model.layers):
            self.caches.append(openmla.allocate_cache(self.config, layer=i, **sizes))
            table = self.layers[0].rope_table if i else None
            layer = openmla.MLAAttention(self.config, layer=i, rope_table=table)
            layer.to(self.device, weight.dtype).load_state_dict(block.self_attn.state_dict())
            self.layers.append(layer)

    def __call__(self, ids: Tensor, positions: Tensor, plan: openmla.Plan) -> Tensor:
        """[T, vocabulary]: logits of the step's tokens, requests concatenated."""
        inner, selection = self.model.model, None
        hidden = inner.embed_tokens(ids)
        for block, layer, cache in zip(inner.layers, self.layers, self.caches, strict=True):
            normed = block.input_layernorm(hidden)
            # layers that share a selection of keys use the previous one
            out, selection = layer.attend(normed, positions, cache, plan, selection)
            hidden = hidden + out
            hidden = hidden + block.mlp(block.post_attention_layernorm(hidden)[None])[0]
        logits: Tensor = self.model.lm_head(inner.norm(hidden))
        return logits


class Prefixes:
    """A prefix cache: whole blocks of prefilled prompts, kept for prompts with the same prefix.
    Each is a request in the pool like any other; a block lives as long as it is in use."""

    def __init__(self, pool: openmla.BlockPool) -> None:
        self.pool, self.size = pool, pool.block_size
        self.kept: list[Any] = []  # names in the pool, least recently used first
        self.known: dict[tuple[int, ...], Any] = {}  # tokens of a prefix: its name

    def remember(self, request: Request) -> None:
        whole = len(request.prompt) // self.size * self.size
        if whole and tuple(request.prompt[:whole]) not in self.known:
            self.kept.append(name := ("prefix", request.number))
            self.pool.share(request.number, name, whole)
            for n in range(self.size, whole + 1, self.size):
                self.known[tuple(request.prompt[:n])] = name
        while sum(len(self.pool.blocks(name)) for name in self.kept) > self.pool.num_blocks // 2:
            self.forget_one()

    def share(self, request: Request) -> int:
        """Start a request with its longest known prefix; at least one token is left to prefill."""
        for n in range((len(request.tokens) - 1) // self.size * self.size, 0, -self.size):
            if (name := self.known.get(tuple(request.tokens[:n]))) is not None:
                self.pool.share(name, request.number, n)
                self.kept.append(self.kept.pop(self.kept.index(name)))
                return n
        return 0

    def forget_one(self) -> bool:
        if not self.kept:
            return False
        self.pool.free(gone := self.kept.pop(0))
        self.known = {tokens: name for tokens, name in self.known.items() if name != gone}
        return True


class Engine:
    """Admits requests as capacity allows, and advances all running ones one step at a time: at most
    max_requests requests and max_tokens tokens, so long prompts are prefilled in chunks."""

    def __init__(
        self,
        model: Any,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        max_requests: int = 8,
        max_tokens: int = 64,
    ) -> None:
        self.model = PagedModel(model, num_blocks, block_size)
        self.pool = openmla.BlockPool(num_blocks, block_size)
        self.prefixes = Prefixes(self.pool)
        self.max_requests, self.max_tokens = max_requests, max_tokens
        self.longest = min(num_blocks * block_size, self.model.config.max_positions)
        stop = model.config.eos_token_id
        self.stop = set(stop) if isinstance(stop, list) else {stop}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # the oldest first
        self.finished: list[Request] = []
        self.counts: Counter[str] = Counter()
        # fixed tensors of the largest decode step; graphs of any size use their first rows
        sizes: Any = {"max_requests": max_requests, "max_tokens": max_requests}
        sizes["max_blocks"] = -(-self.longest // block_size)
        self.buffers = openmla.plan_buffers(self.model.config, self.model.caches[0], **sizes)
        self.ids = torch.zeros(max_requests, dtype=torch.int64, device=self.model.device)
        self.positions = torch.zeros_like(self.ids)
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        # graphs are replayed one at a time, and tokens are read before the next replay
        self.graph_pool = torch.cuda.graph_pool_handle() if self.ids.is_cuda else None

    def add(self, prompt: list[int], max_new_tokens: int) -> Request:
        length = len(prompt) + max_new_tokens
        if not prompt or max_new_tokens < 1 or length > self.longest:
            raise ValueError(f"a request must have 2 to {self.longest} tokens, got {length}")
        request = Request(self.counts["requests"], prompt, max_new_tokens, list(prompt))
        self.counts["requests"] += 1
        self.waiting.append(request)
        return request

    def step(self) -> None:
        """One forward: the next token of decoding requests, a chunk of the prompts in prefill."""
        wanted = self._next_tokens()
        if self._make_room(wanted):
            self._admit(wanted)
        if not wanted:
            return
        copies = self.pool.take({request.number: n for request, n in wanted.items()})
        for cache in self.model.caches:
            cache.copy_blocks(copies)  # copies nothing: only whole blocks are shared
        ends = {request: self.pool.seq_len(request.number) for request in wanted}
        spans = [(r.number, ends[r] - n, ends[r]) for r, n in wanted.items()]
        batch = openmla.Batch(
            query_lens=list(wanted.values()),
            seq_lens=list(ends.values()),
            block_table=self.pool.block_table([request.number for request in wanted]),
            slot_mapping=self.pool.slot_mapping(spans),
        )
        ids = [token for r, n in wanted.items() for token in r.tokens[ends[r] - n : ends[r]]]
        positions = [place for _, start, stop in spans for place in range(start, stop)]
        run = self._decode if batch.num_tokens == len(wanted) else self._read
        tokens = run(batch, torch.tensor(ids), torch.tensor(positions))
        for request, token in zip(wanted, tokens, strict=True):
            if ends[request] == len(request.tokens):  # prefill is complete
                self._append(request, token)
        self.counts["steps"] += 1

    def _next_tokens(self) -> dict[Request, int]:
        """How many tokens of each running request are next; decoding requests come first."""
        left = {r: len(r.tokens) - self.pool.seq_len(r.number) for r in self.running}
        wanted, budget = {}, self.max_tokens
        for request in sorted(self.running, key=left.__getitem__):
            if n := min(left[request], budget):
                wanted[request] = n
                budget -= n
        return wanted

    def _make_room(self, wanted: dict[Request, int]) -> bool:
        """Free blocks for all of them, if necessary by evicting prefixes, then by preempting the
        newest request, which is prefilled again later. Returns whether no request was preempted."""
        preempted = False
        while not self._fits(wanted):
            if not self.prefixes.forget_one():
                preempted, request = True, self.running.pop()
                wanted.pop(request, None)
                self.counts["preempted"] += 1
                self.counts["read twice"] += self.pool.seq_len(request.number)
                self.pool.free(request.number)
                self.waiting.appendleft(request)
        return not preempted

    def _admit(self, wanted: dict[Request, int]) -> None:
        """Admit new requests in order, as long as all of their tokens fit."""
        budget = self.max_tokens - sum(wanted.values())
        while budget and self.waiting and len(self.running) < self.max_requests:
            request = self.waiting[0]
            shared = self.prefixes.share(request)
            left = len(request.tokens) - shared
            while not self._fits({**wanted, request: left}):
                if self.running or not self.prefixes.forget_one():
                    if shared:
                        self.pool.free(request.number)
                    return
            self.counts["shared"] += shared
            self.running.append(self.waiting.popleft())
            wanted[request] = min(left, budget)
            budget -= wanted[request]

    def _fits(self, wanted: dict[Request, int]) -> bool:
        try:
            self.pool.check({request.number: n for request, n in wanted.items()})
        except openmla.CacheFullError:
            return False
        return True

    def _append(self, request: Request, token: int) -> None:
        request.tokens.append(token)
        self.counts["generated"] += 1
        new = len(request.tokens) - len(request.prompt)
        if new == 1:
            self.prefixes.remember(request)
        if new == request.max_new_tokens or token in self.stop:
            self.pool.free(request.number)
            self.running.remove(request)
            self.finished.append(request)

    def _read(self, batch: openmla.Batch, ids: Tensor, positions: Tensor) -> list[int]:
        """A step that includes prefill: each request in its cheaper form."""
        model = self.model
        plan = openmla.make_plan(batch, model.config, model.caches[0])
        logits = model(ids.to(model.device), positions.to(model.device), plan)
        last = torch.tensor(batch.query_lens).cumsum(0) - 1
        tokens: list[int] = logits[last.to(model.device)].argmax(-1).tolist()
        return tokens

    def _decode(self, batch: openmla.Batch, ids: Tensor, positions: Tensor) -> list[int]:
        """One token each, padded to a power of two: on a GPU each of these sizes has a graph."""
        model, B = self.model, batch.num_tokens
        size = min(1 << (B - 1).bit_length(), self.max_requests)
        self.counts[f"graph of {size}"] += 1
        into = openmla.slice_buffers(self.buffers, max_requests=size, max_tokens=size)
        plan = openmla.make_plan(batch, model.config, model.caches[0], into=into)
        self.ids[:B].copy_(ids)  # the rows after them are padding with any content
        self.positions[:B].copy_(positions)

        def step() -> Tensor:
            return model(self.ids[:size], self.positions[:size], plan).argmax(-1)

        if not self.ids.is_cuda:
            tokens = step()
        else:
            if size not in self.graphs:
                step()  # compiles kernels; the rows it writes are written again
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self.graph_pool):
                    self.graphs[size] = graph, step()
            graph, tokens = self.graphs[size]
            graph.replay()
        chosen: list[int] = tokens[:B].tolist()
        return chosen


def load_demo(device: str) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).to(device)
    if device.startswith("cuda"):  # grouped experts synchronize with the host: no graph
        model.set_experts_implementation("batched_mm")
    return model.eval().requires_grad_(False)


def some_prompts(count: int, dice: random.Random) -> list[list[int]]:
    """Python source bytes; most begin with one of four texts, like chats with a system prompt."""
    text = (DEMO / "heldout.txt").read_bytes().replace(b"\0", b"\n")
    starts = [b"", *(text[i : i + 96] for i in range(0, 40_000, 10_000))]
    places = [dice.randrange(len(text) - 200) for _ in range(count)]
    return [list(dice.choice(starts) + text[i : i + dice.randint(8, 180)]) for i in places]


MOST_NEW = 48
FEWEST_BLOCKS = -(-(96 + 180 + MOST_NEW) // 16)  # the longest of these prompts must fit


def read_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Serve the demo model: requests arrive at random, share one paged cache and "
        "are batched as they come. Every tenth step is a line, in the end there are totals."
    )
    parser.add_argument("--requests", type=int, default=20, help="default 20")
    blocks = f"blocks of 16 tokens in the cache, {FEWEST_BLOCKS} or more, default 64"
    parser.add_argument("--blocks", type=int, default=64, help=blocks)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, help=f"cpu or cuda, here {device} by default")
    options = parser.parse_args(arguments)
    for name, least in (("requests", 1), ("blocks", FEWEST_BLOCKS)):
        if (value := getattr(options, name)) < least:
            parser.error(f"--{name} must be at least {least}, got {value}")
    try:
        torch.empty(0, device=options.device)
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device must be one torch has here, got {options.device}: {error}")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = read_arguments(arguments)
    engine, dice = Engine(load_demo(options.device), num_blocks=options.blocks), random.Random(0)
    arriving, start = deque(some_prompts(options.requests, dice)), time.perf_counter()
    while arriving or engine.waiting or engine.running:
        while arriving and dice.random() < 0.4:  # random arrivals
            engine.add(arriving.popleft(), dice.randint(8, MOST_NEW))
        engine.step()
        if engine.counts["steps"] % 10 == 1:
            print(
                f"step {engine.counts['steps']:>4}: {len(engine.running)} running, "
                f"{len(engine.waiting):>3} waiting, {len(engine.finished):>3} finished, "
                f"{engine.pool.num_free:>3} blocks free"
            )
    seconds, n = time.perf_counter() - start, engine.counts
    for request in engine.finished[:2]:
        new = bytes(request.tokens[len(request.prompt) :]).decode(errors="replace")
        print(f"\nrequest {request.number} goes on with {new!r}")
    while engine.prefixes.forget_one():
        pass
    sizes = ", ".join(f"{n[key]} of size {key[9:]}" for key in sorted(n) if "graph" in key)
    replayed = "each size a CUDA graph" if engine.graphs else "graphs need a GPU"
    rate = f"{seconds:.1f} s, {n['generated'] / seconds:.0f} a second"
    print(f"\n{n['requests']} requests, {n['generated']} tokens in {n['steps']} steps: {rate}")
    print(f"  decode steps  {sizes} ({replayed})")
    print(f"  prefixes      {n['shared']} tokens were there already")
    print(f"  preempted     {n['preempted']} times, {n['read twice']} tokens read twice")
    print(f"  blocks        {engine.pool.num_free} of {options.blocks} free at the end")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
