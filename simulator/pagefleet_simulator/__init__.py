"""Replays request traces against a simulated fleet: the server's own scheduler, the operator's own decision."""
