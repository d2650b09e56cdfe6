"""Captures kept on disk: found again by a model that does the same, and by no other."""

from __future__ import annotations

import functools
import importlib
import json
import logging
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpipe.capture import CapturedModel, Granularity, Mode, capture, kept
from graphpipe.capture import api as capture_api
from graphpipe.capture.describe import Description
from graphpipe.capture.division import Division, division_from_plain, division_to_plain
from graphpipe.disk_cache import DiskCache
from tests.capture.conftest import random_partition, train_in_stages
from tests.capture.zoo import ZOO, captured_zoo

SOURCE = """
import os
import torch
from torch import nn

SCALE = 2.0
LIMIT = 0
TABLE = {"power": 2}


def made(factor):
    def apply(x):
        return x * factor
    return apply


class Config:
    shift = 1.0

    def __init__(self):
        self.slope = 0.5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.25)
        self.norm = nn.LayerNorm(4)
        self.register_buffer("weights", torch.tensor([1.0, 1.0, 1.0, 1.0]))
        self.config = Config()
        self.table = torch.arange(4.0)
        self.closure = made(3.0)
        self.count = 2
        self.bound = 0

    def forward(self, x):
        if x.shape[0] > LIMIT and x.shape[0] > self.bound:
            x = x * SCALE
        for _ in range(self.count):
            x = torch.relu(self.linear(x)) ** TABLE["power"] + self.config.shift
        x = self.closure(self.norm(self.dropout(x))) * self.config.slope + self.table
        return x * self.weights * float(os.environ.get("FACTOR_OF_A_TEST", "1"))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Block()
        self.second = Block()

    def forward(self, x, labels, mask):
        x = self.second(self.first(x))
        return (nn.functional.cross_entropy(x, labels, reduction="none") * mask).mean()


def loss_of(output, batch):
    return output * 1.5
"""

BATCH = {
    "x": torch.linspace(0.1, 0.9, 16).view(4, 4),
    "labels": torch.tensor([0, 1, 2, 3]),
    "mask": torch.tensor([1.0, 1.0, 1.0, 0.0]),
}


class CapturedAnewError(Exception):
    """The answer was not on disk."""


def load(folder: Path, source: str) -> ModuleType:
    """Load the module of this source as a new process does."""
    folder.mkdir(exist_ok=True)
    (folder / "model_of_a_test.py").write_text(source)
    sys.modules.pop("model_of_a_test", None)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setattr(sys, "dont_write_bytecode", True)
        return importlib.import_module("model_of_a_test")


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[DiskCache, CapturedModel]:
    """A cache with the model's capture, and the capture."""
    folder = tmp_path_factory.mktemp("filled")
    cache = DiskCache(folder / "kept")
    return cache, capture(load(folder, SOURCE).Model(), BATCH, cache=cache)


