"""transformers' ``from_pretrained`` for files of this machine, without running any of them.

transformers asks on the terminal whether to run the Python files of a folder whose config has an
``auto_map``, and ``yes | ...`` answers; it is never asked here. Pickled weights are first opened as
this package opens them, so that what they hold besides tensors is refused before it is read.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from megatron_anchor.checkpoint.archives import check_pickle, unpickling_error
from megatron_anchor.checkpoint.model_folder import check_links, own_code, read_json
from megatron_anchor.errors import UserError


def load_config(folder: str | Path) -> Any:
    """Load a config as ``AutoConfig`` does.

    Raises:
        UserError: if transformers does not take it.
    """
    from transformers import AutoConfig

    return _load(AutoConfig, folder, "a config")


def load_tokenizer(folder: str | Path) -> Any:
    """Load a tokenizer as ``AutoTokenizer`` does.

    Raises:
        UserError: if transformers does not take it.
    """
    from transformers import AutoTokenizer

    return _load(AutoTokenizer, folder, "a tokenizer")


def load_causal_model(folder: str | Path, **options: Any) -> Any:
    """Load a causal language model as ``AutoModelForCausalLM`` does, in evaluation mode.

    Args:
        folder: with config and weights.
        options: dtype, attn_implementation.

    Raises:
        UserError: if its weights are damaged or hold code, or transformers does not take it.
    """
    from transformers import AutoModelForCausalLM

    check_weights(folder)
    return _load(
        AutoModelForCausalLM, folder, "a causal model", weights_only=True, **options
    ).eval()


def check_weights(folder: str | Path) -> None:
    """Check that the weights that transformers would read hold no code.

    Raises:
        UserError: naming the file; or for links that lead outside of the folder.
    """
    folder = Path(folder)
    check_links(folder)
    preferred = ("model.safetensors", "model.safetensors.index.json")
    if any((folder / name).is_file() for name in preferred):
        return
    index = read_json(folder / "pytorch_model.bin.index.json").get("weight_map")
    names = set(map(str, index.values())) if isinstance(index, dict) else set()
    names |= {path.name for path in folder.glob("pytorch_model*.bin")}
    for path in sorted(folder / name for name in names):
        if path.is_file():  # transformers says which are missing
            check_pickle(path)


def random_causal_model(folder: str | Path, **options: Any) -> Any:
    """Build the model of a config with random weights, in evaluation mode.

    Raises:
        UserError: if transformers does not take the config.
    """
    from transformers import AutoModelForCausalLM

    config = load_config(folder)
    return AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options).eval()


def _load(kind: Any, folder: str | Path, what: str, **options: Any) -> Any:
    check_links(folder)
    try:
        return kind.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False, **options
        )
    except Exception as error:  # of any kind, from whatever reads the files
        raise UserError(f"{folder} does not load as {what}: {_why(error, folder)}") from error


def _why(error: Exception, folder: str | Path) -> str:
    if isinstance(error, pickle.UnpicklingError):
        return str(unpickling_error(error, place="its weights"))
    if type(error).__module__.startswith("safetensors"):
        return f"its weights are damaged: {error}; fetch them again"
    if "trust_remote_code" in str(error):
        return (
            f"its {own_code(folder) or 'config'} asks for Python code of the folder's own "
            "(auto_map), which is never run here"
        )
    return " ".join(str(error).split()) or type(error).__name__
