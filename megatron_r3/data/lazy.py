"""A decorator for an attribute that is computed when it is first read, without a lock."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from functools import cached_property as lazy
else:

    class lazy:
        """Like `functools.cached_property`, but without a lock.

        Before Python 3.12, `cached_property` has a lock. If another thread holds this lock while
        the process forks, the forked process waits forever for the lock. Without a lock, two
        threads may both compute the value, and one of the two equal values stays.
        """

        def __init__(self, function):
            self.function, self.name = function, function.__name__
            self.__doc__ = function.__doc__

        def __get__(self, thing, kind):
            """Compute the value, and keep it in `vars(thing)`, where Python then finds it."""
            if thing is None:
                return self
            value = self.function(thing)
            vars(thing)[self.name] = value
            return value
