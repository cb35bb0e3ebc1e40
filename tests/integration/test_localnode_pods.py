"""What a pod may ask of its node: order of containers, hooks, volumes, configuration, restart policies, problems."""

import base64
from pathlib import Path

import pytest

from pagefleet_localcluster.client import CLAIMS, CONFIG_MAPS, PODS, SECRETS, ApiError
from pagefleet_localcluster.objects import Object, condition_of, is_pod_ready
from support.local_cluster import container, create, events_of, eventually, kubectl, ready_probe, running_cluster
from support.localnode_pods import gone, pod, reached, shell


async def test_init_containers_run_in_order_and_sidecars_outlive_the_others(tmp_path: Path) -> None:
    """Start: first, sidecar (until its startup probe passes), last init container, main. Stop: main, then sidecar."""
    journal = tmp_path / "out" / "journal"
    journal.parent.mkdir()
    loop = "trap 'echo {0} stops >>/out/journal; exit 0' TERM; echo {0} >>/out/journal; touch /tmp-{0}; "
    mount = {"volumeMounts": [{"name": "out", "mountPath": "/out"}]}
    waiting = "while true; do sleep 0.05; done"
    async with running_cluster(tmp_path / "cluster") as cluster:
        client = cluster.client
        sidecar = shell(
            "side",
            f"sleep 0.3; {loop.format('side').replace('/tmp-side', 'up')}{waiting}",
            restartPolicy="Always",
            startupProbe={"exec": {"command": ["test", "-e", "up"]}, "periodSeconds": 1, "failureThreshold": 9},
            **mount,
        )
        body = pod(
            "p",
            shell("main", f"{loop.format('main').replace('/tmp-main', 'up')}{waiting}", **mount),
            initContainers=[
                shell("first", "sleep 0.2; echo first >>/out/journal", **mount),
                sidecar,
                shell("last", "echo last >>/out/journal", **mount),
            ],
            volumes=[{"name": "out", "hostPath": {"path": str(journal.parent)}}],
        )
        await create(client, PODS, body)

        async def initializing() -> Object | None:
            now = await client.get(PODS, "p", "default")
            condition = condition_of(now, "Initialized")
            return condition if condition and condition["status"] == "False" else None

        assert (await eventually(initializing))["message"] == "containers with incomplete status: [first side last]"

        async def ready() -> Object | None:
            now = await client.get(PODS, "p", "default")
            return now if is_pod_ready(now) and "main" in journal.read_text() else None

        now = await eventually(ready)
        states = {s["name"]: next(iter(s["state"])) for s in now["status"]["initContainerStatuses"]}
        assert states == {"first": "terminated", "side": "running", "last": "terminated"}
        await client.delete(PODS, "p", "default")
        await gone(client, "p")
        assert journal.read_text().split("\n")[:-1] == ["first", "side", "last", "main", "main stops", "side stops"]


