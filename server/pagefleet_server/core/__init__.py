"""Requests, block pool and scheduler: pure, synchronous; time and randomness are passed in.

Lowest layer: imports nothing of the server, no torch, no asyncio."""
