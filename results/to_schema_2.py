"""Rename the members, fields and values of stored recipes from schema 1 to schema 2.

``python results/to_schema_2.py FILE.json ...`` rewrites JSON files in place: recipes, mixers, layer
options, ``config.json`` of models, and results that hold them. A ``manifest.json`` in the folder of
a file gets its new checksum. CHANGELOG.md has the table of names.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

MEMBERS = {"Similar": "KernelWeighted", "Blocks": "TopBlocks", "Normalized": "NLMS"}
KINDS = {
    "chain": "sequential",
    "gated": "memory_as_gate",
    "as_context": "memory_as_context",
    "boosted": "residual_memory",
    "routed": "mixture_of_memories",
}
SOURCES = {
    "token": "input",
    "static": "learned",
    "log_token": "log_input",
    "factored": "input_scaled",
}
WORDS = ("at", "every")
"""Fields in which ``"token"`` names no source of a number."""
DESCENT = {
    "batch": "batch_size",
    "steps": "updates_per_token",
    "reduce": "reduction",
    "normalize": "normalized_steps",
    "limit": "batch_overlap",
}
MUON = {**DESCENT, "newton_steps": "ns_steps", "scale": "lr_position", "every": "update_every"}
LINK = {"every": "link_every"}
MAP = {"base": "static_weights", "biases": "bias"}
FIELDS: dict[str, dict[str, str]] = {
    **dict.fromkeys(("GradientDescent", "Adam", "RMSProp"), DESCENT),
    "Momentum": {**DESCENT, "of": "momentum_on"},
    "Muon": MUON,
    "LeastSquares": {"form": "ridge_schedule", "every": "refresh_every", "per": "ridge_per"},
    "ConjugateGradient": {"per": "ridge_per"},
    "Decay": {"rate": "alpha"},
    **dict.fromkeys(("Lq", "ElasticNet", "Normalize", "FDivergence", "Simplex", "Ball"), LINK),
    "Bregman": {**LINK, "map": "link_function"},
    "KernelWeighted": {"within": "restrictions"},
    "TopBlocks": {"top": "top_k", "share": "weighting", "current": "include_current"},
    "SinkWindow": {"first": "num_sinks"},
    "MLP": MAP,
    "GatedMLP": MAP,
}
OPTIONS = {
    "conv": "conv_size",
    "rope": "rope_theta",
    "shift": "token_shift",
    "phase": "complex_decay",
    "skip": "value_skip",
    "last_map": "last_map_init_scale",
    "memory_scale": "memory_init_scale",
    "anchors": "num_anchors",
    "gates": "gate_options",
}
ENGINE = {"method": "engine"}
GATES = {"squash": "activation", "spread": "head_spread", "schedule": "init_schedule"}
VALUES: dict[str, dict[Any, str]] = {
    "batch_overlap": {"keys": "measured", "batch": "worst_case"},
    "lr_position": {"outer": "outside", "inner": "inside"},
    "form": {"printed": "as_published"},
    "token_shift": {"static": "learned"},
    "unit": {
        "share": "stability_limit",
        "rms": "value_rms",
        "mean": "batch_mean",
        "own": "raw",
    },
    "source": {"fixed": "constant"},
}


def converted(data: Any) -> Any:
    """Return JSON data with the names of schema 2."""
    if isinstance(data, list):
        return [converted(item) for item in data]
    if not isinstance(data, dict):
        return data
    if "member" in data:
        name = MEMBERS.get(data["member"], data["member"])
        fields = {
            key: SOURCES.get(value, value) if isinstance(value, str) and key not in WORDS else value
            for key, value in data.items()
        }
        return renamed({**fields, "member": name}, FIELDS.get(name, {}))
    if "mixer" in data:
        data = {**data, "mixer": KINDS.get(data["mixer"], data["mixer"])}
    if "memory" in data and "algorithm" in data:
        return {**{key: converted(value) for key, value in data.items()}, "schema": 2}
    if "qk_norm" in data and "gates" in data:
        gates = {name: renamed(gate, GATES) for name, gate in data["gates"].items()}
        return renamed({**data, "gates": gates}, OPTIONS)
    if "model_type" in data and "schema" in data:  # a configuration; "swaps" are replaced layers
        data = renamed({**data, "schema": 2}, ENGINE)
        if "swaps" in data:
            data["swaps"] = [renamed(swap, ENGINE) for swap in data["swaps"]]
        return data
    if "terms" in data and "run" in data:  # a row of results/language_models
        data = {**data, "schema": 2, "terms": renamed(data["terms"], ENGINE)}
    return {key: converted(value) for key, value in data.items()}


def renamed(data: dict[str, Any], fields: dict[str, str]) -> dict[str, Any]:
    """Return ``data`` with other names of fields, and of the words that they hold."""
    items = [(fields.get(key, key), converted(value)) for key, value in data.items()]
    return {
        key: VALUES.get(key, {}).get(value, value) if isinstance(value, str) else value
        for key, value in items
    }


def main() -> None:
    """Rewrite the files that the command line names."""
    for name in sys.argv[1:]:
        path = Path(name)
        text = path.read_text(encoding="utf-8")
        indent = 1 if text.startswith("{\n ") and not text.startswith("{\n  ") else 2
        data = converted(json.loads(text))
        path.write_text(json.dumps(data, indent=indent, ensure_ascii=False) + "\n", "utf-8")
        update_manifest(path)


def update_manifest(path: Path) -> None:
    """Write the size and checksum of a file into the manifest of its folder, if it is there."""
    manifest = path.parent / "manifest.json"
    data = json.loads(manifest.read_text("utf-8")) if manifest.exists() else {"files": {}}
    if path.name in data["files"]:
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        data["files"][path.name] = {"bytes": len(content), "sha256": digest}
        manifest.write_text(json.dumps(data, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
