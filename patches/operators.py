"""The O-operators: each maps a zero token to zero and lets it change no other token.

This holds whatever the host computes behind a zero token, NaN and inf too: what stands there is left out by
selection, and gets the gradient 0.

Shape suffixes: B batch, S receivers (queries), J sources (keys), H query heads, K key/value heads,
D head width, E hidden width. Definitions: docs/theory.md, section 2 (after Gong, 2026).
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .presence import add_gated, gate, gate_, log_presence, presence, tame, zero_at

# The batch is one dimension of the grid of CUDA's memory-efficient kernel (pytorch issues 142228 and 146704).
_CUDA_MAX_BATCH = 65_535

# The kernels that CUDA may choose among for attention with a bias; None for all, cuDNN's first (docs/cuda.md).
_CUDA_KERNELS: list[SDPBackend] | None = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
if os.environ.get("ORETROFIT_CUDNN_ATTENTION") == "1":
    _CUDA_KERNELS = None

# `sdpa_kernel` switches kernels for the whole process, and TabPFN runs several devices in threads.
_choosing = threading.Lock()


def oattention(
    q_BHSD: Tensor,
    k_BKJD: Tensor,
    v_BKJD: Tensor,
    *,
    presence_BS: Tensor,
    log_presence_BJ: Tensor,
    visible: Tensor | None = None,
    additive: Tensor | None = None,
    eps_den: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """OAttention on projected heads: (B, H, S, D), in q's dtype.

    `out_i = p_i * sum_j m_ij p_j exp(s_ij) v_j / (eps_den + sum_j m_ij p_j exp(s_ij))` with
    `s = scale * q k^T + additive`. A source's mass enters as the key bias `log p_j`, so the whole
    is one call of torch's fused attention; bias and gate stay in float32 for half-precision heads
    (except the bias on CUDA, whose fused kernel takes it in q's dtype only).

    Args:
        q_BHSD: Queries.
        k_BKJD: Keys; K must divide H (grouped heads).
        v_BKJD: Values; their width may differ from D.
        presence_BS: Presence p_i of the receivers; see `presence`.
        log_presence_BJ: log p_j of the sources, -inf for no mass; see `log_presence`.
        visible: The mask m, bool, broadcastable to (B, H, S, J); True means visible.
        additive: Added to the scores, broadcastable to (B, H, S, J); -inf hides a source.
        eps_den: Constant in the denominator. 0 stands for the limit 0+: the host's softmax where
            there is any support, exactly 0 where there is none.
        scale: Score scale, `1 / sqrt(D)` by default.

    Exactly 0 for a receiver with p_i = 0 and for one that sees no source with p_j > 0. The queries of receivers
    with p_i = 0, the keys and values of sources with p_j = 0, and what `additive` says of either may be
    anything, NaN and inf too, and get the gradient 0. A source that is only hidden, by `visible` or
    `additive`, has to be finite, as in torch's attention: its value is multiplied by 0. Raises `ValueError`
    if K does not divide H, or eps_den is negative or not finite.
    """
    null_B1S, massless_B1J = presence_BS[:, None] == 0, log_presence_BJ[:, None] == -math.inf
    out_BHSD, gate_BHS = oattention_ungated(
        zero_at(null_B1S, q_BHSD),
        zero_at(massless_B1J, k_BKJD),
        zero_at(massless_B1J, v_BKJD),
        presence_BS=presence_BS,
        log_presence_BJ=log_presence_BJ,
        visible=visible,
        additive=additive,
        eps_den=eps_den,
        scale=scale,
    )
    return gate_(gate_BHS, out_BHSD)


def oattention_ungated(
    q_BHSD: Tensor,
    k_BKJD: Tensor,
    v_BKJD: Tensor,
    *,
    presence_BS: Tensor,
    log_presence_BJ: Tensor,
    visible: Tensor | None = None,
    additive: Tensor | None = None,
    eps_den: float = 0.0,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`oattention` and the gate it has yet to be multiplied with: (B, H, S, D), (B, H or 1, S).

    For callers that gate behind a linear output projection, together with the residual, and whose queries,
    keys and values are finite at tokens without presence (it takes three passes to see to that).
    """
    heads, kv_heads = q_BHSD.shape[1], k_BKJD.shape[1]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} key/value heads evenly")
    if not 0 <= eps_den < math.inf:
        raise ValueError(f"eps_den must be a finite number of at least 0, got {eps_den}")

    if heads != kv_heads:
        k_BKJD = k_BKJD.repeat_interleave(heads // kv_heads, dim=1)
        v_BKJD = v_BKJD.repeat_interleave(heads // kv_heads, dim=1)

    bias = log_presence_BJ[:, None, None, :]
    if additive is not None:
        counts = bias != -torch.inf
        if additive.ndim > 1 and additive.shape[-2] > 1:
            counts = counts & (presence_BS != 0)[:, None, :, None]
        bias = torch.where(counts, bias + additive, -torch.inf)  # -inf + inf is NaN
    if visible is not None:
        bias = torch.where(visible, bias, -torch.inf)
    p_B1S = presence_BS[:, None, :]
    if eps_den > 0:
        # One more key of value 0 and score log(eps_den): a sink for the constant's share.
        k_BKJD, v_BKJD = F.pad(k_BKJD, (0, 0, 0, 1)), F.pad(v_BKJD, (0, 0, 0, 1))
        bias = F.pad(bias, (0, 1), value=math.log(eps_den))
    else:
        support = (bias > -torch.inf).any(dim=-1, keepdim=True)
        p_B1S = p_B1S * support[..., 0]
        # The gate is 0 where there is no support; a softmax over nothing would make it 0 * NaN.
        bias = torch.where(support, bias, 0.0)

    out_BHSD = _fused_attention(q_BHSD, k_BKJD.to(q_BHSD.dtype), v_BKJD.to(q_BHSD.dtype), bias, scale)
    return out_BHSD, p_B1S


def _fused_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float | None) -> Tensor:
    """Torch's attention with a key bias, outside autocast, which would round the bias."""
    if q.dtype in (torch.float16, torch.bfloat16) and q.device.type == "cuda":
        # Large finite scores must not overflow to -inf, which stands for no mass.
        finite = bias.clamp(min=torch.finfo(q.dtype).min / 2)
        bias = torch.where(bias > -torch.inf, finite, -torch.inf).to(q.dtype)
    else:
        bias = bias.to(torch.promote_types(q.dtype, torch.float32))
    batch = q.shape[0]
    with torch.autocast(q.device.type, enabled=False):
        if q.device.type != "cuda":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
        if batch <= _CUDA_MAX_BATCH:
            return _attention_on_cuda(q, k, v, bias, scale)
        # By the number of chunks: a compiled model has to know that, but not the batch.
        chunks = -(-batch // _CUDA_MAX_BATCH)
        step = -(-batch // chunks)
        bias = bias.expand(batch, *bias.shape[1:])
        parts = (slice(chunk * step, (chunk + 1) * step) for chunk in range(chunks))
        return torch.cat([_attention_on_cuda(q[part], k[part], v[part], bias[part], scale) for part in parts])


def _attention_on_cuda(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float | None) -> Tensor:
    """Torch's attention by one of `_CUDA_KERNELS`."""
    if _CUDA_KERNELS is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
    if torch.compiler.is_compiling():  # the kernel is chosen now, and a lock cannot be traced
        with sdpa_kernel(_CUDA_KERNELS):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
    with _choosing, sdpa_kernel(_CUDA_KERNELS):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)


def oinject(h: Tensor, u: Tensor, tau: float, *, own: bool = False) -> Tensor:
    """OInject: `h + p(h) * u`, outside information u added to a carrier h; both (..., E).

    Exactly 0 at h = 0, whatever u is there. `own` as of `add_gated`.
    """
    return add_gated(h, presence(h, tau), u, own=own)


def support_moments(x: Tensor, p: Tensor, dim: int, correction: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Support, mean and variance along `dim` with presence p as mass; that dim is kept, with size 1.

    `support = sum p`, `mu = sum p x / support`, `var = sum p (x - mu)^2 / (support - correction)`;
    without any mass, or no more than the correction, the sums are divided by 1. x has to be finite, also
    where p is 0.
    """
    support = p.sum(dim=dim, keepdim=True)
    # Shares first: that of a token alone is exactly 1.
    share = p / torch.where(support > 0, support, 1.0)
    mean = (share * x).sum(dim=dim, keepdim=True)
    freedom = support - correction
    var = (p * (x - mean).square()).sum(dim=dim, keepdim=True) / torch.where(freedom > 0, freedom, 1.0)
    return support, mean, var


def ostandardize(x_SE: Tensor, presence_S: Tensor, eps: float = 1e-5) -> Tensor:
    """OStandardize: standardise across tokens with presence as mass, (..., S, E) -> (..., S, E).

    `mu = sum p x / sum p`, `var = sum p (x - mu)^2 / sum p`, output `p * (x - mu) / sqrt(var + eps)`.
    presence_S is (..., S). A token without mass may hold anything, NaN and inf too; its output is exactly 0,
    and so are its gradients. Computed in float32 at least, returned in x's dtype.
    """
    null_S = presence_S == 0
    x = zero_at(null_S, x_SE.to(torch.promote_types(x_SE.dtype, torch.float32)))
    p = presence_S.unsqueeze(-1).to(x.dtype)
    support, mean, var = support_moments(x, p, dim=-2)
    var = torch.where(support > 0, var + eps, 1.0)  # without eps, 0 / 0 would be in the gradient
    return zero_at(null_S, p * (x - mean) / torch.sqrt(var)).to(x_SE.dtype)


class ONorm(nn.Module):
    """ONorm: `p(h) * norm(h)`, (..., E) -> (..., E); also closes a norm with a bias, or one that divides by 0."""

    def __init__(self, norm: Callable[[Tensor], Tensor], tau: float) -> None:
        super().__init__()
        self.norm = norm
        self.tau = tau

    def forward(self, h: Tensor) -> Tensor:
        """Norm h, gated by its own presence."""
        return gate(presence(h, self.tau), self.norm(tame(h, self.tau)))


class OFFN(nn.Module):
    """OFFN: `h + p(h) * ffn(h)`, (..., E) -> (..., E); also closes a network with biases."""

    def __init__(self, ffn: Callable[[Tensor], Tensor], tau: float) -> None:
        super().__init__()
        self.ffn = ffn
        self.tau = tau

    def forward(self, h: Tensor) -> Tensor:
        """Add the network's output, gated by the presence of h."""
        return oinject(h, self.ffn(tame(h, self.tau)), self.tau)


class OAttention(nn.Module):
    """OAttention with its projections: self-attention, or cross-attention given a context.

    The output projection has no bias: it would reach receivers without support.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, tau: float, *, num_kv_heads: int | None = None, eps_den: float = 0.0
    ) -> None:
        super().__init__()
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim {embed_dim} is not a multiple of num_heads {num_heads}")
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads or num_heads
        self.tau = tau
        self.eps_den = eps_den
        head_dim = embed_dim // num_heads
        self.q_projection = nn.Linear(embed_dim, embed_dim)
        self.k_projection = nn.Linear(embed_dim, self.num_kv_heads * head_dim)
        self.v_projection = nn.Linear(embed_dim, self.num_kv_heads * head_dim)
        self.out_projection = nn.Linear(embed_dim, embed_dim, bias=False)

    def forward(
        self,
        h_BSE: Tensor,
        context_BJE: Tensor | None = None,
        *,
        norm: Callable[[Tensor], Tensor] | None = None,
        visible: Tensor | None = None,
        additive: Tensor | None = None,
    ) -> Tensor:
        """Attend from h to the context (h itself by default): (B, S, E), the residual branch.

        h and context are carriers: presence is read off them as they are. `norm`, if given, is
        applied to what is projected, after presence has been read: behind a norm every live token
        has the same length. It acts on each token alone. `visible` and `additive` as in `oattention`.
        """
        context_BJE = h_BSE if context_BJE is None else context_BJE
        x, c = h_BSE, context_BJE
        if norm is not None:
            x, c = norm(tame(x, self.tau)), norm(tame(c, self.tau))

        def heads(projected: Tensor, count: int) -> Tensor:
            return projected.unflatten(-1, (count, -1)).transpose(1, 2)

        q_BHSD = heads(self.q_projection(x), self.num_heads)
        k_BKJD, v_BKJD = (heads(linear(c), self.num_kv_heads) for linear in (self.k_projection, self.v_projection))
        presence_BS = presence(h_BSE, self.tau)
        out_BHSD = oattention(
            q_BHSD,
            k_BKJD,
            v_BKJD,
            presence_BS=presence_BS,
            log_presence_BJ=log_presence(context_BJE, self.tau),
            visible=visible,
            additive=additive,
            eps_den=self.eps_den,
        )
        branch_BSE = self.out_projection(out_BHSD.transpose(1, 2).flatten(-2))
        return zero_at(presence_BS == 0, branch_BSE, own=True)


class OTransformerBlock(nn.Module):
    """A pre-norm transformer block of O-operators, with affine LayerNorms and an FFN with biases.

    `h + OAttention(h)`, then `h + p(h) * FFN(p(h) * LayerNorm(h))`. O-closed: a zero token stays
    exactly zero and changes nobody.
    """

    def __init__(self, embed_dim: int, num_heads: int, tau: float, *, ff_factor: int = 4) -> None:
        super().__init__()
        self.attention = OAttention(embed_dim, num_heads, tau)
        self.norm = nn.LayerNorm(embed_dim)
        hidden = embed_dim * ff_factor
        ffn = nn.Sequential(nn.Linear(embed_dim, hidden), nn.GELU(), nn.Linear(hidden, embed_dim))
        self.ffn = OFFN(nn.Sequential(ONorm(nn.LayerNorm(embed_dim), tau), *ffn), tau)

    def forward(self, h_BSE: Tensor, *, visible: Tensor | None = None) -> Tensor:
        """(B, S, E) -> (B, S, E)."""
        return self.ffn(h_BSE + self.attention(h_BSE, norm=self.norm, visible=visible))


class OTransformer(nn.Module):
    """A stack of `OTransformerBlock`s and a gated last norm: the small reference model."""

    def __init__(self, embed_dim: int, num_heads: int, num_blocks: int, tau: float = 1e-3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OTransformerBlock(embed_dim, num_heads, tau) for _ in range(num_blocks))
        self.norm = ONorm(nn.LayerNorm(embed_dim), tau)

    def forward(self, h_BSE: Tensor, *, visible: Tensor | None = None) -> Tensor:
        """(B, S, E) -> (B, S, E); `visible` as in `oattention`."""
        for block in self.blocks:
            h_BSE = block(h_BSE, visible=visible)
        return self.norm(h_BSE)
