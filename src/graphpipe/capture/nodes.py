"""What a single node of an exported graph does: sizes, mutation, randomness, weight."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from graphpipe.capture.keeping import buffers_of, leaf_of
from graphpipe.capture.leaves import ModuleLeaf

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)

RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")

# Matrix products, convolutions, attention, recurrent layers and embedding look-ups: what a planner should see.
_HEAVY_OPERATORS = frozenset({
    "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "addmv", "mv", "einsum", "bilinear",
    "conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "scaled_dot_product_attention", *RECURRENT, "embedding", "embedding_bag",
    "_embedding_bag", "_native_multi_head_attention", "_transformer_encoder_layer_fwd",
})  # fmt: skip

# They leave alone the values of the tensor that they are said to write.
_HARMLESS_MUTATIONS = frozenset({"detach_", "requires_grad_"})


def value_of(node: fx.Node) -> Any:
    """Return what export recorded for a node: a fake tensor, a symbolic size, or a tuple of these."""
    return node.meta.get("val")


def tensors_of(node: fx.Node) -> list[Tensor]:
    """Return the fake tensors of a node's result."""
    return [leaf for leaf in pytree.tree_leaves(value_of(node)) if isinstance(leaf, Tensor)]


def is_size(node: fx.Node) -> bool:
    """Return whether a node computes a size or another plain number."""
    if node.op != "call_function" or (node.target is operator.getitem and isinstance(value_of(node), Tensor)):
        return False
    value = value_of(node)
    return isinstance(value, (*_SYMBOLIC, int, float, bool))


def is_transformed(value: Any) -> bool:
    """Return whether a recorded value is a tensor inside of a transform, such as vmap, which has no storage."""
    return isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)


def storages(node: fx.Node) -> set[int]:
    """Return the identities of the storages of a node's result. Views share the storage of what they view."""
    return {tensor.untyped_storage()._cdata for tensor in tensors_of(node)}


def operator_name(node: fx.Node) -> str:
    """Return the plain name of a node's operator, such as ``linear``."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[-1]
    return str(getattr(target, "__name__", target))


def is_random(node: fx.Node) -> bool:
    """Return whether a node draws random numbers."""
    if any(is_random(inner) for graph in subgraphs(node) for inner in graph.graph.nodes):
        return True
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded in target.tags or operator_name(node) in ("dropout", "feature_dropout"):
        return dropout_probability(node) != 0
    return operator_name(node) == "scaled_dot_product_attention" and dropout_probability(node) != 0


def only_drops(node: fx.Node) -> bool:
    """Return whether what a node draws are entries to drop, which a probe can switch off."""
    name = operator_name(node)
    return "dropout" in name or name in ("scaled_dot_product_attention", *RECURRENT)


def dropout_probability(node: fx.Node) -> float | None:
    """Return the probability with which a node drops entries; None if its operator has no such argument."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    found: float | None = None
    for name in ("dropout_p", "p"):
        if "dropout" in operator_name(node) or name == "dropout_p":
            argument = argument_of(node, name)
            found = float(argument) if isinstance(argument, (int, float)) else found
    return 0.0 if found is not None and argument_of(node, "train") is False else found


def argument_of(node: fx.Node, name: str) -> Any:
    """Return the argument of that name of an operator call, its default if left out, None if there is no such one."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    for i, argument in enumerate(target._schema.arguments):
        if argument.name == name:
            if i < len(node.args):
                return node.args[i]
            return node.kwargs.get(name, argument.default_value)
    return None


def read_sparsely(node: fx.Node) -> fx.Node | None:
    """Return the table of an embedding look-up whose gradient is to hold the rows that were read, None for others."""
    if not isinstance(node.target, torch._ops.OpOverload) or not argument_of(node, "sparse"):
        return None
    table = argument_of(node, "weight")
    return table if isinstance(table, fx.Node) else None


def written_by(node: fx.Node) -> list[fx.Node]:
    """Return the arguments whose memory a node writes, looking into no_grad and autocast regions."""
    if node.op != "call_function":
        return []
    found: list[fx.Node] = []
    for graph in subgraphs(node):
        written = _inputs_written_in(graph)
        inner_inputs = [n for n in graph.graph.nodes if n.op == "placeholder"]
        for inner, outer in zip(inner_inputs, region_operands(node), strict=True):
            if inner in written and isinstance(outer, fx.Node):
                found.append(outer)
    found += buffers_of(node)
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or operator_name(node) in _HARMLESS_MUTATIONS:
        return found
    for i, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            found += [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, fx.Node)]
    if operator_name(node) in ("batch_norm", "instance_norm"):
        # These write their running statistics without saying so in the schema.
        uses_batch = argument_of(node, "training" if operator_name(node) == "batch_norm" else "use_input_stats")
        statistics = (argument_of(node, "running_mean"), argument_of(node, "running_var"))
        found += [s for s in statistics if uses_batch and isinstance(s, fx.Node)]
    return found


def _inputs_written_in(region: fx.GraphModule) -> set[fx.Node]:
    """The inputs of a region that it writes, itself or through a view; the region's nodes have no recorded tensors."""
    seen_through: dict[fx.Node, set[fx.Node]] = {}
    found: set[fx.Node] = set()
    for node in region.graph.nodes:
        if node.op == "placeholder":
            seen_through[node] = {node}
            continue
        for written in written_by(node):
            found |= seen_through.get(written, set())
        returns_alias = isinstance(node.target, torch._ops.OpOverload) and any(
            result.alias_info is not None for result in node.target._schema.returns
        )
        sources = node.all_input_nodes if returns_alias or node.target is operator.getitem else []
        seen_through[node] = set().union(*(seen_through.get(source, set()) for source in sources), set())
    return found


