"""What all cases of the corpus share: random inputs, cache bytes, digests and their comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from openmla import LayerCache
from openmla.testing import poisoned_memory

Results = dict[str, Tensor]
Run = Callable[[str], Results]  # takes the case id, which seeds the inputs
Summary = dict[str, dict[str, Any]]

# Relative tolerances of values where the bits of this CPU are not those of the recording.
LOOSE = {torch.bfloat16: 2e-2, torch.float16: 2e-2, torch.float32: 1e-4, torch.float64: 1e-4}
SAMPLES = 4


class Random:
    """Tensors that depend on the case id alone, made on the CPU and then moved."""

    def __init__(self, name: str, device: str = "cpu") -> None:
        self.device = device
        seed = int.from_bytes(blake2b(name.encode(), digest_size=6).digest(), "big")
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, gain: float = 1.0) -> Tensor:
        made = torch.randn(*shape, generator=self.generator) * gain
        return made.to(dtype).to(self.device)

    def order(self, n: int) -> Tensor:
        return torch.randperm(n, generator=self.generator)

    def some_of(self, n: int, count: int) -> Tensor:
        """`count` different numbers below n."""
        return self.order(n)[:count]


def cache_bytes(cache: LayerCache, name: str = "cache") -> Results:
    """Every part of a cache, as bytes."""
    return {
        f"{name}.{number}": part.data.contiguous().view(torch.uint8).clone()
        for number, part in enumerate(cache.parts)
    }


def fill_with_nan(cache: LayerCache) -> None:
    """Rows that nobody wrote are NaN, so that reading one of them is seen."""
    for part in cache.parts:
        part.data.view(torch.uint8).fill_(255)


@contextmanager
def one_way() -> Iterator[None]:
    """One thread, poisoned memory and inference mode: how every case runs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode(), poisoned_memory():
            yield
    finally:
        torch.set_num_threads(threads)


def digest(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    raw = flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)
    return blake2b(raw.numpy().tobytes(), digest_size=8).hexdigest()


def summarize(results: Results) -> Summary:
    """A digest of each result, and what can be compared where bits cannot."""
    return {name: _summary(tensor) for name, tensor in results.items()}


def _summary(tensor: Tensor) -> dict[str, Any]:
    found: dict[str, Any] = {
        "digest": digest(tensor),
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
    }
    if not tensor.is_floating_point():
        return found
    values = tensor.detach().cpu().to(torch.float64).reshape(-1)
    finite = values.isfinite()
    found["nan"] = int(values.isnan().sum())
    found["inf"] = int(values.isinf().sum())
    found["norm"] = float(f"{float(values[finite].norm()):.9g}")
    places = [i * max(len(values) - 1, 0) // (SAMPLES - 1) for i in range(SAMPLES)]
    samples = [float(f"{float(values[i]):.7g}") for i in places] if len(values) else []
    found["samples"] = [value if math.isfinite(value) else str(value) for value in samples]
    return found


def differences(found: Summary, recorded: Summary, *, exact: bool) -> list[str]:
    """Names of results that differ, with the reason; `exact` compares bits."""
    problems = [
        f"{name}: only {'recorded' if name in recorded else 'found'}"
        for name in found.keys() ^ recorded.keys()
    ]
    loosest = max((_tolerance(each) for each in recorded.values()), default=0.0)
    for name in found.keys() & recorded.keys():
        here, there = found[name], recorded[name]
        if exact:
            if here["digest"] != there["digest"]:
                problems.append(f"{name}: {here} is not {there}")
        elif not _near(name, here, there, loosest):
            problems.append(f"{name}: {here} is not near {there}")
    return sorted(problems)


def _tolerance(summary: dict[str, Any]) -> float:
    return LOOSE.get(getattr(torch, summary["dtype"]), 0.0)


def _near(name: str, here: dict[str, Any], there: dict[str, Any], tolerance: float) -> bool:
    """Whether two summaries agree, `tolerance` being that of the case's coarsest result: an lse of
    16-bit queries is float32. Of selected positions only shapes count: scores that are nearly
    equal may change places."""
    if (here["shape"], here["dtype"]) != (there["shape"], there["dtype"]):
        return False
    if here["dtype"] == "uint8" or here["dtype"].startswith("float8") or name.endswith("chosen"):
        return True  # lossy rows may round the other way
    if "norm" not in there:
        return here["digest"] == there["digest"]
    if (here["nan"], here["inf"]) != (there["nan"], there["inf"]):
        return False
    size = max(math.prod(there["shape"]), 1)
    typical = there["norm"] / math.sqrt(size)
    if not math.isclose(here["norm"], there["norm"], rel_tol=tolerance, abs_tol=1e-9):
        return False
    for a, b in zip(here["samples"], there["samples"], strict=True):
        if isinstance(a, str) or isinstance(b, str):
            if a != b:
                return False
        elif abs(a - b) > tolerance * max(abs(b), typical):
            return False
    return True


def describe_gpu() -> dict[str, str]:
    """What the bits of kernels depend on."""
    import triton

    name = torch.cuda.get_device_name()
    return {"gpu": name, "torch": torch.__version__, "triton": triton.__version__}


def probe() -> dict[str, str]:
    """Digests of computations whose bits depend on this CPU and on this torch."""
    random = Random("probe")
    found: Results = {}
    with one_way():
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            name = str(dtype).removeprefix("torch.")
            a, b = random.normal(37, 75, dtype=dtype), random.normal(75, 53, dtype=dtype)
            found[f"matmul.{name}"] = a @ b
            found[f"row.{name}"] = a[:1] @ b
            lots = random.normal(5, 19, 48, dtype=dtype), random.normal(5, 48, 33, dtype=dtype)
            found[f"bmm.{name}"] = torch.bmm(*lots)
            found[f"softmax.{name}"] = a.softmax(-1)
            found[f"exp.{name}"] = a.exp()
            found[f"log.{name}"] = a.abs().log()
            found[f"rsqrt.{name}"] = a.abs().rsqrt()
            for n in (7, 64, 75, 1000):
                found[f"sum.{n}.{name}"] = random.normal(3, n, dtype=dtype).sum(-1)
        angles = random.normal(100).double()
        found["normal"] = random.normal(1000)
        found["cos"], found["sin"] = angles.float().cos(), angles.sin()
        q = random.normal(1, 3, 17, 24)
        attend = torch.nn.functional.scaled_dot_product_attention
        found["attention"] = attend(q, q, q, is_causal=True)
        half = q.bfloat16()
        found["attention.bfloat16"] = attend(half, half, half, is_causal=True)
        return {name: digest(tensor) for name, tensor in found.items()}
