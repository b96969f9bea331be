"""Row and column sums of a tile of dSᵀ, where registers hold it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from decayattn.backends.hopper.config import WARPGROUP_ROWS

# keys of one consumer warpgroup
SHARE: gl.constexpr = gl.constexpr(WARPGROUP_ROWS)


def _sums_ptx(blocks: int, bfloat: bool) -> str:
    """PTX that sums a warp's 16 keys × 8·blocks rows of dSᵀ in both directions: products with ones, of one warp each.

    A thread holds, of every block of 8 rows, rows 2 (lane % 4) + {0, 1} as a pair: one pair of key lane / 4 and one of
    key lane / 4 + 8. Two blocks are the left operand of an m16n8k16 product as they are; with its 8 × 8 matrices
    transposed, they are the left operand of the sums over keys. A product leaves each sum in the four threads that have
    lane / 4 in common; of the sums over keys, thread t of the four keeps the block pairs t, t + 4, …, that is rows
    16 t + lane / 4 (+ 8, + 64, + 72).

    Results: per block four registers, (first key, second key) × 2; inputs: per block a pair of either key. Sums over
    keys stand in the first key's registers of block 0 (and 1), sums over rows in the second key's of block 0.
    """
    dtype, one = ("bf16", "0x3f803f80") if bfloat else ("f16", "0x3c003c00")
    mma = f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32"
    results = 4 * blocks
    ptx = [".reg .f32 key<4>, row<4>, zero;", ".reg .b32 turned<4>, one, lane;", ".reg .pred mine;"]
    ptx += [f"mov.b32 one, {one};", "mov.f32 zero, 0f00000000;", "mov.u32 lane, %laneid;", "and.b32 lane, lane, 3;"]
    ptx += [f"mov.f32 key{i}, zero;" for i in range(4)]
    for pair in range(blocks // 2):
        inputs = [f"${results + 4 * pair + i}" for i in range(4)]
        keys = "{key0, key1, key2, key3}"
        ptx.append(f"{mma} {keys}, {{{', '.join(inputs)}}}, {{one, one}}, {keys};")
        for i, source in enumerate((0, 2, 1, 3)):
            ptx.append(f"movmatrix.sync.aligned.m8n8.trans.b16 turned{i}, {inputs[source]};")
        turned = "{turned0, turned1, turned2, turned3}"
        ptx.append(f"{mma} {{row0, row1, row2, row3}}, {turned}, {{one, one}}, {{zero, zero, zero, zero}};")
        kept = [f"${4 * (pair // 4)}", f"${4 * (pair // 4) + 1}"]
        if pair % 4 == 0:
            ptx += [f"mov.f32 {kept[0]}, row0;", f"mov.f32 {kept[1]}, row2;"]
        else:
            ptx += [f"setp.eq.u32 mine, lane, {pair % 4};"]
            ptx += [f"selp.f32 {kept[0]}, row0, {kept[0]}, mine;", f"selp.f32 {kept[1]}, row2, {kept[1]}, mine;"]
    ptx += ["mov.f32 $2, key0;", "mov.f32 $3, key2;"]
    return "{" + "\n".join(ptx) + "}"


def _sums_operands(blocks: int) -> str:
    return ",".join(["=&f"] * (4 * blocks) + ["r"] * (2 * blocks))


_SUMS_BF16_8: gl.constexpr = gl.constexpr(_sums_ptx(8, True))
_SUMS_BF16_16: gl.constexpr = gl.constexpr(_sums_ptx(16, True))
_SUMS_FP16_8: gl.constexpr = gl.constexpr(_sums_ptx(8, False))
_SUMS_FP16_16: gl.constexpr = gl.constexpr(_sums_ptx(16, False))
_SUMS_OPERANDS_8: gl.constexpr = gl.constexpr(_sums_operands(8))
_SUMS_OPERANDS_16: gl.constexpr = gl.constexpr(_sums_operands(16))


@gluon.jit
def sums(dsT):
    """Sums of dSᵀ (64, ROWS), per key (64, 4 copies) and per row and warp (4 · ROWS,), in the order of summed_row."""
    ROWS: gl.constexpr = dsT.shape[1]
    LEFT: gl.constexpr = ROWS // 64
    if ROWS == 64:
        PTX: gl.constexpr = _SUMS_BF16_8 if dsT.dtype == gl.bfloat16 else _SUMS_FP16_8
        OPERANDS: gl.constexpr = _SUMS_OPERANDS_8
    else:
        PTX: gl.constexpr = _SUMS_BF16_16 if dsT.dtype == gl.bfloat16 else _SUMS_FP16_16
        OPERANDS: gl.constexpr = _SUMS_OPERANDS_16
    x = gl.inline_asm_elementwise(PTX, OPERANDS, [dsT], dtype=gl.float32, is_pure=False, pack=ROWS // 2)
    # (warp, first or second key, lane / 4, blocks: 2 · 2 · 2 · LEFT, lane % 4, c); results are in the first LEFT blocks
    x = gl.reshape(x, [4, 2, 8, 2, 2, 2, LEFT, 4, 2])
    x, _ = gl.split(gl.permute(x, [0, 2, 6, 7, 8, 1, 5, 4, 3]))
    x, _ = gl.split(x)
    x, _ = gl.split(x)
    per_row, per_key = gl.split(x)
    # (warp, lane / 4, LEFT, lane % 4, c), where c is which of the keys
    if LEFT == 2:
        per_key, _ = gl.split(gl.permute(per_key, [0, 1, 3, 4, 2]))
    per_key = gl.permute(gl.reshape(per_key, [4, 8, 4, 2]), [0, 3, 1, 2])
    return gl.reshape(per_key, [SHARE, 4]), gl.reshape(per_row, [4 * ROWS])


@gluon.jit
def summed_row(x):
    """Which row of the tile an entry of sums's second result is of: (warp, lane / 4, LEFT, lane % 4, c) in order."""
    LEFT: gl.constexpr = x.shape[0] // 256
    i = gl.arange(0, x.shape[0], x.type.layout)
    return i // (8 * LEFT) % 8 + i % 2 * 8 + i // 2 % 4 * 16 + i // 8 % LEFT * 64
