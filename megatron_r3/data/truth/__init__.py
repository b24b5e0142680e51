"""Whether recorded routes are those of their tokens: what differs, where, and why (docs/truth.md).

This subpackage needs numpy alone. It runs no model: the caller gives live routes of the same
tokens.
"""

from megatron_r3.data.truth.alarms import Alarm
from megatron_r3.data.truth.compared import Compared
from megatron_r3.data.truth.examine import Report, examine

__all__ = ["Alarm", "Compared", "Report", "examine"]
