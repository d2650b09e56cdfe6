"""Operations and saved bytes of the zoo, counted without computing, against what running the models shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from graphpipe.capture import capture
from graphpipe.capture.accounting import account
from tests.capture.zoo import ZOO, captured_zoo, loss_of

NUM_SAMPLES = 6
EXAMPLE_SAMPLES = 4


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    *batch, queries, width = query
    return int(2 * torch.Size(batch).numel() * queries * key[-2] * (width + value[-1]))


def _attention_backward(_: Any, query: Any, key: Any, value: Any, *__: Any, **___: Any) -> int:
    # The scores once more, then a gradient for each factor of both products.
    *batch, queries, width = query
    products = torch.Size(batch).numel() * queries * key[-2]
    return int(2 * products * width + 4 * products * width + 4 * products * value[-1])


def _grouped(a: Any, b: Any, *_: Any, **__: Any) -> int:
    # [rows, inner] by [groups, inner, outer]; or [inner, rows] by [rows, outer] for each group of rows.
    return int(2 * a[0] * a[1] * b[-1])


# The counter knows the kernels of GPUs.
FORMULAS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    torch.ops.aten._grouped_mm: _grouped,
}


def counted(model: nn.Module, batch: dict[str, Any]) -> tuple[int, int]:
    """Return the operations of a forward and of a backward pass of the model itself."""
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        loss = loss_of(model, batch)
        forward = counter.get_total_flops()
        loss.backward()
    model.zero_grad(set_to_none=True)
    return forward, counter.get_total_flops() - forward


@pytest.mark.parametrize("name", ZOO)
def test_operations_are_exact(name: str) -> None:
    model, captured = captured_zoo(name)
    with ZOO[name].in_its_dtype():
        batch = ZOO[name].batch(NUM_SAMPLES)
        forward, backward = counted(model, batch)
        costs = account(captured._training_graph, NUM_SAMPLES).costs.values()

    assert sum(c.forward_flops for c in costs) == forward
    assert sum(c.backward_flops for c in costs) == pytest.approx(backward, rel=1e-12)
    # A unit that repeats the rotary table counts it again.
    operators = captured.graph.operators
    assert sum(o.forward_flops for o in operators) * NUM_SAMPLES == pytest.approx(forward, rel=1e-3)
    assert sum(o.backward_flops for o in operators) * NUM_SAMPLES == pytest.approx(backward, rel=1e-12)


@pytest.mark.parametrize("name", ZOO)
def test_saved_bytes_are_those_that_running_saves(name: str) -> None:
    model, captured = captured_zoo(name)
    # Costs are those at the example's sizes.
    num_samples = EXAMPLE_SAMPLES if ZOO[name].free_sizes else NUM_SAMPLES
    with ZOO[name].in_its_dtype():
        flat = captured.flatten_batch(ZOO[name].batch(num_samples))
        whole = captured.stage_module([o.name for o in captured.graph.operators])
        given = {id(t.untyped_storage()): t for t in (*model.parameters(), *model.buffers(), *flat.values())}
        own = {t.untyped_storage()._cdata for t in given.values()}
        saved: dict[int, Tensor] = {}

        def keep(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage()._cdata not in own:
                saved[tensor.untyped_storage()._cdata] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            whole(flat, num_samples)
        accounted: dict[int, int] = {}
        for costs in account(captured._training_graph, num_samples).costs.values():
            accounted |= costs.saved

    measured = sum(t.untyped_storage().nbytes() for t in saved.values())
    assert sum(accounted.values()) == pytest.approx(measured, rel=0.01)
    if ZOO[name].free_sizes:
        return  # what does not grow with the samples is spread over those of the probe
    # What a unit repeats for itself, it keeps for itself.
    per_unit = sum(o.saved_bytes for o in captured.graph.operators) * num_samples
    assert per_unit == pytest.approx(measured, rel=0.01)


class Recurrent(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer = nn.LSTM(3, 4, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0].square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("options", [{}, {"num_layers": 2}, {"bidirectional": True}], ids=str)
def test_recurrent_layers_in_every_form(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Recurrent(batch_first=True, **options).double()
    batch = {"x": torch.randn(NUM_SAMPLES, 5, 3, dtype=torch.float64)}
    captured = capture(model, batch)
    (operator,) = captured.graph.operators
    forward, backward = counted(model, batch)
    assert operator.forward_flops * NUM_SAMPLES == forward
    assert operator.backward_flops * NUM_SAMPLES == pytest.approx(backward, rel=1e-12)


def test_frozen_parts_cost_no_backward() -> None:
    _, captured = captured_zoo("BLIP-2")
    frozen = [o for o in captured.graph.operators if o.name.startswith("vision_model")]
    assert frozen
    assert all(o.backward_flops == 0 and not o.has_backward for o in frozen)
    # A trained part keeps the last one's result.
    assert sum(o.saved_bytes > 0 for o in frozen) == 1
