"""`python -m tests.corpus.record` runs all cases and rewrites recorded.json; with names, only these
are run and replaced. `--gpu` runs those of a GPU and rewrites recorded_h200.json."""

from __future__ import annotations

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # before torch loads, see conftest

import json
import sys
from pathlib import Path

from tests.corpus.cases import (
    ALONE,
    ON_GPU,
    OVER_RANKS,
    RECORDED,
    RECORDED_ON_GPU,
    load,
    run_alone,
    run_on_gpu,
    run_over_ranks,
)
from tests.corpus.common import Summary, describe_gpu, probe
from tests.parallel.processes import Processes


def main(names: list[str]) -> None:
    if names == ["--gpu"]:
        write(RECORDED_ON_GPU, describe_gpu(), {name: run_on_gpu(name) for name in ON_GPU})
        return
    cases: dict[str, Summary] = load()["cases"] if names else {}
    wanted = set(names or (*ALONE, *OVER_RANKS))
    cases |= {name: run_alone(name) for name in ALONE if name in wanted}
    processes = Processes(2)
    try:
        cases |= {name: run_over_ranks(name, processes) for name in OVER_RANKS if name in wanted}
    finally:
        processes.close()
    write(RECORDED, probe(), cases)


def write(path: Path, where: dict[str, str], cases: dict[str, Summary]) -> None:
    lines = [f'"probe": {json.dumps(where)},', '"cases": {']
    for number, (name, summary) in enumerate(sorted(cases.items())):
        body = ",\n".join(f" {json.dumps(key)}: {_line(value)}" for key, value in summary.items())
        end = "," if number + 1 < len(cases) else ""
        lines.append(f"{json.dumps(name)}: {{\n{body}\n}}{end}")
    path.write_text("\n".join(["{", *lines, "}", "}", ""]))
    print(f"{len(cases)} cases are in {path.name}")


def _line(value: dict[str, object]) -> str:
    return json.dumps(value, separators=(",", ":"))


if __name__ == "__main__":
    main(sys.argv[1:])
