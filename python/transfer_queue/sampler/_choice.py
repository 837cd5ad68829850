"""From what a configuration names to what the core runs."""

from __future__ import annotations

from typing import Any

from transfer_queue._shipping import shipped
from transfer_queue.errors import InvalidArgumentError, WrongTypeError
from transfer_queue.sampler.base import BaseSampler
from transfer_queue.sampler.grpo_group_n_sampler import GRPOGroupNSampler
from transfer_queue.sampler.rank_aware_sampler import RankAwareSampler
from transfer_queue.sampler.seqlen_balanced_sampler import SeqlenBalancedSampler
from transfer_queue.sampler.sequential_sampler import SequentialSampler
from transfer_queue.sampler.streaming_token_budget_sampler import StreamingTokenBudgetSampler

_NATIVE = (
    SequentialSampler,
    RankAwareSampler,
    GRPOGroupNSampler,
    SeqlenBalancedSampler,
    StreamingTokenBudgetSampler,
)


def _descendants(cls: type[BaseSampler]) -> list[type[BaseSampler]]:
    """All subclasses, parents before their children."""
    children: list[type[BaseSampler]] = cls.__subclasses__()
    return children + [grandchild for child in children for grandchild in _descendants(child)]


def _known() -> dict[str, type[BaseSampler]]:
    found = _descendants(BaseSampler)  # type: ignore[type-abstract]
    return {cls.__name__: cls for cls in found}


def resolve(given: Any) -> BaseSampler:
    """The sampler that a configuration names: by name, by class, or an instance.

    All subclasses of `BaseSampler` that exist by then are found by name; of several with one name it is the one that
    was defined last.

    Raises:
        InvalidArgumentError: nothing of that name is known (a ValueError).
        WrongTypeError: it is no sampler (a TypeError).

    Example:
        >>> type(resolve("RankAwareSampler")).__name__
        'RankAwareSampler'
    """
    if isinstance(given, str):
        known = _known()
        if given not in known:
            raise InvalidArgumentError(f"controller.sampler: could not find sampler {given!r}, have {sorted(known)}")
        given = known[given]
    if isinstance(given, type) and issubclass(given, BaseSampler):
        given = given()
    if not isinstance(given, BaseSampler):
        raise WrongTypeError(f"controller.sampler: got {type(given).__name__}, want a sampler, its class, or its name")
    return given


def describe(sampler: BaseSampler, op: str = "init") -> dict[str, Any]:
    """What the core needs to know: name and numbers of a sampler that it has itself, else the pickled object.

    A sampler that remembers something already is pickled too, so that it goes on with that.

    Raises:
        InvalidArgumentError: the object cannot be pickled (a ValueError).
    """
    described: dict[str, Any] = {"name": type(sampler).__name__, "group": 0, "ranks": 0, "pickled": None}
    if type(sampler) in _NATIVE and not any(sampler.save_checkpoint().values()):
        described["group"] = int(getattr(sampler, "n_samples_per_prompt", 0))
        described["ranks"] = int(getattr(sampler, "dp_size", 0))
        return described
    described["pickled"] = shipped(sampler, "controller.sampler", op)
    return described
