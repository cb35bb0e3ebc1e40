"""Paged attention and its neighbours: one public signature per op (ops), backends behind it.

Backends do not know each other; nothing here knows the server."""
