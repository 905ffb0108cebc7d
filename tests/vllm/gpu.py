"""vLLM's CUDA engine with openmla: many small models and options, tokens judged in float32.

python -m tests.vllm.gpu                    every case, on a machine with vLLM and a GPU
python -m tests.vllm.gpu --only "v3.2"      cases whose name contains this
python -m tests.vllm.gpu --speed            then prefill and decode, in turn with vLLM's backends
python -m tests.vllm.gpu --load             then 200 requests through the OpenAI server

The models are random and small. A token's regret is how much a float32 model prefers another token,
in standard deviations of its logits; rounding gives each backend some. Without attention the mean
regret of these models is about 3.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from tests.vllm import gpu_load, gpu_speed
from tests.vllm.cases import NEW, prompts_of
from tests.vllm.checkpoints import FOLDER, checkpoint
from tests.vllm.engine import GPU_VARIABLES, OURS, Engine
from tests.vllm.reference import Question, regrets, tokens

SLACK = 2**-9  # half a step of bf16, for a logit of one standard deviation
PROMPTS = {
    "uneven": prompts_of([5, 17, 40, 133, 300, 64, 1, 90, 900]),
    "shared": prompts_of([7, 30, 1, 64, 90], shared=200, seed=2),
    "crowd": prompts_of([*range(17, 31), 16, 32], seed=3),
    "long": prompts_of([2500, 3000, 100], seed=4),
    "loops": [prompt * 6 for prompt in prompts_of([9, 13, 20, 5], seed=5)],  # n-grams are found
    "many": prompts_of([20 + 13 * i for i in range(32)], seed=6),
}
USUAL = {
    "max_model_len": 4096,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 1 << 30,
    "gpu_memory_utilization": 0.05,
}
DECODE_GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16],
    },
}
# what a user gets: torch.compile, full and piecewise graphs; fewer sizes than vLLM's own
DEFAULT = {
    "enforce_eager": False,
    "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128]},
}
INDEX = {"additional_config": {"openmla": {"index_format": "index_bf16"}}}
INDEX_F32 = {"additional_config": {"openmla": {"index_format": "index_fp32"}}}
CHUNKED = {"max_num_batched_tokens": 64, "max_num_seqs": 4}
FEW_BLOCKS = {"block_size": 16, "num_gpu_blocks_override": 34, "max_model_len": 512}
CACHED = {"enable_prefix_caching": True}
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
MTP = {"method": "mtp", "num_speculative_tokens": 2, "attention_backend": "CUSTOM"}
RUNNER_V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
UNBROKEN = {"VLLM_USE_BREAKABLE_CUDAGRAPH": "0"}
INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}


class Case(NamedTuple):
    """One engine. `first` prompts are sent before the others. `equal_to` is a case that must give
    the same tokens: all of them if batch-invariant, else up to ties."""

    model: str
    options: dict[str, Any]
    prompts: str = "uneven"
    variables: dict[str, str] = {}  # noqa: RUF012 - of a tuple, never changed
    first: int = 0
    equal_to: str = ""


def ours(model: str, *options: dict[str, Any], **more: Any) -> Case:
    merged: dict[str, Any] = dict(OURS)
    for each in options:
        merged |= each
    if not merged.get("enforce_eager", True):
        more.setdefault("first", 3)  # few tokens in a step: vLLM replays piecewise graphs
    return Case(f"gpu-{model}", merged, **more)


def by(backend: str, model: str, **options: Any) -> Case:
    return Case(f"gpu-{model}", {"attention_backend": backend, **options})


def drafts(config: dict[str, Any]) -> dict[str, Any]:
    return {"speculative_config": config}


CASES = {
    "v3 by TRITON_MLA": by("TRITON_MLA", "v3"),
    "v3 by FLASH_ATTN_MLA": by("FLASH_ATTN_MLA", "v3"),
    "v3 by FLASHMLA": by("FLASHMLA", "v3"),
    "v3 fp8 by TRITON_MLA": by("TRITON_MLA", "v3", kv_cache_dtype="fp8"),
    "v3 eager": ours("v3"),
    "v3 eager, runner V1": ours("v3", variables=RUNNER_V1),
    "v3 decode graphs": ours("v3", DECODE_GRAPHS),
    "v3 decode graphs, runner V1": ours("v3", DECODE_GRAPHS, variables=RUNNER_V1),
    "v3 default": ours("v3", DEFAULT),
    "v3 default, runner V1": ours("v3", DEFAULT, variables=RUNNER_V1),
    "v3 chunked": ours("v3", CHUNKED),
    "v3 prefix cache": ours("v3", CACHED, prompts="shared", first=1),
    "v3 preempted": ours("v3", FEW_BLOCKS, prompts="crowd"),
    "v3 fp8": ours("v3", DEFAULT, {"kv_cache_dtype": "fp8"}),
    "v3 fp8_ds_mla": ours("v3", DEFAULT, {"kv_cache_dtype": "fp8_ds_mla"}),
    "v3 batch-invariant": ours(
        "v3", DEFAULT, CACHED, prompts="shared", first=1, variables=INVARIANT
    ),
    "v3-f32 eager": ours("v3-f32"),
    "v2 default": ours("v2", DEFAULT),
    "v3-moe default": ours("v3-moe", DEFAULT),
    "v3-128 default": ours("v3-128", DEFAULT),
    "v3 no drafts": ours("v3", DECODE_GRAPHS, prompts="loops"),
    "v3 n-gram drafts": ours(
        "v3", DECODE_GRAPHS, drafts(NGRAM), prompts="loops", equal_to="v3 no drafts"
    ),
    "v3 MTP drafts": ours("v3-mtp", DECODE_GRAPHS, drafts(MTP), equal_to="v3 decode graphs"),
    "v3 MTP drafts, default": ours("v3-mtp", DEFAULT, drafts(MTP), equal_to="v3 default"),
    "v3 MTP drafts, runner V1": ours("v3-mtp", drafts(MTP), variables=RUNNER_V1),
    "v3 batch-invariant, uneven": ours("v3", DEFAULT, variables=INVARIANT),
    "v3 MTP drafts, batch-invariant": ours(
        "v3-mtp", DEFAULT, drafts(MTP), variables=INVARIANT, equal_to="v3 batch-invariant, uneven"
    ),
    "v3.2 eager": ours("v3.2", INDEX),
    "v3.2 default": ours("v3.2", DEFAULT, INDEX),
    "v3.2 default, many": ours("v3.2", DEFAULT, INDEX, prompts="many"),
    "v3.2 default, runner V1": ours("v3.2", DEFAULT, INDEX, variables=RUNNER_V1),
    "v3.2 compiled": ours("v3.2", DEFAULT, INDEX, variables=UNBROKEN),
    "v3.2 fp8 index": ours("v3.2", DEFAULT),
    "v3.2 chunked": ours("v3.2", CHUNKED, INDEX),
    "v3.2 prefix cache": ours("v3.2", CACHED, INDEX, prompts="shared", first=1),
    "v3.2 fp8": ours("v3.2", DEFAULT, {"kv_cache_dtype": "fp8"}),
    "v3.2-f32 eager": ours("v3.2-f32", INDEX_F32),
    "v3.2-2048 default": ours("v3.2-2048", DEFAULT, INDEX, prompts="long"),
    "v3.2 batch-invariant": ours(
        "v3.2", DEFAULT, INDEX, CACHED, prompts="shared", first=1, variables=INVARIANT
    ),
    "v3.2 MTP drafts": ours("v3.2-mtp", DEFAULT, INDEX, drafts(MTP), equal_to="v3.2 default"),
    "glm-5 default": ours("glm-5", DEFAULT, INDEX),
}


def draft_model() -> Case:
    """A model that drafts for itself, so that nearly all drafts must be accepted. vLLM takes a
    draft model of V3's type for its MTP layer alone."""
    draft: dict[str, Any] = {"method": "draft_model", "model": str(checkpoint("gpu-v2"))}
    draft |= {"num_speculative_tokens": 3, "attention_backend": "CUSTOM"}
    return ours("v2", DECODE_GRAPHS, drafts(draft), prompts="loops")


