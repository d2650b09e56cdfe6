"""Profiles: what each operator of a captured model costs on a device, measured and cached on disk."""

from graphpipe.profiler.measure import measure_profile

__all__ = ["measure_profile"]
