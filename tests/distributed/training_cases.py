"""What each rank does in a case about optimizers, precision and data. Every model is captured as a user's would be."""

from __future__ import annotations

import copy
import math
import os
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, LRScheduler, ReduceLROnPlateau
from torch.utils import _pytree as pytree

from graphpipe.capture import CapturedModel, capture, eager_loss
from graphpipe.errors import BatchError, GraphPipeError
from graphpipe.program import lower
from graphpipe.runtime.checkpoint import Checkpointer
from graphpipe.runtime.loss_scale import LossScaling
from graphpipe.runtime.pipeline import LossFunction, Pipeline
from graphpipe.runtime.sharding import OptimizerStates
from graphpipe.schedule import ModelCosts
from graphpipe.simulator import simulate
from graphpipe.trace import SpanKind
from tests.capture.test_capture_cases import Reshapes, Rotary
from tests.distributed import parity
from tests.distributed.cases import Chain, batch_of, mean_square
from tests.distributed.parity import Part, hand_made, relative, sgd


class TwoScales(nn.Module):
    """The mean of ``a * left + b * right``, whose gradients are the means of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return (self.a(left) + self.b(right)).mean()


class Tied(nn.Module):
    """An embedding whose table is also the last layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.middle, self.head = nn.Embedding(11, 4), nn.Linear(4, 4), nn.Linear(4, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = torch.tanh(self.middle(self.table(ids)))
        return functional.cross_entropy(self.head(hidden), labels)


def ids_of(num_samples: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(0, 11, (num_samples,), generator=generator) for name in ("ids", "labels")}


def train_both(
    model: nn.Module,
    parts: Sequence[Part],
    batches: Sequence[Any],
    *,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    loss_fn: LossFunction | None = None,
    lr_scheduler: Any = None,
    max_gradient_norm: float | None = None,
    accumulated: int = 1,
    num_devices: int = 0,
    free_sizes: Any = types.MappingProxyType({}),
    alone: nn.Module | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train by a strategy and in one process with torch's own clipping and schedule; return what differs.

    The one process trains `alone`, by default a copy of the model; the pipeline is given `options` besides.
    """
    alone = alone or copy.deepcopy(model)
    captured = capture(model, batches[0], loss_fn=loss_fn, free_sizes=free_sizes)
    size = captured.num_samples(captured.flatten_batch(batches[0]))
    pipeline = Pipeline(
        captured,
        hand_made(captured, parts, size, num_devices=num_devices),
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        max_gradient_norm=max_gradient_norm,
        transport=parity.kind,
        **options,
    )
    reference = optimizer(list(alone.named_parameters()))
    schedule = None if lr_scheduler is None else lr_scheduler(reference)
    errors, copies, norms, expected_norms = 0.0, True, [], []
    rates: list[list[float]] = []
    expected_rates: list[list[float]] = []
    for start in range(0, len(batches), accumulated):
        group = batches[start : start + accumulated]
        reference.zero_grad(set_to_none=True)
        for batch in group:
            loss = eager_loss(alone, batch, loss_fn)
            loss.backward()
        if max_gradient_norm is not None:
            expected_norms.append(float(nn.utils.clip_grad_norm_(alone.parameters(), max_gradient_norm)))
        reference.step()
        for batch in group[:-1]:
            pipeline.accumulate(batch)
            pipeline.evaluate(batch)  # is to leave what was accumulated as it is
        result = pipeline.step(group[-1])
        norms.append(result.gradient_norm)
        if isinstance(schedule, ReduceLROnPlateau):
            schedule.step(loss.detach())
            if pipeline.lr_scheduler is not None:
                pipeline.lr_scheduler.step(result.loss)
        elif schedule is not None:
            schedule.step()
        gradients, parameters = pipeline.gather_gradients(), pipeline.gather_parameters()
        for name, parameter in alone.named_parameters():
            if parameter.grad is not None:
                errors = max(errors, relative(gradients[name], parameter.grad))
            errors = max(errors, relative(parameters[name], parameter.detach()))
        copies = copies and all(torch.equal(parameters[n], p.detach()) for n, p in pipeline.parameters.items())
        if pipeline.optimizer is not None:
            rates.append([group["lr"] for group in pipeline.optimizer.param_groups])
            expected_rates.append([group["lr"] for group in reference.param_groups])
    return {
        "error": errors,
        "copies_equal": copies,
        "norms": norms,
        "expected_norms": expected_norms,
        "rates": rates,
        "group_sizes": []
        if pipeline.optimizer is None
        else [len(g["params"]) for g in pipeline.optimizer.param_groups],
        "expected_rates": expected_rates,
        "small_gradients": {n: float(g) for n, g in gradients.items() if g.numel() == 1},
        "sparse": sorted(n for n, p in pipeline.parameters.items() if p.grad is not None and p.grad.is_sparse),
    }


def updates(folder: str) -> dict[str, Any]:
    """Clipping, schedules, parameter groups and accumulation on three processes, one of them idle at times."""
    scales = {"left": torch.full((4, 1), 3.0), "right": torch.full((4, 1), 4.0)}
    ids = [ids_of(8, seed) for seed in range(5)]
    chain = [batch_of(8, seed=seed) for seed in range(6)]
    first_last = [("table", 2, (0,)), ("middle", 4, (1,)), ("", 4, (2,))]
    around = [("table", 2, (0,)), ("middle", 4, (1,)), ("", 4, (0,))]
    two_first = [("table", 4, (0, 1)), ("", 4, (2,))]
    replicated = [("a b", 4, (0, 1)), ("", 4, (2,))]
    four = [("a b", 2, (0,)), ("c", 2, (1,)), ("", 4, (2,))]
    shared = {"optimizer": grouped, "optimizer_states": OptimizerStates.SHARDED, "loss_fn": mean_square}
    torch.manual_seed(0)
    rotary, reshapes = Rotary(), Reshapes()
    views = [("first", 1, (0,)), ("", 2, (1,))]
    tables = [("layers.0", 2, (0,)), ("layers.1 layers.2", 8, (1,)), ("", 4, (2,))]
    return {
        "three and four": train_both(
            TwoScales(), [("a", 2, (0,)), ("", 2, (1,))], [scales], max_gradient_norm=1.0, num_devices=3
        ),
        "replicas": train_both(TwoScales(), [("a", 2, (0, 1)), ("", 2, (2,))], [scales], max_gradient_norm=1.0),
        "tied": train_both(Tied(), first_last, ids, optimizer=adamw, max_gradient_norm=0.5),
        "tied on one rank": train_both(Tied(), around, ids, max_gradient_norm=0.5, num_devices=3),
        "tied with replicas": train_both(Tied(), two_first, ids, optimizer=adamw, max_gradient_norm=0.5),
        "groups": train_both(Chain(), four, chain, loss_fn=mean_square, optimizer=grouped, lr_scheduler=warm_up),
        "groups shared": train_both(Chain(), replicated, chain, lr_scheduler=warm_up, **shared),
        "cyclic": train_both(Chain(), replicated, chain, lr_scheduler=cyclic, **shared),
        "plateau": train_both(Chain(), replicated, chain, lr_scheduler=plateau, **shared),
        "plateau with copies": train_both(
            Chain(), replicated, chain, loss_fn=mean_square, optimizer=grouped, lr_scheduler=plateau
        ),
        "accumulation": train_both(
            Chain(), replicated, chain, loss_fn=mean_square, max_gradient_norm=0.1, accumulated=3
        ),
        "constants": train_both(rotary, tables, [{"x": torch.randn(8, 5, 4)}]),
        "views": train_both(reshapes, views, [{"x": torch.randn(8, 2, 6)}], num_devices=3),
        "tied and saved": tied_weights(folder),
        "measured": train_both(Chain(), four, chain, loss_fn=mean_square, max_gradient_norm=math.inf),
    }


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def grouped(parameters: Any) -> torch.optim.Optimizer:
    """Biases without weight decay, and layer c with a learning rate of its own: no rank has all of the groups."""
    pairs = list(parameters)
    return torch.optim.SGD(
        [
            {"params": [p for n, p in pairs if n.endswith("bias")], "weight_decay": 0.0},
            {"params": [p for n, p in pairs if n.endswith("weight") and n != "c.weight"]},
            {"params": [p for n, p in pairs if n == "c.weight"], "lr": 0.2},
        ],
        lr=0.05,
        momentum=0.9,
        weight_decay=0.1,
    )


def warm_up(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, [lambda step: (step + 1) / 4, lambda step: 1 / (step + 1), lambda _: 1.0])


def cyclic(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Take the groups through rates of their own and, against them, one momentum."""
    return CyclicLR(optimizer, [0.01, 0.02, 0.03], [0.1, 0.2, 0.3], step_size_up=2, step_size_down=3)


def plateau(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Lower the rates whenever the loss is not lower by half than the best so far."""
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5, min_lr=[0.01, 0.02, 0.0])


def tied_weights(folder: str) -> dict[str, Any]:
    """C16: an embedding tied to the head, on the first and the last rank or on one; saved after three of five steps."""
    batches = [ids_of(8, seed) for seed in range(5)]
    found = {}
    for name, last in (("two ranks", 2), ("one rank", 0)):
        parts: list[Part] = [("table", 2, (0,)), ("middle", 4, (1,)), ("", 4, (last,))]

        def pipeline(parts: list[Part] = parts) -> Pipeline:
            captured = capture(Tied(), batches[0])
            strategy = hand_made(captured, parts, 8, num_devices=3)
            return Pipeline(captured, strategy, optimizer=adamw, max_gradient_norm=0.5, transport=parity.kind)

        first, second = pipeline(), pipeline()
        path = f"{folder}/{parity.kind} {name}"
        for batch in batches[:3]:
            first.step(batch)
        with Checkpointer(first, path) as checkpoints:
            checkpoints.save()
        with Checkpointer(second, path) as checkpoints:
            checkpoints.restore()
        for batch in batches[3:]:
            first.step(batch)
            second.step(batch)
        parameters, state = second.gather_parameters(), second.gather_state_dict()
        plain = Tied()
        plain.load_state_dict(state, strict=True)
        modules = second._built().modules
        found[name] = {
            "resumed": all(torch.equal(p, first.parameters[n]) for n, p in second.parameters.items()),
            "copies_equal": all(torch.equal(p, parameters[n]) for n, p in second.parameters.items()),
            "count": sum(p.numel() for p in parameters.values()),
            "expected_count": sum(p.numel() for p in plain.parameters()),
            "is_tied": plain.head.weight is plain.table.weight
            and torch.equal(state["head.weight"], plain.table.weight),
            "copies_here": len({id(p) for m in modules.values() for n, p in m.named_parameters() if "weight" in n}),
        }
    return found


class Branches(nn.Module):
    """Two branches and a head, in float32. The left one starts at zero: its gradient may be large."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.head = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 1)
        nn.init.zeros_(self.left.weight)
        self.float()

    def forward(self, left: Tensor, right: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.left(left)) + torch.tanh(self.right(right))
        return 0.1 * functional.mse_loss(self.head(hidden), y)


def branches_batch(left_scale: float = 1.0, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"left": (8, 8), "right": (8, 8), "y": (8, 1)}
    found = {name: torch.randn(shape, generator=generator, dtype=torch.float32) for name, shape in shapes.items()}
    return {**found, "left": found["left"] * left_scale}


BRANCHES = [("left", 4, (0,)), ("right", 2, (1,)), ("", 4, (2,))]


def bfloat16() -> dict[str, Any]:
    """Autocast around capture and steps, on one process and on three; and a step under another autocast."""
    model, alone = Branches(), Branches()
    batches = [branches_batch(seed=seed) for seed in range(3)]
    with torch.autocast("cpu", torch.bfloat16):
        captured = capture(model, batches[0])
        pipeline = Pipeline(captured, hand_made(captured, BRANCHES, 8), optimizer=sgd, transport=parity.kind)
        reference = sgd(alone.parameters())
        losses, expected = [], []
        for batch in batches:
            losses.append(pipeline.step(batch).loss)
            reference.zero_grad()
            torch.clear_autocast_cache()  # torch would go on with the parameters of before the update
            loss = eager_loss(alone, batch)
            loss.backward()
            reference.step()
            expected.append(float(loss))
        inside = pipeline.forward_backward(batches[0]).loss
    outside = pipeline.forward_backward(batches[0]).loss
    try:
        with torch.autocast("cpu", torch.float16):
            pipeline.step(batches[0])
    except GraphPipeError as error:
        message = str(error)
    parameters = pipeline.gather_parameters()
    return {
        "losses": losses,
        "expected": expected,
        "parameter": max(relative(parameters[n], p.detach()) for n, p in alone.named_parameters()),
        "edges": sorted({str(spec.dtype) for spec in captured.values.values()}),
        "same_outside": outside == inside,
        "message": message,
    }


def scaled(captured: CapturedModel, scaling: LossScaling) -> Pipeline:
    strategy = hand_made(captured, BRANCHES, 8)
    return Pipeline(captured, strategy, optimizer=sgd, loss_scaling=scaling, transport=parity.kind)


def float16(folder: str) -> dict[str, Any]:
    """Loss scaling: the first batches overflow in the left branch alone, on rank 0.

    A second pipeline goes on from a checkpoint after the third batch, one finite update into the growth of the scale.
    """
    model, alone = Branches(), Branches()
    batches = [branches_batch(300.0), branches_batch(100.0), branches_batch(seed=2), branches_batch(seed=3)]
    scaling = LossScaling(growth_interval=2)
    with torch.autocast("cpu", torch.float16):
        captured = capture(model, batches[0])
        pipeline = scaled(captured, scaling)
        reference, scaler = sgd(alone.parameters()), torch.amp.GradScaler("cpu", growth_interval=2)
        assert pipeline.loss_scaler is not None
        rows, expected, unchanged = [], [], []
        for batch in batches:
            before = pipeline.gather_parameters()
            result = pipeline.step(batch)
            after = pipeline.gather_parameters()
            unchanged.append(all(torch.equal(before[name], after[name]) for name in before))
            rows.append((pipeline.loss_scaler.scale, result.is_skipped))
            if len(rows) == 3:
                with Checkpointer(pipeline, folder) as checkpoints:
                    checkpoints.save()
            mine = {n: bool(p.grad is not None and p.grad.isfinite().all()) for n, p in pipeline.parameters.items()}
            if len(rows) == 1:
                finite = all(mine.values())
            reference.zero_grad()
            torch.clear_autocast_cache()
            scaler.scale(eager_loss(alone, batch)).backward()
            scaler.step(reference)
            old = scaler.get_scale()
            scaler.update()
            expected.append((scaler.get_scale(), scaler.get_scale() < old))
        resumed = scaled(capture(Branches(), batches[0]), scaling)
        with Checkpointer(resumed, folder) as checkpoints:
            checkpoints.restore()
        resumed.step(batches[3])
        assert resumed.loss_scaler is not None
        same = all(torch.equal(p, pipeline.parameters[n]) for n, p in resumed.parameters.items())
        same = same and resumed.loss_scaler.state_dict() == pipeline.loss_scaler.state_dict()
        reference.zero_grad()
        torch.clear_autocast_cache()
        for batch in batches[2:]:
            scaler.scale(eager_loss(alone, batch)).backward()
        scaler.unscale_(reference)
        pipeline.accumulate(batches[2])
        pipeline.step(batches[3])
        gradients = pipeline.gather_gradients()
    return {
        "rows": rows,
        "expected": expected,
        "unchanged": unchanged,
        "finite_here": finite,
        "resumed": same,
        "accumulated": max(relative(gradients[n], p.grad) for n, p in alone.named_parameters() if p.grad is not None),
        "parameter": max(relative(after[n], p.detach()) for n, p in alone.named_parameters()),
    }


def precision(folder: str) -> dict[str, Any]:
    """Both in one job."""
    return {"bfloat16": bfloat16(), "float16": float16(f"{folder}/{parity.kind}")}


class Normed(nn.Module):
    """Dropout, batch statistics and, if wanted, an output of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.frozen = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.b, self.drop, self.c = nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)
        self.frozen.eval()

    def forward(self, x: Tensor) -> dict[str, Any]:
        first = self.a(x)
        hidden = self.drop(torch.tanh(self.b(self.frozen(self.norm(first)))))
        logits = self.c(hidden)
        return {
            "logits": (logits, None),
            "n": 3,
            "rows": (len(x), x.shape[0] / 2),
            "statistic": hidden.mean(),
            "wave": torch.complex(logits.float(), hidden.float()),
            "transposed": [hidden.T, self.c.bias],
            "best": logits.argmax(1),
            # Mixes samples, where the stage of what it reads has replicas.
            "largest": first.amax(0),
        }


def logits_error(output: dict[str, Any], batch: dict[str, Tensor]) -> Tensor:
    return functional.mse_loss(output["logits"][0], batch["y"])


def evaluation() -> dict[str, Any]:
    """Eval, train, eval, train: the loss and the whole output in eval mode, of batches of several sizes."""
    model = Normed()
    model.train()
    model.frozen.eval()
    batches = [batch_of(8, seed=seed) for seed in range(3)]
    captured = capture(model, batches[0], loss_fn=logits_error)
    parts = [("a", 4, (0, 1)), ("norm frozen b", 8, (2,)), ("", 3, (0, 1))]
    pipeline = Pipeline(
        captured, hand_made(captured, parts, 8), optimizer=sgd, loss_fn=logits_error, transport=parity.kind
    )
    found: dict[str, Any] = {"loss": [], "output": [], "structure": [], "modes": [], "gradients": []}
    for batch in batches:
        # The first that is seen has fewer samples than its stage has replicas.
        for given in ({name: tensor[:count] for name, tensor in batch.items()} for count in (1, 8, 5)):
            modes = [module.training for module in model.modules()]
            before = pipeline.gather_gradients()
            loss = pipeline.evaluate(given).loss
            output = pipeline.predict({"x": given["x"]})
            after = pipeline.gather_gradients()
            found["modes"].append(modes == [module.training for module in model.modules()])
            found["gradients"].append(
                before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
            )
            alone = copy.deepcopy(model)
            alone.load_state_dict(pipeline.gather_state_dict())
            alone.eval()
            with torch.no_grad():
                expected = alone(given["x"])
            found["loss"].append(relative(torch.tensor(loss), logits_error(expected, given)))
            leaves, tree = pytree.tree_flatten(output)
            expected_leaves, expected_tree = pytree.tree_flatten(expected)
            found["structure"].append(
                tree == expected_tree
                and all(
                    (a.shape, a.dtype) == (b.shape, b.dtype) if isinstance(a, Tensor) else a == b
                    for a, b in zip(leaves, expected_leaves, strict=True)
                )
            )
            pairs = [(a, b) for a, b in zip(leaves, expected_leaves, strict=True) if isinstance(a, Tensor)]
            found["output"].append(max(relative(a.to(b.dtype), b) for a, b in pairs))
        pipeline.step(batch)
    return found


class Sequences(nn.Module):
    """Sequences with a mask, a weight without samples and labels that only the last stage reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, keep: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        hidden = torch.tanh(self.b(torch.tanh(self.a(x))) * keep.unsqueeze(-1))
        return functional.cross_entropy(self.c(hidden).flatten(0, 1), labels.flatten()) * weight


LENGTHS = {name: {1: "length"} for name in ("x", "keep", "labels")}


def sequences_of(length: int, num_samples: int = 6, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_samples, length)
    return {
        "x": torch.randn(*shape, 4, generator=generator),
        "keep": torch.randint(0, 2, shape, generator=generator).bool(),
        "weight": torch.tensor(0.7),
        "labels": torch.randint(0, 3, shape, generator=generator),
    }


class Adapted(nn.Module):
    """A trained adapter below a frozen trunk."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.adapter, self.trunk, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.trunk.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.trunk(torch.tanh(self.adapter(x)))))


class Frozen(nn.Module):
    """A frozen branch beside a trained one, and an adapter on top of the frozen one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.branch, self.adapter = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.trunk.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.adapter(torch.tanh(self.trunk(x))) + torch.tanh(self.branch(x))


def data() -> dict[str, Any]:
    """Lengths that change, batches in parts, mistakes of one rank, and a frozen branch, in one job of three ranks."""
    mine = dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])
    parts = [("a", 2, (0,)), ("b", 3, (1,)), ("", 6, (2,))]
    batches = [sequences_of(5, seed=1), sequences_of(9, seed=2), sequences_of(3, 4, seed=3), sequences_of(9, seed=4)]
    found: dict[str, Any] = {"lengths": train_both(Sequences(), parts, batches, free_sizes=LENGTHS)}

    model, alone = Sequences(), Sequences()
    captured = capture(model, batches[0])
    pipeline = Pipeline(captured, hand_made(captured, parts, 6), optimizer=sgd, transport=parity.kind)
    batch = sequences_of(5, seed=5)
    result = pipeline.step({name: batch[name] for name in pipeline.required_inputs})
    loss = eager_loss(alone, batch)
    loss.backward()
    gradients = pipeline.gather_gradients()
    found["partial"] = {
        "required": pipeline.required_inputs,
        "loss": relative(torch.tensor(result.loss), loss.detach()),
        "gradient": max(relative(gradients[n], p.grad) for n, p in alone.named_parameters() if p.grad is not None),
        "num_samples": result.num_samples,
    }
    mistakes = {
        "misspelt": {**batch, "labls": batch["labels"]},
        "missing": {"weight": batch["weight"]},
        "other count": sequences_of(5, 6 - mine // 2, seed=5),
    }
    found["mistakes"] = {}
    for name, wrong in mistakes.items():
        try:
            pipeline.step(wrong)
        except BatchError as error:
            found["mistakes"][name] = str(error)
    captured = capture(Sequences(), batches[0], free_sizes=LENGTHS)
    pipeline = Pipeline(captured, hand_made(captured, parts, 6), transport=parity.kind)
    try:
        pipeline.step(sequences_of(5 + mine // 2, seed=5))
    except BatchError as error:
        found["mistakes"]["other length"] = str(error)
    return found


def frozen() -> dict[str, Any]:
    """C30: a frozen stage under clipping; what each stage did."""
    model = Frozen()
    before = copy.deepcopy(model.trunk.state_dict())
    batches = [batch_of(8, seed=seed) for seed in range(3)]
    parts = [("trunk", 2, (0,)), ("branch", 2, (1,)), ("", 4, (2,))]
    found = train_both(model, parts, batches, loss_fn=mean_square, max_gradient_norm=0.1)
    captured = capture(Frozen(), batches[0], loss_fn=mean_square)
    strategy = hand_made(captured, parts, 8)
    pipeline = Pipeline(captured, strategy, optimizer=sgd, transport=parity.kind, verify="never")
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
        pipeline.step(batches[0])
    program = lower(strategy.stages, strategy.schedule)
    found["backward"] = sorted({s.stage for s in pipeline.trace().spans if s.kind is SpanKind.BACKWARD})
    found["messages"] = sorted({(m.phase.name, m.source.stage, m.target.stage) for m in program.messages})
    found["unchanged"] = all(torch.equal(before[n], t) for n, t in model.trunk.state_dict().items())
    found["has_optimizer"] = pipeline.optimizer is not None
    found["saved_bytes"] = sum(saved)
    simulated = simulate(program, ModelCosts(strategy.cost_model, strategy.stages))
    found["simulated_backward"] = sorted({s.stage for s in simulated.spans if s.kind is SpanKind.BACKWARD})
    below = [("adapter", 2, (0,)), ("trunk", 2, (1,)), ("", 4, (2,))]
    found["below"] = train_both(Adapted(), below, batches, loss_fn=mean_square, max_gradient_norm=0.1)
    return found


def data_and_frozen() -> dict[str, Any]:
    """Both in one job."""
    return {**data(), "frozen": frozen()}
