"""Asynchronous GRPO whose samples flow through TransferQueue, in real processes on one host. Run `bash build/demo.sh`.

The policy is a tiny transformer that learns to add from nothing but rewards (`grpo_model.py`, which knows no queue).
What is worth copying is here: one function per process, and between them nothing but the queue. A sample is a row of
the partition `samples`, and every process adds columns and tags to it:

    process   columns                              tags
    trainer   prompt, sequence                     level, group      as many new prompts as were trained on
    rollout   response, logprobs, logits, hidden   rollout, version  sampled with the newest published weights;
              sequence += response                                   appended where the cell lies
    reward    reward                               reward
    stats     entropy, scale                                         then clears logits and hidden
    trainer                                                          trains, publishes weights, clears the rows

Nobody polls. A worker asks for rows that have the columns it reads; the queue answers when there are enough of them,
and hands each row once to each task. That also bounds how stale a sample gets: rollouts wait for prompts, and the
trainer puts in new ones only for those it is done with, so that no sample is older than `AHEAD - 1` policies.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

import grpo_model as grpo
import torch
from grpo_report import MIB, SMOOTH, History, plot
from tensordict import TensorDict
from torch import Tensor
from tqdm import tqdm

import transfer_queue as tq

SAMPLES, WEIGHTS, METRICS, CONTROL = "samples", "weights", "metrics", "control"
AHEAD = 3
DAY = 86_400.0


@dataclasses.dataclass(frozen=True)
class Run:
    """What all processes agree on.

    Attributes:
        seconds: how long new prompts are issued.
        rollouts: rollout processes.
        group: answers per prompt, which GRPO compares with each other.
        prompts: prompts per training step, a multiple of `rollouts`.
        seed: of prompts, weights and answers.
    """

    seconds: float
    rollouts: int
    group: int
    prompts: int
    seed: int

    @property
    def batch(self) -> int:
        """Rows of one training step."""
        return self.prompts * self.group

    @property
    def share(self) -> int:
        """Rows that a worker fetches at a time: whole groups."""
        return self.batch // self.rollouts


def columns(**rows: Tensor | Sequence[Tensor]) -> TensorDict:
    """Columns for a put: a tensor holds one number per sample, a list one tensor of any length per sample (jagged)."""
    made = {
        name: value if isinstance(value, Tensor) else torch.nested.nested_tensor(list(value), layout=torch.jagged)
        for name, value in rows.items()
    }
    return TensorDict(made, batch_size=[len(next(iter(rows.values())))])


async def fetch(task: str, fields: list[str], count: int) -> tuple[list[str], TensorDict, list[dict[str, Any]]]:
    """Waits for `count` rows that have all `fields` and that this task has not had yet.

    What was handed out is remembered per task: all rollout processes fetch as `rollout` and share the prompts, while
    `reward` and `stats` each get every row. The rows come in no useful order.

    Returns:
        Keys, columns, and tags of the rows.
    """
    client = tq.get_client()
    meta = await client.async_get_meta(fields, count, SAMPLES, task_name=task, timeout=DAY)
    keys = client.kv_retrieve_keys(meta.global_indexes, SAMPLES)
    return [key for key in keys if key is not None], client.get_data(meta), meta.custom_meta


async def first_of(*work: Coroutine[Any, Any, None]) -> None:
    """Runs coroutines until one of them ends, cancels the others, and raises what the one has raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ended = [task for task in tasks if not task.cancel()]
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in ended:
        task.result()


async def stopped() -> None:
    """Waits until the main process says that it is over, by a key that has nothing but a tag."""
    await tq.async_kv_wait(CONTROL, keys="stop", timeout=DAY)


