"""Text of others on a terminal: objects in a cluster and models' answers must not steer it."""

_STEERING = {
    code: "\N{REPLACEMENT CHARACTER}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"
}


def harmless(text: str) -> str:
    """The text with every control character but newline and tab replaced."""
    return text.translate(_STEERING)
