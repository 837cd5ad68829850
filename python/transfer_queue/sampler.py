"""Samplers decide which ready samples a fetch returns.

The controller runs them; these classes name and describe them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from transfer_queue.errors import InvalidArgumentError, UnimplementedError, WrongTypeError

__all__ = ["BaseSampler", "SequentialSampler", "resolve"]


class BaseSampler(ABC):
    """What a sampler is: a choice among the ready samples."""

    def __init__(self) -> None:
        self._states: dict[str, Any] = {}

    @abstractmethod
    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        """Choose ``batch_size`` of the ready indexes; returns those to hand out and those to mark as consumed."""

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[list[int], list[int]]:
        return self.sample(*args, **kwargs)


class SequentialSampler(BaseSampler):
    """The first ready samples in the order of their indexes."""

    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        chosen = ready_indexes[:batch_size]
        return chosen, chosen


def resolve(given: Any) -> BaseSampler:
    """The sampler that a configuration names: by name, by class, or an instance.

    Raises:
        InvalidArgumentError: nothing of that name is known (a ValueError).
        WrongTypeError: it is no sampler (a TypeError).
        UnimplementedError: the session cannot run it (a NotImplementedError).
    """
    if isinstance(given, str):
        known = {cls.__name__: cls for cls in BaseSampler.__subclasses__()}
        if given not in known:
            raise InvalidArgumentError(f"controller.sampler: could not find sampler {given!r}, have {sorted(known)}")
        given = known[given]
    if isinstance(given, type) and issubclass(given, BaseSampler):
        given = given()
    if not isinstance(given, BaseSampler):
        raise WrongTypeError(f"controller.sampler: got {type(given).__name__}, want a sampler, its class, or its name")
    if type(given) is not SequentialSampler:
        raise UnimplementedError(f"controller.sampler: {type(given).__name__} cannot run here, want SequentialSampler")
    return given
