"""Samplers decide which ready samples a fetch returns.

A session has one, which ``controller.sampler`` of the configuration names: by the name of its class, by the class, or
as an instance. The samplers of this package run inside the core; these classes name them, and work on plain lists as
well. Any other subclass of `BaseSampler` is run by a thread of the process that owns the session, on a copy of the
object, one call after the other.
"""

from transfer_queue.sampler._choice import describe, resolve
from transfer_queue.sampler.base import BaseSampler
from transfer_queue.sampler.grpo_group_n_sampler import GRPOGroupNSampler
from transfer_queue.sampler.rank_aware_sampler import RankAwareSampler
from transfer_queue.sampler.seqlen_balanced_sampler import (
    SeqlenBalancedSampler,
    get_seqlen_balanced_partitions,
    karmarkar_karp,
)
from transfer_queue.sampler.sequential_sampler import SequentialSampler
from transfer_queue.sampler.streaming_token_budget_sampler import StreamingTokenBudgetSampler

__all__ = [
    "BaseSampler",
    "GRPOGroupNSampler",
    "RankAwareSampler",
    "SeqlenBalancedSampler",
    "SequentialSampler",
    "StreamingTokenBudgetSampler",
    "describe",
    "get_seqlen_balanced_partitions",
    "karmarkar_karp",
    "resolve",
]
