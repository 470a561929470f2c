// Single PTX instructions, each small enough to check against the PTX manual. wgmma has a file of its own.
#pragma once

#include <cstdint>

namespace ta::cuda {

// c += a b with a [16, 32] and b [32, 8] of bytes, c [16, 8] int32. With lane = 4 r + i: a[0], a[2] are row r, columns
// 4i..4i+3 and 16+4i..; a[1], a[3] row r + 8; b0, b1 are column r, rows 4i.. and 16+4i..; c[0], c[1] are row r, columns 2i and
// 2i+1, c[2], c[3] row r + 8. Inputs and outputs are separate operands: a c of zeros then costs no register.
#define TA_MMA_16832(NAME, TYPES)                                                                                           \
    __device__ __forceinline__ void NAME(int(&c)[4], const uint32_t(&a)[4], uint32_t b0, uint32_t b1) {                     \
        int d[4];                                                                                                           \
        asm("mma.sync.aligned.m16n8k32.row.col.s32." TYPES ".s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};" \
            : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])                                                                \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));    \
        c[0] = d[0], c[1] = d[1], c[2] = d[2], c[3] = d[3];                                                                 \
    }
TA_MMA_16832(mma_u8_s8, "u8.s8")
TA_MMA_16832(mma_s8_s8, "s8.s8")
TA_MMA_16832(mma_u8_u8, "u8.u8")
TA_MMA_16832(mma_s8_u8, "s8.u8")
#undef TA_MMA_16832
// The same with 16 columns of a and rows of b.
__device__ __forceinline__ void mma_u8_u8_k16(int32_t (&c)[4], const uint32_t (&a)[2], uint32_t b) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.u8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(b));
}

// c += a b with a [16, 16] and b [16, 8] of F16, c [16, 8] fp32. With lane = 4 r + i: a[0] is row r, columns 2i and 2i + 1, a[1] row
// r + 8, a[2], a[3] the same 8 columns further on; b0, b1 are column r, rows 2i, 2i + 1 and 8 + 2i, 9 + 2i; c[0], c[1] are row r,
// columns 2i and 2i + 1, c[2], c[3] row r + 8.
__device__ __forceinline__ void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Four 8 x 8 matrices of 16 bits, transposed: lane 8 n + r says where row r of the n-th is; lane 4 r + i gets of each, in w[n], column
// r, rows 2i and 2i + 1.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&w)[4], uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(from)
                 : "memory");
}

// Bytes of lo (0..3) and hi (4..7) by the nibbles of the selector, the lowest first; with 8 added to a nibble, that byte's sign
// in all bits.
template <uint32_t kSelector>
__device__ __forceinline__ uint32_t permute_signed(uint32_t lo, uint32_t hi) {
    uint32_t r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(lo), "r"(hi), "n"(kSelector));
    return r;
}

__device__ __forceinline__ uint32_t smem_address(const void* p) {
    return uint32_t(__cvta_generic_to_shared(p));
}

// 2^x; the error is at most 2 ulp, denormal results are 0.
__device__ __forceinline__ float ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ------------------------------------------------------------------------------------------------- copies to shared memory

__device__ __forceinline__ void prefetch_l2(const void* p) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// 16 bytes; complete after cp_async_wait.
__device__ __forceinline__ void cp_async_16(uint32_t smem, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem), "l"(global) : "memory");
}
__device__ __forceinline__ void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most N of the calling thread's groups are outstanding.
template <int N>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
// Addresses and size are multiples of 16.
__device__ __forceinline__ void bulk_copy(uint32_t smem, const void* global, uint32_t bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem),
                 "l"(global), "r"(bytes), "r"(barrier)
                 : "memory");
}

// Programmatic dependent launch: waits until the grids before this one are complete and their writes visible.
__device__ __forceinline__ void grid_dependency_wait() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
// Allows the next grid to be scheduled once every CTA has said so or ended.
__device__ __forceinline__ void grid_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

#else

__device__ __forceinline__ void grid_dependency_wait() {}
__device__ __forceinline__ void grid_launch_dependents() {}

#endif

}  // namespace ta::cuda
