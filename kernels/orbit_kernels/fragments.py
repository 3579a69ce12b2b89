"""Stored weights to matrix-unit operands, in Triton registers: the device half of `orbit_kernels.decode`.

The grouped kernels multiply with the weights as the left operand, which the matrix unit reads from registers. A 4-bit
word decodes to the registers that a thread already owns if the columns of every 32-group are taken in the order of
`fragment_order`; the stored bytes stay as they are, and the activations are brought into that order where they are
written anyway. The other direction (input gradients) needs no order: it undoes its own at the store.

Each function has two bodies. ASM does what ptxas would not find: bit patterns as BF16 numbers, two at a time. The other
is plain Triton, for the interpreter and as the check of the first.

Shape letters: B rows of weights in a tile, W 32-bit words of eight codes, U 16-bit units of four codes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# INT4: the nibble ORed onto the BF16 number 128 is 128 + q exactly; minus 136 it is q - 8.
# E2M1: sign to bit 15, exponent and mantissa to bits 8..6 make a BF16 number 2^126 times too small, zero and subnormal
# included; the product with 2^126 is exact.
_MASKED_OR, _PTX = "0xea", "\n "


def _int4_pair(out: str, word: str, nibble: int) -> str:
    shift = f"shr.b32 a, {word}, {4 * nibble}; " if nibble else f"mov.b32 a, {word}; "
    return shift + f"lop3.b32 {out}, a, 0x000f000f, 0x43004300, {_MASKED_OR}; sub.rn.bf16x2 {out}, {out}, z;"


def _e2m1_pair(out: str, word: str, nibble: int) -> str:
    """One product puts the sign and the magnitude in their places, and copies of them where the mask is zero."""
    shift = f"shr.b32 b, {word}, 8;" if nibble >= 2 else f"mov.b32 b, {word};"
    mask, factor = (("0x000f000f", 4096 + 64), ("0x00f000f0", 256 + 4))[nibble % 2]
    place = f"and.b32 a, b, {mask}; mul.lo.u32 a, a, {factor}; and.b32 {out}, a, 0x81c081c0;"
    return f"{shift} {place} mul.rn.bf16x2 {out}, {out}, z;"


def _asm(pair, constant: str, load: str, outputs: str) -> tl.constexpr:
    """Eight weights of one 32-bit word v, whose halves are decoded side by side."""
    pairs = _PTX.join(pair(f"t{nibble}", "v", nibble) for nibble in range(4))
    return tl.constexpr(f"{{ .reg .b32 a,b,v,z,t0,t1,t2,t3; mov.b32 z, {constant}; {load}\n {pairs}\n {outputs} }}")


def _outputs(step: int, second: int) -> str:
    return " ".join(f"mov.b32 {{${step * p}, ${step * p + second}}}, t{p};" for p in range(4))


_WORD, _ROWS = ("mov.b32 v, $8;", _outputs(1, 4)), ("mov.b32 v, {$8, $9};", _outputs(2, 1))
INT4_WORD = _asm(_int4_pair, "0x43084308", *_WORD)
INT4_ROWS = _asm(_int4_pair, "0x43084308", *_ROWS)
E2M1_WORD = _asm(_e2m1_pair, "0x7e807e80", *_WORD)
E2M1_ROWS = _asm(_e2m1_pair, "0x7e807e80", *_ROWS)
_EIGHT = tl.constexpr((tl.bfloat16,) * 8)


def fragment_order(columns: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """int64 [columns]: position s of a row in fragment order holds column fragment_order(...)[s]."""
    slot = torch.arange(columns, device=device)
    inside = slot % 32
    return slot - inside + 8 * (inside % 8 // 2) + inside // 8 + 4 * (inside % 2)


@triton.jit
def in_fragment_order(columns):
    """[B, K] with the columns of every 32-group in `fragment_order`: column 8 t + 4 j + c goes to 8 c + 2 t + j."""
    B: tl.constexpr = columns.shape[0]
    K: tl.constexpr = columns.shape[1]
    return columns.reshape(B, K // 32, 4, 2, 4).permute(0, 1, 4, 2, 3).reshape(B, K)


@triton.jit
def settled(acc, ASM: tl.constexpr):
    """acc itself, and a use of it, so that Triton waits for the product before the next operand is made.

    Without it Triton 3.6 leaves products in flight while the registers that they read are given to the next operand:
    wrong numbers, depending on timing (seen on an H200 at tiles of 128 tokens, and in the assembly).
    """
    if ASM:
        acc = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [acc], dtype=tl.float32, is_pure=False, pack=1)
    return acc


@triton.jit
def beside(values, product, ASM: tl.constexpr):
    """float32 values themselves, in the registers' order of `product`.

    Else Triton computes what follows from them twice, in the order of their load too, and runs out of registers.
    """
    if ASM:
        text: tl.constexpr = "mov.b32 $0, $1;"
        values = tl.inline_asm_elementwise(text, "=r,r,r", [values, product], dtype=tl.float32, is_pure=True, pack=1)
    return values


@triton.jit
def _nibble(word, position: tl.constexpr, FMT: tl.constexpr):
    code = (word >> (4 * position)) & 15
    if FMT == "int4":
        number = (code - 8).to(tl.float32)
    else:
        magnitude = (code & 7).to(tl.float32)
        value = tl.where(magnitude < 4, magnitude * 0.5, tl.where(magnitude < 6, magnitude - 2, magnitude * 2 - 8))
        number = tl.where(code >= 8, -value, value)
    return number


@triton.jit
def _join8(r0, r1, r2, r3, r4, r5, r6, r7):
    """[..., i0, i1, i2] of eight tensors i = i0 + 2 i1 + 4 i2."""
    return tl.join(tl.join(tl.join(r0, r1), tl.join(r2, r3)), tl.join(tl.join(r4, r5), tl.join(r6, r7)))


@triton.jit
def nibbles_along_rows(words, FMT: tl.constexpr, ASM: tl.constexpr):
    """Unscaled weights [B, 8 W] in fragment order from words [B, W] int32; BF16, without ASM float32."""
    if ASM:
        TEXT: tl.constexpr = INT4_WORD if FMT == "int4" else E2M1_WORD
        r0, r1, r2, r3, r4, r5, r6, r7 = tl.inline_asm_elementwise(
            asm=TEXT, constraints="=h,=h,=h,=h,=h,=h,=h,=h,r", args=[words], dtype=_EIGHT, is_pure=True, pack=1
        )
    else:
        r0, r1, r2, r3 = _nibble(words, 0, FMT), _nibble(words, 1, FMT), _nibble(words, 2, FMT), _nibble(words, 3, FMT)
        r4, r5, r6, r7 = _nibble(words, 4, FMT), _nibble(words, 5, FMT), _nibble(words, 6, FMT), _nibble(words, 7, FMT)
    joined = _join8(r0, r1, r2, r3, r4, r5, r6, r7)  # [B, W, i0, i1, i2]
    B: tl.constexpr = words.shape[0]
    W: tl.constexpr = words.shape[1]
    split = joined.reshape(B, W // 4, 4, 2, 2, 2)  # [B, group of 32, word t, i0, i1, i2]; column 8 t + i
    return split.permute(0, 1, 4, 3, 2, 5).reshape(B, W * 8)  # position 8 (i0 + 2 i1) + 2 t + i2


@triton.jit
def nibbles_across_rows(units, FMT: tl.constexpr, ASM: tl.constexpr):
    """Unscaled W^T as [2, U/8, 2, 8, B] from units [B, U] int16; BF16, without ASM float32.

    Entry [p1, w, p0, g, n] is column 32 w + 4 g + 2 p1 + p0 of row n, so that entry w spans one 32-group.
    """
    B: tl.constexpr = units.shape[0]
    U: tl.constexpr = units.shape[1]
    even, odd = tl.split(units.reshape(B // 2, 2, U).permute(0, 2, 1))  # rows 2 n2 and 2 n2 + 1, [B/2, U]
    if ASM:
        TEXT: tl.constexpr = INT4_ROWS if FMT == "int4" else E2M1_ROWS
        r0, r1, r2, r3, r4, r5, r6, r7 = tl.inline_asm_elementwise(
            asm=TEXT, constraints="=h,=h,=h,=h,=h,=h,=h,=h,h,h", args=[even, odd], dtype=_EIGHT, is_pure=True, pack=1
        )
    else:
        even, odd = even.to(tl.int32), odd.to(tl.int32)
        r0, r2, r4, r6 = _nibble(even, 0, FMT), _nibble(even, 1, FMT), _nibble(even, 2, FMT), _nibble(even, 3, FMT)
        r1, r3, r5, r7 = _nibble(odd, 0, FMT), _nibble(odd, 1, FMT), _nibble(odd, 2, FMT), _nibble(odd, 3, FMT)
    joined = _join8(r0, r1, r2, r3, r4, r5, r6, r7)  # [B/2, U, row of the pair, p0, p1]
    split = joined.reshape(B // 2, U // 8, 8, 2, 2, 2)
    return split.permute(5, 1, 4, 2, 0, 3).reshape(2, U // 8, 2, 8, B)


@triton.jit
def columns_in_order(columns):
    """Undo the row order of `nibbles_across_rows` in a product: [4 U, M] -> [M, 4 U] with columns ascending."""
    K: tl.constexpr = columns.shape[0]
    M: tl.constexpr = columns.shape[1]
    return columns.reshape(2, K // 32, 2, 8, M).permute(4, 1, 3, 0, 2).reshape(M, K)


@triton.jit
def column_of_row(row, K: tl.constexpr):
    """Which column of W the entry `row` of `nibbles_across_rows`, read as [K, B], comes from."""
    return row % (K // 2) // 16 * 32 + row % 8 * 4 + row // (K // 2) * 2 + row // 8 % 2


@triton.jit
def group_scale(stored, FMT: tl.constexpr, ASM: tl.constexpr):
    """Group scales as BF16 numbers (float32 without ASM) from their stored form; NVFP4 leaves out the global scale."""
    if FMT == "mxfp4":
        # The exponent of BF16; byte 0 is 2^-127, a subnormal, and 255, NaN by the standard, comes out as infinity.
        value = tl.maximum(stored.to(tl.int16) << 7, 0x0040).to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif FMT == "nvfp4":
        value = fp8_number(stored)
    else:
        value = stored
    return value.to(tl.bfloat16 if ASM else tl.float32)


@triton.jit
def fp8_number(byte):
    """float32 of an E4M3 byte."""
    return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
