"""Every model of the zoo, cut at random into stages that run over micro-batches, trains as in one process."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from graphpipe.capture import CapturedModel, LossReduction, capture, probe
from graphpipe.capture.trial import NUM_SAMPLES
from tests.capture.conftest import random_partition, train_eagerly, train_in_stages
from tests.capture.zoo import ZOO, ZooModel, captured_zoo, gpt2, loss_of

PARTITIONS = 5


pytestmark = pytest.mark.usefixtures("double")


def check_partitions(entry: ZooModel, model: nn.Module, captured: CapturedModel, num_partitions: int) -> None:
    """Compare random partitions into 2 to 6 stages, with random micro-batches, with the model itself."""
    with entry.in_its_dtype():
        batch = entry.batch(7)
        expected = train_eagerly(model, lambda m: loss_of(m, batch))
        # A gradient that is zero in theory, as that of a key's bias, is rounding noise in practice.
        noise = entry.tolerance * max(float(g.abs().max()) for g in expected.gradients.values())
        for seed in range(num_partitions):
            rng = random.Random(seed)
            partition = random_partition(captured, rng.randint(2, 6), rng)
            found = train_in_stages(captured, partition, batch, rng)
            torch.testing.assert_close(found.loss, expected.loss, rtol=entry.tolerance, atol=0)
            assert found.gradients.keys() == expected.gradients.keys()
            for name, gradient in expected.gradients.items():
                torch.testing.assert_close(
                    found.gradients[name],
                    gradient,
                    rtol=entry.tolerance,
                    atol=noise,
                    msg=lambda m, n=name: f"{n}: {m}",
                )
            for name, buffer in found.buffers.items():
                torch.testing.assert_close(buffer, expected.buffers[name], rtol=entry.tolerance, atol=noise)


@pytest.mark.parametrize("name", ZOO)
def test_random_partitions_train_as_one_process(name: str) -> None:
    model, captured = captured_zoo(name)
    check_partitions(ZOO[name], model, captured, PARTITIONS)


@pytest.mark.parametrize("name", ZOO)
def test_rules_agree_with_trials(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, captured = captured_zoo(name)
    with ZOO[name].in_its_dtype():
        batch = captured.resize_batch(captured.flatten_batch(ZOO[name].batch(4)), NUM_SAMPLES)
        monkeypatch.setattr(probe, "class_by_structure", lambda *_: None)
        monkeypatch.setattr(probe, "FEW_CLASSES", 10**6)
        by_trials = probe.classify(captured._training_graph, batch)
    by_rules = captured._classification
    assert by_rules.classes == by_trials.classes
    assert by_rules.batch_wise == by_trials.batch_wise
    assert by_rules.counted_targets == by_trials.counted_targets


def batch_wise(captured: CapturedModel) -> list[str]:
    """Return the operators that need the whole mini-batch."""
    return [operator.name for operator in captured.graph.operators if operator.is_batch_wise]


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in ZOO
        if name not in ("CLIP", "SigLIP", "Two-tower retrieval", "U-Net", "ResNet and Inception")
        and "loss" not in name
        and "offsets" not in name
    ],
)
def test_models_whose_samples_never_meet(name: str) -> None:
    _, captured = captured_zoo(name)
    assert batch_wise(captured) == []
    assert captured.loss_reduction is LossReduction.MEAN


@pytest.mark.parametrize("name", ["CLIP", "SigLIP", "Two-tower retrieval"])
def test_contrastive_losses_alone_need_the_whole_batch(name: str) -> None:
    _, captured = captured_zoo(name)
    assert batch_wise(captured) == [captured.loss_operator]
    assert captured.loss_reduction is LossReduction.WHOLE


def test_experts_take_micro_batches_and_a_loss_of_their_load_does_not() -> None:
    _, captured = captured_zoo("Mixtral with router loss")
    assert batch_wise(captured) == [captured.loss_operator]
    experts = [o.name for o in captured.graph.operators if "experts" in o.name]
    assert experts == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]


def test_a_shared_encoder_has_units_of_its_own_for_each_call() -> None:
    _, captured = captured_zoo("Two-tower retrieval")
    tower = [o for o in captured.graph.operators if "projection" in o.name]
    assert len(tower) == 2
    assert tower[0].parameters == tower[1].parameters
    first, second = (captured.graph.operators.index(o) for o in tower)
    assert second not in captured.graph.successors[first]


@pytest.mark.parametrize(
    ("name", "frozen"),
    [("BLIP-2", ("vision_model.", "language_model.")), ("LLaVA", ("model.vision_tower.",))],
)
def test_frozen_towers(name: str, frozen: tuple[str, ...]) -> None:
    _, captured = captured_zoo(name)
    for operator in captured.graph.operators:
        for parameter in operator.parameters:
            assert parameter.is_trainable != parameter.name.startswith(frozen)
        assert (operator.backward_flops > 0) <= operator.has_backward
    tower = [o for o in captured.graph.operators if "vision" in o.name]
    assert tower
    assert not any(o.has_backward for o in tower)


def test_tied_head_with_dropout() -> None:
    torch.manual_seed(0)
    captured = capture(gpt2(dropout=0.1).train(), ZOO["GPT-2"].batch(4))
    assert captured.parameter_names["transformer.wte.weight"] == ("transformer.wte.weight", "lm_head.weight")
    holders = [o.name for o in captured.graph.operators if "transformer.wte.weight" in [p.name for p in o.parameters]]
    assert len(holders) == 2
    assert batch_wise(captured) == []
