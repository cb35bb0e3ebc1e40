"""What can go wrong here, in words for a terminal."""


class PluginError(Exception):
    """A message for the user: what failed, and what to do."""
