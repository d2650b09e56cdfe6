"""Measured costs of a captured model's operators on a device."""

from graphpipe.profiler.measure import measure_profile

__all__ = ["measure_profile"]
