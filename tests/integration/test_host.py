"""A host process over its real protocol."""

import asyncio
import signal

import grpc
import psutil
import pytest

from envfarm.core.errors import (
    ConfigError,
    EnvironmentCodeError,
    IsolationError,
    SandboxError,
    SlotLost,
    StepConflict,
    Unavailable,
)
from envfarm.wire.v1 import host_pb2, types_pb2

OK, ERROR, INVALID, TIMEOUT = (
    types_pb2.TOOL_STATUS_OK,
    types_pb2.TOOL_STATUS_ERROR,
    types_pb2.TOOL_STATUS_INVALID,
    types_pb2.TOOL_STATUS_TIMEOUT,
)


def texts(ran):
    return [(m.role, m.content) for m in ran.messages]


async def test_inspection_shows_environments_slots_and_what_is_broken(host_of):
    async with host_of("Counter", "NoSuchClass", slots=3) as host:
        state = await host.inspect()
        assert (state.host_id, state.slots, state.busy) == ("host-test", 3, 0)
        (info,) = state.environments
        assert info.description == "Counts how often its tool really ran."
        assert [t.name for t in info.tools] == ["add", "add_slowly", "misbehave", "wait", "finish"]
        assert info.catalogue
        assert len(state.broken) == 1
        assert "NoSuchClass" in state.broken[0]


async def test_pages_of_an_endless_split_follow_each_other_and_can_be_read_again(host):
    assert await host.tasks("Counter", 0) == ["train-0", "train-1", "train-2"]
    assert await host.tasks("Counter", 3) == ["train-3", "train-4", "train-5"]
    assert await host.tasks("Counter", 3) == ["train-3", "train-4", "train-5"]
    assert await host.tasks("Counter", 1, 2) == ["train-1", "train-2"]
    assert await host.tasks("Plain", 0, 10) == ["only"]
    assert await host.tasks("Plain", 5, 10) == []


async def test_tasks_that_cannot_be_made_say_why(host_of):
    async with host_of("BrokenTasks") as host:
        with pytest.raises(grpc.aio.AioRpcError, match="RuntimeError: no data"):
            await host.tasks("BrokenTasks")
        with pytest.raises(grpc.aio.AioRpcError, match="no split named 'exam'"):
            await host.tasks("BrokenTasks", split="exam")


async def test_opening_gives_the_system_prompt_the_first_message_and_the_potential(host):
    first = await host.acquire("e", seed=42)
    assert [(m.role, m.content) for m in first.messages] == [("system", "Count."), ("user", "seed 42")]
    assert first.progress == 0.0
    plain = await host.acquire("p", "Plain")
    assert [(m.role, m.content) for m in plain.messages] == [("user", "go")]
    assert not plain.HasField("progress")


async def test_the_same_episode_id_opens_once(host):
    first, second = await asyncio.gather(host.acquire("e"), host.acquire("e"))
    assert first == second == await host.acquire("e")


async def test_calls_run_in_order_and_results_that_exist_take_their_place(host):
    await host.acquire("e")
    given = types_pb2.ToolResult(call_id="call_x", name="search", status=OK, content="found")
    ran = await host.step(
        "e", 0, ("add", {"amount": 2}), ("add", {}), results=[given], order=["call_0", "call_x", "call_1"]
    )
    assert [(r.call_id, r.content) for r in ran.results] == [("call_0", "2"), ("call_x", "found"), ("call_1", "3")]
    assert [(m.role, m.tool_call_id, m.name) for m in ran.messages] == [
        ("tool", "call_0", "add"),
        ("tool", "call_x", "search"),
        ("tool", "call_1", "add"),
    ]
    assert (ran.progress_before, ran.progress_after) == (0.0, 0.75)
    assert [(s.name, s.value) for s in ran.signals] == [("evenness", 0.0)]
    assert not ran.done
    assert not ran.HasField("completion")


async def test_a_repeated_step_is_answered_but_not_run_again(host):
    await host.acquire("e")
    first = await host.step("e", 0, ("add", {}))
    assert await host.step("e", 0, ("add", {})) == first
    with pytest.raises(StepConflict, match="another action"):
        await host.step("e", 0, ("add", {}), digest=b"other")
    with pytest.raises(StepConflict, match="next is 1"):
        await host.step("e", 2, ("add", {}))
    assert (await host.step("e", 1, ("add", {}))).results[0].content == "2"


