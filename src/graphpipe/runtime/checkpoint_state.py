"""What a rank's part of a checkpoint holds, and how a rank takes it up again, whatever the plan was.

Tensors have names that do not depend on the plan: ``model.<name>`` for parameters and buffers,
``optim.<state>.<name>`` for what the optimizer keeps for a parameter. Everything else is a rank's own record.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from graphpipe.errors import CheckpointError
from graphpipe.runtime.plain_data import decode, encode

_NOT_OPTIONS = ("params", "param_names")


class Stateful(Protocol):
    """An object whose state can be saved, as torch's schedules and loaders are."""

    def state_dict(self) -> dict[str, Any]:
        """Return numbers, text and tensors, in lists and dictionaries."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Take up what `state_dict` returned."""
        ...


@dataclass(frozen=True)
class RankState:
    """A rank's part of a checkpoint.

    Attributes:
        tensors: By their names in the checkpoint. Ranks that hold the same tensor use the same name.
        record: The rest, as JSON data.
    """

    tensors: dict[str, Tensor]
    record: dict[str, Any]

    def snapshot(self) -> RankState:
        """Return a copy that later steps don't change."""
        return RankState({name: t.detach().cpu().clone() for name, t in self.tensors.items()}, self.record)


def storable(tensor: Tensor) -> Tensor:
    """Return a tensor as safetensors takes it: contiguous, and complex numbers of 128 bits as pairs."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor.resolve_conj()).contiguous() if tensor.is_complex() else tensor.contiguous()


def layout_of(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Return the type and shape of tensors as JSON data."""
    return {n: [str(t.dtype).removeprefix("torch."), *t.shape] for n, t in tensors.items()}


# ---- optimizers


def save_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """Return an optimizer's record, and add its tensors.

    Args:
        optimizer: Of this rank.
        names: The original name of each parameter by its identity.
        tensors: The state of the parameters is added here.
    """
    aside: dict[str, Tensor] = {}
    groups = [
        {
            "options": encode({k: v for k, v in group.items() if k not in _NOT_OPTIONS}, aside, "options"),
            "parameters": parameters,
        }
        for group, parameters in zip(optimizer.param_groups, parameters_by_group(optimizer, names), strict=True)
    ]
    values: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        name = names[id(parameter)]
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"optim.{key}.{name}"] = value.detach()
            else:
                values.setdefault(name, {})[key] = encode(value, aside, f"{key} of {name}")
    if aside:
        raise CheckpointError(
            f"the optimizer keeps a tensor inside its {min(aside)}, which cannot be saved; only tensors and "
            "numbers by parameter can"
        )
    return {"type": type(optimizer).__name__, "groups": groups, "values": values}


def prepare_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    records: Sequence[Mapping[str, Any]],
    layout: Mapping[str, Sequence[Any]],
) -> dict[str, Tensor]:
    """Give an optimizer the options and the states of a checkpoint, and return the tensors that are still to be filled.

    Args:
        optimizer: Of this rank, under any plan.
        names: The original name of each parameter by its identity.
        records: What `save_optimizer` returned on each rank that had an optimizer.
        layout: The type and shape of the checkpoint's tensors.

    Raises:
        CheckpointError: The optimizer is another one than the checkpoint's.
    """
    kinds = {record["type"] for record in records}
    if kinds and kinds != {type(optimizer).__name__}:
        raise CheckpointError(
            f"the checkpoint was written with {' and '.join(sorted(kinds))}, this job has {type(optimizer).__name__}; "
            "use the same optimizer, or begin with the exported model"
        )
    options = {name: g["options"] for record in records for g in record["groups"] for name in g["parameters"]}
    values = {name: entries for record in records for name, entries in record["values"].items()}
    states: dict[str, dict[str, str]] = {}
    for full_name in layout:
        kind, _, rest = full_name.partition(".")
        key, _, name = rest.partition(".")
        if kind == "optim":
            states.setdefault(name, {})[key] = full_name
    own = parameters_by_group(optimizer, names)
    for mine in own:
        for name in mine:
            if name not in options:
                raise CheckpointError(
                    f"the checkpoint has no optimizer options for {name!r}, which this job trains; it was frozen then"
                )
            if options[name] != options[mine[0]]:
                raise CheckpointError(
                    f"{mine[0]!r} and {name!r} are in one parameter group here, and had different options in the "
                    "checkpoint; make the same parameter groups"
                )
    targets: dict[str, Tensor] = {}
    optimizer.state.clear()
    for group, mine in zip(optimizer.param_groups, own, strict=True):
        for key, value in (decode(options[mine[0]], {}) if mine else {}).items():
            if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                group[key].fill_(value)  # What is compiled reads it there.
            else:
                group[key] = value
        for parameter, name in zip(group["params"], mine, strict=True):
            state: dict[str, Any] = {key: decode(value, {}) for key, value in values.get(name, {}).items()}
            for key, full_name in states.get(name, {}).items():
                on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
                state[key] = empty_tensor(layout[full_name], None if on_host else parameter.device)
                targets[full_name] = state[key]
            if state:
                optimizer.state[parameter] = state
    return targets


