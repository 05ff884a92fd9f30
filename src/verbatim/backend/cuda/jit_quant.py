"""Device code for weights that stay in their quantised blocks, in Triton. quant.py launches it.

Invariant: a weight that is unpacked here has the bits that Tensor.to_f32() has, rounded to float16,
and a matmul adds the products in the order of jit.matmul. So a result has the same bits whether the
weights are unpacked in the matmul, before it, or when the model is loaded.
"""

import triton
import triton.language as tl

# Four bytes -> eight float16 values q - 8: first the low nibbles, then the high ones. 0x6400 is
# 1024 in float16, whose last bits count in ones.
NIBBLES_ASM: tl.constexpr = tl.constexpr("""
{
.reg .b32 t, u, h;
prmt.b32 t, $4, 0, 0x4140;
prmt.b32 u, $4, 0, 0x4342;
lop3.b32 $0, t, 0x000f000f, 0x64006400, 0xea;
lop3.b32 $1, u, 0x000f000f, 0x64006400, 0xea;
shr.b32 t, t, 4;
shr.b32 u, u, 4;
lop3.b32 $2, t, 0x000f000f, 0x64006400, 0xea;
lop3.b32 $3, u, 0x000f000f, 0x64006400, 0xea;
mov.b32 h, 0x64086408;
sub.f16x2 $0, $0, h;
sub.f16x2 $1, $1, h;
sub.f16x2 $2, $2, h;
sub.f16x2 $3, $3, h;
}
""")
# four signed bytes -> four float16 values
BYTES_ASM: tl.constexpr = tl.constexpr("""
{
.reg .b32 t, h;
xor.b32 t, $2, 0x80808080;
prmt.b32 $0, t, 0x64646464, 0x4140;
prmt.b32 $1, t, 0x64646464, 0x4342;
mov.b32 h, 0x64806480;
sub.f16x2 $0, $0, h;
sub.f16x2 $1, $1, h;
}
""")