async def test_a_repeat_of_a_step_that_still_runs_waits_for_the_same_end(host):
    await host.acquire("e")
    call = ("add_slowly", {"seconds": 0.2})
    first, second = await asyncio.gather(host.step("e", 0, call), host.step("e", 0, call))
    assert first == second
    assert first.results[0].content == "1"
    slow = asyncio.create_task(host.step("e", 1, call))
    await asyncio.sleep(0)  # it is sent first
    with pytest.raises(StepConflict, match="still runs"):
        await host.step("e", 1, call, digest=b"other")
    assert (await slow).results[0].content == "2"


async def test_calls_made_before_are_counted_whatever_their_spelling(host):
    await host.acquire("e")
    twice = ("misbehave", {"how": "none"})
    assert (await host.step("e", 0, twice, twice)).repeated_calls == 0
    call = types_pb2.ToolCall(id="c", name="misbehave", arguments='{ "how" :"none"}')
    request = host_pb2.RunStep(episode_id=f"{host.own}e", index=1, digest=b"x", calls=[call], order=["c"])
    reply = await host.mux.call(host_pb2.SlotCommand(step=request), 5)
    assert reply.ran.repeated_calls == 1


async def test_an_ending_tool_ends_and_is_judged(host):
    await host.acquire("e")
    ran = await host.step("e", 0, ("add", {"amount": 3}), ("finish", {"value": 3}), ("add", {}))
    assert ran.done
    assert ran.outcome.kind == types_pb2.OUTCOME_KIND_COMPLETED
    assert ran.completion == 1.0
    assert [r.status for r in ran.results] == [OK, OK, INVALID]
    assert "finish ended the episode" in ran.results[2].content
    with pytest.raises(StepConflict, match="is over"):
        await host.step("e", 1, ("add", {}))


async def test_an_ending_tool_that_says_no_ends_nothing(host):
    await host.acquire("e")
    ran = await host.step("e", 0, ("finish", {"value": -1}))
    assert not ran.done
    assert ran.results[0].content == "give a positive number"


async def test_a_message_without_calls_is_answered_by_the_simulated_user_or_ends(host):
    await host.acquire("e")
    assert texts(await host.step("e", 0, content="tell me more")) == [("user", "go on")]
    ran = await host.step("e", 1, content="bye")
    assert ran.done
    assert ran.messages == []
    assert ran.outcome.kind == types_pb2.OUTCOME_KIND_COMPLETED
    assert ran.completion == 0.0


async def test_a_malformed_message_is_answered_until_the_step_limit(host):
    await host.acquire("e")
    for index in range(5):
        ran = await host.step("e", index, malformed="the call is cut off")
        assert texts(ran) == [("user", "the call is cut off")]
    assert ran.done
    assert (ran.outcome.kind, ran.outcome.detail) == (types_pb2.OUTCOME_KIND_TRUNCATED, "steps")


async def test_a_limit_of_the_policy_side_ends_the_episode(host):
    await host.acquire("e", verify="unknown")
    ran = await host.step("e", 0, ("add", {}), limit="tokens")
    assert (ran.done, ran.outcome.detail) == (True, "tokens")
    assert not ran.HasField("completion")


@pytest.mark.parametrize(
    ("how", "status", "expected"),
    [
        ("raises", ERROR, "error: ValueError: bad"),
        ("says no", ERROR, "sold out"),
        ("exits", ERROR, "error: CodeExited: SystemExit: 3"),
        ("stops", ERROR, "error: StopIteration"),
        ("object", ERROR, "error: the tool returned Odd, which is not JSON"),
        ("nested", OK, '{"a":[1,2.5,null,true]}'),
        ("surrogate", OK, "broken ? text"),
        ("none", OK, "null"),
        ("spins", TIMEOUT, "error: misbehave gave no answer within 0.4 s"),
        ("swallows", TIMEOUT, "error: misbehave gave no answer within 0.4 s"),
        ("sleeps", TIMEOUT, "error: misbehave gave no answer within 0.4 s"),
    ],
)
async def test_a_tool_that_misbehaves_is_an_observation_and_the_episode_goes_on(host, how, status, expected):
    await host.acquire("e")
    ran = await host.step("e", 0, ("misbehave", {"how": how}), ("add", {}))
    assert ran.results[0].status == status
    assert ran.results[0].content.startswith(expected)
    assert ran.results[1].content == "2"
    assert not ran.done
    assert (await host.step("e", 1, ("add", {}))).results[0].content == "3"


async def test_ten_megabytes_are_cut_head_and_tail(host):
    await host.acquire("e")
    (result,) = (await host.step("e", 0, ("misbehave", {"how": "huge"}))).results
    assert result.truncated
    assert len(result.content.encode()) <= 1000
    assert "9999000 of 10000000 bytes cut" in result.content
    assert result.content.startswith("xxx")
    assert result.content.endswith("xxx")


