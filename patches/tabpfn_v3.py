"""O-variants of TabPFN v3's blocks.

A patch is a subclass with another forward, put on by `module.__class__ = ...`: weights and
state-dict keys stay as they are, and putting the host's class back undoes it. What a patched module
needs beyond its weights is one plain float, `tau`, on each norm whose input is a carrier: the
residual stream before a norm is what presence is read off, and every attention, feed-forward
network and readout of the host has such a norm in front of it.

Shape suffixes, as in TabPFN's own file: B batch, R rows (train and test), N train rows, C columns,
E embedding width, H heads, D head width, S receivers, J sources.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from tabpfn.architectures import kv_cache, tabpfn_v3
from torch import Tensor, nn

from .operators import oattention
from .presence import gate_, log_presence, presence, presence_and_log

# ---- Norms: where tau lives ---------------------------------------------------------------------


class CarrierNorm(tabpfn_v3._DtypeMatchingRMSNorm):
    """The host's norm, unchanged, and the presence of the carrier in front of it.

    tau is a plain float and no buffer: the engines cast models to float16, where it would
    underflow.
    """

    tau: float

    def presence(self, h: Tensor) -> Tensor:
        """Presence of the carrier h: (..., E) -> (...)."""
        return presence(h, self.tau)

    def log_presence(self, h: Tensor) -> Tensor:
        """Log-presence of the carrier h: (..., E) -> (...)."""
        return log_presence(h, self.tau)

    def presence_and_log(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Both, from one pass over h."""
        return presence_and_log(h, self.tau)


class GatedNorm(CarrierNorm):
    """ONorm: the host's norm times the presence of its input."""

    def forward(self, h: Tensor) -> Tensor:
        """`p(h) * norm(h)`: (..., E) -> (..., E)."""
        return gate_(self.presence(h), super().forward(h))


def _feed_forward(norm: nn.Module, mlp: nn.Module, h: Tensor) -> Tensor:
    """h and its FFN branch: the host's, or OFFN on an ONorm where the norm is gated."""
    if not isinstance(norm, GatedNorm):
        return h + mlp(norm(h))
    p = norm.presence(h)
    branch = mlp(gate_(p, CarrierNorm.forward(norm, h)))
    if h.dtype == branch.dtype == p.dtype:
        return torch.addcmul(h, p.unsqueeze(-1), branch)  # gate and residual in one pass
    return h + gate_(p, branch)


# ---- Attention ----------------------------------------------------------------------------------


def _attend(
    q_BSHD: Tensor,
    k_BJHD: Tensor,
    v_BJHD: Tensor,
    presence_BS: Tensor,
    log_presence_BJ: Tensor,
    softmax_scaling_layer: nn.Module | None = None,
) -> Tensor:
    """OAttention in the host's layout and with its query scaling: (B, S, H, D)."""
    if softmax_scaling_layer is not None:
        q_BSHD = softmax_scaling_layer(q_BSHD, k_BJHD.shape[1])
    return oattention(
        q_BSHD.transpose(1, 2),
        k_BJHD.transpose(1, 2),
        v_BJHD.transpose(1, 2),
        presence_BS=presence_BS,
        log_presence_BJ=log_presence_BJ,
    ).transpose(1, 2)


class OAttention(tabpfn_v3.Attention):
    """Attention over the columns of a row, from receivers to sources."""

    def forward(  # type: ignore[override]
        self,
        x_BSE: Tensor,
        context_BJE: Tensor,
        presence_BS: Tensor,
        log_presence_BJ: Tensor,
        rope: tabpfn_v3.RotaryEmbedding | None = None,
    ) -> Tensor:
        """Attend from the normed x to the normed context: (B, S, E)."""
        q = self.q_projection(x_BSE).unflatten(-1, (-1, self.head_dim))
        k = self.k_projection(context_BJE).unflatten(-1, (-1, self.head_dim))
        v = self.v_projection(context_BJE).unflatten(-1, (-1, self.head_dim))
        if rope is not None:
            q = rope.rotate_queries_or_keys(q.transpose(1, 2)).transpose(1, 2)
            k = rope.rotate_queries_or_keys(k.transpose(1, 2)).transpose(1, 2)
        return self.out_projection(_attend(q, k, v, presence_BS, log_presence_BJ).flatten(-2))


