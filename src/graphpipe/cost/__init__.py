"""Seconds and bytes: profiles, the roofline, collectives, and the cost model made of them."""

from graphpipe.cost.model import ADAM, MOMENTUM, SGD, CostModel, MemoryParts, OptimizerCost
from graphpipe.cost.profile import OperatorCosts, Profile, ProfileSource
from graphpipe.cost.roofline import DEVICE_KINDS, DeviceKind, roofline_profile

__all__ = [
    "ADAM",
    "DEVICE_KINDS",
    "MOMENTUM",
    "SGD",
    "CostModel",
    "DeviceKind",
    "MemoryParts",
    "OperatorCosts",
    "OptimizerCost",
    "Profile",
    "ProfileSource",
    "roofline_profile",
]
