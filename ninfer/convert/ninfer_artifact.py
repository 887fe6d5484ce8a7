"""Opening .ninfer files: the container's contents against what its configuration asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from ninfer.artifact.container import (
    Contents,
    MetadataKey,
    check_tensors,
    decode_metadata,
    read_resource,
)
from ninfer.artifact.json_document import parse_object
from ninfer.artifact.numeric_formats import FLOAT_FORMATS
from ninfer.artifact.safetensors_file import METADATA_KEY, SafetensorsFile
from ninfer.contract.errors import ModelFileError
from ninfer.contract.model import LogicalParameter, ModelObject
from ninfer.convert.artifact_planes import encoded_layout, object_of
from ninfer.convert.opened_model import ObjectLayout, OpenedModel
from ninfer.convert.resources import RESOURCE_FILES, parse_resources
from ninfer.convert.segments import FloatSegment
from ninfer.models.bindings import is_vision_object
from ninfer.models.config import parse_config
from ninfer.models.parameters import model_objects

T = TypeVar("T")


def open_artifact(file: SafetensorsFile) -> OpenedModel:
    """Raises ModelFileError naming the object, parameter or metadata entry."""
    contents = decode_metadata(file)
    check_tensors(contents, file)
    config_text = contents.config_text.encode()
    raw = parse_object(config_text, file.path, f"{METADATA_KEY}.{MetadataKey.CONFIG}")
    config = parse_config(raw, file.path)
    if all(record.component != "mtp" for record in contents.objects.values()):
        config = replace(config, num_mtp_layers=0)
    expected = (*model_objects(config), *_vision_objects(contents, file))
    resource_files = _read_resource_files(contents, file)
    opened = OpenedModel(
        path=file.path,
        name=contents.name,
        kind="ninfer",
        config=config,
        hf_config=raw,
        config_text=config_text,
        resources=parse_resources(resource_files, file.path),
        resource_files=resource_files,
        layouts=_layouts(contents, file, expected),
        tensors=tuple(file.stored(file.entries[name]) for name in contents.objects),
    )
    _check_bindings(contents, opened)
    _check_uses(contents, opened)
    return opened


def _read_resource_files(contents: Contents, file: SafetensorsFile) -> dict[str, bytes]:
    for name in contents.resources:
        if name not in RESOURCE_FILES:
            raise ModelFileError(file.path, name, "unknown resource")
    return {name: read_resource(contents, file, name) for name in contents.resources}


def _vision_objects(contents: Contents, file: SafetensorsFile) -> list[ModelObject]:
    names = [name for name, record in contents.objects.items() if record.component == "vision"]
    for name in names:
        if not is_vision_object(name) or not file.entries[name].shape:
            raise ModelFileError(file.path, name, "not an object of the vision component")
    shapes = {name: file.entries[name].shape for name in names}
    return [
        ModelObject(name, shape, (LogicalParameter(name, shape),), "vision")
        for name, shape in shapes.items()
    ]


def _layouts(
    contents: Contents, file: SafetensorsFile, expected: tuple[ModelObject, ...]
) -> tuple[ObjectLayout, ...]:
    names = {item.name for item in expected}
    for name in contents.objects:
        if object_of(name) not in names:
            raise ModelFileError(
                file.path, name, "unexpected object: not part of the model the config describes"
            )
    encoded = {object_of(name) for name in contents.objects if object_of(name) != name}
    return tuple(
        encoded_layout(contents, file, item)
        if item.name in encoded and item.name not in contents.objects
        else _layout(contents, file, item)
        for item in expected
    )


def _layout(contents: Contents, file: SafetensorsFile, item: ModelObject) -> ObjectLayout:
    if item.name not in contents.objects:
        raise ModelFileError(file.path, item.name, "missing object")
    record, entry = contents.objects[item.name], file.entries[item.name]
    if record.component != item.component:
        raise ModelFileError(
            file.path, item.name, f"component {record.component!r}, not {item.component!r}"
        )
    if entry.shape != item.shape:
        raise ModelFileError(
            file.path,
            item.name,
            f"shape {list(entry.shape)}, the configuration says {list(item.shape)}",
        )
    if entry.dtype not in FLOAT_FORMATS:
        raise ModelFileError(
            file.path,
            item.name,
            f"dtype {entry.dtype} is not supported ({', '.join(FLOAT_FORMATS)} are)",
        )
    return ObjectLayout(item, (FloatSegment(file, entry, record.checksum),))


def _check_bindings(contents: Contents, opened: OpenedModel) -> None:
    found = {binding.parameter: binding for binding in contents.bindings}
    wanted = {binding.parameter: binding for binding in opened.bindings}
    _check_equal(opened, MetadataKey.BINDINGS, found, wanted)


def _check_uses(contents: Contents, opened: OpenedModel) -> None:
    found = {use.consumer: use for use in contents.uses}
    wanted = {use.consumer: use for use in opened.uses}
    _check_equal(opened, MetadataKey.USES, found, wanted)


def _check_equal(
    opened: OpenedModel, key: MetadataKey, found: Mapping[str, T], wanted: Mapping[str, T]
) -> None:
    for name in (*wanted, *found):
        if name not in found or name not in wanted or found[name] != wanted[name]:
            raise ModelFileError(
                opened.path, f"{METADATA_KEY}.{key}.{name}", "not what the configuration asks for"
            )
