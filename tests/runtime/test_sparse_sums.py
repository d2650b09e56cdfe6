from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from graphpipe.runtime.in_process import Hub, InProcessTransport
from graphpipe.runtime.sparse_sums import SparseSum

NUM_ROWS = 6


def rows(*places: int) -> Tensor:
    """Return the gradient of a table whose rows at some places were read, each the number of its place plus one."""
    values = torch.tensor([[1.0 + place] * 2 for place in places]).reshape(-1, 2)
    places_of_rows = torch.tensor([places], dtype=torch.int64)
    return torch.sparse_coo_tensor(places_of_rows, values, (NUM_ROWS, 2), check_invariants=True)


def sums_of(gradients: list[Tensor | None]) -> list[Tensor | None]:
    """Return what each device holds after the sum, device `i` with the gradient of that place."""
    hub, devices = Hub(), list(range(len(gradients)))
    tables = [nn.Parameter(torch.zeros(NUM_ROWS, 2)) for _ in gradients]

    def work(device: int) -> None:
        tables[device].grad = gradients[device]
        SparseSum.start(InProcessTransport(hub, device), devices, device, tables[device]).finish()

    threads = [threading.Thread(target=work, args=(device,)) for device in devices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [table.grad for table in tables]


@pytest.mark.parametrize(
    "gradients",
    [[rows(4, 1, 4), rows(1), rows(5, 0)], [rows(2, 3), None, rows(3)], [rows(), rows(1, 1), rows()], [None, rows()]],
    ids=["all", "one without", "one alone", "no rows"],
)
def test_the_sum_holds_the_rows_of_all_devices(gradients: list[Tensor | None]) -> None:
    expected = sum((g.to_dense() for g in gradients if g is not None), torch.zeros(NUM_ROWS, 2))
    read = {int(row) for g in gradients if g is not None for row in g._indices()[0]}
    for found in sums_of(gradients):
        assert found is not None
        assert found.is_sparse
        assert set(found.indices()[0].tolist()) == read
        assert torch.equal(found.to_dense(), expected)


def test_a_dense_gradient_makes_the_sum_dense() -> None:
    for found in sums_of([rows(4, 4), torch.ones(NUM_ROWS, 2), None]):
        assert found is not None
        assert torch.equal(found, torch.ones(NUM_ROWS, 2) + rows(4, 4).to_dense())


def test_no_gradient_stays_none() -> None:
    assert sums_of([None, None]) == [None, None]
