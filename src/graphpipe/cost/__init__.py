"""Seconds and bytes: profiles, the roofline, collectives, and the cost model made of them."""

from graphpipe.cost.model import ADAM, MOMENTUM, SGD, CostModel, MemoryParts, OptimizerCost
from graphpipe.cost.profile import OperatorCosts, Profile, ProfileSource

__all__ = [
    "ADAM",
    "MOMENTUM",
    "SGD",
    "CostModel",
    "MemoryParts",
    "OperatorCosts",
    "OptimizerCost",
    "Profile",
    "ProfileSource",
]
