"""Small versions of the models that people have, unmodified and made from their configurations."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn

from graphpipe.capture import CapturedModel, capture
from graphpipe.models import (
    DLRM,
    MMT,
    CandleUno,
    CandleUnoConfig,
    DLRMConfig,
    MMTConfig,
    SequentialTransformer,
    SequentialTransformerConfig,
)
from tests.capture import zoo_networks as networks

Batch = dict[str, Any]

_SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_VISION = {**_SIZES, "image_size": 16, "patch_size": 8}
_VOCABULARY = 99
_IMAGE_TOKEN = 98


@dataclass(frozen=True)
class ZooModel:
    """A model to capture.

    Attributes:
        build: Returns the model. Default dtype and random numbers are the caller's.
        batch: Returns a batch of so many samples.
        dtype: Of its floats: float64, unless an operator of it has no such version.
        tolerance: How far gradients may be from eager's: less where the model's code casts to float32.
        free_sizes: Which sizes differ from batch to batch, besides the number of samples.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-9
    free_sizes: Mapping[str, Mapping[int, str]] = field(default_factory=dict)

    @contextlib.contextmanager
    def in_its_dtype(self) -> Iterator[None]:
        """Make the model's dtype the default for the block."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


ZOO: dict[str, ZooModel] = {}


def add(
    name: str, batch: Callable[[int], Batch], **more: Any
) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Put the model that a function builds into the zoo."""

    def register(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        ZOO[name] = ZooModel(build, batch, **more)
        return build

    return register


def in_default_dtype(model: nn.Module) -> nn.Module:
    """Return a model in the default dtype, since configurations may fix another."""
    return model.to(torch.get_default_dtype())


def tokens(num_samples: int, length: int = 8) -> Tensor:
    """Return random tokens, none of them special."""
    return torch.randint(3, 90, (num_samples, length))


def text(num_samples: int, length: int = 8) -> Batch:
    """Return sentences with padding, for a model that learns to repeat them."""
    mask = torch.ones(num_samples, length, dtype=torch.long)
    mask[:, length - 2 :] = 0
    ids = tokens(num_samples, length)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}


def causal_text(num_samples: int) -> Batch:
    """Return sentences without padding."""
    ids = tokens(num_samples)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def captioned_images(num_samples: int) -> Batch:
    """Return images of 2 by 2 patches, and sentences with a place for each patch."""
    ids = tokens(num_samples, 9)
    ids[:, 1:5] = _IMAGE_TOKEN
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(num_samples, 3, 16, 16),
        "attention_mask": torch.ones_like(ids),
        "labels": ids.clone(),
    }


def image_text_pairs(num_samples: int) -> Batch:
    """Return images and sentences that end with the end-of-text token."""
    ids = tokens(num_samples, 7)
    ids[:, -1] = _VOCABULARY - 1
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(num_samples, 3, 16, 16),
        "attention_mask": torch.ones_like(ids),
        "return_loss": True,
    }


def _of_config(config: Any) -> Callable[[int], Batch]:
    def batch(num_samples: int) -> Batch:
        found: Mapping[str, Any] = config.example_batch(num_samples)
        return dict(found)

    return batch


_MMT = MMTConfig(num_branches=2, num_layers=2)
_SEQUENTIAL = SequentialTransformerConfig(num_layers=2)


@add("MMT", _of_config(_MMT))
def _() -> nn.Module:
    return MMT(_MMT)


@add("DLRM", _of_config(DLRMConfig.small()))
def _() -> nn.Module:
    return DLRM(DLRMConfig.small())


@add("DLRM with offsets", networks.OffsetsDLRM.batch, free_sizes={"indices": {0: "lookups"}})
def _() -> nn.Module:
    return networks.OffsetsDLRM()


@add("CANDLE-Uno", _of_config(CandleUnoConfig.small()))
def _() -> nn.Module:
    return CandleUno(CandleUnoConfig.small())


@add("Sequential Transformer", _of_config(_SEQUENTIAL))
def _() -> nn.Module:
    return SequentialTransformer(_SEQUENTIAL)


@add("CLIP", image_text_pairs)
def _() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    special = {"vocab_size": _VOCABULARY, "max_position_embeddings": 16, "eos_token_id": 98, "pad_token_id": 1}
    projection = {"projection_dim": 16}
    config = CLIPConfig(
        text_config={**_SIZES, **special, **projection, "bos_token_id": 0},
        vision_config={**_VISION, **projection},
        **projection,
    )
    return in_default_dtype(CLIPModel(config))


def _siglip_batch(num_samples: int) -> Batch:
    pairs = image_text_pairs(num_samples)
    return {name: value for name, value in pairs.items() if name != "attention_mask"}


@add("SigLIP", _siglip_batch)
def _() -> nn.Module:
    from transformers import SiglipConfig, SiglipModel

    special = {"vocab_size": _VOCABULARY, "max_position_embeddings": 7, "projection_size": 16}
    return in_default_dtype(SiglipModel(SiglipConfig(text_config={**_SIZES, **special}, vision_config=_VISION)))


@add("BERT", text)
def _() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(**_SIZES, **none, vocab_size=_VOCABULARY, max_position_embeddings=16)
    return in_default_dtype(BertForMaskedLM(config))


