"""What pods and people do to a node: too many GPUs, wrong probes, floods of logs, deadlines, late deletions."""

import asyncio
from pathlib import Path

import pytest

from pagefleet_localcluster.client import EVENTS, PODS, Client
from pagefleet_localcluster.event_recorder import BURST_PER_OBJECT, EventRecorder
from pagefleet_localcluster.node.kubelet_server import tail_offset
from pagefleet_localcluster.node.node import trim
from pagefleet_localcluster.objects import Object, is_pod_ready
from support.local_cluster import create, events_of, eventually, kubectl, running_cluster
from support.localnode_pods import gone


def pod(name: str, script: str, *, container: Object | None = None, **spec: object) -> Object:
    fields = {"name": "c", "image": "busybox", "command": ["sh", "-c", script], **(container or {})}
    return {"metadata": {"name": name}, "spec": {"terminationGracePeriodSeconds": 1, "containers": [fields], **spec}}


def only_log(folder: Path) -> str:
    """The one container's log, empty while there is none."""
    return "".join(log.read_text() for log in folder.glob("nodes/*/pods/*/containers/c/0.log"))


async def status_of(client: Client, name: str) -> Object:
    found: Object = (await client.get(PODS, name, "default"))["status"]
    return found


async def test_a_pod_bound_past_the_scheduler_is_refused_and_can_be_deleted(tmp_path: Path) -> None:
    async with running_cluster(tmp_path, gpus_per_node=1) as cluster:
        client = cluster.client
        limits = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
        await create(client, PODS, pod("first", "sleep 100", container=limits))

        async def ready() -> bool:
            return is_pod_ready(await client.get(PODS, "first", "default"))

        await eventually(ready)
        await create(client, PODS, pod("forced", "sleep 100", container=limits, nodeName="local-0"))

        async def refused() -> bool:
            status = await status_of(client, "forced")
            return bool(status["phase"] == "Failed" and status["reason"] == "UnexpectedAdmissionError")

        await eventually(refused)
        await client.delete(PODS, "forced", "default")
        await gone(client, "forced")
        assert await ready()


async def phase_of(client: Client, name: str) -> str:
    return str((await status_of(client, name))["phase"])


async def test_a_gpu_is_free_when_its_pod_has_finished_though_its_object_stays(tmp_path: Path) -> None:
    async with running_cluster(tmp_path, gpus_per_node=1) as cluster:
        client = cluster.client
        limits = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
        for name in ("first", "second"):
            await create(client, PODS, pod(name, "true", container=limits, restartPolicy="Never"))

            async def succeeded(name: str = name) -> bool:
                return await phase_of(client, name) == "Succeeded"

            await eventually(succeeded)


@pytest.mark.parametrize("grace_seconds", [0, 1])
async def test_a_pod_gets_the_gpu_of_one_that_is_just_going(grace_seconds: int, tmp_path: Path) -> None:
    """The scheduler may give a slot away before the node is done with it: the pod waits, it never fails."""
    async with running_cluster(tmp_path, gpus_per_node=1) as cluster:
        client = cluster.client
        limits = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
        for index in range(8):
            name = f"p{index}"
            await create(client, PODS, pod(name, "sleep 100", container=limits, nodeName="local-0"))

            async def running(name: str = name) -> bool:
                phase = await phase_of(client, name)
                if phase == "Failed":
                    raise RuntimeError("a pod was refused the slot of one that is going")
                return phase == "Running"

            await eventually(running)
            await client.delete(PODS, name, "default", grace_seconds=grace_seconds)


