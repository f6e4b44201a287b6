"""What vLLM asks of a manager, a worker and a spec, checked against its own base classes."""
