"""Runs the functions of `fenced.values.decision` on unknown values: their syntax trees become terms of Z3.

Nothing is written twice. The few forms of Python that the decision uses are understood, and any other one raises
`NotUnderstood`: a change that this file does not understand fails the proof instead of escaping it.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import reduce
from typing import Any, TypeAlias

import z3

from fenced.values import decision

Term: TypeAlias = Any
"""A term of Z3, which has no types of its own."""
Outcome: TypeAlias = tuple[Term, Any]
"""A value, and the condition under which it is the result."""
Source: TypeAlias = Callable[[str], str]


class NotUnderstood(NotImplementedError):
    """A form of Python that this file does not understand."""


@dataclass(frozen=True)
class Opt:
    """A value, or None if `none`."""

    none: Term
    value: Any


@dataclass(frozen=True)
class Obj:
    """A record with named fields; `kind` is the name of its class."""

    kind: str
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class SetOf:
    """A tuple of which only membership is asked."""

    member: Callable[[Term], Term]


def lifted(value: Any) -> Opt:
    """As an optional, whether it is one or not."""
    return value if isinstance(value, Opt) else Opt(z3.BoolVal(value is None), value)


def term(value: Any) -> Term:
    if isinstance(value, bool):
        return z3.BoolVal(value)
    if isinstance(value, int):
        return z3.IntVal(value)
    return z3.StringVal(value) if isinstance(value, str) else value


def truth(value: Any) -> Term:
    """What `if value` tests."""
    if isinstance(value, Opt):
        return z3.And(z3.Not(value.none), truth(value.value))
    if value is None or isinstance(value, bool | int):
        return z3.BoolVal(bool(value))
    if z3.is_bool(value):
        return value
    if z3.is_int(value):
        return value != 0
    raise NotUnderstood(f"the truth of {value!r}")


def equal(one: Any, other: Any) -> Term:
    """What `one == other` tests."""
    if isinstance(one, Opt) or isinstance(other, Opt) or one is None or other is None:
        one, other = lifted(one), lifted(other)
        both = z3.And(one.none, other.none)
        if one.value is None or other.value is None:
            return both
        neither = z3.And(z3.Not(one.none), z3.Not(other.none))
        return z3.Or(both, z3.And(neither, equal(one.value, other.value)))
    if not z3.is_expr(one) and not z3.is_expr(other):
        return z3.BoolVal(one == other)
    return term(one) == term(other)


@dataclass
class Path:
    """One way through a function: what holds on it, its local names, and the globals of its module."""

    condition: Term
    names: dict[str, Any]
    globals: Mapping[str, Any]

    def where(self, condition: Term) -> Path:
        return Path(z3.And(self.condition, condition), self.names, self.globals)

    def under(self, condition: Term) -> Path:
        return Path(condition, self.names, self.globals)


def shipped(name: str) -> str:
    return inspect.getsource(found(name))


def found(name: str) -> Any:
    """A function of `decision`, or of what it imports; `Mode.refuses` is a method."""
    return reduce(getattr, name.split("."), decision)


@dataclass
class Symbolic:
    """Runs functions of `decision` on terms. `hooks` are functions that are not looked into, such as a SHA-256."""

    source: Source = shipped
    hooks: dict[str, Callable[..., Any]] = field(default_factory=dict)
    duties: list[tuple[Term, Term]] = field(default_factory=list)
    """What must hold on a path, or Python would raise there: assertions, and values that must not be None."""
    _trees: dict[str, ast.FunctionDef] = field(default_factory=dict)

    def call(self, name: str, condition: Term, arguments: Mapping[str, Any]) -> list[Outcome]:
        """Every outcome of a call."""
        tree, results = self._tree(name), list[Outcome]()
        if left_out := set(self._parameters(name)) - set(arguments):
            raise NotUnderstood(f"a call of {name} leaves out {left_out}")
        start = Path(condition, dict(arguments), inspect.unwrap(found(name)).__globals__)
        left = self._block(tree.body, [start], results)
        return results + [(path.condition, None) for path in left]

    def _tree(self, name: str) -> ast.FunctionDef:
        if name not in self._trees:
            tree = ast.parse(textwrap.dedent(self.source(name))).body[0]
            assert isinstance(tree, ast.FunctionDef)
            self._trees[name] = tree
        return self._trees[name]

    def _parameters(self, name: str) -> list[str]:
        arguments = self._tree(name).args
        return [each.arg for each in (*arguments.args, *arguments.kwonlyargs)]

    def _block(self, body: list[ast.stmt], paths: list[Path], results: list[Outcome]) -> list[Path]:
        for statement in body:
            paths = [after for path in paths for after in self._statement(statement, path, results)]
        return paths

    def _statement(self, node: ast.stmt, path: Path, results: list[Outcome]) -> list[Path]:
        """The paths that go on behind a statement."""
        match node:
            case ast.Expr(ast.Constant()):
                return [path]
            case ast.Assert(test):
                for condition, value in self._values(test, path):
                    self.duties.append((condition, truth(value)))
                return [path]
            case ast.Assign([ast.Name(name)], value):
                return [
                    Path(condition, {**path.names, name: each}, path.globals)
                    for condition, each in self._values(value, path)
                ]
            case ast.If(test, body, orelse):
                return [*self._branches(test, body, orelse, path, results)]
            case ast.Return(value):
                results += self._values(value, path) if value else [(path.condition, None)]
                return []
        raise NotUnderstood(ast.dump(node))

    def _branches(
        self,
        test: ast.expr,
        body: list[ast.stmt],
        orelse: list[ast.stmt],
        path: Path,
        results: list[Outcome],
    ) -> Iterator[Path]:
        for condition, value in self._values(test, path):
            here, yes = path.under(condition), truth(value)
            decided = z3.simplify(yes)
            if not z3.is_false(decided):
                yield from self._block(body, [here.where(yes)], results)
            if not z3.is_true(decided):
                yield from self._block(orelse, [here.where(z3.Not(yes))], results)

    def _value(self, node: ast.expr, path: Path) -> Any:
        """The value of an expression that has one on this path."""
        [(_, value)] = self._values(node, path)
        return value

    def _given(self, value: Any, path: Path) -> Any:
        """The value of an optional. If it is None there, Python raises: so that must be impossible."""
        if not isinstance(value, Opt):
            return value
        self.duties.append((path.condition, z3.Not(value.none)))
        return value.value

    def _values(self, node: ast.expr, path: Path) -> list[Outcome]:
        """Every outcome of an expression."""
        here = path.condition
        match node:
            case ast.Constant(value):
                return [(here, value)]
            case ast.Name(name):
                return [(here, path.names[name] if name in path.names else path.globals[name])]
            case ast.Attribute(value, attribute):
                owner = self._given(self._value(value, path), path)
                got = owner.fields[attribute] if isinstance(owner, Obj) else getattr(owner, attribute)
                return [(here, got)]
            case ast.BinOp(left, op, right):
                return [(here, self._counted(op, self._value(left, path), self._value(right, path)))]
            case ast.UnaryOp(ast.Not(), operand):
                return [(here, z3.Not(truth(self._value(operand, path))))]
            case ast.BoolOp(op, values):
                return [(here, self._combined(op, values, path))]
            case ast.IfExp(test, body, orelse):
                yes = truth(self._value(test, path))
                return [*self._values(body, path.where(yes)), *self._values(orelse, path.where(z3.Not(yes)))]
            case ast.Compare(left, ops, others):
                terms = [self._value(each, path) for each in (left, *others)]
                pairs = zip(ops, terms, terms[1:], strict=False)
                return [(here, z3.And(*(self._compared(op, one, other, path) for op, one, other in pairs)))]
            case ast.Tuple(elements):
                return [(here, tuple(self._value(each, path) for each in elements))]
            case ast.Call():
                return self._called(node, path)
        raise NotUnderstood(ast.dump(node))

    def _counted(self, op: ast.operator, one: Any, other: Any) -> Any:
        match op:
            case ast.Add():
                return one + other
            case ast.Mult():
                return one * other
            case ast.Div():
                return (z3.ToReal(one) if z3.is_int(one) else one) / other
            case ast.Pow() if isinstance(one, int) and isinstance(other, int):
                return one**other
        raise NotUnderstood(ast.dump(op))

    def _combined(self, op: ast.boolop, nodes: list[ast.expr], path: Path) -> Term:
        """`and` and `or`: a part is only looked at if those before it have not decided."""
        values, at = [], path
        for node in nodes:
            values.append(self._value(node, at))
            at = at.where(truth(values[-1]) if isinstance(op, ast.And) else z3.Not(truth(values[-1])))
        if all(isinstance(value, bool) or z3.is_bool(value) for value in values):
            return (z3.And if isinstance(op, ast.And) else z3.Or)(*map(truth, values))
        match op, values:
            case ast.Or(), [Opt() as first, int(second)]:  # `seq or 0`
                return z3.If(truth(first), first.value, z3.IntVal(second))
        raise NotUnderstood(f"{op} of {values}")

    def _compared(self, op: ast.cmpop, one: Any, other: Any, path: Path) -> Term:
        match op:
            case ast.Is() | ast.Eq():
                return equal(one, other)
            case ast.IsNot() | ast.NotEq():
                return z3.Not(equal(one, other))
            case ast.In():
                return self._is_in(one, other)
            case ast.NotIn():
                return z3.Not(self._is_in(one, other))
        one, other = term(self._given(one, path)), term(self._given(other, path))
        match op:
            case ast.Lt():
                return one < other
            case ast.LtE():
                return one <= other
            case ast.Gt():
                return one > other
            case ast.GtE():
                return one >= other
        raise NotUnderstood(ast.dump(op))

    def _is_in(self, one: Any, others: Any) -> Term:
        if isinstance(others, SetOf):
            return others.member(one)
        return z3.Or(*(equal(one, other) for other in others))

    def _called(self, node: ast.Call, path: Path) -> list[Outcome]:
        """A call for each combination of its arguments: a conditional expression among them has two values."""
        keys = [None] * len(node.args) + [each.arg for each in node.keywords]
        choices: list[tuple[Term, list[Any]]] = [(path.condition, [])]
        for argument in (*node.args, *(each.value for each in node.keywords)):
            choices = [
                (after, [*done, value])
                for condition, done in choices
                for after, value in self._values(argument, path.under(condition))
            ]
        return [
            outcome
            for condition, values in choices
            for outcome in self._applied(node.func, keys, values, path.under(condition))
        ]

    def _applied(
        self, function: ast.expr, keys: list[str | None], values: list[Any], path: Path
    ) -> list[Outcome]:
        match function:
            case ast.Name(name) if name in self.hooks:
                return [(path.condition, self.hooks[name](*values))]
            case ast.Name(name) if is_dataclass(path.globals[name]):
                return [(path.condition, self._record(path.globals[name], keys, values))]
            case ast.Name(name):
                return self.call(name, path.condition, _named(self._parameters(name), keys, values))
            case ast.Attribute(owner, method):
                itself = self._given(self._value(owner, path), path)
                name = f"{itself.kind}.{method}"
                arguments = _named(self._parameters(name), [None, *keys], [itself, *values])
                return self.call(name, path.condition, arguments)
        raise NotUnderstood(ast.dump(function))

    def _record(self, kind: Any, keys: list[str | None], values: list[Any]) -> Obj:
        given = _named([each.name for each in fields(kind)], keys, values)
        defaults = {each.name: each.default for each in fields(kind) if each.default is not MISSING}
        return Obj(kind.__name__, {**defaults, **given})


def _named(parameters: list[str], keys: list[str | None], values: list[Any]) -> dict[str, Any]:
    """Arguments by the names of the parameters; `keys` are None for those that are passed by position."""
    names = [key or parameters[at] for at, key in enumerate(keys)]
    return dict(zip(names, values, strict=True))


# The values that the decision is about.

TEXT, NUMBER = z3.StringSort(), z3.IntSort()


def optional(name: str, sort: Term) -> Opt:
    return Opt(z3.Bool(f"{name}.none"), z3.Const(name, sort))


def any_mark(name: str) -> Opt:
    return Opt(
        z3.Bool(f"{name}.none"),
        Obj(
            "Mark",
            {
                "token": z3.Const(f"{name}.token", NUMBER),
                "grant": z3.Const(f"{name}.grant", TEXT),
                "seq": z3.Const(f"{name}.seq", NUMBER),
                "operation": optional(f"{name}.operation", TEXT),
            },
        ),
    )


def any_stamp(name: str) -> Opt:
    return Opt(
        z3.Bool(f"{name}.none"),
        Obj(
            "Stamp",
            {
                "realm": z3.Const(f"{name}.realm", TEXT),
                "names": SetOf(z3.Function(f"{name}.covers", TEXT, z3.BoolSort())),
                "token": z3.Const(f"{name}.token", NUMBER),
                "seq": optional(f"{name}.seq", NUMBER),
                "grant": z3.Const(f"{name}.grant", TEXT),
            },
        ),
    )


def any_mode(name: str) -> Obj:
    percent = z3.Const(f"{name}.percent", z3.RealSort())
    return Obj("Mode", {"name": z3.Const(f"{name}.name", TEXT), "percent": percent})
