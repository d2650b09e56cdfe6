"""The graph that planners see: branches, names, costs; the same in every process, and made without a trace."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import networkx as nx
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from graphpipe.capture import CapturedModel, Granularity, capture
from graphpipe.models import DLRM, MMT, CandleUno, CandleUnoConfig, DLRMConfig, MMTConfig


def reduced(captured: CapturedModel) -> nx.DiGraph:
    graph = captured.graph
    names = [operator.name for operator in graph.operators]
    found = nx.DiGraph()
    found.add_nodes_from(names)
    found.add_edges_from((names[u], names[v]) for u, v in graph.edges)
    return nx.transitive_reduction(found)


def branches(captured: CapturedModel) -> list[set[str]]:
    """What is left in pieces when the operators after the last join are taken away."""
    graph = reduced(captured)
    last = next(name for name in reversed(list(nx.topological_sort(graph))) if graph.in_degree(name) > 1)
    graph.remove_nodes_from(nx.descendants(graph, last) | {last})
    return sorted(nx.weakly_connected_components(graph), key=min)


@pytest.fixture(scope="module")
def clip() -> CapturedModel:
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"vocab_size": 99, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 98, "pad_token_id": 1}
    config = CLIPConfig(
        text_config={**sizes, **text, "projection_dim": 16},
        vision_config={**sizes, "image_size": 16, "patch_size": 8, "projection_dim": 16},
        projection_dim=16,
    )
    tokens = torch.randint(3, 98, (4, 7))
    tokens[:, -1] = 98
    batch = {"input_ids": tokens, "pixel_values": torch.randn(4, 3, 16, 16), "return_loss": True}
    return capture(CLIPModel(config), batch)


def test_clip_is_two_towers_and_a_loss(clip: CapturedModel) -> None:
    text, vision = branches(clip)
    assert len(clip.graph.operators) == 33
    assert len(text) == len(vision) == 16
    assert all(name.startswith("text_") for name in text)
    assert all(name.startswith("vis") for name in vision)
    assert {o.name: o.inputs for o in clip.graph.operators if o.inputs} == {
        "vision_model.embeddings.patch_embedding": ("pixel_values",),
        "text_model.embeddings.token_embedding": ("input_ids",),
        "text_model.encoder.layers.1.mlp.fc2": ("input_ids",),  # where the text ends
    }


def test_only_floats_pass_between_clips_operators(clip: CapturedModel) -> None:
    assert all(spec.dtype.is_floating_point for spec in clip.values.values())
    assert all(spec.layout is not None and spec.layout.axis == 0 for spec in clip.values.values())
    assert {value.bytes_per_sample for value in clip.graph.values} == {
        5 * 16 * 4,  # image tokens
        5 * 32 * 4,
        7 * 16 * 4,  # text tokens
        7 * 32 * 4,
        16 * 4,  # one token, and projections
    }


def test_names_and_modules_are_those_of_the_model(clip: CapturedModel) -> None:
    layer = "vision_model.encoder.layers.0"
    found = {o.name: o.module for o in clip.graph.operators if o.name.startswith(layer)}
    assert list(found) == [
        f"{layer}.self_attn.q_proj",
        f"{layer}.self_attn.k_proj",
        f"{layer}.self_attn.v_proj",
        f"{layer}.self_attn.scaled_dot_product_attention",
        f"{layer}.self_attn.out_proj",
        f"{layer}.mlp.fc1",
        f"{layer}.mlp.fc2",
    ]
    assert set(found.values()) == {layer}


@pytest.mark.parametrize(
    ("model", "config", "num_branches"),
    [
        (MMT, MMTConfig(num_branches=3, num_layers=2), 3),
        (DLRM, DLRMConfig(num_dense=2, num_sparse=3), 5),
        (CandleUno, CandleUnoConfig(num_branches=5), 5),
    ],
    ids=["mmt", "dlrm", "candle"],
)
@pytest.mark.parametrize("granularity", list(Granularity))
def test_paper_models_have_their_branches(
    model: type[nn.Module], config: Any, num_branches: int, granularity: Granularity
) -> None:
    captured = capture(model(config), config.example_batch(4), granularity=granularity)
    assert len(branches(captured)) == num_branches


def test_blocks_are_the_repeated_modules() -> None:
    config = MMTConfig(num_branches=2, num_layers=2)
    captured = capture(MMT(config), config.example_batch(4), granularity=Granularity.BLOCK)
    assert sorted(o.name for o in captured.graph.operators) == [
        "cat",
        "head.0",
        "head.2",
        *(f"towers.{tower}.layers.{layer}" for tower in (0, 1) for layer in (0, 1)),
    ]


def test_flops_of_the_operators_add_up_to_the_models() -> None:
    config = MMTConfig(num_branches=2, num_layers=1)
    model = MMT(config)
    captured = capture(model, config.example_batch(4))
    batch = config.example_batch(3)
    # The counter knows attention on GPUs only, so it is taken away on both sides.
    with FlopCounterMode(display=False) as counter:
        loss = model(**batch)
        forward = counter.get_total_flops()
        loss.backward()
    others = [o for o in captured.graph.operators if "attention" not in o.name]
    assert 3 * sum(o.forward_flops for o in others) == forward
    # The inputs need no gradient, so the first layers' backward is a single product.
    assert 3 * sum(o.backward_flops for o in others) == counter.get_total_flops() - forward
    length, hidden = config.sequence_length, config.hidden_size
    for operator in captured.graph.operators:
        if "attention" in operator.name:
            assert operator.forward_flops == 2 * 2 * length * length * hidden
            assert operator.backward_flops == 5 * 2 * length * length * hidden


SCRIPT = """
import torch
from graphpipe.capture import capture
from graphpipe.models import MMT, MMTConfig
config = MMTConfig(num_branches=2, num_layers=1, dropout=0.1)
captured = capture(MMT(config), config.example_batch(5))
print(captured.graph.fingerprint)
"""


@pytest.mark.slow
def test_every_process_gets_the_same_graph() -> None:
    # Other hashes of strings, other random parameters, another batch size.
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True, timeout=100
    )
    config = MMTConfig(num_branches=2, num_layers=1, dropout=0.1)
    assert capture(MMT(config), config.example_batch(4)).graph.fingerprint == done.stdout.strip()


class Stateful(nn.Module):
    """Has what capture might touch: modes, buffers, dropout, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.BatchNorm1d(4).eval()
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("offset", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
        hidden = self.frozen(self.norm(self.first(x))) * scale + self.offset
        return self.second(nn.functional.dropout(hidden, 0.5, self.training)).square().mean()


@pytest.mark.parametrize("mode", [True, False])
def test_the_model_is_left_as_it_was(mode: bool) -> None:
    model = Stateful()
    model.training = mode
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = {name: module.training for name, module in model.named_modules()}
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    random = torch.get_rng_state()
    captured = capture(model, torch.randn(4, 4, generator=torch.Generator()))
    stage = captured.stage_module([operator.name for operator in captured.graph.operators])

    assert torch.equal(torch.get_rng_state(), random)
    assert torch.get_default_dtype() is torch.float32
    assert {name: module.training for name, module in model.named_modules()} == modes
    for name, module in model.named_modules():
        assert vars(module).keys() == attributes[name].keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    assert all(parameter.grad is None for parameter in model.parameters())
    # A stage holds the model's own tensors under the model's own names.
    assert dict(stage.named_parameters()).keys() == dict(model.named_parameters()).keys()
    for name, parameter in stage.named_parameters():
        assert parameter is model.get_parameter(name)
    for name, buffer in stage.named_buffers():
        assert buffer is model.get_buffer(name)


def test_a_copied_stage_has_parameters_of_its_own() -> None:
    model = Stateful()
    captured = capture(model, torch.randn(4, 4))
    stage = captured.stage_module([operator.name for operator in captured.graph.operators])
    copied = copy.deepcopy(stage).to(torch.float64)
    loss = copied(captured.flatten_batch(torch.randn(4, 4)) | {"x": torch.randn(4, 4, dtype=torch.float64)}, 4)["loss"]
    loss.backward()

    assert loss.dtype is torch.float64
    assert all(parameter.grad is None for parameter in stage.parameters())
    assert all(parameter.grad is not None for parameter in copied.parameters() if parameter.requires_grad)
    assert model.norm.num_batches_tracked == 0
    assert copied.get_buffer("norm.num_batches_tracked") == 1


def test_len_of_the_batch_is_no_constant() -> None:
    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).sum() / len(x)

    captured = capture(Summed(), torch.randn(4, 4))
    assert captured.loss_reduction == "mean"
    assert "len" not in globals()


def test_positional_batches_are_named_after_forward() -> None:
    config = CandleUnoConfig.small()
    batch = config.example_batch(4)
    captured = capture(
        CandleUno(config),
        (batch["features"], None, batch["growth"]),
        loss_fn=lambda output, given: nn.functional.mse_loss(output, given[2]),
        name="uno",
    )
    assert list(captured.inputs) == ["features.0", "features.1", "features.2", "features.3", "batch_2"]
    assert captured.graph.name == "uno"
