"""The corpus: case ids, how each case runs, and what it is compared with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.corpus import dense, layers, ranks, sparse, v4
from tests.corpus.common import Run, Summary, one_way, summarize
from tests.parallel.processes import Processes

RECORDED = Path(__file__).parent / "recorded.json"

ALONE: dict[str, Run] = {**dense.CASES, **sparse.CASES, **v4.CASES, **layers.CASES}
OVER_RANKS: list[str] = list(ranks.CASES)


def run_alone(name: str) -> Summary:
    with one_way():
        return summarize(ALONE[name](name))


def run_over_ranks(name: str, processes: Processes) -> Summary:
    return ranks.join(processes.run(ranks.run_here, name))


def load() -> dict[str, Any]:
    """What record.py wrote: "probe", and "cases" by their ids."""
    recorded: dict[str, Any] = json.loads(RECORDED.read_text())
    return recorded