@triton.jit
def split_nibbles(code, ASM: tl.constexpr):
    """(low, high) nibbles minus 8, in float16."""
    if ASM:
        low, high = tl.inline_asm_elementwise(
            NIBBLES_ASM, "=r,=r,=r,=r,r", [code],
            dtype=(tl.float16, tl.float16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        low = (code & 15).to(tl.float16) - 8.0
        high = (code >> 4).to(tl.float16) - 8.0
    return low.to(tl.float16), high.to(tl.float16)


@triton.jit
def signed_bytes(code, ASM: tl.constexpr):
    if ASM:
        value = tl.inline_asm_elementwise(
            BYTES_ASM, "=r,=r,r", [code], dtype=tl.float16, is_pure=True, pack=4
        )
    else:
        value = code.to(tl.int8, bitcast=True).to(tl.float16)
    return value.to(tl.float16)


@triton.jit
def scale_codes(
    q, scales, offsets, at, held,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Weights [ROWS, WIDTH] in float16: scale * q, or scale * (q + 8) + offset (OFFSET).

    A product of a float16 and a code of eight bits is exact in float32, so one rounding to float16
    follows, as in Tensor.to_f32() and a conversion."""
    s = tl.load(scales + at, mask=held, other=0.0)
    groups = q.reshape(ROWS, WIDTH // GROUP, GROUP)
    if OFFSET:
        o = tl.load(offsets + at, mask=held, other=0.0).to(tl.float32)
        value = (groups.to(tl.float32) + 8.0) * s.to(tl.float32)[:, :, None] + o[:, :, None]
    elif scales.dtype.element_ty == tl.float16:
        value = groups * s[:, :, None]
    else:
        value = groups.to(tl.float32) * s[:, :, None]
    return value.to(tl.float16).reshape(ROWS, WIDTH)


@triton.jit(do_not_specialize=["M", "PACKS"])
def quant_matmul(
    x, codes, scales, offsets, out, M, N, K, WIDE, PACKS,
    BM: tl.constexpr, BN: tl.constexpr, PACK: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, OFFSET: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Split-K matmul with few rows: out[split, m, n] = sum over the split's k of x[m, k] w[n, k].

    A program sums one split, PACKS packs of PACK inputs. The weights are the first operand: a tile
    of 64 of them has the instruction of jit.matmul's large tiles, which adds in the same order."""
    tile, split = tl.program_id(0), tl.program_id(1)
    n = (tile * BN + tl.arange(0, BN)).to(tl.int64)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    HALF: tl.constexpr = PACK // 2
    WIDTH: tl.constexpr = HALF if BITS == 4 else PACK  # inputs of one product
    BYTES: tl.constexpr = PACK * BITS // 8
    held, inside = (n < N)[:, None], (m < M)[:, None]
    column, group = tl.arange(0, WIDTH), tl.arange(0, WIDTH // GROUP)
    total = tl.zeros((BN, BM), tl.float32)
    for i in range(PACKS):
        pack = split * PACKS + i
        at = n[:, None] * (WIDE * BITS // 8) + pack * BYTES + column[None, :]
        code = tl.load(codes + at, mask=held, other=0)
        scale_at = n[:, None] * (WIDE // GROUP) + pack * (PACK // GROUP) + group[None, :]
        k = pack * PACK + column
        rows = tl.load(
            x + m[:, None] * K + k[None, :], mask=inside & (k < K)[None, :], other=0.0
        ).to(tl.float16)
        if BITS == 4:
            low, high = split_nibbles(code, ASM)
            first = scale_codes(low, scales, offsets, scale_at, held, BN, WIDTH, GROUP, OFFSET)
            second = scale_codes(
                high, scales, offsets, scale_at + HALF // GROUP, held, BN, WIDTH, GROUP, OFFSET
            )
            k += HALF
            more = tl.load(
                x + m[:, None] * K + k[None, :], mask=inside & (k < K)[None, :], other=0.0
            ).to(tl.float16)
            total = tl.dot(first, tl.trans(rows), total)
            total = tl.dot(second, tl.trans(more), total)
        else:
            weight = scale_codes(
                signed_bytes(code, ASM), scales, offsets, scale_at, held, BN, WIDTH, GROUP, OFFSET
            )
            total = tl.dot(weight, tl.trans(rows), total)
    place = (split * M + m[None, :]).to(tl.int64) * N + n[:, None]
    tl.store(out + place, total, mask=(m < M)[None, :] & (n < N)[:, None])


@triton.jit(do_not_specialize=["COUNT"])
def unpack_rows(
    codes, scales, offsets, index, out, COUNT, K, WIDE,
    ROWS: tl.constexpr, PACK: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    OFFSET: tl.constexpr, GATHER: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """out[i] = row i, or row index[i] (GATHER), in float16: ROWS rows of one pack."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pack, inside = tl.program_id(1), row < COUNT
    source = row.to(tl.int64)
    if GATHER:
        source = tl.load(index + row, mask=inside, other=0).to(tl.int64)
    HALF: tl.constexpr = PACK // 2
    WIDTH: tl.constexpr = HALF if BITS == 4 else PACK
    held = inside[:, None]
    column, group = tl.arange(0, WIDTH), tl.arange(0, WIDTH // GROUP)
    at = source[:, None] * (WIDE * BITS // 8) + pack * (PACK * BITS // 8) + column[None, :]
    code = tl.load(codes + at, mask=held, other=0)
    scale_at = source[:, None] * (WIDE // GROUP) + pack * (PACK // GROUP) + group[None, :]
    k = pack * PACK + column
    place = out + row.to(tl.int64)[:, None] * K + k[None, :]
    if BITS == 4:
        low, high = split_nibbles(code, ASM)
        first = scale_codes(low, scales, offsets, scale_at, held, ROWS, WIDTH, GROUP, OFFSET)
        second = scale_codes(
            high, scales, offsets, scale_at + HALF // GROUP, held, ROWS, WIDTH, GROUP, OFFSET
        )
        tl.store(place, first, mask=held & (k < K)[None, :])
        tl.store(place + HALF, second, mask=held & (k + HALF < K)[None, :])
    else:
        weight = scale_codes(
            signed_bytes(code, ASM), scales, offsets, scale_at, held, ROWS, WIDTH, GROUP, OFFSET
        )
        tl.store(place, weight, mask=held & (k < K)[None, :])
