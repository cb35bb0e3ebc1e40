"""What the kernels raise."""


class KernelError(Exception):
    """Root of this package's errors."""


class KernelArgumentError(KernelError, ValueError):
    """An op was called with an argument outside its contract. The message names argument, value and bound."""


class BackendUnavailable(KernelError):
    """A backend cannot run here; `reason` says why (no compiler, no device, missing CPU flags, not installed)."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
