"""Why a model cannot be served. Torch-free: the API process and the engine process raise the same errors."""


class ModelError(Exception):
    """The model cannot be loaded. The message names the file and what to do; it is all that an operator gets to see."""


class ModelRefused(ModelError):
    """The model loads, but this server would give wrong answers with it; the message says why."""


class ModelUnverified(ModelRefused):
    """Nothing shows that answers would be right: refused, unless the user says --trust-unverified-model."""
