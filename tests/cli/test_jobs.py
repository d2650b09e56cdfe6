from __future__ import annotations

import torch

from graphpipe.cli.jobs import tile


def test_samples_are_repeated_and_what_is_not_per_sample_is_kept() -> None:
    batch = {"x": torch.arange(4), "y": [torch.arange(8).reshape(4, 2)], "table": torch.zeros(3, 2), "flag": True}
    found = tile(batch, 6)
    assert found["x"].tolist() == [0, 1, 2, 3, 0, 1]
    assert found["y"][0].shape == (6, 2)
    assert found["table"].shape == (3, 2)
    assert found["flag"] is True
    assert tile(batch, 2)["x"].tolist() == [0, 1]
