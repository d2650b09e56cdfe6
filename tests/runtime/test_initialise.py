"""Parameters of a model on the meta device: made by the rank that owns them, the same whatever the strategy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from graphpipe.errors import GraphPipeError
from graphpipe.runtime.initialise import FromSafetensors, FromSeed, Init, fill_own


class Layers(nn.Module):
    """Modules that initialise themselves in different ways, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16, padding_idx=3)
        self.attention = nn.MultiheadAttention(16, 4)
        self.norm = nn.BatchNorm1d(16)
        self.linear = nn.Linear(16, 8)
        self.head = nn.Linear(16, 50)
        self.head.weight = self.embedding.weight


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.arange(4.0), persistent=False)


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def filled(build: Callable[[], nn.Module], init: Init, names: list[str] | None = None) -> dict[str, Tensor]:
    """The tensors that have memory after a rank that owns `names` has filled its own."""
    model = on_meta(build)
    own = {n: t for n, t in tensors_of(model).items() if names is None or n in names}
    fill_own(model, own, init)
    return {n: t.detach() for n, t in tensors_of(model).items() if not t.is_meta}


def test_values_are_those_of_any_other_division_into_ranks() -> None:
    whole = filled(Layers, FromSeed(5))
    assert set(whole) == set(tensors_of(Layers()))
    for name in whole:
        alone = filled(Layers, FromSeed(5), [name])
        assert set(alone) == {name}  # nothing else has memory
        assert torch.equal(alone[name], whole[name]), name


def test_another_seed_gives_other_values_and_the_callers_random_state_is_kept() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first, second = filled(Layers, FromSeed(5)), filled(Layers, FromSeed(6))
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first["linear.weight"], second["linear.weight"])
    assert torch.equal(first["norm.running_var"], second["norm.running_var"])


def test_distributions_are_those_of_the_modules() -> None:
    found = filled(Layers, FromSeed(0))
    assert 0.2 < float(found["linear.weight"].abs().max()) <= 0.25  # uniform up to 1 / sqrt(16)
    assert 0.9 < float(found["embedding.weight"].std()) < 1.1
    assert not found["embedding.weight"][3].any()  # padding
    assert not found["attention.in_proj_bias"].any()
    assert not found["attention.out_proj.bias"].any()  # which the module around it sets, after its own draws
    assert found["norm.running_var"].eq(1).all()
    assert found["norm.num_batches_tracked"] == 0


def test_tied_parameters_stay_one_object() -> None:
    model = on_meta(Layers)
    old = model.embedding.weight
    found = fill_own(model, {"embedding.weight": old}, FromSeed(0))
    assert model.head.weight is model.embedding.weight is found[id(old)]
    assert isinstance(model.head.weight, nn.Parameter)


def test_what_no_module_initialises_needs_a_function() -> None:
    with pytest.raises(GraphPipeError, match=r"'scale' of a Bare is on the meta device and no reset_parameters"):
        filled(Bare, FromSeed(0))
    asked = []

    def rest(name: str, tensor: Tensor) -> None:
        asked.append(name)
        tensor.fill_(2.0)

    found = filled(Bare, FromSeed(0, rest=rest))
    assert asked == ["scale", "table"]
    assert found["table"].tolist() == [2.0] * 4


def test_a_function_fills_everything_that_modules_do_not_own_as_buffers() -> None:
    def init(name: str, tensor: Tensor) -> None:
        tensor.normal_(std=0.02)

    whole = filled(Layers, init)
    assert 0.01 < float(whole["linear.weight"].std()) < 0.03
    assert whole["norm.running_var"].eq(1).all()
    assert torch.equal(filled(Layers, init, ["linear.bias"])["linear.bias"], whole["linear.bias"])


def test_a_function_that_leaves_a_tensor_alone_is_an_error() -> None:
    with pytest.raises(GraphPipeError, match=r"left 'linear.bias' without values"):
        filled(Bare, lambda name, tensor: None if name == "linear.bias" else tensor.fill_(1.0))


