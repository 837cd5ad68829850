"""The learning half of the GRPO demo learns, on one thread and without a queue."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

MODULE = Path(__file__).resolve().parents[2] / "tutorial" / "grpo_model.py"
PROMPTS, GROUP, SEED = 8, 8, 3


@pytest.fixture(scope="module")
def grpo() -> ModuleType:
    """The module under test; `tutorial` is a folder of scripts, not a package."""
    spec = importlib.util.spec_from_file_location("grpo_model", MODULE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["grpo_model"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums do not depend on the number of cores, and neither does the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


def prompts(grpo, random, count=PROMPTS, group=GROUP):
    """Prompts of one-digit additions, each repeated for its group of answers."""
    return [prompt for prompt in grpo.make_prompts(count, 9, random) for _ in range(group)]


def joined(asked, responses):
    return [torch.cat(pair) for pair in zip(asked, responses, strict=True)]


def test_text_survives_the_tokenizer(grpo):
    assert grpo.decode(grpo.encode("0123456789+=")) == "0123456789+="
    with pytest.raises(ValueError, match="substring not found"):
        grpo.encode("3*4")


@pytest.mark.parametrize("largest", [0, 9, 99])
def test_prompts_are_sums_of_operands_in_range(grpo, random, largest):
    for prompt in grpo.make_prompts(50, largest, random):
        left, right = grpo.decode(prompt).removesuffix("=").split("+")
        assert 0 <= int(left) <= largest
        assert 0 <= int(right) <= largest
        assert len(prompt) <= grpo.MAX_PROMPT


def test_operands_of_three_digits_are_refused(grpo, random):
    with pytest.raises(ValueError, match="max_operand 100, want 0 to 99"):
        grpo.make_prompts(1, 100, random)


REWARDS = {
    "13.": 1.0,
    "12.": 0.1 + 0.4 * 2 / 3,  # well formed, two of three positions
    "13": 0.4 * 2 / 3,  # not closed
    "13.1": 0.4 * 3 / 4,  # goes on behind the end
    "133.": 0.1 + 0.4 * 2 / 4,
    ".": 0.0,
    "+=": 0.0,
    "2.": 0.1,
}


@pytest.mark.parametrize("answer", REWARDS)
def test_reward_of_four_plus_nine(grpo, answer):
    symbols = grpo.SYMBOLS + "."
    response = torch.tensor([symbols.index(symbol) for symbol in answer])
    assert grpo.reward(grpo.encode("4+9="), response) == pytest.approx(REWARDS[answer])
    assert grpo.rewards([grpo.encode("4+9=")] * 2, [response] * 2).tolist() == pytest.approx([REWARDS[answer]] * 2)


def test_levels_rise_with_mastery_and_end(grpo):
    assert [grpo.next_level(level, 0.95) for level in grpo.LEVELS] == [19, 49, 99, 99]
    assert grpo.next_level(9, 0.89) == 9


def test_sampled_logprobs_are_those_that_the_trainer_computes(grpo, random):
    """Prompts of different lengths share a batch; padding must not change a probability."""
    policy = grpo.Policy(seed=1)
    torch.nn.init.normal_(policy.head.weight, generator=random)
    asked = grpo.make_prompts(40, 99, random) + grpo.make_prompts(10, 9, random)
    rollout = grpo.sample(policy, asked, random)
    assert {len(prompt) for prompt in asked} == {4, 5, 6}
    for prompt, response, logprobs, logits in zip(
        asked, rollout.responses, rollout.logprobs, rollout.logits, strict=True
    ):
        assert 1 <= len(response) <= grpo.MAX_RESPONSE
        assert len(response) == grpo.MAX_RESPONSE or response[-1] == grpo.END
        assert not (response[:-1] == grpo.END).any()
        with torch.no_grad():
            alone = policy(torch.cat([prompt, response])[None, :-1])[0, len(prompt) - 1 :]
        torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logprobs, alone.log_softmax(-1)[torch.arange(len(response)), response])
    sequences, advantages = joined(asked, rollout.responses), torch.ones(len(asked))
    loss, clipped = grpo.policy_loss(policy, sequences, rollout.logprobs, advantages, entropy_bonus=0.0)
    assert loss.item() == pytest.approx(-1.0, abs=1e-4)  # every ratio is 1
    assert clipped == 0.0


def test_ratios_outside_the_clip_range_stop_contributing(grpo, random):
    policy = grpo.Policy()
    asked = prompts(grpo, random, 4, 1)
    rollout = grpo.sample(policy, asked, random)
    sequences, advantages = joined(asked, rollout.responses), torch.ones(4)
    likelier = [logprobs - 1.0 for logprobs in rollout.logprobs]
    loss, clipped = grpo.policy_loss(policy, sequences, likelier, advantages, clip=0.2, entropy_bonus=0.0)
    assert (loss.item(), clipped) == (pytest.approx(-1.2), 1.0)
    loss.backward()
    assert all(not p.grad.any() for p in policy.parameters() if p.grad is not None)


def test_advantages_compare_within_a_group(grpo):
    got = grpo.group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0, 5.0, 5.0, 5.0, 5.0]), 4).view(2, 4)
    torch.testing.assert_close(got.mean(1), torch.zeros(2))
    torch.testing.assert_close(got[0].std(correction=0), torch.tensor(1.0), rtol=1e-2, atol=0)
    assert got[0, 0] > 1
    assert not got[1].any()
    with pytest.raises(ValueError, match="5 scores, want a multiple of group size 4"):
        grpo.group_advantages(torch.ones(5), 4)


def test_entropy_of_a_uniform_distribution(grpo):
    assert grpo.entropy([torch.zeros(2, 8), torch.zeros(1, 8)]) == pytest.approx(torch.tensor(8.0).log().item())


def test_weights_travel_as_one_tensor(grpo):
    source, target = grpo.Policy(seed=1), grpo.Policy(seed=2)
    weights = grpo.get_weights(source)
    assert (weights.dtype, weights.dim()) == (torch.float32, 1)
    assert not torch.equal(weights, grpo.get_weights(target))
    grpo.set_weights(target, weights)
    weights.zero_()
    assert torch.equal(grpo.get_weights(target), grpo.get_weights(source))
    with pytest.raises(ValueError, match="set_weights: shape"):
        grpo.set_weights(target, weights[1:])


def test_policies_of_one_seed_start_equal_and_leave_the_global_generator_alone(grpo):
    torch.manual_seed(5)
    want = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(grpo.get_weights(grpo.Policy(seed=1)), grpo.get_weights(grpo.Policy(seed=1)))
    assert torch.equal(torch.rand(1), want)


def test_no_passes_are_refused(grpo):
    policy = grpo.Policy()
    with pytest.raises(ValueError, match="passes 0"):
        grpo.grpo_step(policy, grpo.make_optimizer(policy), [], [], torch.ones(0), passes=0)


def test_mean_reward_rises(grpo, random):
    """200 small batches lift the mean reward of one-digit additions well above what a random policy earns."""
    policy = grpo.Policy(seed=SEED)
    optimizer = grpo.make_optimizer(policy)
    means = []
    for _ in range(200):
        asked = prompts(grpo, random)
        rollout = grpo.sample(policy, asked, random)
        scores = grpo.rewards(asked, rollout.responses)
        advantages = grpo.group_advantages(scores, GROUP)
        grpo.grpo_step(policy, optimizer, joined(asked, rollout.responses), rollout.logprobs, advantages)
        means.append(scores.mean().item())
    before, after = sum(means[:10]) / 10, sum(means[-30:]) / 30
    assert before < 0.1
    assert after > before + 0.15, means[::20]
