"""What a model does for a batch, as a hash that another process finds again in a fraction of a capture's time.

No list of files and settings could be complete: a forward pass may read anything. So the model's own code runs, on
tensors without memory, and what it does is written down: every operation in order, with the memory that it reads and
writes and the numbers that it is given, in which module and under which modes. What would make a difference to a
capture makes one here, wherever it comes from.

A branch that is not taken for this batch leaves no trace, and a capture notices it where it depends on a size. So the
hash has in it the code of every function of the user that ran, the plain numbers and texts that this code names, and
those that modules and their configurations hold.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import gc
import hashlib
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules import module as module_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from graphpipe.capture.assignments import assignments_recorded
from graphpipe.capture.detectors import losses_noticed
from graphpipe.capture.export import LossFunction, Mode, ModelWithLoss, put_into, quiet
from graphpipe.capture.keeping import leaves_made
from graphpipe.capture.symbolic_builtins import symbolic_builtins

_LARGEST_CONSTANT_BYTES = 1 << 26
_CONTAINERS = (dict, list, set)
_CONTAINER_DEPTH = 3
_DEVICE_TYPES = ("cpu", "cuda")
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, enum.Enum, types.NoneType)
# The code in these folders belongs to versions, which are compared as such.
_VERSIONED = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *(str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<frozen "),
)


class IndescribableError(Exception):
    """What a model does cannot be told from what another one does."""


class Digest:
    """A hash of values one after another."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=20)

    def add(self, *parts: object) -> None:
        """Add texts and numbers."""
        self._hash.update(("\x1f".join(map(str, parts)) + "\x1e").encode("utf-8", "surrogatepass"))

    def text(self) -> str:
        """Return the hash of what was added."""
        return self._hash.hexdigest()


def behaviour(
    model: nn.Module,
    wrapper: ModelWithLoss,
    inputs: Mapping[str, tuple[torch.Size, Tensor]],
    loss_fn: LossFunction | None,
    mode: Mode,
) -> str:
    """Return a hash of what a model and its loss do.

    Nothing of the model is changed, and no random number is drawn.

    Args:
        model: The model.
        wrapper: The model with its loss.
        inputs: For each tensor of a flat batch, the shape to run it in, and the tensor.
        loss_fn: The loss.
        mode: What the model is to be captured for.

    Raises:
        Exception: Whatever the model's code raises; `IndescribableError` where it does what leaves no trace.
    """
    digest = Digest()
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = _Recorder(digest)
    with (
        put_into(mode, model),
        _without_memory(model, fake_mode) as fakes,
        leaves_made(model, {}, frozenset()) as leaves,
        losses_noticed(model, ()),
        assignments_recorded(model),
        symbolic_builtins(model, loss_fn),
        _export_announced(),
        quiet(),
    ):
        with fake_mode:
            given = [_empty(tensor, shape) for shape, tensor in inputs.values()]
        for name, tensor in zip((*fakes, *inputs), (*fakes.values(), *given), strict=True):
            digest.add(name, recorder.place(tensor))
        defining = {cls.__module__ for module in model.modules() for cls in type(module).__mro__}
        with _calls_told(model, digest), _code_seen(digest, defining), fake_mode, recorder:
            loss = wrapper(*given)
        digest.add("loss", recorder.place(loss))
        for path, buffer in model.named_buffers(remove_duplicate=False):
            digest.add("buffer", path, recorder.place(buffer))  # forward may have put another tensor there
    made = recorder.made
    del recorder, given, loss
    _forget(made)
    if leaves:
        raise IndescribableError(f"{leaves[0]} has code that runs in backward")
    return digest.text()


