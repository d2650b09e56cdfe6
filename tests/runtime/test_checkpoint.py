"""Checkpoints of a job of one process. Several processes and other plans are in `tests/distributed`."""

from __future__ import annotations

import json
import logging
import os
import pickle
import random
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphpipe as gp
from graphpipe.capture import capture
from graphpipe.runtime.checkpoint_folder import CheckpointFolder, FileFacts
from tests.distributed.parity import hand_made


class Net(nn.Module):
    def __init__(self, width: int = 3, activation: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(3, width), nn.Linear(width, 3)
        self.activation = activation
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("unused", torch.ones(2, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (self.b(self.activation(self.a(x))) ** 2 * self.mask).mean()


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1)


def batch_of(seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))}


def make(model: nn.Module | None = None, optimizer: Any = adam) -> gp.Pipeline:
    captured = capture(model or Net(), batch_of(0))
    return gp.Pipeline(captured, hand_made(captured, [("", 4, (0,))], 4), optimizer=optimizer)


def state_of(pipeline: gp.Pipeline) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in pipeline.gather_state_dict().items()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in found)


@pytest.fixture(autouse=True)
def _one_process() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with checkpoints of steps 1 and 2."""
    pipeline = make()
    with gp.Checkpointer(pipeline, tmp_path / "checkpoints", save_every=1) as checkpoints:
        for seed in range(2):
            pipeline.step(batch_of(seed))
            checkpoints.save_if_due()
    return tmp_path / "checkpoints"


def test_steps_before_and_after_equal_steps_without_a_break(folder: Path) -> None:
    whole = make()
    for seed in range(4):
        whole.step(batch_of(seed))
    pipeline = make()
    with gp.Checkpointer(pipeline, folder) as checkpoints:
        assert checkpoints.restore() == 2
        for batch in checkpoints.remaining(map(batch_of, range(4))):
            pipeline.step(batch)
    assert same(state_of(pipeline), state_of(whole))
    assert pipeline.num_steps == 4
    assert int(state_of(pipeline)["calls"]) == 4


def test_the_newest_are_kept_and_none_is_overwritten(tmp_path: Path) -> None:
    pipeline = make()
    with gp.Checkpointer(pipeline, tmp_path, save_every=2, keep=2) as checkpoints:
        for seed in range(9):
            pipeline.step(batch_of(seed))
            checkpoints.save_if_due()
        checkpoints.save()
        before = (tmp_path / "step-00000009" / "manifest.json").stat().st_mtime_ns
        checkpoints.save()
    assert CheckpointFolder(tmp_path).steps() == [8, 9]
    assert (tmp_path / "step-00000009" / "manifest.json").stat().st_mtime_ns == before
    other = make()
    with gp.Checkpointer(other, tmp_path) as checkpoints:
        other.step(batch_of(0))
        with pytest.raises(gp.CheckpointError, match="step 9, which this job, at step 1, did not go on from"):
            checkpoints.save()


def test_a_flipped_byte_is_found_and_the_older_checkpoint_is_offered(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (path,) = (folder / "step-00000002").glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)
    pipeline = make()
    before = state_of(pipeline)
    with gp.Checkpointer(pipeline, folder, save_every=1) as checkpoints:
        with pytest.raises(gp.CheckpointError, match=r"step 2 is damaged: .* has changed .*restore\(1\)"):
            checkpoints.restore()
        assert same(state_of(pipeline), before)
        assert checkpoints.restore(1) == 1
        assert "step-00000002.set-aside" in caplog.text
        pipeline.step(batch_of(1))
        checkpoints.save_if_due()
    assert CheckpointFolder(folder).steps() == [1, 2]


def test_another_model_and_another_optimizer_are_refused(folder: Path) -> None:
    for model, why in (
        (Net(width=4), r"'a.weight' is float32 of shape \(3, 3\) there and float32 of shape \(4, 3\) here"),
        (Wrapped(), "'net.a.weight' is missing there and float32"),
        (Net(activation=torch.exp), "the operations between them differ"),
    ):
        with gp.Checkpointer(make(model), folder) as checkpoints, pytest.raises(gp.CheckpointError, match=why):
            checkpoints.restore()
    sgd = make(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    with (
        gp.Checkpointer(sgd, folder) as checkpoints,
        pytest.raises(gp.CheckpointError, match="written with Adam, this job has SGD"),
    ):
        checkpoints.restore()


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_no_file_of_a_checkpoint_runs_code(folder: Path, tmp_path: Path) -> None:
    """An attacker may write any file, with checksums that agree."""
    exploded = tmp_path / "exploded"
    bomb = pickle.dumps(Bomb(exploded))
    pickle.loads(bomb)
    assert exploded.exists()  # it would
    exploded.unlink()
    checkpoint = CheckpointFolder(folder)
    (shard,) = checkpoint.of_step(2).glob("*.safetensors")
    whole = shard.read_bytes()
    manifest = checkpoint.read_manifest(2)

    def hostile(files: dict[str, bytes], **changes: Any) -> None:
        checkpoint.set_aside_after(1)
        draft = checkpoint.begin(2)
        for name, data in files.items():
            (draft / name).write_bytes(data)
        facts = {name: FileFacts.of(draft / name) for name in files if name.endswith(".safetensors")}
        content = {key: value for key, value in manifest.items() if key not in ("files", "step")}
        checkpoint.finish(2, {**content, **changes}, facts, keep=3)
        with gp.Checkpointer(make(), folder) as checkpoints, pytest.raises(gp.CheckpointError):
            checkpoints.restore()
        assert not exploded.exists()

    hostile({shard.name: bomb})
    hostile({shard.name: whole, ".metadata": bomb})
    hostile({shard.name: whole, "__0_0.distcp": bomb})
    torch.save({"model.a.weight": torch.zeros(3, 3)}, tmp_path / "zip")
    hostile({shard.name: (tmp_path / "zip").read_bytes()})
    rank = manifest["ranks"][0]
    for data in ({"$pickle": bomb.hex()}, bomb.hex(), [], None, {"python": [1, 2]}):
        hostile({shard.name: whole}, ranks=[{**rank, "random": data}])
        hostile({shard.name: whole}, ranks=[{**rank, "optimizer": {**rank["optimizer"], "groups": data}}])
    hostile({shard.name: whole}, ranks=[])
    hostile({shard.name: whole}, tensors={"model.a.weight": ["load", 3, 3]})
    hostile({shard.name: whole}, tensors={n: ["float32", 10**15] for n in manifest["tensors"]})


def test_a_full_disk_leaves_the_older_checkpoint(folder: Path) -> None:
    pipeline = make()
    with gp.Checkpointer(pipeline, folder, save_every=1) as checkpoints:
        checkpoints.restore()
        pipeline.step(batch_of(2))
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        try:
            with pytest.raises(gp.CheckpointError, match=r"step 3 could not be saved: rank 0: .*step 2 is still there"):
                checkpoints.save()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert sorted(p.name for p in folder.iterdir()) == ["latest", "lock", "step-00000001", "step-00000002"]
        checkpoints.save()  # there is space again
    assert (folder / "latest").read_text() == "step-00000003\n"


def test_an_asynchronous_checkpoint_is_that_of_its_step(tmp_path: Path) -> None:
    pipeline = make()
    with gp.Checkpointer(pipeline, tmp_path, saving=gp.Saving.ASYNCHRONOUS) as checkpoints:
        pipeline.step(batch_of(0))
        expected = state_of(pipeline)
        checkpoints.save()
        pipeline.step(batch_of(1))
    restored = make()
    with gp.Checkpointer(restored, tmp_path) as checkpoints:
        assert checkpoints.restore() == 1
    assert same(state_of(restored), expected)
    assert not same(state_of(pipeline), expected)


def test_an_asynchronous_checkpoint_that_fails_is_told_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = make()
    with gp.Checkpointer(pipeline, tmp_path, saving=gp.Saving.ASYNCHRONOUS) as checkpoints:
        pipeline.step(batch_of(0))
        with monkeypatch.context() as patched:
            patched.setattr(CheckpointFolder, "finish", no_space)
            checkpoints.save()
            with pytest.raises(gp.CheckpointError, match=r"step 1 could not be saved: .*No space left"):
                checkpoints.wait()
        checkpoints.save()
        checkpoints.wait()
    assert CheckpointFolder(tmp_path).steps() == [1]


def test_one_that_fails_does_not_cost_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = make()
    with gp.Checkpointer(pipeline, tmp_path, save_every=1, saving=gp.Saving.ASYNCHRONOUS) as checkpoints:
        pipeline.step(batch_of(0))
        with monkeypatch.context() as patched:
            patched.setattr(CheckpointFolder, "finish", no_space)
            checkpoints.save_if_due()
            checkpoints._writing._thread.join()  # type: ignore[union-attr]
        pipeline.step(batch_of(1))
        with pytest.raises(gp.CheckpointError, match="step 1 could not be saved"):
            checkpoints.save_if_due()
    assert CheckpointFolder(tmp_path).steps() == [2]


@pytest.fixture
def goes_on(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let checkpoints be finished only once this is set."""
    event, finish = threading.Event(), CheckpointFolder.finish

    def slowly(*arguments: Any, **options: Any) -> None:
        assert event.wait(30)
        finish(*arguments, **options)

    monkeypatch.setattr(CheckpointFolder, "finish", slowly)
    return event


