"""The .ninfer v3 container: a safetensors file whose metadata says what its tensors are.

    tensors        NAME            a physical object, as executors consume it
                   resources/NAME  a file of the frontend, as U8
    __metadata__   format          "ninfer"
                   format_version  "3"
                   name            served name of the model
                   config          config.json as it was
                   objects         {object: {component, checksum}}, in order of use
                   bindings        {parameter: {object, rows: [start, stop]}}
                   uses            [{object, consumer, activations}]
                   resources       {file: checksum}
                   header_checksum over all of the above and the table of tensors

The schema is closed: unknown keys are refused, since ignoring one could change what a file means.
What the objects must be for a given configuration is not known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import orjson

from ninfer.artifact.bindings import ActivationPrecision, Binding, Use
from ninfer.artifact.checksum import TEXT_LENGTH, Checksum
from ninfer.artifact.json_document import Fields, parse_object
from ninfer.artifact.safetensors_file import METADATA_KEY, SafetensorsFile, TensorEntry
from ninfer.contract.errors import ModelFileError
from ninfer.contract.printable import printable

FORMAT: Final = "ninfer"
FORMAT_VERSION: Final = "3"
RESOURCE_PREFIX: Final = "resources/"
PENDING_CHECKSUM: Final = "0" * TEXT_LENGTH
"""Stands for a checksum that is not known yet; as long as a real one."""
_MAX_ROWS: Final = 2**63 - 1


class MetadataKey(StrEnum):
    FORMAT = "format"
    VERSION = "format_version"
    NAME = "name"
    CONFIG = "config"
    OBJECTS = "objects"
    BINDINGS = "bindings"
    USES = "uses"
    RESOURCES = "resources"
    HEADER_CHECKSUM = "header_checksum"


@dataclass(frozen=True, slots=True)
class ObjectRecord:
    """`component` is what has to be selected for the object to be loaded."""

    component: str
    checksum: str


@dataclass(frozen=True, slots=True)
class Contents:
    """Everything the metadata says. `resources` maps file names to checksums."""

    name: str
    config_text: str
    objects: Mapping[str, ObjectRecord]
    bindings: tuple[Binding, ...]
    uses: tuple[Use, ...]
    resources: Mapping[str, str]


def is_container(file: SafetensorsFile) -> bool:
    return file.metadata.get(MetadataKey.FORMAT) == FORMAT


def encode_metadata(contents: Contents, entries: Iterable[TensorEntry]) -> dict[str, str]:
    """The metadata of a file with these tensors."""
    objects = {
        name: {"component": record.component, "checksum": record.checksum}
        for name, record in contents.objects.items()
    }
    bindings = {
        item.parameter: {"object": item.object_name, "rows": [item.start, item.stop]}
        for item in contents.bindings
    }
    uses = [
        {
            "object": item.object_name,
            "consumer": item.consumer,
            "activations": [activation.value for activation in item.activations],
        }
        for item in contents.uses
    ]
    metadata = {
        MetadataKey.FORMAT.value: FORMAT,
        MetadataKey.VERSION.value: FORMAT_VERSION,
        MetadataKey.NAME.value: contents.name,
        MetadataKey.CONFIG.value: contents.config_text,
        MetadataKey.OBJECTS.value: orjson.dumps(objects).decode(),
        MetadataKey.BINDINGS.value: orjson.dumps(bindings).decode(),
        MetadataKey.USES.value: orjson.dumps(uses).decode(),
        MetadataKey.RESOURCES.value: orjson.dumps(dict(contents.resources)).decode(),
    }
    return {**metadata, MetadataKey.HEADER_CHECKSUM.value: header_checksum(metadata, entries)}


def header_checksum(metadata: Mapping[str, str], entries: Iterable[TensorEntry]) -> str:
    """Checksum of the metadata (but for the checksum itself) and the table of tensors."""
    texts = sorted(item for item in metadata.items() if item[0] != MetadataKey.HEADER_CHECKSUM)
    table = sorted(
        (entry.name, entry.dtype, entry.shape, entry.start, entry.stop) for entry in entries
    )
    return Checksum(orjson.dumps([texts, table])).text


def decode_metadata(file: SafetensorsFile) -> Contents:
    """Check and read the metadata. Raises ModelFileError naming the entry."""
    fields = Fields(file.path, file.metadata, f"{METADATA_KEY}.")
    version = fields.text(MetadataKey.VERSION)
    if version != FORMAT_VERSION:
        raise fields.error(
            MetadataKey.VERSION, f"version {version!r} is not supported ({FORMAT_VERSION} is)"
        )
    known = {key.value for key in MetadataKey}
    for key in file.metadata:
        if key not in known:
            raise fields.error(key, "unknown entry")
    stored = fields.text(MetadataKey.HEADER_CHECKSUM)
    if stored != header_checksum(file.metadata, file.entries.values()):
        raise fields.error(MetadataKey.HEADER_CHECKSUM, "checksum mismatch: the header is damaged")
    name = fields.text(MetadataKey.NAME)
    if not name or printable(name) != name:
        raise fields.error(MetadataKey.NAME, f"{name!r} is not a name that can be shown")
    return Contents(
        name=name,
        config_text=fields.text(MetadataKey.CONFIG),
        objects=_objects(_document(fields, MetadataKey.OBJECTS)),
        bindings=_bindings(_document(fields, MetadataKey.BINDINGS)),
        uses=_uses(fields),
        resources=_resources(_document(fields, MetadataKey.RESOURCES)),
    )


def check_tensors(contents: Contents, file: SafetensorsFile) -> None:
    """Tensors and metadata name the same things. Raises ModelFileError naming the tensor."""
    named = {*contents.objects, *(RESOURCE_PREFIX + name for name in contents.resources)}
    for name in named:
        if name not in file.entries:
            raise ModelFileError(file.path, name, "missing tensor: the metadata names it")
    for name in file.entries:
        if name not in named:
            raise ModelFileError(file.path, name, "unexpected tensor: the metadata lacks it")


def read_resource(contents: Contents, file: SafetensorsFile, name: str) -> bytes:
    """The bytes of one frontend file. Raises ModelFileError for a wrong type or checksum."""
    entry = file.entries[RESOURCE_PREFIX + name]
    if entry.dtype != "U8" or len(entry.shape) != 1:
        raise ModelFileError(file.path, entry.name, "a resource is a U8 tensor of one axis")
    data = bytes(file.view(entry))
    if Checksum(data).text != contents.resources[name]:
        raise ModelFileError(file.path, entry.name, "checksum mismatch: the file is damaged")
    return data


def _document(fields: Fields, key: MetadataKey) -> Fields:
    """The JSON object in a metadata text."""
    field = f"{fields.prefix}{key.value}"
    value = parse_object(fields.text(key).encode(), fields.path, field)
    return Fields(fields.path, value, f"{field}.")


def _objects(document: Fields) -> dict[str, ObjectRecord]:
    return {name: _object_record(document.child(name)) for name in document.values}


def _object_record(record: Fields) -> ObjectRecord:
    _check_keys(record, {"component", "checksum"})
    return ObjectRecord(record.text("component"), record.text("checksum"))


def _bindings(document: Fields) -> tuple[Binding, ...]:
    return tuple(_binding(name, document.child(name)) for name in document.values)


def _binding(name: str, record: Fields) -> Binding:
    _check_keys(record, {"object", "rows"})
    rows = record.integers("rows", 0, _MAX_ROWS)
    if len(rows) != 2 or rows[0] > rows[1]:
        raise record.error("rows", f"{list(rows)} is not a range")
    return Binding(name, record.text("object"), rows[0], rows[1])


def _uses(fields: Fields) -> tuple[Use, ...]:
    key = MetadataKey.USES.value
    try:
        values = orjson.loads(fields.text(key))
    except orjson.JSONDecodeError as error:
        raise fields.error(key, f"not valid JSON: {error}") from None
    if not isinstance(values, list):
        raise fields.error(key, "expected a JSON array")
    return tuple(
        _use(fields.path, f"{fields.prefix}{key}[{index}]", value)
        for index, value in enumerate(values)
    )


def _use(path: Path, field: str, value: Any) -> Use:
    if not isinstance(value, dict):
        raise ModelFileError(path, field, "expected a JSON object")
    record = Fields(path, value, f"{field}.")
    _check_keys(record, {"object", "consumer", "activations"})
    names = record.texts("activations")
    legal = {item.value for item in ActivationPrecision}
    if not names or not legal.issuperset(names):
        raise record.error("activations", f"expected some of {', '.join(sorted(legal))}")
    activations = tuple(ActivationPrecision(name) for name in names)
    return Use(record.text("object"), record.text("consumer"), activations)


def _resources(document: Fields) -> dict[str, str]:
    return {name: document.text(name) for name in document.values}


def _check_keys(record: Fields, known: set[str]) -> None:
    for key in record.values:
        if key not in known:
            raise record.error(key, "unknown entry")
