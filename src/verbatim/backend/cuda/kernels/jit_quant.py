"""Device code for weights that stay in their quantised blocks, in Triton. quant.py launches it.

Invariant: a weight that is unpacked here has the bits that Tensor.to_f32() has, rounded to float16
or bfloat16, and a matmul adds the products in the order of jit.matmul. So a result has the same
bits whether the weights are unpacked in the matmul, before it, or when the model is loaded.

Codes are stored in the order in which a tensor core takes its first operand from registers. A tile
of 64 outputs has chunks of 2,048 bytes: 64 inputs of 4 bits or 32 of 8 bits. A thread of the tile's
four warps loads 16 adjacent bytes of a chunk and unpacks them in its registers; no value passes
through shared memory to another thread. An output is warp * 16 + half * 8 + line, an input of a
chunk is nibble * 32 + eight * 8 + column * 2 + odd, and the bytes of a chunk have the order [warp,
line, column, eight, odd, half]; the two nibbles of a byte are inputs 32 apart.
"""

import triton
import triton.language as tl

# Four bytes -> eight float16 values q - 8 (SIGNED) or q, first the low nibbles, then the high ones;
# the bytes 0, 2, 1, 3, because a register of two halves takes bits that are 16 apart. 0x6400 is
# 1024 in float16, whose last bits count in ones, and above the high nibbles in sixteens.
_NIBBLES = """
{
.reg .b32 t, h, m, f;
shr.b32 t, $4, 8;
lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xea;
lop3.b32 $1, t, 0x000f000f, 0x64006400, 0xea;
lop3.b32 $2, $4, 0x00f000f0, 0x64006400, 0xea;
lop3.b32 $3, t, 0x00f000f0, 0x64006400, 0xea;
mov.b32 h, {ones};
mov.b32 m, 0x2c002c00;
mov.b32 f, {sixteens};
sub.f16x2 $0, $0, h;
sub.f16x2 $1, $1, h;
fma.rn.f16x2 $2, $2, m, f;
fma.rn.f16x2 $3, $3, m, f;
}
"""
# minus 1032 and 72, minus 1024 and 64
SIGNED_ASM: tl.constexpr = tl.constexpr(
    _NIBBLES.replace("{ones}", "0x64086408").replace("{sixteens}", "0xd480d480")
)
UNSIGNED_ASM: tl.constexpr = tl.constexpr(
    _NIBBLES.replace("{ones}", "0x64006400").replace("{sixteens}", "0xd400d400")
)
# four signed bytes -> four float16 values, of the bytes 0, 2, 1, 3
BYTES_ASM: tl.constexpr = tl.constexpr("""
{
.reg .b32 t, h;
xor.b32 t, $2, 0x80808080;
prmt.b32 $0, t, 0x64646464, 0x4240;
prmt.b32 $1, t, 0x64646464, 0x4341;
mov.b32 h, 0x64806480;
sub.f16x2 $0, $0, h;
sub.f16x2 $1, $1, h;
}
""")
# four bytes of FP8 (E4M3) -> four float16 values that are smaller by 2 ** 8, likewise: sign,
# exponent and mantissa move to their places
E4M3_ASM: tl.constexpr = tl.constexpr("""
{
.reg .b32 t, u, s;
prmt.b32 t, $2, 0, 0x2404;
prmt.b32 u, $2, 0, 0x3414;
and.b32 s, t, 0x80008000;
shr.b32 t, t, 1;
lop3.b32 $0, t, 0x3f803f80, s, 0xea;
and.b32 s, u, 0x80008000;
shr.b32 u, u, 1;
lop3.b32 $1, u, 0x3f803f80, s, 0xea;
}
""")
# four bytes of FP4 (E2M1) -> eight float16 values that are smaller by 2 ** 14, as NIBBLES
E2M1_ASM: tl.constexpr = tl.constexpr("""
{
.reg .b32 t, u;
shl.b32 t, $4, 12;
and.b32 u, t, 0x80008000;
shr.b32 t, t, 3;
lop3.b32 $0, t, 0x0e000e00, u, 0xea;
shl.b32 t, $4, 4;
and.b32 u, t, 0x80008000;
shr.b32 t, t, 3;
lop3.b32 $1, t, 0x0e000e00, u, 0xea;
shl.b32 t, $4, 8;
and.b32 u, t, 0x80008000;
shr.b32 t, t, 3;
lop3.b32 $2, t, 0x0e000e00, u, 0xea;
and.b32 u, $4, 0x80008000;
shr.b32 t, $4, 3;
lop3.b32 $3, t, 0x0e000e00, u, 0xea;
}
""")
# what OFFSET means, beside 0 for none
ADDED: tl.constexpr = tl.constexpr(1)
ZERO_POINT: tl.constexpr = tl.constexpr(2)


