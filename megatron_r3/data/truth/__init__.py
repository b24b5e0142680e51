"""Whether recorded routes are those of their tokens: what differs, where, and why (docs/truth.md).

numpy only. Nothing here runs a model: the live routes of the same tokens come from the caller.
"""

from megatron_r3.data.truth.alarms import Alarm
from megatron_r3.data.truth.compared import Compared
from megatron_r3.data.truth.examine import Report, examine
from megatron_r3.data.truth.floor import (
    Floor,
    FloorError,
    floor_path,
    read_floor,
    write_floor,
)
from megatron_r3.data.truth.text import mismatch_text

__all__ = [
    "Alarm",
    "Compared",
    "Floor",
    "FloorError",
    "Report",
    "examine",
    "floor_path",
    "mismatch_text",
    "read_floor",
    "write_floor",
]
