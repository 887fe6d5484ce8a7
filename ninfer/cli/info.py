"""`ninfer info`: what a model is and what it needs, from its headers alone."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from ninfer.cli.console import Console
from ninfer.cli.exit_codes import ExitCode
from ninfer.cli.layout import count, table
from ninfer.cli.loading import open_named_model
from ninfer.cli.parser import Invocation
from ninfer.contract.errors import OptionError
from ninfer.contract.units import Capacity, MemoryPlan
from ninfer.convert.description import ModelDescription, describe_model
from ninfer.options import EngineOptions, InfoOptions
from ninfer.program.dflash_loading import DflashDraft, open_dflash_draft
from ninfer.program.loader import plan_model


def run(invocation: Invocation, console: Console) -> ExitCode:
    options = invocation.read(InfoOptions)
    engine_options = invocation.read(EngineOptions)
    source = open_named_model(invocation.model_path)
    description = describe_model(source)
    plan: MemoryPlan | str
    draft: DflashDraft | None = None
    try:
        draft = open_dflash_draft(source, engine_options)
        plan = plan_model(source, engine_options)
    except OptionError as error:
        # A model that does not fit here can still be described.
        plan = str(error)
    if options.json:
        found = _as_json(description, plan, draft)
        console.write(json.dumps(found, ensure_ascii=False) + "\n")
    else:
        rows = _description_rows(description) + _draft_rows(draft) + _plan_rows(plan)
        console.write_lines(table(rows))
    return ExitCode.OK


def _as_json(
    description: ModelDescription, plan: MemoryPlan | str, draft: DflashDraft | None
) -> dict[str, Any]:
    fits = isinstance(plan, MemoryPlan)
    return {
        **asdict(description),
        "path": str(description.path),
        "num_parameters": description.num_parameters,
        "has_mtp": description.has_mtp,
        "has_vision": description.has_vision,
        "draft_model": None if draft is None else _draft_json(draft),
        "memory_plan": _plan_json(plan) if isinstance(plan, MemoryPlan) else None,
        "memory_plan_error": None if fits else plan,
    }


def _draft_json(draft: DflashDraft) -> dict[str, Any]:
    config = draft.opened.config
    return {
        "path": str(draft.opened.path),
        "architecture": config.architecture,
        "num_parameters": draft.num_parameters,
        "num_layers": len(config.layers),
        "block_size": config.block_size,
        "target_layers": list(config.tap_layers),
    }


def _draft_rows(draft: DflashDraft | None) -> list[tuple[str, str]]:
    if draft is None:
        return []
    facts = _draft_json(draft)
    layers = ", ".join(map(str, facts["target_layers"]))
    return [
        ("draft model", f"{facts['path']}: {facts['architecture']}"),
        ("  parameters", _millions(facts["num_parameters"])),
        ("  layers", f"{facts['num_layers']}, reading the model's layers {layers}"),
        ("  block", count(facts["block_size"], "token")),
    ]


def _plan_json(plan: MemoryPlan) -> dict[str, Any]:
    return {**asdict(plan), "total_bytes": plan.total_bytes}


def _description_rows(model: ModelDescription) -> list[tuple[str, str]]:
    return [
        ("name", model.name),
        ("path", f"{model.path} ({model.kind}, {count(model.num_files, 'weight file')})"),
        ("architecture", model.architecture),
        ("parameters", _parameters(model)),
        ("formats", _formats(model)),
        *([("quantised", _quantised(model))] if model.encoded_parameters else []),
        ("layers", _layers(model)),
        ("hidden size", f"{model.hidden_size}"),
        ("attention", f"{model.num_heads} heads, {model.num_kv_heads} KV, size {model.head_dim}"),
        *([("DeltaNet", _gdn(model.gdn_heads))] if model.gdn_heads else []),
        *([("experts", _experts(model))] if model.experts else []),
        (
            "vocabulary",
            f"{model.vocab_size}, {'tied' if model.is_tied else 'separate'} output head",
        ),
        ("context", f"{model.max_context} tokens"),
        ("MTP", count(model.num_mtp_layers, "layer") if model.has_mtp else "none"),
        ("vision", "a tower is there" if model.has_vision else "none"),
        ("resources", ", ".join(model.resources) or "none"),
    ]


def _plan_rows(plan: MemoryPlan | str) -> list[tuple[str, str]]:
    if isinstance(plan, str):
        return [("memory plan", f"none: {plan}")]
    capacity = plan.capacity
    return [
        ("memory plan", f"{_mib(plan.total_bytes)} of a budget of {_mib(plan.budget_bytes)}"),
        ("  weights", _mib(plan.weights_bytes)),
        ("  KV pages", f"{_mib(plan.kv_bytes)}, {capacity.num_pages} pages"),
        ("  states", f"{_mib(plan.state_bytes)}, {capacity.num_slots} slots"),
        ("  workspace", _mib(plan.workspace_bytes)),
        ("  host cache", f"{_mib(plan.host_bytes)} beside the budget"),
        ("  lanes", f"{capacity.max_concurrency}, each up to {capacity.max_context} tokens"),
        *([("  drafts", _drafts(capacity))] if capacity.max_draft_tokens else []),
    ]


def _drafts(capacity: Capacity) -> str:
    return f"up to {count(capacity.max_draft_tokens, 'token')} of a sequence at once"


def _parameters(model: ModelDescription) -> str:
    parts = [f"{_millions(count)} {name}" for name, count in model.parameters.items()]
    total = f"{_millions(model.num_parameters)} ({', '.join(parts)})"
    if model.active_parameters == model.parameters.get("text"):
        return total
    return f"{total}, {_millions(model.active_parameters)} active for a token"


def _formats(model: ModelDescription) -> str:
    parts = [f"{dtype} {_mib(size)}" for dtype, size in sorted(model.bytes_by_dtype.items())]
    return f"{', '.join(parts)} in {count(model.num_tensors, 'tensor')}"


def _quantised(model: ModelDescription) -> str:
    parts = [f"{_millions(size)} {name}" for name, size in model.encoded_parameters.items()]
    if not model.unused_scales:
        return ", ".join(parts)
    scales = count(model.unused_scales, "scale")
    return f"{', '.join(parts)}; {scales} of activations and KV cache not used"


def _layers(model: ModelDescription) -> str:
    kinds = {
        "attention": model.num_attention_layers,
        "gated DeltaNet": model.num_gdn_layers,
        "with experts": model.num_moe_layers,
    }
    parts = [f"{count} {kind}" for kind, count in kinds.items() if count]
    return f"{model.num_layers} ({', '.join(parts)})"


def _gdn(heads: tuple[int, int]) -> str:
    return f"{heads[0]} key heads, {heads[1]} value heads"


def _experts(model: ModelDescription) -> str:
    chosen, available = model.experts or (0, 0)
    return f"{chosen} of {available} for a token"


def _millions(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"


def _mib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
