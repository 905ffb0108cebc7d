"""The drop-ins compared with the originals, which must be installed: results, times, overhead.

    python3 -m bench.dropin equal --sets 500     random arguments, both against float64
    python3 -m bench.dropin times                the shapes that the originals publish
    python3 -m bench.dropin overhead             host time of a drop-in call over the op itself

One process: the originals under their own names, the drop-ins as openmla.integrations. --device cpu
is a dry run of the first, in which the drop-ins stand in for the originals.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from bench import dropin_cases as cases
from bench.report import host_times
from openmla.backends import BACKENDS, forget_choices
from openmla.bench.harness import describe_machine, time_graphs
from openmla.integrations import deep_gemm, flash_mla
from openmla.ops import mqa_paged
from openmla.testing.budgets import lse_budget, out_budget

OURS = {"flash_mla": flash_mla, "deep_gemm": deep_gemm}
# How many of each kind per hundred.
SHARES = {"dense": 30, "dense_fp8": 8, "listed": 20, "listed_v4": 22, "prefill": 15, "logits": 5}


class Originals:
    """The packages by name, imported on demand; on a CPU the drop-ins replace them."""

    def __init__(self, device: str) -> None:
        self.device = device

    def __getitem__(self, name: str) -> Any:
        return OURS[name] if self.device == "cpu" else import_module(name)


@contextlib.contextmanager
def replaced(make: Callable[[Any], Callable[..., Any]]) -> Iterator[None]:
    """Replace the ops that the drop-ins call by functions that `make` builds from them."""
    places = [(flash_mla, "mqa_paged"), (flash_mla, "mqa_sparse")]
    places += [(deep_gemm, "index_logits"), (deep_gemm, "index_logits_ragged")]
    before = [getattr(module, name) for module, name in places]
    for (module, name), op in zip(places, before, strict=True):
        setattr(module, name, make(op))
    try:
        yield
    finally:
        for (module, name), op in zip(places, before, strict=True):
            setattr(module, name, op)


def by_reference(double: bool) -> contextlib.AbstractContextManager[None]:
    """Run the drop-ins' calls with the reference backend, optionally in float64. The conversion of
    arguments is the same, and the comparison with the originals shows that it is right."""

    def make(op: Any) -> Callable[..., Any]:
        def run(q: Tensor, *args: Any, **more: Any) -> Any:
            if double:
                q = q.double()
                if op is mqa_paged and args[-1] is not None:  # q_scale, of e4m3 queries only
                    q, args = q * args[-1], (*args[:-1], None)
            return op(q, *args, **more, backend="reference")

        return run

    return replaced(make)


def kept_results() -> contextlib.AbstractContextManager[None]:
    """Make ops compute only once, so that later calls measure the drop-in's own overhead."""

    def make(op: Any) -> Callable[..., Any]:
        kept: list[Any] = []

        def run(*args: Any, **more: Any) -> Any:
            if not kept:
                kept.append(op(*args, **more))
            return kept[0]

        return run

    return replaced(make)


def none_as_less(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == torch.inf, -torch.inf)


def shares_used(ours: Any, theirs: Any, exact: Any, peer: Any) -> tuple[float, float]:
    """Shares of the error budget that ours and theirs use, the larger of out and lse. A result with
    no larger error than the other one is within the budget."""
    mine = share_used(ours, theirs, exact, peer)
    try:
        return mine, share_used(theirs, ours, exact, peer)
    except AssertionError:  # no tolerance applies to theirs
        return mine, float("inf")


def share_used(mine: Any, other: Any, exact: Any, peer: Any) -> float:
    used = [min(out_budget(mine[0], exact[0], each[0]) for each in (peer, other))]
    for a, b, c, d in zip(mine[1:], exact[1:], peer[1:], other[1:], strict=True):
        if a is not None:
            a, b, c, d = map(none_as_less, (a, b, c, d))
            used.append(min(lse_budget(a, b, each) for each in (c, d)))
    return max(used)


def logits_used(logits: Tensor, exact: Tensor, magnitudes: Tensor) -> float:
    """The largest error as a share of what index_logits allows for fp8 products."""
    seen = exact != -torch.inf
    error = (logits.double() - exact).abs()[seen] / (2**-12 * magnitudes[seen])
    return float(error.max())


class Refused(Exception):
    """The original rejects these arguments; the drop-in is checked anyway."""

    def __init__(self, mine: float, why: str) -> None:
        super().__init__(mine, why)
        self.mine, self.why = mine, why


def compare(case: cases.Case, peers: Originals) -> tuple[float, float]:
    """Shares of the error budget that both use for one set of arguments."""
    ours = case.call(OURS[case.package])
    theirs, package, why = None, peers[case.package], ""
    try:
        theirs = case.call(package, theirs=True)
    except (RuntimeError, AssertionError) as error:
        why = str(error)[-120:]
        if peers.device != "cpu":
            torch.cuda.synchronize()  # raises if more than the call failed
    if case.exact is not None:
        exact, magnitudes = case.exact()
        mine = logits_used(ours, exact, magnitudes)
        if theirs is None:
            raise Refused(mine, why)
        return mine, logits_used(theirs, exact, magnitudes)
    with by_reference(double=True):
        exact = case.call(flash_mla)
    with by_reference(double=False):
        peer = case.call(flash_mla)
    if theirs is None:
        raise Refused(share_used(ours, peer, exact, peer), why)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            assert mine.shape == other.shape and mine.dtype == other.dtype
    return shares_used(ours, theirs, exact, peer)


