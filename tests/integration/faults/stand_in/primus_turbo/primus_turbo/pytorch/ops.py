"""Operators. Each computes what the real one does, by PyTorch's own operators and without its
speed.
"""

import torch


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    bias=None,
    alibi_slopes=None,
    deterministic=False,
    return_lse=False,
    return_attn_probs=False,
    sink=None,
):
    assert not (dropout_p or bias or alibi_slopes or return_lse or return_attn_probs or sink)
    assert causal
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    mask = None
    if window_size[0] >= 0:
        place = torch.arange(q.size(2))
        before = place[:, None] - place[None, :]
        mask = (before >= 0) & (before <= window_size[0])
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=softmax_scale, enable_gqa=True
    )
    return out.transpose(1, 2)


def grouped_gemm(
    a,
    b,
    group_lens,
    group_offs=None,
    trans_b=False,
    num_cu=None,
    schedule="static",
    fuse_bgrad_accum_pattern=None,
):
    assert group_lens.dtype == torch.int64
    parts = a.split([*group_lens.tolist(), a.size(0) - int(group_lens.sum())])
    made = [part @ (b[i].T if trans_b else b[i]) for i, part in enumerate(parts[:-1])]
    # Rows beyond the last group are padding.
    return torch.cat([*made, a.new_zeros(parts[-1].size(0), made[0].size(1))])


def gemm_fp8(
    a, b, trans_a=False, trans_b=False, out_dtype=None, config=None, fuse_bgrad_accum_pattern=None
):
    assert trans_b
    assert not trans_a
    return (_Rounded.apply(a) @ _Rounded.apply(b).T).to(out_dtype or a.dtype)


class _Rounded(torch.autograd.Function):
    """Values rounded to FP8 with one scale; the gradient passes."""

    @staticmethod
    def forward(ctx, x):
        scale = torch.finfo(torch.float8_e4m3fn).max / x.abs().amax().float().clamp(min=1e-12)
        return ((x.float() * scale).to(torch.float8_e4m3fn).float() / scale).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad
