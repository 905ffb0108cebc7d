"""Runs the tests that use a GPU, several files at a time, and continues an interrupted run.

    python3 tools/gpu_tests.py                  what has not passed at this commit yet
    python3 tools/gpu_tests.py --again          everything
    python3 tools/gpu_tests.py --changed BASE   what a change since BASE can affect; main by default
    python3 tools/gpu_tests.py --memcheck       every Triton kernel's contract, compute-sanitizer

The longest files run first, and the tests of the very long ones in several processes. A file that
passed leaves its summary in .gpu-tests/<commit>/; nothing is installed. A file that runs no test
has failed, unless it is listed below with a reason.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (
    *("tests/ops", "tests/layers", "tests/plan", "tests/attention", "tests/integrations"),
    *("tests/parallel", "tests/corpus"),
)
# Files that do not depend on a GPU, except for tests with the marker "gpu".
WITHOUT_A_GPU = {
    "tests/integrations/test_vllm_v4.py": "V4 in vLLM, which is refused elsewhere than on CPUs",
    "tests/attention/test_messages.py": "errors that are raised before anything runs",
    "tests/attention/test_facts.py": "what a layer does on the host",
    "tests/attention/test_quantized_v4.py": "by the reference; its ops have contracts there",
    "tests/attention/test_step.py": "float64, by the reference; layers run the step on a GPU",
    "tests/attention/test_v4_shards.py": "several ranks by hand, by the reference",
    "tests/integrations/test_batch_invariance.py": "row by row; tests/layers compares bits there",
    "tests/integrations/test_drop_in.py": "names of modules; the drop-ins' own tests run there",
    "tests/integrations/test_growth.py": "host integers; test_captured.py grows pools there",
    "tests/integrations/test_memory.py": "bytes of caches; test_graph_memory.py counts them there",
    "tests/integrations/test_quantised_models.py": "a GPU that multiplies fp8 is pretended",
    "tests/integrations/test_vllm_plugin.py": "what is registered with vLLM",
    "tests/layers/test_mistral_large4.py": "float64 definitions; its ops have contracts there",
    "tests/layers/test_messages.py": "errors that are raised before anything runs",
    "tests/layers/test_quantised.py": "a GPU that multiplies fp8 is pretended",
    "tests/layers/test_v4_formats.py": "bytes of formats, which each op's contract compares there",
    "tests/layers/test_v4_histories.py": "which rows a step names; test_v4.py attends there",
    "tests/layers/test_v4_refusals.py": "what is refused before anything runs",
    "tests/ops/test_compress_kv_bad_input.py": "what is refused before anything runs",
    "tests/ops/test_decisions.py": "what the host decides before anything runs",
    "tests/ops/test_flashmla.py": "the adapter without its package",
    "tests/ops/test_mqa_paged_parts.py": "a backend of CPUs",
    "tests/ops/test_mqa_sparse_bad_input.py": "what is refused before anything runs",
    "tests/ops/test_register.py": "devices that are pretended",
    "tests/ops/test_schemas.py": "what ops declare",
    "tests/layers/test_warm_keys.py": "Triton's keys without a launch; test_warmup.py launches",
    "tests/parallel/test_agree.py": "gloo groups, on CPUs; test_nccl.py has NCCL's",
    "tests/parallel/test_attach.py": "gloo groups, on CPUs; test_nccl.py has NCCL's",
    "tests/parallel/test_captured.py": "gloo groups, on CPUs; test_nccl.py records such steps",
    "tests/parallel/test_dense.py": "gloo groups, on CPUs; test_nccl.py has NCCL's",
    "tests/parallel/test_failures.py": "gloo groups, on CPUs",
    "tests/parallel/test_launched.py": "gloo groups, on CPUs",
    "tests/parallel/test_layers.py": "gloo groups, on CPUs; test_nccl.py has NCCL's",
    "tests/parallel/test_layout.py": "host integers",
    "tests/parallel/test_matrix.py": "gloo groups, on CPUs",
    "tests/parallel/test_merge.py": "gloo groups, on CPUs; test_nccl.py has NCCL's",
    "tests/parallel/test_page.py": "gloo groups, on CPUs",
    "tests/parallel/test_sparse.py": "gloo groups, on CPUs; test_nccl.py has NCCL's",
    "tests/parallel/test_v4.py": "gloo groups, on CPUs; test_nccl.py has NCCL's",
    "tests/parallel/test_vllm_dcp.py": "gloo groups, on CPUs",
    "tests/parallel/test_workspace.py": "gloo groups, on CPUs",
    "tests/plan/test_captured.py": "which tensors are filled; test_graphs.py replays them there",
    "tests/plan/test_chunks.py": "host integers",
    "tests/plan/test_output.py": "what is decided and refused; tests/attention runs it there",
    "tests/plan/test_compressed.py": "host integers",
    "tests/plan/test_explanation.py": "texts and tables",
    "tests/plan/test_exact.py": "host integers; test_engine_steps.py runs such steps there",
    "tests/plan/test_forms.py": "host integers, of devices that are pretended",
    "tests/plan/test_host_cost.py": "operations, counted; bench.plans times them there",
    "tests/plan/test_kept_choices.py": "who is asked, and when again",
    "tests/plan/test_long_prompts.py": "host integers",
    "tests/plan/test_padding.py": "host integers; test_engine_steps.py runs such steps there",
    "tests/plan/test_plan.py": "host integers; layers run plans on a GPU",
    "tests/plan/test_sparse.py": "host integers",
    "tests/plan/test_symbolic.py": "what plans say; test_compile.py runs them there",
}
# Every test of these files is skipped unless a package is installed, which is not an error.
WITH_A_PACKAGE = {"tests/ops/test_flashmla_graphs.py": "flash_mla"}
# Seconds of the longest files on 16 cores and one H200, estimated from their tests: what starts
# first, and what is split. A run prints what they took.
SECONDS = {
    "tests/layers/test_batch_invariance.py": 1600,
    "tests/ops/test_mqa_sparse.py": 240,
    "tests/ops/test_mqa_paged.py": 240,
    "tests/ops/test_mqa_sparse_runs.py": 160,
    "tests/ops/test_mqa_sparse_e4m3.py": 160,
    "tests/ops/test_compress_kv.py": 120,
    "tests/ops/test_mha_ragged.py": 120,
    "tests/ops/test_mha_ragged_fp8.py": 120,
    "tests/ops/test_project_quantize.py": 120,
    "tests/layers/test_compile_models.py": 120,
    "tests/layers/test_warmup.py": 120,
    "tests/ops/test_mqa_paged_e4m3.py": 80,
    "tests/ops/test_mqa_sparse_identities.py": 80,
    "tests/ops/test_mqa_sparse_rows.py": 80,
    "tests/ops/test_mqa_sparse_v4.py": 80,
    "tests/ops/test_index_select.py": 80,
    "tests/ops/test_merge_quantize.py": 80,
    "tests/ops/test_project_heads.py": 80,
    "tests/corpus/test_corpus.py": 80,
    "tests/layers/test_compile.py": 80,
    "tests/integrations/test_captured.py": 60,
    "tests/integrations/test_sparse_models.py": 60,
    "tests/integrations/test_transformers.py": 60,
    "tests/integrations/test_vllm.py": 60,
    "tests/ops/test_compress_kv_state.py": 60,
    "tests/ops/test_index_topk.py": 60,
    "tests/ops/test_mha_masked.py": 60,
}
PART = 80  # a file that takes longer is split into parts of about as many seconds
PART_OF = "OPENMLA_TESTS_PART"  # tells this file, as a plugin of pytest, which tests to keep
MEMCHECK = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9")


def commit() -> str:
    """Identifies the tree, so that a summary of another one does not count."""
    asked = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    said = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True)
    return said.stdout.strip() or "no-commit"


class Job(NamedTuple):
    path: Path
    part: int = 0
    parts: int = 1

    def __str__(self) -> str:
        name = str(self.path.relative_to(ROOT))
        return f"{name} {self.part + 1}/{self.parts}" if self.parts > 1 else name

    @property
    def summary(self) -> str:
        """Name of the file with the summary; test files in several folders share names."""
        return "-".join([*self.path.relative_to(ROOT).parts, str(self.part), str(self.parts)])

    @property
    def seconds(self) -> float:
        return SECONDS.get(self.path.relative_to(ROOT).as_posix(), 0) / self.parts


def jobs_of(path: Path) -> list[Job]:
    parts = -(-SECONDS.get(path.relative_to(ROOT).as_posix(), 1) // PART)
    return [Job(path, part, parts) for part in range(parts)]


@pytest.hookimpl(trylast=True)  # after -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one part of the tests: dealt out by hash, so that no parameter decides the part."""
    part, parts = map(int, os.environ[PART_OF].split("/"))
    dealt = sorted(items, key=lambda item: crc32(item.nodeid.encode()))
    kept = {item.nodeid for item in dealt[part::parts]}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = [item for item in items if item.nodeid in kept]


