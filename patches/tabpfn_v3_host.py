"""TabPFN v3 as a host: everything about it that the rest of the package has to know."""

from __future__ import annotations

from typing import Any

from tabpfn.architectures import tabpfn_v3
from torch import nn

from .host_spec import Classes, Door, HostSpec
from .presence import squared_norm
from .tabpfn_v3 import (
    CarrierNorm,
    GatedNorm,
    OColumnAttention,
    OColumnTransformerBlock,
    OCrossAttention,
    OCrossAttentionBlock,
    OICLAttention,
    OICLTransformerBlock,
    OSoftmaxScalingMLP,
    OTabPFNV3,
)
from .tabpfn_v3_audit import AUDIT
from .tabpfn_v3_closed import ClosedTabPFNV3, OCellEmbedding, OColumnAggregator, OTargetEncoder, row_squared_norm

_O_CLASSES: Classes = {
    tabpfn_v3.Attention: OColumnAttention,
    tabpfn_v3.CrossAttention: OCrossAttention,
    tabpfn_v3.ICLAttention: OICLAttention,
    tabpfn_v3.CrossAttentionBlock: OCrossAttentionBlock,
    tabpfn_v3.TransformerBlock: OColumnTransformerBlock,
    tabpfn_v3.ICLTransformerBlock: OICLTransformerBlock,
    tabpfn_v3.TabPFNV3: OTabPFNV3,
}
_CLOSED_CLASSES: Classes = {
    **_O_CLASSES,
    tabpfn_v3.SoftmaxScalingMLP: OSoftmaxScalingMLP,
    tabpfn_v3.TabPFNV3: ClosedTabPFNV3,
}


def _wire(model: Any) -> None:
    # Not a submodule of the cell embedding: its weights would be listed twice.
    model.x_embed.__dict__["target"] = model.col_y_encoder


def _is_regressor(config: Any) -> bool:
    classes = config.get("max_num_classes", -1) if isinstance(config, dict) else config.max_num_classes
    return classes is None or classes < 2


def _weights(*modules: nn.Module) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def _source_weights(attention: Any) -> int:
    return _weights(attention.k_projection, attention.v_projection)


def _cell_weights(model: tabpfn_v3.TabPFNV3) -> int:
    # In the last block of the aggregator, cells are sources only.
    *blocks, readout = model.column_aggregator.blocks
    weights = _weights(*blocks) + _source_weights(readout.attention)
    for block in model.feature_distribution_embedder.layers:
        to_points, from_points = block.cross_attn_block1, block.cross_attn_block2
        weights += _source_weights(to_points.attn) + _weights(from_points) - _source_weights(from_points.attn)
    return weights


def _point_weights(model: tabpfn_v3.TabPFNV3) -> int:
    blocks = model.feature_distribution_embedder.layers
    receivers, sources = (block.cross_attn_block1 for block in blocks), (block.cross_attn_block2 for block in blocks)
    return sum(_weights(block) - _source_weights(block.attn) for block in receivers) + sum(
        _source_weights(block.attn) for block in sources
    )


def _row_weights(model: tabpfn_v3.TabPFNV3) -> int:
    cls_tokens = _weights(model.column_aggregator.blocks) * model.config.feat_agg_num_cls_tokens
    return _weights(model.icl_blocks, model.output_projection) + cls_tokens


