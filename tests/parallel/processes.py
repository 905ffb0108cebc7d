"""Processes that form a gloo group and run what they are asked to, for tests over several ranks."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # before torch loads, see conftest

import torch
import torch.distributed as dist

WAIT = 60  # seconds until a rank that does not come is given up


class Processes:
    """`size` processes of one group. run() calls a module's function on all of them, with the rank
    first; what a test asserts, the ranks assert."""

    def __init__(self, size: int, timeout: float = WAIT) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(size):
            here, there = context.Pipe()
            where = (str(Path(self._folder.name) / "store"), timeout)
            process = context.Process(target=_serve, args=(there, rank, size, *where), daemon=True)
            process.start()
            there.close()
            self._ends.append(here)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What the function returned, by rank; of a rank that failed, its traceback is raised."""
        for end in self._ends:
            end.send((function, arguments))
        answers = [end.recv() for end in self._ends]
        failed = [f"rank {rank}: {said}" for rank, (fine, said) in enumerate(answers) if not fine]
        assert not failed, "\n".join(failed)
        return [said for _, said in answers]

    def close(self) -> None:
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(WAIT)
        self._folder.cleanup()


def _serve(end: Connection, rank: int, size: int, store: str, timeout: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
    while True:
        try:
            function, arguments = end.recv()
        except EOFError:  # the tests are over
            break
        try:
            with torch.inference_mode():
                answer = (True, function(rank, *arguments))
        except Exception:
            answer = (False, traceback.format_exc())
        end.send(answer)
    dist.destroy_process_group()
