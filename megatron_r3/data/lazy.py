"""A decorator for an attribute that is computed when it is first read, without a lock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class lazy(Generic[T]):
    """Like `functools.cached_property`, but without a lock.

    Before Python 3.12, `cached_property` has a lock. If another thread holds this lock while the
    process forks, the forked process waits forever for the lock. Without a lock, two threads may
    both compute the value, and one of the two equal values stays.
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        self.function, self.name = function, function.__name__
        self.__doc__ = function.__doc__

    @overload
    def __get__(self, thing: None, kind: type) -> lazy[T]: ...
    @overload
    def __get__(self, thing: object, kind: type) -> T: ...
    def __get__(self, thing: object | None, kind: type) -> lazy[T] | T:
        """Compute the value, and keep it in `vars(thing)`, where Python finds it the next time."""
        if thing is None:
            return self
        value = self.function(thing)
        vars(thing)[self.name] = value
        return value
