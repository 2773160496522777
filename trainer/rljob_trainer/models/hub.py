"""`hf://org/name[@revision]`: a model of the Hugging Face Hub, in the cache of huggingface_hub.

Its variables apply: `HF_HOME`, `HF_HUB_CACHE`, `HF_HUB_OFFLINE`, `HF_ENDPOINT` and `HF_TOKEN`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rljob_client.errors import BadInput, RunError
from rljob_trainer.models.checkpoint import validate_description
from rljob_trainer.models.consistency import require_trainable_settings

_DESCRIPTION = ["*.json", "*.jinja", "*.model", "*.txt"]
"""Configuration, tokenizer, and the index of the weights."""

CACHE_VARIABLE = "RLJOB_CACHE_DIR"
"""Set in pods that have a volume for the cache of the hub."""

_LEFTOVER_SECONDS = 3600.0
"""A partial file that has not been written to for so long belongs to no running download."""

TOKEN = "HF_TOKEN (in pods by spec.env)"


class HubUnreachable(RunError):
    """A model or data set is not in the cache, and the hub does not answer. Nothing is wrong with the job: a retry may
    help."""


def resolve(location: str, accept: Callable[[Path], None]) -> Path:
    """The directory of the model with its weights. Raises `BadInput` and `HubUnreachable`.

    In pods, a model that is complete in the cache of the job is used without asking the hub: the pods of all attempts
    then have the same revision. Otherwise the weights are downloaded only if the model can be trained, and `accept`
    raises nothing for a directory with its configuration and tokenizer.
    """
    files = [*_DESCRIPTION, "*.safetensors"]
    if os.environ.get(CACHE_VARIABLE):
        with suppress(HubUnreachable):
            return _download(location, files, local_files_only=True)
        _remove_leftovers(location)
    accept(resolve_description(location))
    return _download(location, files)


def resolve_description(location: str) -> Path:
    """A directory with configuration and tokenizer of the model.

    Raises `BadInput`, also if the configuration shows that the model cannot be trained, and `HubUnreachable`.
    """
    directory = _download(location, _DESCRIPTION)
    validate_description(directory)
    require_trainable_settings(directory)
    return directory


def push(directory: Path, repository: str) -> str:
    """Upload a model to `repository`, which is created as a private one if it does not exist. Returns its address.

    Raises `BadInput` for a name or a token that the hub refuses, and `HubUnreachable`. The files stay as they are.
    """
    from httpx2 import HTTPError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    kept = f"The model is in {directory}: nothing is lost, run the same command again"
    token = "set HF_TOKEN to a token with write access, or run hf auth login"
    try:
        api = HfApi()
        api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=directory)
        return f"{api.endpoint}/{repository}"
    except HFValidationError as error:
        raise BadInput(f"expected a repository of the hub as ORG/NAME, found {repository}: {error}. {kept}") from error
    except LocalTokenNotFoundError as error:
        raise BadInput(f"expected a token of the hub, found none: {token}. {kept}") from error
    except (HTTPError, OSError, RuntimeError) as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
            raise BadInput(
                f"the hub refuses the token for {repository} ({error.response.status_code}): {token}. {kept}"
            ) from error
        raise HubUnreachable(f"the upload to {repository} failed ({_first_line(error)}). {kept}") from error


def _remove_leftovers(location: str) -> None:
    """Remove the partial files of pods that were killed during a download: nothing else removes them."""
    from huggingface_hub.constants import HF_HUB_CACHE

    repository = location.partition("@")[0]
    blobs = Path(HF_HUB_CACHE, f"models--{repository.replace('/', '--')}", "blobs")
    for file in blobs.glob("*.incomplete"):
        with suppress(OSError):  # another pod may have removed it
            if time.time() - file.stat().st_mtime > _LEFTOVER_SECONDS:
                file.unlink()


def _download(location: str, files: list[str], *, local_files_only: bool = False) -> Path:
    """Pods that download the same model at once wait for each other, file by file, and share the files."""
    from httpx2 import HTTPError  # of the hub's answers and of connections
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repository, _, revision = location.partition("@")
    try:
        return Path(
            snapshot_download(
                repository, revision=revision or None, allow_patterns=files, local_files_only=local_files_only
            )
        )
    except GatedRepoError as error:
        raise BadInput(
            f"hf://{location} is gated: accept its terms on its page and set {TOKEN} ({_first_line(error)})"
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise BadInput(
            f"the hub has no model hf://{location}, or it is private: check the name and the revision, or set {TOKEN}"
        ) from error
    except HFValidationError as error:
        raise BadInput(f"expected a model of the hub as hf://org/name, found hf://{location} ({error})") from error
    except LocalEntryNotFoundError as error:
        raise HubUnreachable(
            f"hf://{location} is not in the local cache, and the hub is not reachable: check the network and "
            f"HF_HUB_OFFLINE, or download the model in advance ({_first_line(error)})"
        ) from error
    except (HTTPError, OSError, RuntimeError) as error:  # RuntimeError: any failure of hf_xet
        if may_pass(error):
            raise HubUnreachable(
                f"the download of hf://{location} failed ({_first_line(error)}); a retry continues it. If it fails "
                "again, check the network, or download the model in advance"
            ) from error
        advice = (
            "" if getattr(error, "errno", None) is None else "; set HF_HOME to a directory that this user can write to"
        )
        raise BadInput(f"cannot fetch hf://{location}: {_first_line(error)}{advice}") from error


def may_pass(error: Exception) -> bool:
    """True for an overloaded or failing hub, and for a lost connection; False for refusals and for local files."""
    response = getattr(error, "response", None)
    if response is not None:
        return response.status_code in (408, 429) or response.status_code >= 500
    return getattr(error, "errno", None) is None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
