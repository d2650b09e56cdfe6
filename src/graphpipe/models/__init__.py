"""The models of the GraphPipe paper, as plain torch modules."""

from graphpipe.models.candle_uno import CandleUno, CandleUnoConfig
from graphpipe.models.dlrm import DLRM, DLRMConfig
from graphpipe.models.mmt import MMT, MMTConfig
from graphpipe.models.sequential_transformer import SequentialTransformer, SequentialTransformerConfig

__all__ = [
    "DLRM",
    "MMT",
    "CandleUno",
    "CandleUnoConfig",
    "DLRMConfig",
    "MMTConfig",
    "SequentialTransformer",
    "SequentialTransformerConfig",
]
