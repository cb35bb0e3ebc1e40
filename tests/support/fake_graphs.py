"""A graph maker without a GPU: what is recorded is called again."""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class FakeGraphMaker:
    """Counts captures and replays. fails_at: the capture (from 1) that raises; bytes_each: what each seems to take."""

    fails_at: int = 0
    bytes_each: int = 0
    captured: int = 0
    replays: list[int] = field(default_factory=list)
    """Which capture was replayed, in order."""
    spoil: Callable[[], None] | None = None
    """Called after each replay: what a broken graph would do."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1
        number = self.captured
        if number == self.fails_at:
            raise RuntimeError("operation not permitted when stream is capturing")
        work()

        def replay() -> None:
            self.replays.append(number)
            work()
            if self.spoil is not None:
                self.spoil()

        return replay

    def free_bytes(self) -> int:
        return 10**9 - self.bytes_each * self.captured