@pytest.fixture
def only_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let captures that are not on disk fail."""

    def refuse(*_: Any) -> Any:
        raise CapturedAnewError

    monkeypatch.setattr(capture_api, "_divide", refuse)


Filled = tuple[DiskCache, CapturedModel]


def test_the_same_model_is_captured_once(filled: Filled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, first = filled
    # Other parameters in another object, and a comment: what counts is what it does.
    model = load(tmp_path, SOURCE.replace("SCALE = 2.0", "# Twice as much.\nSCALE = 2.0")).Model()
    with monkeypatch.context() as patch:
        patch.setattr(capture_api, "_divide", None)  # would fail if it were called
        again = capture(model, BATCH, cache=cache)

    assert cache.folder is not None
    assert len(list(cache.folder.iterdir())) == 1
    assert (again.graph, again.values, again.inputs) == (first.graph, first.values, first.inputs)
    assert (again.fingerprint, again.loss_reduction) == (first.fingerprint, first.loss_reduction)
    assert again.model is model
    stage = again.stage_module([operator.name for operator in again.graph.operators])
    assert {id(p) for p in stage.parameters()} == {id(p) for p in model.parameters()}
    fresh = capture(model, BATCH, cache=DiskCache.off())
    whole = fresh.stage_module([operator.name for operator in fresh.graph.operators])
    tensors = again.flatten_batch(BATCH)
    assert torch.equal(stage(tensors, 4)[again.loss], whole(tensors, 4)[fresh.loss])


SOURCE_CHANGES = {
    "a number in forward": ("** TABLE", "** 1 ** TABLE"),
    "a branch that is not taken": ("x.shape[0] > LIMIT and", "x.shape[0] > LIMIT and x.shape[1] < 1000 and"),
    "a global": ("SCALE = 2.0", "SCALE = 2.5"),
    "a bound that is not reached": ("LIMIT = 0", "LIMIT = 3"),
    "a bound of a module that is not reached": ("self.bound = 0", "self.bound = 3"),
    "a table": ('"power": 2', '"power": 3'),
    "a function that is called": ("return x * factor", "return x / factor"),
    "a class attribute": ("shift = 1.0", "shift = 2.0"),
    "an attribute": ("self.count = 2", "self.count = 3"),
    "a constant tensor": ("torch.arange(4.0)", "torch.arange(1.0, 5.0)"),
    "a buffer's values": ("[1.0, 1.0, 1.0, 1.0]", "[1.0, 1.0, 1.0, 0.0]"),
    "the probability of dropout": ("Dropout(0.25)", "Dropout(0.75)"),
    "the epsilon of a norm": ("LayerNorm(4)", "LayerNorm(4, eps=1e-3)"),
    "a configuration": ("self.slope = 0.5", "self.slope = 0.25"),
    "what a closure holds": ("made(3.0)", "made(4.0)"),
    "the name of a module": ("self.first", "self.zeroth"),
    "where autograd looks": (
        "x = self.closure(",
        "with torch.no_grad():\n            x = x + 0\n        x = self.closure(",
    ),
}


@pytest.mark.usefixtures("only_kept")
@pytest.mark.parametrize("change", SOURCE_CHANGES)
def test_a_changed_source_is_captured_again(change: str, filled: Filled, tmp_path: Path) -> None:
    before, after = SOURCE_CHANGES[change]
    assert before in SOURCE
    module = load(tmp_path, SOURCE.replace(before, after))
    with pytest.raises(CapturedAnewError):
        capture(module.Model(), BATCH, cache=filled[0])


def freeze(model: Any, _: ModuleType, __: pytest.MonkeyPatch) -> dict[str, Any]:
    model.first.linear.weight.requires_grad_(False)
    return {}


def tie(model: Any, _: ModuleType, __: pytest.MonkeyPatch) -> dict[str, Any]:
    model.second.linear.weight = model.first.linear.weight
    return {}


def evaluate_a_part(model: Any, _: ModuleType, __: pytest.MonkeyPatch) -> dict[str, Any]:
    model.train()
    model.second.eval()
    return {}


def in_double(model: Any, _: ModuleType, __: pytest.MonkeyPatch) -> dict[str, Any]:
    model.double()
    return {"batch": {name: t.double() if t.is_floating_point() else t for name, t in BATCH.items()}}


def another_default(_: Any, __: ModuleType, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.bfloat16)
    return {}


def change_a_buffer(model: Any, _: ModuleType, __: pytest.MonkeyPatch) -> dict[str, Any]:
    model.first.weights[0] = 0.0
    return {}


def replace_forward(_: Any, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    before = module.Block.forward
    monkeypatch.setattr(module.Block, "forward", lambda self, x: before(self, x) * 1.0)
    return {}


def set_a_variable(_: Any, __: ModuleType, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("FACTOR_OF_A_TEST", "2")
    return {}


def hook(model: Any, _: ModuleType, __: pytest.MonkeyPatch) -> dict[str, Any]:
    model.first.register_forward_hook(lambda _, __, output: output * 2)
    return {}


def other_labels(_: Any, __: ModuleType, ___: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"batch": {**BATCH, "labels": torch.tensor([0, 1, 2, 2])}}


def other_mask(_: Any, __: ModuleType, ___: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"batch": {**BATCH, "mask": torch.ones(4)}}


def more_samples(_: Any, __: ModuleType, ___: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"batch": {name: tensor.repeat(2, *[1] * (tensor.dim() - 1)) for name, tensor in BATCH.items()}}


CHANGES: dict[str, Callable[[Any, ModuleType, pytest.MonkeyPatch], dict[str, Any]]] = {
    "a frozen parameter": freeze,
    "tied parameters": tie,
    "a part in eval mode": evaluate_a_part,
    "another dtype": in_double,
    "another default dtype": another_default,
    "a buffer's values": change_a_buffer,
    "a forward that was replaced": replace_forward,
    "the environment": set_a_variable,
    "a forward hook": hook,
    "integers of the batch": other_labels,
    "a mask of the batch": other_mask,
    "the samples of the batch": more_samples,
    "a loss": lambda _, module, __: {"loss_fn": module.loss_of},
    "evaluation": lambda *_: {"mode": Mode.EVAL},
    "a granularity": lambda *_: {"granularity": Granularity.BLOCK},
    "a split point": lambda *_: {"split_points": ["second"]},
    "a module kept whole": lambda *_: {"keep_whole": ["second"]},
    "a name": lambda *_: {"name": "other"},
}


@pytest.mark.usefixtures("only_kept")
@pytest.mark.parametrize("change", CHANGES)
def test_another_model_batch_or_option_is_captured_again(
    change: str, filled: Filled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load(tmp_path, SOURCE)
    model = module.Model()
    options = CHANGES[change](model, module, monkeypatch)
    with pytest.raises(CapturedAnewError):
        capture(model, options.pop("batch", BATCH), cache=filled[0], **options)


@pytest.mark.usefixtures("only_kept")
def test_autocast_is_told(filled: Filled, tmp_path: Path) -> None:
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(CapturedAnewError):
        capture(load(tmp_path, SOURCE).Model(), BATCH, cache=filled[0])


@pytest.mark.usefixtures("only_kept")
def test_numbers_of_the_batch_that_stand_for_nothing_do_not_matter(filled: Filled, tmp_path: Path) -> None:
    model = load(tmp_path, SOURCE).Model()
    capture(model, {**BATCH, "x": BATCH["x"] ** 2}, cache=filled[0])
    with pytest.raises(CapturedAnewError):
        capture(model, {**BATCH, "x": -BATCH["x"]}, cache=filled[0])


def read_entry(cache: DiskCache) -> tuple[Path, dict[str, Any]]:
    assert cache.folder is not None
    (path,) = cache.folder.iterdir()
    return path, json.loads(path.read_text())


def without_a_tensor(text: str) -> str:
    entry = json.loads(text)
    next(a for a in entry["division"]["attributes"].values() if a["kind"] == "parameter")["name"] = "nowhere"
    return json.dumps({"digest": kept._digest(entry["division"]), "division": entry["division"]})


def with_code(text: str) -> str:
    entry = json.loads(text)
    next(n for n in entry["division"]["nodes"] if n["op"] == "call_function")["target"] = "function:os.system"
    return json.dumps({"digest": kept._digest(entry["division"]), "division": entry["division"]})


DAMAGES: dict[str, Callable[[str], str]] = {
    "empty": lambda _: "",
    "cut": lambda text: text[:1000],
    "an empty object": lambda _: "{}",
    "a list": lambda _: "[1]",
    "a digest alone": lambda _: '{"digest": 1}',
    "a character less": lambda text: text[: len(text) // 2] + text[len(text) // 2 + 1 :],
    "an unknown tensor": without_a_tensor,
    "code": with_code,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_made_again(
    damage: str, filled: Filled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, first = filled
    path, _ = read_entry(cache)
    text = path.read_text()
    path.write_text(DAMAGES[damage](text))
    body = json.loads(text)["division"]
    monkeypatch.setattr(capture_api, "_divide", lambda model, *_: (division_from_plain(body, model, 4), {}))
    found = capture(load(tmp_path, SOURCE).Model(), BATCH, cache=cache)
    assert found.graph == first.graph
    assert json.loads(path.read_text()) == json.loads(text)
    assert read_entry(cache)[0] == path


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(_: Any, *gradients: Any) -> Any:
        return gradients[0] * 3


class WithCode(nn.Module):
    """Has code that a graph cannot hold."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return (Doubled.apply(x) if self.what == "function" else x).square().mean()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("what", ["function", "hook"])
