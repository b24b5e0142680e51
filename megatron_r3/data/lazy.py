"""A value of an object that is worked out when it is first asked for, without a lock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class lazy(Generic[T]):  # a decorator
    """As `functools.cached_property`, which before Python 3.12 takes a lock of all its objects.

    A process that is forked while another thread has that lock never gets it. Here two threads may
    both work out the value, and one of the two equal values stays.
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        self.function, self.name = function, function.__name__
        self.__doc__ = function.__doc__

    @overload
    def __get__(self, thing: None, kind: type) -> lazy[T]: ...
    @overload
    def __get__(self, thing: object, kind: type) -> T: ...
    def __get__(self, thing: object | None, kind: type) -> lazy[T] | T:
        """The value; it is kept in the object, where Python finds it before it asks here again."""
        if thing is None:
            return self
        value = self.function(thing)
        vars(thing)[self.name] = value
        return value
