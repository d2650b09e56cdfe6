"""What the runtime needs from a captured model, and how a tensor is cut by samples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from graphpipe.capture.autocast import Autocast
from graphpipe.capture.draws import Draws
from graphpipe.capture.specs import LossReduction, SampleLayout, ValueSpec
from graphpipe.graph import ComputationGraph
from graphpipe.stage import SampleRange


class StageModule(Protocol):
    """A stage as a torch module, with parameters under their original names."""

    @property
    def input_names(self) -> tuple[str, ...]:
        """The model's inputs and the values that it reads."""
        ...

    @property
    def output_names(self) -> tuple[str, ...]:
        """The values that it produces for others, and the loss."""
        ...

    def __call__(self, tensors: Mapping[str, Tensor], num_samples: int, draws: Draws, /) -> dict[str, Tensor]:
        """Return the outputs by name."""
        ...

    def compile_with(self, backend: str | Callable[..., Any], *, dynamic: bool | None, options: Any) -> None:
        """Let `torch.compile` compile it when it is first called."""
        ...

    def written_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that a call writes, by name."""
        ...

    def forward_again(
        self, tensors: Mapping[str, Tensor], num_samples: int, draws: Draws, buffers: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the outputs with other tensors in the place of the written buffers, which stay as they are."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters."""
        ...

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers."""
        ...


class StageSource(Protocol):
    """A model that can hand out any of its stages: `graphpipe.capture.CapturedModel` is one."""

    @property
    def model(self) -> nn.Module:
        """The whole model, whose parameters and buffers the stages share."""
        ...

    @property
    def fingerprint(self) -> str:
        """A hash of the model's operations and how they are connected."""
        ...

    @property
    def graph(self) -> ComputationGraph:
        """The operators, and the values between them."""
        ...

    @property
    def values(self) -> Mapping[str, ValueSpec]:
        """What each value of the graph looks like."""
        ...

    @property
    def inputs(self) -> Mapping[str, ValueSpec]:
        """What each input looks like."""
        ...

    @property
    def loss(self) -> str:
        """The name of the loss among a stage's outputs."""
        ...

    @property
    def loss_operator(self) -> str:
        """The operator that produces the loss."""
        ...

    @property
    def loss_reduction(self) -> LossReduction:
        """How the losses of micro-batches make up that of the mini-batch."""
        ...

    @property
    def sparse_parameters(self) -> frozenset[str]:
        """The names of the embedding tables whose gradients hold a few rows."""
        ...

    @property
    def autocast(self) -> Autocast:
        """What its stages run under."""
        ...

    def flatten_batch(self, batch: Any, needed: Collection[str] | None = None) -> dict[str, Tensor]:
        """Return the tensors of a batch by the names of the inputs; only those that are needed have to be there."""
        ...

    def sized(self, flat: Mapping[str, Tensor]) -> StageSource:
        """Return the model with the values that it has for a flat batch, where sizes differ from batch to batch."""
        ...

    def num_samples(self, flat: Mapping[str, Tensor]) -> int:
        """Return the samples of a flat batch; 0 if none of its tensors holds any."""
        ...

    def stage_module(self, operators: Sequence[str]) -> StageModule:
        """Return the module of a convex set of operators."""
        ...

    def adopt(self, tensors: Mapping[int, Tensor]) -> None:
        """Let stages take other tensors in the place of the model's own, by the identity of these."""
        ...


def shapes_of(tensors: Mapping[str, Tensor]) -> tuple[tuple[str | int, ...], ...]:
    """Return the name and the sizes of each tensor."""
    return tuple((name, *tensor.shape) for name, tensor in tensors.items())


def take_samples(tensor: Tensor, layout: SampleLayout | None, samples: SampleRange, origin: int = 0) -> Tensor:
    """Return a view of some samples, or the tensor itself where these are all that it holds.

    Args:
        tensor: Holds the samples from `origin` on.
        layout: Where they are; None for a tensor that does not depend on the batch, which is returned whole.
        samples: Which ones, counted over the mini-batch.
        origin: The first sample that `tensor` holds.
    """
    if layout is None:
        return tensor
    rows = layout.rows_per_sample
    if len(samples) * rows == tensor.shape[layout.axis]:
        return tensor
    return tensor.narrow(layout.axis, (samples.start - origin) * rows, len(samples) * rows)


def named_parameters(modules: Mapping[int, StageModule]) -> dict[str, nn.Parameter]:
    """Return the parameters of several stages by their original names, each once."""
    return {name: p for x in sorted(modules) for name, p in modules[x].named_parameters()}


def named_tensors(modules: Mapping[int, StageModule]) -> dict[str, Tensor]:
    """Return the parameters and buffers of several stages by their original names, each once."""
    buffers = {name: b for x in sorted(modules) for name, b in modules[x].named_buffers()}
    return {**named_parameters(modules), **buffers}
