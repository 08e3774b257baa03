"""The patched blocks and model as formulas, written out over the host's weights, for float64.

`gated` says whether FFNs and readouts are (Full-O), `closed` whether queries are scaled by the support mass.
"""

import math

import torch


def p_of(h, tau):
    n = h.square().sum(-1)
    return n / (tau + n)


def rms_norm(norm, h):
    eps = torch.finfo(h.dtype).eps if norm.eps is None else norm.eps
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * norm.weight


def heads(linear, x, width):
    return (x @ linear.weight.T).unflatten(-1, (-1, width))


def attend(q, k, v, p, p_source):
    """`p_i sum_j p_j exp(s_ij) v_j / sum_j p_j exp(s_ij)`; q (B, S, H, D), k and v (B, J, K, D)."""
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (k, v))
    scores = torch.einsum("bshd,bjhd->bhsj", q, k) / math.sqrt(q.shape[-1])
    weights = p_source[:, None, None, :] * torch.exp(scores - scores.amax(-1, keepdim=True))
    total = weights.sum(-1, keepdim=True)
    weights = torch.where(total > 0, weights / total, 0)
    return (p[:, :, None, None] * torch.einsum("bhsj,bjhd->bshd", weights, v)).flatten(-2)


def feed_forward(block, norm, h, taus, gated):
    g = p_of(h, taus[norm])[..., None] if gated else 1
    z = (g * rms_norm(getattr(block, norm), h)) @ block.mlp[0].weight.T
    return h + g * ((z * (1 + torch.erf(z / math.sqrt(2))) / 2) @ block.mlp[2].weight.T)


def scaled(layer, q, p_source, closed):
    """Queries scaled by an MLP of the number of sources, or of their mass."""
    if layer is None:
        return q
    if not closed:
        return layer(q, p_source.shape[1])
    base = layer.base_mlp(p_source.sum(-1).clamp(min=1).log()[:, None]).view(-1, 1, *q.shape[2:])
    return q * base * (1 + torch.tanh(layer.query_mlp(q)))


def cross_block(block, x, context, taus, gated, closed=False):
    a, p_source = block.attn, p_of(context, taus["layernorm_kv"])
    q = heads(a.q_projection, rms_norm(block.layernorm_q, x), a.head_dim)
    c = rms_norm(block.layernorm_kv, context)
    q = scaled(a.softmax_scaling_layer, q, p_source, closed)
    k, v = heads(a.k_projection, c, a.head_dim), heads(a.v_projection, c, a.head_dim)
    out = attend(q, k, v, p_of(x, taus["layernorm_q"]), p_source)
    return feed_forward(block, "layernorm2", x + out @ a.out_projection.weight.T, taus, gated)


def rotate(t, rope):
    """RoPE as multiplication by exp(i position frequency) of (first half + i second half)."""
    first, second = t.chunk(2, dim=-1)
    angle = torch.arange(t.shape[1])[:, None, None] * rope.freqs.double()
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], dim=-1)


def column_block(block, x, context, rope, taus, gated):
    a, norm = block.attention, block.layernorm
    q, k, v = (
        heads(linear, rms_norm(norm, h), a.head_dim)
        for linear, h in ((a.q_projection, x), (a.k_projection, context), (a.v_projection, context))
    )
    if rope is not None:
        q, k = rotate(q, rope), rotate(k, rope)
    tau = taus["layernorm"]
    out = attend(q, k, v, p_of(x, tau), p_of(context, tau))
    return feed_forward(block, "layernorm_mlp", x + out @ a.out_projection.weight.T, taus, gated)


def row_block(block, x, n, taus, gated, closed=False):
    a = block.icl_attention
    normed, p = rms_norm(block.layernorm, x), p_of(x, taus["layernorm"])
    q = heads(a.q_projection, normed, a.head_dim)
    q = scaled(a.softmax_scaling_layer, q, p[:, :n], closed)
    k, v = (heads(linear, normed[:, :n], a.head_dim) for linear in (a.k_projection, a.v_projection))
    few = a.num_kv_heads_test or k.shape[2]
    out = torch.cat(
        [
            attend(q[:, :n], k, v, p[:, :n], p[:, :n]),
            attend(q[:, n:], k[:, :, :few], v[:, :, :few], p[:, n:], p[:, :n]),
        ],
        dim=1,
    )
    return feed_forward(block, "layernorm_mlp", x + out @ a.out_projection.weight.T, taus, gated)


def at(name, taus):
    """The taus of one block, by the names of its norms."""
    return {key.removeprefix(f"{name}."): tau for key, tau in taus.items() if key.startswith(f"{name}.")}


