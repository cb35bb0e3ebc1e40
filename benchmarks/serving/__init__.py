"""Servers side by side: the same model, the same cores, the same requests (docs/performance.md)."""
