"""The truth test: whether recorded routes belong to their tokens (docs/truth.md).

The test says what differs, where, and why. It runs no model: the caller gives live routes of the
same tokens. This subpackage needs numpy alone.
"""

from megatron_r3.data.truth.alarms import Alarm
from megatron_r3.data.truth.compared import Compared
from megatron_r3.data.truth.examine import Report, examine

__all__ = ["Alarm", "Compared", "Report", "examine"]