class Seen(NamedTuple):
    tokens: list[list[int]]
    repeats: bool
    settings: dict[str, Any]


RECORD = FOLDER / "gpu-matrix.json"


def run(name: str, case: Case) -> Seen:
    log = "gpu-" + "".join(c if c.isalnum() else "-" for c in name)
    variables = {**GPU_VARIABLES, **case.variables}
    with Engine(log, case.model, {**USUAL, **case.options}, variables) as engine:
        asked = {"prompts": PROMPTS[case.prompts], "new": NEW, "first": case.first}
        once, again = (engine.ask("generate", **asked)["tokens"] for _ in range(2))
        settings = engine.ask("settings") | engine.ask("runs")
    jit = [line for line in engine.log.read_text().splitlines() if "JIT compilation during" in line]
    settings["compiled late"] = [line for line in jit if "openmla" in line or is_ours(line)]
    return Seen(once, once == again, settings)


def is_ours(line: str) -> bool:
    """Whether a line of vLLM's JIT monitor names a kernel of openmla."""
    package = Path(__file__).resolve().parents[2] / "openmla" / "backends"
    name = line.partition("during inference: ")[2].partition(".")[0].partition(" ")[0]
    files = package.rglob("*.py")
    return bool(name) and any(f"def {name}(" in each.read_text() for each in files)


