"""The quantisation that a checkpoint's configuration describes: which module has which scheme.

    quant_method        where                         schemes
    fp8                 config.json                   FP8 blocks of 128 x 128, or one scale a matrix
    compressed-tensors  config.json                   FP8 by matrix, row or block; NVFP4
    modelopt            config.json or                FP8 by matrix, row or block; NVFP4; several of
                        hf_quant_config.json          them by layer

Only weights are read: activations stay 16 bits wide, so schemes and scales of activations and of
the KV cache play no part. What would change the mathematics (transforms, scaled inputs, zero
points, sparsity) is refused.

Source: transformers' FineGrainedFP8Config, compressed-tensors' QuantizationConfig and ModelOpt's
unified export, with the loaders of vLLM (quantization/fp8.py, compressed_tensors, modelopt.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final

from ninfer.artifact.json_document import Fields
from ninfer.contract.weights import BLOCK_SIZE, GROUP_SIZE
from ninfer.models.module_patterns import ModulePatterns, PatternStyle

CONFIG_KEYS: Final = ("quantization_config", "compression_config")


class Producer(Enum):
    """Whose layout of tensors it is."""

    FP8 = "fp8"
    COMPRESSED_TENSORS = "compressed-tensors"
    MODELOPT = "modelopt"


class WeightScheme(Enum):
    """How a matrix is stored. The values are for people."""

    FP8_TENSOR = "FP8, one scale a matrix"
    FP8_CHANNEL = "FP8, one scale a row"
    FP8_BLOCK = "FP8, one scale a 128 x 128 block"
    NVFP4 = "NVFP4"


_STYLES: Final = MappingProxyType(
    {
        Producer.FP8: PatternStyle.ANYWHERE,
        Producer.COMPRESSED_TENSORS: PatternStyle.EXACT,
        Producer.MODELOPT: PatternStyle.WILDCARD,
    }
)
_ALGORITHMS: Final = MappingProxyType(
    {
        "FP8": WeightScheme.FP8_TENSOR,
        "FP8_PER_CHANNEL_PER_TOKEN": WeightScheme.FP8_CHANNEL,
        "FP8_PB_WO": WeightScheme.FP8_BLOCK,
        "NVFP4": WeightScheme.NVFP4,
        "W4A16_NVFP4": WeightScheme.NVFP4,
    }
)
"""ModelOpt's names."""
_MIXED: Final = "MIXED_PRECISION"
_STRATEGIES: Final = MappingProxyType(
    {
        ("tensor", 8): WeightScheme.FP8_TENSOR,
        ("channel", 8): WeightScheme.FP8_CHANNEL,
        ("block", 8): WeightScheme.FP8_BLOCK,
        ("tensor_group", 4): WeightScheme.NVFP4,
    }
)
"""compressed-tensors' names, with the bits of a weight."""
_FORMATS: Final = ("float-quantized", "nvfp4-pack-quantized", "mixed-precision", "naive-quantized")


@dataclass(frozen=True, slots=True)
class SchemeRule:
    """Modules that `targets` means are stored with `scheme`."""

    targets: ModulePatterns
    scheme: WeightScheme


@dataclass(frozen=True, slots=True)
class Quantisation:
    """`field` is the entry of the configuration that errors about a module name."""

    producer: Producer
    rules: tuple[SchemeRule, ...]
    ignored: ModulePatterns
    field: str

    def scheme_of(self, module: str) -> WeightScheme | None:
        """None for modules that stay as they were; the first rule that matches counts."""
        if self.ignored.match(module):
            return None
        return next((rule.scheme for rule in self.rules if rule.targets.match(module)), None)


def parse_quantisation(config: Fields) -> Quantisation | None:
    """What config.json says, or its text_config. Raises ModelFileError."""
    places = [config, config.child("text_config")] if config.has("text_config") else [config]
    for fields in places:
        for key in CONFIG_KEYS:
            if fields.has(key):
                return _parse_method(fields.child(key))
    return None


def parse_modelopt_file(document: Fields) -> Quantisation:
    """What hf_quant_config.json says. Raises ModelFileError."""
    return _parse_modelopt(document.child("quantization"))


def _parse_method(fields: Fields) -> Quantisation:
    method = fields.text("quant_method", default="unknown")
    if method == Producer.FP8.value:
        return _parse_fp8(fields)
    if method == Producer.COMPRESSED_TENSORS.value:
        return _parse_compressed_tensors(fields)
    if method.startswith(Producer.MODELOPT.value):
        nested = fields.has("quantization")
        return _parse_modelopt(fields.child("quantization") if nested else fields)
    names = ", ".join(producer.value for producer in Producer)
    raise fields.error(
        "quant_method", f"{method!r} checkpoints are not supported ({names} and plain ones are)"
    )


