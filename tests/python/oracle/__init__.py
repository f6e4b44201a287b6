"""The byte-exactness test: random requests through vLLM's real scheduler and connector; every byte is
checked.
"""