class Orthogonal(nn.Module):
    """Draws into a tensor of its own, for two layers in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def reset_parameters(self) -> None:
        nn.init.orthogonal_(self.a.weight)
        nn.init.orthogonal_(self.b.weight)


def test_draws_that_would_depend_on_the_strategy_are_refused() -> None:
    whole = filled(Orthogonal, FromSeed(0))
    assert torch.allclose(whole["b.weight"] @ whole["b.weight"].T, torch.eye(4), atol=1e-5)
    with pytest.raises(GraphPipeError, match=r"would depend on the strategy; pass init=function"):
        filled(Orthogonal, FromSeed(0), ["b.weight"])


def test_hugging_face_models_keep_their_own_initialisation() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )

    def build() -> nn.Module:
        return LlamaForCausalLM(config)

    found = filled(build, FromSeed(0))
    reference = build()
    assert set(found) == set(tensors_of(reference))
    assert 0.18 < float(found["model.layers.1.mlp.up_proj.weight"].std()) < 0.22
    buffers = dict(reference.named_buffers())
    assert buffers
    for name, buffer in buffers.items():
        assert torch.equal(found[name], buffer), name
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(filled(build, FromSeed(0), [name])[name], found[name])


# ---- From files ------------------------------------------------------------------------------------------------------


def write_shards(model: nn.Module, folder: Path, drop: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Write two shards, and return all tensors."""
    whole = {n: t.detach().clone() for n, t in model.state_dict().items() if n not in drop}
    names = sorted(whole)
    for i in range(2):
        save_file({n: whole[n] for n in names[i::2]}, folder / f"model-{i}.safetensors")
    return whole


def test_parameters_come_from_shards_whichever_of_their_names_is_there(tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = write_shards(Layers(), tmp_path, drop=("embedding.weight",))
    found = filled(Layers, FromSafetensors(tmp_path))
    assert torch.equal(found["embedding.weight"], whole["head.weight"])
    for name in set(found) - {"embedding.weight"}:
        assert torch.equal(found[name], whole[name]), name


def test_one_file_and_buffers_that_a_model_does_not_save(tmp_path: Path) -> None:
    file = tmp_path / "bare.safetensors"
    save_file({n: t.detach() for n, t in Bare().state_dict().items()}, file)
    with pytest.raises(GraphPipeError, match="'table' of a Bare"):
        filled(Bare, FromSafetensors(file))
    found = filled(Bare, FromSafetensors(str(file), rest=lambda name, tensor: tensor.fill_(7.0)))
    assert found["table"].tolist() == [7.0] * 4
    assert found["scale"].tolist() == [1.0] * 4


def test_a_checkpoints_names_start_with_model(tmp_path: Path) -> None:
    tensors = {f"model.{n}": t.detach().clone() for n, t in Bare().state_dict().items()}
    save_file({**tensors, "optim.exp_avg.linear.weight": torch.zeros(4, 4)}, tmp_path / "shard-00001.safetensors")
    (tmp_path / "manifest.json").write_text("{}")
    found = filled(Bare, FromSafetensors(tmp_path), ["linear.weight"])
    assert torch.equal(found["linear.weight"], tensors["model.linear.weight"])


def test_files_of_another_model_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "other.safetensors"
    save_file({"linear.weights": torch.zeros(4, 4), "linear.bias": torch.zeros(5), "scale": torch.zeros(4)}, file)
    with pytest.raises(
        GraphPipeError, match=r"the first is 'linear.weight'; the nearest name there is 'linear.weights'"
    ):
        filled(Bare, FromSafetensors(file), ["linear.weight", "scale"])
    with pytest.raises(GraphPipeError, match=r"'linear.bias' has the shape \[4\] in the model and \[5\]"):
        filled(Bare, FromSafetensors(file), ["linear.bias"])
    with pytest.raises(GraphPipeError, match="no safetensors file"):
        filled(Bare, FromSafetensors(tmp_path / "nothing"), ["linear.bias"])
    file.write_bytes(b"no safetensors")
    with pytest.raises(GraphPipeError, match="cannot be read"):
        filled(Bare, FromSafetensors(file), ["linear.bias"])