def _parse_fp8(fields: Fields) -> Quantisation:
    if fields.text("fmt", default="e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise fields.error("fmt", f"{fields.text('fmt')!r} is not supported (e4m3 is)")
    scheme = WeightScheme.FP8_TENSOR
    if fields.has("weight_block_size"):
        _check_block(fields, "weight_block_size")
        scheme = WeightScheme.FP8_BLOCK
    key = next(
        (key for key in ("modules_to_not_convert", "ignored_layers") if fields.has(key)), None
    )
    return _quantisation(Producer.FP8, fields, [_rule_for_all(Producer.FP8, scheme)], key)


def _parse_compressed_tensors(fields: Fields) -> Quantisation:
    _check_format(fields)
    _refuse_transforms(fields)
    groups = fields.child("config_groups")
    if not groups.values:
        raise fields.error("config_groups", "names no group")
    rules = [
        (_pattern_order(target), _rule(groups, name, target, scheme))
        for name in groups.values
        for scheme in [_group_scheme(groups.child(name))]
        for target in groups.child(name).texts("targets")
    ]
    ordered = [rule for _, rule in sorted(rules, key=lambda pair: pair[0])]
    key = "ignore" if fields.has("ignore") else None
    return _quantisation(Producer.COMPRESSED_TENSORS, fields, ordered, key)


def _parse_modelopt(fields: Fields) -> Quantisation:
    if fields.has("quant_algo") and fields.text("quant_algo").upper() == _MIXED:
        rules = list(_mixed_rules(fields))
    else:
        rules = [_rule_for_all(Producer.MODELOPT, _algorithm(fields))]
    key = next((key for key in ("exclude_modules", "ignore") if fields.has(key)), None)
    return _quantisation(Producer.MODELOPT, fields, rules, key)


def _mixed_rules(fields: Fields) -> Iterator[SchemeRule]:
    """By layer; exact names are all that ModelOpt writes."""
    if fields.has("quantized_layers"):
        layers = fields.child("quantized_layers")
        names: dict[WeightScheme, list[str]] = {}
        for name in layers.values:
            names.setdefault(_algorithm(layers.child(name)), []).append(name)
        for scheme, modules in names.items():
            yield SchemeRule(ModulePatterns.compiled(PatternStyle.WILDCARD, modules), scheme)
        return
    groups = fields.child("config_groups")
    for name in groups.values:
        group = groups.child(name)
        targets = ModulePatterns.compiled(PatternStyle.WILDCARD, group.texts("targets"))
        yield SchemeRule(targets, _group_scheme(group))


def _algorithm(fields: Fields) -> WeightScheme:
    name = fields.text("quant_algo").upper()
    if name not in _ALGORITHMS:
        known = ", ".join((*_ALGORITHMS, _MIXED))
        raise fields.error("quant_algo", f"{name!r} is not supported yet ({known} are)")
    scheme = _ALGORITHMS[name]
    if scheme is WeightScheme.NVFP4 and fields.has("group_size"):
        _check_group(fields)
    return scheme


def _group_scheme(group: Fields) -> WeightScheme:
    """The scheme of a config group's `weights`."""
    if group.has("format"):
        _check_format(group)
    weights = group.child("weights")
    bits = weights.integer("num_bits", 1, 32)
    if weights.text("type", default="int") != "float":
        raise weights.error("type", "only float weights are supported yet")
    if not weights.flag("symmetric", True):
        raise weights.error("symmetric", "weights with zero points are not supported")
    default = "tensor_group" if bits == 4 else "tensor"
    strategy = weights.text("strategy", default=default)
    scheme = _STRATEGIES.get((strategy, bits))
    if scheme is None:
        raise weights.error("strategy", f"{strategy!r} of {bits} bits is not supported yet")
    if scheme is WeightScheme.NVFP4:
        _check_group(weights)
    if scheme is WeightScheme.FP8_BLOCK:
        _check_block(weights, "block_structure")
    return scheme


def _check_format(fields: Fields) -> None:
    name = fields.text("format", default=_FORMATS[0])
    if name not in _FORMATS:
        raise fields.error("format", f"{name!r} is not supported yet ({', '.join(_FORMATS)} are)")


def _check_block(fields: Fields, key: str) -> None:
    sizes = fields.integers(key, 1, 2**31 - 1)
    if sizes != (BLOCK_SIZE, BLOCK_SIZE):
        raise fields.error(key, f"{list(sizes)} is not supported ([{BLOCK_SIZE}, {BLOCK_SIZE}] is)")


def _check_group(fields: Fields) -> None:
    size = fields.integer("group_size", 1, default=GROUP_SIZE)
    if size != GROUP_SIZE:
        raise fields.error("group_size", f"{size} is not supported ({GROUP_SIZE} is)")


def _refuse_transforms(fields: Fields) -> None:
    """Rotated and sparse weights need more than their codes."""
    if fields.has("transform_config"):
        transforms = fields.child("transform_config")
        if transforms.has("config_groups") and transforms.child("config_groups").values:
            raise transforms.error("config_groups", "transformed weights are not supported")
    if fields.has("sparsity_config"):
        sparsity = fields.child("sparsity_config")
        if sparsity.text("format", default="dense") != "dense":
            raise sparsity.error("format", "sparse weights are not supported")


def _pattern_order(target: str) -> int:
    """Names before expressions before classes."""
    if target.startswith("re:"):
        return 1
    return 0 if "." in target else 2


def _rule(groups: Fields, name: str, target: str, scheme: WeightScheme) -> SchemeRule:
    try:
        return SchemeRule(ModulePatterns.compiled(PatternStyle.EXACT, (target,)), scheme)
    except ValueError as error:
        raise groups.child(name).error("targets", str(error)) from None


def _rule_for_all(producer: Producer, scheme: WeightScheme) -> SchemeRule:
    everything = ModulePatterns.compiled(PatternStyle.EXACT, ("re:",))
    return SchemeRule(everything, scheme)


def _quantisation(
    producer: Producer, fields: Fields, rules: list[SchemeRule], key: str | None
) -> Quantisation:
    try:
        patterns = () if key is None else fields.texts(key)
        ignored = ModulePatterns.compiled(_STYLES[producer], patterns)
    except ValueError as error:
        raise fields.error(key or "", str(error)) from None
    return Quantisation(producer, tuple(rules), ignored, f"{fields.prefix}{key or 'quant_method'}")