async def test_an_active_deadline_fails_the_pod(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        client = cluster.client
        await create(client, PODS, pod("p", "sleep 100", activeDeadlineSeconds=1))

        async def failed() -> Object | None:
            status = await status_of(client, "p")
            return status if status["phase"] == "Failed" else None

        status = await eventually(failed)
        assert status["reason"] == "DeadlineExceeded"
        await client.delete(PODS, "p", "default")
        await gone(client, "p")


async def test_probes_that_cannot_be_attempted_say_so_and_are_counted(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        client = cluster.client
        probe = {"readinessProbe": {"httpGet": {"port": "nowhere"}, "periodSeconds": 1}}
        await create(client, PODS, pod("named", "sleep 100", container=probe))
        grpc = {"livenessProbe": {"grpc": {"port": 1}, "periodSeconds": 1, "failureThreshold": 1}}
        await create(client, PODS, pod("grpc", "sleep 100", container=grpc))

        async def counted() -> Object | None:
            items: list[Object] = (await client.list(EVENTS, "default", fieldSelector="reason=Unhealthy"))["items"]
            by_name = {e["involvedObject"]["name"]: e for e in items}
            return by_name if by_name["named"]["count"] >= 2 and by_name["grpc"] else None

        events = await eventually(counted)
        want = "Readiness probe failed: couldn't find port: 'nowhere' in the ports of container 'c'"
        assert events["named"]["message"] == want
        assert events["grpc"]["message"] == "Liveness probe failed: a process node has no grpc probe"
        assert events["named"]["involvedObject"]["fieldPath"] == "spec.containers{c}"


async def test_a_pod_deleted_by_force_leaves_no_process(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        client = cluster.client
        await create(client, PODS, pod("p", "trap '' TERM; sleep 100 & wait; wait"))

        async def ready() -> bool:
            return is_pod_ready(await client.get(PODS, "p", "default"))

        await eventually(ready)
        node = cluster.nodes["local-0"]
        [worker] = node.workers.values()
        process = worker.runners["c"].process
        assert process is not None
        await client.delete(PODS, "p", "default", grace_seconds=0)
        assert await process.wait() == 137

        async def forgotten() -> bool:
            return node.workers == {} and not any(node.settings.directory.glob("pods/*"))

        await eventually(forgotten)


async def test_a_flood_of_events_is_cut_and_repeats_are_counted(tmp_path: Path) -> None:
    async with running_cluster(tmp_path, nodes=0) as cluster:
        client = cluster.client
        created = await create(client, PODS, pod("p", "true"))
        recorder = EventRecorder(client, "test", clock=lambda: 1000.0)
        task = asyncio.create_task(recorder.run())
        for number in range(100):
            message = "same" if number % 2 else f"other {number}"
            recorder.record(created, "v1", "Pod", type="Normal", reason="Flood", message=message)

        async def all_sent() -> list[Object] | None:
            items: list[Object] = (await client.list(EVENTS, "default", fieldSelector="reason=Flood"))["items"]
            return items if sum(e["count"] for e in items) == BURST_PER_OBJECT else None

        items = await eventually(all_sent)
        assert sorted(e["count"] for e in items)[-2:] == [1, BURST_PER_OBJECT // 2]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_followed_log_survives_being_cut(tmp_path: Path) -> None:
    options = {"log_bytes": 2000, "lease_seconds": 0.1}
    async with running_cluster(tmp_path, node_options=options) as cluster:
        client = cluster.client
        script = "i=0; while [ $i -lt 2000 ]; do echo line $i; i=$((i+1)); done; echo done; sleep 100"
        await create(client, PODS, pod("p", script))

        async def cut() -> bool:
            text = only_log(tmp_path)
            return 0 < len(text) <= 2000 and text.endswith("done\n")

        await eventually(cut)
        assert await kubectl(cluster, "logs", "p", "--tail=1") == (0, "done\n")
        assert "Started" in await events_of(client, "p")


def test_tail_offset_finds_the_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for text in (
        b"",
        b"one",
        b"one\n",
        b"one\ntwo\nthree\n",
        b"one\ntwo\nthree",
        b"\n\n\n",
        b"x" * 70_000 + b"\nend\n",
    ):
        log.write_bytes(text)
        lines = text.splitlines(keepends=True)
        for count in range(5):
            want = b"".join(lines[len(lines) - count :] if count < len(lines) else lines) if count else b""
            assert text[tail_offset(log, count) :] == want, (text[:20], count)


def test_trim_keeps_the_newer_half(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(bytes(range(100)))
    trim(log, 100)
    assert log.read_bytes() == bytes(range(100))
    trim(log, 60)
    assert log.read_bytes() == bytes(range(70, 100))
