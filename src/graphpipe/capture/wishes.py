"""What a user wants of the division into units, by the paths of modules."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from torch import fx, nn

from graphpipe.capture.export import MODEL
from graphpipe.capture.nodes import module_path
from graphpipe.errors import CaptureError


@dataclass(frozen=True)
class Wishes:
    """Modules to cut at, and modules not to cut.

    Attributes:
        split_points: No unit holds operations from inside and from outside of these modules.
        keep_whole: All operations of each of these modules are one unit.
    """

    split_points: tuple[str, ...] = ()
    keep_whole: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: nn.Module, split_points: Sequence[str], keep_whole: Sequence[str]) -> Wishes:
        """Return the wishes for a model.

        Raises:
            CaptureError: The model has no such module.
            TypeError: A path is given as a single string, not in a list.
        """
        known = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
        for option, paths in (("split_points", split_points), ("keep_whole", keep_whole)):
            if isinstance(paths, str):
                raise TypeError(f"{option} is a list of module paths, got the string {paths!r}; write [{paths!r}]")
            for path in paths:
                if path not in known:
                    near = get_close_matches(path, known, n=3)
                    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "see model.named_modules()"
                    raise CaptureError(f"{option} names {path!r}, which {type(model).__name__} lacks; {hint}")
        return cls(tuple(split_points), tuple(keep_whole))

    def whole(self, operations: Iterable[fx.Node]) -> Mapping[str, list[fx.Node]]:
        """Return the operations of each module to keep whole.

        Raises:
            CaptureError: A module has none.
        """
        listed = list(operations)
        found = {path: [node for node in listed if is_inside(node, path)] for path in self.keep_whole}
        for path in (*self.keep_whole, *self.split_points):
            if not any(is_inside(node, path) for node in listed):
                raise CaptureError(
                    f"{path!r} does nothing in the captured graph; name a module that computes something"
                )
        return found

    def side(self, nodes: Collection[fx.Node]) -> frozenset[tuple[str, ...]]:
        """Return for which split points some operations are inside, a tuple for each different answer."""
        return frozenset(tuple(path for path in self.split_points if is_inside(n, path)) for n in nodes)

    def check(self, units: Iterable[Sequence[fx.Node]]) -> None:
        """Check that no unit crosses a split point.

        Raises:
            CaptureError: One does, because its operations cannot be parted.
        """
        for nodes in units:
            sides = sorted(self.side(nodes))
            if len(sides) > 1:
                path = min(set(sides[0]) ^ set(sides[1]))
                inner = next(n for n in nodes if is_inside(n, path))
                outer = next(n for n in nodes if not is_inside(n, path))
                raise CaptureError(
                    f"the model cannot be split at {path!r}: {inner.name!r} inside of it and {outer.name!r} outside "
                    "belong together, since they share memory, mix samples, or are on a path that leaves a module that "
                    "is kept whole and comes back; split at a module around it"
                )


def is_inside(node: fx.Node, path: str) -> bool:
    """Return whether an operation is part of the module at a path."""
    own = module_path(node, MODEL)
    return own == path or own.startswith(f"{path}.")
