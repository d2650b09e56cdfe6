from __future__ import annotations

import pytest
import torch

from graphpipe.runtime.meeting import Progress, digest_of_some


@pytest.mark.parametrize("shape", [(64, 16), (128, 28, 28), (4096,), (3, 5), (256, 77)])
def test_other_entries_are_seen_whatever_is_constant_in_every_sample(shape: tuple[int, ...]) -> None:
    one, other = (torch.randint(1, 30_000, shape, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    if len(shape) > 1:
        one[:, 0] = other[:, 0] = 0
    for shift in range(50):
        assert digest_of_some([one], shift) == digest_of_some([one.clone()], shift)
        assert digest_of_some([one], shift) != digest_of_some([other], shift)


def test_the_layout_in_memory_makes_no_difference_and_empty_tensors_have_a_number() -> None:
    tensor = torch.randn(200, 30, dtype=torch.bfloat16)
    moved = tensor.t().contiguous().t()
    assert not moved.is_contiguous()
    assert digest_of_some([tensor], 3) == digest_of_some([moved], 3)
    assert digest_of_some([torch.empty(0, 4)], 1) > 0
    assert digest_of_some([torch.tensor(2.5)], 1) != digest_of_some([torch.tensor(2.0)], 1)


@pytest.mark.parametrize("progress", [Progress(0, 0), Progress(3, 1, keeps=True), Progress(10**9, 7, updates=True)])
def test_a_progress_is_known_by_its_number(progress: Progress) -> None:
    assert Progress.of(progress.number) == progress
