"""The ranks of one pod: the engine process is rank 0 and starts the others, which follow its steps.

Rank 0 alone schedules and samples. Each of its steps goes to all ranks before it computes it; they compute their part
of it and sum with the others. A rank that ends, ends all: rank 0 waits for the processes of the others, and they die
with it.
"""

import datetime
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.core.step import SchedulerOutput
from pagefleet_server.settings import EngineSettings

_logger = logging.getLogger(__name__)

FOLLOWER_MODULE = "pagefleet_server.engine.follower"
HOST = "127.0.0.1"
FOREVER = datetime.timedelta(days=365)
"""A follower waits for the next step as long as nobody asks anything; a rank that died is noticed by its process."""
CONNECT_TIMEOUT = datetime.timedelta(minutes=10)
END_SECONDS = 10.0
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Order:
    """What rank 0 tells the others to compute."""

    step: SchedulerOutput
    fresh: bool
    """In a KV cache of its own: the check whether the model still works."""


@dataclass(slots=True)
class RankGroup:
    """See models.fused.sharding.Group. Connected after the model's shape is known to be right."""

    rank: int
    size: int
    _store: object = None
    """Kept as long as the group."""
    _followers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _ending: threading.Event = field(default_factory=threading.Event)

    def lead(self, settings: EngineSettings, device: torch.device, end: Callable[[str], None]) -> None:
        """Start the followers and connect. end(reason) is called, from another thread, when one of them ends."""
        store = _store(0, self.size, is_master=True)
        document = msgspec.json.encode(settings).decode()
        for rank in range(1, self.size):
            command = [sys.executable, "-P", "-m", FOLLOWER_MODULE, f"--rank={rank}", f"--port={store.port}"]
            command += [f"--parent-pid={os.getpid()}", f"--settings={document}"]
            follower = subprocess.Popen(command, stdin=subprocess.DEVNULL)
            self._followers.append(follower)
            threading.Thread(target=self._watch, args=(rank, follower, end), daemon=True, name=f"rank-{rank}").start()
        self._join(store, device)

    def follow(self, port: int, device: torch.device) -> None:
        """Connect to rank 0."""
        self._join(_store(port, self.size, is_master=False), device)

    def _join(self, store: Any, device: torch.device) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._store = store
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=FOREVER)
        _logger.info("rank %d of %d is connected (%s)", self.rank, self.size, backend)

    def _watch(self, rank: int, follower: subprocess.Popen[bytes], end: Callable[[str], None]) -> None:
        code = follower.wait()
        if not self._ending.is_set():
            end(f"rank {rank} of {self.size} ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}")

    def sum(self, rows: torch.Tensor) -> None:
        """On the CPU gathered and added in the order of ranks, in float32, rounded once: a row's bits depend on nothing
        else. On CUDA NCCL's own sum."""
        if rows.is_cuda:
            dist.all_reduce(rows)
            return
        mine = rows.contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather([part.view(torch.uint8) for part in parts], mine.view(torch.uint8))
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        rows.copy_(total)

    def least(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        value = torch.tensor([number])
        dist.all_reduce(value, op=dist.ReduceOp.MIN)
        return int(value)

    def send(self, step: SchedulerOutput, *, fresh: bool = False) -> None:
        """Rank 0: the step without what only sampling needs."""
        scheduled = tuple(
            replace(request, sample=False, sampling=_GREEDY, history=None, prompt_targets=(), forks=(), num_drafts=0)
            for request in step.scheduled
        )
        dist.broadcast_object_list([Order(replace(step, scheduled=scheduled), fresh)], src=0)

    def receive(self) -> Order | None:
        """A follower's next step; None: the end."""
        box: list[Order | None] = [None]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def close(self) -> None:
        """Rank 0: let the followers end, and leave the group."""
        self._ending.set()
        if self.rank == 0:
            dist.broadcast_object_list([None], src=0)
        dist.destroy_process_group()
        for follower in self._followers:
            try:
                follower.wait(timeout=END_SECONDS)
            except subprocess.TimeoutExpired:
                follower.kill()
                follower.wait()


def _store(port: int, size: int, *, is_master: bool) -> Any:
    """Where the ranks meet; port 0: any free one."""
    return dist.TCPStore(  # type: ignore[attr-defined]
        HOST, port, size, is_master=is_master, wait_for_workers=False, timeout=CONNECT_TIMEOUT
    )
