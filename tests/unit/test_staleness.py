"""From whole groups to batches: what is left out, what is too old, what is seen twice."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envfarm.core.errors import CorruptRecord, LogError
from envfarm.core.log import Group, LogRecord
from envfarm.core.messages import Diagnosis, Message
from envfarm.core.outcome import Outcome
from envfarm.core.run import RunSettings
from envfarm.core.sandbox import Isolation
from envfarm.core.trajectory import Segment, StepRecord, Trajectory, TrajectoryHeader
from trainer_bridge.former import BatchFormer, shuffled
from trainer_bridge.settings import AdvantageSettings, DataSettings
from trainer_bridge.stream import GroupStream, Seen, training_group

OUTCOMES = [Outcome.completed(), Outcome.truncated("steps"), Outcome.policy_failed("tokens")]


def episode(member, rewards, *, group=0, versions=(0,), outcome=OUTCOMES[0]):
    sampled = max(1, len(versions)) if versions else 0
    n = 1 + sampled
    mask = np.array([0, *[1] * sampled], np.uint8)
    return Trajectory(
        id=f"t{group}-{member}",
        run_id="r",
        group_id=f"g{group}",
        group_size=8,
        member=member,
        attempt=0,
        final=True,
        purpose="train",
        environment="e@1",
        split="train",
        task_id=str(group),
        seed=0,
        policy="p",
        outcome=outcome,
        prompt=(),
        segments=(
            Segment(
                token_ids=np.arange(n, dtype=np.int32),
                mask=mask,
                logprobs=np.where(mask == 1, -1.0, np.nan).astype(np.float32),
                versions=np.array([-1, *versions], np.int32),
                steps=np.where(mask == 1, 0, -1).astype(np.int32),
            ),
        ),
        steps=tuple(
            StepRecord(
                index=i, message=Message(role="assistant"), replies=(), diagnosis=Diagnosis.OK, parts={}, reward=r
            )
            for i, r in enumerate(rewards)
        ),
        reward=sum(r for r in rewards if r is not None) if any(r is not None for r in rewards) else None,
        catalogue="",
        isolation=Isolation.NONE,
        started_at=0.0,
        ended_at=1.0,
    )


def group_of(position, *members):
    return training_group(position, f"g{position}", members)


def former(kind="grpo", window=1, **data):
    data.setdefault("staleness", 1)
    return BatchFormer(DataSettings(groups_per_version=window, **data), AdvantageSettings(kind=kind))


def batch(made, *groups, version=0):
    for g in groups:
        made.add(g)
    return made.form(version, np.random.default_rng(0))


def advantages_by_id(formed):
    return {j.trajectory.id: j.advantages.tolist() for j in formed.judged}


def records(*trajectories):
    return tuple(LogRecord(header=TrajectoryHeader.of(t), payload=t.id.encode()) for t in trajectories)


# A farm's failure says nothing about the policy.


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(-5, 5), min_size=2, max_size=7),
    st.sampled_from([Outcome.infra_failed("sandbox died"), Outcome.aborted("breaker")]),
    st.sampled_from(["turn", "grpo", "drgrpo", "rloo", "gae"]),
    st.integers(0, 7),
)
def test_an_infrastructure_failure_never_shifts_the_baseline_of_its_group(rewards, failure, kind, place):
    healthy = [episode(i, [r]) for i, r in enumerate(rewards)]
    failed = episode(99, [0.0], outcome=failure)
    with_failure = [*healthy[:place], failed, *healthy[place:]]
    alone = batch(former(kind), group_of(1, *healthy))
    together = batch(former(kind), group_of(1, *with_failure))
    assert advantages_by_id(together) == advantages_by_id(alone)
    assert together.reward == alone.reward
    assert together.drops.no_reward == 1


def test_a_group_with_fewer_than_two_trainable_members_is_dropped():
    failed = episode(1, [0.0], outcome=Outcome.infra_failed("host lost"))
    formed = batch(former(), group_of(1, episode(0, [1.0]), failed))
    assert formed.judged == ()
    assert formed.drops.lone == 1


def test_an_episode_of_which_nothing_was_measured_is_left_out_like_a_failure():
    formed = batch(former("drgrpo"), group_of(1, episode(0, [1.0]), episode(1, [None]), episode(2, [3.0])))
    assert advantages_by_id(formed) == {"t0-0": [-1.0], "t0-2": [1.0]}
    assert formed.reward == 2.0


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_outcomes_that_are_the_policys_own_are_trained_on(outcome):
    formed = batch(former(), group_of(1, episode(0, [1.0], outcome=outcome), episode(1, [0.0])))
    assert len(formed.judged) == 2


# The staleness bound is hard.


@settings(deadline=None, max_examples=150)
@given(
    st.integers(0, 3),
    st.integers(1, 3),
    st.lists(
        st.tuples(
            st.integers(0, 2),  # versions published before the group arrives
            st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=3), min_size=1, max_size=4),  # lags per token
        ),
        min_size=1,
        max_size=15,
    ),
)
def test_no_schedule_lets_a_trajectory_be_trained_beyond_the_bound(bound, window, schedule):
    made = former("drgrpo", window, staleness=bound)
    version, arrived, done = 0, 0, 0
    for position, (published, members) in enumerate(schedule, 1):
        version += published
        episodes = [
            episode(m, [float(m)], group=position, versions=[max(0, version - lag) for lag in lags])
            for m, lags in enumerate(members)
        ]
        arrived += len(episodes)
        made.add(group_of(position, *episodes))
        if made.full:
            formed = made.form(version, np.random.default_rng(position))
            assert all(version - j.trajectory.oldest_version <= bound for j in formed.judged)
            assert all(0 <= s <= bound for s in formed.staleness)
            assert formed.position == position
            done += len(formed.judged) + formed.drops.counted
            version += 1
    waiting = sum(len(m) for _, m in schedule[len(schedule) - made.waiting :]) if made.waiting else 0
    assert done == arrived - waiting - made.carried  # everything is trained, counted as dropped, or waits


def test_the_bound_holds_at_the_moment_of_the_batch_and_not_of_arrival():
    made = former(window=2)
    made.add(group_of(1, episode(0, [0.0], versions=[4]), episode(1, [1.0], versions=[4])))
    made.add(group_of(2, episode(0, [0.0], group=2, versions=[6]), episode(1, [1.0], group=2, versions=[6])))
    formed = made.form(6, np.random.default_rng(0))
    assert {j.trajectory.group_id for j in formed.judged} == {"g2"}
    assert formed.drops.stale == 2


def test_one_old_token_makes_the_whole_group_old():
    old = episode(0, [0.0], versions=[3, 5])
    formed = batch(former(), group_of(1, old, episode(1, [1.0], versions=[5])), version=5)
    assert formed.judged == ()
    assert formed.drops.stale == 2


def test_stored_data_has_no_bound_unless_one_is_asked_for():
    run = RunSettings(environment="e", staleness=1, groups_per_version=4)
    assert DataSettings().for_run(run).staleness == 1
    assert DataSettings(purpose="collect").for_run(run).staleness is None
    assert DataSettings(purpose="collect", staleness=3).for_run(run).staleness == 3


# What cannot teach.


def disagreeing(position, version=0):
    return group_of(position, *(episode(m, [float(m)], group=position, versions=[version]) for m in range(2)))


def agreeing(position):
    return group_of(position, *(episode(m, [1.0], group=position) for m in range(2)))


def test_too_few_groups_that_teach_wait_for_the_next_window_and_are_trained_once():
    made = former(window=4, fill=0.5)
    first = batch(made, disagreeing(1), agreeing(2), agreeing(3), agreeing(4))
    assert (first.judged, first.carried, first.position) == ((), 1, 4)
    second = batch(made, disagreeing(5), agreeing(6), agreeing(7), agreeing(8))
    assert {j.trajectory.group_id for j in second.judged} == {"g1", "g5"}
    assert second.carried == made.carried == 0
    assert first.drops.zero_variance + second.drops.zero_variance == 12


def test_a_group_that_waited_too_long_is_stale_and_not_trained():
    made = former(window=4, fill=0.5, staleness=1)
    batch(made, disagreeing(1), agreeing(2), agreeing(3), agreeing(4))
    later = batch(made, *(disagreeing(p, version=2) for p in range(5, 9)), version=2)
    assert "g1" not in {j.trajectory.group_id for j in later.judged}
    assert later.drops.stale == 2


def test_without_a_least_fill_every_window_with_anything_to_teach_makes_a_version():
    formed = batch(former(window=4, fill=0.0), disagreeing(1), agreeing(2), agreeing(3), agreeing(4))
    assert len(formed.judged) == 2


def test_groups_that_agree_are_dropped_and_counted_and_can_be_kept():
    same = [episode(i, [0.5]) for i in range(3)]
    assert batch(former(), group_of(1, *same)).drops.zero_variance == 3
    assert len(batch(former(drop_zero_variance=False), group_of(1, *same)).judged) == 3


def test_a_dropped_group_is_not_replaced_so_that_no_version_waits_for_ever():
    made = former(window=2)
    same = group_of(1, episode(0, [1.0]), episode(1, [1.0]))
    formed = batch(made, same, group_of(2, episode(0, [1.0], group=2), episode(1, [0.0], group=2)))
    assert len(formed.judged) == 2
    assert formed.position == 2


def test_groups_of_one_serve_a_baseline_over_the_batch():
    made = former("batch", window=3, singles=True)
    formed = batch(made, *[group_of(i, episode(0, [float(i)], group=i)) for i in (1, 2, 3)])
    assert advantages_by_id(formed) == {"t1-0": [-1.0], "t3-0": [1.0]}  # the middle one is the mean: nothing to learn


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.lists(st.floats(-5, 5), min_size=1), min_size=1), min_size=1), st.integers(0, 2**31))
def test_shuffling_deals_whole_episodes_rewards_out_again_within_their_group(rewards, seed):
    dealt = shuffled(rewards, np.random.default_rng(seed))
    assert [sorted(g) for g in dealt] == [sorted(g) for g in rewards]


def test_shuffled_rewards_fit_episodes_of_any_length():
    made = former("turn", shuffle_rewards=True)
    formed = batch(made, group_of(1, *[episode(i, [float(i)] * (i + 1)) for i in range(4)]))
    assert all(len(j.advantages) == len(j.trajectory.steps) for j in formed.judged)


# At least once becomes once.


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 12), max_size=40), st.integers(0, 5))
def test_redelivered_groups_are_taken_once_and_never_before_the_position_to_start_after(deliveries, after):
    seen = Seen(after)
    taken = []
    for position in deliveries:
        t = episode(0, [1.0], group=position)
        fresh = seen.fresh(Group(position=position, group_id=f"g{position}", records=records(t)))
        taken += [] if fresh is None else [fresh.position]
    assert taken == sorted(set(taken))
    assert all(p > after for p in taken)


def test_a_trajectory_that_comes_in_two_groups_is_taken_from_the_first():
    seen = Seen(0)
    t = episode(0, [1.0])
    assert seen.fresh(Group(position=1, group_id="a", records=records(t))) is not None
    assert seen.fresh(Group(position=2, group_id="b", records=records(t))) is None


class Deliveries:
    """A subscription over stored trajectories that counts what was asked of it and whether it was closed."""

    def __init__(self, *groups, then=None):
        self.groups, self.then = groups, then
        self.asked = 0
        self.closed = asyncio.Event()

    async def subscription(self):
        try:
            for position, members in enumerate(self.groups, 1):
                self.asked += 1
                yield Group(position=position, group_id=f"g{position}", records=records(*members))
            if self.then is not None:
                raise self.then
            await asyncio.Event().wait()
        finally:
            self.closed.set()

    def decode(self, payload):
        found = {t.id.encode(): t for members in self.groups for t in members}
        if payload not in found:
            raise CorruptRecord("checksum")
        return found[payload]


async def test_the_stream_reads_no_further_ahead_than_it_may():
    source = Deliveries(*[[episode(0, [1.0], group=i), episode(1, [0.0], group=i)] for i in range(1, 21)])
    async with GroupStream(source.subscription(), source.decode, after=0, prefetch=3) as stream:
        first = await stream.next(5.0)
        assert first is not None
        assert first.position == 1
        await asyncio.sleep(0)
        assert source.asked <= 1 + 3 + 2  # taken, queued, in hand
        assert [(await stream.next(5.0)).position for _ in range(19)] == list(range(2, 21))
        assert await stream.next(0.01) is None
    assert source.closed.is_set()


async def test_whoever_waits_learns_why_the_stream_ended():
    source = Deliveries(then=LogError("disk on fire"))
    async with GroupStream(source.subscription(), source.decode, after=0, prefetch=3) as stream:
        for _ in range(2):
            with pytest.raises(LogError, match="disk on fire"):
                await stream.next(5.0)


async def test_a_record_that_cannot_be_read_is_left_out_and_its_group_goes_on():
    good = [episode(0, [1.0]), episode(1, [0.0])]
    source = Deliveries([*good, episode(2, [0.0])])

    def decode(payload):
        if payload == b"t0-2":
            raise CorruptRecord("checksum")
        return source.decode(payload)

    async with GroupStream(source.subscription(), decode, after=0, prefetch=3) as stream:
        group = await stream.next(5.0)
    assert group is not None
    assert [m.member for m in group.members] == [0, 1]
