"""Values for the parameters of a model that was built without any, on the meta device: each rank makes its own.

A rank gives memory only to the tensors that its stages hold. What a tensor gets does not depend on the strategy or on
the number of processes: every random draw comes from a stream that is named by seed and tensor.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from graphpipe.errors import GraphPipeError
from graphpipe.runtime.checkpoint_folder import MANIFEST

_MODEL = "model."  # What checkpoints put before the names of the model's tensors.

FillFunction = Callable[[str, Tensor], None]


@dataclass(frozen=True)
class FromSeed:
    """Initialise parameters as their modules do, the same ones whatever the strategy.

    The modules' own ``reset_parameters`` is called (or ``_reset_parameters``, as torch's Transformers name it), inner
    modules first, and ``_init_weights`` of Hugging Face's models after it. So distributions are those of the model
    built in memory; the numbers differ, since there every draw depends on all draws before it.

    Attributes:
        seed: Any integer.
        rest: Fills a tensor that no module initialises, such as a bare ``nn.Parameter``; called with its name.
    """

    seed: int
    rest: FillFunction | None = None


@dataclass(frozen=True)
class FromSafetensors:
    """Read parameters from a safetensors file, or from a folder of them: a sharded model or a GraphPipe checkpoint.

    A rank reads only the tensors that its stages hold. Buffers that are not in the files, because the model does not
    save them, are made by their modules as `FromSeed` does.

    Attributes:
        path: A file, or a folder.
        rest: Fills a buffer that is neither in the files nor made by its module.
    """

    path: str | Path
    rest: FillFunction | None = None


Init = FromSeed | FromSafetensors | FillFunction
"""Where parameters get their values; a function is called with each name and tensor and fills the tensor in place."""


def fill_own(model: nn.Module, own: Mapping[str, Tensor], init: Init) -> dict[int, Tensor]:
    """Give memory and values to some tensors of a model that are on the meta device. All others stay without memory.

    The tensors take their places in the model, tied ones in all of their places.

    Args:
        model: The model.
        own: The tensors by name.
        init: Where the values come from.

    Returns:
        The new tensor for the identity of each old one.

    Raises:
        GraphPipeError: A tensor gets no value, or one of another shape, or a file cannot be read.
    """
    names = {id(tensor): name for name, tensor in own.items() if tensor.is_meta}
    places = _places(model, names)
    made: dict[str, Tensor] = {}
    for key, spots in places.items():
        space, leaf = spots[0]
        empty = torch.empty_like(space[leaf], device="cpu")
        new: Tensor = nn.Parameter(empty, space[leaf].requires_grad) if isinstance(space[leaf], nn.Parameter) else empty
        made[names[key]] = new
        for space, leaf in spots:
            space[leaf] = new
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        _fill(model, made, init)
    found = {}
    for key, spots in places.items():
        space, leaf = spots[0]
        # A module may have put a new buffer into the place of the empty one.
        for other, other_leaf in spots[1:]:
            other[other_leaf] = space[leaf]
        found[key] = space[leaf]
    return found


def _places(model: nn.Module, names: Mapping[int, str]) -> dict[int, list[tuple[dict[str, Any], str]]]:
    """The dictionaries of modules, and the keys in them, that hold each tensor."""
    found: dict[int, list[tuple[dict[str, Any], str]]] = {}
    space: dict[str, Any]
    for module in model.modules():
        for space in (module._parameters, module._buffers):
            for leaf, tensor in space.items():
                if id(tensor) in names:
                    found.setdefault(id(tensor), []).append((space, leaf))
    return found


def _fill(model: nn.Module, made: Mapping[str, Tensor], init: Init) -> None:
    buffers = {name for name, tensor in made.items() if not isinstance(tensor, nn.Parameter)}
    match init:
        case FromSeed(seed, rest):
            _reset(model, made, seed, rest)
        case FromSafetensors(path, rest):
            missing = _read(Path(path), made, _aliases(model, made))
            lost = sorted(missing - buffers)
            if lost:
                raise GraphPipeError(_missing(lost, Path(path)))
            _reset(model, {name: made[name] for name in missing}, 0, rest)
        case _:
            draws = _NamedDraws(made, 0)
            for name in made:
                if name not in buffers:
                    draws.fill(name, made[name], init)
            _reset(model, {name: made[name] for name in buffers}, 0, init)


def _missing(names: list[str], path: Path) -> str:
    stored = _files_of(path)
    near = get_close_matches(names[0], stored, n=1)
    hint = f"; the nearest name there is {near[0]!r}" if near else ""
    return f"{len(names)} parameters are not in {str(path)!r}, the first is {names[0]!r}{hint}"


# ---- From a seed -----------------------------------------------------------------------------------------------------


def _reset(model: nn.Module, made: Mapping[str, Tensor], seed: int, rest: FillFunction | None) -> None:
    """Let modules initialise their tensors, and `rest` those that none does."""
    wanted = {id(tensor): name for name, tensor in made.items()}
    if not wanted:
        return
    draws = _NamedDraws(made, seed)
    modules = list(model.named_modules())
    with draws:
        for path, module in reversed(modules):
            reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if callable(reset) and _holds(module, wanted):
                draws.begin(path, module)
                reset()
        for path, module in reversed(modules):
            initialise = _enclosing(model, path, "_init_weights")
            if initialise is not None and _holds(module, wanted):
                draws.begin(path, module)
                initialise(module)
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    left = [n for n, t in made.items() if n not in draws.written and named.get(n, t) is t and t.numel()]
    if rest is None and left:
        owner = model.get_submodule(left[0].rpartition(".")[0])
        raise GraphPipeError(
            f"{left[0]!r} of a {type(owner).__name__} is on the meta device and no reset_parameters gives it values "
            f"({len(left)} such tensors); pass FromSeed(seed, rest=function), where function(name, tensor) fills it, "
            "or build it outside of the meta device"
        )
    for name in left:
        assert rest is not None
        draws.fill(name, made[name], rest)


def _holds(module: nn.Module, wanted: Mapping[int, str]) -> bool:
    return any(id(tensor) in wanted for tensor in _tensors(module))


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _enclosing(model: nn.Module, path: str, method: str) -> Callable[[nn.Module], None] | None:
    """Return the method of the innermost module around a path that has it."""
    parts = path.split(".") if path else []
    for end in range(len(parts), -1, -1):
        found = getattr(model.get_submodule(".".join(parts[:end])), method, None)
        if callable(found):
            return found  # type: ignore[no-any-return]
    return None


def _seed(seed: int, *names: object) -> int:
    text = json.dumps([seed, *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") - 2**63


class _NamedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives every random operation in place on a tensor of the model a stream of its own, and notes what is written.

    Args:
        made: The tensors by name.
        seed: Of all streams.
    """

    def __init__(self, made: Mapping[str, Tensor], seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: set[str] = set()
        self._names = {t.untyped_storage().data_ptr(): name for name, t in made.items() if t.numel()}
        self._seed = seed
        self._count: dict[str, int] = {}
        self._path = ""
        self._has_all = True

    def begin(self, path: str, module: nn.Module) -> None:
        """Note which module initialises itself next."""
        self._path = path
        self._has_all = not any(tensor.is_meta for tensor in _tensors(module))
        torch.manual_seed(_seed(self._seed, "module", path))

    def fill(self, name: str, tensor: Tensor, function: FillFunction) -> None:
        """Call a function of the user for one tensor.

        Raises:
            GraphPipeError: It leaves the tensor alone.
        """
        torch.manual_seed(_seed(self._seed, name))
        with self:
            function(name, tensor)
        if name not in self.written and tensor.numel():
            raise GraphPipeError(
                f"the init function left {name!r} without values; it must fill every tensor that it gets in place, "
                "such as tensor.normal_(std=0.02)"
            )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args and isinstance(args[0], Tensor) else None
        is_write = bool(func._schema.arguments) and _is_written(func._schema.arguments[0])
        name = None
        if target is not None and is_write and not target.is_meta and target.numel():
            name = self._names.get(target.untyped_storage().data_ptr())
        if name is not None:
            self.written.add(name)
        if torch.Tag.nondeterministic_seeded not in func.tags or (target is not None and target.is_meta):
            return func(*args, **kwargs)
        if name is None:
            if not self._has_all:
                raise GraphPipeError(
                    f"the initialisation of {self._path or 'the model'!r} draws numbers into a tensor of its own "
                    f"({func}), so they would depend on the strategy; pass init=function, where function(name, tensor) "
                    "fills a tensor in place"
                )
            return func(*args, **kwargs)
        state = torch.get_rng_state()
        self._count[name] = self._count.get(name, 0) + 1
        torch.manual_seed(_seed(self._seed, name, self._count[name]))
        result = func(*args, **kwargs)
        torch.set_rng_state(state)
        return result


def _is_written(argument: Any) -> bool:
    return bool(argument.alias_info is not None and argument.alias_info.is_write)


# ---- From files ------------------------------------------------------------------------------------------------------


def _files_of(path: Path) -> dict[str, tuple[Path, str]]:
    """The file that holds each tensor, and the tensor's name in it, which a checkpoint starts with ``model.``.

    Raises:
        GraphPipeError: There are no safetensors there.
    """
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise GraphPipeError(f"there is no safetensors file at {str(path)!r}; of a checkpoint, name one of its steps")
    is_checkpoint = (path / MANIFEST).is_file()
    found: dict[str, tuple[Path, str]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118
                    if is_checkpoint and not key.startswith(_MODEL):
                        continue
                    found[key.removeprefix(_MODEL) if is_checkpoint else key] = (file, key)
        except (SafetensorError, OSError) as error:
            raise GraphPipeError(f"{str(file)!r} cannot be read: {error}") from error
    return found


def _aliases(model: nn.Module, made: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """All names of each tensor: of tied ones, a file may have any."""
    name_of = {id(tensor): name for name, tensor in made.items()}
    found: dict[str, list[str]] = {name: [name] for name in made}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        if id(tensor) in name_of:
            found[name_of[id(tensor)]].append(name)
    return found


def _read(path: Path, made: Mapping[str, Tensor], aliases: Mapping[str, list[str]]) -> set[str]:
    """Read tensors and return the names of those that the files lack."""
    stored = _files_of(path)
    by_file: dict[Path, list[tuple[str, str]]] = {}
    found = set()
    for name in made:
        known = [alias for alias in aliases[name] if alias in stored]
        if known:
            file, key = stored[known[0]]
            by_file.setdefault(file, []).append((name, key))
            found.add(name)
    for file, pairs in by_file.items():
        with safe_open(file, framework="pt") as opened:
            for name, key in pairs:
                shape = tuple(opened.get_slice(key).get_shape())
                if shape != tuple(made[name].shape):
                    raise GraphPipeError(
                        f"{name!r} has the shape {list(made[name].shape)} in the model and {list(shape)} in "
                        f"{str(file)!r}; the file is of another model"
                    )
                made[name].copy_(opened.get_tensor(key))
    return set(made) - found
