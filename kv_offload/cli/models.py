# SPDX-License-Identifier: Apache-2.0
"""Finds a model given on the command line: a path, or a name on the Hugging Face hub."""

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_offload.model_shape import ModelShape

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_SECONDS = 5.0


def find_model(given: str) -> "ModelShape":
    """Returns the shape of a model directory, a config.json, or a name on the hub.

    A name is looked up in the local cache first. Its config.json is downloaded only if it is missing there,
    and huggingface_hub is installed and not set offline. Raises ValueError or OSError, naming the failed
    step.
    """
    from kv_offload.model_identity import hub_snapshot
    from kv_offload.model_shape import read_model

    is_path = Path(given).expanduser().exists() or _HUB_NAME.fullmatch(given) is None
    if is_path or hub_snapshot(given) is not None:
        return read_model(given)
    return replace(read_model(_downloaded_config(given)), name=given)


def _downloaded_config(name: str) -> str:
    missing = f"{name}: no such directory, and not in the local cache of the Hugging Face hub"
    remedy = "give a model directory or a config.json"
    try:
        from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
    except ImportError:
        raise OSError(
            f"{missing}; huggingface_hub is not installed, so it is not downloaded: {remedy}"
        ) from None
    if constants.HF_HUB_OFFLINE:
        raise OSError(f"{missing}; HF_HUB_OFFLINE is set, so it is not downloaded: {remedy}")
    try:
        # One short request first: the download itself retries for 20 s without a network.
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=_HUB_SECONDS)
        return str(hf_hub_download(name, "config.json", etag_timeout=_HUB_SECONDS))
    except Exception as error:  # of an HTTP library that differs between releases
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise OSError(f"{missing}; its config.json cannot be downloaded ({reason}): {remedy}") from error
