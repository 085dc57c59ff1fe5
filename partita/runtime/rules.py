"""The op-rule table: an einops-like signature for every aten op the library can split.

One row per family of ops. A rule reads a `Call` (shapes, dims and plain arguments of one recorded op) and answers with a
`Signature`, or None when this use of the op has no rule; then the op is opaque: it counts, and nothing in it is split.
"""

from typing import Any

import torch

from partita.runtime.computing import (
    along,
    batch_norm,
    fourier,
    gather,
    group_norm,
    halved,
    index,
    layer_norm,
    nll,
    pairs,
    recurrent,
    reduce,
    scattered,
    triangle,
    trilinear,
    weight_norm,
)
from partita.runtime.patterns import Rule, added, created, linear, pattern, pointwise
from partita.runtime.shaping import cat, expand, pad, permute, piece, repeat, shuffle, view
from partita.runtime.spatial import attention, convolution, pool

COPIES = "neg clone detach alias _to_copy lift_fresh native_dropout_backward real imag"
DRAWS = "zeros_like ones_like empty_like full_like rand_like randn_like zero_ fill_ bernoulli_ uniform_ normal_ randint_like"
NEW = (
    "new_zeros new_ones new_empty new_full new_empty_strided zeros ones empty full arange rand randn randint randperm "
    "scalar_tensor empty_strided eye linspace"
)
# Every op that torch tags `pointwise` is pointwise too; these lack the tag, or would be refused by it.
ALIKE = (
    "native_dropout bernoulli masked_fill masked_fill_ where gelu_backward silu_backward threshold_backward "
    "tanh_backward sigmoid_backward softplus_backward elu_backward hardswish_backward leaky_relu_backward clamp "
    "hardswish hardswish_ hardsigmoid hardtanh lerp lerp_ "
    "addcmul addcmul_ addcdiv addcdiv_ sqrt_ rsqrt_ relu_ gelu_"
)
BATCH_NORMS = (
    "native_batch_norm _native_batch_norm_legit _batch_norm_with_update native_batch_norm_backward batch_norm_backward"
)
POOLS = (
    "max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d "
    "_adaptive_avg_pool2d_backward upsample_nearest2d upsample_nearest2d_backward "
    "upsample_bilinear2d upsample_bilinear2d_backward"
)
ATTENTIONS = "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward"

LOSSES = (
    "mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward binary_cross_entropy "
    "binary_cross_entropy_backward binary_cross_entropy_with_logits soft_margin_loss soft_margin_loss_backward "
    "log_sigmoid_forward log_sigmoid_backward"
)
TABLE: list[tuple[str, Rule]] = [
    ("copy_", linear("pass", (0,))),
    (DRAWS, linear("no", (0,))),
    ("add sub add_ sub_", added),
    ("mul mul_ div div_", linear("mul")),
    (COPIES, linear("pass")),
    (ALIKE, pointwise),
    (NEW, created),
    ("view _unsafe_view reshape _reshape_alias unsqueeze squeeze", view),
    ("permute transpose t transpose_ t_", permute),
    ("expand", expand),
    ("slice select split split_with_sizes unsafe_split unbind slice_backward select_backward", piece),
    ("cat stack", cat),
    ("repeat", repeat),
    ("sum mean amax amin any all var var_mean std argmax argmin logsumexp linalg_vector_norm norm prod max min", reduce),
    ("_softmax _log_softmax _safe_softmax", along(1, 2)),
    ("_softmax_backward_data _log_softmax_backward_data", along(2, 1)),
    ("cumsum cumprod flip sort", along(1)),
    ("roll", along(2, name="dims")),
    ("tril triu", triangle),
    ("topk", along(2, new=True)),
    ("mm", pattern("m k, k n -> m n")),
    ("bmm", pattern("b m k, b k n -> b m n")),
    ("mv", pattern("m k, k -> m")),
    ("dot vdot", pattern("k, k ->")),
    ("addmm", pattern("n, m k, k n -> m n")),
    ("baddbmm", pattern("b m n, b m k, b k n -> b m n")),
    ("embedding", pattern("v d, ... -> ... d")),
    ("embedding_dense_backward", pattern("... d, ... -> v d", linear="first")),
    ("native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward", layer_norm),
    ("native_group_norm native_group_norm_backward", group_norm),
    (BATCH_NORMS, batch_norm),
    ("convolution convolution_backward", convolution),
    (POOLS, pool),
    (ATTENTIONS, attention),
    ("nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward", nll),
    (LOSSES, pointwise),  # without a reduction one value per element, with one a sum over all
    ("index index_put index_put_ _unsafe_index", index),
    ("gather index_select", gather),
    ("scatter scatter_add scatter_ scatter_add_ index_add index_add_", scattered),
    ("glu glu_backward", halved),
    ("constant_pad_nd", pad),
    ("pixel_shuffle pixel_unshuffle", shuffle),
    ("mkldnn_rnn_layer mkldnn_rnn_layer_backward", recurrent),
    ("_weight_norm_interface _weight_norm_interface_backward", weight_norm),
    ("_fft_r2c _fft_c2c _fft_c2r", fourier),
    ("view_as_real view_as_complex", pairs),
    ("_trilinear", trilinear),
]
RULES: dict[str, Rule] = {name: rule for names, rule in TABLE for name in names.split()}


def rule_of(name: str, func: Any) -> Rule | None:
    """The rule of an aten op; torch's own `pointwise` tag names most."""
    return RULES.get(name) or (pointwise if torch.Tag.pointwise in func.tags else None)
