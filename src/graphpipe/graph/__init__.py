"""The model as a graph of operators, and what is known about its shape."""

from graphpipe.graph.computation import ComputationGraph, Operator, Parameter, Value

__all__ = ["ComputationGraph", "Operator", "Parameter", "Value"]
