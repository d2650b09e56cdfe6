"""Trains a captured model by a strategy over torch.distributed."""
