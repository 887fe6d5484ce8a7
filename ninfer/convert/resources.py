"""Frontend files of a model: which there are, what must be in them, and their parsed form.

    tokenizer.json   tokenizer_config.json   generation_config.json
    chat_template.jinja, else chat_template.json, else `chat_template` of tokenizer_config.json
    preprocessor_config.json, video_preprocessor_config.json   carried along for vision

Every file may be missing; one that is there must be well-formed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ninfer.artifact.json_document import Fields, parse_object
from ninfer.contract.errors import ModelFileError
from ninfer.contract.model import FrontendResources

TOKENIZER: Final = "tokenizer.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
GENERATION_CONFIG: Final = "generation_config.json"
TEMPLATE: Final = "chat_template.jinja"
TEMPLATE_JSON: Final = "chat_template.json"
RESOURCE_FILES: Final = (
    TOKENIZER,
    TOKENIZER_CONFIG,
    TEMPLATE,
    TEMPLATE_JSON,
    GENERATION_CONFIG,
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
DEFAULT_TEMPLATE: Final = "default"
_MAX_TOKEN_ID: Final = 2**31 - 1


def parse_resources(files: Mapping[str, bytes], folder: Path) -> FrontendResources:
    """Check and parse raw files; errors name them as lying in `folder`. Raises ModelFileError."""
    documents = {
        name: parse_object(data, folder / name)
        for name, data in files.items()
        if name.endswith(".json")
    }
    if TOKENIZER in documents:
        _check_tokenizer(Fields(folder / TOKENIZER, documents[TOKENIZER]))
    tokenizer_config = documents.get(TOKENIZER_CONFIG, {})
    generation_config = documents.get(GENERATION_CONFIG, {})
    _check_tokenizer_config(Fields(folder / TOKENIZER_CONFIG, tokenizer_config))
    _check_generation_config(Fields(folder / GENERATION_CONFIG, generation_config))
    template_file, chat_template = _chat_template(files, documents, folder)
    return FrontendResources(
        tokenizer_json=files.get(TOKENIZER),
        tokenizer_config=tokenizer_config,
        chat_template=chat_template,
        generation_config=generation_config,
        folder=folder,
        template_file=template_file,
    )


def num_token_ids(tokenizer_json: bytes) -> int:
    """One more than the largest token id of a tokenizer file that loads; 0 without tokens."""
    document = parse_object(tokenizer_json, Path(TOKENIZER))
    vocabulary = Fields(Path(TOKENIZER), document).child("model").child("vocab").values
    added = [token.get("id") for token in document.get("added_tokens") or ()]
    ids = [token_id for token_id in (*vocabulary.values(), *added) if isinstance(token_id, int)]
    return max(ids, default=-1) + 1


def _chat_template(
    files: Mapping[str, bytes],
    documents: Mapping[str, dict[str, Any]],
    folder: Path,
) -> tuple[str, str | None]:
    """The file it is in, and the template if there is one."""
    if TEMPLATE in files:
        try:
            return TEMPLATE, files[TEMPLATE].decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelFileError(folder / TEMPLATE, None, f"not UTF-8: {error.reason}") from None
    for name in (TEMPLATE_JSON, TOKENIZER_CONFIG):
        fields = Fields(folder / name, documents.get(name, {}))
        if fields.has("chat_template"):
            return name, _template_entry(fields)
    return TEMPLATE, None


def _template_entry(fields: Fields) -> str:
    """A template, or the default one of a list of `{"name": ..., "template": ...}`."""
    value = fields.values["chat_template"]
    if not isinstance(value, list):
        return fields.text("chat_template")
    templates = {}
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise fields.error(f"chat_template[{index}]", "expected an object")
        entry = Fields(fields.path, item, f"{fields.prefix}chat_template[{index}].")
        templates[entry.text("name")] = entry.text("template")
    if DEFAULT_TEMPLATE not in templates:
        raise fields.error("chat_template", f"no template is named {DEFAULT_TEMPLATE!r}")
    return templates[DEFAULT_TEMPLATE]


def _check_tokenizer(fields: Fields) -> None:
    """What must be seen before the library reads the file: with a prefix it cuts tokens at any
    byte, and the error about a broken one ends the process."""
    model = fields.child("model")
    if model.text("type", default="BPE") != "BPE":
        raise model.error("type", "only byte-level BPE tokenizers are supported")
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.text(key, default=""):
            raise model.error(key, "is not supported: byte-level BPE has none")


def _check_tokenizer_config(fields: Fields) -> None:
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        if isinstance(fields.values.get(key), dict):
            fields.child(key).text("content")
        elif fields.has(key):
            fields.text(key)
    for key in ("add_bos_token", "add_eos_token", "add_prefix_space"):
        fields.flag(key, False)
    if not isinstance(fields.values.get("chat_template"), list):
        fields.text("chat_template", default="")
    if fields.has("model_max_length"):
        fields.number("model_max_length", 0.0)


def _check_generation_config(fields: Fields) -> None:
    fields.flag("do_sample", False)
    fields.number("temperature", 0.0, 1e6, default=1.0)
    fields.number("top_p", 0.0, 1.0, default=1.0)
    fields.number("min_p", 0.0, 1.0, default=0.0)
    fields.number("repetition_penalty", 0.0, 1e6, default=1.0, above=True)
    fields.number("presence_penalty", -1e6, 1e6, default=0.0)
    fields.number("frequency_penalty", -1e6, 1e6, default=0.0)
    fields.integer("top_k", -1, default=0)
    for key in ("max_new_tokens", "min_new_tokens"):
        fields.integer(key, 0, default=0)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        _check_token_ids(fields, key)


def _check_token_ids(fields: Fields, key: str) -> None:
    if isinstance(fields.values.get(key), list):
        fields.integers(key, 0, _MAX_TOKEN_ID)
    else:
        fields.integer(key, 0, _MAX_TOKEN_ID, default=0)