def run(job: Job, memcheck: bool) -> tuple[Job, bool, str, float]:
    """Run one process. Returns the job, whether it passed, its output, and its seconds."""
    command = [*MEMCHECK] if memcheck else []
    command += [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", "-m"]
    command += ["gpu and contract and (triton or gluon)" if memcheck else "gpu", str(job.path)]
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1", **os.environ}
    if job.parts > 1:
        command += ["-p", "tools.gpu_tests"]
        environment[PART_OF] = f"{job.part}/{job.parts}"
    start = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    ran = " passed" in done.stdout.splitlines()[-1] if done.stdout else False
    return job, done.returncode == 0 and ran, done.stdout, time.monotonic() - start


def contracts() -> list[Path]:
    """The contract file of every op that has a Triton kernel."""
    kernels = sorted((ROOT / "openmla" / "backends" / "triton").glob("[!_]*.py"))
    return [ROOT / "tests" / "ops" / f"test_{path.name}" for path in kernels]


def files_to_run(options: argparse.Namespace) -> list[Path]:
    if options.files:
        return [ROOT / name for name in options.files]
    if options.memcheck:
        return contracts()
    found = [path for folder in FOLDERS for path in (ROOT / folder).glob("test_*.py")]
    files = [path for path in found if path.relative_to(ROOT).as_posix() not in WITHOUT_A_GPU]
    for name, package in WITH_A_PACKAGE.items():
        if find_spec(package) is None:
            files.remove(ROOT / name)
            print(f"{name}  left out, {package} is not installed", file=sys.stderr)
    if options.changed:
        sys.path.append(str(ROOT))  # this file is run by its path
        from tools.affected import affected, changed_since

        changed = changed_since(options.changed)
        if changed is None:
            print(f"git does not know {options.changed}: running everything", file=sys.stderr)
        else:
            files = affected(files, changed)
    return files


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu_tests")
    parser.add_argument("files", nargs="*", help="test files; all that may use a GPU by default")
    parser.add_argument("--again", action="store_true", help="also what passed already")
    parser.add_argument(
        "--changed", nargs="?", const="main", metavar="BASE",
        help="only files that a change since the commit BASE can affect (main by default)",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="print the files and run nothing")
    parser.add_argument("--memcheck", action="store_true", help="under compute-sanitizer")
    parser.add_argument("--processes", type=int, default=min(16, os.cpu_count() or 1))
    options = parser.parse_args()
    unknown = [name for name in WITHOUT_A_GPU if not (ROOT / name).exists()]
    if unknown:
        parser.error(f"listed as without a GPU, but not there: {', '.join(unknown)}")
    files = files_to_run(options)
    if options.list:
        print(*(path.relative_to(ROOT) for path in sorted(files)), sep="\n")
        return 0
    kept = ROOT / ".gpu-tests" / (commit() + ("-memcheck" if options.memcheck else ""))
    kept.mkdir(parents=True, exist_ok=True)
    jobs = [job for path in files for job in jobs_of(path)]
    left = [job for job in jobs if options.again or not (kept / job.summary).exists()]
    if len(left) < len(jobs):
        print(f"{len(jobs) - len(left)} of {len(jobs)} passed before", flush=True)
    left.sort(key=lambda job: (-job.seconds, str(job)))
    return 1 if run_all(left, kept, options) else 0


def run_all(jobs: list[Job], kept: Path, options: argparse.Namespace) -> int:
    """Run jobs in this order, print what each says as it ends; returns how many failed."""
    failed = 0
    took: dict[str, float] = {}
    start = time.monotonic()
    with ThreadPoolExecutor(options.processes) as pool:
        for done in as_completed([pool.submit(run, job, options.memcheck) for job in jobs]):
            job, passed, output, seconds = done.result()
            took[str(job)] = seconds
            last = (output.splitlines() or [""])[-1]
            print(f"{job}  {last.strip('= ')}  ({seconds:.0f} s)", flush=True)
            if passed:
                (kept / job.summary).write_text(last + "\n")
            else:
                failed += 1
                print(output[-3000:], flush=True)
    longest = sorted(took, key=lambda name: -took[name])[:5]
    print(
        f"{len(jobs) - failed} passed, {failed} failed in {time.monotonic() - start:.0f} s, "
        f"{sum(took.values()):.0f} s of processes; longest: "
        + ", ".join(f"{name} {took[name]:.0f} s" for name in longest)
    )
    return failed


if __name__ == "__main__":
    sys.exit(main())
