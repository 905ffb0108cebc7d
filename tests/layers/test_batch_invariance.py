"""A row's bits are its own: alone and in any batch, dense, sparse and V4, at every phase.

On CPUs by the reference and sdpa; Triton's kernels in the interpreter, in a process of its own, and
with Gluon's on a GPU. Hypothesis draws who else is there, when and in which place.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openmla import (
    PRESETS,
    Batch,
    ConfigError,
    MLAAttention,
    UnsupportedError,
    allocate_cache,
    make_plan,
    plan_buffers,
)
from openmla.backends import Problem, load
from openmla.backends.sdpa import mqa_paged as sdpa
from openmla.plan import plan
from tests.layers.invariance import (
    KINDS,
    PHASES,
    Compressed,
    Latent,
    Setting,
    Story,
    assert_same,
    draw_story,
    filled,
)

ROOT = Path(__file__).resolve().parents[2]
CPU = Setting()
CPU_BF16 = Setting(
    dtype=torch.bfloat16, formats=("bf16", "fp8"), index_format="index_bf16", heads=(3,)
)
INTERPRETED = Setting(
    dtype=torch.bfloat16, formats=("bf16",), index_format="index_bf16", backend="triton",
    longest=7, prompt=4, crowd=2, spare=0,
)  # fmt: skip
REAL = {
    "formats": ("bf16",), "index_format": "index_fp8", "block_size": 64, "longest": 400,
    "heads": (16, 64), "real": True, "prompt": 100, "device": "cuda", "dtype": torch.bfloat16,
}  # fmt: skip
GPU = {"triton": Setting(**{**REAL, "backend": "triton"}), "auto": Setting(**REAL)}  # type: ignore[arg-type]
FIXTURES = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
DRAWS, FEW, MANY = 10, 5, 500
IN_THE_INTERPRETER = 6  # of each kind and phase: 54
SEEDS = st.integers(0, 2**20)
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
each_phase = pytest.mark.parametrize("phase", PHASES)
each_backend = pytest.mark.parametrize("backend", GPU)
without_one = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits and parts of a few keys, so that short contexts have several."""
    run = 128 if torch.cuda.is_available() else 32
    monkeypatch.setattr(plan, "fixed_run", lambda num_heads: run)
    monkeypatch.setattr(sdpa, "PART", 16)


def check(kind: str, phase: str, seed: int, setting: Setting) -> None:
    story = draw_story(kind, phase, seed, setting)
    assert_same(story.alone(), story.among_others())


def on_cpu(seed: int) -> Setting:
    return random.Random(seed).choice([CPU, CPU_BF16])


def check_chunks(kind: str, seed: int, setting: Setting) -> None:
    """Absorbed, as V4 always is: token by token, all at once, in others' company."""
    story = draw_story(kind, "prefill", seed, setting)
    if kind != "v4":
        story.options["form"] = "absorbed"
    together = story.alone([sum(story.steps)])
    assert_same(together, story.among_others())
    if setting.device == "cpu" or seed % 8 == 0:
        assert_same(together, story.alone([1] * sum(story.steps)))


def check_captured(kind: str, seed: int, setting: Setting) -> None:
    story = draw_story(kind, random.Random(seed).choice(["decode", "drafts"]), seed, setting)
    if kind != "v4":
        story.options["form"] = "absorbed"
    assert_same(story.alone(), story.among_others(captured=True))


@each_phase
@each_kind
@settings(max_examples=DRAWS, suppress_health_check=FIXTURES)
@given(seed=SEEDS)
def test_a_row_among_others(kind: str, phase: str, seed: int) -> None:
    check(kind, phase, seed, on_cpu(seed))


@pytest.mark.slow
@each_phase
@each_kind
@settings(max_examples=MANY, suppress_health_check=FIXTURES)
@given(seed=SEEDS)
def test_a_row_among_many_others(kind: str, phase: str, seed: int) -> None:
    check(kind, phase, seed, on_cpu(seed))


@each_kind
@settings(max_examples=FEW, suppress_health_check=FIXTURES)
@given(seed=SEEDS)
def test_a_prompt_in_any_chunks(kind: str, seed: int) -> None:
    check_chunks(kind, seed, on_cpu(seed))


@each_kind
@settings(max_examples=FEW, suppress_health_check=FIXTURES)
@given(seed=SEEDS)
def test_captured_and_eager(kind: str, seed: int) -> None:
    """A step over buffers that are larger than it, as a graph replays it."""
    check_captured(kind, seed, on_cpu(seed))


@pytest.mark.slow
@each_kind
@settings(max_examples=100, suppress_health_check=FIXTURES)
@given(seed=SEEDS)
def test_many_chunks_and_buffers(kind: str, seed: int) -> None:
    check_chunks(kind, seed, on_cpu(seed))
    check_captured(kind, seed, on_cpu(seed))


@pytest.mark.slow
def test_kernels_in_the_interpreter() -> None:
    """In a process of its own: the interpreter and the compiler cannot share one."""
    environment = {
        **os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "--no-header", "-p", "no:cacheprovider", __file__]
    command += ["-m", "triton and not gpu", "--tb=short"]
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-1000:]
    assert "9 passed" in run.stdout


