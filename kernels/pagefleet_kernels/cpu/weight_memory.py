"""Memory of packed weights, in large pieces: huge pages then cover small weights, too."""

import mmap
import threading
from collections.abc import Callable

import torch

HUGE_PAGE = 2 << 20
PIECE_BYTES = 32 << 20
LINE = 64


class WeightMemory:
    """Gives out memory, one weight after the other. A piece is let go when the last weight in it is."""

    def __init__(self, advise: Callable[[int, int], None]) -> None:
        """advise(address, bytes) asks for huge pages before the memory is touched."""
        self._advise = advise
        self._left = torch.empty(0, dtype=torch.uint8)
        self._guard = threading.Lock()

    def take(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes], zeroed, beginning on a cache line. Raises OSError when the system has no more."""
        wanted = -(-num_bytes // LINE) * LINE
        with self._guard:
            if wanted > len(self._left):
                if wanted >= PIECE_BYTES:  # the begun piece stays for smaller ones
                    return self._piece(wanted)[:num_bytes]
                self._left = self._piece(PIECE_BYTES)
            taken, self._left = self._left[:num_bytes], self._left[wanted:]
            return taken

    def _piece(self, num_bytes: int) -> torch.Tensor:
        """At least so many bytes from the start of a huge page on."""
        memory = mmap.mmap(-1, num_bytes + 2 * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        piece = torch.frombuffer(memory, dtype=torch.uint8)
        self._advise(piece.data_ptr(), piece.nbytes)
        return piece[-piece.data_ptr() % HUGE_PAGE :]
