"""Sizes, operators and their arguments as plain data, and back.

Nothing that is read back can name code to run but operators of torch, and functions on numbers from a list here.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy import functions as size_functions
from torch.utils._sympy.functions import FloorDiv, Mod, ModularIndexing, PythonMod

from graphpipe.errors import FieldError

_EXPRESSIONS: Mapping[str, Any] = {
    cls.__name__: cls
    for cls in (
        *(sympy.Add, sympy.Mul, sympy.Pow, sympy.Eq, sympy.Ne, sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge),
        *(sympy.And, sympy.Or, sympy.Not, FloorDiv, Mod, PythonMod, ModularIndexing),
        *(size_functions.Max, size_functions.Min, size_functions.ToFloat, size_functions.IntTrueDiv),
        *(size_functions.FloatTrueDiv, size_functions.CeilToInt, size_functions.TruncToInt),
    )
}
_ASSUMPTIONS = ("integer", "positive", "nonnegative")
_NUMBER_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{f"operator.{name}": getattr(operator, name) for name in (
        "getitem", "add", "sub", "mul", "truediv", "floordiv", "mod", "neg", "pow", "eq", "ne", "lt", "le", "gt", "ge",
        "and_", "or_", "not_")},
    **{f"math.{name}": getattr(math, name) for name in ("ceil", "floor", "trunc", "sqrt")},
    **{f"torch.{name}": getattr(torch, name) for name in (
        "sym_float", "sym_int", "sym_max", "sym_min", "sym_not", "sym_ite", "sym_sqrt") if hasattr(torch, name)},
}  # fmt: skip
_FUNCTION_NAMES = {function: name for name, function in _NUMBER_FUNCTIONS.items()}
_TORCH_KINDS: Mapping[str, type] = {"dtype": torch.dtype, "layout": torch.layout, "memory": torch.memory_format}


class UnstorableError(Exception):
    """Something has no form as plain data."""


def dtype_from_plain(text: str) -> torch.dtype:
    """Return the dtype of which this is the text.

    Raises:
        FieldError: There is none.
    """
    found = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise FieldError(f"there is no dtype {text[:60]}")
    return found


def expression_to_plain(expression: sympy.Basic) -> Any:
    """Return an expression in sizes as plain data.

    Raises:
        UnstorableError: It has a function that is not known here.
    """
    if isinstance(expression, sympy.Symbol):
        assumptions = expression.assumptions0
        return {"symbol": expression.name, "is": [a for a in _ASSUMPTIONS if assumptions.get(a)]}
    if isinstance(expression, sympy.Integer):
        return int(expression)
    if isinstance(expression, sympy.Rational):
        return {"over": [int(expression.p), int(expression.q)]}
    if isinstance(expression, sympy.Float):
        return {"float": float(expression).hex()}
    if expression in (sympy.true, sympy.false):
        return bool(expression)
    name = type(expression).__name__
    if _EXPRESSIONS.get(name) is not type(expression):
        raise UnstorableError(f"a size has the function {name}")
    return {"call": name, "of": [expression_to_plain(argument) for argument in expression.args]}


def expression_from_plain(data: Any) -> sympy.Basic:
    """Return the expression that `expression_to_plain` wrote.

    Raises:
        FieldError: It is no expression.
    """
    match data:
        case bool():
            return sympy.true if data else sympy.false
        case int():
            return sympy.Integer(data)
        case {"symbol": str(name), "is": list(assumptions)} if set(assumptions) <= set(_ASSUMPTIONS):
            return sympy.Symbol(name, **dict.fromkeys(assumptions, True))
        case {"over": [int(p), int(q)]}:
            return sympy.Rational(p, q)
        case {"float": str(text)}:
            return sympy.Float(float.fromhex(text))
        case {"call": str(name), "of": list(arguments)} if name in _EXPRESSIONS:
            found: sympy.Basic = _EXPRESSIONS[name](*map(expression_from_plain, arguments))
            return found
    raise FieldError(f"no expression: {str(data)[:60]}")


def target_to_plain(target: Any) -> str:
    """Return what a node calls as text.

    Raises:
        UnstorableError: It is no operator of torch, and no function on numbers that is known here.
    """
    if isinstance(target, torch._ops.OpOverload):
        return f"operator:{target._schema.name}:{target._overloadname}"
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"region:{target.name()}"  # type: ignore[no-untyped-call]
    if target in _FUNCTION_NAMES:
        return f"function:{_FUNCTION_NAMES[target]}"
    raise UnstorableError(f"the graph calls {target}")


def target_from_plain(text: str) -> Any:
    """Return what a node calls.

    Raises:
        FieldError: There is no such operator.
    """
    kind, _, name = text.partition(":")
    try:
        if kind == "operator":
            space, _, rest = name.partition("::")
            packet, _, overload = rest.rpartition(":")
            found = getattr(getattr(getattr(torch.ops, space), packet), overload)
            if isinstance(found, torch._ops.OpOverload):
                return found
        elif kind == "region":
            found = getattr(torch.ops.higher_order, name)
            if isinstance(found, torch._ops.HigherOrderOperator):
                return found
        elif kind == "function" and name in _NUMBER_FUNCTIONS:
            return _NUMBER_FUNCTIONS[name]
    except AttributeError as error:
        raise FieldError(f"there is no operator {name}") from error
    raise FieldError(f"there is no operator {text[:60]}")


def argument_to_plain(value: Any, numbers: Mapping[fx.Node, int]) -> Any:
    """Return an argument of an operator as plain data.

    Args:
        value: The argument.
        numbers: The number of each node.

    Raises:
        UnstorableError: It has no such form.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, fx.Node):
        return {"node": numbers[value]}
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    for kind, cls in _TORCH_KINDS.items():
        if isinstance(value, cls):
            return {kind: str(value).removeprefix("torch.")}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [argument_to_plain(entry, numbers) for entry in value]}
    raise UnstorableError(f"an operator is given {type(value).__name__}")


def argument_from_plain(data: Any, nodes: list[fx.Node]) -> Any:
    """Return the argument that `argument_to_plain` wrote.

    Raises:
        FieldError: It is none.
    """
    match data:
        case None | bool() | int() | str():
            return data
        case {"node": int(number)} if 0 <= number < len(nodes):
            return nodes[number]
        case {"float": str(text)}:
            return float.fromhex(text)
        case {"device": str(name)}:
            return torch.device(name)
        case {"list": list(entries)}:
            return [argument_from_plain(entry, nodes) for entry in entries]
        case {"tuple": list(entries)}:
            return tuple(argument_from_plain(entry, nodes) for entry in entries)
        case dict() if len(data) == 1:
            ((kind, name),) = data.items()
            found = getattr(torch, name, None) if isinstance(name, str) else None
            if kind in _TORCH_KINDS and isinstance(found, _TORCH_KINDS[kind]):
                return found
    raise FieldError(f"no argument: {str(data)[:60]}")
