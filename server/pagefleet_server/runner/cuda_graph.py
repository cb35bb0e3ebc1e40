"""CUDA graphs: the thin part that only a GPU can run."""

from collections.abc import Callable

import torch

WARM_UPS = 2
"""Runs before a capture: kernels are compiled and libraries make their handles then, which a capture forbids."""


class CudaGraphMaker:
    """See decode_graphs.GraphMaker. All graphs share one pool of memory: one runs at a time, and none keeps a result
    in it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """On a stream of its own, as captures must be."""
        current = torch.cuda.current_stream(self._device)
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                work()
        current.wait_stream(stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads of the process may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            work()
        torch.cuda.synchronize(self._device)
        replay: Callable[[], None] = graph.replay
        return replay

    def free_bytes(self) -> int:
        """What the driver has left, after giving back what torch holds for nobody."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]
