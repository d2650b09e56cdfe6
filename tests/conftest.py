"""Settings of all tests."""

import os

# What other runs left on this machine shall change nothing. Tests of the cache name a folder of their own.
os.environ["GRAPHPIPE_CACHE"] = "off"
