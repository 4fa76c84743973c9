"""Load a model's tokenizer, ready to train with."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ..errors import CheckpointError, ConfigError
from ..weights.model_config import describe_error, explain_code
from ..weights.model_folder import check_links, read_json_object

_CONFIG_NAMES = ("tokenizer_config.json", "config.json")  # either may name code


def load_tokenizer(
    model_name_or_path: str,
    revision: str | None = None,
    trust_remote_code: bool = False,
    chat_template_path: str | None = None,
    eos_token: str | None = None,
) -> PreTrainedTokenizerBase:
    """Load a tokenizer, and set its padding token as TRL's SFTTrainer does: its own, or the end-of-sequence token.

    Args:
        model_name_or_path: A folder or a hub id.
        revision: The commit, branch or tag on the hub.
        trust_remote_code: Run tokenizer code that comes with the model.
        chat_template_path: A .jinja file, or a folder or hub id whose chat template to use. Tokens are never added: the
            frozen base has no embeddings for them.
        eos_token: The token that ends a turn or a sequence, if it is not the tokenizer's own.

    Raises:
        CheckpointError: No tokenizer can be loaded.
        ConfigError: The chat template or a token cannot be used.
    """
    tokenizer = _load(model_name_or_path, revision, trust_remote_code)
    if eos_token is not None:
        if eos_token not in tokenizer.get_vocab():
            expected = f"a token of the vocabulary of {model_name_or_path}"
            raise ConfigError(option="eos_token", expected=expected, found=repr(eos_token))
        tokenizer.eos_token = eos_token
    if chat_template_path is not None:
        tokenizer.chat_template = _load_chat_template(chat_template_path, tokenizer, trust_remote_code)
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ConfigError(
                f"the tokenizer of {model_name_or_path} has no padding token, and no end-of-sequence token to pad with",
                option="eos_token",
                fix="set it to a token of the vocabulary",
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _load(name: str, revision: str | None, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    if "://" in name:  # it may hold a password, so it is not repeated
        raise CheckpointError(expected="a tokenizer's folder or hub id", found="a URL with '://'")
    is_folder = Path(name).is_dir()
    if is_folder:
        check_links(Path(name))
    try:
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    except Exception as error:  # the libraries raise anything, even bare Exceptions from Rust
        cached = None if is_folder else try_to_load_from_cache(name, _CONFIG_NAMES[0], revision=revision)
        folder = Path(name) if is_folder else Path(cached).parent if isinstance(cached, str) else None
        kind = "folder" if is_folder else "hub id"
        reason = (folder and _explain(error, folder)) or describe_error(error)
        raise CheckpointError(f"no tokenizer could be loaded: {reason}", where=f"{kind} {name!r}") from error


def _explain(error: Exception, folder: Path) -> str | None:
    """Return which file is damaged, or which code is not run, if that is the reason."""
    for file in sorted(folder.glob("*.json")):
        is_config = file.name in _CONFIG_NAMES
        try:
            values = read_json_object(file) if is_config or file.name == "tokenizer.json" else {}
        except CheckpointError as damage:
            return str(damage)
        code = explain_code(error, folder, values) if is_config else None
        if code is not None:
            return code
    return None


def _load_chat_template(path: str, tokenizer: PreTrainedTokenizerBase, trust_remote_code: bool) -> str:
    if path.endswith((".jinja", ".j2")):
        try:
            return Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path!r} cannot be read: {error.strerror}", option="chat_template_path") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path!r} is not UTF-8 text ({error.reason})", option="chat_template_path") from error
    source = _load(path, None, trust_remote_code)
    if source.chat_template is None:
        raise ConfigError(f"the tokenizer of {path!r} has no chat template", option="chat_template_path")
    chat_template = source.get_chat_template()
    vocabulary = tokenizer.get_vocab()
    unknown = [token for token in source.get_added_vocab() if token in chat_template and token not in vocabulary]
    if unknown:
        raise ConfigError(
            f"the chat template of {path!r} writes tokens that this model does not have ({', '.join(unknown)}), and a "
            "frozen base cannot learn new ones",
            option="chat_template_path",
            fix="write a .jinja template with the model's own tokens",
        )
    return chat_template