class OCrossAttention(tabpfn_v3.CrossAttention):
    """Attention between rows and inducing points."""

    def forward(  # type: ignore[override]
        self, x_BSE: Tensor, context_BJE: Tensor, presence_BS: Tensor, log_presence_BJ: Tensor
    ) -> Tensor:
        """Attend from the normed x to the normed context: (B, S, E)."""
        q = self.q_projection(x_BSE).unflatten(-1, (-1, self.head_dim))
        k = self.k_projection(context_BJE).unflatten(-1, (-1, self.head_dim))
        v = self.v_projection(context_BJE).unflatten(-1, (-1, self.head_dim))
        out = _attend(q, k, v, presence_BS, log_presence_BJ, self.softmax_scaling_layer)
        return self.out_projection(out.flatten(-2))


class OICLAttention(tabpfn_v3.ICLAttention):
    """Attention from all rows to the train rows, projected now or taken from a cache."""

    def forward(  # type: ignore[override]
        self,
        x_BRE: Tensor,
        presence_BR: Tensor,
        log_presence_BN: Tensor,
        *,
        cached_kv: kv_cache.KVCacheEntry | None = None,
        return_kv: bool = False,
    ) -> tuple[Tensor, OKVCacheEntry | None]:
        """Attend from the normed rows x to the first N of them, or to the cached ones.

        Returns (B, R, E) and the cache entry, `None` unless `return_kv`.
        """
        N, scaling = log_presence_BN.shape[1], self.softmax_scaling_layer
        q = self.q_projection(x_BRE).unflatten(-1, (self.num_heads, self.head_dim))
        if cached_kv is not None:
            assert cached_kv.key is not None
            assert cached_kv.value is not None
            k, v = cached_kv.key, cached_kv.value
        else:
            k = self.k_projection(x_BRE[:, :N]).unflatten(-1, (self.num_kv_heads, self.head_dim))
            v = self.v_projection(x_BRE[:, :N]).unflatten(-1, (self.num_kv_heads, self.head_dim))

        # Test rows may use fewer key/value heads than train rows; a cache holds only theirs.
        k_test, v_test = k, v
        if self.num_kv_heads_test is not None:
            k_test, v_test = k[:, :, : self.num_kv_heads_test], v[:, :, : self.num_kv_heads_test]
        split = cached_kv is None and self.num_kv_heads_test is not None and N < x_BRE.shape[1]
        if split:
            out = torch.cat(
                [
                    _attend(q[:, :N], k, v, presence_BR[:, :N], log_presence_BN, scaling),
                    _attend(q[:, N:], k_test, v_test, presence_BR[:, N:], log_presence_BN, scaling),
                ],
                dim=1,
            )
        else:
            out = _attend(q, k, v, presence_BR, log_presence_BN, scaling)

        entry = None
        if return_kv:
            entry = OKVCacheEntry(
                key=k_test.contiguous().detach(),
                value=v_test.contiguous().detach(),
                log_presence=log_presence_BN.detach(),
            )
        return self.out_projection(out.flatten(-2)), entry


# ---- Blocks -------------------------------------------------------------------------------------


class OCrossAttentionBlock(tabpfn_v3.CrossAttentionBlock):
    """Cross-attention block whose receivers and sources carry their own tau."""

    def forward(self, x_BQE: Tensor, context_BVE: Tensor) -> Tensor:
        """(B, Q, E), (B, V, E) -> (B, Q, E)."""
        x_BQE = x_BQE + self.attn(
            self.layernorm_q(x_BQE),
            self.layernorm_kv(context_BVE),
            self.layernorm_q.presence(x_BQE),
            self.layernorm_kv.log_presence(context_BVE),
        )
        return _feed_forward(self.layernorm2, self.mlp, x_BQE)


