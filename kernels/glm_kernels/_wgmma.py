"""Text of the ``wgmma`` wrappers that device sources use.

Each shape of the instruction lists all its accumulator registers by name, up to 128 of them. The text
is produced for the shapes that a kernel asks for, so that sources stay readable.
"""


def _registers(first: int, count: int) -> str:
    return "{" + ", ".join(f"%{i}" for i in range(first, first + count)) + "}"


def _outputs(count: int) -> str:
    return ", ".join(f'"+f"(d[{i}])' for i in range(count))


def wgmma_fp8(n: int) -> str:
    """``wgmma_fp8_n{n}(float* d, uint64_t a, uint64_t b, int accumulate)``.

    D[64, n] (+)= A[64, 32] @ B[n, 32].T on e4m3, both in shared memory and K-major.
    """
    count = n // 2
    return f"""
__device__ __forceinline__ void wgmma_fp8_n{n}(float (&d)[{count}], uint64_t a, uint64_t b,
                                              int accumulate) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"
    "wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3 {_registers(0, count)}, "
    "%{count}, %{count + 1}, p, 1, 1;\\n}}\\n"
    : {_outputs(count)}
    : "l"(a), "l"(b), "r"(accumulate));
}}
"""


def wgmma_half(n: int, dtype: str, a_in_registers: bool, b_transposed: bool) -> str:
    """Wrapper for 16-bit operands, K = 16.

    ``wgmma_{rs|ss}_n{n}(float* d, a, uint64_t b, int accumulate)`` with ``a`` four registers (rs) or a
    descriptor of a K-major tile (ss). ``dtype`` is ``f16`` or ``bf16``. ``b_transposed`` reads B with
    its N dimension contiguous.
    """
    count = n // 2
    kind = "rs" if a_in_registers else "ss"
    a_count = 4 if a_in_registers else 1
    a_type = "const uint32_t* a" if a_in_registers else "uint64_t a"
    a_text = _registers(count, 4) if a_in_registers else f"%{count}"
    a_inputs = '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])' if a_in_registers else '"l"(a)'
    flags = f"1, 1, {int(b_transposed)}" if a_in_registers else f"1, 1, 0, {int(b_transposed)}"
    b_at = count + a_count
    return f"""
__device__ __forceinline__ void wgmma_{kind}_n{n}(float (&d)[{count}], {a_type}, uint64_t b,
                                                  int accumulate) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{b_at + 1}, 0;\\n"
    "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{dtype}.{dtype} {_registers(0, count)}, "
    "{a_text}, %{b_at}, p, {flags};\\n}}\\n"
    : {_outputs(count)}
    : {a_inputs}, "l"(b), "r"(accumulate));
}}
"""