def region_operands(node: fx.Node) -> tuple[Any, ...]:
    """Return what a higher-order node passes to its graph."""
    is_graph = [isinstance(a, fx.Node) and a.op == "get_attr" and not _is_tensor_attribute(a) for a in node.args]
    return node.args[is_graph.index(True) + 1 :]


def subgraphs(node: fx.Node) -> list[fx.GraphModule]:
    """Return the graphs that a higher-order node (a no_grad or autocast region) runs."""
    module = node.graph.owning_module
    if node.op != "call_function" or module is None or isinstance(node.target, torch._ops.OpOverload):
        return []
    found = []
    for argument in node.all_input_nodes:
        if argument.op == "get_attr":
            attribute = attribute_of(module, str(argument.target))
            if isinstance(attribute, fx.GraphModule):
                found.append(attribute)
    return found


def attribute_of(module: Any, path: str) -> Any:
    """Return the attribute at a dotted path."""
    for part in path.split("."):
        module = getattr(module, part)
    return module


def is_heavy(node: fx.Node) -> bool:
    """Return whether a node holds a matrix product, convolution, attention, recurrent layer or embedding look-up."""
    if node.op != "call_function":
        return False
    is_module = isinstance(leaf_of(node), ModuleLeaf)
    if is_module or operator_name(node).rstrip("_") in _HEAVY_OPERATORS or is_grouped_product(node):
        return True
    return any(is_heavy(inner) for graph in subgraphs(node) for inner in graph.graph.nodes)


def mixes_in_backward(node: fx.Node) -> bool:
    """Return whether gradients of one sample depend on the others though results don't.

    A look-up that scales gradients by how often a batch reads a row does so.
    """
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and argument_of(node, "scale_grad_by_freq") is True


def is_grouped_product(node: fx.Node) -> bool:
    """Return whether a node is a matrix product of groups of rows with a matrix each, as in a mixture of experts."""
    return "grouped_mm" in operator_name(node)


def module_path(node: fx.Node, prefix: str) -> str:
    """Return the path of the innermost module that a node comes from, without `prefix`."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    path = str(stack[-1][0]) if stack else ""
    path = path.split("@")[0]  # a second call of the same module
    if path == prefix:
        return ""
    return path.removeprefix(prefix + ".")


def module_type(node: fx.Node) -> str:
    """Return the qualified class name of the innermost module that a node comes from."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return str(stack[-1][1]) if stack else ""


def source_line(node: fx.Node) -> str:
    """Return the user's line that a node comes from, as ``file:line`` and the code, or an empty string."""
    lines = [line.strip() for line in str(node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    for i in range(len(lines) - 1, -1, -1):
        if lines[i].startswith('File "') and "/torch/" not in lines[i]:
            path, number = lines[i].removeprefix('File "').split('", line ')
            code = f" `{lines[i + 1]}`" if i + 1 < len(lines) else ""
            return f"{path}:{number.split(',')[0]}{code}"
    return ""


def inputs_of(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes whose tensors a node reads, sizes and subgraphs left out."""
    for argument in node.all_input_nodes:
        if not is_size(argument) and (argument.op != "get_attr" or _is_tensor_attribute(argument)):
            yield argument


def _is_tensor_attribute(node: fx.Node) -> bool:
    module = node.graph.owning_module
    return module is not None and isinstance(attribute_of(module, str(node.target)), Tensor)