Judged = dict[str, tuple[float, float]]  # largest and mean regret


def judge(seen: dict[str, Seen], jobs: int) -> Judged:
    """By case, and by model and prompts of what transformers generates in the model's dtype."""
    models = list(dict.fromkeys(CASES[name].model for name in seen))
    judged: Judged = {}
    with ThreadPoolExecutor(jobs) as pool:
        for each in pool.map(lambda model: judge_model(model, seen), models):
            judged |= each
    return judged


def judge_model(model: str, seen: dict[str, Seen]) -> Judged:
    mine = {name: each.tokens for name, each in seen.items() if CASES[name].model == model}
    kinds = {name: CASES[name].prompts for name in mine}
    for kind in dict.fromkeys(kinds.values()):
        name, new = f"{model} {kind}", [NEW] * len(PROMPTS[kind])
        mine[name], kinds[name] = tokens(Question(model, PROMPTS[kind], new)), kind
    asked = [
        (name, prompt, given)
        for name, all_given in mine.items()
        for prompt, given in zip(PROMPTS[kinds[name]], all_given, strict=True)
    ]
    found = regrets(model, [each[1] for each in asked], [each[2] for each in asked])
    judged = {}
    for name in mine:
        flat = [r for each, rs in zip(asked, found, strict=True) if each[0] == name for r in rs]
        judged[name] = max(flat), sum(flat) / len(flat)
    return judged


def faults(name: str, seen: dict[str, Seen], judged: Judged) -> list[str]:
    """What is wrong with a case; nothing if its list is empty."""
    case, found = CASES[name], []
    own = [
        judged[other][1]
        for other in seen
        if CASES[other].model == case.model and "attention_backend" in CASES[other].options
        if CASES[other].options["attention_backend"] != "CUSTOM"
    ]
    limit = 2 * max([judged[f"{case.model} {case.prompts}"][1], *own]) + SLACK
    if judged[name][1] > limit:
        found.append(f"mean regret {judged[name][1]:.4f} is over {limit:.4f}")
    # with a cached prefix a prompt is rounded at other places, unless that is batch-invariant
    may_differ = case.options.get("enable_prefix_caching") and case.variables != INVARIANT
    if not (seen[name].repeats or may_differ):
        found.append("a repeat gave other tokens")
    if case.equal_to in seen and seen[case.equal_to].tokens != seen[name].tokens:
        # a draft token is computed in another batch, and so rounded elsewhere; then both tokens
        # are as good as those of transformers in the model's dtype
        theirs = judged[f"{case.model} {case.prompts}"][0]
        worst = max(judged[name][0], judged[case.equal_to][0])
        if case.variables == INVARIANT or worst > theirs:
            found.append(f"tokens differ from those of {case.equal_to!r}")
    return found + [f"compiled late: {line}" for line in seen[name].settings["compiled late"]]


