"""Symbolic sizes."""

from __future__ import annotations

from typing import Any

import sympy
import torch


def size_expression(size: Any) -> sympy.Basic:
    """Return a size as an expression in the number of samples."""
    return size.node.expr if isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool) else sympy.sympify(size)


def free_symbols(size: Any) -> frozenset[sympy.Symbol]:
    """Return the symbols in a size; none for a plain number."""
    if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return frozenset(size.node.expr.free_symbols)
    return frozenset()
