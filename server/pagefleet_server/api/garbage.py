"""Keeps the collector of cyclic garbage from holding the event loop."""

import gc

MIDDLE_BEFORE_FULL = 1000
"""Collections of the middle generation before a full one (the interpreter's own default is 10). A full one looks at
some 170 objects of each open stream, 20 to 60 ms for 512 of them, and finds next to nothing: requests leave no cycles,
refused ones neither (tests/integration/test_api_cycles.py). It still comes, for what does."""


def spare_the_loop() -> None:
    """Call it when everything is loaded: modules and vocabulary are no garbage, and are not looked at again."""
    gc.freeze()
    gc.collect()  # of nothing: a full one is due after a part of what the last one has seen, which must not be all that
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, MIDDLE_BEFORE_FULL)