def _forget(made: Sequence[weakref.ref[Tensor]]) -> None:
    """Take tensors without memory out of what the model's code keeps for later, as a table that it makes once."""
    if all(reference() is None for reference in made):
        return
    gc.collect()
    kept: list[Any] = [tensor for reference in made if (tensor := reference()) is not None]
    for _ in range(_CONTAINER_DEPTH):
        identities = {id(value) for value in kept}
        holders = [holder for holder in gc.get_referrers(*kept) if holder is not kept] if kept else []
        kept = [holder for holder in holders if isinstance(holder, tuple)]
        for holder in holders:
            if isinstance(holder, dict):
                for key in [key for key, value in holder.items() if id(value) in identities]:
                    del holder[key]
            elif isinstance(holder, list):
                holder[:] = [value for value in holder if id(value) not in identities]
            elif isinstance(holder, functools._lru_cache_wrapper):
                holder.cache_clear()


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds every operation to a digest. A tensor is told by its memory and its view of it."""

    def __init__(self, digest: Digest) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._digest = digest
        self._numbers: dict[int, int] = {}
        self._alive: list[Tensor] = []
        self.made: list[weakref.ref[Tensor]] = []
        self._contents: dict[str, str] = {}

    def __torch_dispatch__(
        self, func: Any, _: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        casts = [torch.get_autocast_dtype(d) for d in _DEVICE_TYPES if torch.is_autocast_enabled(d)]
        self._digest.add(func, self._told((args, kwargs)), torch.is_grad_enabled(), casts)
        watching = sys.gettrace()
        sys.settrace(None)  # What runs from here is torch.
        try:
            result = func(*args, **kwargs)
        finally:
            sys.settrace(watching)
        self._digest.add(self._told(result))
        self.made += [weakref.ref(leaf) for leaf in pytree.tree_leaves(result) if isinstance(leaf, FakeTensor)]
        return result

    def place(self, tensor: Tensor) -> str:
        """Return what tells a tensor from others; for one with values that is these."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers)
            self._alive.append(tensor)  # An identity may be used again after its owner is gone.
        layout = f"{tensor.storage_offset()} {tuple(tensor.shape)} {tensor.stride()} {tensor.dtype} {tensor.device}"
        view = f"{self._numbers[key]}+{layout}"
        if isinstance(tensor, FakeTensor):
            return view
        if view not in self._contents:
            self._contents[view] = content(tensor)
        return f"{view} {self._contents[view]}"

    def _told(self, value: Any) -> str:
        if isinstance(value, Tensor):
            return self.place(value)
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self._told, value))}]"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key}: {self._told(entry)}" for key, entry in value.items()) + "}"
        if isinstance(value, (*_PLAIN, torch.layout, torch.memory_format)):
            return repr(value)
        raise IndescribableError(f"an operation is given {type(value).__name__}")


def content(tensor: Tensor) -> str:
    """Return a hash of the values of a tensor.

    Raises:
        IndescribableError: It is too large.
    """
    if tensor.is_meta:
        return "none"
    if tensor.numel() * tensor.element_size() > _LARGEST_CONSTANT_BYTES:
        raise IndescribableError(f"a tensor of shape {list(tensor.shape)} is too large to compare")
    with _disable_current_modes():
        plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return hashlib.blake2b(plain.numpy().tobytes(), digest_size=20).hexdigest()


def _empty(tensor: Tensor, shape: torch.Size) -> Tensor:
    device = "cpu" if tensor.is_meta else tensor.device
    if shape == tensor.shape:
        return torch.empty_strided(shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return torch.empty(shape, dtype=tensor.dtype, device=device)


@contextlib.contextmanager
def _without_memory(model: nn.Module, mode: FakeTensorMode) -> Iterator[dict[str, Tensor]]:
    """Put tensors without memory in the place of a model's own for the block; after it, every attribute is as before.

    Yields:
        The tensors by name.
    """
    # A first pass may register hooks, and note that it did.
    before = [(module, dict(vars(module))) for module in model.modules()]
    containers = [value for _, own in before for value in own.values() if isinstance(value, _CONTAINERS)]
    entries = [copy.copy(container) for container in containers]
    fakes: dict[int, Tensor] = {}
    named: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        for kind in ("_parameters", "_buffers"):
            own: dict[str, Tensor | None] = {}
            for name, tensor in vars(module)[kind].items():
                if tensor is not None and id(tensor) not in fakes:
                    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
                        raise IndescribableError(f"{path}.{name} is a {type(tensor).__name__}")
                    with mode:
                        fake = _empty(tensor, tensor.shape)
                        fakes[id(tensor)] = (
                            nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
                        )
                own[name] = None if tensor is None else fakes[id(tensor)]
                if tensor is not None:
                    named[f"{path}.{name}"] = fakes[id(tensor)]
            vars(module)[kind] = own
        vars(module)["_modules"] = dict(vars(module)["_modules"])
    try:
        yield named
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)
        for container, entry in zip(containers, entries, strict=True):
            if isinstance(container, list):
                container[:] = entry
            else:
                container.clear()
                container.update(entry)


