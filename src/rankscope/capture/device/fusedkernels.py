"""The fused digest in Triton: one launch reads a value, a second one adds its partial results up.

Import this module only where Triton is installed. What the tables and partial results hold is said
in `fusedplan`; what the numbers mean, in `capture.digest` and `mix64`.

Every lane keeps running numbers of the columns it owns: sums and squares about the first number
it saw, extrema, zeros, and for each of the 8 projections the sum of its values times the factor of
the row; the hash is a ninth projection, in integers modulo 2**64. The factors of columns enter
once, at the end. So a value is read once, in its own dtype, and an element costs some forty
instructions.

That first pass takes every number for finite and of ordinary size. Sums that are not finite, or
extrema near the ends of the range, tell where it was mistaken: the program then reads its rows
again with care, and once more where the range asks for another unit. Where the first numbers lie
far from all others (a first token of huge activations) it reads again about the means.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rankscope.capture.device.fusedplan import COUNTS, FIRST, NUMBERS, SECOND

_FIRST = tl.constexpr(FIRST)
_SECOND = tl.constexpr(SECOND)
_NUMBERS = tl.constexpr(NUMBERS)
_COUNTS = tl.constexpr(COUNTS)
_MOST_CANCELLED = tl.constexpr(16.0)
"""Largest ratio of squares about the first number to squares about the mean."""


@triton.jit
def _mix(z):
    z = (z ^ (z >> 31)) * _FIRST
    z = (z ^ (z >> 29)) * _SECOND
    return z ^ (z >> 32)


@triton.jit
def _exponent(amount):
    """The biased exponent of a positive number, so that its power and its inverse exist."""
    if amount.dtype == tl.float64:
        field = (amount.to(tl.int64, bitcast=True) >> 52) & 2047
        return tl.minimum(tl.maximum(field, 1), 2045)
    else:
        field = (amount.to(tl.int32, bitcast=True) >> 23) & 255
        return tl.minimum(tl.maximum(field, 1), 253)


@triton.jit
def _power(field, DOUBLE: tl.constexpr):
    if DOUBLE:
        return (field.to(tl.int64) << 52).to(tl.float64, bitcast=True)
    else:
        return (field.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _value(word, table, KIND: tl.constexpr):
    if KIND == "float64":
        x = word.to(tl.float64, bitcast=True)
    elif KIND == "float32":
        x = word.to(tl.float32, bitcast=True)
    elif KIND == "float16":
        x = word.to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND == "bfloat16":
        x = (word.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif KIND == "table":
        x = tl.load(table + word.to(tl.int32))
    elif KIND == "int8":
        x = word.to(tl.int8, bitcast=True).to(tl.float32)
    elif KIND == "int16":
        x = word.to(tl.int16, bitcast=True).to(tl.float32)
    elif KIND == "int32":
        x = word.to(tl.int32, bitcast=True).to(tl.float64)
    elif KIND == "int64":
        x = word.to(tl.int64, bitcast=True).to(tl.float64)
    elif KIND == "uint32" or KIND == "uint64":
        x = word.to(tl.float64)
    else:
        x = word.to(tl.float32)
    return x


@triton.jit
def _nan_word(word, KIND: tl.constexpr):
    if KIND == "float64":
        nan = tl.full((), 0x7FF8000000000000, tl.uint64)
    elif KIND == "float32":
        nan = tl.full((), 0x7FC00000, tl.uint32)
    elif KIND == "float16":
        nan = tl.full((), 0x7E00, tl.uint16)
    else:
        nan = tl.full((), 0x7FC0, tl.uint16)
    return nan.to(word.dtype)


@triton.jit
def _folded(word):
    """The word as the hash multiplies it: its high half stirred into the low one."""
    if word.dtype == tl.uint64:
        folded = word ^ (word >> 32)
    elif word.dtype == tl.uint32:
        folded = (word ^ (word >> 16)).to(tl.uint64)
    else:
        folded = word.to(tl.uint64)
    return folded


@triton.jit
def _projected(sums, factors, is_column):
    return tl.sum(sums * tl.load(factors, mask=is_column, other=0.0), 0)


@triton.jit
def _mean_of(value, is_one):
    base = tl.load(value + 2, mask=is_one, other=0.0).to(tl.float64)
    return base + tl.load(value + 13, mask=is_one, other=0.0).to(tl.float64)


@triton.jit
def read_value(
    words,
    table,
    same,
    row_keys,
    row_offsets,
    row_limits,
    row_weights,
    column_keys,
    column_offsets,
    column_factors,
    numbers,
    counts,
    rows_per_sample,
    groups,
    rows_per_program,
    columns,
    KIND: tl.constexpr,
    DOUBLE: tl.constexpr,
    FLOATING: tl.constexpr,
    WIDE: tl.constexpr,
    PLAIN: tl.constexpr,
    FULL: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Read some rows of one block of columns into `numbers` [programs, NUMBERS] and `counts`
    [programs, COUNTS]; see `fusedplan` for the tables.

    Args:
        words: the value's memory, as unsigned integers.
        table: [256] values of the words of an 8-bit float.
        same: [256] normalized words of an 8-bit float.
        FLOATING: values may not be finite.
        WIDE: squares of values may leave the range of the float.
        PLAIN: column i adds i to the offset.
        FULL: every row holds all columns, and these are a multiple of BLOCK.
        ALIGN: rows begin at multiples of so many words, for wide loads.
    """
    program = tl.program_id(0)
    group = tl.program_id(1)
    number = tl.float64 if DOUBLE else tl.float32
    sample = group // groups
    first = sample * rows_per_sample + (group % groups) * rows_per_program
    last = tl.minimum(first + rows_per_program, (sample + 1) * rows_per_sample)
    column = program * BLOCK + tl.arange(0, BLOCK)
    is_column = column < columns
    if PLAIN:
        away = column
    else:
        away = tl.load(column_offsets + column, mask=is_column, other=0)

    nothing = tl.zeros((BLOCK,), number)
    none = tl.zeros((BLOCK,), tl.int32)
    scale = tl.full((), 1.0, number)
    unit = tl.full((), 1.0, number)
    largest = tl.full((), 0.0, number)
    is_careful = tl.full((), 0, tl.int32)
    is_again = tl.full((), 1, tl.int32)
    is_centred = tl.full((), 0, tl.int32)
    centre = tl.zeros((BLOCK,), number)
    mixed = tl.zeros((BLOCK,), tl.uint64)
    held, nans, above, below, zeros = none, none, none, none, none
    shift, sums, squares = nothing, nothing, nothing
    low = nothing + float("inf")
    high = nothing - float("inf")
    s0, s1, s2, s3 = nothing, nothing, nothing, nothing
    s4, s5, s6, s7 = nothing, nothing, nothing, nothing
    while is_again > 0:
        mixed = tl.zeros((BLOCK,), tl.uint64)
        held, nans, above, below, zeros = none, none, none, none, none
        shift, sums, squares = centre, nothing, nothing
        low = nothing + float("inf")
        high = nothing - float("inf")
        s0, s1, s2, s3 = nothing, nothing, nothing, nothing
        s4, s5, s6, s7 = nothing, nothing, nothing, nothing
        for row in range(first, last):
            offset = tl.load(row_offsets + row)
            if ALIGN > 1:
                offset = tl.multiple_of(offset, ALIGN)
            if FULL:
                word = tl.load(words + offset + away)
                x = _value(word, table, KIND)
                is_zero = x == 0.0
            else:
                begin = tl.load(row_limits + 2 * row)
                end = tl.load(row_limits + 2 * row + 1)
                is_held = (column >= begin) & (column < end)
                word = tl.load(words + offset + away, mask=is_held, other=0)
                x = _value(word, table, KIND)
                is_zero = is_held & (x == 0.0)
            zeros += is_zero.to(tl.int32)
            if KIND == "table":
                word = tl.load(same + word.to(tl.int32))
                if not FULL:
                    word = tl.where(is_held, word, 0)
            elif FLOATING:
                word = tl.where(is_zero, 0, word)
            about, extreme = x, x
            if FULL:
                if (row == first) & (is_centred == 0):
                    shift = x
            else:
                x = tl.where(is_held, x, 0.0)
                shift = tl.where(held + is_centred == 0, x, shift)
                about = tl.where(is_held, x, shift)
                extreme = tl.where(is_held, x, float("nan"))
            if FLOATING:
                if is_careful > 0:
                    is_finite = tl.abs(x) < float("inf")
                    is_nan = x != x
                    if not FULL:
                        is_finite = is_finite & is_held
                    nans += is_nan.to(tl.int32)
                    above += (x == float("inf")).to(tl.int32)
                    below += (x == -float("inf")).to(tl.int32)
                    if KIND != "table":
                        word = tl.where(is_nan, _nan_word(word, KIND), word)
                    extreme = tl.where(is_finite, x, float("nan"))
                    x = tl.where(is_finite, x, 0.0) * scale
                    shift = tl.where(held + is_centred == 0, x, shift)
                    about = tl.where(is_finite, x, shift)
                    held += is_finite.to(tl.int32)
                elif not FULL:
                    held += is_held.to(tl.int32)
            elif not FULL:
                held += is_held.to(tl.int32)
            mixed += _folded(word) * tl.load(row_keys + row).to(tl.uint64, bitcast=True)
            low = tl.minimum(low, extreme)
            high = tl.maximum(high, extreme)
            step = about - shift
            sums += step
            squares += step * step
            factor = row_weights + 8 * row
            s0 += x * tl.load(factor)
            s1 += x * tl.load(factor + 1)
            s2 += x * tl.load(factor + 2)
            s3 += x * tl.load(factor + 3)
            s4 += x * tl.load(factor + 4)
            s5 += x * tl.load(factor + 5)
            s6 += x * tl.load(factor + 6)
            s7 += x * tl.load(factor + 7)
        is_again = is_again * 0
        if FULL:
            if is_careful == 0:
                held = none + (last - first)
        largest = tl.maximum(tl.max(high, 0), -tl.min(low, 0))
        if FLOATING:
            is_ordinary = tl.abs(tl.sum(tl.abs(sums) + squares, 0)) < float("inf")
            is_outside = largest != largest
            field = _exponent(tl.maximum(largest, 0.0))
            if WIDE:
                if DOUBLE:
                    is_outside = (field < 1023 - 400) | (field > 1023 + 400)
                else:
                    is_outside = (field < 127 - 45) | (field > 127 + 45)
                is_outside = is_outside & (largest > 0.0) & (largest < float("inf"))
            if (is_careful == 0) & (is_outside | (is_ordinary == 0)):
                is_again = is_again + 1
            if WIDE:
                if (scale == 1.0) & is_outside:
                    is_again = is_again * 0 + 1
                    unit = _power(field, DOUBLE)
                    scale = _power((2046 if DOUBLE else 254) - field, DOUBLE)
            is_careful = is_careful * 0 + 1
        if not DOUBLE:
            shares = sums / tl.maximum(held, 1).to(number)
            kept = tl.sum(tl.maximum(squares - sums * shares, 0.0), 0)
            is_cancelled = tl.sum(squares, 0) > kept * _MOST_CANCELLED
            if is_cancelled & (is_again + is_centred == 0):
                is_again = is_again + 1
                is_centred = is_centred + 1
                centre = shift + shares
    # is_again is 0 here. It is used, so that the loop has a result for each of its arguments:
    # Triton before 3.9 takes the n-th result for that of the n-th argument, and fails without it.
    if (largest <= 0.0) | (is_again > 0):
        unit = unit * 0.0

    out = (group * tl.num_programs(0) + program).to(tl.int64)
    many = tl.maximum(held, 1).to(number)
    inside = tl.maximum(squares - sums * (sums / many), 0.0)
    whole = tl.sum(held, 0)
    # means are told from one number: rounded as they are, they would add to a small spread
    base = tl.max(tl.where(held > 0, shift, -float("inf")), 0)
    base = tl.where(whole > 0, base, 0.0)
    mean = (shift - base) + sums / many
    about = tl.sum(tl.where(held > 0, mean, 0.0) * held.to(number), 0)
    about = about / tl.maximum(whole, 1).to(number)
    apart = tl.where(held > 0, mean - about, 0.0)
    numbers += out * _NUMBERS
    tl.store(numbers, tl.min(low, 0))
    tl.store(numbers + 1, tl.max(high, 0))
    tl.store(numbers + 2, base)
    tl.store(numbers + 3, tl.sum(inside + held.to(number) * apart * apart, 0))
    tl.store(numbers + 4, unit)
    tl.store(numbers + 13, about)
    factors = column_factors + column
    tl.store(numbers + 5, _projected(s0, factors, is_column))
    tl.store(numbers + 6, _projected(s1, factors + columns, is_column))
    tl.store(numbers + 7, _projected(s2, factors + 2 * columns, is_column))
    tl.store(numbers + 8, _projected(s3, factors + 3 * columns, is_column))
    tl.store(numbers + 9, _projected(s4, factors + 4 * columns, is_column))
    tl.store(numbers + 10, _projected(s5, factors + 5 * columns, is_column))
    tl.store(numbers + 11, _projected(s6, factors + 6 * columns, is_column))
    tl.store(numbers + 12, _projected(s7, factors + 7 * columns, is_column))
    counts += out * _COUNTS
    keys = tl.load(column_keys + column, mask=is_column, other=0).to(tl.uint64, bitcast=True)
    tl.store(counts, tl.sum(mixed * keys, 0).to(tl.int64, bitcast=True))
    tl.store(counts + 1, whole.to(tl.int64))
    tl.store(counts + 2, tl.sum(nans, 0).to(tl.int64))
    tl.store(counts + 3, tl.sum(above, 0).to(tl.int64))
    tl.store(counts + 4, tl.sum(below, 0).to(tl.int64))
    tl.store(counts + 5, tl.sum(zeros, 0).to(tl.int64))


