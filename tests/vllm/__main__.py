"""Runs the cases in real engines, two at a time, and prints model x option x tokens equal.

python -m tests.vllm           the main cases
python -m tests.vllm --all     every model with every option, load, speed, the server
python -m tests.vllm --only v3.2
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tests.vllm import load, server, speed, untouched
from tests.vllm.cases import (
    ALL,
    MAIN,
    NEW,
    OPTIONS,
    PROMPTS,
    ROUNDED,
    attach_options,
    engine_options,
)
from tests.vllm.checkpoints import CHECKPOINTS, SPARSE, checkpoint
from tests.vllm.engine import Engine
from tests.vllm.reference import Question, regrets, tokens

Tokens = list[list[int]]
Cases = tuple[tuple[str, str], ...]
Checks = dict[str, Callable[[], str]]


class Run:
    """Every engine and every reference is started once, and asked for by who needs it."""

    def __init__(self, jobs: int) -> None:
        self.pool = ThreadPoolExecutor(jobs)
        self.started: dict[str, Future[Any]] = {}

    def once(self, name: str, function: Any, *arguments: Any) -> Future[Any]:
        if name not in self.started:
            self.started[name] = self.pool.submit(function, *arguments)
        return self.started[name]

    def by_transformers(self, model: str, prompts: str) -> Future[Any]:
        return self.once(f"transformers {model} {prompts}", by_transformers, model, prompts, None)

    def attached(self, model: str, option: str) -> Future[Any]:
        prompts, attach = OPTIONS[option].prompts, attach_options(model, option)
        name = f"attached {model} {prompts} {attach}"
        return self.once(name, by_transformers, model, prompts, attach)

    def by_vllm(self, model: str) -> Future[Any]:
        return self.once(f"own {model}", by_vllm_itself, model)

    def by_us(self, model: str, option: str) -> Future[Any]:
        return self.once(f"ours {model} {option}", by_us, model, option)


def by_transformers(model: str, prompts: str, attach: dict[str, str] | None) -> Tokens:
    given = PROMPTS[prompts]
    return tokens(Question(model, given, [NEW] * len(given), attach))


def by_vllm_itself(model: str) -> dict[str, Tokens]:
    """All prompts, by the backend that vLLM takes without us."""
    with Engine(f"{model}-own", model, variables=untouched.NOT_LOADED) as engine:
        return {
            name: engine.ask("generate", prompts=prompts, new=NEW)["tokens"]
            for name, prompts in PROMPTS.items()
        }


def by_us(model: str, option: str) -> tuple[Tokens, str, float]:
    """Tokens, what was seen of the option, seconds."""
    began = time.perf_counter()
    spec = OPTIONS[option]
    name = f"{model}-{option}".replace(" ", "-")
    with Engine(name, model, engine_options(model, option), spec.variables) as engine:
        answer = engine.ask("generate", prompts=PROMPTS[spec.prompts], new=NEW, first=spec.first)
        settings = engine.ask("settings")
    assert settings["backend"].endswith("OpenMLABackend"), settings
    note = spec.look(answer, settings) if spec.look else ""
    return answer["tokens"], note, time.perf_counter() - began


def equal(ours: Tokens, theirs: Tokens) -> str:
    """Tokens up to each request's first difference, of all."""
    same = 0
    for mine, other in zip(ours, theirs, strict=True):
        assert len(mine) == len(other)
        different = [a != b for a, b in zip(mine, other, strict=True)]
        same += different.index(True) if True in different else len(mine)
    total = sum(map(len, ours))
    return f"all {total}" if same == total else f"{same} of {total}"


def row(run: Run, model: str, option: str) -> tuple[list[str], bool]:
    """A line of the table, and whether it is as it must be."""
    prompts = OPTIONS[option].prompts
    ours, note, seconds = run.by_us(model, option).result()
    theirs = run.by_transformers(model, prompts).result()
    columns = {"transformers": equal(ours, theirs), "attached": "", "own": "none on CPU"}
    if model not in SPARSE:
        columns["own"] = equal(ours, run.by_vllm(model).result()[prompts])
    required = [columns["transformers"], columns["own"] if model not in SPARSE else "all"]
    if attach_options(model, option) is not None:
        theirs = run.attached(model, option).result()
        columns["attached"] = equal(ours, theirs)
        required = [columns["attached"]]
    good = all(each.startswith("all") for each in required)
    if not good and (model in ROUNDED or attach_options(model, option) is not None):
        good, more = within_rounding(model, prompts, ours, theirs)
        note = f"{more}; {note}" if note else more
    return [model, option, *columns.values(), f"{seconds:.0f} s", note], good