@pytest.mark.filterwarnings("ignore:.*kept whole")
def test_code_is_not_kept(what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = WithCode(what)
    if what == "hook":
        model.inner.register_full_backward_hook(lambda *_: None)
    with caplog.at_level(logging.DEBUG, "graphpipe.capture.kept"):
        found = capture(model, torch.rand(4, 4), cache=DiskCache(tmp_path))
    assert found.graph.operators
    assert not list(tmp_path.iterdir())
    assert "the capture of WithCode is not kept: " in caplog.text


class Lazy(nn.Module):
    """Prepares itself in its first pass, draws, and keeps statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.memory: dict[str, int] = {}

    def forward(self, x: Tensor) -> Tensor:
        if not self.memory:
            self.memory["ready"] = 1
            self.linear.register_forward_hook(lambda _, __, output: output + 1)
        return nn.functional.dropout(self.norm(self.linear(x))).mean()


def test_asking_leaves_no_trace(tmp_path: Path) -> None:
    model = Lazy()
    x = torch.rand(4, 4)
    layout, tensors = capture_api.flat_batch(model, x)
    wrapper = capture_api.ModelWithLoss(model, layout, None)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    own = dict(model.named_parameters())
    state = torch.get_rng_state()
    model.eval()
    question = kept.Question(model, wrapper, layout, tensors, None, Mode.TRAIN, ())
    asked = kept.KeptCapture(DiskCache(tmp_path), question)

    assert asked._name is not None
    assert asked.read() is None
    assert not model.memory
    assert not model.linear._forward_hooks
    assert not model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter is own[name] for name, parameter in model.named_parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert sys.gettrace() is None


@functools.lru_cache
def made_once(count: int) -> Tensor:
    return torch.arange(count).float()


TABLES: dict[str, Any] = {}


class Memoizing(nn.Module):
    """Keeps tensors for all later passes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if not TABLES:
            TABLES.update(plain=torch.ones(4), paired=(torch.ones(4), 1))
        return (self.linear(x) + made_once(4) + TABLES["plain"] + TABLES["paired"][0]).mean()


def test_what_a_model_makes_once_is_made_when_it_has_values(tmp_path: Path) -> None:
    made_once.cache_clear()
    TABLES.clear()
    assert capture(Memoizing(), torch.rand(4, 4), cache=DiskCache(tmp_path)).graph.operators
    made_once.cache_clear()
    TABLES.clear()


@pytest.mark.parametrize("name", sorted(ZOO.keys() - {"LLaVA"}))  # It has numbers that depend on values.
@pytest.mark.usefixtures("double")
def test_what_was_kept_trains_alike(name: str) -> None:
    model, captured = captured_zoo(name)
    parts = captured._training_graph, captured._classification, captured._units
    description = Description(captured.graph, captured.values, captured._value_names)
    plain = json.loads(json.dumps(division_to_plain(Division(*parts, description), model)))
    entry = ZOO[name]
    division = division_from_plain(plain, model, 4)

    assert json.loads(json.dumps(division_to_plain(division, model))) == plain
    assert division.graph.fingerprint == captured.fingerprint
    with entry.in_its_dtype():
        again = capture_api._captured(division, model, captured._layout, {}, None, Mode.TRAIN)
        batch = entry.batch(4)
        partition = random_partition(captured, 3, random.Random(0))
        expected, found = (train_in_stages(c, partition, batch, random.Random(0)) for c in (captured, again))
    assert torch.equal(found.loss, expected.loss)
    assert all(torch.equal(found.gradients[name], gradient) for name, gradient in expected.gradients.items())
