"""The evaluations and predictions of one training, each made when a batch of its kind is first seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from graphpipe.capture import CapturedModel, capture_evaluation, capture_prediction
from graphpipe.errors import CaptureError
from graphpipe.runtime.evaluation import Evaluation, Lower
from graphpipe.runtime.executor import Executor
from graphpipe.runtime.meeting import Meeting, Meetings, Progress
from graphpipe.runtime.stages import shapes_of
from graphpipe.runtime.watchdog import Watchdog
from graphpipe.stage import StageGraph

Structure = Callable[[Sequence[Tensor], Mapping[str, Tensor]], Any]
_Kind = tuple[Meeting, str]


@dataclass(frozen=True)
class Prepared:
    """An evaluation that all ranks are about to run.

    Attributes:
        evaluation: This rank's part.
        inputs: The batch by input name.
        structure: Makes what the model returns from its tensors and the batch; None where only the loss is asked for.
    """

    evaluation: Evaluation
    inputs: Mapping[str, Tensor]
    structure: Structure | None

    @property
    def num_samples(self) -> int:
        """The samples of the batch."""
        return self.evaluation.captured.num_samples(self.inputs)

    def structured(self, pieces: Mapping[str, Tensor]) -> Any:
        """Return what the model returns, from the pieces of all ranks."""
        assert self.structure is not None
        return self.structure(self.evaluation.joined(pieces), self.inputs)


class Evaluations:
    """Captures the model by kind of batch, and lowers it by number of samples.

    Args:
        trained: The model as it was captured for training.
        stages: Those of the training.
        base: The rank's executor in training.
        meetings: Where ranks compare their batches.
        watchdog: Is told where the rank is.
        lower: Makes the program of stages.
    """

    def __init__(
        self,
        trained: CapturedModel,
        stages: StageGraph,
        base: Executor,
        meetings: Meetings,
        watchdog: Watchdog,
        lower: Lower,
    ) -> None:
        self._trained = trained
        self._stages = stages
        self._base = base
        self._meetings = meetings
        self._watchdog = watchdog
        self._lower = lower
        # None where sizes that are free in training cannot be so in eval mode.
        self._captured: dict[_Kind, tuple[CapturedModel, Structure | None] | None] = {}
        self._evaluations: dict[tuple[_Kind, int], Evaluation] = {}

    def prepare(self, meeting: Meeting, batch: Any, progress: Progress) -> Prepared:
        """Return what to run for a batch that all ranks are given.

        Args:
            meeting: An evaluation or a prediction.
            batch: The batch, the same on every rank.
            progress: How far the training is.

        Raises:
            CaptureError: The model cannot be captured in eval mode.
            BatchError: Ranks were given different batches.
        """
        kind, captured, structure = self._captured_for(meeting, batch)
        inputs = captured.flatten_batch(batch)
        with self._watchdog.operation("the comparison of the batches"):
            count = self._meetings.num_samples(meeting, captured, inputs, progress, position=None)
        sized = (kind, count)
        if sized not in self._evaluations:
            self._evaluations[sized] = Evaluation.of(
                self._trained, self._stages, captured, self._base, count, self._lower
            )
        return Prepared(self._evaluations[sized], inputs, structure)

    def _captured_for(self, meeting: Meeting, batch: Any) -> tuple[_Kind, CapturedModel, Structure | None]:
        """Return the kind of a batch, and the model in eval mode as it was captured for it."""
        free_sizes = self._trained.free_sizes_of(batch)
        kind = (meeting, self._trained.kind_of(batch, free_sizes))
        if free_sizes and kind not in self._captured:
            try:
                self._captured[kind] = self._capture(meeting, batch, free_sizes)
            except CaptureError:
                self._captured[kind] = None
        found = self._captured.get(kind)
        if found is None or not found[0].fits_free_sizes(batch):
            kind = (meeting, self._trained.kind_of(batch, {}))
            found = self._captured.get(kind) or self._capture(meeting, batch, {})
            self._captured[kind] = found
        return kind, *found

    def _capture(
        self, meeting: Meeting, batch: Any, free_sizes: Mapping[str, Mapping[int, str]]
    ) -> tuple[CapturedModel, Structure | None]:
        trained = self._trained
        batch = trained.with_several_samples(batch)
        options: dict[str, Any] = {
            "loss_fn": trained.loss_fn,
            "free_sizes": free_sizes,
            "sample_axes": trained.sample_axes,
        }
        with trained.autocast.applied():
            if meeting is Meeting.EVALUATION:
                return capture_evaluation(trained.model, batch, **options), None
            return capture_prediction(trained.model, batch, **options)

    def run(self, prepared: Prepared, purpose: str) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this rank's part of the loss, and of the outputs by ``name start stop``.

        Args:
            prepared: What to run.
            purpose: What it is, as a noun, where the watchdog tells of it.
        """
        evaluation = prepared.evaluation
        executor = evaluation.executor
        executor.position = self._watchdog.cells
        shapes = shapes_of(prepared.inputs)
        executor.first_place = self._watchdog.place(evaluation.program, self._base.device, shapes, purpose)
        found = evaluation.run(prepared.inputs)
        self._watchdog.has_run()
        return found
