"""A fresh interpreter: `import openmla` loads torch and nothing else, and that is enough."""

from __future__ import annotations

import subprocess
import sys

LOADED = """
import sys
import torch
before = {name.split(".")[0] for name in sys.modules}
import openmla
after = {name.split(".")[0] for name in sys.modules}
extra = after - before - set(sys.stdlib_module_names) - {"openmla"}
print(sorted(extra))
"""

BLOCKED = """
import sys
import torch  # which looks for triton itself
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"triton", "transformers", "safetensors", "flash_mla", "vllm"}:
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
import openmla
from openmla.testing import PagedCase, RaggedCase
inputs = PagedCase("blocked", (1, 2), (33, 7)).make()
out, lse = inputs.run(openmla.ops.mqa_paged, backend="auto")
assert out.isfinite().all() and lse.isfinite().all()
try:
    openmla.attach(torch.nn.Linear(1, 1))
    raise SystemExit("attached without transformers")
except openmla.UnsupportedError as error:
    assert 'pip install "openmla[hf]"' in str(error), error
out, lse = RaggedCase("blocked", (5,), (5,)).make().run(openmla.ops.mha_ragged, backend="auto")
print("fine")
"""


def fresh_interpreter(code: str) -> str:
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    return child.stdout.strip()


def test_nothing_but_torch_is_loaded() -> None:
    assert fresh_interpreter(LOADED) == "[]"


def test_reference_path_without_optional_packages() -> None:
    assert fresh_interpreter(BLOCKED) == "fine"
