"""The paged-attention server: an aiohttp API process and an engine process.

Only engine, runner and models may import torch; core knows no torch, no asyncio and no clock."""