@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETING, reason="run by test_kernels_in_the_interpreter")
@each_phase
@each_kind
@settings(max_examples=IN_THE_INTERPRETER, suppress_health_check=FIXTURES)
@given(seed=SEEDS)
def test_kernels_interpreted(kind: str, phase: str, seed: int) -> None:
    check(kind, phase, seed, INTERPRETED)


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_logits_of_a_model(kind: str) -> None:
    """Of native layers throughout: a prompt alone and in 20 batches."""
    from tests.layers.tiny_model import TinyModel

    model = TinyModel(kind)
    rng = random.Random(kind)
    prompt = [rng.randrange(model.VOCAB) for _ in range(50)]
    alone = model.logits([prompt])[0]
    for _ in range(20):
        prompts = [
            [rng.randrange(model.VOCAB) for _ in range(rng.choice([1, 7, rng.randint(1, 90)]))]
            for _ in range(rng.randint(1, 5))
        ]
        place = rng.randrange(len(prompts) + 1)
        prompts.insert(place, prompt)
        assert torch.equal(model.logits(prompts)[place], alone)


def test_what_is_refused_and_told() -> None:
    """Linears that multiply as they like; backends that look at the batch, in a sentence each."""
    story = draw_story("dense", "decode", 0, CPU)
    server = story.server(["r"], {"r": 3})
    assert isinstance(server, Latent)
    told = server.tell([("r", 3)], 0).explain()
    assert "invariant results do not depend on the batch: keys are split every 32 tokens" in told
    assert "project_heads by reference (row by row)" in told
    layer = MLAAttention(PRESETS["tiny-v3"])
    layer.q_b_proj.register_forward_hook(lambda *_: None)
    batch = Batch([1], [1], torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64))
    cache = allocate_cache(layer.config, num_blocks=1, block_size=4, format="fp32")
    planned = make_plan(batch, layer.config, cache, batch_invariant=True)
    with pytest.raises(UnsupportedError, match="q_b_proj must be a plain linear without hooks"):
        layer(torch.zeros(1, 64), torch.zeros(1, dtype=torch.int64), cache, planned)
    with pytest.raises(ConfigError, match="batch_invariant must be of type bool, got int"):
        make_plan(batch, layer.config, cache, batch_invariant=1)  # type: ignore[arg-type]
    on_gpu: dict[str, Any] = {"device": "cuda", "capability": (9, 0), "dtype": torch.bfloat16}
    asked = Problem("mha_ragged", E=192, V=128, batch_invariant=True, **on_gpu)
    assert (
        load("mha_ragged", "sdpa").why_not(asked) == "lets torch pick a kernel by the batch on cuda"
    )


@pytest.mark.gpu
@without_one
@each_backend
@each_phase
@each_kind
@settings(max_examples=MANY, suppress_health_check=FIXTURES)
@given(seed=SEEDS)
def test_a_row_among_others_on_a_gpu(kind: str, phase: str, backend: str, seed: int) -> None:
    """Triton's kernels, and with auto those that are faster: Gluon's on SM90."""
    check(kind, phase, seed, GPU[backend])


@pytest.mark.gpu
@without_one
@each_backend
@each_kind
@settings(max_examples=40, suppress_health_check=FIXTURES)
@given(seed=SEEDS)
def test_chunks_and_buffers_on_a_gpu(kind: str, backend: str, seed: int) -> None:
    check_chunks(kind, seed, GPU[backend])
    check_captured(kind, seed, GPU[backend])


@pytest.mark.gpu
@without_one
@each_backend
@each_kind
def test_a_graph_replays_the_same_bits(kind: str, backend: str) -> None:
    for seed in range(4):
        story = draw_story(kind, "decode", seed, GPU[backend])
        if kind != "v4":
            story.options["form"] = "absorbed"
        server = story.server(["r"], {"r": sum(story.steps)})
        server.buffers = plan_buffers(  # from the first step on: rings keep their columns
            server.layer.config, server.cache, max_requests=3, max_tokens=3 * max(story.steps),
            max_blocks=16,
        )  # fmt: skip
        for n in story.steps[:-1]:
            server.tell([("r", n)], 0)
        eager, replayed = last_step_twice(server, story)
        assert torch.equal(eager, replayed)


def last_step_twice(server: Latent | Compressed, story: Story) -> tuple[torch.Tensor, torch.Tensor]:
    """One decode step as it is, and over buffers in a graph; both write the same rows."""
    layer, cache, buffers = server.layer, server.cache, server.buffers
    assert buffers is not None
    columns = {"window_columns": buffers["window_table"].shape[1]} if story.kind == "v4" else {}
    batch = server.batch([("r", 1)], **columns)
    place = sum(story.steps) - 1
    hidden = server.sequences["r"][place : place + 1]
    positions = torch.tensor([place], device="cuda")
    planned = make_plan(batch, layer.config, cache, **server.options)
    eager = layer(hidden, positions, cache, planned)
    planned = make_plan(batch, layer.config, cache, into=buffers, **server.options)
    padded, places = filled([hidden], [positions.cpu()], planned.num_tokens)
    places = places.cuda()
    layer(padded, places, cache, planned)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(padded, places, cache, planned)
    graph.replay()
    return eager[0], out[0]
