"""Settings of all tests."""

import os

from hypothesis import settings

# What other runs left on this machine shall change nothing. Tests of the cache name a folder of their own.
os.environ["GRAPHPIPE_CACHE"] = "off"

# New examples in every run, also where the environment says that it is a CI's, and how to have a failing one again.
settings.register_profile("fresh", derandomize=False, print_blob=True)
settings.load_profile("fresh")
