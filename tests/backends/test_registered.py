"""Backends of others: registered, chosen, seen, taken back, and refused with a sentence."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import openmla
from openmla import PRESETS, Batch, BlockPool, allocate_cache, make_plan
from openmla.backends import BACKENDS, OTHERS, Problem, all_backends, choose_backend
from openmla.backends.reference import merge_states as reference
from openmla.backends.reference import mqa_paged as mqa_paged_reference
from openmla.cli.__main__ import main
from openmla.errors import ConfigError, UnsupportedError
from openmla.ops import merge_states
from openmla.plan import Absorbed
from openmla.testing import assert_within_budget

ASKED = Problem("merge_states", dtype=torch.float32)


class Counting:
    """merge_states as the reference has it, for float32 only, counting its calls."""

    LAUNCHES = 1

    def __init__(self) -> None:
        self.calls = 0

    def why_not(self, problem: Problem) -> str | None:
        return None if problem.dtype == torch.float32 else f"takes fp32, this is {problem.dtype}"

    def run(self, out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
        self.calls += 1
        reference.run(out, lse, other_out, other_lse)


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    before = dict(BACKENDS)
    yield
    for op, name in tuple(OTHERS):
        openmla.unregister_backend(op, name)
    assert before == BACKENDS


def states(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)
    shapes = ((3, 2, 4), dtype), ((3, 2), wide), ((3, 2, 4), dtype), ((3, 2), wide)
    return [torch.randn(shape, dtype=kind) for shape, kind in shapes]


def test_auto_takes_it_where_it_can_and_it_computes() -> None:
    assert choose_backend(ASKED) == "reference"  # cached
    mine = Counting()
    openmla.register_backend("merge_states", "mine", mine)
    assert choose_backend(ASKED) == "mine" and all_backends()[-1] == "reference"
    for dtype, calls in ((torch.float32, 1), (torch.bfloat16, 1)):
        actual, peer = states(dtype), states(dtype)
        exact = [tensor.double() for tensor in peer]
        merge_states(*actual)
        merge_states(*peer, backend="reference")
        merge_states(*exact, backend="reference")
        pairs = ((out, lse) for out, lse, *_ in (actual, exact, peer))
        assert_within_budget(*pairs)
        assert mine.calls == calls
    with pytest.raises(UnsupportedError, match=r"mine +takes fp32, this is torch\.bfloat16"):
        merge_states(*states(torch.bfloat16), backend="mine")
    openmla.unregister_backend("merge_states", "mine")
    assert choose_backend(ASKED) == "reference"
    with pytest.raises(ConfigError, match="backend 'mine' is not known"):
        merge_states(*states(), backend="mine")


def test_a_choice_that_was_under_way_is_not_kept() -> None:
    """One thread asks while another registers something better."""
    asked, go_on = threading.Event(), threading.Event()

    class Pondering(Counting):
        def why_not(self, problem: Problem) -> str | None:
            asked.set()
            assert go_on.wait(10)
            return None

    openmla.register_backend("merge_states", "pondering", Pondering())
    choices: list[str] = []
    thread = threading.Thread(target=lambda: choices.append(choose_backend(ASKED)))
    thread.start()
    assert asked.wait(10)
    openmla.register_backend("merge_states", "mine", Counting())
    go_on.set()
    thread.join()
    assert choices == ["pondering"] and choose_backend(ASKED) == "mine"


def test_it_can_stand_back() -> None:
    mine: Any = Counting()
    mine.slower = lambda problem: "is made for more rows"
    openmla.register_backend("merge_states", "mine", mine)
    assert choose_backend(ASKED) == "reference" and choose_backend(ASKED, "mine") == "mine"


@pytest.mark.parametrize("name", ["why_not", "slower"])
def test_an_error_of_its_own_names_it(name: str) -> None:
    def lost(problem: Problem) -> str | None:
        raise KeyError("rows")

    openmla.register_backend("merge_states", "mine", without(**{name: lost}))
    said = f"merge_states: {name}.. of backend 'mine' raised KeyError: 'rows'.* unregister_"
    with pytest.raises(ConfigError, match=said) as caught:
        merge_states(*states())
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_reason_is_a_sentence() -> None:
    openmla.register_backend("merge_states", "mine", without(why_not=lambda problem: False))
    with pytest.raises(ConfigError, match=r"why_not.* of backend 'mine' must return .* got False"):
        choose_backend(ASKED)


def paged_plan(backend: Any = "auto") -> openmla.Plan:
    config = PRESETS["tiny-v3"]
    cache = allocate_cache(config, num_blocks=8, block_size=16, format="fp32")
    pool = BlockPool(num_blocks=8, block_size=16)
    pool.take({"a": 60})
    table, slots = pool.block_table(["a"]), pool.slot_mapping([("a", 59, 60)])
    return make_plan(Batch([1], [60], table, slots), config, cache, backend=backend)


class Refusing(SimpleNamespace):
    @staticmethod
    def why_not(problem: Problem) -> str | None:
        return "never runs"

    @staticmethod
    def run(*tensors: Tensor, **scalars: Any) -> Any:
        raise AssertionError


class Preparing:
    """mqa_paged as the reference has it. What it finds out about a step, each layer looks up by the
    tensor that all of them are called with."""

    def __init__(self) -> None:
        self.steps: dict[int, int] = {}
        self.layers: list[int] = []

    def why_not(self, problem: Problem) -> str | None:
        return None

    def prepare_step(self, plan: openmla.Plan) -> None:
        group = plan.group("absorbed")
        assert group is not None and isinstance(group.part, Absorbed)
        lens = group.part.reads[0].lens
        assert lens is not None
        self.steps[lens.data_ptr()] = int(lens.max())

    def run(self, *tensors: Tensor, **scalars: Any) -> Any:
        self.layers.append(self.steps[tensors[4].data_ptr()])
        return mqa_paged_reference.run(*tensors, **scalars)


def test_a_backend_prepares_each_step_once() -> None:
    mine = Preparing()
    openmla.register_backend("mqa_paged", "mine", mine)
    config = PRESETS["tiny-v3"]
    cache = allocate_cache(config, num_blocks=8, block_size=16, format="fp32")
    q = torch.randn(1, config.num_heads, config.latent_dim)
    plan = paged_plan()
    assert plan.backends["mqa_paged"] == "mine" and list(mine.steps.values()) == [60]
    for _ in range(2):  # layers
        openmla.attend_latent(q, cache, plan)
    assert mine.layers == [60, 60]
    planner = openmla.DecodePlanner(config, cache, max_tokens=1, dtype=torch.float32)
    table, lens = torch.zeros(1, 4, dtype=torch.int32), torch.tensor([9], dtype=torch.int32)
    starts, slots = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([8])
    for length in (9, 12):  # the same plan, of another step
        lens.fill_(length)
        plan = planner.plan(
            block_table=table, seq_lens=lens, query_start_loc=starts, slot_mapping=slots
        )
        openmla.attend_latent(q, cache, plan)
    assert mine.layers == [60, 60, 9, 12]


def test_a_backend_that_cannot_prepare_is_named() -> None:
    broken = SimpleNamespace(why_not=lambda problem: None, run=Refusing.run)
    broken.prepare_step = lambda plan: plan.nothing
    openmla.register_backend("mqa_paged", "broken", broken)
    with pytest.raises(ConfigError, match=r"mqa_paged: prepare_step.* of backend 'broken' raised"):
        paged_plan()
    broken.prepare_step = lambda: None
    openmla.unregister_backend("mqa_paged", "broken")
    with pytest.raises(ConfigError, match=r"module's prepare_step must take \(plan\)"):
        openmla.register_backend("mqa_paged", "broken", broken)
    broken.prepare_step = 3
    with pytest.raises(ConfigError, match="module's prepare_step must be a function of a plan"):
        openmla.register_backend("mqa_paged", "broken", broken)


def test_explain_and_doctor_see_it(capsys: pytest.CaptureFixture[str]) -> None:
    openmla.register_backend("mqa_paged", "theirs", Refusing())
    plan = paged_plan()
    assert plan.backends["mqa_paged"] == "sdpa"
    assert re.search(r"^mqa_paged +sdpa \(not theirs: never runs\)$", plan.explain(), re.M)
    assert main(["doctor"]) == 0
    assert re.search(r"^  mqa_paged .*not theirs: never runs", capsys.readouterr().out, re.M)


def test_the_command_imports_what_registers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kernels_of_mine.py").write_text(
        "import sys, openmla\n"
        "def why_not(problem): return 'is a test'\n"
        "def run(*tensors, **scalars): ...\n"
        "openmla.register_backend('rope', 'from_file', sys.modules[__name__])\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    assert main(["--import", "kernels_of_mine", "doctor"]) == 0
    assert re.search(r"^  rope .*not from_file: is a test", capsys.readouterr().out, re.M)
    assert main(["--import", "no_such_kernels", "doctor"]) == 2
    assert "--import no_such_kernels" in capsys.readouterr().err


def without(*names: str, **changes: Any) -> SimpleNamespace:
    kept = {"why_not": lambda problem: None, "run": reference.run} | changes
    return SimpleNamespace(**{name: value for name, value in kept.items() if name not in names})


REFUSED: dict[str, tuple[tuple[Any, Any, Any], str]] = {
    "op": (("merge_state", "mine", without()), "op 'merge_state' is not known. Did you mean 'merg"),
    "op is no name": ((3, "mine", without()), "op 3 is not known."),
    "own name": (("merge_states", "sdpa", without()), "name 'sdpa' is used by openmla itself"),
    "auto": (("merge_states", "auto", without()), "name 'auto' is used by openmla itself"),
    "odd name": (("merge_states", "a,b", without()), "name must begin with a letter .* got 'a,b'"),
    "no name": (("merge_states", None, without()), "name must begin with a letter .* got None"),
    "taken": (("merge_states", "taken", without()), "already has a backend 'taken'. Cal"),
    "no why_not": (("merge_states", "m", without("why_not")), "must have a function why_not"),
    "no run": (("merge_states", "m", without("run")), "module must have a function run"),
    "nothing": (("merge_states", "m", None), "module must have a function why_not.*, got None"),
    "slower": (("merge_states", "m", without(slower=1)), "module's slower must be a function of a"),
    "launches": (("merge_states", "m", without(LAUNCHES="1")), "must be an integer .* got '1'"),
    "why_not of nothing": (
        ("merge_states", "m", without(why_not=lambda: None)),
        r"module's why_not must take \(problem\), got why_not\(\)",
    ),
    "run of less": (
        ("merge_states", "m", without(run=lambda out, lse: None)),
        r"module's run must take \(out, lse, other_out, other_lse\), got run\(out, lse\)",
    ),
    "run without its scalars": (
        ("mqa_paged", "m", without(run=lambda q, cache, scale, table, lens, starts, *, C: None)),
        r"module's run must take \(q_latent, .*, \*, format, C, scale, causal, ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    openmla.register_backend("merge_states", "taken", without())
    before, others = dict(BACKENDS), dict(OTHERS)
    arguments, sentence = REFUSED[name]
    with pytest.raises(ConfigError, match=f"^register_backend: .*{sentence}") as error:
        openmla.register_backend(*arguments)
    assert "\n" not in str(error.value)
    assert before == BACKENDS and others == OTHERS


def test_nothing_else_can_be_taken_back() -> None:
    openmla.register_backend("merge_states", "mine", without())
    for op, name, sentence in (
        ("merge_states", "reference", "op merge_states has no registered backend 'reference'"),
        ("merge_states", "mina", "no registered backend 'mina'. Did you mean 'mine'?"),
        ("rope", "mine", "op rope has no registered backend 'mine'"),
        ("ropes", "mine", "op 'ropes' is not known. Did you mean 'rope'?"),
    ):
        with pytest.raises(ConfigError, match=re.escape(sentence)):
            openmla.unregister_backend(op, name)
    assert BACKENDS["merge_states"] == ("mine", "triton", "reference")


def test_a_backend_per_op() -> None:
    """Each op by its own name; those not named choose. A plan keeps what it was asked."""
    asked = {"mqa_paged": "reference", "mha_ragged": "sdpa"}
    plan = paged_plan(asked)
    asked["mqa_paged"] = "gone"
    assert plan.backend("mqa_paged") == plan.backends["mqa_paged"] == "reference"
    assert re.search(r"^mqa_paged +reference \(asked for\)$", plan.explain(), re.M)
    assert paged_plan().backend("mqa_paged") == "auto"
    openmla.register_backend("mqa_paged", "theirs", Refusing())
    with pytest.raises(UnsupportedError, match=r"theirs +never runs"):
        paged_plan({"mqa_paged": "theirs"})


@pytest.mark.parametrize(
    "asked, sentence",
    [
        ({"mqa_page": "sdpa"}, "plan: op 'mqa_page' is not known. Did you mean 'mqa_paged'?"),
        ({"mqa_paged": "tritom"}, "got 'tritom'. Did you mean 'triton'?"),
        ({"rope": "sdpa"}, "plan: backend of rope must be auto or one of triton, reference, got"),
        ({"rope": None}, "plan: backend of rope must be auto or one of .*, got None"),
        ({3: "sdpa"}, "plan: op 3 is not known."),
        ("referense", "is not known. Known: auto, .* Did you mean 'reference'?"),
        (3, "plan: backend must be a name, or a dict of names per op .*, got 3."),
        (["sdpa"], "plan: backend must be a name, or a dict of names per op .*, got "),
    ],
)  # fmt: skip
def test_what_is_asked_is_checked(asked: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence.replace("?", r"\?")) as error:
        paged_plan(asked)
    assert "\n" not in str(error.value)


def test_nothing_is_filled_for_a_backend_that_is_not_there() -> None:
    config = PRESETS["tiny-v3"]
    cache = allocate_cache(config, num_blocks=8, block_size=16, format="fp32")
    buffers = openmla.plan_buffers(config, cache, max_requests=2, max_tokens=2, max_blocks=4)
    for buffer in buffers.values():
        buffer.fill_(77)
    pool = BlockPool(num_blocks=8, block_size=16)
    pool.take({"a": 20})
    batch = Batch([1], [20], pool.block_table(["a"]), pool.slot_mapping([("a", 19, 20)]))
    for asked, error in (({"mqa_paged": "nobody"}, ConfigError), ("gluon", UnsupportedError)):
        with pytest.raises(error):
            make_plan(batch, config, cache, backend=asked, into=buffers)
        assert all((buffer == 77).all() for buffer in buffers.values())
