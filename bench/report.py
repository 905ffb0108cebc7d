"""What the scripts of bench/ share: options, the machine line, checks, and rows stored as JSON."""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from typing import Any, TypeVar

import torch

from openmla.bench.harness import describe_machine, time_once
from openmla.cli.options import output_file

T = TypeVar("T")
BURST, BURSTS = 40, 9  # calls in a row, which fit into the launch queue, and repetitions


def script_parser(
    name: str, doc: str | None, only: str = "shapes", json_option: str = "--json"
) -> argparse.ArgumentParser:
    """A parser with --json and, for scripts that measure several `only`, --only."""
    parser = argparse.ArgumentParser(
        prog=f"bench.{name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        json_option, dest="json", type=output_file, metavar="FILE", help="write the rows to a file"
    )
    if only:
        parser.add_argument(
            "--only", default="", metavar="TEXT", help=f"measure {only} whose name contains TEXT"
        )
    return parser


class Report:
    """The options and the rows of a run. With `resume`, shapes that the file has from this machine
    and commit are kept and not measured again."""

    def __init__(
        self, parser: argparse.ArgumentParser, arguments: Sequence[str] | None, header: str = "", *,
        device: str = "cuda", resume: bool = False,
    ) -> None:  # fmt: skip
        self.options = parser.parse_args(arguments)
        self.machine = describe_machine(device)
        print(self.machine)
        if header:
            print(header)
        self.rows: list[dict[str, Any]] = []
        path = self.options.json
        if resume and path is not None and os.path.exists(path):
            with open(path) as file:
                found = json.load(file)
            self.rows = found["rows"] if found["machine"] == self.machine else []
        self.known = {row["shape"] for row in self.rows}

    def wants(self, title: str) -> bool:
        return self.options.only in title and title not in self.known

    def save(self) -> None:
        """Write the rows so far, which leaves a complete file if the run is interrupted."""
        path = self.options.json
        if path is not None:
            with open(f"{path}.new", "w", encoding="utf-8") as file:
                json.dump({"machine": self.machine, "rows": self.rows}, file, indent=1)
            os.replace(f"{path}.new", path)


def judged(
    title: str,
    contenders: Mapping[str, Callable[[], Any]],
    judge: Callable[[Any], T],
    peers: Collection[str] = (),
) -> dict[str, T]:
    """What `judge` returns for each contender's result. Contenders that do not fit into the GPU's
    shared memory are printed and left out; so are those with a part of `peers` in their name that
    fail."""
    too_large = import_module("triton.runtime.errors").OutOfResources
    found = {}
    for name, contender in contenders.items():
        try:
            found[name] = judge(contender())
        except too_large as reason:
            print(f"{title:<36} {name:<13} does not fit: {reason}")
        except RuntimeError as reason:
            if not any(peer in name for peer in peers):
                raise
            print(f"{title:<36} {name:<13} cannot: {reason}")
    return found


def host_times(calls: Mapping[str, Callable[[], Any]], device: str = "cuda") -> dict[str, float]:
    """Median microseconds until a call returns, in bursts that contenders take in turn."""
    seen: dict[str, list[float]] = {name: [] for name in calls}
    gc.disable()
    for turn in range(BURSTS + 1):
        for name, call in calls.items():
            if device != "cpu":
                torch.cuda.synchronize()
            for _ in range(BURST):
                seconds = time_once(call, "cpu")
                if turn:
                    seen[name].append(seconds)
    gc.enable()
    return {name: 1e6 * statistics.median(each) for name, each in seen.items()}
