"""Plain torch on any device: the fallback that always runs, and the reading of the contract that others are held to."""

from pagefleet_kernels.reference.backend import ReferenceBackend

__all__ = ["ReferenceBackend", "make_backend"]


def make_backend() -> ReferenceBackend:
    """Always available."""
    return ReferenceBackend()