@triton.jit
def swap_middle(code, SIZE: tl.constexpr):
    """The bytes 0, 2, 1, 3 of each four: from the order [odd, half] to [half, odd]."""
    return tl.permute(code.reshape(SIZE // 4, 2, 2), (0, 2, 1)).reshape(SIZE)


@triton.jit
def nibble_values(code, SIGNED: tl.constexpr, FLOAT: tl.constexpr):
    """Codes 0 .. 15 in float16, minus 8 if SIGNED, or FP4 (E2M1) less a factor of 2 ** 14."""
    if FLOAT:
        wide = code.to(tl.uint16)
        value = ((wide & 8) << 12 | (wide & 7) << 9).to(tl.float16, bitcast=True)
    else:
        value = code.to(tl.float16) - (8.0 if SIGNED else 0.0)
    return value.to(tl.float16)


@triton.jit
def split_nibbles(
    code, SIZE: tl.constexpr, SIGNED: tl.constexpr, FLOAT: tl.constexpr, ASM: tl.constexpr
):
    """nibble_values of the (low, high) nibbles."""
    if ASM:
        low, high = tl.inline_asm_elementwise(
            E2M1_ASM if FLOAT else SIGNED_ASM if SIGNED else UNSIGNED_ASM, "=r,=r,=r,=r,r", [code],
            dtype=(tl.float16, tl.float16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        code = swap_middle(code, SIZE)
        low, high = nibble_values(code & 15, SIGNED, FLOAT), nibble_values(code >> 4, SIGNED, FLOAT)
    return low.to(tl.float16), high.to(tl.float16)


@triton.jit
def byte_values(code, FLOAT: tl.constexpr):
    """Signed bytes, or FP8 (E4M3) less a factor of 2 ** 8, in float16. Both are exact."""
    if FLOAT:
        wide = code.to(tl.uint16)
        value = ((wide & 128) << 8 | (wide & 127) << 7).to(tl.float16, bitcast=True)
    else:
        value = code.to(tl.int8, bitcast=True).to(tl.float16)
    return value


@triton.jit
def unpack_bytes(code, SIZE: tl.constexpr, FLOAT: tl.constexpr, ASM: tl.constexpr):
    if ASM:
        value = tl.inline_asm_elementwise(
            E4M3_ASM if FLOAT else BYTES_ASM, "=r,=r,r", [code],
            dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        value = byte_values(swap_middle(code, SIZE), FLOAT)
    return value.to(tl.float16)


@triton.jit
def scaled(q, scale, offset, TYPE: tl.constexpr, OFFSET: tl.constexpr):
    """Weights in the type TYPE: scale * q, scale * q + offset (ADDED) or scale * (q - offset)
    (ZERO_POINT, a whole number).

    A product of a float16 or bfloat16 and a whole number of nine bits is exact in float32, so one
    rounding to TYPE follows, as in Tensor.to_f32() and a conversion. A product with a float32 scale
    (FP8) is rounded to float32 first, there and here: no addition follows that could be fused."""
    if OFFSET == ZERO_POINT:
        q -= offset
    if OFFSET == ADDED:
        value = q.to(tl.float32) * scale.to(tl.float32) + offset.to(tl.float32)
    elif scale.dtype == tl.float16:
        value = q * scale
    else:
        value = q.to(tl.float32) * scale.to(tl.float32)
    return value.to(TYPE)


@triton.jit
def load_weights(
    codes, scales, offsets, pack, TYPE: tl.constexpr,
    PACK: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, FLOAT: tl.constexpr,
    OFFSET: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Weights [64, PACK] of pack number `pack`, counted over all tiles."""
    SIZE: tl.constexpr = 64 * PACK * BITS // 8
    COUNT: tl.constexpr = 64 * PACK // GROUP
    CHUNK: tl.constexpr = 256 // BITS  # inputs
    SPAN: tl.constexpr = GROUP // CHUNK if GROUP > CHUNK else 1  # chunks with one scale
    SPANS: tl.constexpr = PACK // CHUNK // SPAN
    NIBBLES: tl.constexpr = 8 // BITS
    BY_NIBBLE: tl.constexpr = 2 if BITS == 4 and GROUP <= 32 else 1  # scales per chunk and line
    BY_EIGHT: tl.constexpr = 2 if GROUP == 16 else 1
    code = tl.load(codes + pack * SIZE + tl.arange(0, SIZE))
    at = pack * COUNT + tl.arange(0, COUNT)
    scale = tl.load(scales + at)
    offset = tl.load(offsets + at) if OFFSET else scale
    if BITS == 4:
        low, high = split_nibbles(code, SIZE, OFFSET != ADDED, FLOAT, ASM)
        q = tl.join(low, high)
    else:
        q = unpack_bytes(code, SIZE, FLOAT, ASM)
    # span, chunk, warp, line, column, eight (2 bits), half, odd, nibble
    weight = scaled(
        q.reshape(SPANS, SPAN, 4, 8, 4, 2, 2, 2, 2, NIBBLES),
        scale.reshape(SPANS, 1, 4, 8, 1, BY_EIGHT, 1, 2, 1, BY_NIBBLE),
        offset.reshape(SPANS, 1, 4, 8, 1, BY_EIGHT, 1, 2, 1, BY_NIBBLE),
        TYPE,
        OFFSET,
    )
    return tl.permute(weight, (2, 7, 3, 0, 1, 9, 5, 6, 4, 8)).reshape(64, PACK)


@triton.jit(do_not_specialize=["M", "PACKS"])
def quant_matmul(
    x, codes, scales, offsets, out, M, N, K, WIDE, PACKS,
    BM: tl.constexpr, PACK: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    FLOAT: tl.constexpr, OFFSET: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Split-K matmul with few rows: out[split, m, n] = sum over the split's k of x[m, k] w[n, k].

    A program sums one split, PACKS packs of PACK inputs. The weights are the first operand: a tile
    of 64 of them has the instruction of jit.matmul's large tiles, which adds in the same order."""
    tile, split = tl.program_id(0), tl.program_id(1)
    n = (tile * 64 + tl.arange(0, 64)).to(tl.int64)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    TYPE: tl.constexpr = x.dtype.element_ty  # rows and unpacked weights
    inside = (m < M)[:, None]
    column = tl.arange(0, PACK)
    total = tl.zeros((64, BM), tl.float32)
    for i in range(PACKS):
        pack = split * PACKS + i
        weight = load_weights(
            codes, scales, offsets, tile.to(tl.int64) * (WIDE // PACK) + pack, TYPE,
            PACK, BITS, GROUP, FLOAT, OFFSET, ASM,
        )  # fmt: skip
        k = pack * PACK + column
        rows = tl.load(
            x + m[:, None] * K + k[None, :], mask=inside & (k < K)[None, :], other=0.0
        ).to(TYPE)
        total = tl.dot(weight, tl.trans(rows), total)
    place = (split * M + m[None, :]).to(tl.int64) * N + n[:, None]
    tl.store(out + place, total, mask=(m < M)[None, :] & (n < N)[:, None])


@triton.jit(do_not_specialize=["PACKS"])
def quant_expert_matmul(
    x, codes, scales, offsets, out, rows, experts, N, K, WIDE, PACKS,
    SPLITS: tl.constexpr, HEIGHT: tl.constexpr, BM: tl.constexpr, PACK: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, FLOAT: tl.constexpr, OFFSET: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """out[line] = x[rows[line]] times the weight of the expert of the line's tile, as
    jit_matmul.matmul with GATHER. A program sums all splits of BM of the HEIGHT lines of a tile."""
    tile, part = tl.program_id(0), tl.program_id(1)
    expert = tl.load(experts + part // (HEIGHT // BM)).to(tl.int64)
    if expert < 0:  # a tile that no expert needs
        return
    n, line = tile * 64 + tl.arange(0, 64), part * BM + tl.arange(0, BM)
    source = tl.load(rows + line).to(tl.int64)
    TYPE: tl.constexpr = x.dtype.element_ty
    inside, column = (source >= 0)[:, None], tl.arange(0, PACK)
    first = (expert * tl.cdiv(N, 64) + tile) * (WIDE // PACK)
    total = tl.zeros((64, BM), tl.float32)
    for split in range(SPLITS):
        sum_ = tl.zeros((64, BM), tl.float32)
        for i in range(PACKS):
            pack = split * PACKS + i
            weight = load_weights(
                codes, scales, offsets, first + pack, TYPE, PACK, BITS, GROUP, FLOAT, OFFSET, ASM
            )
            k = pack * PACK + column
            a = tl.load(
                x + source[:, None] * K + k[None, :], mask=inside & (k < K)[None, :], other=0.0
            )
            sum_ = tl.dot(weight, tl.trans(a), sum_)
        total += sum_
    place = line.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(out + place, total, mask=(n < N)[:, None] & (line >= 0)[None, :])


@triton.jit
def unpack_tiles(
    codes, scales, offsets, out, N, K, WIDE,
    PACK: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, FLOAT: tl.constexpr,
    OFFSET: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The weight [N, K] in half precision. A program unpacks one pack of 64 outputs."""
    tile, pack = tl.program_id(0), tl.program_id(1)
    weight = load_weights(
        codes, scales, offsets, tile.to(tl.int64) * (WIDE // PACK) + pack, out.dtype.element_ty,
        PACK, BITS, GROUP, FLOAT, OFFSET, ASM,
    )  # fmt: skip
    n = (tile * 64 + tl.arange(0, 64)).to(tl.int64)
    k = pack * PACK + tl.arange(0, PACK)
    mask = (n < N)[:, None] & (k < K)[None, :]
    tl.store(out + n[:, None] * K + k[None, :], weight, mask=mask)


@triton.jit
def unpack_row(
    codes, scales, offsets, index, out, K, WIDE,
    PACK: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, FLOAT: tl.constexpr,
    OFFSET: tl.constexpr,
):  # fmt: skip
    """out[i] = row index[i] in half precision. A program unpacks one pack of one row."""
    row, pack = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = tl.load(index + row).to(tl.int64)
    tile, warp, half, line = n // 64, n // 16 % 4, n // 8 % 2, n % 8
    k = pack * PACK + tl.arange(0, PACK)
    CHUNK: tl.constexpr = 256 // BITS
    BY_NIBBLE: tl.constexpr = 2 if BITS == 4 and GROUP <= 32 else 1
    BY_EIGHT: tl.constexpr = 2 if GROUP == 16 else 1
    chunk, eight, column, odd = k // CHUNK, k // 8 % 4, k // 2 % 4, k % 2
    nibble = k // 32 % (8 // BITS)
    at = (tile * (WIDE // CHUNK) + chunk) * 2048
    at += warp * 512 + line * 64 + column * 16 + eight * 4 + odd * 2 + half
    code = tl.load(codes + at)
    if BITS == 4:
        q = nibble_values((code >> (nibble * 4).to(tl.uint8)) & 15, OFFSET != ADDED, FLOAT)
    else:
        q = byte_values(code, FLOAT)
    INPUTS: tl.constexpr = GROUP if GROUP > CHUNK else CHUNK  # inputs of a line's scales
    scale_at = (tile * (WIDE // INPUTS) + k // INPUTS) * 4 + warp
    scale_at = (scale_at * 8 + line) * BY_EIGHT + (eight // 2) % BY_EIGHT
    scale_at = (scale_at * 2 + half) * BY_NIBBLE + nibble % BY_NIBBLE
    scale = tl.load(scales + scale_at)
    offset = tl.load(offsets + scale_at) if OFFSET else scale
    weight = scaled(q.to(tl.float16), scale, offset, out.dtype.element_ty, OFFSET)
    tl.store(out + row * K + k, weight, mask=k < K)
