"""Samplers decide which ready samples a fetch returns. The controller runs them; these classes name and describe them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

__all__ = ["BaseSampler", "SequentialSampler"]


class BaseSampler(ABC):
    """What a sampler is: a choice among the ready samples."""

    def __init__(self) -> None:
        self._states: dict[str, Any] = {}

    @abstractmethod
    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> tuple[list[int], list[int]]:
        """Choose ``batch_size`` of the ready indexes; returns those to hand out and those to mark as consumed."""

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[list[int], list[int]]:
        return self.sample(*args, **kwargs)


class SequentialSampler(BaseSampler):
    """The first ready samples in the order of their indexes."""

    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> tuple[list[int], list[int]]:
        chosen = ready_indexes[:batch_size]
        return chosen, chosen
