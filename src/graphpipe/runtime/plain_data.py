"""Writes the state of Python objects as JSON and tensors, so that reading it back cannot run code.

Optimizers, schedules, loaders and random generators keep numbers, lists, dictionaries, tensors. Each is written as
itself where JSON has it, else as a dictionary with one key that starts with ``$``. Tensors are put aside under a name.
"""

from __future__ import annotations

import base64
import math
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from graphpipe.errors import CheckpointError

_NUMBER_DTYPE = re.compile(r"bool|u?int(8|16|32|64)|float(16|32|64)|complex(64|128)")
_SCALAR_NAMES = frozenset(
    {"bool", "uint8", "int8", "int16", "int32", "int64", "bfloat16", "float16", "float32", "float64"}
)
_SCALAR_DTYPES = frozenset(getattr(torch, name) for name in _SCALAR_NAMES)
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def encode(value: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """Return a value as JSON data.

    Args:
        value: Plain data and tensors, nested in lists, tuples, sets and dictionaries.
        tensors: The tensors found are added here.
        name: What the value is called: the start of its tensors' names, and in errors. Single numbers among the tensors
            are written as numbers.

    Raises:
        CheckpointError: It holds an object of another type.
    """
    match value:
        case None | bool() | str():
            return value
        case float() if not math.isfinite(value):
            return {"$float": str(float(value))}
        case int() | float() if type(value) in (int, float):
            return value
        case bytes() | bytearray():
            return {"$bytes": base64.b64encode(value).decode()}
        case torch.dtype():
            return {"$dtype": str(value).removeprefix("torch.")}
        case Tensor() if value.dim() == 0 and value.dtype in _SCALAR_DTYPES:
            return {"$scalar": [str(value.dtype).removeprefix("torch."), encode(value.item(), tensors, name)]}
        case Tensor() if value.layout is not torch.strided:
            raise CheckpointError(f"{name} is a {value.layout} tensor, and only strided ones are saved")
        case Tensor():
            if name in tensors:  # Keys with dots in them, or numbers beside their text, give the same name twice.
                name = f"{name}#{len(tensors)}"
            tensors[name] = value.detach()
            return {"$tensor": name}
        case list():
            return _encode_items(value, tensors, name)
        case tuple():
            return {"$tuple": _encode_items(value, tensors, name)}
        case set() | frozenset():
            return {"$set": _encode_items(sorted(value), tensors, name)}
        case dict():
            # A dictionary with its keys beside its values keeps keys that are not text, and their order.
            pairs = [[encode(k, tensors, name), encode(v, tensors, f"{name}.{k}")] for k, v in value.items()]
            if isinstance(value, Counter):
                return {"$counter": pairs}
            if type(value) in (dict, OrderedDict, defaultdict):
                keys_are_text = all(isinstance(k, str) and not k.startswith("$") for k in value)
                return {str(key): entry for key, entry in pairs} if keys_are_text else {"$dict": pairs}
    if hasattr(value, "tolist") and hasattr(value, "dtype"):
        return _encode_array(value, tensors, name)
    raise CheckpointError(
        f"{name} is {type(value).__module__}.{type(value).__qualname__}, which cannot be saved so that loading it "
        "runs no code; let its state_dict return numbers, text, tensors, lists and dictionaries"
    )


def _encode_items(items: Any, tensors: dict[str, Tensor], name: str) -> list[Any]:
    return [encode(item, tensors, f"{name}.{i}") for i, item in enumerate(items)]


def _encode_array(array: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """Encode an array or a number of numpy."""
    if getattr(array, "shape", None) == ():
        return encode(array.item(), tensors, name)
    if not _NUMBER_DTYPE.fullmatch(str(array.dtype)):
        raise CheckpointError(f"{name} is an array of {array.dtype}, and only those of numbers can be saved")
    return {"$array": [str(array.dtype), encode(array.tolist(), tensors, name)]}


def decode(data: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that `encode` wrote.

    Raises:
        CheckpointError: The data was not written by `encode`.
    """
    match data:
        case None | bool() | str() | int() | float():
            return data
        case list():
            return [decode(item, tensors) for item in data]
        case {"$float": str(text)} if text in _FLOATS:
            return _FLOATS[text]
        case {"$bytes": str(text)}:
            return base64.b64decode(text)
        case {"$dtype": str(text)} if isinstance(getattr(torch, text, None), torch.dtype):
            return getattr(torch, text)
        case {"$scalar": [str(text), value]} if text in _SCALAR_NAMES:
            return torch.tensor(decode(value, tensors), dtype=getattr(torch, text))
        case {"$tensor": str(name)} if name in tensors:
            return tensors[name]
        case {"$tuple": list(items)}:
            return tuple(decode(item, tensors) for item in items)
        case {"$set": list(items)}:
            return {decode(item, tensors) for item in items}
        case {"$dict": list(pairs)}:
            return {decode(k, tensors): decode(v, tensors) for k, v in pairs}
        case {"$counter": list(pairs)}:
            return Counter({decode(k, tensors): decode(v, tensors) for k, v in pairs})
        case {"$array": [str(dtype), items]}:
            return _decode_array(dtype, decode(items, tensors))
        case dict() if not any(str(key).startswith("$") for key in data):
            return {key: decode(entry, tensors) for key, entry in data.items()}
    raise CheckpointError(f"the checkpoint holds {str(data)[:80]!r}, which is not a value that a checkpoint may hold")


def _decode_array(dtype: str, items: list[Any]) -> Any:
    import numpy as np

    # A name such as S99999999999 would have numpy ask for that much memory.
    if not _NUMBER_DTYPE.fullmatch(dtype):
        raise CheckpointError(f"the checkpoint holds an array of type {dtype[:40]!r}, which is not one of numbers")
    return np.array(items, dtype=np.dtype(dtype))