@contextlib.contextmanager
def _export_announced() -> Iterator[None]:
    """Let code that does something else while it is exported do so in the block."""
    flags = ("_is_compiling_flag", "_is_exporting_flag")
    before = {flag: getattr(torch.compiler, flag) for flag in flags}
    for flag in flags:
        setattr(torch.compiler, flag, True)
    try:
        yield
    finally:
        for flag, value in before.items():
            setattr(torch.compiler, flag, value)


@contextlib.contextmanager
def _calls_told(model: nn.Module, digest: Digest) -> Iterator[None]:
    """Add to the digest which modules run in the block."""
    paths = {id(module): path for path, module in model.named_modules()}
    enter = module_hooks.register_module_forward_pre_hook(
        lambda module, _: digest.add("enter", paths.get(id(module)), type(module).__qualname__)
    )
    leave = module_hooks.register_module_forward_hook(lambda *_: digest.add("leave"), always_call=True)
    try:
        yield
    finally:
        enter.remove()
        leave.remove()


@contextlib.contextmanager
def _code_seen(digest: Digest, defining: Collection[str]) -> Iterator[None]:
    """Add to the digest what functions run in the block, and what plain values they name.

    Of installed packages only the modules are meant that define the model's classes: what else runs in them differs
    between the first pass and later ones. Their versions are added.
    """
    seen: dict[int, tuple[types.CodeType, Mapping[str, Any], Mapping[str, Any]]] = {}

    def on_call(frame: types.FrameType, _: str, __: Any) -> None:
        code = frame.f_code
        if id(code) in seen:
            return
        name = frame.f_globals.get("__name__", "")
        if not code.co_filename.startswith(_VERSIONED) or (name in defining and not name.startswith("torch.")):
            cells = {name: frame.f_locals.get(name) for name in code.co_freevars} if code.co_freevars else {}
            seen[id(code)] = (code, frame.f_globals, cells)

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield
    finally:
        sys.settrace(before)
    packages = {name.partition(".")[0] for name in defining} & sys.modules.keys()
    digest.add(*(f"{name} {getattr(sys.modules[name], '__version__', '')}" for name in sorted(packages)))
    found = set()
    for code, space, cells in seen.values():
        parts = [code_digest(code), *(f"{name}={_plain(value)}" for name, value in sorted(cells.items()))]
        for name in sorted(_names(code)):
            if name in space:
                parts.append(f"{name}={_plain(space[name])}")
        found.add(" ".join(parts))
    digest.add(*sorted(found))


def code_digest(code: types.CodeType) -> str:
    """Return a hash of what a function does, which where it stands in its file is no part of."""
    constants = [code_digest(c) if isinstance(c, types.CodeType) else _constant(c) for c in code.co_consts]
    parts = (code.co_name, code.co_code.hex(), constants, code.co_names, code.co_varnames, code.co_freevars)
    return hashlib.blake2b(repr(parts).encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()


def _constant(value: Any) -> str:
    # The order of a set differs from process to process.
    return f"set {sorted(map(repr, value))}" if isinstance(value, frozenset) else repr(value)


def _names(code: types.CodeType) -> set[str]:
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _plain(value: Any, depth: int = 3) -> str:
    """A plain value as text, or the plain ones in a collection, so many levels deep; an empty text for others."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if not isinstance(value, list | tuple | dict | set | frozenset) or not depth:
        return ""
    entries = value.items() if isinstance(value, dict) else value
    found = [_plain(entry, depth - 1) for entry in entries]
    return str(sorted(found) if isinstance(value, set | frozenset) else found)


def settings(model: nn.Module) -> str:
    """Return a hash of the plain values that the modules of a model hold, and the objects in them, as configurations.

    Values of other kinds are none of its concern.
    """
    digest = Digest()
    known: set[int] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        digest.add(path, f"{type(module).__module__}.{type(module).__qualname__}")
        if id(module) not in known:
            known.add(id(module))
            _add_attributes(digest, vars(module), known)
    return digest.text()


def _add_attributes(digest: Digest, attributes: Mapping[str, Any], known: set[int]) -> None:
    for name, value in sorted(attributes.items()):
        if isinstance(value, Tensor | nn.Module | type | Callable) or name in ("_modules", "_parameters", "_buffers"):
            continue
        if _plain(value):
            digest.add(name, _plain(value))
        elif hasattr(value, "__dict__") and id(value) not in known:
            known.add(id(value))
            digest.add(name, type(value).__qualname__)
            _add_attributes(digest, vars(value), known)