def model_forward(host, x, y, taus, gated):
    """The whole model: (logits of the test rows, carrier in front of each ICL block)."""
    n = len(y)
    grouped, y_embedding, _ = host._preprocess_and_group(x, y, n, None)
    h = host.x_embed(grouped)
    h[:, :n] = h[:, :n] + y_embedding[:, :, None]
    h = embed_columns(host, h, n, taus, gated)
    cls = host.column_aggregator.cls_tokens.expand(*h.shape[:2], -1, -1)
    rows = read_columns(host, h, cls, taus, gated)
    rows[:, :n] = rows[:, :n] + host._embed_icl_y(host._prepare_y(y, n, len(h)))
    return predict_rows(host, rows, n, taus, gated)


def embed_columns(host, h, n, taus, gated, closed=False):
    """The distribution embedder: (B, R, C, E) -> (B, R, C, E)."""
    B, R, C, E = h.shape
    z = h.transpose(1, 2).reshape(B * C, R, E)
    for i, layer in enumerate(host.feature_distribution_embedder.layers):
        name = f"feature_distribution_embedder.layers.{i}.cross_attn_block"
        inducing = layer.inducing_vectors.expand(B * C, -1, -1)
        hidden = cross_block(layer.cross_attn_block1, inducing, z[:, :n], at(f"{name}1", taus), gated, closed)
        z = cross_block(layer.cross_attn_block2, z, hidden, at(f"{name}2", taus), gated, closed)
    return z.reshape(B, C, R, E).transpose(1, 2)


def read_columns(host, h, cls, taus, gated):
    """The column aggregator: cells (B, R, C, E) and CLS tokens (B, R, I, E) -> (B, R, I * E)."""
    aggregator = host.column_aggregator
    s = torch.cat([cls, h], dim=2).flatten(0, 1)
    *blocks, last = aggregator.blocks
    for i, block in enumerate(blocks):
        s = column_block(block, s, s, aggregator.rope, at(f"column_aggregator.blocks.{i}", taus), gated)
    cls = s[:, : aggregator.num_cls_tokens]
    cls = column_block(last, cls, s, aggregator.rope, at(f"column_aggregator.blocks.{len(blocks)}", taus), gated)
    return readout(aggregator, "out_ln", cls, at("column_aggregator", taus), gated).reshape(*h.shape[:2], -1)


def predict_rows(host, rows, n, taus, gated, closed=False):
    """The ICL stage and the output: (logits of the test rows, carrier in front of each block)."""
    inputs = []
    for i, block in enumerate(host.icl_blocks):
        inputs.append(rows)
        rows = row_block(block, rows, n, at(f"icl_blocks.{i}", taus), gated, closed)
    return host.output_projection(readout(host, "output_norm", rows, taus, gated)[:, n:]).transpose(0, 1), inputs


def readout(owner, norm, h, taus, gated):
    return rms_norm(getattr(owner, norm), h) * (p_of(h, taus[norm])[..., None] if gated else 1)


def closed_forward(host, x, y, taus):
    """The closed model on one table whose rows and columns all exist, x (R, C), y (N,): logits (M, buckets)."""
    n, C = len(y), x.shape[1]
    finite, columns = x.isfinite(), []
    for c in range(C):
        known = x[:n, c][finite[:n, c]]
        mean = known.mean() if len(known) else torch.zeros((), dtype=x.dtype)
        column = torch.where(finite[:, c], x[:, c], mean)
        varies = n > 1 and bool((column[:n] != column[0]).any())
        std = column[:n].std(correction=1) if varies else 1.0
        columns.append(((column - mean) / (std + torch.finfo(x.dtype).eps)).clip(-100, 100))
    features = [torch.stack(columns, dim=1)]
    if host.use_nan_indicators:
        features.append(-2.0 * x.isnan() + 2.0 * x.isposinf() + 4.0 * x.isneginf())
    neighbours = [[(c + 2**i) % C for c in range(C)] for i in range(host.feature_group_size)]
    g = torch.stack([feature[:, group] for feature in features for group in neighbours], dim=-1)
    n_g = g.square().sum(-1, keepdim=True) + 1
    h = g @ host.x_embed.weight.T + n_g / (taus["x_embed"] + n_g) * host.x_embed.bias
    known = y[y.isfinite()]
    t = torch.where(y.isfinite(), y, known.mean() if len(known) else 0.0)

    def inject(door, train):
        target = t[:, None] * getattr(host, door).weight[:, 0] + getattr(host, door).bias
        p = p_of(train, taus[door])[..., None]
        return train + p * (target if train.ndim == 2 else target[:, None])

    h = torch.cat([inject("col_y_encoder", h[:n]), h[n:]])
    h = embed_columns(host, h[None], n, taus, True, True)
    n_row = h.square().sum(-1).mean(-1)[..., None, None]
    cls = n_row / (taus["column_aggregator"] + n_row) * host.column_aggregator.cls_tokens
    rows = read_columns(host, h, cls, taus, True)[0]
    rows = torch.cat([inject("icl_y_encoder", rows[:n]), rows[n:]])
    return predict_rows(host, rows[None], n, taus, True, True)[0][:, 0]