TABPFN_V3 = HostSpec(
    architecture="tabpfn_v3",
    version="v3",
    label="TabPFN v3",
    model_class=tabpfn_v3.TabPFNV3,
    norm_class=tabpfn_v3._DtypeMatchingRMSNorm,
    carrier_norm=CarrierNorm,
    gated_norm=GatedNorm,
    carriers={
        tabpfn_v3.CrossAttentionBlock: {"layernorm_q": "receiver", "layernorm_kv": "source", "layernorm2": "ffn"},
        tabpfn_v3.TransformerBlock: {"layernorm": "receiver and source", "layernorm_mlp": "ffn"},
        tabpfn_v3.ICLTransformerBlock: {"layernorm": "receiver and source", "layernorm_mlp": "ffn"},
        tabpfn_v3.ColumnAggregator: {"out_ln": "readout"},
        tabpfn_v3.TabPFNV3: {"output_norm": "readout"},
    },
    doors={
        "x_embed": Door(nn.Linear, OCellEmbedding, "x_embed", "input", lambda g_BRCF: squared_norm(g_BRCF) + 1),
        "col_y_encoder": Door(nn.Linear, OTargetEncoder, "x_embed", "output", squared_norm),
        "column_aggregator": Door(
            tabpfn_v3.ColumnAggregator, OColumnAggregator, "column_aggregator", "input", row_squared_norm
        ),
        "icl_y_encoder": Door(
            nn.Linear,
            OTargetEncoder,
            "column_aggregator",
            "output",
            lambda x_BRIE: squared_norm(x_BRIE.flatten(-2)),
        ),
    },
    classes={"oa": _O_CLASSES, "full-o": _O_CLASSES, "closed": _CLOSED_CLASSES},
    left_alone=(
        tabpfn_v3.MLP,
        tabpfn_v3.SoftmaxScalingMLP,
        tabpfn_v3.RotaryEmbedding,
        tabpfn_v3.InducedSelfAttentionBlock,
        tabpfn_v3.FeatureDistributionEmbedder,
        tabpfn_v3.ColumnAggregator,
        nn.Linear,
        nn.Sequential,
        nn.ModuleList,
        nn.GELU,
    ),
    wire=_wire,
    # Compiled callables hold the patched forwards.
    patched_attributes=("tau", "target", "_torch_compile_cache"),
    parse_config=tabpfn_v3.parse_config,
    build=tabpfn_v3.get_architecture,
    is_regressor=_is_regressor,
    borders=lambda model: model.regression_borders,
    cell_weights=_cell_weights,
    row_weights=_row_weights,
    points=lambda model: model.config.dist_embed_num_inducing_points,
    point_weights=_point_weights,
    short_names={
        "feature_distribution_embedder.layers": "emb",
        "column_aggregator": "agg",
        "icl_blocks": "icl",
        "cross_attn_block": "ca",
        "layernorm": "ln",
    },
    audit=AUDIT,
    sources={
        f"tabpfn.architectures.{name}": fingerprint
        for name, fingerprint in {
            # Overridden.
            "tabpfn_v3:_DtypeMatchingRMSNorm.forward": "12ce1f730c51",
            "tabpfn_v3:SoftmaxScalingMLP.forward": "0349202618e6",
            "tabpfn_v3:Attention.forward": "e45edc0ceb0c",
            "tabpfn_v3:CrossAttention.forward": "8be40c214ea1",
            "tabpfn_v3:ICLAttention.forward": "f50efd0793ee",
            "tabpfn_v3:CrossAttentionBlock.forward": "688bede20b9f",
            "tabpfn_v3:TransformerBlock.forward": "939a33d71662",
            "tabpfn_v3:TransformerBlock.forward_cross": "c17bf0505194",
            "tabpfn_v3:ICLTransformerBlock.forward": "b1be155d081f",
            "tabpfn_v3:ColumnAggregator.forward": "e12618611a52",
            "tabpfn_v3:TabPFNV3.forward": "eeeaf654801c",
            "tabpfn_v3:TabPFNV3._preprocess_and_group": "428f6a41b0fe",
            "tabpfn_v3:TabPFNV3._stages_0_to_2": "f26ac4bdead7",
            "tabpfn_v3:TabPFNV3._embed_icl_y": "340a722c4a82",
            "tabpfn_v3:RotaryEmbedding.rotate_queries_or_keys": "08859cebfbec",
            "tabpfn_v3:TabPFNV3Cache.to": "b979a08b5bfb",
            "tabpfn_v3:TabPFNV3Cache.quantize": "de8a6bad998a",
            "tabpfn_v3:TabPFNV3Cache.concatenate": "4f193d70fd7c",
            "kv_cache:KVCacheEntry.to": "d49ef081bd0e",
            "kv_cache:KVCacheEntry.quantize": "3714f6b45d7d",
            "kv_cache:QuantizedKVCacheEntry.to": "2c069aa6da1b",
            "kv_cache:QuantizedKVCacheEntry.dequantize": "60e094bebdbb",
            # Relied on: they call what is overridden, or that repeats what they do.
            "tabpfn_v3:TabPFNV3._process_col_chunk": "b9ea678fb5f7",
            "tabpfn_v3:TabPFNV3._process_row_chunk": "ff6cfbade218",
            "tabpfn_v3:TabPFNV3._compute_all_inducing_hidden": "674df8ce67b9",
            "tabpfn_v3:TabPFNV3._compiled": "c9b888ef9416",
            "tabpfn_v3:TabPFNV3._prepare_y": "46a0575e6f11",
            "tabpfn_v3:TabPFNV3._embed_col_y": "76f1b0a08466",
            "tabpfn_v3:TabPFNV3._preprocess_raw": "53942dbb3061",
            "tabpfn_v3:TabPFNV3._group_features": "8611a192673b",
            "tabpfn_v3:InducedSelfAttentionBlock.forward": "2cc73cea6b7e",
            "tabpfn_v3:InducedSelfAttentionBlock._induced_attention": "9b386941aeb2",
            "tabpfn_v3:FeatureDistributionEmbedder.forward": "deafc20402d2",
            "tabpfn_v3:_batched_scaled_dot_product_attention": "af5a997cfa05",
            "tabpfn_v3:_generate_nan_and_inf_indicator": "cf3ef013a754",
            "tabpfn_v3:_impute_nan_and_inf_with_mean": "1936013399f7",
            "tabpfn_v3:TorchStandardScaler.fit": "50edd51ef5ff",
            "tabpfn_v3:TorchStandardScaler.transform": "50a5154c76c6",
            "kv_cache:KVCacheEntry.at_storage_dtype": "911f3b75edb4",
            "kv_cache:KVCache._kv_to": "184e495a6fc1",
            "kv_cache:KVCache._consume_and_concatenate_layers": "72fd6c9e2661",
            "shared.chunked_evaluate:chunked_evaluate_maybe_inplace": "308344091c03",
        }.items()
    },
)
