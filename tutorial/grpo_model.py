"""The learning half of the GRPO demo: arithmetic prompts, a tiny transformer, and group relative policy optimisation.

Nothing in here knows the queue. Every function takes and returns plain tensors, one per sample, so that whatever passes
between the processes of the demo is what a real trainer would put into a queue:

* a rollout worker calls :func:`make_prompts`, :func:`sample` and puts `response`, `logprobs` and `logits`;
* a reward worker reads `prompt` and `response` and puts :func:`rewards`;
* a trainer appends each response to its prompt, calls :func:`group_advantages` and :func:`grpo_step`, and publishes
  :func:`get_weights`, which rollout workers load with :func:`set_weights`.

The policy starts from random weights. There is no supervised warm-up: all it ever learns from is the reward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

SYMBOLS = "0123456789+="
END = len(SYMBOLS)
PAD = END + 1
VOCABULARY = PAD + 1
MAX_OPERAND_DIGITS = 2
MAX_PROMPT = 2 * MAX_OPERAND_DIGITS + 2
MAX_RESPONSE = MAX_OPERAND_DIGITS + 2
LEVELS = (9, 19, 49, 99)

_MASTERED = 0.9
_FORMAT_CREDIT = 0.1
_DIGIT_CREDIT = 0.4


def encode(text: str) -> Tensor:
    """Turns text into tokens.

    Args:
        text: Digits, `+` and `=` only.

    Returns:
        int64[len(text)].

    Raises:
        ValueError: The text holds another symbol.

    Example:
        >>> encode("3+4=")
        tensor([ 3, 10,  4, 11])
    """
    return torch.tensor([SYMBOLS.index(symbol) for symbol in text], dtype=torch.int64)


def decode(tokens: Tensor) -> str:
    """Turns tokens back into text; the end token reads as a full stop, padding as an underscore.

    Example:
        >>> decode(torch.tensor([3, 10, 4, 11, 7, END]))
        '3+4=7.'
    """
    return "".join((SYMBOLS + "._")[token] for token in tokens.tolist())


def make_prompts(count: int, max_operand: int, generator: torch.Generator) -> list[Tensor]:
    """Draws addition prompts such as `3+4=`, uniformly over both operands.

    Args:
        count: How many prompts to draw.
        max_operand: Largest operand, at most 99; see :func:`next_level`.
        generator: Source of randomness.

    Returns:
        `count` prompts, each int64[length].

    Raises:
        ValueError: `max_operand` does not fit the two digits of an operand.
    """
    if not 0 <= max_operand < 10**MAX_OPERAND_DIGITS:
        raise ValueError(f"make_prompts: max_operand {max_operand}, want 0 to {10**MAX_OPERAND_DIGITS - 1}")
    operands = torch.randint(max_operand + 1, (count, 2), generator=generator)
    return [encode(f"{left}+{right}=") for left, right in operands.tolist()]


def next_level(max_operand: int, mean_reward: float) -> int:
    """Returns the largest operand for the next prompts: the next of `LEVELS` once this one is mastered.

    Example:
        >>> next_level(9, mean_reward=0.5), next_level(9, mean_reward=0.95), next_level(99, mean_reward=0.95)
        (9, 19, 99)
    """
    if mean_reward < _MASTERED:
        return max_operand
    return next((level for level in LEVELS if level > max_operand), max_operand)


def reward(prompt: Tensor, response: Tensor) -> float:
    """Judges one answer between 0 and 1.

    A right answer followed by the end token earns 1. Anything else earns partial credit, without which a random policy
    would see no signal to begin with: 0.1 for digits closed by the end token, and up to 0.4 for the share of positions,
    end token included, that hold the right token.

    Args:
        prompt: int64[length], as :func:`make_prompts` made it.
        response: int64[length], as :func:`sample` returned it.

    Example:
        >>> reward(encode("3+4="), torch.tensor([7, END]))
        1.0
        >>> round(reward(encode("9+4="), torch.tensor([1, 2, END])), 3)
        0.367
    """
    left, right = decode(prompt).rstrip("=").split("+")
    want = [*encode(str(int(left) + int(right))).tolist(), END]
    got: list[int] = response.tolist()
    if got == want:
        return 1.0
    well_formed = len(got) > 1 and got[-1] == END and all(token < 10 for token in got[:-1])
    hits = sum(a == b for a, b in zip(got, want, strict=False))
    return _FORMAT_CREDIT * float(well_formed) + _DIGIT_CREDIT * hits / max(len(got), len(want))


def rewards(prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> Tensor:
    """Judges a batch of answers with :func:`reward`.

    Returns:
        float32[batch].
    """
    return torch.tensor([reward(p, r) for p, r in zip(prompts, responses, strict=True)], dtype=torch.float32)


class Block(nn.Module):
    """One pre-norm transformer layer: causal attention, then a two-layer perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.merge = nn.Linear(width, width, bias=False)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps float32[batch, time, width] to the same shape."""
        batch, time, width = hidden.shape
        qkv = self.qkv(self.norm_attention(hidden)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.merge(mixed.transpose(1, 2).reshape(batch, time, width))
        out: Tensor = hidden + self.mlp(self.norm_mlp(hidden))
        return out


class Policy(nn.Module):
    """A decoder-only transformer over the vocabulary of this module.

    Sequences are padded on the right; with causal attention a padded token never reaches a real one, so that no mask is
    needed.

    Args:
        width: Size of the hidden state.
        layers: Number of transformer layers.
        heads: Attention heads per layer.
        seed: Seed of the initial weights, so that all processes can start from the same ones.
    """

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.tokens = nn.Embedding(VOCABULARY, width)
            self.positions = nn.Embedding(MAX_PROMPT + MAX_RESPONSE, width)
            self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, VOCABULARY)
            nn.init.zeros_(self.head.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Predicts the next token at every position.

        Args:
            tokens: int64[batch, time].

        Returns:
            Logits, float32[batch, time, vocabulary].
        """
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.tokens(tokens) + self.positions(places)
        logits: Tensor = self.head(self.norm(self.blocks(hidden)))
        return logits