@triton.jit
def combine_partials(
    numbers, counts, row, elements, programs, programs_per_sample, BLOCK: tl.constexpr
):
    """Put the partial results of one value together into `row` (`resultrow`), in float64 and always
    in the same order, BLOCK at a time.

    The first program makes the statistics and the hash, each of the others the sketch of a
    sample.
    """
    which = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    if which == 0:
        none = tl.zeros((BLOCK,), tl.int64)
        nothing = tl.zeros((BLOCK,), tl.float64)
        mixed = tl.zeros((BLOCK,), tl.uint64)
        held, nans, above, below, zeros = none, none, none, none, none
        low = nothing + float("inf")
        high = nothing - float("inf")
        unit = nothing
        for start in range(0, programs, BLOCK):
            is_one = start + lane < programs
            part = counts + (start + lane) * _COUNTS
            mixed += tl.load(part, mask=is_one, other=0).to(tl.uint64, bitcast=True)
            held += tl.load(part + 1, mask=is_one, other=0)
            nans += tl.load(part + 2, mask=is_one, other=0)
            above += tl.load(part + 3, mask=is_one, other=0)
            below += tl.load(part + 4, mask=is_one, other=0)
            zeros += tl.load(part + 5, mask=is_one, other=0)
            value = numbers + (start + lane) * _NUMBERS
            low = tl.minimum(low, tl.load(value, mask=is_one, other=float("inf")).to(tl.float64))
            high = tl.maximum(
                high, tl.load(value + 1, mask=is_one, other=-float("inf")).to(tl.float64)
            )
            unit = tl.maximum(unit, tl.load(value + 4, mask=is_one, other=0.0).to(tl.float64))
        widest = tl.max(unit, 0)
        widest = tl.where(widest > 0.0, widest, 1.0)
        finite = tl.sum(held, 0).to(tl.float64)
        total = nothing
        for start in range(0, programs, BLOCK):
            is_one = start + lane < programs
            value = numbers + (start + lane) * _NUMBERS
            ratio = tl.load(value + 4, mask=is_one, other=0.0).to(tl.float64) / widest
            many = tl.load(counts + (start + lane) * _COUNTS + 1, mask=is_one, other=0)
            total += many.to(tl.float64) * _mean_of(value, is_one) * ratio
        middle = tl.sum(total, 0) / tl.maximum(finite, 1.0)
        squares = nothing
        for start in range(0, programs, BLOCK):
            is_one = start + lane < programs
            value = numbers + (start + lane) * _NUMBERS
            ratio = tl.load(value + 4, mask=is_one, other=0.0).to(tl.float64) / widest
            many = tl.load(counts + (start + lane) * _COUNTS + 1, mask=is_one, other=0)
            apart = _mean_of(value, is_one) * ratio - middle
            within = tl.load(value + 3, mask=is_one, other=0.0).to(tl.float64) * ratio * ratio
            squares += within + many.to(tl.float64) * apart * apart
        about = tl.sum(squares, 0)
        tl.store(row, finite)
        tl.store(row + 1, tl.sum(nans, 0).to(tl.float64))
        tl.store(row + 2, tl.sum(above, 0).to(tl.float64))
        tl.store(row + 3, tl.sum(below, 0).to(tl.float64))
        tl.store(row + 4, tl.sum(zeros, 0).to(tl.float64))
        tl.store(row + 5, tl.min(low, 0))
        tl.store(row + 6, tl.max(high, 0))
        tl.store(row + 7, middle * widest)
        tl.store(row + 8, tl.sqrt(about) * widest)
        tl.store(row + 9, tl.sqrt(about + finite * middle * middle) * widest)
        hashed = _mix(tl.sum(mixed, 0) + elements.to(tl.uint64))
        tl.store(row + 10, hashed.to(tl.float64, bitcast=True))
    else:
        sample = which - 1
        first = sample * programs_per_sample
        projection = tl.arange(0, 8)
        sums = tl.zeros((BLOCK, 8), tl.float64)
        for start in range(0, programs_per_sample, BLOCK):
            is_one = (start + lane < programs_per_sample)[:, None]
            value = numbers + ((first + start + lane) * _NUMBERS)[:, None]
            unit = tl.load(value + 4, mask=is_one, other=0.0).to(tl.float64)
            part = tl.load(value + 5 + projection[None, :], mask=is_one, other=0.0)
            sums += part.to(tl.float64) * unit
        out = row + 11 + 8 * sample
        tl.store(out + projection, tl.sum(sums, 0))
