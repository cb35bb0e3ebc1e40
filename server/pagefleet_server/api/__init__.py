"""HTTP: OpenAI bodies, SSE, health, metrics, drain. No torch here."""
