"""The instructions of every device: what the simulator and the executor both interpret.

`lower` turns a schedule into one list of instructions a device, and proves on these very lists that no device can wait
for ever. Communication is added here and nowhere else.
"""

from graphpipe.program.deadlock import check_deadlock
from graphpipe.program.instructions import (
    AwaitReceive,
    AwaitReduction,
    AwaitSend,
    Compute,
    Instruction,
    Matching,
    Message,
    OptimizerStep,
    PostReceive,
    Program,
    Reduction,
    Send,
    StartReduction,
)
from graphpipe.program.lowering import lower

__all__ = [
    "AwaitReceive",
    "AwaitReduction",
    "AwaitSend",
    "Compute",
    "Instruction",
    "Matching",
    "Message",
    "OptimizerStep",
    "PostReceive",
    "Program",
    "Reduction",
    "Send",
    "StartReduction",
    "check_deadlock",
    "lower",
]
