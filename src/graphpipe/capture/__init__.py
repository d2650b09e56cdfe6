"""Capture: from an unmodified PyTorch model to a graph of operators, and to modules for parts of it."""

import sys
from types import ModuleType

from graphpipe.capture.api import capture, capture_evaluation, capture_prediction, eager_loss
from graphpipe.capture.autocast import Autocast
from graphpipe.capture.captured import CapturedModel
from graphpipe.capture.draws import Draws
from graphpipe.capture.export import Mode
from graphpipe.capture.specs import LossReduction, SampleLayout, ValueSpec
from graphpipe.capture.stage_module import StageModule
from graphpipe.capture.units import Granularity

__all__ = [
    "Autocast",
    "CapturedModel",
    "Draws",
    "Granularity",
    "LossReduction",
    "Mode",
    "SampleLayout",
    "StageModule",
    "ValueSpec",
    "capture",
    "capture_evaluation",
    "capture_prediction",
    "eager_loss",
]


class _Package(ModuleType):
    """Lets ``graphpipe.capture`` be both this package and its main function."""

    __call__ = staticmethod(capture)


sys.modules[__name__].__class__ = _Package
