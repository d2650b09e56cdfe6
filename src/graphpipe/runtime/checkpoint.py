"""Saves the state of a training job while it runs, and takes it up again under the same or another strategy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from graphpipe.errors import CheckpointError
from graphpipe.runtime.agreement import Agreement
from graphpipe.runtime.background import Background
from graphpipe.runtime.checkpoint_folder import CheckpointFolder, FileFacts
from graphpipe.runtime.checkpoint_state import (
    RankState,
    Stateful,
    check_layout,
    empty_tensor,
    fit_schedule,
    layout_of,
    model_tensors,
    parameters_by_group,
    prepare_optimizer,
    random_state,
    save_optimizer,
    set_random_state,
    storable,
)
from graphpipe.runtime.meeting import Meeting
from graphpipe.runtime.pipeline import Pipeline
from graphpipe.runtime.plain_data import decode, encode
from graphpipe.runtime.process_group import rank, world_size
from graphpipe.runtime.watchdog import FILES_TIMEOUT, joint_operation

_FILE_BYTES = 1 << 27
_log = logging.getLogger("graphpipe.checkpoint")
# What reading a manifest that another program wrote may raise.
_MALFORMED = (KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError)
_T = TypeVar("_T")
_SCHEDULE = "pipeline.lr_scheduler"


class Saving(Enum):
    """When training goes on while a checkpoint is written.

    Attributes:
        SYNCHRONOUS: Once it is on disk.
        ASYNCHRONOUS: Once the state is copied in memory; a thread writes the copy.
    """

    SYNCHRONOUS = "synchronous"
    ASYNCHRONOUS = "asynchronous"


class Checkpointer:
    """Keeps the checkpoints of a pipeline in a folder. Every rank makes one; every method is called on all ranks.

    A checkpoint holds the model's parameters and buffers, the optimizer's state and options, the steps and batches
    done, the state of the random generators, and that of other objects that are given::

        with gp.Checkpointer(pipeline, "checkpoints", save_every=100) as checkpoints:
            checkpoints.restore()  # goes on where the last job ended, if there was one
            for batch in checkpoints.remaining(batches):
                pipeline.step(batch)
                checkpoints.save_if_due()

    Under the same strategy training goes on to the last bit as if it had not been interrupted, under another one
    within the rounding of sums. On several machines the folder must be one that all of them see.

    Args:
        pipeline: With its example batch, so that its optimizer exists.
        folder: Where the checkpoints are. One job at a time may use it; it may not exist yet.
        save_every: Steps between the checkpoints of `save_if_due`; None to save with `save` only.
        keep: How many of the newest checkpoints stay.
        saving: Whether steps go on while a checkpoint is written.
        states: Other objects to save, by name: loaders, or whatever else has ``state_dict`` and ``load_state_dict``.
            They should be the same on every rank: under another number of ranks, new ones get the state of the first.

    Raises:
        CheckpointError: Another job uses the folder.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        folder: str | Path,
        *,
        save_every: int | None = None,
        keep: int = 3,
        saving: Saving = Saving.SYNCHRONOUS,
        states: Mapping[str, Stateful] | None = None,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}")
        if save_every is not None and save_every < 1:
            raise ValueError(f"save_every must be at least 1, not {save_every}")
        self._pipeline = pipeline
        self._folder = CheckpointFolder(Path(folder))
        self._save_every = save_every
        self._keep = keep
        self._saving = saving
        self._states = dict(states or {})
        own = set(pipeline.tensors)
        self._writing: Background | None = None
        self._saved_step: int | None = None
        self._batches_drawn: int | None = None
        self._batches_before = 0
        self._random_before: dict[str, Any] | None = None
        self._is_half_restored = False
        with joint_operation("the opening of the checkpoints", FILES_TIMEOUT):
            self._ranks = Agreement(FILES_TIMEOUT)
            held = set().union(*self._ranks.gather(own))
            self._unheld = sorted(set(model_tensors(pipeline.model)) - held)
            # A job may save where there was nothing, or what follows a checkpoint that it took up.
            self._older_step = self._ranks.on_first_rank(self._open)

    def _open(self) -> int | None:
        """Lock the folder, tidy it, and return the step of its newest checkpoint."""
        self._folder.lock()
        steps = self._folder.steps()
        for step in self._folder.remove_drafts():
            newest = f"the newest whole one is of step {steps[-1]}" if steps else "there is no whole one"
            _log.warning("a job ended while it saved a checkpoint of step %d, which is removed; %s", step, newest)
        # A job may have ended between the last file of a checkpoint and `latest`.
        self._folder.point_to_latest()
        return steps[-1] if steps else None

    # ---- saving

    def save_if_due(self) -> None:
        """Save a checkpoint if `save_every` steps have passed and no gradients are waiting for an update.

        Raises:
            CheckpointError: As `save` does.
        """
        if self._save_every is None or self._pipeline.has_accumulated:
            return
        if self._pipeline.num_steps and self._pipeline.num_steps % self._save_every == 0:
            self.save()

    def save(self) -> None:
        """Save a checkpoint now, unless that of this step is saved.

        Raises:
            CheckpointError: It cannot be written, for want of space for example, or the folder has checkpoints that
                this job did not restore. Those before it are left as they are, and training may go on. An
                asynchronous one that failed is reported by the next call, once that has saved another.
        """
        try:
            self.wait()
        except CheckpointError:
            self._save()
            raise
        self._save()

    def _save(self) -> None:
        if self._pipeline.has_accumulated:
            raise CheckpointError("gradients that were accumulated are not saved; save after the update, not before it")
        step = self._pipeline.num_steps
        if step == self._saved_step:
            return
        if self._is_half_restored:
            raise CheckpointError(
                f"a checkpoint could be taken up in part only, so what the job has at step {step} is neither that one "
                "nor its own; restore another one before the next step"
            )
        if self._older_step is not None:
            raise CheckpointError(
                f"{str(self._folder.path)!r} has a checkpoint of step {self._older_step}, which this job, at step "
                f"{step}, did not go on from; restore it before the first step, or name another folder"
            )
        with joint_operation("the saving of a checkpoint", FILES_TIMEOUT):
            self._pipeline.meet(Meeting.CHECKPOINT)
            state = self._ranks.everywhere(self._state)
            # Training may go on while the checkpoint is written.
            batches = step if self._batches_drawn is None else self._batches_drawn
            self._ranks.on_first_rank(lambda: self._folder.begin(step))
            if self._saving is Saving.ASYNCHRONOUS:
                copied = state.snapshot()
                self._writing = Background(lambda: self._write(step, batches, copied))
            else:
                self._write(step, batches, state)
        self._saved_step = step

    def wait(self) -> None:
        """Wait for a checkpoint that is being written.

        Raises:
            CheckpointError: It could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            try:
                with joint_operation("the end of the saving of a checkpoint", FILES_TIMEOUT):
                    writing.join()
            except CheckpointError:
                self._saved_step = None
                raise

    def close(self) -> None:
        """Wait for a checkpoint that is being written, and let other jobs use the folder.

        Raises:
            CheckpointError: It could not be written, or `remaining` was given fewer batches than are done.
        """
        try:
            self.wait()
        finally:
            self._folder.unlock()
        if self._batches_drawn is not None and self._batches_drawn < self._batches_before:
            raise CheckpointError(
                f"the checkpoint was saved after {self._batches_before} batches, and `remaining` was given "
                f"{self._batches_drawn}: nothing was trained; pass all batches of the job, of every epoch"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.close()
        else:
            # Other ranks may not come here: nothing that waits for them. Nobody else may write while this job does.
            writing, self._writing = self._writing, None
            if writing is None:
                self._folder.unlock()
            else:
                writing.at_end(self._folder.unlock)

    def _state(self) -> RankState:
        """Return this rank's part of a checkpoint."""
        pipeline = self._pipeline
        tensors = {f"model.{name}": tensor for name, tensor in pipeline.tensors.items()}
        if rank() == 0:
            unheld = model_tensors(pipeline.model)
            tensors |= {f"model.{name}": unheld[name] for name in self._unheld}
        names = self._names()
        optimizer = pipeline.optimizer
        record: dict[str, Any] = {
            "optimizer": save_optimizer(optimizer, names, tensors) if optimizer is not None else None,
            "random": encode(random_state(), tensors, f"rank.{rank()}.random"),
            "states": {
                name: encode(state.state_dict(), tensors, f"rank.{rank()}.states.{name}")
                for name, state in self._all_states().items()
            },
        }
        return RankState(tensors, record)

    def _names(self) -> dict[int, str]:
        """Return the original name of each parameter of this rank by its identity."""
        return {id(parameter): name for name, parameter in self._pipeline.parameters.items()}

    def _all_states(self) -> dict[str, Stateful]:
        own = {_SCHEDULE: self._pipeline.lr_scheduler, "pipeline.loss_scaler": self._pipeline.loss_scaler}
        return {**self._states, **{name: state for name, state in own.items() if state is not None}}

    def _write(self, step: int, batches: int, state: RankState) -> None:
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        draft = self._folder.draft_of_step(step)
        try:
            tensors = self._ranks.everywhere(lambda: {name: storable(tensor) for name, tensor in state.tensors.items()})
            layouts = self._ranks.gather({name: tensor.nbytes for name, tensor in tensors.items()})
            writer = HuggingFaceStorageWriter(
                str(draft), fqn_to_index_mapping=_file_numbers(layouts), save_distributed=True
            )
            try:
                save(tensors, storage_writer=writer, process_group=self._ranks.group)
            except CheckpointException as error:
                raise CheckpointError(_first_failure(error)) from error
            self._finish(step, batches, state, draft)
        except CheckpointError as error:
            if rank() == 0:
                self._folder.abandon(step)
            older = self._folder.steps()
            left = f"that of step {older[-1]} is still there" if older else "there is none yet"
            raise CheckpointError(f"the checkpoint of step {step} could not be saved: {error}; {left}") from error

    def _finish(self, step: int, batches: int, state: RankState, draft: Path) -> None:
        """Write the manifest, once every rank has written its tensors."""

        def checksums() -> dict[str, FileFacts]:
            mine = sorted(draft.iterdir())[rank() :: world_size()]
            return {path.name: FileFacts.of(path) for path in mine}

        found = self._ranks.gather((self._ranks.everywhere(checksums), layout_of(state.tensors), state.record))
        files = {name: facts for part, _, _ in found for name, facts in part.items()}
        content = {
            "batches": batches,
            "model": self._pipeline.model_fingerprint,
            "torch": torch.__version__,
            "tensors": {name: layout for _, part, _ in found for name, layout in part.items()},
            "ranks": [record for _, _, record in found],
        }

        self._ranks.on_first_rank(lambda: self._folder.finish(step, content, files, keep=self._keep))

    # ---- restoring

    def restore(self, step: int | None = None) -> int:
        """Take up the newest checkpoint, and return its step; 0 if there is none.

        Call it before the first step. Parameters that were frozen then and are trained now, or another optimizer, are
        refused; the learning rates and other options of the optimizer are those of the checkpoint.

        Args:
            step: The step of an older checkpoint to go back to. Newer ones are renamed, and no longer counted.

        Raises:
            CheckpointError: The checkpoint is damaged, of another model, or there is none of this step.
        """
        self.wait()
        with joint_operation("the taking up of a checkpoint", FILES_TIMEOUT):
            found = self._ranks.on_first_rank(lambda: self._find(step))
            if found is None:
                return 0
            chosen, manifest = found
            files = self._ranks.everywhere(lambda: self._folder.files_of(chosen, manifest))
            mine = sorted(files)[rank() :: world_size()]
            self._ranks.everywhere(lambda: self._folder.check_files(chosen, files, mine))
            self._restore(chosen, manifest)
            if step is not None:
                self._ranks.on_first_rank(lambda: self._set_aside(step))
        return chosen

    def _restore(self, step: int, manifest: Mapping[str, Any]) -> None:
        def attempt(work: Callable[[], _T]) -> _T:
            try:
                return work()
            except _MALFORMED as error:
                raise self._folder.damaged(
                    step, f"its manifest is malformed ({type(error).__name__}: {error})"
                ) from error

        batches = self._ranks.everywhere(lambda: attempt(lambda: self._check_model(step, manifest)))
        # From here on there is no way back to what was before.
        self._is_half_restored = True
        self._pipeline.has_whole_model = False
        targets = self._ranks.everywhere(lambda: attempt(lambda: self._targets(manifest)))
        self._read(step, targets)
        self._ranks.everywhere(lambda: attempt(lambda: self._take_up(step, manifest["ranks"], targets)))
        self._is_half_restored = False
        self._pipeline.num_steps = self._saved_step = step
        self._older_step = None
        self._batches_before, self._batches_drawn = batches, None

    def _find(self, step: int | None) -> tuple[int, dict[str, Any]] | None:
        steps = self._folder.steps()
        if step is not None and step not in steps:
            there = f"there are those of steps {', '.join(map(str, steps))}" if steps else "there is none"
            raise CheckpointError(f"{str(self._folder.path)!r} has no checkpoint of step {step}; {there}")
        if not steps:
            return None
        chosen = steps[-1] if step is None else step
        return chosen, self._folder.read_manifest(chosen)

    def _set_aside(self, step: int) -> None:
        for path in self._folder.set_aside_after(step):
            _log.warning("going back to step %d; the later checkpoint is kept as %s", step, path)

    def _check_model(self, step: int, manifest: Mapping[str, Any]) -> int:
        """Check that a checkpoint is of this model, and return how many batches it comes after."""
        found = {n: layout for n, layout in manifest["tensors"].items() if n.startswith("model.")}
        model = model_tensors(self._pipeline.model)
        expected = layout_of({f"model.{name}": tensor for name, tensor in model.items()})
        check_layout(found, expected, step)
        # Another release of torch may take the same model apart in another way.
        if manifest["torch"] == torch.__version__ and manifest["model"] != self._pipeline.model_fingerprint:
            raise CheckpointError(
                f"the checkpoint of step {step} is of another model: its parameters have the same names and "
                "shapes, but the operations between them differ; build the model that was saved, or begin with its "
                "exported parameters"
            )
        return int(manifest["batches"])

    def _targets(self, manifest: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the tensors of this rank that the files of a checkpoint fill, by their names there."""
        pipeline, layout = self._pipeline, manifest["tensors"]
        unheld = model_tensors(pipeline.model)
        targets: dict[str, Tensor] = {f"model.{name}": tensor for name, tensor in pipeline.tensors.items()}
        targets |= {f"model.{name}": unheld[name] for name in self._unheld}
        targets |= {name: empty_tensor(entry) for name, entry in layout.items() if name.startswith("rank.")}
        records = [record["optimizer"] for record in manifest["ranks"] if record["optimizer"] is not None]
        if pipeline.optimizer is not None and records:
            targets |= prepare_optimizer(pipeline.optimizer, self._names(), records, layout)
        return targets

    def _read(self, step: int, targets: Mapping[str, Tensor]) -> None:
        """Fill tensors from the files of a checkpoint."""
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.checkpoint.state_dict_loader import load

        buffers = {name: storable(tensor) for name, tensor in targets.items()}
        reader = HuggingFaceStorageReader(str(self._folder.of_step(step)))
        try:
            load(buffers, storage_reader=reader, process_group=self._ranks.group)
        except CheckpointException as error:
            raise self._folder.damaged(step, _first_failure(error)) from error
        for name, tensor in targets.items():
            if not tensor.is_contiguous():
                found = buffers[name]
                _copy(name, tensor, torch.view_as_complex(found) if tensor.is_complex() else found)

    def _take_up(self, step: int, records: Sequence[Mapping[str, Any]], tensors: Mapping[str, Tensor]) -> None:
        """Give this rank's other objects their states, from its own record if there is one."""
        mine = records[rank() % len(records)]
        for name, state in self._all_states().items():
            saved = [record for record in (mine, *records) if name in record["states"]]
            if not saved:
                raise CheckpointError(
                    f"the checkpoint of step {step} has no state of {name!r}; the job that saved it had none"
                )
            found = [decode(record["states"][name], tensors) for record in saved]
            if name == _SCHEDULE:
                groups = [[group["parameters"] for group in record["optimizer"]["groups"]] for record in saved]
                own = parameters_by_group(self._pipeline.optimizer, self._names())
                state.load_state_dict(fit_schedule(state.state_dict(), own, found, groups))
            else:
                state.load_state_dict(found[0])
        self._random_before = random_state()
        set_random_state(decode(mine["random"], tensors))

    def remaining(self, batches: Iterable[_T]) -> Iterator[_T]:
        """Yield the batches that have not been trained on, of the same sequence as in the job that was interrupted.

        Those before are drawn and dropped, with the random state in which they were drawn then. A job of several epochs
        may call this once an epoch: those that are done yield nothing.

        Args:
            batches: All batches of the job, from the first on, or those of its next epoch.
        """
        drawn = self._batches_drawn = self._batches_drawn or 0
        if drawn < self._batches_before and self._random_before is not None:
            now = random_state()
            set_random_state(self._random_before)
            stream = iter(batches)
            for _ in islice(stream, self._batches_before - drawn):
                self._batches_drawn += 1
            self._random_before = random_state()  # Where the epoch ends before the batches do, the next one goes on.
            set_random_state(now)
        else:
            stream = iter(batches)
        for batch in stream:
            self._batches_drawn += 1
            yield batch


def _copy(name: str, target: Tensor, found: Tensor) -> None:
    try:
        target.copy_(found)
    except RuntimeError as error:
        if not torch.equal(target, found):
            raise CheckpointError(
                f"{name.removeprefix('model.')!r} cannot be set, since its entries share memory; make it contiguous()"
            ) from error


def _file_numbers(layouts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Return in which file of its rank each tensor is written, from 1, by the bytes of each rank's tensors.

    While safetensors puts a file together, it lets no other thread of the process run, and has it in memory twice.
    """
    numbers: dict[str, int] = {}
    number = 0
    for layout in layouts:
        space = 0
        for name, num_bytes in layout.items():
            if name in numbers:
                continue
            if num_bytes > space:
                number, space = number + 1, _FILE_BYTES
            numbers[name] = number
            space -= num_bytes
    return numbers


def _first_failure(error: Any) -> str:
    """Return what went wrong first in torch.distributed.checkpoint."""
    where, (cause, _) = min(error.failures.items(), key=lambda item: int(item[0]))
    return f"rank {where}: {type(cause).__name__}: {cause}"
