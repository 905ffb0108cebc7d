"""tools/gpu_tests.py runs every test once, and with --changed all that a change can affect."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tools.affected import affected
from tools.gpu_tests import (
    PART_OF,
    ROOT,
    SECONDS,
    jobs_of,
    pytest_collection_modifyitems,
)

FILES = [
    ROOT / "tests" / f"{name}.py"
    for name in (
        *("ops/test_merge_states", "ops/test_mqa_paged", "ops/test_mqa_sparse_rows"),
        *("ops/test_pack_mask", "ops/test_rope", "layers/test_mla", "layers/test_v4"),
    )
]


def test_parts_of_a_file_hold_every_test_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all((ROOT / name).exists() for name in SECONDS)
    longest = max(SECONDS, key=lambda name: SECONDS[name])
    jobs = jobs_of(ROOT / longest)
    assert len(jobs) > 1 and len({job.summary for job in jobs}) == len(jobs)
    tests = [SimpleNamespace(nodeid=f"{longest}::test[{n}]") for n in range(50)]
    config: Any = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: None))
    kept = []
    for job in jobs:
        part: list[Any] = list(tests)
        monkeypatch.setenv(PART_OF, f"{job.part}/{job.parts}")
        pytest_collection_modifyitems(config, part)
        assert 50 // len(jobs) <= len(part) <= 50 // len(jobs) + 1
        kept += [test.nodeid for test in part]
    assert sorted(kept) == sorted(test.nodeid for test in tests)


@pytest.mark.parametrize(
    "changed, runs, skips",
    [
        # kernels: their op's tests and layers, not another op's
        ("openmla/backends/gluon/_paged.py", "ops/test_mqa_paged", "ops/test_rope"),
        ("openmla/backends/triton/rope.py", "ops/test_rope", "ops/test_pack_mask"),
        ("openmla/backends/triton/rope.py", "layers/test_mla", "ops/test_merge_states"),
        ("openmla/backends/reference/rope.py", "layers/test_mla", "ops/test_pack_mask"),
        ("openmla/layers/mla.py", "layers/test_mla", "ops/test_mqa_paged"),
        ("tests/ops/mqa_sparse_cases.py", "ops/test_mqa_sparse_rows", "ops/test_mqa_paged"),
        ("tests/layers/test_mla.py", "layers/test_mla", "layers/test_v4"),
        # what all of them run, or nobody knows who reads it
        ("tests/conftest.py", None, None),
        ("tests/ops/conftest.py", "ops/test_rope", "layers/test_mla"),
        ("openmla/__init__.py", None, None),
        ("openmla/gone.py", None, None),
        ("pyproject.toml", None, None),
        ("tests/corpus/recorded_h200.json", None, None),
    ],
)
def test_a_change_runs_the_files_that_import_it(
    changed: str, runs: str | None, skips: str | None
) -> None:
    found = [
        path.relative_to(ROOT / "tests").with_suffix("").as_posix()
        for path in affected(FILES, ["README.md", "docs/vllm.md", changed])
    ]
    assert len(found) == len(FILES) if runs is None else runs in found and skips not in found


def test_a_change_of_pages_runs_nothing() -> None:
    assert affected(FILES, ["README.md", "docs/vllm.md", ".github/workflows/ci.yml"]) == []