def test_nobody_else_may_write_while_a_job_that_failed_does(tmp_path: Path, goes_on: threading.Event) -> None:
    checkpoints = gp.Checkpointer(make(), tmp_path, saving=gp.Saving.ASYNCHRONOUS)
    with pytest.raises(ZeroDivisionError), checkpoints:  # noqa: PT012
        checkpoints.save()
        writing = checkpoints._writing
        raise ZeroDivisionError
    with pytest.raises(gp.CheckpointError, match="open already"):
        gp.Checkpointer(make(), tmp_path)
    goes_on.set()
    assert writing is not None
    writing.join()
    with gp.Checkpointer(make(), tmp_path) as again:
        assert again.restore() == 0
    assert CheckpointFolder(tmp_path).steps() == [0]


class Refusing:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise OSError("no")


def test_a_job_that_is_half_restored_saves_nothing(tmp_path: Path) -> None:
    pipeline = make()
    with gp.Checkpointer(pipeline, tmp_path, states={"loader": Refusing()}) as checkpoints:
        pipeline.step(batch_of(0))
        checkpoints.save()
    pipeline = make()
    with gp.Checkpointer(pipeline, tmp_path, states={"loader": Refusing()}) as checkpoints:
        with pytest.raises(gp.CheckpointError, match="rank 0: OSError: no"):
            checkpoints.restore()
        pipeline.step(batch_of(0))
        pipeline.step(batch_of(1))
        with pytest.raises(gp.CheckpointError, match="taken up in part only"):
            checkpoints.save()


