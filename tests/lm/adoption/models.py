"""Tiny random models of the recurrent classes of transformers, which compute in PyTorch."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

os.environ.setdefault("HF_HUB_OFFLINE", "1")

COMMON = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LAYERS = ["linear_attention", "full_attention", "linear_attention"]
DELTA_NET = {
    "layer_types": LAYERS,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
EXPERTS = {
    "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
KIMI = {
    "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
    "n_group": 1, "topk_group": 1, "num_key_value_heads": 4, "head_dim": None,
    "linear_head_dim": 8, "linear_num_heads": 4, "layer_types": LAYERS,
}  # fmt: skip
MAMBA2 = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2,
    "mamba_expand": 2, "mamba_chunk_size": 8,
}  # fmt: skip
MAMBA = {"num_hidden_layers": 2, "num_key_value_heads": None, "state_size": 8, "time_step_rank": 4}

FAMILIES: dict[str, dict[str, dict[str, Any]]] = {
    "gated delta net": {
        "qwen3_5_text": DELTA_NET,
        "olmo_hybrid": {**DELTA_NET, "linear_num_key_heads": 4},
        "qwen3_next": {**DELTA_NET, **EXPERTS, "decoder_sparse_step": 1},
        "qwen3_5_moe_text": {**DELTA_NET, **EXPERTS},
        "qwen4_exp_text": {
            **DELTA_NET, **EXPERTS, "num_key_value_heads": 4, "hc_lowrank": 8,
            "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8,
            "indexer_budget": 8, "indexer_compress_ratio": 4,
        },
        "lara_mini": {**DELTA_NET, **EXPERTS},
    },
    "kimi delta attention": {
        "kimi_linear": KIMI,
        "bailing_hybrid": {**KIMI, "num_mtp_layers": 0, "head_dim": 8},
        "glm5_next": {
            "text_config": {
                **COMMON, "num_key_value_heads": 4, "head_dim": 0,
                # Its attention alone differs between a prompt and tokens one by one.
                "layer_types": 3 * ["linear_attention"],
                "moe_intermediate_size": 16, "n_routed_experts": 2, "num_experts_per_tok": 1,
                "n_group": 1, "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8,
                "v_head_dim": 8, "qk_nope_head_dim": 8, "index_topk": 8, "index_head_dim": 8,
                "index_n_heads": 2, "index_kpool": 4, "linear_head_dim": 8, "linear_num_heads": 4,
                "hc_mult": 2,
            },
            "vision_config": {
                "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16,
                "out_hidden_size": 32, "projection_intermediate_size": 16, "image_size": 28,
            },
        },
    },
    "mamba2": {
        "mamba2": {
            "num_hidden_layers": 2, "num_key_value_heads": None, "state_size": 8, "expand": 2,
            "num_heads": 8, "n_groups": 2, "chunk_size": 8,
        },
        "falcon_h1": {**MAMBA2, "mamba_d_ssm": 64},
        "bamba": {**MAMBA2, "attn_layer_indices": [1]},
        "granitemoehybrid": {
            **MAMBA2, "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 2,
            "num_experts_per_tok": 1, "shared_intermediate_size": 32,
        },
        "nemotron_h": {
            "num_hidden_layers": 4, "mamba_num_heads": 8, "mamba_head_dim": 8,
            "ssm_state_size": 8, "n_groups": 2, "chunk_size": 8, "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16, "n_routed_experts": 2,
            "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1,
        },
        "zamba2": {
            "mamba_d_state": 8, "n_mamba_heads": 8, "mamba_headdim": 8, "mamba_ngroups": 1,
            "mamba_expand": 2, "chunk_size": 8, "layers_block_type": ["mamba", "hybrid", "mamba"],
            "num_mem_blocks": 1, "adapter_rank": 4,
        },
    },
    "mamba": {
        "mamba": {**MAMBA, "expand": 2, "conv_kernel": 4},
        "jamba": {
            "num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
            "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 2,
            "num_experts_per_tok": 1, "mamba_d_state": 8, "mamba_dt_rank": 4,
        },
        "falcon_mamba": MAMBA,
        "zamba": {
            "mamba_d_state": 8, "mamba_expand": 2, "n_mamba_heads": 2, "mamba_dt_rank": 4,
            "attn_layer_period": 3, "attn_layer_offset": 2, "attention_head_dim": 16,
            "num_hidden_layers": 6, "layers_block_type": 2 * ["mamba", "mamba", "hybrid"],
        },
    },
}  # fmt: skip
"""Settings by family and model type; the first two of a family are tested in every run."""
OWN_CACHES: dict[str, dict[str, Any]] = {
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 64},
    "minimax": {"num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 8},
    "xlstm": {
        "hidden_size": 128, "num_hidden_layers": 2, "num_blocks": 2, "num_heads": 4,
        "head_dim": None, "chunk_size": 8,
    },
}  # fmt: skip
"""Models whose state is not in a layer of the cache."""
OTHERS: dict[str, dict[str, Any]] = {
    "rwkv": {
        "num_hidden_layers": 2, "attention_hidden_size": 32, "num_key_value_heads": None,
        "head_dim": None,
    },
    "lfm2": {"num_hidden_layers": 2, "conv_L_cache": 3, "layer_types": ["conv", "full_attention"]},
    "llama": {"num_hidden_layers": 2},
}  # fmt: skip
"""Models without a layer of a family."""
IGNORE_DOCUMENTS = ("granitemoehybrid",)
"""Models whose attention ignores boundaries of packed documents."""


@contextlib.contextmanager
def without_fla() -> Iterator[None]:
    """Make flash-linear-attention impossible to import."""
    fla = sys.modules.get("fla")
    sys.modules["fla"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["fla"]
        if fla is not None:
            sys.modules["fla"] = fla


def family_of(name: str) -> str:
    """Return the family of a model type."""
    return next(family for family, specs in FAMILIES.items() if name in specs)


def make_model(name: str, seed: int = 0, **options: Any) -> Any:
    """Return a model whose decays, norms and biases differ between channels.

    Its module is imported without flash-linear-attention, whose kernels transformers would choose
    also on a machine without a GPU.
    """
    settings = {
        **OTHERS,
        **OWN_CACHES,
        **{n: spec for specs in FAMILIES.values() for n, spec in specs.items()},
    }
    common = {} if "text_config" in settings[name] else COMMON
    options = {**common, **settings[name], **options}
    # The mapping of classes can contain those of flash-linear-attention under the same names.
    config_class = getattr(transformers, CONFIG_MAPPING_NAMES[name])
    config = config_class(**{k: x for k, x in options.items() if x is not None})
    module_name = type(config).__module__.replace("configuration_", "modeling_")
    with without_fla():
        module = importlib.import_module(module_name)
    torch.manual_seed(seed)
    classes = {**MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    model: Any = getattr(module, classes[name])(config).eval()
    for parameter_name, x in model.named_parameters():
        if parameter_name.endswith(("A_log", "dt_bias")):
            nn.init.normal_(x)
        elif parameter_name.endswith(("norm.weight", ".D")):
            nn.init.normal_(x, 1.0, 0.2)
        elif "bias" in parameter_name:
            nn.init.normal_(x, 0.0, 0.2)
    return model