class OTransformerBlock(tabpfn_v3.TransformerBlock):
    """Block over the columns of each row; its last instance reads them into the CLS tokens."""

    def _attention_branch(self, query_SQE: Tensor, context_SVE: Tensor, rope: tabpfn_v3.RotaryEmbedding | None):
        norm = self.layernorm
        presence_SQ, log_presence_SV = norm.presence_and_log(context_SVE)
        normed = norm(context_SVE)
        if query_SQE is context_SVE:
            return self.attention(normed, normed, presence_SQ, log_presence_SV, rope)
        return self.attention(norm(query_SQE), normed, norm.presence(query_SQE), log_presence_SV, rope)

    def forward(
        self,
        x_BRCE: Tensor,
        rope: tabpfn_v3.RotaryEmbedding | None = None,
        save_peak_memory_factor: int | None = None,
    ) -> Tensor:
        """(B, R, C, E) -> (B, R, C, E)."""
        # Presence is read inside the chunked functions: they see x flattened, chunked, and
        # possibly overwritten chunk by chunk.
        x_BRCE = tabpfn_v3.chunked_evaluate_maybe_inplace(
            lambda x_SCE: self._attention_branch(x_SCE, x_SCE, rope),
            x_BRCE,
            save_peak_memory_factor=save_peak_memory_factor,
            residual=True,
            batch_dims=2,
        )
        return tabpfn_v3.chunked_evaluate_maybe_inplace(
            lambda x: _feed_forward(self.layernorm_mlp, self.mlp, x),
            x_BRCE,
            save_peak_memory_factor=save_peak_memory_factor,
            residual=False,
            batch_dims=3,
        )

    def forward_cross(
        self, query_BRQE: Tensor, context_BRCE: Tensor, rope: tabpfn_v3.RotaryEmbedding | None = None
    ) -> Tensor:
        """CLS tokens attend to the whole row: (B, R, Q, E), (B, R, C, E) -> (B, R, Q, E)."""
        branch = self._attention_branch(query_BRQE.flatten(0, 1), context_BRCE.flatten(0, 1), rope)
        x_BRQE = query_BRQE + branch.view(query_BRQE.shape)
        return _feed_forward(self.layernorm_mlp, self.mlp, x_BRQE)


class OICLTransformerBlock(tabpfn_v3.ICLTransformerBlock):
    """Block over the rows; keys and values come from train rows only."""

    def forward(  # type: ignore[override]
        self,
        x_BRE: Tensor,
        single_eval_pos: int,
        save_peak_memory_factor: int | None = None,
        *,
        cached_kv: OKVCacheEntry | OQuantizedKVCacheEntry | None = None,
        return_kv: bool = False,
    ) -> tuple[Tensor, OKVCacheEntry | None]:
        """(B, R, E) -> (B, R, E) and the cache entry, `None` unless `return_kv`."""

        def attend(
            x_BRE: Tensor, cached_kv: OKVCacheEntry | None = None, return_kv: bool = False
        ) -> tuple[Tensor, OKVCacheEntry | None]:
            presence_BR, log_presence_BR = self.layernorm.presence_and_log(x_BRE)
            log_presence_BN = log_presence_BR[:, :single_eval_pos] if cached_kv is None else cached_kv.log_presence
            return self.icl_attention(
                self.layernorm(x_BRE), presence_BR, log_presence_BN, cached_kv=cached_kv, return_kv=return_kv
            )

        entry = None
        if cached_kv is not None:
            dense = cached_kv.dequantize(x_BRE.dtype) if isinstance(cached_kv, OQuantizedKVCacheEntry) else cached_kv
            out, _ = attend(x_BRE, cached_kv=dense)
            x_BRE = x_BRE + out
        elif return_kv:
            out, entry = attend(x_BRE, return_kv=True)
            x_BRE = x_BRE + out
        else:
            x_BRE = tabpfn_v3.chunked_evaluate_maybe_inplace(
                lambda x: attend(x)[0],
                x_BRE,
                save_peak_memory_factor=save_peak_memory_factor,
                residual=True,
                batch_dims=1,
            )
        x_BRE = tabpfn_v3.chunked_evaluate_maybe_inplace(
            lambda x: _feed_forward(self.layernorm_mlp, self.mlp, x),
            x_BRE,
            save_peak_memory_factor=save_peak_memory_factor,
            residual=False,
            batch_dims=2,
        )
        return x_BRE, entry


# ---- The cache: the train rows' presence travels with their keys and values ---------------------


@dataclass
class OKVCacheEntry(kv_cache.KVCacheEntry):
    """Keys, values and log-presence (B, N) of the train rows in one ICL block."""

    log_presence: Tensor | None = None

    def to(self, device: torch.device | str) -> OKVCacheEntry:
        """Move the entry to a device."""
        return _to(self, device)

    def quantize(self, dtype: torch.dtype = kv_cache.QUANTIZED_KV_DTYPE) -> OQuantizedKVCacheEntry:
        """Quantize keys and values; the log-presence keeps its precision."""
        return OQuantizedKVCacheEntry(**vars(super().quantize(dtype)), log_presence=self.log_presence)