def gpt2(dropout: float) -> nn.Module:
    """GPT-2 with a tied head."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16, "vocab_size": _VOCABULARY}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    config = GPT2Config(**sizes, **drops, use_cache=False, bos_token_id=0, eos_token_id=0)
    return in_default_dtype(GPT2LMHeadModel(config))


@add("GPT-2", causal_text, tolerance=1e-5)  # the loss is computed in float32
def _() -> nn.Module:
    return gpt2(0.0)


def _t5_batch(num_samples: int) -> Batch:
    return {**text(num_samples), "labels": tokens(num_samples, 5)}


@add("T5", _t5_batch)
def _() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4, "vocab_size": _VOCABULARY}
    config = T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, use_cache=False)
    return in_default_dtype(T5ForConditionalGeneration(config))


def _speech(num_samples: int) -> Batch:
    return {"input_features": torch.randn(num_samples, 8, 20), "labels": tokens(num_samples, 5)}


@add("Whisper", _speech)
def _() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_mel_bins": 8, "max_source_positions": 10}
    special = {"vocab_size": _VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    start = {"decoder_start_token_id": 1, "max_target_positions": 16, "suppress_tokens": None}
    config = WhisperConfig(**sizes, **heads, **special, **start, begin_suppress_tokens=None, use_cache=False)
    return in_default_dtype(WhisperForConditionalGeneration(config))


@add("BLIP-2", captioned_images, tolerance=1e-5)
def _() -> nn.Module:
    from transformers import (
        Blip2Config,
        Blip2ForConditionalGeneration,
        Blip2QFormerConfig,
        Blip2VisionConfig,
        OPTConfig,
    )

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": _VOCABULARY}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    tower = Blip2VisionConfig(**_VISION)
    former = Blip2QFormerConfig(**sizes, **none, intermediate_size=32, encoder_hidden_size=16)
    language = OPTConfig(
        **sizes, ffn_dim=32, max_position_embeddings=32, word_embed_proj_dim=16, dropout=0.0, use_cache=False
    )
    config = Blip2Config(
        vision_config=tower.to_dict(),
        qformer_config=former.to_dict(),
        text_config=language.to_dict(),
        num_query_tokens=4,
        image_token_index=_IMAGE_TOKEN,
        image_token_id=_IMAGE_TOKEN,
    )
    model = Blip2ForConditionalGeneration(config)
    model.vision_model.requires_grad_(False)
    model.language_model.requires_grad_(False)
    return in_default_dtype(model)


def _llama_config() -> Any:
    from transformers import LlamaConfig

    sizes = {**_SIZES, "num_key_value_heads": 2, "vocab_size": _VOCABULARY, "max_position_embeddings": 32}
    return LlamaConfig(**sizes, use_cache=False)


@add("LLaVA", captioned_images, tolerance=1e-5)
def _() -> nn.Module:
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**_VISION, projection_dim=16),
        text_config=_llama_config(),
        image_token_index=_IMAGE_TOKEN,
        image_token_id=_IMAGE_TOKEN,
        image_seq_length=4,
        vision_feature_layer=-1,
    )
    model = LlavaForConditionalGeneration(config)
    model.model.vision_tower.requires_grad_(False)
    return in_default_dtype(model)


@add("Llama", causal_text, tolerance=1e-5)  # the loss is computed in float32
def _() -> nn.Module:
    from transformers import LlamaForCausalLM

    return in_default_dtype(LlamaForCausalLM(_llama_config()))


def mixtral(**changes: Any) -> nn.Module:
    """Mixtral with four experts, two for each token."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {**_SIZES, "num_key_value_heads": 2, "vocab_size": _VOCABULARY, "max_position_embeddings": 32}
    config = MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2, use_cache=False, **changes)
    return in_default_dtype(MixtralForCausalLM(config))


@add("Mixtral", causal_text, dtype=torch.float32, tolerance=1e-5)  # grouped matrix products have no float64
def _() -> nn.Module:
    return mixtral()


@add("Mixtral with router loss", causal_text, dtype=torch.float32, tolerance=1e-5)
def _() -> nn.Module:
    return mixtral(output_router_logits=True)


@add("ResNet and Inception", networks.ConvNet.batch)
def _() -> nn.Module:
    return networks.ConvNet()


@add("U-Net", networks.UNet.batch)
def _() -> nn.Module:
    return networks.UNet()


@add("LSTM tagger", networks.Tagger.batch)
def _() -> nn.Module:
    return networks.Tagger()


@add("Two-tower retrieval", networks.TwoTower.batch)
def _() -> nn.Module:
    return networks.TwoTower()


@functools.cache
def captured_zoo(name: str) -> tuple[nn.Module, CapturedModel]:
    """Return a model of the zoo and its capture, made once."""
    torch.manual_seed(0)
    with ZOO[name].in_its_dtype():
        model = ZOO[name].build().train()
        return model, capture(model, ZOO[name].batch(4), free_sizes=ZOO[name].free_sizes)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss that a model returns alone or as ``.loss``."""
    output = model(**batch)
    loss: Tensor = output if isinstance(output, Tensor) else output.loss
    return loss
