"""Plants deliberate bugs in a copy of the package and shows which test catches each.

Every bug goes into a reference, where it is hardest to see: the contract test compares the
reference with itself, so only an independent oracle can notice. Exits with an error if one lives.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("tests/ops", "tests/cache", "tests/plan", "tests/attention", "tests/layers")


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str


MUTANTS = [
    Mutant(
        "drop one key",
        "backends/reference/mqa_paged.py",
        "lse[chunk] = logits.logsumexp(dim=-1)",
        "logits[..., 0] = -torch.inf; lse[chunk] = logits.logsumexp(dim=-1)",
    ),
    Mutant(
        "scale off by 2 %",
        "backends/reference/mqa_paged.py",
        "logits = scale * (q_latent",
        "logits = 1.02 * scale * (q_latent",
    ),
    Mutant(
        "lse in base 2",
        "backends/reference/mqa_paged.py",
        "    return out, lse",
        "    return out, lse / 0.6931471805599453",
    ),
    Mutant(
        "one NaN page read",
        "backends/reference/mqa_paged.py",
        "positions = torch.arange(S, device=cache.device)",
        "S = -(-S // BS) * BS\n        positions = torch.arange(S, device=cache.device)",
    ),
    Mutant(
        "slot off by one",
        "backends/reference/cache_write.py",
        "write(cache, slots, rows, kv_scale)",
        "write(cache, (slots + 1) % cache[..., 0].numel(), rows, kv_scale)",
    ),
    Mutant(
        "causal off by one",
        "backends/reference/mha_ragged.py",
        "positions > last_key",
        "positions > last_key + 1",
    ),
    Mutant(
        "empty side multiplied, not replaced",
        "backends/reference/merge_states.py",
        ".masked_fill(unseen[:, :, None], 0)",
        "",
    ),
    Mutant(
        "rope pairs taken as halves",
        "backends/reference/rope.py",
        'if pairing == "pairs":',
        'if pairing != "pairs":',
    ),
    Mutant(
        "top-k prefers later equals",
        "backends/reference/index_topk.py",
        "equal.cumsum(1, dtype=torch.int32)",
        "equal.flip(1).cumsum(1, dtype=torch.int32).flip(1)",
    ),
    Mutant(
        "index scores without the relu",
        "backends/reference/index_logits.py",
        "@ keys.T).relu_()",
        "@ keys.T)",
    ),
    Mutant(
        "index key bias lost",
        "backends/reference/index_write.py",
        "norm_bias.to(wide), eps",
        "None, eps",
    ),
    Mutant(
        "duplicate rows count once",
        "backends/reference/mqa_sparse.py",
        "valid = slots >= 0",
        "valid = (slots >= 0) & ~(slots[..., None] == slots[:, None]).tril(-1).any(-1)",
    ),
    Mutant(
        "mask bit 31 lost",
        "backends/reference/mha_masked.py",
        "& 1).flatten(1)",
        "& (places < 31)).flatten(1)",
    ),
    Mutant(
        "slots of another rank",
        "backends/reference/map_slots.py",
        "% cp_size == cp_rank",
        "% cp_size != cp_rank - 1",
    ),
    Mutant(
        "fp8 stores the value unscaled",
        "cache/format.py",
        "to_fp8(rows.to(torch.float32) / kv_scale)",
        "to_fp8(rows.to(torch.float32))",
    ),
    Mutant(
        "one-shot takes new rows from the cache",
        "attention/expanded.py",
        "rows.index_copy_(0, part.new_rows, torch.cat(new, dim=1))",
        "pass",
    ),
    Mutant(
        "chunk merged into the wrong queries",
        "attention/expanded.py",
        "sides = out[ask.rows], lse[ask.rows], *one",
        "sides = out[: len(one[0])], lse[: len(one[0])], *one",
    ),
    Mutant(
        "a context row lost at every cut",
        "plan/chunks.py",
        "done += take",
        "done += take + (done + take < context)",
    ),
    Mutant(
        "a batch-invariant token sees the next key",
        "backends/reference/mqa_paged.py",
        "rows[: S - stop + 1 + t]",
        "rows[: S - stop + 2 + t]",
    ),
    Mutant(
        "shared last block written in place",
        "cache/blocks.py",
        "self._users[blocks[-1]] > 1:",
        "self._users[blocks[-1]] > 2:",
    ),
]


def caught_by(mutant: Mutant) -> str | None:
    """The first test that fails with the bug in place, or None."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("openmla", "tests", "tools", "bench"):
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, copy / name, ignore=ignore)
        target = copy / "openmla" / mutant.file
        source = target.read_text()
        assert source.count(mutant.old) == 1, f"{mutant.name}: the line to change has changed"
        target.write_text(source.replace(mutant.old, mutant.new))
        room = f"tests/{Path(mutant.file).parts[0]}"
        folders = sorted(FOLDERS, key=lambda folder: folder != room)
        return first_failure(copy, nearest(mutant)) or first_failure(copy, folders)


def nearest(mutant: Mutant) -> list[str]:
    """Test files with the name of the changed one, which catch most bugs in seconds."""
    name = f"test_{Path(mutant.file).stem}*.py"
    return sorted(
        path.relative_to(ROOT).as_posix()
        for folder in FOLDERS for path in (ROOT / folder).glob(name)
    )  # fmt: skip


def first_failure(copy: Path, tests: Sequence[str]) -> str | None:
    if not tests:
        return None
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    result = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", result.stdout, re.MULTILINE)
    assert found or result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return found[1] if found else None


def main() -> int:
    alive = 0
    for mutant in MUTANTS:
        test = caught_by(mutant)
        alive += test is None
        print(f"{mutant.name:<38} {test or 'SURVIVED'}", flush=True)
    print(f"{len(MUTANTS) - alive} of {len(MUTANTS)} caught")
    return 1 if alive else 0


if __name__ == "__main__":
    raise SystemExit(main())
