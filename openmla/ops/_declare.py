"""op(): schema, shape checks, fake, dispatch and public function of an op from one declaration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import update_wrapper
from typing import Annotated, Any, NamedTuple, TypeVar, cast, get_args

import torch
from torch import Tensor

from openmla.errors import ShapeError
from openmla.ops._register import Decided, decided, refuse_grad, register
from openmla.ops._shapes import bind

F = TypeVar("F", bound=Callable[..., Any])
Hook = Callable[..., Any]

# Integers that follow the lengths of a step: symbols in a compiled graph.
Size = Annotated[int, "SymInt"]
Sizes = Annotated[list[int], "SymInt[]"]

_SCHEMA_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    Size: "SymInt",
    Sizes: "SymInt[]",
    bool: "bool",
    float: "float",
    int: "int",
    list[str]: "str[]",
    str: "str",
    torch.dtype | None: "ScalarType?",
    None: "()",
    tuple[Tensor, Tensor]: "(Tensor, Tensor)",
}


def op(
    *,
    name: str | None = None,
    problem: Hook,
    sizes: Hook | None = None,
    check: Hook | Sequence[Hook] = (),
    check_values: Hook | Sequence[Hook] = (),
    fake: Hook | None = None,
    call: Hook | None = None,
    dtype_of: str | None = None,
    mutates_args: Sequence[str] = (),
    no_grad: Sequence[str] = (),
    optional: Sequence[str] = (),
    host_args: Sequence[str] = (),
) -> Callable[[F], F]:
    """Define torch.ops.openmla.<name> from the signature of the public function.

    That function has no body; it is given one that calls the op. The op's schema and shape checks
    follow from the annotations:

        q: Annotated[Tensor, "[T, H, D] float row"]    checked by bind()
        max_query_len: Size                            a SymInt in the schema

    Hooks do the rest. A hook receives what its parameters name: arguments of the call, sizes by
    their letters, `op` (the name), `tensors` (all of them), `device`, `dtype`, `traced`.

        problem       returns the Problem of a call; `dtype` is that of the argument `dtype_of`, by
                      default of the first
        sizes         returns letters that scalars or other shapes determine; runs before bind()
        check         raises for metadata that no shape text describes; `traced` is True in the fake
        check_values  raises for wrong values; runs in every call, but only on CPU tensors, and
                      knows only arguments, sizes and `op`
        fake          returns empty results; ops that return nothing have no such hook
        call          calls the implementation, if run(*tensors, **scalars) is not what it takes

    The op writes to the tensors in `mutates_args` and raises if a tensor in `no_grad` requires
    grad. Callers of torch.ops.openmla.<name> may omit the arguments in `optional`. The op itself
    does not have the arguments in `host_args`: a function that has some keeps its own body, which
    calls torch.ops.openmla.<name>.default.
    """

    def declare(function: F) -> F:
        signature = inspect.signature(function, eval_str=True)
        arguments = [_argument(each) for each in signature.parameters.values()]
        arguments = [each for each in arguments if each.name not in host_args]
        declared = _Op(
            name or function.__name__, arguments, dtype_of, no_grad, optional,
            problem=problem, sizes=sizes, check=check, check_values=check_values, fake=fake,
            call=call,
        )  # fmt: skip
        schema = declared.schema(mutates_args, signature.return_annotation)
        overload = register(schema, declared.decide, declared.run, declared.fake)
        return function if host_args else _forward(function, declared.name, arguments, overload)

    return declare


class _Argument(NamedTuple):
    name: str
    type: str  # in the schema
    shape: str | None  # the shape text of a tensor
    default: Any
    keyword_only: bool

    @property
    def is_tensor(self) -> bool:
        return self.type.startswith("Tensor")


def _argument(parameter: inspect.Parameter) -> _Argument:
    type, shape = parameter.annotation, None
    if type not in _SCHEMA_TYPES:
        type, shape = get_args(type)
    keyword_only = parameter.kind is parameter.KEYWORD_ONLY
    return _Argument(parameter.name, _SCHEMA_TYPES[type], shape, parameter.default, keyword_only)


def _several(hooks: Hook | Sequence[Hook]) -> Sequence[Hook]:
    return (hooks,) if callable(hooks) else hooks


def _nothing() -> None:
    """The hook of an op that needs none."""


class _Op:
    """The schema of an op and the functions that register() takes."""

    def __init__(
        self, name: str, arguments: Sequence[_Argument], dtype_of: str | None,
        no_grad: Sequence[str], optional: Sequence[str], *, problem: Hook, sizes: Hook | None,
        check: Hook | Sequence[Hook], check_values: Hook | Sequence[Hook], fake: Hook | None,
        call: Hook | None,
    ) -> None:  # fmt: skip
        self.name = name
        self.tensors = [each for each in arguments if each.is_tensor]
        self.scalars = [each for each in arguments if not each.is_tensor]
        self.count = len(self.tensors)
        self.omitted = (None,) * self.count
        self.places = {each.name: i for i, each in enumerate(self.tensors)}
        self.defaults = {each.name: each.default for each in arguments if each.name in optional}
        self.shapes = {each.name: each.shape for each in self.tensors if each.shape is not None}
        self.shaped = [self.places[each] for each in self.shapes]
        self.typed = self.places[dtype_of] if dtype_of else 0
        self.no_grad = [self.places[each] for each in no_grad]
        self.keyword_only = [
            (i, each.name) for i, each in enumerate(self.tensors) if each.keyword_only
        ]
        self.call_problem = self.caller(problem)
        self.call_sizes = self.caller(sizes or _nothing)
        self.call_fake = self.caller(fake or _nothing)
        self.checks = [self.caller(each) for each in _several(check)]
        self.value_checks = [self.caller(each) for each in _several(check_values)]
        self.call = call
        self.is_plain = not (self.call or self.keyword_only or "batch_invariant" in self.defaults)

    def schema(self, mutates_args: Sequence[str], returns: Any) -> str:
        letters, parts = iter("abcd"), []
        for each in [*self.tensors, *self.scalars]:
            type = each.type
            if each.name in mutates_args:
                type = type.replace("Tensor", f"Tensor({next(letters)}!)")
            default = f"={each.default}" if each.name in self.defaults else ""
            parts.append(f"{type} {each.name}{default}")
        parts.insert(len(self.tensors), "*")
        return f"{self.name}({', '.join(parts)}) -> {_SCHEMA_TYPES[returns]}"

    def caller(self, hook: Hook) -> Hook:
        """A function that passes a hook what its parameters name. It is compiled from text, because
        check_values() runs in every call on the CPU and a dictionary of all names costs 2 us."""
        parts, scalars = [], {each.name for each in self.scalars}
        for name, parameter in inspect.signature(hook).parameters.items():
            default = self.defaults.get(name, parameter.default)
            if name == "op":
                source = repr(self.name)
            elif name in self.places:
                source = f"args[{self.places[name]}]"
            else:
                known = "scalars" if name in scalars else "facts"
                required = default is parameter.empty
                source = f"{known}[{name!r}]" if required else f"{known}.get({name!r}, {default!r})"
            keyword_only = parameter.kind is parameter.KEYWORD_ONLY
            parts.append(f"{name}={source}" if keyword_only else source)
        made: Hook = eval(f"lambda args, scalars, facts: hook({', '.join(parts)})", {"hook": hook})
        return made

    def decide(self, args: tuple[Any, ...], scalars: dict[str, Any]) -> Decided:
        args, dims, facts = self.checked(args, scalars, traced=False)
        return decided(dims, self.call_problem(args, scalars, facts), scalars["backend"])

    def fake(self, *args: Tensor | None, **scalars: Any) -> Any:
        args, _, facts = self.checked(args, scalars, traced=True)
        return self.call_fake(args, scalars, facts)

    def run(self, found: Decided, args: tuple[Any, ...], scalars: dict[str, Any]) -> Any:
        if len(args) < self.count:  # torch omits trailing defaults of the schema
            args += self.omitted[len(args) :]
        if self.no_grad and torch.is_grad_enabled():
            given = (args[i] for i in self.no_grad)
            refuse_grad(self.name, [each for each in given if each is not None])
        if self.value_checks and args[0].device.type == "cpu":
            for check in self.value_checks:
                check(args, scalars, found.dims)
        run = found.runner.run
        if self.is_plain:
            return run(*args, **scalars)
        for i, name in self.keyword_only:
            scalars[name] = args[i]
        args = args[: self.count - len(self.keyword_only)]
        scalars.pop("batch_invariant", None)  # only chooses the implementation, which lacks it
        return self.call(run, *args, **scalars) if self.call else run(*args, **scalars)

    def checked(
        self, args: tuple[Any, ...], scalars: Mapping[str, Any], *, traced: bool
    ) -> tuple[tuple[Any, ...], dict[str, int], dict[str, Any]]:
        """Raise, or return all tensors, the sizes by letter, and what else hooks may name."""
        args += self.omitted[len(args) :]
        facts = {
            "tensors": args, "traced": traced, "device": args[0].device,
            "dtype": args[self.typed].dtype,
        }  # fmt: skip
        known = self.call_sizes(args, scalars, facts)
        dims = bind(self.name, self.shapes, [args[i] for i in self.shaped], known)
        facts.update(dims)
        for check in self.checks:
            check(args, scalars, facts)
        return args, dims, facts


def _forward(function: F, op: str, arguments: Sequence[_Argument], overload: Any) -> F:
    """The function with a body that calls the overload, compiled from text as dataclasses do it: a
    body that takes *args and **kwargs would cost every call about a microsecond."""
    name = function.__name__
    positional = [each.name for each in arguments if not each.keyword_only]
    keyword_only = [each.name for each in arguments if each.keyword_only]
    passed = [each.name for each in arguments if each.is_tensor]
    passed += [f"{each.name}={each.name}" for each in arguments if not each.is_tensor]
    lines = [
        "def outer(Tensor, check_is_tensor, overload):",
        f"    def {name}({', '.join([*positional, '*', *keyword_only])}):",
    ]
    for each in arguments:
        if each.type == "Tensor?":
            lines += [
                f"        if {each.name} is not None and not isinstance({each.name}, Tensor):",
                f"            check_is_tensor({op!r}, {each.name!r}, {each.name})",
            ]
    lines += [f"        return overload({', '.join(passed)})", f"    return {name}"]
    scope: dict[str, Any] = {}
    exec(compile("\n".join(lines), f"<op {op}>", "exec"), function.__globals__, scope)
    made: Any = scope["outer"](Tensor, check_is_tensor, overload)
    made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return cast(F, update_wrapper(made, function))


def check_is_tensor(op: str, name: str, given: object) -> None:
    """Numbers are often passed for scales, and torch's own message about it is long."""
    if given is not None and not isinstance(given, Tensor):
        raise ShapeError(f"{op}: {name} must be a tensor, got {type(given).__name__}.")
