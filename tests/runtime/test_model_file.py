from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import graphpipe as gp
from graphpipe.runtime.model_file import save_model


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    return model


def test_a_model_comes_back_with_tied_names_and_buffers(tmp_path: Path) -> None:
    saved, loaded = tied(), tied()
    saved[1].running_mean.fill_(3.0)
    save_model(saved.state_dict(), tmp_path / "model.safetensors")
    gp.load_model(loaded, tmp_path / "model.safetensors")
    assert all(torch.equal(found, saved.state_dict()[name]) for name, found in loaded.state_dict().items())
    assert loaded[2].weight is loaded[0].weight
    loaded.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    # Whoever may read other new files may read this one.
    (tmp_path / "other").touch()
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_another_model_and_a_damaged_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_model(tied().state_dict(), path)
    for model, why in (
        (nn.Linear(2, 2), "the model lacks it: '0.bias'"),
        (nn.Sequential(*tied(), nn.Linear(2, 2)), "the file lacks it: '3.bias'"),
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 3)), r"'2.bias' is .*\(2,\) in the file"),
        (tied().double(), "'0.bias' is torch.float32 .* and torch.float64"),
    ):
        with pytest.raises(gp.GraphPipeError, match=why):
            gp.load_model(model, path)
    path.write_bytes(path.read_bytes()[:-1])
    for damaged in (path, tmp_path / "absent"):
        with pytest.raises(gp.GraphPipeError, match="no model can be read"):
            gp.load_model(tied(), damaged)


def test_what_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    for state in ({"x": 1}, {"x": torch.ones(1, dtype=torch.complex128)}):
        with pytest.raises(gp.GraphPipeError):
            save_model(state, tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())
