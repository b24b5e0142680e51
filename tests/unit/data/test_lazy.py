"""A lazy value is computed once, also in a process that is forked during a computation."""

from __future__ import annotations

import os
import signal
import threading

from megatron_r3.data.lazy import lazy


class Thing:
    """Counts how often `value` is computed; the computation may wait for `go_on`."""

    begun, go_on = threading.Event(), threading.Event()

    def __init__(self, waits: bool) -> None:
        self.waits, self.count = waits, 0

    @lazy
    def value(self) -> int:
        """A number."""
        self.count += 1
        if self.waits:
            Thing.begun.set()
            Thing.go_on.wait(30)
        return 7


def test_a_value_is_worked_out_once() -> None:
    thing = Thing(waits=False)
    assert (thing.value, thing.value, thing.count) == (7, 7, 1)
    assert Thing.value.__doc__ == "A number."


def test_a_forked_process_does_not_wait_for_a_thread_that_it_has_not() -> None:
    """With functools.cached_property the forked process would hang, before Python 3.12."""
    thread = threading.Thread(target=lambda: Thing(waits=True).value)
    thread.start()
    assert Thing.begun.wait(30)
    child = os.fork()
    if not child:
        signal.alarm(20)
        os._exit(Thing(waits=False).value)
    _, status = os.waitpid(child, 0)
    Thing.go_on.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 7
