"""`hf://org/name[@revision]`: a model of the Hugging Face Hub, in the cache of huggingface_hub.

Its variables apply: `HF_HOME`, `HF_HUB_CACHE`, `HF_HUB_OFFLINE`, `HF_ENDPOINT` and `HF_TOKEN`.
"""

from __future__ import annotations

from pathlib import Path

from rljob_trainer.errors import BadInput

# Only safetensors weights, and the files of the tokenizer.
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def resolve(location: str, _cache_directory: Path) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repository, _, revision = location.partition("@")
    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=_FILES))
    except GatedRepoError as error:
        raise BadInput(f"hf://{location} is gated: accept its terms on its page and set HF_TOKEN ({error})") from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise BadInput(
            f"the hub has no model hf://{location}, or it is private: check the name and the revision, or set HF_TOKEN"
        ) from error
    except HFValidationError as error:
        raise BadInput(f"expected a model of the hub as hf://org/name, found hf://{location} ({error})") from error
    except LocalEntryNotFoundError as error:
        raise BadInput(
            f"hf://{location} is not in the local cache, and the hub is not reachable: check the network and "
            f"HF_HUB_OFFLINE, or download the model in advance ({_first_line(error)})"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise BadInput(f"cannot fetch hf://{location}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