def within_rounding(model: str, prompts: str, ours: Tokens, theirs: Tokens) -> tuple[bool, str]:
    """Whether tokens that differ were nearly as likely: by how much the float32 model would rather
    have had another, against the same of tokens that were rounded alike."""
    mine, other = (max(map(max, regrets(model, PROMPTS[prompts], each))) for each in (ours, theirs))
    # a logit of up to four deviations, rounded, of either of two tokens
    floor = 4 * (2**-8 if CHECKPOINTS[model]["dtype"] == "bfloat16" else 2**-11)
    return mine <= 2 * max(other, floor), f"regret {mine:.1e}, theirs {other:.1e}"


WIDTHS = (9, 19, 13, 13, 12, 5)
HEAD = ["model", "option", "=transformers", "=attached", "=vLLM's own", "took", "seen"]


def show(cells: list[str], mark: str = "    ") -> None:
    padded = [cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=False)]
    print(mark, "  ".join([*padded, *cells[len(WIDTHS) :]]).rstrip(), flush=True)


def begin(run: Run, cases: Cases, checks: Checks) -> None:
    """All are under way while the first is waited for."""
    for model, option in cases:
        checkpoint(model)
        run.by_us(model, option)
        run.by_transformers(model, OPTIONS[option].prompts)
        if model not in SPARSE:
            run.by_vllm(model)
        if attach_options(model, option) is not None:
            run.attached(model, option)
    for name, check in checks.items():
        run.once(name, check)


def matrix(run: Run, cases: Cases) -> list[str]:
    """Prints the table; what failed, and why."""
    print("vLLM with openmla, greedy: tokens up to a request's first that differs.", flush=True)
    show(HEAD)
    failed = []
    for model, option in cases:
        try:
            cells, good = row(run, model, option)
        except Exception as error:  # told at the end, with the others
            cells, good = [model, option, type(error).__name__], False
            failed.append(f"{model}, {option}: {error}")
        else:
            failed += [] if good else [f"{model}, {option}: tokens differ"]
        show(cells, "ok  " if good else "FAIL")
    return failed


# One after the other, with the machine to themselves.
ALONE: Checks = {
    "200 requests, v3": lambda: load.load("v3"),
    "200 requests, v3.2-calm": lambda: load.load("v3.2-calm"),
    "server": server.server,
    "8192 keys": speed.speed,
}


def told(run: Run, checks: Checks) -> list[str]:
    """Prints what each check saw; what failed, and why."""
    failed = []
    for name, check in checks.items():
        try:
            print("ok  ", f"{name}: {run.once(name, check).result()}", flush=True)
        except Exception as error:  # told at the end, with the others
            print("FAIL", name, flush=True)
            failed.append(f"{name}: {error}")
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.vllm", description=__doc__)
    parser.add_argument("--all", action="store_true", help="the whole matrix")
    parser.add_argument("--only", default="", help="a model, an option or a check by its name")
    parser.add_argument("--jobs", type=int, default=2, help="engines at a time")
    options = parser.parse_args()
    began = time.perf_counter()

    def wanted(*names: str) -> bool:
        return options.only in ("", *names)

    cases = tuple(case for case in (ALL if options.all else MAIN) if wanted(*case))
    checks = {name: check for name, check in untouched.CHECKS.items() if wanted(name)}
    run = Run(options.jobs)
    begin(run, cases, checks)
    failed = [*(matrix(run, cases) if cases else []), *told(run, checks)]
    if options.all:
        failed += told(run, {name: check for name, check in ALONE.items() if wanted(name)})
    print(f"{(time.perf_counter() - began) / 60:.1f} minutes")
    for reason in failed:
        print(f"\nFAIL {reason}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
