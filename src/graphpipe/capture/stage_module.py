"""The part of a model that one stage runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.func import functional_call

from graphpipe.capture.autocast import Autocast
from graphpipe.capture.draws import Draws, repeatable, seeded
from graphpipe.capture.evaluate import evaluate
from graphpipe.capture.export import Mode
from graphpipe.capture.filling import check_places
from graphpipe.capture.keeping import leaf_of, own_arguments, run_leaf
from graphpipe.capture.leaves import ModuleLeaf
from graphpipe.capture.losses import check_targets
from graphpipe.capture.nodes import argument_of, attribute_of, is_size, value_of, written_by
from graphpipe.capture.sizes import size_expression
from graphpipe.capture.training_graph import AttributeKind, FreeSize, TrainingGraph


class StageModule(nn.Module):
    """The part of a model that one stage runs, with the model's own parameters under their original names.

    Parameters and buffers are the model's own objects, not copies; ``copy.deepcopy`` and ``to`` work as for any module.
    Its mode is that of the capture, since a model may do anything else in the other one.

    Attributes:
        mode: What the model was captured for.
        input_names: The model inputs and values that `forward` reads.
        output_names: The values that `forward` gives to other stages, and the loss if the stage computes it.
    """

    def __init__(
        self,
        program: fx.GraphModule,
        attributes: Sequence[tuple[AttributeKind, str, Tensor]],
        sizes: Sequence[sympy.Basic],
        symbols: frozenset[sympy.Symbol],
        free_sizes: Mapping[sympy.Symbol, FreeSize],
        input_names: tuple[str, ...],
        output_names: tuple[str, ...],
        autocast: Autocast,
        leaves: Sequence[ModuleLeaf],
        written: frozenset[str],
        mode: Mode,
    ) -> None:
        super().__init__()
        # An input may be read for its size alone.
        self.input_names = tuple(dict.fromkeys((*input_names, *(size.input for size in free_sizes.values()))))
        self._num_read = len(input_names)
        self._free_sizes = dict(free_sizes)
        self.output_names = output_names
        self._autocast = autocast
        self._written = written
        # A plain list keeps the program, which has no state, out of the module tree: the tree has original names only.
        self._program: list[Callable[..., Any]] = [program]
        self._constants: dict[str, Tensor] = {}
        self._owners: list[tuple[nn.Module | None, str]] = []
        for kind, name, tensor in attributes:
            self._owners.append(self._register(kind, name, tensor))
        self._sizes = tuple(sizes)
        self._symbols = symbols
        # A plain list, so that modules which are kept whole, and hold the same tensors, are not in the tree again.
        self._leaves = list(leaves)
        self.mode = mode
        super().train(mode is Mode.TRAIN)

    def train(self, mode: bool = True) -> StageModule:
        """Return the module, if it was captured for that mode; ``eval()`` means the other one.

        Raises:
            ValueError: It was captured for the other mode, which is another graph.
        """
        if mode is not (self.mode is Mode.TRAIN):
            other = Mode.TRAIN if mode else Mode.EVAL
            raise ValueError(
                f"the stage was captured in {self.mode} mode and cannot be put into {other} mode; capture the model "
                f"with mode=Mode.{other.name} for such a stage, or use Pipeline.evaluate and Pipeline.predict"
            )
        return self

    def forward(self, tensors: Mapping[str, Tensor], num_samples: int, draws: Draws | None = None) -> dict[str, Tensor]:
        """Run the stage on one micro-batch.

        Args:
            tensors: Every one of `input_names`; others are left alone.
            num_samples: The samples of the micro-batch.
            draws: What its random numbers follow from; by default `Draws()`.

        Returns:
            Every one of `output_names`.

        Raises:
            ValueError: An input is missing.
            BatchError: A mean classification loss has another number of ignored targets than the example batch.
        """
        for name in self.input_names:
            if name not in tensors:
                raise ValueError(f"the stage reads {name!r}, which is not among {sorted(tensors)}")
        given = [tensors[name] for name in self.input_names[: self._num_read]]
        own = [self._constants[name] if module is None else getattr(module, name) for module, name in self._owners]
        known = dict.fromkeys(self._symbols, sympy.Integer(num_samples))
        for symbol, free in self._free_sizes.items():
            known[symbol] = sympy.Integer(tensors[free.input].shape[free.axis])
        sizes = [evaluate(size, known) for size in self._sizes]
        device = next((t.device for t in (*own, *given)), torch.device("cpu"))
        with self._autocast.applied():
            results = self._program[0](*given, *own, *sizes, *self._leaves, device, draws or Draws())
        return dict(zip(self.output_names, results, strict=True))

    def compile_with(self, backend: str | Callable[..., Any], *, dynamic: bool | None, options: Any) -> None:
        """Let `torch.compile` compile the program when it first runs; arguments as it takes them.

        What draws by a key, checks targets or runs a module that is kept whole stays outside: the key is another number
        in every step, and would have everything compiled again.
        """
        program = self._program[0]
        assert isinstance(program, fx.GraphModule)
        for node in program.graph.nodes:
            if getattr(node.target, "__module__", "").startswith("graphpipe."):
                node.target = torch.compiler.disable(node.target)  # type: ignore[no-untyped-call]
        program.recompile()
        self._program = [torch.compile(program, backend=backend, dynamic=dynamic, options=options)]

    @property
    def draws_by_micro_batch(self) -> bool:
        """Whether it draws random numbers, or may, that are others for the same samples in another micro-batch."""
        program = self._program[0]
        assert isinstance(program, fx.GraphModule), "it is asked before it is compiled"
        return any(node.target in (seeded, run_seeded_leaf) for node in program.graph.nodes)

    def written_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that `forward` writes, such as running statistics, by name."""
        return {name: buffer for name, buffer in self.named_buffers() if name in self._written}

    def forward_again(
        self, tensors: Mapping[str, Tensor], num_samples: int, draws: Draws, buffers: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Run `forward` with other tensors in the place of its written buffers, which stay as they are."""
        found: dict[str, Tensor] = functional_call(self, dict(buffers), (tensors, num_samples, draws))
        return found

    def _register(self, kind: AttributeKind, name: str, tensor: Tensor) -> tuple[nn.Module | None, str]:
        if kind is AttributeKind.CONSTANT:
            self._constants[name] = tensor
            return None, name
        *path, leaf = name.split(".")
        module: nn.Module = self
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        if isinstance(tensor, nn.Parameter):
            module.register_parameter(leaf, tensor)
        else:
            module.register_buffer(leaf, tensor)
        return module, leaf

    def _apply(self, fn: Any, recurse: bool = True) -> StageModule:
        # Tensors that the model's code makes from literals follow the module to its device and dtype.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._constants = {name: fn(tensor) for name, tensor in self._constants.items()}
        return self


def build_stage(
    graph: TrainingGraph,
    nodes: Collection[fx.Node],
    names: Mapping[fx.Node, str],
    outputs: Sequence[fx.Node],
    counted_targets: Mapping[fx.Node, int],
    filled: Collection[fx.Node],
    autocast: Autocast,
    classes: Mapping[fx.Node, Any],
    mode: Mode,
) -> StageModule:
    """Return the module that runs some operations of a graph.

    Args:
        graph: The training graph.
        nodes: The operations, repeated ones included.
        names: Of the values that may pass between stages, and of the loss.
        outputs: The operations whose results it gives, a subset of `nodes`.
        counted_targets: For each loss to check, how many targets of each sample count.
        filled: The operations that fill the places of a mask, which is to be checked.
        autocast: What the graph was captured under.
        classes: How tensors depend on the samples.
        mode: What the graph was captured for.
    """
    ordered = sorted(nodes, key=graph.order.__getitem__)
    reads = [read for node in ordered for read in node.all_input_nodes]
    reads = list(dict.fromkeys(r for r in reads if r not in nodes))
    received = [r for r in reads if r.op == "placeholder" or (r.op == "call_function" and not is_size(r))]
    attributes = [r for r in reads if r in graph.attributes]
    # The batch symbol goes first, so that checks can count in samples.
    symbol = min(graph.batch_symbols, key=str) if graph.batch_symbols else sympy.Symbol("batch")
    counts = {
        node: _expected(graph, node, counted_targets[node], symbol) for node in ordered if node in counted_targets
    }
    numbers = [value_of(r) for r in reads if is_size(r)]
    sizes = list(dict.fromkeys([n.node.expr for n in numbers if hasattr(n, "node")] + list(counts.values())))

    program = fx.Graph()
    environment: dict[fx.Node, Any] = {}
    for read in received:
        environment[read] = program.placeholder(read.name)
    for read in attributes:
        environment[read] = program.placeholder(read.name)
    size_nodes = {size: program.placeholder(f"size_{i}") for i, size in enumerate(sizes)}
    leaves = {node: leaf for node in ordered if isinstance(leaf := leaf_of(node), ModuleLeaf)}
    leaf_nodes = {node: program.placeholder(f"leaf_{i}") for i, node in enumerate(leaves)}
    device = program.placeholder("device")
    draws = program.placeholder("draws")
    regions: dict[str, Any] = {}
    for read in reads:
        if is_size(read):
            number = value_of(read)
            environment[read] = size_nodes[number.node.expr] if hasattr(number, "node") else number
        elif read not in environment:
            regions[str(read.target)] = attribute_of(graph.module, str(read.target))
            environment[read] = program.get_attr(str(read.target))

    def place(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return environment[argument]
        # The device of capture is baked in; the stage runs where its tensors are.
        return device if isinstance(argument, torch.device) else argument

    for node in ordered:
        args, kwargs = fx.node.map_aggregate(node.args, place), fx.node.map_aggregate(node.kwargs, place)
        target: Any
        if node in leaves:
            # Each stage has a copy of the module's own, since the module's parameters may be copied or moved.
            target, args, kwargs = run_seeded_leaf, (leaf_nodes[node], args[0], args[1], draws, node.name), {}
        else:
            target, args, kwargs = repeatable(node, classes.get(node), args, kwargs, draws)
        made = program.create_node("call_function", target, args, kwargs, name=node.name)
        if node in counts:
            target = environment[argument_of(node, "target")]
            with program.inserting_before(made):
                checked = program.call_function(
                    check_targets, (target, argument_of(node, "ignore_index"), size_nodes[counts[node]])
                )
            made.replace_input_with(target, checked)
        elif node in filled:
            target, mask, source = (environment[argument_of(node, name)] for name in ("self", "mask", "source"))
            with program.inserting_before(made):
                checked = program.call_function(check_places, (mask, target, source))
            made.replace_input_with(mask, checked)
        environment[node] = made
    program.output(tuple(environment[node] for node in outputs))
    program.lint()
    received_names = tuple(names[r] if r in names else graph.input_names[r] for r in received)
    return StageModule(
        fx.GraphModule(regions, program, class_name="StageProgram"),
        [(graph.attributes[r].kind, graph.attributes[r].name, graph.attributes[r].tensor) for r in attributes],
        sizes,
        graph.batch_symbols,
        {s: free for s, free in graph.free_sizes.items() if any(s in size.free_symbols for size in sizes)},
        received_names,
        tuple(names[node] for node in outputs),
        autocast,
        [_leaf_of_stage(graph, node, leaf) for node, leaf in leaves.items()],
        frozenset(graph.attributes[w].name for node in ordered for w in written_by(node) if w in graph.attributes),
        mode,
    )


def _expected(graph: TrainingGraph, node: fx.Node, counted: int, batch: sympy.Symbol) -> sympy.Basic:
    """How many targets count, if as many of each sample are ignored as in the example batch."""
    target = value_of(argument_of(node, "target"))
    ignored = math.prod(graph.shape_at(target, 1)) - counted
    return sympy.expand(sympy.prod([size_expression(size) for size in target.shape]) - ignored * batch)


def run_seeded_leaf(
    leaf: ModuleLeaf, tensors: Sequence[Tensor], sizes: Sequence[Any], draws: Draws, operation: str
) -> list[Tensor]:
    """Run a module that is kept whole; what it draws is the same whenever it runs again."""
    found: list[Tensor] = seeded(run_leaf, draws, operation, leaf, tensors, sizes)
    return found


def _leaf_of_stage(graph: TrainingGraph, node: fx.Node, leaf: ModuleLeaf) -> ModuleLeaf:
    """A leaf with a module of its own that holds the model's tensors."""
    copied = leaf.copy()
    copied.hold([graph.attributes[own].tensor for own in own_arguments(node, leaf)])
    return copied