async def test_bad_arguments_and_unknown_tools_never_run(host):
    await host.acquire("e")
    ran = await host.step("e", 0, ("add", {"amount": "many"}), ("nothing", {}), ("add", {"other": 1}))
    assert [r.status for r in ran.results] == [INVALID] * 3
    assert (await host.step("e", 1, ("add", {}))).results[0].content == "1"


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("raises", "reset raised ValueError: no such shelf"),
        ("hangs", "reset took longer than its 0.5"),
        ("loops", "reset took longer than its 0.5"),
        ("wrong", "reset returned int 7"),
    ],
)
async def test_a_reset_that_fails_is_an_environment_error_and_frees_the_slot(host_of, until, how, expected):
    async with host_of("Counter", slots=2) as host:
        with pytest.raises(EnvironmentCodeError, match=expected):
            await host.acquire("e", reset=how)

        async def free():
            return (await host.inspect()).busy == 0

        await until(free)
        await host.acquire("e2")


@pytest.mark.parametrize("how", ["well", "raises"])
async def test_an_episode_is_closed_whatever_its_outcome(host, until, tmp_path, how):
    mark = tmp_path / "mark"
    if how == "raises":
        with pytest.raises(EnvironmentCodeError):
            await host.acquire("e", reset="raises", mark=str(mark))
    else:
        await host.acquire("e", mark=str(mark))
        await host.release("e")
    await until(mark.exists)
    assert mark.read_text() == "closed\n"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"progress": "raises"}, "progress raised KeyError"),
        ({"progress": "beyond"}, "progress returned 1.5, expected 0 to 1"),
        ({"verify": "raises"}, "verify raised RuntimeError: no judge"),
        ({"verify": "hangs"}, "verify took longer than its 0.5 s"),
    ],
)
async def test_a_measure_that_fails_is_an_infrastructure_failure_without_a_reward(host, data, expected):
    await host.acquire("e", **data)
    ran = await host.step("e", 0, ("add", {}), ("finish", {"value": 1}))
    assert ran.done
    assert ran.outcome.kind == types_pb2.OUTCOME_KIND_INFRA_FAILED
    assert expected in ran.outcome.detail
    assert not ran.HasField("completion")
    assert [r.content for r in ran.results] == ["1", "null"]


async def test_one_hanging_tool_does_not_delay_the_others(host):
    await asyncio.gather(*(host.acquire(f"e{i}") for i in range(4)))
    hanging = asyncio.create_task(host.step("e0", 0, ("misbehave", {"how": "sleeps"})))
    spinning = asyncio.create_task(host.step("e1", 0, ("misbehave", {"how": "spins"})))
    loop = asyncio.get_running_loop()
    waits = []
    for index in range(4):
        start = loop.time()
        await asyncio.gather(host.step("e2", index, ("add", {})), host.step("e3", index, ("add", {})))
        waits.append(loop.time() - start)
    assert not hanging.done()
    assert not spinning.done()
    assert min(waits) < 0.2
    assert (await hanging).results[0].status == TIMEOUT
    assert (await spinning).results[0].status == TIMEOUT


async def test_blocking_tools_of_several_slots_overlap(host):
    await asyncio.gather(*(host.acquire(f"e{i}") for i in range(4)))
    loop = asyncio.get_running_loop()
    start = loop.time()
    await asyncio.gather(*(host.step(f"e{i}", 0, ("wait", {"seconds": 0.3})) for i in range(4)))
    assert loop.time() - start < 0.9


async def test_a_slot_whose_call_still_hangs_is_quarantined_with_its_cause(host_of):
    async with host_of("Counter", slots=4) as host:
        await host.acquire("e")
        await host.step("e", 0, ("misbehave", {"how": "sleeps"}))
        await host.release("e")
        state = await host.inspect()
        assert state.busy == 0
        assert len(state.quarantined) == 1
        assert "still hangs" in state.quarantined[0]
        await asyncio.gather(*(host.acquire(f"n{i}") for i in range(3)))
        with pytest.raises(Unavailable, match="1 of them quarantined"):
            await host.acquire("n3")


async def test_a_full_host_says_so_and_a_released_slot_serves_again(host_of):
    async with host_of("Counter", slots=1) as host:
        await host.acquire("a")
        with pytest.raises(Unavailable, match="all 1 slots"):
            await host.acquire("b")
        await host.release("a")
        await host.release("a")
        first = await host.acquire("b")
        assert first.progress == 0.0
        with pytest.raises(SlotLost, match="released, expired or never opened"):
            await host.step("a", 0, ("add", {}))


