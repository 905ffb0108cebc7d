"""Keeps docs/architecture.md true: who imports whom, table equals tree, one name in four places."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from xml.etree import ElementTree

import pytest

from openmla.backends import BACKENDS
from tools.gpu_tests import FOLDERS, WITHOUT_A_GPU, contracts
from tools.mutants import MUTANTS

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "openmla"
MODULES = sorted(PACKAGE.rglob("*.py"))

# Rooms, and what each may import from the package; ANYTHING's may import anything.
MAY_IMPORT = {
    "errors": set(),
    "config": {"errors"},
    "hardware": {"errors"},
    "outputs": {"errors"},
    "cache": {"errors", "config"},
    "backends": {"errors", "hardware", "outputs", "cache.format"},
    "ops": {"errors", "hardware", "outputs", "cache.format", "backends"},
    "ranks": {"errors", "config"},
    "plan": {"errors", "config", "hardware", "outputs", "cache", "backends", "ops", "ranks"},
    "attention": {"errors", "config", "outputs", "cache", "plan", "ops", "ranks"},
    "parallel": {"errors", "config", "cache", "plan", "attention", "ranks"},
    "layers": {
        *("errors", "config", "hardware", "outputs", "cache", "backends", "ops", "ranks"),
        *("plan", "attention"),
    },
    "testing": {"errors", "config", "outputs", "cache", "backends", "ops"},
}
ANYTHING = {"bench", "bisect", "cli", "integrations", "__init__"}

# Third-party packages, and the only places that may import them. torch is everywhere.
ONLY_IN = {
    "triton": ("backends/triton/", "backends/gluon/"),
    "flash_mla": ("backends/flashmla/",),
    "transformers": (
        "integrations/__init__.py",
        "integrations/transformers/",
        "bench/",
        "bisect/recorder.py",
        "cli/models.py",
        "cli/eval.py",
        "cli/looked_at.py",
    ),
    "vllm": ("integrations/vllm/",),
    "rich": ("cli/terminal.py", "plan/explanation.py"),
    "safetensors": (
        "bisect/dump.py",
        "cli/models.py",
        "cli/checkpoint.py",
        "integrations/scales.py",
    ),
    "torch.distributed": ("ranks/",),
}

# Device data is never read back. The reference defines meaning and may; the CPU branches of
# sdpa read lengths that are on the CPU already.
SILENT = ("ops", "attention", "layers", "backends")
MAY_READ = ("backends/reference/", "backends/sdpa/", "ops/_values.py")  # the last: on CPUs only


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def room(name: str) -> str:
    return name.split("/")[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Every module a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, allowed: set[str]) -> bool:
    return any(name == entry or name.startswith(f"{entry}.") for entry in allowed)


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_imports_go_downwards(path: Path) -> None:
    name = relative(path)
    if room(name) in ANYTHING:
        return
    # backends are loaded by name when run: nobody imports one, least of all another backend; but
    # gluon's kernels build on the portable ones' host code
    own = {".".join(name.split("/")[:2])}
    own |= {"backends.triton"} if own == {"backends.gluon"} else set()
    folders = {
        f"backends.{path.name}" for path in (PACKAGE / "backends").iterdir() if path.is_dir()
    }
    for module in imports(path):
        if module.startswith("openmla."):
            target = module.removeprefix("openmla.")
            assert within(target, MAY_IMPORT[room(name)] | {room(name)}), f"{name}: {module}"
            assert not within(target, folders - own), f"{name}: {module}"


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_third_party_packages_stay_in_their_place(path: Path) -> None:
    for module in imports(path):
        for package, places in ONLY_IN.items():
            if within(module, {package}):
                assert relative(path).startswith(places), f"{relative(path)} imports {module}"


def test_every_room_named_here_exists() -> None:
    rooms = {room(relative(path)) for path in MODULES}
    assert rooms == {*MAY_IMPORT, *ANYTHING}
    assert set(SILENT) <= rooms
    for place in {*MAY_READ, *(place for places in ONLY_IN.values() for place in places)}:
        assert (PACKAGE / place).exists(), f"there is no {place}"


def drawn(picture: str, tag: str) -> Iterator[ElementTree.Element]:
    svg = ElementTree.parse(ROOT / "docs" / "images" / picture)
    return svg.iter(f"{{http://www.w3.org/2000/svg}}{tag}")


def test_pictures_show_the_rooms_and_ops_that_exist() -> None:
    boxes = {name for group in drawn("rooms.svg", "g") if (name := group.get("id"))}
    folders = {f"backends-{name}" for names in BACKENDS.values() for name in names}
    assert boxes == {*MAY_IMPORT, *ANYTHING, *folders} - {"__init__"}
    arrows = [arrow.get("data-imports") for arrow in drawn("rooms.svg", "path")]
    for importer, imported in (arrow.split() for arrow in arrows if arrow):
        allowed = {entry.split(".")[0] for entry in MAY_IMPORT.get(importer, boxes)}
        assert imported in allowed, f"{importer} must not import {imported}"
    names = {text.text for text in drawn("decode-step.svg", "text") if text.get("class")}
    ops = {name for name in names if name and name.isidentifier() and "_" in name}
    assert ops and ops <= set(BACKENDS)


def test_table_equals_tree() -> None:
    tree: dict[str, set[str]] = {}
    for path in (PACKAGE / "backends").glob("*/*.py"):
        if not path.name.startswith("_"):
            tree.setdefault(path.stem, set()).add(path.parent.name)
    assert {op: set(names) for op, names in BACKENDS.items()} == tree
    assert all("reference" in names for names in BACKENDS.values())


def test_one_name_in_four_places() -> None:
    ops = {path.stem for path in (PACKAGE / "ops").glob("[!_]*.py")}
    assert ops == set(BACKENDS)
    for op in ops:
        for place in (
            "openmla/backends/reference/{}.py",
            "tests/ops/test_{}.py",
            "openmla/bench/{}.py",
        ):
            assert (ROOT / place.format(op)).is_file(), f"{op} has no {place.format(op)}"


def test_one_author_of_a_problem() -> None:
    """An op says how backends are asked about it, to its own calls and to the planner; doctor asks
    about machines that are elsewhere."""
    for op in BACKENDS:
        assert callable(import_module(f"openmla.ops.{op}").problem), f"{op} has no problem()"
    for path in MODULES:
        calls = (
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
        )
        made = any(ast.unparse(call.func) == "Problem" for call in calls)
        assert not made or relative(path) in ("backends/__init__.py", "cli/doctor.py"), path


def test_tests_do_not_import_tests() -> None:
    """What several of their files share is in a module beside them."""
    for path in (ROOT / "tests").rglob("*.py"):
        for module in imports(path):
            borrowed = module.startswith("tests.") and ".test_" in module
            assert not borrowed, f"{path.relative_to(ROOT)} imports {module}"


def declared_tests(path: Path) -> Iterator[tuple[str, set[str], set[str]]]:
    """Name, decorators and arguments of every test of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            marks = {ast.unparse(mark) for mark in node.decorator_list}
            yield node.name, marks, {argument.arg for argument in node.args.args}


