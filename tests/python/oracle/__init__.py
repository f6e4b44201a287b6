"""The byte oracle: random requests through vLLM's real scheduler and connector; every byte is checked."""
