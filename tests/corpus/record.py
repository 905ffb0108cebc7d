"""`python -m tests.corpus.record` runs all cases and rewrites recorded.json; with names, only these
are run and replaced."""

from __future__ import annotations

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # before torch loads, see conftest

import json
import sys

from tests.corpus.cases import ALONE, OVER_RANKS, RECORDED, load, run_alone, run_over_ranks
from tests.corpus.common import Summary, probe
from tests.parallel.processes import Processes


def main(names: list[str]) -> None:
    cases: dict[str, Summary] = load()["cases"] if names else {}
    wanted = set(names or (*ALONE, *OVER_RANKS))
    cases |= {name: run_alone(name) for name in ALONE if name in wanted}
    processes = Processes(2)
    try:
        cases |= {name: run_over_ranks(name, processes) for name in OVER_RANKS if name in wanted}
    finally:
        processes.close()
    lines = [f'"probe": {json.dumps(probe())},', '"cases": {']
    for number, (name, summary) in enumerate(sorted(cases.items())):
        body = ",\n".join(f" {json.dumps(key)}: {_line(value)}" for key, value in summary.items())
        end = "," if number + 1 < len(cases) else ""
        lines.append(f"{json.dumps(name)}: {{\n{body}\n}}{end}")
    RECORDED.write_text("\n".join(["{", *lines, "}", "}", ""]))
    print(f"{len(wanted)} of {len(cases)} cases recorded in {RECORDED.name}")


def _line(value: dict[str, object]) -> str:
    return json.dumps(value, separators=(",", ":"))


if __name__ == "__main__":
    main(sys.argv[1:])