def test_markers_are_where_selections_look() -> None:
    """`-m gpu`, `-m contract` and `-m triton` find every test that they are about."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        of_an_op = path.parent.name == "ops"
        for name, marks, _ in declared_tests(path):
            for marker, wanted in (
                ("gpu", any("cuda.is_available" in mark for mark in marks)),
                ("contract", of_an_op and name.startswith("test_contract")),
                ("triton", of_an_op and name.startswith("test_triton")),
            ):
                found = f"pytest.mark.{marker}" in marks
                assert found or not wanted, f"{path.name}: {name} is not marked {marker}"
            assert not any("'backend', BACKENDS[" in mark for mark in marks), (
                f"{path.name}: {name} must take backends() of tests/ops/contract.py"
            )
    for path in contracts():
        assert "@pytest.mark.contract" in path.read_text(), f"{path.name} has no contract test"


def test_gpu_tests_knows_which_files_use_one() -> None:
    """The device fixture is what brings a GPU in, or the marker itself."""

    def uses_one(marks: set[str], arguments: set[str]) -> bool:
        pretended = any("parametrize('device'" in mark for mark in marks)
        return "pytest.mark.gpu" in marks or ("device" in arguments and not pretended)

    assert set(WITHOUT_A_GPU) == {
        path.relative_to(ROOT).as_posix()
        for folder in FOLDERS
        for path in (ROOT / folder).glob("test_*.py")
        if not any(uses_one(marks, arguments) for _, marks, arguments in declared_tests(path))
    }


def test_every_mutant_has_one_place_to_go() -> None:
    for mutant in MUTANTS:
        assert (PACKAGE / mutant.file).read_text().count(mutant.old) == 1, mutant.name


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_silence(path: Path) -> None:
    name, source = relative(path), path.read_text()
    if room(name) in SILENT and not name.startswith(MAY_READ):
        for call in (".item()", ".cpu()", ".tolist()"):
            assert call not in source, f"{name} reads device data: {call}"
    if room(name) not in ("cli", "integrations"):
        assert "os.environ" not in source, f"{name} reads the environment"


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_every_module_opens_with_a_sentence(path: Path) -> None:
    doc = ast.get_docstring(ast.parse(path.read_text()))
    assert doc and doc.splitlines()[0].rstrip().endswith("."), f"{relative(path)} needs one"


def test_banned_names() -> None:
    banned = {"utils", "common", "helper", "helpers", "manager", "impl", "metadata"}
    assert not {relative(path) for path in MODULES if path.stem in banned}