def test_a_job_may_ask_for_the_rest_once_an_epoch(tmp_path: Path) -> None:
    def run(folder: str, stop: int) -> list[int]:
        pipeline = make()
        trained = []
        with gp.Checkpointer(pipeline, tmp_path / folder) as checkpoints:
            checkpoints.restore()
            for epoch in range(3):
                for seed in checkpoints.remaining(range(10 * epoch, 10 * epoch + 4)):
                    trained.append(seed)
                    pipeline.step(batch_of(seed))
                    if pipeline.num_steps == stop:
                        checkpoints.save()
                        return trained
        return trained

    whole = [0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23]
    assert run("whole", 99) == whole
    assert run("parts", 3) + run("parts", 6) + run("parts", 8) + run("parts", 99) == whole


def test_fewer_batches_than_are_done_are_told(folder: Path) -> None:
    def rest(batches: list[int]) -> None:
        with gp.Checkpointer(make(), folder) as checkpoints:
            checkpoints.restore()
            assert not list(checkpoints.remaining(batches))

    with pytest.raises(gp.CheckpointError, match="after 2 batches, and `remaining` was given 1: nothing was trained"):
        rest([0])
    rest([0, 1])


def no_space(*arguments: Any, **options: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_checkpoint_that_was_not_finished_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "step-00000003.draft").mkdir()
    (folder / "step-00000003.draft" / "half.safetensors").write_bytes(b"x")
    (folder / "latest").unlink()
    with caplog.at_level(logging.WARNING), gp.Checkpointer(make(), folder) as checkpoints:
        assert "saved a checkpoint of step 3, which is removed; the newest whole one is of step 2" in caplog.text
        assert checkpoints.restore() == 2
    assert (folder / "latest").read_text() == "step-00000002\n"