async def test_a_failed_init_container_is_tried_again_or_fails_the_pod(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        client = cluster.client
        main = shell("main", "exit 0")
        flaky = shell("init", "test -e marker || { touch marker; exit 1; }")
        await create(client, PODS, pod("again", main, initContainers=[flaky], restartPolicy="OnFailure"))
        done = await reached(client, "again", "Succeeded")
        assert done["status"]["initContainerStatuses"][0]["restartCount"] == 1
        await create(client, PODS, pod("never", main, initContainers=[shell("init", "exit 4")], restartPolicy="Never"))
        failed = await reached(client, "never", "Failed")
        assert failed["status"]["initContainerStatuses"][0]["state"]["terminated"]["exitCode"] == 4
        assert "waiting" in failed["status"]["containerStatuses"][0]["state"]


async def test_restart_policies_decide_the_end(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        client = cluster.client
        await create(client, PODS, pod("never", shell("c", "echo bye; exit 3"), restartPolicy="Never"))
        once = shell("c", "test -e marker && exit 0; touch marker; exit 1")
        await create(client, PODS, pod("on-failure", once, restartPolicy="OnFailure"))
        failed = await reached(client, "never", "Failed")
        status = failed["status"]["containerStatuses"][0]
        assert (status["state"]["terminated"]["exitCode"], status["restartCount"]) == (3, 0)
        assert [(c["type"], c["status"]) for c in failed["status"]["conditions"] if c["type"].endswith("Ready")] == [
            ("ContainersReady", "False"),
            ("Ready", "False"),
        ]
        succeeded = await reached(client, "on-failure", "Succeeded")
        assert succeeded["status"]["containerStatuses"][0]["restartCount"] == 1
        ready = condition_of(succeeded, "Ready")
        assert ready is not None and ready["reason"] == "PodCompleted"
        assert await kubectl(cluster, "logs", "never") == (0, "bye\n")


async def test_configuration_reaches_files_and_variables(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        client = cluster.client
        await create(client, CONFIG_MAPS, {"metadata": {"name": "m"}, "data": {"a.txt": "A", "b": "B"}})
        secret = base64.b64encode(b"s3cret").decode()
        await create(client, SECRETS, {"metadata": {"name": "s"}, "data": {"token": secret}})
        paths = ["/etc/map/a.txt", "/etc/secret/token", "/etc/all/deep/b", "/etc/all/labels", "/etc/one"]
        script = f"for f in {' '.join(paths)}; do cat $f; echo; done; env; stat -c %a /etc/secret/token"
        main = shell(
            "c",
            script,
            env=[
                {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "token"}}},
                {"name": "WHERE", "value": "/etc/map/$(TOKEN)"},
                {"name": "CPU", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu", "divisor": "1m"}}},
            ],
            envFrom=[{"configMapRef": {"name": "m"}, "prefix": "M_"}],
            resources={"limits": {"cpu": "250m"}},
            volumeMounts=[
                {"name": "map", "mountPath": "/etc/map"},
                {"name": "secret", "mountPath": "/etc/secret"},
                {"name": "all", "mountPath": "/etc/all"},
                {"name": "map", "mountPath": "/etc/one", "subPath": "b"},
            ],
        )
        body = pod(
            "p",
            main,
            restartPolicy="Never",
            volumes=[
                {"name": "map", "configMap": {"name": "m"}},
                {"name": "secret", "secret": {"secretName": "s", "defaultMode": 0o400}},
                {
                    "name": "all",
                    "projected": {
                        "sources": [
                            {"configMap": {"name": "m", "items": [{"key": "b", "path": "deep/b"}]}},
                            {
                                "downwardAPI": {
                                    "items": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]
                                }
                            },
                        ]
                    },
                },
            ],
        )
        body["metadata"]["labels"] = {"app": "x"}
        await create(client, PODS, body)
        await reached(client, "p", "Succeeded")
        _, log = await kubectl(cluster, "logs", "p")
        lines = log.splitlines()
        assert lines[:5] == ["A", "s3cret", "B", 'app="x"', "B"]
        assert lines[-1] == "400"
        variables = dict(line.split("=", 1) for line in lines[5:-1] if "=" in line)
        assert variables["M_b"] == "B" and variables["CPU"] == "250" and variables["HOSTNAME"] == "p"
        assert variables["WHERE"].endswith("/volumes/map/s3cret")
        assert not {"PYTEST_CURRENT_TEST", "VIRTUAL_ENV"} & set(variables)


async def test_a_pod_reaches_the_api_unless_it_wants_no_token(tmp_path: Path) -> None:
    """As with a service account: a controller may run as a pod."""
    async with running_cluster(tmp_path) as cluster:
        client = cluster.client
        script = "kubectl get pods -o name 2>&1 || true"
        await create(client, PODS, pod("with", shell("c", script), restartPolicy="Never"))
        bare = pod("without", shell("c", "env"), restartPolicy="Never", automountServiceAccountToken=False)
        await create(client, PODS, bare)
        await reached(client, "with", "Succeeded")
        _, log = await kubectl(cluster, "logs", "with")
        assert "pod/with\n" in log
        await reached(client, "without", "Succeeded")
        _, log = await kubectl(cluster, "logs", "without")
        assert "HOSTNAME=without" in log and "KUBECONFIG" not in log


async def test_what_is_missing_is_waited_for_and_named(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        client = cluster.client
        reference = {"configMapKeyRef": {"name": "late", "key": "k"}}
        await create(client, PODS, pod("env", shell("c", "sleep 100", env=[{"name": "K", "valueFrom": reference}])))
        await create(
            client, PODS, pod("volume", shell("c", "sleep 100"), volumes=[{"name": "v", "configMap": {"name": "late"}}])
        )

        async def waiting() -> bool:
            now = await client.get(PODS, "env", "default")
            [status] = now["status"]["containerStatuses"]
            state: Object = status["state"]["waiting"]
            return state == {"reason": "CreateContainerConfigError", "message": 'configmap "late" not found'}

        await eventually(waiting)

        async def mount() -> bool:
            message = (await events_of(client, "volume"))["FailedMount"]
            return message == 'MountVolume.SetUp failed for volume "v" : configmap "late" not found'

        await eventually(mount)
        await create(client, CONFIG_MAPS, {"metadata": {"name": "late"}, "data": {"k": "v"}})
        for name in ("env", "volume"):
            await reached(client, name, "Running")

            async def ready(name: str = name) -> bool:
                return is_pod_ready(await client.get(PODS, name, "default"))

            await eventually(ready)


@pytest.mark.parametrize(
    ("case", "fields", "reason", "message"),
    [
        (
            "no command and an unknown image",
            {"command": None},
            "CreateContainerConfigError",
            "container 'c' gives no command and image 'busybox' has none here",
        ),
        (
            "a volume mount without a volume",
            {"volumeMounts": [{"name": "none", "mountPath": "/x"}]},
            "CreateContainerConfigError",
            "volume mount 'none' of container 'c' has no volume",
        ),
        (
            "a program that is not there",
            {"command": ["no-such-program"]},
            "StartError",
            'exec: "no-such-program": executable file not found in $PATH',
        ),
    ],
)
async def test_a_container_that_cannot_start_says_why(
    case: str, fields: Object, reason: str, message: str, tmp_path: Path
) -> None:
    async with running_cluster(tmp_path) as cluster:
        body = pod("p", {**shell("c", ""), **fields}, restartPolicy="Never")
        if fields.get("command", 1) is None:
            del body["spec"]["containers"][0]["command"]
        try:
            await create(cluster.client, PODS, body)
        except ApiError as error:
            assert error.code == 422 and "volumeMounts" in error.message, case  # the API may refuse it first
            return

        async def said() -> bool:
            now = await cluster.client.get(PODS, "p", "default")
            [status] = now["status"]["containerStatuses"]
            [state] = status["state"].values()
            return bool((state.get("reason"), state.get("message")) == (reason, message))

        await eventually(said)


async def test_claims_keep_their_data_for_the_next_pod_on_any_node(tmp_path: Path) -> None:
    async with running_cluster(tmp_path, nodes=2) as cluster:
        client = cluster.client
        volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": "models"}}]
        mount = {"volumeMounts": [{"name": "data", "mountPath": "/data"}]}

        def job(name: str, script: str, node: str) -> Object:
            selector = {"kubernetes.io/hostname": node}
            return pod(name, shell("c", script, **mount), volumes=volumes, restartPolicy="Never", nodeSelector=selector)

        await create(client, PODS, job("write", "echo kept >/data/f", "local-0"))

        async def unschedulable() -> bool:
            condition = condition_of(await client.get(PODS, "write", "default"), "PodScheduled")
            return condition is not None and condition["message"].startswith(
                '0/2 nodes are available: persistentvolumeclaim "models" not found.'
            )

        await eventually(unschedulable)
        spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
        await create(client, CLAIMS, {"metadata": {"name": "models"}, "spec": spec})
        await reached(client, "write", "Succeeded")
        assert (await client.get(CLAIMS, "models", "default"))["status"]["phase"] == "Bound"
        await create(client, PODS, job("read", "cat /data/f", "local-1"))
        await reached(client, "read", "Succeeded")
        assert await kubectl(cluster, "logs", "read") == (0, "kept\n")
        folder = tmp_path / "shared" / "claims" / "default" / "models"
        assert folder.is_dir()
        await client.delete(CLAIMS, "models", "default")

        async def removed() -> bool:
            return not folder.exists()

        await eventually(removed)


async def test_hooks_run_after_the_start_and_before_the_end(tmp_path: Path) -> None:
    """preStop has the pod's grace period; the process gets SIGTERM only after it."""
    async with running_cluster(tmp_path / "cluster") as cluster:
        client = cluster.client
        script = "trap 'echo term >>/out/journal; exit 0' TERM; while true; do sleep 0.05; done"

        def hook(word: str) -> Object:
            return {"exec": {"command": ["sh", "-c", f"sleep 0.2; echo {word} >>{tmp_path}/journal"]}}

        main = shell(
            "c",
            script,
            lifecycle={"postStart": hook("post"), "preStop": hook("pre")},
            volumeMounts=[{"name": "out", "mountPath": "/out"}],
        )
        body = pod("p", main, volumes=[{"name": "out", "hostPath": {"path": str(tmp_path)}}])
        await create(client, PODS, body)

        async def posted() -> bool:
            return (tmp_path / "journal").read_text() == "post\n"

        await eventually(posted)
        await client.delete(PODS, "p", "default")
        await gone(client, "p")
        assert (tmp_path / "journal").read_text() == "post\npre\nterm\n"


async def test_a_shorter_grace_period_ends_a_pod_that_is_already_ending(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        client = cluster.client
        body = pod("p", container("--deaf", readinessProbe=ready_probe()), terminationGracePeriodSeconds=300)
        await create(client, PODS, body)

        async def ready() -> bool:
            return is_pod_ready(await client.get(PODS, "p", "default"))

        await eventually(ready)
        await client.delete(PODS, "p", "default")

        async def ending() -> bool:
            return bool((await client.get(PODS, "p", "default"))["metadata"].get("deletionTimestamp"))

        await eventually(ending)
        await client.delete(PODS, "p", "default", grace_seconds=1)
        await gone(client, "p")
