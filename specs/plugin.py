"""The ``vllm.general_plugins`` entry point: makes ``spec_name: KVOffloadSpec`` known in every process."""

SPEC_NAME = "KVOffloadSpec"


def register() -> None:
    """Register the spec with vLLM's factory; idempotent.

    Never raises and never judges the release: a vLLM that we do not support must go on serving its other
    specs. Whether this one is supported is said when the spec is used (compat.py).
    """
    try:
        from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    except ImportError:
        return  # no offloading specs in this vLLM at all
    try:
        OffloadingSpecFactory.register_spec(SPEC_NAME, "kv_offload.specs", SPEC_NAME)
    except (ValueError, AttributeError, TypeError):
        return  # registered already, or a factory of another shape
