"""What differs between ranks is noticed, and never trained on."""

from __future__ import annotations

import pytest

from tests.distributed.harness import run_case

pytestmark = pytest.mark.distributed


def test_ranks_that_were_given_different_things() -> None:
    results = run_case("agreement_cases.differ", 2)
    for result in results:
        assert result["sizes"] == [4, 2]  # Rank 0's.
        assert result["right"]
        assert result["losses"][0] == result["losses"][1]  # A number that the capture has read stays.
        nothing_new, other_batch, other_call, other_work, other_gathering = result["said"]
        assert nothing_new.startswith("there was no mini-batch since update 0, so the same gradients")
        assert other_batch.startswith("ranks 0 and 1 were given different tensors for input 'x'")
        assert other_call.startswith(
            "rank 0 is at mini-batch 2 since 0 updates and no update after it, and rank 1 at mini-batch 2 since 0 "
            "updates and an update after it; call step"
        )
        assert other_work.startswith("rank 0 begins an evaluation and rank 1 an update; all ranks do the same")
        assert other_gathering.startswith("rank 0 begins a gathering and rank 1 a gathering of gradients")
    (told,) = results[0]["told"]
    assert told.startswith(
        "factor of the model was 1.0 when the model was captured and is 2.0 now; training goes on with"
    )
    assert results[1]["told"] == ["rank 1 was given another strategy than rank 0; all ranks train by that of rank 0"]


def test_all_ranks_see_the_rows_of_all() -> None:
    for result in run_case("agreement_cases.rows", 3):
        assert result["first"] == [[0, 7, 8], [10, 7, 8], [20, 7, 8]]
        assert result["second"] == [[rank, -(1 << 60), 0] for rank in (1, 2, 3)]
        assert result["sum"] == 0.0  # 1e16 + 1 is 1e16.
