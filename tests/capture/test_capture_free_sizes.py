"""Sizes besides the number of samples that differ from batch to batch, such as the length of sentences."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from graphpipe.capture import capture
from graphpipe.disk_cache import DiskCache
from graphpipe.errors import BatchError, CaptureError
from graphpipe.program import lower
from graphpipe.runtime.in_process import run_in_process
from graphpipe.schedule import kfkb
from graphpipe.stage import Stage, StageGraph
from tests.capture.conftest import random_partition, train_eagerly, train_in_stages
from tests.capture.zoo import ZOO, loss_of, text

pytestmark = pytest.mark.usefixtures("double")


class Tagger(nn.Module):
    """Flattens words, numbers them, and ignores the last tag of every sentence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, words: Tensor, tags: Tensor) -> Tensor:
        positions = torch.arange(words.shape[1], device=words.device) / words.shape[1]
        hidden = torch.tanh(self.middle(self.embedding(words))) * positions.unsqueeze(1)
        flat = hidden.reshape(-1, 4)
        return functional.cross_entropy(self.head(flat), tags.flatten(), ignore_index=-100)


FREE = {"words": {1: "length"}, "tags": {1: "length"}}


def sentences(num_samples: int, length: int) -> dict[str, Tensor]:
    tags = torch.randint(3, (num_samples, length))
    tags[:, -1] = -100
    return {"words": torch.randint(20, (num_samples, length)), "tags": tags}


@pytest.mark.parametrize("length", [3, 5, 9])
def test_stages_follow_the_length(length: int) -> None:
    model = Tagger()
    captured = capture(model, sentences(4, 5), free_sizes=FREE)
    batch = sentences(7, length)
    sized = captured.sized(captured.flatten_batch(batch))
    expected = train_eagerly(model, lambda m: m(**batch))
    for seed in range(4):
        rng = random.Random(seed)
        found = train_in_stages(sized, random_partition(sized, rng.randint(2, 3), rng), batch, rng)
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-9, atol=0)
        for name, gradient in expected.gradients.items():
            torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-9, atol=1e-12)


def test_programs_follow_the_length() -> None:
    model = Tagger()
    captured = capture(model, sentences(4, 5), free_sizes=FREE)
    assert [o.name for o in captured.graph.operators] == ["embedding", "middle", "head"]
    stages = tuple(
        Stage(operators=(o.name,), micro_batch_size=2, devices=(i,)) for i, o in enumerate(captured.graph.operators)
    )
    graph = StageGraph(captured.graph, stages, 6)
    program = lower(graph, kfkb(graph))
    for length in (4, 8):
        batch = sentences(6, length)
        expected = train_eagerly(model, lambda m, batch=batch: m(**batch))
        result = run_in_process(captured, program, batch)
        assert result.loss == pytest.approx(float(expected.loss), rel=1e-9)
        for device in result.gradients:
            for name, gradient in device.items():
                assert gradient is not None
                torch.testing.assert_close(gradient, expected.gradients[name], rtol=1e-9, atol=1e-12)


def test_a_library_model_with_a_free_length() -> None:
    model = ZOO["BERT"].build().train()
    free = {name: {1: "length"} for name in ("input_ids", "attention_mask", "labels")}
    captured = capture(model, text(4, 8), free_sizes=free)
    batch = text(5, 11)
    sized = captured.sized(captured.flatten_batch(batch))
    expected = train_eagerly(model, lambda m: loss_of(m, batch))
    rng = random.Random(0)
    found = train_in_stages(sized, random_partition(sized, 4, rng), batch, rng)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-9, atol=0)
    largest = max(float(g.abs().max()) for g in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-9, atol=1e-9 * largest, msg=name)


def test_sizes_that_do_not_fit() -> None:
    captured = capture(Tagger(), sentences(4, 5), free_sizes=FREE)
    words, tags = sentences(4, 6)["words"], sentences(4, 7)["tags"]
    with pytest.raises(BatchError, match="'length' is 6 in input 'words' and 7 in input 'tags'"):
        captured.flatten_batch({"words": words, "tags": tags})
    with pytest.raises(CaptureError, match="no input `word`, whose size is to be free; did you mean `words`"):
        capture(Tagger(), sentences(4, 5), free_sizes={"word": {1: "length"}})
    with pytest.raises(CaptureError, match="'words' has 2 axes; axis 2 cannot be free"):
        capture(Tagger(), sentences(4, 5), free_sizes={"words": {2: "length"}})
    other = sentences(4, 6)
    other["tags"][0, 0] = -100
    stage = captured.stage_module([o.name for o in captured.graph.operators])
    with pytest.raises(BatchError, match="19 of 24 targets"):
        stage(captured.flatten_batch(other), 4)


class Branching(nn.Module):
    """Does something else for long sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        return hidden.sum() if x.shape[1] > 4 else hidden.mean()


@pytest.mark.parametrize(
    ("example", "fitting", "other", "bounds"), [(3, (1, 4), 5, "0 to 4"), (7, (5, 90), 4, "5 or more")]
)
def test_sizes_that_the_code_tells_apart_are_refused(
    example: int, fitting: tuple[int, int], other: int, bounds: str, tmp_path: Path
) -> None:
    free = {"x": {1: "length"}}
    for _ in range(2):  # captured, and found on disk
        captured = capture(Branching(), (torch.zeros(6, example, 4),), free_sizes=free, cache=DiskCache(tmp_path))
        for length in fitting:
            assert captured.flatten_batch((torch.zeros(3, length, 4),))["x"].shape[1] == length
        assert not captured.fits_free_sizes((torch.zeros(3, other, 4),))
        with pytest.raises(BatchError, match=rf"'length' is {other} in input 'x'.* sizes of {bounds} from"):
            captured.flatten_batch((torch.zeros(3, other, 4),))


def test_a_size_that_the_model_fixes_is_named() -> None:
    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(x.shape[0], 6, 2).square().mean()

    with pytest.raises(CaptureError, match="the size 'width' of Fixed was fixed to 12"):
        capture(Fixed(), {"x": torch.randn(4, 12)}, free_sizes={"x": {1: "width"}})
