"""The scaling policies that are compared: ours and the known ones, each after its published algorithm."""
