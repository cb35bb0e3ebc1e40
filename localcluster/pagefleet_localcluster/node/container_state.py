"""What is known about one container, and how it reads in `containerStatuses`. Pure."""

from dataclasses import dataclass, field

from pagefleet_localcluster.objects import Object, format_time


@dataclass
class ContainerState:
    """Changed only through its transitions; exactly one of waiting, running and terminated holds."""

    name: str
    image: str
    restart_count: int = 0
    container_id: str = ""
    ready: bool = False
    started: bool = False
    state: Object = field(default_factory=lambda: {"waiting": {"reason": "PodInitializing"}})
    last_state: Object = field(default_factory=dict)

    @property
    def is_running(self) -> bool:
        """Whether its process runs."""
        return "running" in self.state

    @property
    def exit_code(self) -> int | None:
        """How it ended; None while it has not, or is about to start again."""
        return int(self.state["terminated"]["exitCode"]) if "terminated" in self.state else None

    def wait(self, reason: str, message: str = "") -> None:
        """It is not running yet, or not again."""
        self._keep_last()
        self.state = {"waiting": {"reason": reason, **({"message": message} if message else {})}}
        self.ready = self.started = False

    def run(self, container_id: str, now: float, *, restarted: bool) -> None:
        """Its process has started."""
        self._keep_last()
        self.restart_count += restarted
        self.container_id = container_id
        self.state = {"running": {"startedAt": format_time(now)}}
        self.ready = self.started = False

    def end(self, exit_code: int, reason: str, message: str, now: float) -> None:
        """Its process has ended."""
        began = self.state["running"]["startedAt"] if self.is_running else format_time(now)
        terminated = {
            "exitCode": exit_code,
            "reason": reason,
            **({"message": message} if message else {}),
            "startedAt": began,
            "finishedAt": format_time(now),
            "containerID": self.container_id,
        }
        self.state = {"terminated": terminated}
        self.ready = self.started = False

    def status(self) -> Object:
        """Its entry in `containerStatuses`."""
        return {
            "name": self.name,
            "image": self.image,
            "imageID": f"process://{self.image}" if self.container_id else "",
            **({"containerID": self.container_id} if self.container_id else {}),
            "ready": self.ready,
            "started": self.started,
            "restartCount": self.restart_count,
            "state": self.state,
            "lastState": self.last_state,
        }

    def _keep_last(self) -> None:
        if "terminated" in self.state:
            self.last_state = self.state


def restored(name: str, image: str, statuses: list[Object]) -> ContainerState:
    """The state of a container whose node starts anew: what ran before has ended, its restarts still count."""
    before = next((status for status in statuses if status["name"] == name), None)
    if before is None or not before.get("containerID"):
        return ContainerState(name, image)
    state = ContainerState(
        name,
        image,
        before["restartCount"],
        before["containerID"],
        state=before["state"],
        last_state=before["lastState"],
    )
    if state.is_running:
        state.state = {
            "terminated": {
                "exitCode": 137,
                "reason": "ContainerStatusUnknown",
                "message": "The container could not be located when the pod was terminated",
                "startedAt": before["state"]["running"]["startedAt"],
                "finishedAt": before["state"]["running"]["startedAt"],
                "containerID": state.container_id,
            }
        }
    return state