@dataclass
class OQuantizedKVCacheEntry(kv_cache.QuantizedKVCacheEntry):
    """Quantized keys and values, and the log-presence (B, N) as it was."""

    log_presence: Tensor | None = None

    def to(self, device: torch.device | str) -> OQuantizedKVCacheEntry:
        """Move the entry to a device."""
        return _to(self, device)

    def dequantize(self, dtype: torch.dtype) -> OKVCacheEntry:
        """Back to dense keys and values in `dtype`."""
        return OKVCacheEntry(**vars(super().dequantize(dtype)), log_presence=self.log_presence)


def _to(entry, device):
    moved = {f.name: getattr(entry, f.name) for f in fields(entry)}
    return type(entry)(**{n: v.to(device) if isinstance(v, Tensor) else v for n, v in moved.items()})


@dataclass
class OTabPFNV3Cache(tabpfn_v3.TabPFNV3Cache):
    """TabPFN v3's cache with entries that carry presence.

    The base class builds its own kind by name wherever it makes a new cache, hence the overrides.
    """

    def to(self, device: torch.device | str) -> OTabPFNV3Cache:
        """Move the cache to a device."""
        return OTabPFNV3Cache(**vars(super().to(device)))

    def quantize(self, dtype: torch.dtype = kv_cache.QUANTIZED_KV_DTYPE) -> OTabPFNV3Cache:
        """Quantize the keys and values of every block."""
        return OTabPFNV3Cache(**vars(super().quantize(dtype)))

    @classmethod
    def concatenate(cls, caches: Sequence[kv_cache.KVCache]) -> OTabPFNV3Cache:
        """One cache holding the batch elements of `caches` in order; consumes them."""
        log_presence = {
            layer: torch.cat([cast("Any", cache.kv[layer]).log_presence for cache in caches]) for layer in caches[0].kv
        }
        joined = super().concatenate(caches)
        for layer, entry in joined.kv.items():
            o_class = OQuantizedKVCacheEntry if isinstance(entry, kv_cache.QuantizedKVCacheEntry) else OKVCacheEntry
            joined.kv[layer] = o_class(**vars(entry), log_presence=log_presence[layer])
        return OTabPFNV3Cache(**vars(joined))


# ---- The model ----------------------------------------------------------------------------------


class OTabPFNV3(tabpfn_v3.TabPFNV3):
    """TabPFN v3 with patched blocks.

    Its forward is the host's; only a cache it returns is made one that keeps presence.
    """

    @functools.wraps(tabpfn_v3.TabPFNV3.forward)
    def forward(self, *args, **kwargs):
        """As the host's forward."""
        result = super().forward(*args, **kwargs)
        if not kwargs.get("return_kv_cache"):
            return result
        output, cache = result
        return output, cache if isinstance(cache, OTabPFNV3Cache) else OTabPFNV3Cache(**vars(cache))

    def state_dict(self, *args, **kwargs):
        """The host's weights, with a warning: a checkpoint made of them is the unpatched host."""
        warnings.warn(
            "The state dict of a retrofitted model holds the host's weights only: a checkpoint written from it "
            "(TabPFN's save_tabpfn_model does that) is the unpatched host. Save the retrofit itself with "
            "Retrofit.save, and load it with oretrofit.load.",
            stacklevel=2,
        )
        return super().state_dict(*args, **kwargs)


# Host class -> O-class, for modules that every variant patches.
O_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    tabpfn_v3.Attention: OAttention,
    tabpfn_v3.CrossAttention: OCrossAttention,
    tabpfn_v3.ICLAttention: OICLAttention,
    tabpfn_v3.CrossAttentionBlock: OCrossAttentionBlock,
    tabpfn_v3.TransformerBlock: OTransformerBlock,
    tabpfn_v3.ICLTransformerBlock: OICLTransformerBlock,
    tabpfn_v3.TabPFNV3: OTabPFNV3,
}

# What each norm's input is a carrier of, by the class that owns the norm and its name there.
CARRIERS: dict[type[nn.Module], dict[str, str]] = {
    tabpfn_v3.CrossAttentionBlock: {"layernorm_q": "receiver", "layernorm_kv": "source", "layernorm2": "ffn"},
    tabpfn_v3.TransformerBlock: {"layernorm": "receiver and source", "layernorm_mlp": "ffn"},
    tabpfn_v3.ICLTransformerBlock: {"layernorm": "receiver and source", "layernorm_mlp": "ffn"},
    tabpfn_v3.ColumnAggregator: {"out_ln": "readout"},
    tabpfn_v3.TabPFNV3: {"output_norm": "readout"},
}