class Shuffled:
    """Shuffles with the global generator, as torch's loader does by default."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(9).tolist())


def test_the_order_of_a_shuffled_epoch_and_the_random_state_come_back(tmp_path: Path) -> None:
    def run(folder: str, stop: int) -> list[tuple[int, float, float]]:
        pipeline = make()
        torch.manual_seed(5)
        random.seed(6)
        drawn = []
        with gp.Checkpointer(pipeline, tmp_path / folder) as checkpoints:
            checkpoints.restore()
            for i in checkpoints.remaining(Shuffled()):
                drawn.append((i, float(torch.rand(())), random.random()))
                pipeline.step(batch_of(i))
                if pipeline.num_steps == stop:
                    checkpoints.save()
                    break
        return drawn

    assert run("parts", 4) + run("parts", 7) + run("parts", 9) == run("whole", 9)


class Counting:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "tensor": torch.full((2,), float(self.count))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["tensor"].tolist() == [state["count"]] * 2
        self.count = state["count"]


def test_other_objects_are_saved_by_name(tmp_path: Path) -> None:
    first, second = Counting(), Counting()
    first.count = 7
    with gp.Checkpointer(make(), tmp_path, states={"counting": first}) as checkpoints:
        checkpoints.save()
    with gp.Checkpointer(make(), tmp_path, states={"counting": second}) as checkpoints:
        checkpoints.restore()
    assert second.count == 7
    with (
        gp.Checkpointer(make(), tmp_path, states={"another": second}) as checkpoints,
        pytest.raises(gp.CheckpointError, match="no state of 'another'"),
    ):
        checkpoints.restore()
    json.loads((tmp_path / "step-00000000" / "manifest.json").read_text().splitlines()[0])


def test_a_step_that_is_not_there_and_wrong_arguments(folder: Path) -> None:
    pipeline = make()
    with gp.Checkpointer(pipeline, folder) as checkpoints:
        with pytest.raises(gp.CheckpointError, match="no checkpoint of step 7; there are those of steps 1, 2"):
            checkpoints.restore(7)
        pipeline.accumulate(batch_of(0))
        with pytest.raises(gp.CheckpointError, match="save after the update"):
            checkpoints.save()
    for arguments in ({"keep": 0}, {"save_every": 0}):
        with pytest.raises(ValueError, match="at least 1, not 0"):
            gp.Checkpointer(pipeline, folder, **arguments)


def test_batches_that_are_drawn_while_a_checkpoint_is_written_are_not_in_it(
    tmp_path: Path, goes_on: threading.Event
) -> None:
    pipeline = make()
    with gp.Checkpointer(pipeline, tmp_path, saving=gp.Saving.ASYNCHRONOUS) as checkpoints:
        for seed in checkpoints.remaining(range(4)):
            pipeline.step(batch_of(seed))
            if seed == 1:
                checkpoints.save()
        goes_on.set()
    pipeline = make()
    with gp.Checkpointer(pipeline, tmp_path) as checkpoints:
        checkpoints.restore()
        assert list(checkpoints.remaining(range(4))) == [2, 3]


def test_a_large_state_is_written_as_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphpipe.runtime.checkpoint._FILE_BYTES", 100)
    pipeline = make()
    pipeline.step(batch_of(0))
    with gp.Checkpointer(pipeline, tmp_path) as checkpoints:
        checkpoints.save()
    files = list((tmp_path / "step-00000001").glob("*.safetensors"))
    assert len(files) > 3
    again = make()
    with gp.Checkpointer(again, tmp_path) as checkpoints:
        checkpoints.restore()
    assert same(state_of(again), state_of(pipeline))
    pipeline.step(batch_of(1))
    again.step(batch_of(1))
    assert same(state_of(again), state_of(pipeline))


def test_a_rate_that_is_a_tensor_stays_one(tmp_path: Path) -> None:
    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=torch.tensor(0.1))

    pipeline = make(optimizer=adamw)
    assert pipeline.optimizer is not None
    with gp.Checkpointer(pipeline, tmp_path) as checkpoints:
        pipeline.step(batch_of(0))
        pipeline.optimizer.param_groups[0]["lr"].fill_(0.3)
        checkpoints.save()
    again = make(optimizer=adamw)
    assert again.optimizer is not None
    rate = again.optimizer.param_groups[0]["lr"]
    with gp.Checkpointer(again, tmp_path) as checkpoints:
        checkpoints.restore()
    assert again.optimizer.param_groups[0]["lr"] is rate
    assert torch.equal(rate, torch.tensor(0.3))


class Expanded(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("one", torch.ones(1).expand(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.one)


def test_a_buffer_whose_entries_share_memory_is_kept_or_refused(tmp_path: Path) -> None:
    with gp.Checkpointer(make(Expanded()), tmp_path) as checkpoints:
        checkpoints.save()
    with gp.Checkpointer(make(Expanded()), tmp_path) as checkpoints:
        checkpoints.restore()
    other = Expanded()
    other.one = torch.full((1,), 2.0).expand(3)
    with (
        gp.Checkpointer(make(other), tmp_path) as checkpoints,
        pytest.raises(gp.CheckpointError, match="'one' cannot be set"),
    ):
        checkpoints.restore()


def test_a_queue_among_the_files_is_refused(folder: Path) -> None:
    (shard,) = (folder / "step-00000002").glob("*.safetensors")
    shard.unlink()
    os.mkfifo(shard)
    with (
        gp.Checkpointer(make(), folder) as checkpoints,
        pytest.raises(gp.CheckpointError, match=r"not a file, but a device or a queue; .*restore\(1\)"),
    ):
        checkpoints.restore()
