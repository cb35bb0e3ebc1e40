// Sixteen floats at a time, for the two instruction sets that we build for: AVX-512-BF16 and AVX2+FMA.
//
// Every operation is spelled out (no contraction, no reassociation), so one lane's arithmetic never depends on how the
// code around it was compiled.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace pagefleet {

constexpr int kLanes = 16;
constexpr float kLog2E = 1.44269504088896340736f;

struct Bf16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }

inline float to_float(Bf16 x) {
    uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

// Round to nearest even; NaN stays NaN.
inline Bf16 to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
    return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

// Bits of a lane mask for the half-open lane range [low, high), clamped to the register.
inline uint32_t lane_mask(int low, int high) {
    low = low < 0 ? 0 : (low > kLanes ? kLanes : low);
    high = high < low ? low : (high > kLanes ? kLanes : high);
    return ((1u << high) - 1u) & ~((1u << low) - 1u);
}

#if defined(__AVX512F__)

struct Vec {
    __m512 v;
};

inline Vec set1(float x) { return {_mm512_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Vec load(const Bf16* p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// Both return b when either is NaN.
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec round_even(Vec a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// Lanes in which a >= b; lanes that hold NaN.
inline uint32_t at_least(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
inline uint32_t nan_lanes(Vec a) { return _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q); }
inline Vec select(uint32_t mask, Vec yes, Vec no) {
    return {_mm512_mask_blend_ps(static_cast<__mmask16>(mask), no.v, yes.v)};
}
// a * 2^n, n integral.
constexpr float kExp2Lowest = -200.0f;
inline Vec scale2(Vec a, Vec n) { return {_mm512_scalef_ps(a.v, n.v)}; }

struct Half {
    __m256 v;
};
inline Half low_half(Vec a) { return {_mm512_castps512_ps256(a.v)}; }
inline Half high_half(Vec a) {
    return {_mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1))};
}

#else

struct Vec {
    __m256 lo, hi;
};

inline Vec set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline Vec load(const Bf16* p) {
    auto widen = [](const Bf16* q) {
        __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q)));
        return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
    };
    return {widen(p), widen(p + 8)};
}
inline void store(float* p, Vec a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline Vec fma(Vec a, Vec b, Vec c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
// Both return b when either is NaN.
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline Vec round_even(Vec a) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(a.lo, mode), _mm256_round_ps(a.hi, mode)};
}
// Lanes in which a >= b; lanes that hold NaN.
inline uint32_t at_least(Vec a, Vec b) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ)) |
                                 _mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ)) << 8);
}
inline uint32_t nan_lanes(Vec a) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q)) |
                                 _mm256_movemask_ps(_mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q)) << 8);
}
inline Vec select(uint32_t mask, Vec yes, Vec no) {
    auto spread = [](uint32_t bits) {
        const __m256i lanes = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
        __m256i hit = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), lanes);
        return _mm256_castsi256_ps(_mm256_cmpeq_epi32(hit, lanes));
    };
    return {_mm256_blendv_ps(no.lo, yes.lo, spread(mask & 0xffu)),
            _mm256_blendv_ps(no.hi, yes.hi, spread(mask >> 8))};
}
// a * 2^n, n integral in [-127, 128]; -127 gives zero, 128 infinity.
constexpr float kExp2Lowest = -127.0f;
inline Vec scale2(Vec a, Vec n) {
    auto power = [](__m256 x) {
        __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127));
        return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
    };
    return {_mm256_mul_ps(a.lo, power(n.lo)), _mm256_mul_ps(a.hi, power(n.hi))};
}

struct Half {
    __m256 v;
};
inline Half low_half(Vec a) { return {a.lo}; }
inline Half high_half(Vec a) { return {a.hi}; }

#endif

// The trees below are the same on both instruction sets.
inline float reduce_add(Vec a) {
    __m256 eight = _mm256_add_ps(low_half(a).v, high_half(a).v);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

inline float reduce_max(Vec a) {
    __m256 eight = _mm256_max_ps(low_half(a).v, high_half(a).v);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

#if defined(__AVX512BF16__)
inline void store(Bf16* p, Vec a) {
    __m256bh packed = _mm512_cvtneps_pbh(a.v);
    std::memcpy(p, &packed, sizeof packed);
}
#else
// Eight floats as 32-bit words with the rounded bf16 below; see to_bf16.
inline __m256i round_to_bf16(__m256 x) {
    __m256i bits = _mm256_castps_si256(x);
    __m256i even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(even, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
}
inline void store(Bf16* p, Vec a) {
    __m256i packed = _mm256_packus_epi32(round_to_bf16(low_half(a).v), round_to_bf16(high_half(a).v));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
#endif

// The first n (0 < n <= 16) elements; lanes past them read as zero and are not stored.
template <class T>
inline Vec load_part(const T* p, int n) {
    if (n == kLanes) return load(p);
    T padded[kLanes] = {};
    std::memcpy(padded, p, static_cast<size_t>(n) * sizeof(T));
    return load(padded);
}

template <class T>
inline void store_part(T* p, Vec a, int n) {
    if (n == kLanes) return store(p, a);
    T padded[kLanes];
    store(padded, a);
    std::memcpy(p, padded, static_cast<size_t>(n) * sizeof(T));
}

// 2^x: relative error below 2e-7, exact at 0, NaN for NaN; results below 2^-126 come out as zero or subnormal. The
// polynomial is a minimax fit of 2^f on [-0.5, 0.5] with the constant held at 1 (error 9e-8).
inline Vec exp2(Vec x) {
    x = min(set1(128.0f), max(set1(kExp2Lowest), x));
    Vec n = round_even(x);
    Vec f = x - n;
    Vec p = set1(0.0013264726407049786f);
    p = fma(p, f, set1(0.009671513099652322f));
    p = fma(p, f, set1(0.0555073374529817f));
    p = fma(p, f, set1(0.24022242075353656f));
    p = fma(p, f, set1(0.693146977598847f));
    p = fma(p, f, set1(1.0f));
    return scale2(p, n);
}

// tanh(x) = 1 - 2 / (e^2x + 1): absolute error about 1e-7.
inline Vec tanh(Vec x) {
    Vec e = exp2(x * set1(2.0f * kLog2E));
    return set1(1.0f) - set1(2.0f) / (e + set1(1.0f));
}

}  // namespace pagefleet
