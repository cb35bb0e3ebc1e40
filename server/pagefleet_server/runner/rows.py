"""The type of one row of logits."""

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.float32]
"""float32 [V], on the CPU."""
Ids = npt.NDArray[np.int64]
"""int64 [n]: token ids."""
