"""Kernels of Triton for element-wise work: a value is read and written once.

In:   pointers, and strides of rows in elements; every last dimension is contiguous.
Out:  the results, in memory that the caller has allocated.
Must hold: computed in fp32, and rounded as by torch; no two programs write to the same element, so results do
not depend on the order of programs.
"""

import triton
import triton.language as tl


@triton.jit
def _load(rows, stride, row, column, columns):
    """Returns a part of a row in fp32; zeros beyond the last column."""
    return tl.load(rows + row * stride + column, mask=column < columns, other=0.0).to(tl.float32)


@triton.jit
def _store(rows, stride, row, column, columns, value):
    tl.store(rows + row * stride + column, value.to(rows.dtype.element_ty), mask=column < columns)


@triton.jit
def _rounded(value, TYPE: tl.constexpr):
    return value.to(TYPE).to(tl.float32)


@triton.jit
def gated_silu(gate, up, out, gate_stride, up_stride, columns, BLOCK: tl.constexpr):
    """`out = silu(gate) * up`, for rows x blocks of columns."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x, y = _load(gate, gate_stride, row, column, columns), _load(up, up_stride, row, column, columns)
    activated = (x / (1 + tl.exp(-x))).to(gate.dtype.element_ty).to(tl.float32)
    _store(out, columns, row, column, columns, activated * y)


@triton.jit
def gated_silu_backward(gradient, gate, up, out, gate_stride, up_stride, columns, BLOCK: tl.constexpr):
    """The gradients of `gated_silu`: `out` has rows of twice the columns, first of the gate and then of `up`."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    given = _load(gradient, columns, row, column, columns)
    x, y = _load(gate, gate_stride, row, column, columns), _load(up, up_stride, row, column, columns)
    share = 1 / (1 + tl.exp(-x))
    activated = (x * share).to(gate.dtype.element_ty).to(tl.float32)
    of_activated = (given * y).to(gate.dtype.element_ty).to(tl.float32)
    _store(out, 2 * columns, row, column, columns, of_activated * share * (1 + x * (1 - share)))
    _store(out + columns, 2 * columns, row, column, columns, given * activated)


@triton.jit
def rms_norm(value, weight, out, scale, columns, epsilon, BLOCK: tl.constexpr):
    """`out = value * scale * weight`, with `scale` the reciprocal root of the mean square; a program for each row."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = _load(value, columns, row, column, columns)
    root = tl.rsqrt(tl.sum(x * x) / columns + epsilon)
    tl.store(scale + row, root)
    _store(out, columns, row, column, columns, x * root * _load(weight, 0, 0, column, columns))


@triton.jit(do_not_specialize=["rows"])
def rms_norm_backward(
    gradient, value, scale, weight, partial, of_value, of_weight, rows, columns, ADDS: tl.constexpr, BLOCK: tl.constexpr
):
    """The gradients of `rms_norm`; with `ADDS`, the value's gradient is added to a partial gradient. Every program has
    a row of `of_weight`, the sum over its rows."""
    column = tl.arange(0, BLOCK)
    factor, total = _load(weight, 0, 0, column, columns), tl.zeros((BLOCK,), tl.float32)
    for row in range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0)):
        given, root = _load(gradient, columns, row, column, columns), tl.load(scale + row)
        normed = _load(value, columns, row, column, columns) * root
        total += given * normed
        given *= factor
        result = root * (given - normed * (tl.sum(given * normed) / columns))
        if ADDS:
            result += _load(partial, columns, row, column, columns)
        _store(of_value, columns, row, column, columns, result)
    _store(of_weight, columns, tl.program_id(0).to(tl.int64), column, columns, total)


@triton.jit
def rotate(
    value,
    cos,
    sin,
    out,
    token_stride,
    sequence_stride,
    head_stride,
    out_stride,
    angle_strides_token,
    angle_strides_sequence,
    sequences,
    heads,
    half,
    PRODUCT: tl.constexpr,
    BACK: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`out = value * cos + (-second half, first half) * sin`, or with `BACK` its transpose, for positions x blocks of
    heads. `PRODUCT` is the type of the two products and of their sum, before the sum is stored."""
    place = tl.program_id(0).to(tl.int64)
    token, sequence = place // sequences, place % sequences
    head, column = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (head < heads) & (column < half)
    rows = value + token * token_stride + sequence * sequence_stride + head * head_stride + column
    first = tl.load(rows, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(rows + half, mask=inside, other=0.0).to(tl.float32)
    angle = token * angle_strides_token + sequence * angle_strides_sequence
    cos_first, cos_second = _load(cos + angle, 0, 0, column, half), _load(cos + angle + half, 0, 0, column, half)
    sin_first, sin_second = _load(sin + angle, 0, 0, column, half), _load(sin + angle + half, 0, 0, column, half)
    if BACK:
        sin_first, sin_second = -sin_second, -sin_first
    left = _rounded(first * cos_first, PRODUCT) - _rounded(second * sin_first, PRODUCT)
    right = _rounded(second * cos_second, PRODUCT) + _rounded(first * sin_second, PRODUCT)
    target = out + place * out_stride + head * 2 * half + column
    tl.store(target, _rounded(left, PRODUCT).to(out.dtype.element_ty), mask=inside)
    tl.store(target + half, _rounded(right, PRODUCT).to(out.dtype.element_ty), mask=inside)


@triton.jit
def to_float8(
    rows,
    largest,
    values,
    scale,
    stride,
    columns,
    MOST: tl.constexpr,
    LEAST: tl.constexpr,
    BY_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`values * scale = rows`, with a power of two for each row, or for all rows by their largest value; a program for
    each row."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    if BY_ROW:
        found = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, columns, BLOCK):
            found = tl.maximum(found, tl.abs(_load(rows, stride, row, start + column, columns)))
        bound = tl.max(found)
    else:
        bound = tl.load(largest).to(tl.float32)
    exponent = (MOST / tl.maximum(bound, LEAST)).to(tl.int32, bitcast=True) & 0x7F800000
    factor = exponent.to(tl.float32, bitcast=True)
    if BY_ROW or row == 0:
        tl.store(scale + row, 1 / factor)
    for start in range(0, columns, BLOCK):
        given = _load(rows, stride, row, start + column, columns)
        _store(values, columns, row, start + column, columns, given * factor)