@dataclasses.dataclass(frozen=True)
class Rollout:
    """Sampled answers, one tensor per sample; `time` differs from sample to sample.

    Attributes:
        responses: int64[time] each, ending with the end token unless the answer was cut off.
        logprobs: float32[time] each, log-probability of every sampled token under the sampling policy.
        logits: float32[time, vocabulary] each, what the tokens were sampled from.
    """

    responses: list[Tensor]
    logprobs: list[Tensor]
    logits: list[Tensor]


@torch.no_grad()
def sample(policy: Policy, prompts: Sequence[Tensor], generator: torch.Generator) -> Rollout:
    """Samples one answer per prompt at temperature 1, whole batch at once.

    Sequences are so short that recomputing the prefix is cheaper than keeping a key-value cache.

    Args:
        policy: The policy to sample from.
        prompts: int64[length] each; for a group of answers repeat the prompt.
        generator: Source of randomness.
    """
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    rows = torch.arange(len(prompts))
    sequences = torch.full((len(prompts), int(lengths.max()) + MAX_RESPONSE), PAD)
    for row, prompt in enumerate(prompts):
        sequences[row, : len(prompt)] = prompt
    steps: list[Tensor] = []
    tokens: list[Tensor] = []
    open_rows = torch.ones(len(prompts), dtype=torch.bool)
    counts = torch.zeros(len(prompts), dtype=torch.int64)
    for step in range(MAX_RESPONSE):
        visible = sequences[:, : int(lengths.max()) + step]
        logits = policy(visible)[rows, lengths - 1 + step]
        token = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
        sequences[rows, lengths + step] = token
        steps.append(logits)
        tokens.append(token)
        counts += open_rows
        open_rows &= token != END
        if not open_rows.any():
            break
    all_logits, all_tokens = torch.stack(steps, 1), torch.stack(tokens, 1)
    logprobs = all_logits.log_softmax(-1).gather(-1, all_tokens.unsqueeze(-1)).squeeze(-1)
    ends = counts.tolist()
    return Rollout(
        responses=[all_tokens[row, :end].clone() for row, end in enumerate(ends)],
        logprobs=[logprobs[row, :end].clone() for row, end in enumerate(ends)],
        logits=[all_logits[row, :end].clone() for row, end in enumerate(ends)],
    )


def entropy(logits: Sequence[Tensor]) -> float:
    """Returns the mean entropy in nats of the distributions that the tokens were sampled from.

    Args:
        logits: float32[time, vocabulary] each, from :func:`sample`.
    """
    scores = torch.cat(list(logits)).log_softmax(-1)
    return float(-(scores.exp() * scores).sum(-1).mean())


def group_advantages(scores: Tensor, group: int) -> Tensor:
    """Compares each answer with the other answers to the same prompt.

    Args:
        scores: Rewards, float32[prompts * group], the answers to one prompt side by side.
        group: Answers per prompt.

    Returns:
        float32[prompts * group], zero mean and unit variance within a group; zero in a group whose answers all earned
        the same.

    Raises:
        ValueError: The number of scores is no multiple of `group`.

    Example:
        >>> group_advantages(torch.tensor([0.0, 1.0, 0.5, 0.5]), group=2)
        tensor([-0.9998,  0.9998,  0.0000,  0.0000])
    """
    if group < 1 or scores.numel() % group:
        raise ValueError(f"group_advantages: {scores.numel()} scores, want a multiple of group size {group}")
    grouped = scores.float().view(-1, group)
    centred = grouped - grouped.mean(1, keepdim=True)
    return (centred / (grouped.std(1, correction=0, keepdim=True) + 1e-4)).view(-1)