def generate(names: list[str], jobs: int) -> list[str]:
    """Runs the engines; what each gave goes into the record at once. Returns what failed."""
    for model in dict.fromkeys(CASES[name].model for name in names):
        checkpoint(model)
    failed, seen = [], {}
    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(run, name, CASES[name]): name for name in names}
        for future in as_completed(futures):
            name = futures[future]
            try:
                seen[name] = future.result()
            except Exception as error:
                failed.append(f"{name}: {error}")
            print("ok  " if name in seen else "FAIL", name, flush=True)
            RECORD.write_text(json.dumps({name: each._asdict() for name, each in seen.items()}))
    return failed


def matrix(jobs: int) -> list[str]:
    """Judges the record and prints the table; returns what failed."""
    record = json.loads(RECORD.read_text())
    seen = {name: Seen(**each) for name, each in record.items() if name in CASES}
    judged, failed = judge(seen, jobs), []
    head = ("case", "", "backend", "runner, graphs", "again", "worst", "mean", "bf16's", "drafts")
    rows: list[tuple[str, ...]] = [head]
    for name in filter(seen.__contains__, CASES):
        wrong, settings = faults(name, seen, judged), seen[name].settings
        failed += [f"{name}: {each}" for each in wrong]
        theirs = judged[f"{CASES[name].model} {CASES[name].prompts}"]
        accepted = f"{settings['accepted']}/{settings['drafted']}" if settings["drafted"] else ""
        rows.append(
            (
                name, "FAIL" if wrong else "ok", settings["backend"].rpartition(".")[2],
                f"{settings['runner']} {settings['graphs']}", str(seen[name].repeats),
                f"{judged[name][0]:.3f}", f"{judged[name][1]:.4f}",
                f"{theirs[0]:.3f} {theirs[1]:.4f}", accepted,
            )
        )  # fmt: skip
    show(rows)
    return failed


def show(rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", default="", help="cases whose name contains one of A;B")
    parser.add_argument("--jobs", type=int, default=8, help="engines at a time")
    parser.add_argument("--speed", default="", nargs="?", const="speed-16", help="models to time")
    parser.add_argument("--shapes", default="", help="for --speed, such as 1x1024,16x8192")
    parser.add_argument("--load", action="store_true", help="the OpenAI server under load")
    parser.add_argument("--no-cases", action="store_true", help="skip the cases")
    parser.add_argument(
        "--judge",
        default="both",
        choices=("both", "later", "only"),
        help="judge tokens after generating them, in another call, or alone",
    )
    options = parser.parse_args()
    began = time.perf_counter()
    CASES["v2 draft model"] = draft_model()
    wanted = options.only.split(";")
    names = [name for name in CASES if any(each in name for each in wanted)]
    failed = []
    if options.judge != "only" and not options.no_cases:
        failed += generate(names, options.jobs)
    if options.judge != "later" and not options.no_cases:
        failed += matrix(min(options.jobs, 4))
    if options.speed:
        failed += gpu_speed.speed(options.speed.split(","), options.shapes)
    if options.load:
        failed += gpu_load.load(options.judge)
    print(f"{(time.perf_counter() - began) / 60:.1f} minutes")
    for reason in failed:
        print(f"\nFAIL {reason}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