def empty_tensor(layout: Sequence[Any], device: torch.device | None = None) -> Tensor:
    """Return a tensor of a type and shape as `layout_of` gives them."""
    dtype, *shape = layout
    return torch.empty(shape, dtype=getattr(torch, dtype), device=device)


def parameters_by_group(optimizer: torch.optim.Optimizer | None, names: Mapping[int, str]) -> list[list[str]]:
    """Return the original names of the parameters of each group of an optimizer."""
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups] if optimizer else []


def fit_schedule(
    new: Any, own: Sequence[Sequence[str]], saved: Sequence[Any], groups: Sequence[Sequence[Sequence[str]]]
) -> Any:
    """Return the state of a learning-rate schedule for a rank whose parameter groups may be others than those saved.

    A schedule keeps lists with an entry for each group of its rank's optimizer, such as learning rates. A group takes
    its entry from a group that had its first parameter; one without parameters takes that of the same number.

    Args:
        new: The state of this rank's schedule, which has just been made.
        own: The parameters of each group of this rank's optimizer.
        saved: The state of the schedule of every rank that had one, this rank's own first.
        groups: The parameters of each group of theirs.
    """

    def home(number: int, names: Sequence[str]) -> tuple[int, int] | None:
        if not names:
            return (0, number) if len(groups[0]) == len(own) else None
        return next((r, g) for r, theirs in enumerate(groups) for g, there in enumerate(theirs) if names[0] in there)

    homes = [home(number, names) for number, names in enumerate(own)]

    def fitted(new: Any, values: Sequence[Any]) -> Any:
        first = values[0]
        if isinstance(first, dict) and all(isinstance(value, dict) for value in (new, *values)):
            return {
                key: fitted(new[key], [v[key] for v in values])
                if key in new and all(key in v for v in values)
                else first[key]
                for key in first
            }
        if not isinstance(first, list) or all(value == first for value in (new, *values)):
            return first
        counts = zip((new, *values), (own, *groups), strict=True)
        if all(isinstance(value, list) and len(value) == len(of) for value, of in counts) and not _holds_schedules(new):
            return [
                kept if found is None else values[found[0]][found[1]] for kept, found in zip(new, homes, strict=True)
            ]
        if all(isinstance(value, list) and len(value) == len(first) for value in (new, *values)):
            return [fitted(*item) for item in zip(new, zip(*values, strict=True), strict=True)]
        return first

    return fitted(new, saved)


def _holds_schedules(states: Sequence[Any]) -> bool:
    """Return whether a list is that of the schedules that another one is made of, each with its own lists."""
    return any(isinstance(state, dict) and "base_lrs" in state for state in states)


# ---- random generators


def random_state() -> dict[str, Any]:
    """Return the state of the random generators of torch, Python and numpy."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Take up what `random_state` returned."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state:
        import numpy as np

        np.random.set_state(state["numpy"])  # noqa: NPY002 - The user's code may draw from it.


# ---- the model


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model, each under its first name."""
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def check_layout(found: Mapping[str, Sequence[Any]], expected: Mapping[str, Sequence[Any]], step: int) -> None:
    """Check that the tensors of a checkpoint's model are those of this model.

    Raises:
        CheckpointError: One is missing or different.
    """
    for name in (*expected, *found):
        if name in found and name in expected and list(found[name]) == list(expected[name]):
            continue
        there = _describe(found[name]) if name in found else "missing"
        here = _describe(expected[name]) if name in expected else "missing"
        raise CheckpointError(
            f"the checkpoint of step {step} is of another model: {name.removeprefix('model.')!r} is {there} there and "
            f"{here} here; build the model that was saved, or name an empty folder"
        )


def _describe(layout: Sequence[Any]) -> str:
    dtype, *shape = layout
    return f"{dtype} of shape {tuple(shape)}"
