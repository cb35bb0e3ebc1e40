"""Triton source: one file per kernel family. Imports triton alone, so that any Triton can compile it without torch.

Conventions: base-2 softmax (the host folds log2(e) into scales); pages are looked up per key position; every loop bound
is an absolute KV position, so what a row computes depends on its own length only, never on its neighbours.
"""
