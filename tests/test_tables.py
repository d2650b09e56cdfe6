"""The tables of the documentation say what the code does."""

from __future__ import annotations

import pytest

from docs.make_tables import HEADER, row, rows_of_the_page, table
from tests.capture.zoo import ZOO


def test_the_page_has_every_model_once_in_order() -> None:
    assert [cells[0] for cells in rows_of_the_page()] == list(ZOO)
    assert all(len(cells) == len(HEADER) for cells in rows_of_the_page())


# One of each sort: branches, a chain, a knot, batch statistics, towers. The others take the test a minute.
@pytest.mark.parametrize("name", ["MMT", "DLRM", "GPT-2", "T5", "CLIP"])
def test_a_new_capture_gives_the_row_of_the_page(name: str) -> None:
    (written,) = [cells for cells in rows_of_the_page() if cells[0] == name]
    assert written[:-1] == row(name)[:-1], f"run python -m docs.make_tables; the row is now\n{table([row(name)])}"
