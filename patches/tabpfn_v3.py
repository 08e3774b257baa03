"""O-variants of TabPFN v3's blocks.

A patch is a subclass with another forward, put on by `module.__class__ = ...`: weights and
state-dict keys stay as they are. What a patched module needs beyond its weights is one plain float,
`tau`, on each norm whose input is a carrier: the residual stream before a norm is what presence is
read off, and every attention, feed-forward network and readout of the host has such a norm in front
of it. Undoing a patch is putting the host's classes back and taking away what was set beside the
weights: each tau, the closed variant's `x_embed.target`, and the model's cache of compiled forwards.

The host's projections and MLPs have no bias, so whatever is made of a zero token is zero once its norm
is; where it is added to the residual stream it is selected out, as live tokens may be inf or NaN.

Shape suffixes, as in TabPFN's own file: B batch, R rows (train and test), N train rows, C columns,
E embedding width, H heads, D head width, S receivers, J sources.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from tabpfn.architectures import kv_cache, tabpfn_v3
from torch import Tensor, nn

from .operators import oattention_ungated
from .presence import add_gated, can_look, gate_, log_presence_at, presence_at, squared_norm, zero_at

# ---- Norms: where tau lives ---------------------------------------------------------------------


class CarrierNorm(tabpfn_v3._DtypeMatchingRMSNorm):
    """The host's norm, and the presence of the carrier in front of it.

    On a CPU without gradients the norm is computed from `||h||^2`, which presence needs anyway: the same
    value, rounded otherwise. tau is a plain float and no buffer: the engines cast models to float16,
    where it would underflow.
    """

    tau: float

    def read(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """`norm(h)` and the presence of h: (..., E) -> (..., E), (...)."""
        n = squared_norm(h)
        return self._normed(h, n), presence_at(n, self.tau)

    def read_both(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`norm(h)`, presence and log-presence of h, which both receives and sends."""
        n = squared_norm(h)
        return self._normed(h, n), presence_at(n, self.tau), log_presence_at(n, self.tau)

    def read_source(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """`norm(h)` and the log-presence of h."""
        n = squared_norm(h)
        return self._normed(h, n), log_presence_at(n, self.tau)

    def _normed(self, h: Tensor, n: Tensor, p: Tensor | None = None) -> Tensor:
        """`norm(h)`, times p where given, for h of squared norm n; exactly 0 at h = 0."""
        if self.eps == 0:
            # Any other token in place of zeros, which would be 0 / 0, in the gradient too.
            null = n < torch.finfo(n.dtype).tiny
            h, n = h.masked_fill(null.unsqueeze(-1), 1), n.masked_fill(null, h.shape[-1])
        by_hand = h.device.type == "cpu" and not torch.is_grad_enabled()
        if not by_hand or self.weight is None or not h.dtype == n.dtype == self.weight.dtype:
            normed = tabpfn_v3._DtypeMatchingRMSNorm.forward(self, h)
            normed = normed if p is None else gate_(p, normed)
        else:
            # On a CPU torch's norm is several passes over h, the first of which is n once more.
            eps = torch.finfo(h.dtype).eps if self.eps is None else self.eps
            scale = torch.rsqrt(n / h.shape[-1] + eps)
            normed = h.mul((scale if p is None else scale * p).unsqueeze(-1)).mul_(self.weight)
            normed = normed if p is None else zero_at(p == 0, normed, own=True)
        return zero_at(null, normed, own=True) if self.eps == 0 else normed


class GatedNorm(CarrierNorm):
    """ONorm: the host's norm times the presence of its input."""

    def read(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """`p(h) * norm(h)` and p(h): (..., E) -> (..., E), (...)."""
        n = squared_norm(h)
        p = presence_at(n, self.tau)
        return self._normed(h, n, p), p

    def forward(self, h: Tensor) -> Tensor:
        """`p(h) * norm(h)`: (..., E) -> (..., E)."""
        return self.read(h)[0]


def _feed_forward(norm: nn.Module, mlp: nn.Module, h: Tensor) -> Tensor:
    """h and its FFN branch: the host's, or OFFN on an ONorm where the norm is gated."""
    if not isinstance(norm, GatedNorm):
        return h + mlp(norm(h))
    normed, p = norm.read(h)
    return add_gated(h, p, mlp(normed), own=True)


# ---- Attention ----------------------------------------------------------------------------------

# The attentions return their branch and the gate it has yet to be multiplied with: the projection
# behind attention has no bias, so the gate may follow it, in one pass with the residual.


class OSoftmaxScalingMLP(tabpfn_v3.SoftmaxScalingMLP):
    """The host's query scaling, by the support of each batch element in place of a count of keys.

    Only in the variant that closes the count; `oa` and `full-o` keep the host's.
    """

    def forward(self, q_BSHD: Tensor, log_presence_BJ: Tensor) -> Tensor:  # type: ignore[override]
        """`q * base_mlp(log support) * (1 + tanh(query_mlp(q)))`: (B, S, H, D)."""
        # In float64 a sum does not depend on the order of its terms or on zeros among them; an error
        # in the scale is multiplied by every score.
        wide = log_presence_BJ.dtype if log_presence_BJ.device.type == "mps" else torch.float64
        support_B1 = log_presence_BJ.to(wide).exp().sum(dim=-1, keepdim=True)
        log_support_B1 = support_B1.clamp(min=1).log().to(q_BSHD.dtype)
        base_B1HD = self.base_mlp(log_support_B1).view(-1, 1, self.num_heads, self.head_dim)
        return q_BSHD * (base_B1HD * (1 + torch.tanh(self.query_mlp(q_BSHD))))


def _attend(
    q_BSHD: Tensor,
    k_BJHD: Tensor,
    v_BJHD: Tensor,
    presence_BS: Tensor,
    log_presence_BJ: Tensor,
    softmax_scaling_layer: nn.Module | None = None,
) -> tuple[Tensor, Tensor]:
    """OAttention in the host's layout and with its query scaling: (B, S, H * D), and the gate (B, S)."""
    if isinstance(softmax_scaling_layer, OSoftmaxScalingMLP):
        q_BSHD = softmax_scaling_layer(q_BSHD, log_presence_BJ)
    elif softmax_scaling_layer is not None:
        q_BSHD = softmax_scaling_layer(q_BSHD, k_BJHD.shape[1])
    if can_look(presence_BS):
        # Tokens without presence anywhere in the batch are left out: the kernel then rounds as if they
        # had never been inserted. (On CUDA a shape that depends on values would stall the device.)
        live_S, live_J = (presence_BS > 0).any(dim=0), (log_presence_BJ > -torch.inf).any(dim=0)
        if live_J.any() and not (live_S.all() and live_J.all()):
            parts = (q_BSHD[:, live_S], k_BJHD[:, live_J], v_BJHD[:, live_J])
            out, gate = _attend(*parts, presence_BS[:, live_S], log_presence_BJ[:, live_J])
            out_BSE, gate_BS = out.new_zeros(*q_BSHD.shape[:2], out.shape[-1]), torch.zeros_like(presence_BS)
            out_BSE[:, live_S], gate_BS[:, live_S] = out, gate
            return out_BSE, gate_BS
    out_BHSD, gate_B1S = oattention_ungated(
        q_BSHD.transpose(1, 2),
        k_BJHD.transpose(1, 2),
        v_BJHD.transpose(1, 2),
        presence_BS=presence_BS,
        log_presence_BJ=log_presence_BJ,
    )
    return out_BHSD.transpose(1, 2).flatten(-2), gate_B1S[:, 0]


class OColumnAttention(tabpfn_v3.Attention):
    """Attention over the columns of a row, from receivers to sources."""

    def forward(  # type: ignore[override]
        self,
        x_BSE: Tensor,
        context_BJE: Tensor,
        presence_BS: Tensor,
        log_presence_BJ: Tensor,
        rope: tabpfn_v3.RotaryEmbedding | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend from the normed x to the normed context: branch (B, S, E), gate (B, S)."""
        q = self.q_projection(x_BSE).unflatten(-1, (-1, self.head_dim))
        k = self.k_projection(context_BJE).unflatten(-1, (-1, self.head_dim))
        v = self.v_projection(context_BJE).unflatten(-1, (-1, self.head_dim))
        if rope is not None:
            q = rope.rotate_queries_or_keys(q.transpose(1, 2)).transpose(1, 2)
            k = rope.rotate_queries_or_keys(k.transpose(1, 2)).transpose(1, 2)
        out, gate_BS = _attend(q, k, v, presence_BS, log_presence_BJ)
        return self.out_projection(out), gate_BS


class OCrossAttention(tabpfn_v3.CrossAttention):
    """Attention between rows and inducing points."""

    def forward(  # type: ignore[override]
        self, x_BSE: Tensor, context_BJE: Tensor, presence_BS: Tensor, log_presence_BJ: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attend from the normed x to the normed context: branch (B, S, E), gate (B, S)."""
        q = self.q_projection(x_BSE).unflatten(-1, (-1, self.head_dim))
        k = self.k_projection(context_BJE).unflatten(-1, (-1, self.head_dim))
        v = self.v_projection(context_BJE).unflatten(-1, (-1, self.head_dim))
        out, gate_BS = _attend(q, k, v, presence_BS, log_presence_BJ, self.softmax_scaling_layer)
        return self.out_projection(out), gate_BS


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
    ) -> tuple[Tensor, Tensor, OKVCacheEntry | None]:
        """Attend from the normed rows x to the first N of them, or to the cached ones.

        Returns the branch (B, R, E), its gate (B, R), and the cache entry, `None` unless `return_kv`.
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
            train = _attend(q[:, :N], k, v, presence_BR[:, :N], log_presence_BN, scaling)
            test = _attend(q[:, N:], k_test, v_test, presence_BR[:, N:], log_presence_BN, scaling)
            out, gate_BR = (torch.cat(parts, dim=1) for parts in zip(train, test, strict=True))
        else:
            out, gate_BR = _attend(q, k, v, presence_BR, log_presence_BN, scaling)

        entry = None
        if return_kv:
            entry = OKVCacheEntry(
                key=k_test.contiguous().detach(),
                value=v_test.contiguous().detach(),
                log_presence=log_presence_BN.detach(),
            )
        return self.out_projection(out), gate_BR, entry


# ---- Blocks -------------------------------------------------------------------------------------


class OCrossAttentionBlock(tabpfn_v3.CrossAttentionBlock):
    """Cross-attention block whose receivers and sources carry their own tau."""

    def forward(self, x_BQE: Tensor, context_BVE: Tensor) -> Tensor:
        """(B, Q, E), (B, V, E) -> (B, Q, E)."""
        normed_BQE, presence_BQ = self.layernorm_q.read(x_BQE)
        context_BVE, log_presence_BV = self.layernorm_kv.read_source(context_BVE)
        branch_BQE, gate_BQ = self.attn(normed_BQE, context_BVE, presence_BQ, log_presence_BV)
        return _feed_forward(self.layernorm2, self.mlp, add_gated(x_BQE, gate_BQ, branch_BQE, own=True))


class OColumnTransformerBlock(tabpfn_v3.TransformerBlock):
    """Block over the columns of each row; its last instance reads them into the CLS tokens."""

    def _attend(self, query_SQE: Tensor, context_SVE: Tensor, rope: tabpfn_v3.RotaryEmbedding | None) -> Tensor:
        normed_SVE, presence_SQ, log_presence_SV = self.layernorm.read_both(context_SVE)
        normed_SQE = normed_SVE
        if query_SQE is not context_SVE:
            normed_SQE, presence_SQ = self.layernorm.read(query_SQE)
        branch_SQE, gate_SQ = self.attention(normed_SQE, normed_SVE, presence_SQ, log_presence_SV, rope)
        return add_gated(query_SQE, gate_SQ, branch_SQE, own=True)

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
            lambda x_SCE: self._attend(x_SCE, x_SCE, rope),
            x_BRCE,
            save_peak_memory_factor=save_peak_memory_factor,
            residual=False,
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
        x_SQE = self._attend(query_BRQE.flatten(0, 1), context_BRCE.flatten(0, 1), rope)
        return _feed_forward(self.layernorm_mlp, self.mlp, x_SQE).view(query_BRQE.shape)


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
            normed_BRE, presence_BR, log_presence_BR = self.layernorm.read_both(x_BRE)
            log_presence_BN = log_presence_BR[:, :single_eval_pos] if cached_kv is None else cached_kv.log_presence
            branch_BRE, gate_BR, entry = self.icl_attention(
                normed_BRE, presence_BR, log_presence_BN, cached_kv=cached_kv, return_kv=return_kv
            )
            return add_gated(x_BRE, gate_BR, branch_BRE, own=True), entry

        entry = None
        if cached_kv is not None:
            dense = cached_kv.dequantize(x_BRE.dtype) if isinstance(cached_kv, OQuantizedKVCacheEntry) else cached_kv
            x_BRE, _ = attend(x_BRE, cached_kv=dense)
        elif return_kv:
            x_BRE, entry = attend(x_BRE, return_kv=True)
        else:
            x_BRE = tabpfn_v3.chunked_evaluate_maybe_inplace(
                lambda x: attend(x)[0],
                x_BRE,
                save_peak_memory_factor=save_peak_memory_factor,
                residual=False,
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

    @functools.wraps(tabpfn_v3.TabPFNV3.state_dict)
    def state_dict(self, *args, **kwargs):
        """The host's weights under the host's names; with a warning where TabPFN writes a checkpoint of them."""
        # It would be the unpatched host's, by the name of its config's class. Others ask for the weights alone.
        if sys._getframe(1).f_code.co_name == "save_tabpfn_model":
            warnings.warn(
                "TabPFN's save_tabpfn_model writes the host's weights without the retrofit: the file is the unpatched "
                "host. Retrofit.save_checkpoint writes one that TabPFNRegressor(model_path=...) loads as a retrofit, "
                "and Retrofit.save a small file without weights.",
                stacklevel=3,
            )
        return super().state_dict(*args, **kwargs)