async def test_an_idle_episode_loses_its_slot_when_its_lease_ends(host_of, until):
    async with host_of("Brief") as host:
        await host.acquire("e", "Brief")

        async def free():
            return (await host.inspect()).busy == 0

        await until(free)
        with pytest.raises(SlotLost):
            await host.step("e", 0, ("add", {}))


async def test_unknown_environments_are_named_with_those_there_are(host):
    with pytest.raises(ConfigError, match=r"does not serve environment .*Nothing.*it serves:.*Counter"):
        await host.acquire("e", "Nothing")


async def test_files_of_a_task_are_there_and_gone_with_the_episode(host):
    await host.acquire("e", "Workshop", files={"notes/a.txt": b"alpha"})
    ran = await host.step(
        "e", 0, ("run", {"command": "cat notes/a.txt; echo beta > b.txt"}), ("read", {"path": "b.txt"})
    )
    assert [r.content for r in ran.results] == ["alpha", "beta\n"]
    await host.release("e")
    await host.acquire("e", "Workshop")
    assert (await host.step("e", 0, ("run", {"command": "ls"}))).results[0].content == ""


async def test_an_environment_that_runs_code_fails_to_open_where_nothing_isolates_it(host_of, tmp_path):
    async with host_of("Workshop", "Impossible", "Plain", "Trusting", env={"PATH": str(tmp_path)}) as host:
        with pytest.raises(SandboxError, match="apt-get install bubblewrap") as caught:
            await host.acquire("e", "Workshop")
        assert isinstance(caught.value, IsolationError)
        with pytest.raises(IsolationError, match="asks for gvisor"):
            await host.acquire("e", "Impossible")
        await host.acquire("p", "Plain")
        levels = {i.name.rpartition(":")[2]: i.isolation for i in (await host.inspect()).environments}
        assert levels["Workshop"] == types_pb2.ISOLATION_NONE
        trusting = await host.acquire("t", "Trusting")
        assert trusting.isolation == types_pb2.ISOLATION_NONE
        assert (await host.step("t", 0, ("run", {"command": "echo hi"}))).results[0].content == "hi\n"


async def test_a_drained_host_finishes_what_runs_and_exits(host_of):
    async with host_of("Counter") as host:
        await host.acquire("e")
        running = asyncio.create_task(host.step("e", 0, ("add_slowly", {"seconds": 0.2})))
        await asyncio.sleep(0)
        await host.stub.Drain(host_pb2.DrainRequest(grace_s=10))
        with pytest.raises(Unavailable):
            await host.acquire("f")
        assert (await running).results[0].content == "1"
        assert (await host.step("e", 1, ("add", {}))).results[0].content == "2"
        await host.release("e")
        assert await asyncio.to_thread(host.process.wait, 4) == 0


async def test_sigterm_ends_a_host_even_with_a_hanging_call(host_of):
    async with host_of("Counter") as host:
        await host.acquire("e")
        await host.step("e", 0, ("misbehave", {"how": "sleeps"}))
        host.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(host.process.wait, 10) == 0


async def test_a_host_without_a_gateway_ends_itself(host_of):
    async with host_of("Plain", lease=0.5) as host:
        await host.inspect()
        assert await asyncio.to_thread(host.process.wait, 10) == 0


async def test_a_killed_host_takes_its_commands_with_it(host_of, until):
    async with host_of("Workshop") as host:
        await host.acquire("e", "Workshop")
        command = "sleep 301 & sleep 302"
        running = asyncio.create_task(host.step("e", 0, ("run", {"command": command})))

        def sleepers():
            found = psutil.process_iter(["cmdline"])
            return [p for p in found if p.info["cmdline"] in (["sleep", "301"], ["sleep", "302"])]

        await until(lambda: len(sleepers()) == 2)
        host.process.kill()
        with pytest.raises(Unavailable):
            await running
        await until(lambda: not sleepers())


async def test_an_unhurried_neighbour_is_not_slowed_by_a_command_that_burns(host):
    await asyncio.gather(host.acquire("e"), host.acquire("w", "Workshop"))
    burning = asyncio.create_task(host.step("w", 0, ("run", {"command": "timeout 1 sh -c 'while :; do :; done'"})))
    for index in range(4):
        assert (await host.step("e", index, ("add", {}))).results[0].content == str(index + 1)
    assert not burning.done()
    await burning
