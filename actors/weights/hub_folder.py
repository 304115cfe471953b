"""Model folders on this machine, or by their id on the Hugging Face hub."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from raymm.errors import ConfigError

# Description of a model and its processor; code runs only with trust_remote_code.
_SETTINGS = ("*.json", "*.txt", "*.model", "*.jinja", "*.py")
# Weights that transformers reads; repositories may have other formats, too.
_WEIGHTS = ("model*.safetensors",)
_ID = re.compile(r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w.-][\w./-]*))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Seconds to wait for the hub.
_TIMEOUT_S = 10.0


def is_hub_id(path: str) -> bool:
    """Return True for a hub id, ``ORG/NAME`` or ``ORG/NAME@REVISION``, that is not a local path."""
    return bool(_ID.fullmatch(path)) and not Path(path).exists()


def split_id(path: str) -> tuple[str, str | None]:
    """Return the name and the revision of a hub id."""
    name, _, revision = path.partition("@")
    return name, revision or None


def pinned(path: str) -> str:
    """Return ``ORG/NAME@COMMIT`` for a hub id and cache its settings; return local paths unchanged.
    Raise a ``ConfigError`` if the model is neither in the cache nor available from the hub."""
    if not is_hub_id(path) or _COMMIT.fullmatch(split_id(path)[1] or ""):
        return path
    return f"{split_id(path)[0]}@{Path(local_folder(path, weights=False)).name}"


@functools.cache
def local_folder(path: str, weights: bool = True) -> str:
    """Return the folder with a model's files.

    For a hub id, this is its snapshot in this machine's cache; missing files are downloaded.

    Args:
        path: a folder, or an id from :func:`pinned`, so that all nodes get the same files.
        weights: False to omit the safetensors files and only get processor and tokenizer files.

    Raises:
        ConfigError: see :func:`pinned`.
    """
    if not is_hub_id(path):
        return path
    from huggingface_hub import constants, errors, snapshot_download

    name, revision = split_id(path)
    no_folder = f"{str(Path(path).absolute())!r} is not a folder"
    suffix = f" at revision {revision!r}" if revision else ""
    try:
        return snapshot_download(
            name, revision=revision, allow_patterns=[*_SETTINGS, *(_WEIGHTS if weights else ())]
        )
    except errors.GatedRepoError:
        raise ConfigError(
            f"{name!r} is a gated model: accept its terms on its page of the hub "
            f"({constants.ENDPOINT}/{name}), and log in with `hf auth login` or set HF_TOKEN, on "
            "every node"
        ) from None
    except errors.RevisionNotFoundError:
        raise ConfigError(f"the hub has {name!r}, but not its revision {revision!r}") from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"{no_folder}, and the hub ({constants.ENDPOINT}) has no model {name!r} that this "
            "machine's token may read. Accepted: a folder with config.json and safetensors, or the "
            "id of a model; for a private one, log in with `hf auth login` or set HF_TOKEN"
        ) from None
    except (errors.HTTPError, OSError) as error:  # pyright: ignore[reportPrivateImportUsage]
        reason = error.__cause__ or error
        command = f"hf download {name}" + (f" --revision {revision}" if revision else "")
        raise ConfigError(
            f"{no_folder}, and {name!r} as a model of the hub{suffix} is not in the cache "
            f"({constants.HF_HUB_CACHE}) and cannot be downloaded "
            f"({type(reason).__name__}: {str(reason).strip().splitlines()[0]}). For a folder, "
            f"correct the path; for a model of the hub, run `{command}` with a network to fill the "
            "cache (HF_HOME sets its location)"
        ) from None


def dataset_commit(name: str, revision: str | None) -> str:
    """Return the commit of a data set on the hub, so that all nodes read the same rows. Raise a
    ``ConfigError`` if the data set is neither in the cache nor available from the hub.

    Args:
        revision: a branch, tag or commit; by default the main branch.
    """
    from huggingface_hub import HfApi, constants, errors

    if _COMMIT.fullmatch(revision or ""):
        return str(revision)
    try:
        return str(HfApi().dataset_info(name, revision=revision, timeout=_TIMEOUT_S).sha)
    except errors.RevisionNotFoundError:
        raise ConfigError(
            f"the hub has the data set {name!r}, but not its revision {revision!r}"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"{str(Path(name).absolute())!r} is not a file or folder, and the hub "
            f"({constants.ENDPOINT}) has no data set {name!r} that this machine's token may read. "
            "Accepted: a file, folder, glob or URL, or the id of a data set; for a private one, "
            "log in with `hf auth login` or set HF_TOKEN"
        ) from None
    except (errors.HTTPError, OSError) as error:  # pyright: ignore[reportPrivateImportUsage]
        ref = Path(
            constants.HF_HUB_CACHE, f"datasets--{name.replace('/', '--')}", "refs",
            revision or "main",
        )
        if ref.is_file():
            return ref.read_text().strip()
        raise ConfigError(
            f"{str(Path(name).absolute())!r} is not a file or folder, and {name!r} as a data "
            f"set of the hub is not in the cache ({constants.HF_HUB_CACHE}) and cannot be "
            f"downloaded ({type(error).__name__}: {str(error).strip().splitlines()[0]}). For a "
            "file or folder, correct the path; for a data set of the hub, run `hf download "
            f"--repo-type dataset {name}` with a network to fill the cache (HF_HOME sets its "
            "location)"
        ) from None
