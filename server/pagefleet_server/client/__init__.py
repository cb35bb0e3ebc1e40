"""The API process's side of the boundary: starts, watches and talks to the engine. No torch here."""
