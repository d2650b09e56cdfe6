"""A model as one file of safetensors, which cannot run code when it is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from graphpipe.errors import GraphPipeError
from graphpipe.files import replacing


def save_model(state: Mapping[str, Any], path: str | Path) -> None:
    """Write a model's ``state_dict()`` to a file, which is there only once it is whole.

    The file holds every name, those of tied parameters too, so that the model loads it with ``strict=True``.

    Raises:
        GraphPipeError: An entry is not a tensor, or the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path = Path(path)
    for name, entry in state.items():
        if not isinstance(entry, Tensor):
            raise GraphPipeError(
                f"{name!r} of the model's state_dict is {type(entry).__name__}; only tensors are saved"
            )
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, entry in state.items():
        # safetensors takes no two tensors that share memory, and no part of a larger one.
        memory = entry.untyped_storage()
        is_alone = memory.data_ptr() not in seen and memory.nbytes() == entry.nbytes and entry.is_contiguous()
        seen.add(memory.data_ptr())
        copied = entry.detach().cpu()
        tensors[name] = copied if is_alone else copied.clone(memory_format=torch.contiguous_format)
    with replacing(path) as draft:
        try:
            # safetensors makes files that their owner alone may read.
            draft.touch()
            mode = draft.stat().st_mode
            save_file(tensors, draft)
            draft.chmod(mode)
        except (SafetensorError, KeyError) as error:
            raise GraphPipeError(f"the model could not be written to {str(path)!r}: {error}") from error


def load_model(model: nn.Module, path: str | Path) -> None:
    """Give a model the parameters and buffers of a file that `Pipeline.save_model` or ``graphpipe train --save`` wrote.

    Any safetensors file with the names of the model's ``state_dict()`` will do. Call it on every rank, before the
    pipeline is made.

    Args:
        model: Its parameters and buffers are changed in place.
        path: The file.

    Raises:
        GraphPipeError: The file is missing or damaged, or has other names, shapes or types than the model.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise GraphPipeError(f"no model can be read from {str(path)!r}: {error}") from error
    expected = model.state_dict()
    for name in sorted(found.keys() ^ expected.keys()):
        where = "the model lacks it" if name in found else "the file lacks it"
        raise GraphPipeError(f"{str(path)!r} is of another model: {where}: {name!r}; build the model that was saved")
    for name, tensor in found.items():
        if (tensor.shape, tensor.dtype) != (expected[name].shape, expected[name].dtype):
            raise GraphPipeError(
                f"{str(path)!r} is of another model: {name!r} is {tensor.dtype} of shape {tuple(tensor.shape)} in the "
                f"file and {expected[name].dtype} of shape {tuple(expected[name].shape)} in the model"
            )
    model.load_state_dict(found, strict=True)