@dataclasses.dataclass(frozen=True)
class StepReport:
    """What the last optimiser step of a batch did.

    Attributes:
        loss: Value of :func:`policy_loss`.
        clipped: Share of response tokens whose ratio was outside the clip range.
        grad_norm: Norm of the gradient before it was clipped.
    """

    loss: float
    clipped: float
    grad_norm: float


def policy_loss(
    policy: Policy,
    sequences: Sequence[Tensor],
    logprobs: Sequence[Tensor],
    advantages: Tensor,
    clip: float = 0.2,
    entropy_bonus: float = 0.15,
) -> tuple[Tensor, float]:
    """Computes the clipped policy-gradient loss, averaged over all response tokens.

    There is no KL term, hence no reference policy. What keeps the policy from settling on the first answer that earns
    partial credit is a reward for entropy: without it learning stops at a mean reward of about 0.35.

    Args:
        policy: The policy being trained.
        sequences: Prompt followed by response, int64[length] each.
        logprobs: Log-probabilities under the policy that sampled, float32[response length] each; their lengths tell
            where each response begins.
        advantages: float32[batch].
        clip: How far the probability ratio may leave 1 before a token stops contributing.
        entropy_bonus: Weight of the mean entropy, in nats, of the next-token distributions.

    Returns:
        The loss with its graph, and the share of tokens that were outside the clip range.
    """
    ends = torch.tensor([len(sequence) for sequence in sequences])
    counts = torch.tensor([len(row) for row in logprobs])
    tokens = nn.utils.rnn.pad_sequence(list(sequences), batch_first=True, padding_value=PAD)
    rows = torch.repeat_interleave(torch.arange(len(ends)), counts)
    within = torch.arange(len(rows)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    places = torch.repeat_interleave(ends - counts, counts) + within
    scores = policy(tokens[:, :-1])[rows, places - 1].log_softmax(-1)
    now = scores.gather(-1, tokens[rows, places].unsqueeze(-1)).squeeze(-1)
    ratio = (now - torch.cat(list(logprobs))).exp()
    gain = torch.repeat_interleave(advantages, counts)
    objective = torch.minimum(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain).mean()
    spread = -(scores.exp() * scores).sum(-1).mean()
    loss = -objective - entropy_bonus * spread
    return loss, float(((ratio - 1).abs() > clip).float().mean())


def grpo_step(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    sequences: Sequence[Tensor],
    logprobs: Sequence[Tensor],
    advantages: Tensor,
    passes: int = 2,
) -> StepReport:
    """Learns from one batch: `passes` optimiser steps on the whole of it.

    Args:
        policy: The policy to train, in place.
        optimizer: From :func:`make_optimizer`, for this policy.
        sequences: As for :func:`policy_loss`.
        logprobs: As for :func:`policy_loss`.
        advantages: As for :func:`policy_loss`.
        passes: Steps per batch, at least 1. The clip range is what makes more than one safe.

    Raises:
        ValueError: `passes` is below 1.
    """
    if passes < 1:
        raise ValueError(f"grpo_step: passes {passes}, want at least 1")
    for _ in range(passes):
        loss, clipped = policy_loss(policy, sequences, logprobs, advantages)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    return StepReport(float(loss.detach()), clipped, float(norm))


def make_optimizer(policy: Policy, learning_rate: float = 1e-3) -> torch.optim.Optimizer:
    """Returns the optimiser the demo trains with."""
    return torch.optim.AdamW(policy.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)


def get_weights(policy: Policy) -> Tensor:
    """Returns a copy of all weights as one float32[size]."""
    return nn.utils.parameters_to_vector(policy.parameters()).detach().clone()


@torch.no_grad()
def set_weights(policy: Policy, weights: Tensor) -> None:
    """Copies weights that :func:`get_weights` returned into a policy of the same size.

    Raises:
        ValueError: The number of weights is another.
    """
    parameters = list(policy.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    if weights.shape != (sum(sizes),):
        raise ValueError(f"set_weights: shape {tuple(weights.shape)}, want ({sum(sizes)},)")
    for parameter, values in zip(parameters, weights.split(sizes), strict=True):
        parameter.copy_(values.view_as(parameter))
