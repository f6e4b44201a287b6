"""A model as a command is given it: a path, or a name of the Hugging Face hub."""

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_offload.model_shape import ModelShape

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def find_model(given: str) -> "ModelShape":
    """The shape of a model directory, a config.json, or a name on the hub.

    A name is looked for in the local cache first. Only where it is not there, and huggingface_hub is
    installed and not told to stay offline, its config.json is downloaded. Raises ValueError or OSError,
    saying which of these failed.
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
        from huggingface_hub import constants, hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise OSError(
            f"{missing}; huggingface_hub is not installed, so it is not downloaded: {remedy}"
        ) from None
    if constants.HF_HUB_OFFLINE:
        raise OSError(f"{missing}; HF_HUB_OFFLINE is set, so it is not downloaded: {remedy}")
    try:
        return str(hf_hub_download(name, "config.json"))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise OSError(f"{missing}; its config.json cannot be downloaded ({reason}): {remedy}") from error
