"""Planners: what is given to them, and the strategies that they find."""