def child(work: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
    """What every process but the main one runs.

    `init` finds the session through TQ_RUNTIME_DIR. Insisting on `attach` keeps a worker whose main process has died
    from opening a session of its own. All that a worker awaits are its next rows, so it is stopped between two batches
    and never within one.
    """
    torch.set_num_threads(1)
    try:
        tq.init({"runtime": "attach"})
        asyncio.run(first_of(work(*args), stopped()))
    except (tq.errors.UnavailableError, tq.errors.NotInitializedError) as error:
        sys.exit(f"{multiprocessing.current_process().name}: the session is gone: {error}")
    finally:
        tq.close()


async def rollout(run: Run, number: int) -> None:
    """Answers prompts with the newest weights."""
    policy = grpo.Policy()
    generator = torch.Generator().manual_seed(run.seed + 1 + number)
    while True:
        keys, asked, _ = await fetch("rollout", ["prompt"], run.share)
        prompts = asked["prompt"].unbind()

        # Waits only until there are any. The weights may be newer than the tag, which is read before them.
        newest = tq.kv_wait(WEIGHTS, keys="policy", fields="weights")
        grpo.set_weights(policy, tq.kv_batch_get_by_meta(newest)["weights"][0])
        answers = grpo.sample(policy, prompts, generator)

        # First the update, because the put is what the readers of these rows wait for.
        tq.kv_batch_update(keys, SAMPLES, columns(sequence=answers.responses), merge_fn="concat")
        made = columns(
            response=answers.responses,
            logprobs=answers.logprobs,
            logits=answers.logits,
            hidden=hidden_states(policy, prompts, answers.responses),
        )
        tags = [{"rollout": number, "version": newest.tags[0]["version"]}] * len(keys)
        tq.kv_batch_put(keys, SAMPLES, fields=made, tags=tags)


async def reward(run: Run) -> None:
    """Judges the answers."""
    while True:
        keys, data, _ = await fetch("reward", ["prompt", "response"], run.share)
        scores = grpo.rewards(data["prompt"].unbind(), data["response"].unbind())
        tags = [{"reward": round(score, 3)} for score in scores.tolist()]
        tq.kv_batch_put(keys, SAMPLES, fields=columns(reward=scores), tags=tags)


async def stats(run: Run) -> None:
    """Reduces the large columns to two numbers per sample."""
    while True:
        keys, data, _ = await fetch("stats", ["logits", "hidden"], run.share)
        entropy = torch.tensor([grpo.entropy([logits]) for logits in data["logits"].unbind()])
        scale = torch.stack([hidden.square().mean().sqrt() for hidden in data["hidden"].unbind()])

        # Nobody reads them after this. Their memory is free when the call returns, while the rows live on.
        tq.kv_clear(keys, SAMPLES, fields=["logits", "hidden"])
        tq.kv_batch_put(keys, SAMPLES, fields=columns(entropy=entropy, scale=scale))


async def train(run: Run) -> None:
    """Learns from the batches in the order of their prompts, until the time is over and nothing is on its way."""
    policy = grpo.Policy(seed=run.seed)
    optimizer = grpo.make_optimizer(policy)
    generator = torch.Generator().manual_seed(run.seed)
    level, recent = grpo.LEVELS[0], collections.deque[float](maxlen=SMOOTH * run.batch // 2)
    publish(policy, version=0)
    batches = collections.deque(issue(run, number, level, generator) for number in range(AHEAD))
    end = time.monotonic() + run.seconds
    version = 0
    while batches:
        # All groups of a batch, complete: a row has these columns when rollout, reward and stats are done with it.
        fields = ["sequence", "logprobs", "reward", "entropy", "scale"]
        ready = await tq.async_kv_wait(SAMPLES, keys=batches.popleft(), fields=fields, timeout=DAY)
        data = tq.kv_batch_get_by_meta(ready, select_fields=fields)
        advantages = grpo.group_advantages(data["reward"], run.group)
        grpo.grpo_step(policy, optimizer, data["sequence"].unbind(), data["logprobs"].unbind(), advantages)
        lag = version - sum(tag["version"] for tag in ready.tags) / run.batch
        version += 1
        publish(policy, version)
        tq.kv_clear(ready.keys, SAMPLES)

        report = {"at": time.monotonic(), "samples": version * run.batch, "level": level, "lag": lag}
        report |= {name: float(data[name].mean()) for name in ("reward", "entropy", "scale")}
        tq.kv_put("trainer", METRICS, tag=report)
        recent.extend(tag["reward"] for tag in ready.tags if tag["level"] == level)
        if len(recent) == recent.maxlen and level != (level := grpo.next_level(level, sum(recent) / len(recent))):
            recent.clear()
        if time.monotonic() < end:
            batches.append(issue(run, version + AHEAD - 1, level, generator))


def publish(policy: grpo.Policy, version: int) -> None:
    """Replaces the published weights. A rollout that is reading the old ones gets them whole."""
    tq.kv_put("policy", WEIGHTS, fields={"weights": grpo.get_weights(policy)}, tag={"version": version})


def issue(run: Run, number: int, level: int, generator: torch.Generator) -> list[str]:
    """Puts the prompts of one batch, each as often as it shall be answered; every other one from the level below.

    Returns:
        The keys, those of a group side by side.
    """
    easier = grpo.LEVELS[max(grpo.LEVELS.index(level) - 1, 0)]
    keys, rows, tags = [], [], []
    for index in range(run.prompts):
        largest, group = (easier if index % 2 else level), f"{number}/{index}"
        keys += [f"{group}/{answer}" for answer in range(run.group)]
        rows += grpo.make_prompts(1, largest, generator) * run.group
        tags += [{"level": largest, "group": group}] * run.group
    tq.kv_batch_put(keys, SAMPLES, fields=columns(prompt=rows, sequence=rows), tags=tags)
    return keys


@torch.no_grad()
def hidden_states(policy: grpo.Policy, prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> list[Tensor]:
    """What every layer computed at every position, float32[length, 1920] each: some 50 KB for one answer."""
    sequences = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    outputs: list[Tensor] = []
    leaves = [module for module in policy.blocks.modules() if not any(module.children())]
    hooks = [leaf.register_forward_hook(lambda _module, _inputs, output: outputs.append(output)) for leaf in leaves]
    policy(torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=grpo.PAD))
    for hook in hooks:
        hook.remove()
    states = torch.cat(outputs, dim=-1)
    return [states[row, : len(sequence)] for row, sequence in enumerate(sequences)]


def unit_bytes(units: Sequence[tq.UnitInfo]) -> int:
    """Bytes in the memory of all units."""
    return sum(unit.memory_used_bytes for unit in units)


async def gauge(history: History) -> None:
    """Notes unit memory twenty times a second."""
    while True:
        history.memory.append((time.monotonic(), unit_bytes(await tq.async_list_units())))
        await asyncio.sleep(0.05)


async def show(history: History, bar: tqdm[Any]) -> None:
    """Follows the trainer, whose reports are the tags of one key: a watch yields every change of it."""
    async for change in tq.kv_watch(METRICS):
        history.reports.append(change.tags or {})
        bar.set_postfix_str(history.line(), refresh=False)
        bar.update(min(history.seconds, bar.total) - bar.n)


async def trainer_end(children: Sequence[BaseProcess]) -> None:
    """Waits until the trainer is done.

    Raises:
        ChildProcessError: Some process ended in another way.
    """
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    for process in children:
        loop.add_reader(process.sentinel, ended.set)
    await ended.wait()
    for process in children:
        loop.remove_reader(process.sentinel)
        if multiprocessing.connection.wait([process.sentinel], timeout=0):
            process.join()
            code = process.exitcode or 0
            if code or process.name != "trainer":
                how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
                raise ChildProcessError(f"process {process.name} ended early, {how}")


def start(run: Run) -> Sequence[BaseProcess]:
    """Starts all processes. Ctrl-C is for the main one; the others inherit that it is ignored."""
    work: list[tuple[Any, ...]] = [("trainer", train, run), ("reward", reward, run), ("stats", stats, run)]
    work += [(f"rollout-{number}", rollout, run, number) for number in range(run.rollouts)]
    spawn = multiprocessing.get_context("spawn")
    made = [spawn.Process(target=child, name=name, args=args, daemon=True) for name, *args in work]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    for process in made:
        process.start()
    signal.signal(signal.SIGINT, before)
    return made


def stop(children: Sequence[BaseProcess]) -> None:
    """Ends all processes: asks them through the queue, and kills those that do not listen."""
    tq.kv_put("stop", CONTROL, tag={"by": "main"})
    deadline = time.monotonic() + 15
    for process in children:
        process.join(max(deadline - time.monotonic(), 0))
        if process.is_alive():
            process.kill()
            process.join()


def run_all(run: Run, history: History, quiet: bool) -> None:
    """Opens a session, runs everything in it, and leaves nothing behind, however it ends.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM.
        ChildProcessError: A process ended early.
    """
    bar = tqdm(total=run.seconds, disable=quiet, bar_format="{bar:10} {n:.0f}/{total:.0f} s{postfix}")
    # With a directory of its own it is a session of its own, whatever else runs on this host.
    with tempfile.TemporaryDirectory(prefix="tq-") as os.environ["TQ_RUNTIME_DIR"], bar:
        bar.set_postfix_str("starting processes")
        tq.init()
        try:
            children = start(run)
            try:
                asyncio.run(first_of(trainer_end(children), gauge(history), show(history, bar)))
            finally:
                stop(children)
                history.memory.append((time.monotonic(), unit_bytes(tq.list_units())))
        finally:
            tq.close()


def main() -> int:
    """Parses the command line, runs, and reports. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=100, help="how long to train (default: %(default)s)")
    parser.add_argument("--rollouts", type=int, default=2, help="rollout processes (default: %(default)s)")
    parser.add_argument("--group", type=int, default=8, help="answers per prompt (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=16, help="prompts per training step (default: %(default)s)")
    parser.add_argument("--plot", default="grpo_demo.png", metavar="PNG", help="where to draw (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, weights and answers (default: %(default)s)")
    parser.add_argument("--quiet", action="store_true", help="no live line")
    args = parser.parse_args()
    if args.seconds <= 0 or min(args.rollouts, args.prompts) < 1 or args.group < 2 or args.prompts % args.rollouts:
        parser.error("want --seconds above 0, --group at least 2, --prompts a multiple of --rollouts")
    run, history = Run(args.seconds, args.rollouts, args.group, args.prompts, args.seed), History()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    failure = ""
    try:
        run_all(run, history, args.quiet)
    except KeyboardInterrupt:
        failure = "interrupted"
    except ChildProcessError as error:
        failure = str(error)
    left = history.memory[-1][1] if history.memory else 0
    print(f"{history.summary()}, {left / MIB:.2f} MiB at the end", flush=True)
    if history.reports:
        plot(history, args.plot)
        print(f"plot          {args.plot}")
    if not failure and left >= MIB:
        failure = f"unit memory did not return to about zero: {left:,} bytes"
    if failure:
        print(f"error: {failure}", file=sys.stderr)
    return 130 if failure == "interrupted" else int(bool(failure))


if __name__ == "__main__":
    sys.exit(main())