def run_equal(options: argparse.Namespace) -> None:
    peers = Originals(options.device)
    names = [name for name in SHARES if options.only in name]
    weights = [SHARES[name] for name in names]
    for package in {"deep_gemm" if name == "logits" else "flash_mla" for name in names}:
        for name in OURS[package].__all__:
            compare_signature(package, name, OURS[package], peers[package])
    part, parts = map(int, options.part.split("/"))
    chance = random.Random(options.seed * parts + part)
    # sets, within, rejected by theirs, of those within, largest share of the budget: ours, theirs
    counts: dict[str, list[Any]] = {name: [0, 0, 0, 0, 0.0, 0.0] for name in names}
    began, reasons = time.time(), set[str]()
    while (
        sum(row[0] for row in counts.values()) < options.sets
        and time.time() - began < options.seconds
    ):
        name = chance.choices(names, weights)[0]
        torch.manual_seed(chance.randrange(2**30))
        case = getattr(cases, name)(chance, options.device, slice(part, None, parts))
        at, other = 0, 0.0
        try:
            mine, other = compare(case, peers)
        except Refused as refused:
            mine, at = refused.mine, 2
            if refused.why not in reasons:
                print(f"theirs refuses {name}: {refused.why}")
            reasons.add(refused.why)
        except AssertionError as error:
            print(f"WRONG {name} {case.title}: {error}")
            mine = other = float("inf")
        row = counts[name]
        row[at] += 1
        row[at + 1] += mine <= 1
        row[4], row[5] = max(row[4], mine), max(row[5], other)
        if 1 < mine < float("inf"):
            print(f"WRONG {name} {case.title}: {mine:.2f} of the budget, theirs {other:.2f}")
    print("kind         sets within refused within  most of the budget: ours  theirs")
    for name, (sets, good, refusals, others, mine, other) in counts.items():
        print(
            f"{name:<10} {sets:>6} {good:>6} {refusals:>7} {others:>6} {mine:>25.2f} {other:>7.2f}"
        )
    sets, good, refusals, others = (sum(row[i] for row in counts.values()) for i in range(4))
    print(
        f"{good} of {sets} sets within the budget; {others} of {refusals} that theirs refuses; "
        f"{time.time() - began:.0f} s"
    )


def compare_signature(package: str, name: str, ours: Any, theirs: Any) -> None:
    """Print where an original's signature differs; compiled functions have none."""
    if not hasattr(theirs, name) or not inspect.isfunction(getattr(theirs, name)):
        return

    def of(module: Any) -> list[tuple[str, Any]]:
        parameters = inspect.signature(getattr(module, name)).parameters.values()
        return [(each.name, each.default) for each in parameters]

    added = ("out", None)  # only in openmla's signature
    if [each for each in of(ours) if each != added] != [
        each for each in of(theirs) if each != added
    ]:
        print(f"{package}.{name}: ours {of(ours)}, theirs {of(theirs)}")


def run_times(options: argparse.Namespace) -> None:
    peers = Originals("cuda")
    print(f"{'shape':<34} {'ours us':>9} {'theirs us':>9} {'ratio':>6}  budget ours, theirs")
    for title, make in cases.PUBLISHED.items():
        if options.only not in title:
            continue
        torch.manual_seed(0)
        case = make()
        try:
            told = ""
            if case.small is not None:
                mine, other = compare(case.small(), peers)
                told = f"{mine:.2f} {other:.2f}" + (" WRONG" if mine > 1 else "")
            calls: dict[str, Callable[[], Any]] = {
                "ours": partial(case.call, OURS[case.package]),
                "theirs": partial(case.call, peers[case.package], theirs=True),
            }
            times = time_graphs(calls, case.calls)
            ratio = times["ours"] / times["theirs"]
            print(
                f"{title:<34} {times['ours']:>9.1f} {times['theirs']:>9.1f} {ratio:>6.2f}  {told}"
            )
        except Exception as error:
            print(f"{title:<34} failed: {type(error).__name__}: {str(error)[:300]}")
        del case
        torch.cuda.empty_cache()


def run_overhead(options: argparse.Namespace) -> None:
    print(f"{'call':<26} {'drop-in us':>10} {'op us':>8} {'drop-in without its op':>23}")
    for title, (dropped, op) in cases.overheads(options.device).items():
        with kept_results():
            own = host_times({"own": dropped}, options.device)["own"]
        times = host_times({"whole": dropped, "op": op}, options.device)
        print(f"{title:<26} {times['whole']:>10.1f} {times['op']:>8.1f} {own:>23.1f}")


def leave_out_the_adapter() -> None:
    """Disable the backend flashmla, which calls the original's kernels."""
    for op, names in BACKENDS.items():
        BACKENDS[op] = tuple(name for name in names if name != "flashmla")
    forget_choices()


def run(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.dropin")
    parser.add_argument("what", choices=["equal", "times", "overhead"])
    parser.add_argument("--sets", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", default="0/1", help="of the kernels, e.g. 0/4: draw from these")
    parser.add_argument("--only", default="", help="kinds or shapes whose name holds this")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    print(describe_machine(options.device))
    leave_out_the_adapter()
    with torch.inference_mode():
        {"equal": run_equal, "times": run_times, "overhead": run_overhead}[options.what](options)


if __name__ == "__main__":
    run()
