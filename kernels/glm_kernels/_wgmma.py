"""Text of the ``wgmma`` wrappers that device sources use. A and B are low words of descriptors.

Each shape of the instruction lists all its accumulator registers by name, up to 128 of them. The
text is produced for the shapes that a kernel asks for, so that sources stay readable.
"""


def _registers(first: int, count: int) -> str:
    return "{" + ", ".join(f"%{i}" for i in range(first, first + count)) + "}"


def _outputs(count: int) -> str:
    return ", ".join(f'"+f"(d[{i}])' for i in range(count))


def wgmma_fp8(n: int) -> str:
    """``wgmma_fp8_n{n}(float* d, uint32_t a, uint32_t b, int accumulate)``.

    D[64, n] (+)= A[64, 32] @ B[n, 32].T on e4m3, both in shared memory and K-major.
    """
    count = n // 2
    return f"""
__device__ __forceinline__ void wgmma_fp8_n{n}(float (&d)[{count}], uint32_t a, uint32_t b,
                                              int accumulate) {{
  asm volatile("{{\\n.reg .pred p;\\n.reg .b64 da, db;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"
    "mov.b64 da, {{%{count}, %{count + 3}}};\\nmov.b64 db, {{%{count + 1}, %{count + 4}}};\\n"
    "wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3 {_registers(0, count)}, "
    "da, db, p, 1, 1;\\n}}\\n"
    : {_outputs(count)}
    : "r"(a), "r"(b), "r"(accumulate), "n"(kDescriptorHigh), "n"(kDescriptorHigh));
}}
"""


def wgmma_half(n: int, dtype: str, b_transposed: bool) -> str:
    """``wgmma_ss_n{n}(float* d, uint32_t a, uint32_t b, int accumulate)``.

    D[64, n] (+)= A[64, 16] @ B[n, 16].T, both in shared memory, A K-major. ``dtype`` is ``f16`` or
    ``bf16``. ``b_transposed`` reads B with its N dimension contiguous.
    """
    count = n // 2
    return f"""
__device__ __forceinline__ void wgmma_ss_n{n}(float (&d)[{count}], uint32_t a, uint32_t b,
                                              int accumulate) {{
  asm volatile("{{\\n.reg .pred p;\\n.reg .b64 da, db;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"
    "mov.b64 da, {{%{count}, %{count + 3}}};\\nmov.b64 db, {{%{count + 1}, %{count + 4}}};\\n"
    "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{dtype}.{dtype} {_registers(0, count)}, "
    "da, db, p, 1, 1, 0, {int(b_transposed)};\\n}}\\n"
    : {_outputs(count)}
    : "r"(a), "r"(b), "r"(accumulate), "n"(kDescriptorHigh), "n"(kDescriptorHigh));
}}
"""


def wgmma_half_registers(n: int, dtype: str, b_transposed: bool) -> str:
    """``wgmma_rs_{dtype}_n{n}[_t](float* d, uint32_t a0, ..., a3, uint32_t b, int accumulate)``.

    As ``wgmma_half``, with A in registers: ``_t`` reads B with its N dimension contiguous.
    """
    count = n // 2
    name = f"wgmma_rs_{dtype}_n{n}{'_t' if b_transposed else ''}"
    return f"""
__device__ __forceinline__ void {name}(float (&d)[{count}], uint32_t a0, uint32_t a1, uint32_t a2,
                                       uint32_t a3, uint32_t b, int accumulate) {{
  asm volatile("{{\\n.reg .pred p;\\n.reg .b64 db;\\nsetp.ne.b32 p, %{count + 5}, 0;\\n"
    "mov.b64 db, {{%{count + 4}, %{count + 6}}};\\n"
    "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{dtype}.{dtype} {_registers(0, count)}, "
    "{_registers(count, 4)}, db, p, 1, 1, {int(b_transposed)};\\n}}\\n"
    : {_outputs(count)}
    : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b), "r"(accumulate), "n"(kDescriptorHigh));
}}
"""
