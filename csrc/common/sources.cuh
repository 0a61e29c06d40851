// Sources: how elements that are not read are computed. lpq/operations/source.py has the definition of each in plain
// PyTorch, which the structs equal to the bit: they round where PyTorch rounds, and fuse a product with a sum where nvcc does so in
// PyTorch's own operators. (This source is compiled to fuse none by itself.)
//
// A source is a struct that has
//   MATRICES   how many matrices it reads, which are as large as the outputs,
//   OF_ROW     how many vectors with a number for each row, in fp32,
//   OF_COL     how many with a number for each column, in the dtype of the matrices,
//   OUTPUTS    how many matrices it makes,
//   HALVES     how many of the first matrices, read and made, are halves of one that is twice as wide, and
//   compute(x, of_row, of_col, y)
// which makes an element of each output of an element of each matrix, and of the numbers of its row and its column. All are
// given as fp32; what it makes is rounded afterwards.
#pragma once
#include "tile.cuh"

template <int MATRICES_, int OUTPUTS_, int OF_ROW_ = 0, int OF_COL_ = 0>
struct Computing {
    static constexpr int MATRICES = MATRICES_, OUTPUTS = OUTPUTS_, OF_ROW = OF_ROW_, OF_COL = OF_COL_, HALVES = 0;
};

namespace sources {

// The nearest number that an element can be.
__device__ __forceinline__ float nearest(float x) { return PER_WORD == 1 ? x : element_value(rounded(x, 0.0f)); }

// Activation functions, as torch computes them and what their gradients are made of, of one element.

struct AnySilu {
    const float x, below;
    __device__ __forceinline__ AnySilu(float x) : x(x), below(1.0f + expf(-x)) {}
    __device__ __forceinline__ float value() const { return x / below; }
    __device__ __forceinline__ float backward(float dy) const {
        const float sigmoid = __frcp_rn(below);
        return dy * sigmoid * fmaf(x, 1.0f - sigmoid, 1.0f);
    }
};

// The same for an x that is no NaN and more than -34, with both quotients from one reciprocal and without a branch, by which the
// elements of a thread would wait for each other. Both quotients are rounded correctly: x / below by Markstein's theorem where the
// rest has all its bits. Elsewhere the divisor is 2 or 1, and the product is exact or what a division by 2 rounds to.
struct Silu {
    const float x;
    float sigmoid, quotient;
    __device__ __forceinline__ Silu(float x) : x(x) {
        const float below = 1.0f + expf(-x);  // less than 2^50
        float near;
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(below));
        sigmoid = fmaf(near, fmaf(-below, near, 1.0f), near);
        const float product = x * sigmoid, rest = fmaf(-product, below, x);
        quotient = fabsf(x) > 0x1p-64f && x < 0x1p64f ? fmaf(rest, sigmoid, product) : product;
    }
    __device__ __forceinline__ float value() const { return quotient; }
    __device__ __forceinline__ float backward(float dy) const {
        return dy * sigmoid * fmaf(x, 1.0f - sigmoid, 1.0f);
    }
};

// A polynomial of x by its coefficients, the highest first.
template <int N>
__device__ __forceinline__ float polynomial(float x, const float (&coefficients)[N]) {
    float y = coefficients[0];
#pragma unroll
    for (int i = 1; i < N; ++i) y = fmaf(y, x, coefficients[i]);
    return y;
}

// erff, to the bit. That one chooses each coefficient, of a polynomial near 0 and one elsewhere, and a GPU takes twice as long to
// choose as to multiply and add. Here both are computed.
__device__ __forceinline__ float erf_of_both(float x) {
    constexpr float NEAR[] = {
        8.48349446e-05f, -0.000821309164f, 0.00521348882f, -0.0268687736f, 0.112840049f, -0.376126647f, 0.128379151f
    };
    constexpr float FAR[] = {
        0.000112198715f, -0.00132752524f, 0.00839653518f, -0.0402465835f, 0.159504309f, 0.912917674f, 0.62906003f
    };
    const float size = fabsf(x), exponent = fmaf(polynomial(size, FAR), -size, -size);
    float near = fmaf(polynomial(x * x, NEAR), x, x), power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
    asm volatile("" : "+f"(near));  // else it is computed behind a branch, by which the elements of a thread wait for each other
    return size >= 1.00295997f ? copysignf(1.0f - power, x) : near;
}

// With erf.
struct Gelu {
    const float x, above;
    __device__ __forceinline__ Gelu(float x) : x(x), above(1.0f + erf_of_both(x * 0.707106781186547524f)) {}
    __device__ __forceinline__ float value() const { return x * 0.5f * above; }
    __device__ __forceinline__ float backward(float dy) const {
        const float density = expf(-0.5f * x * x) * 0.398942280401432678f;
        return dy * fmaf(0.5f, above, x * density);
    }
};

struct GeluTanh {
    static constexpr float BETA = 0.797884560802865356f, KAPPA = 0.044715f;
    const float x, square, tanh;
    __device__ __forceinline__ GeluTanh(float x)
        : x(x), square(x * x), tanh(tanhf(BETA * fmaf(KAPPA, square * x, x))) {}
    __device__ __forceinline__ float value() const { return 0.5f * x * (1.0f + tanh); }
    __device__ __forceinline__ float backward(float dy) const {
        const float inner = BETA * fmaf(3.0f * KAPPA, square, 1.0f);
        return dy * fmaf(0.5f, 1.0f + tanh, 0.5f * x * fmaf(-tanh, tanh, 1.0f) * inner);
    }
};

// The same with each operation rounded, as a module makes it of PyTorch's operators.
struct NewGelu {
    static constexpr float BETA = 0.797884560802865356f, KAPPA = 0.044715f;
    const float x, square, tanh;
    __device__ __forceinline__ NewGelu(float x)
        : x(x), square(nearest(x * x)),
          tanh(nearest(tanhf(nearest(BETA * nearest(x + nearest(KAPPA * nearest(square * x))))))) {}
    __device__ __forceinline__ float half() const { return nearest(0.5f * x); }
    __device__ __forceinline__ float above() const { return nearest(1.0f + tanh); }
    __device__ __forceinline__ float value() const { return half() * above(); }
    __device__ __forceinline__ float backward(float dy) const {
        const float below = nearest(1.0f - nearest(tanh * tanh));  // torch's gradient of tanh rounds so on a GPU
        const float inner = nearest(nearest(nearest(dy * half()) * below) * BETA);
        const float of_cube = nearest(nearest(inner * KAPPA) * nearest(3.0f * square));
        return nearest(inner + of_cube) + nearest(nearest(dy * above()) * 0.5f);
    }
};

struct Relu {
    const float x;
    __device__ __forceinline__ Relu(float x) : x(x) {}
    __device__ __forceinline__ float value() const { return x != x ? x : fmaxf(x, 0.0f); }
    __device__ __forceinline__ float backward(float dy) const { return x <= 0.0f ? 0.0f : dy; }
};

// up -> its activation.
template <class Activation>
struct Alone : Computing<1, 1> {
    static __device__ __forceinline__ void compute(const float* x, const float*, const float*, float* y) {
        y[0] = Activation(x[0]).value();
    }
};

// up, the gradient of what Alone makes -> the gradient of up, and what it makes.
template <class Activation>
struct AloneBackward : Computing<2, 2> {
    static __device__ __forceinline__ void compute(const float* x, const float*, const float*, float* y) {
        const Activation activation(x[0]);
        y[0] = activation.backward(x[1]);
        y[1] = activation.value();
    }
};

// gate, up -> the activation of gate times up.
template <class Activation>
struct Gated : Computing<2, 1> {
    static __device__ __forceinline__ void compute(const float* x, const float*, const float*, float* y) {
        y[0] = nearest(Activation(x[0]).value()) * x[1];
    }
};

// gate, up, the gradient of what Gated makes -> gradients of gate and of up, and what it makes.
template <class Activation>
struct GatedBackward : Computing<3, 3> {
    static __device__ __forceinline__ void compute(const float* x, const float*, const float*, float* y) {
        const Activation activation(x[0]);
        const float active = nearest(activation.value()), up = x[1], dy = x[2];
        y[0] = activation.backward(nearest(dy * up));
        y[1] = dy * active;
        y[2] = active * up;
    }
};

// The same where gate and up, and their gradients, are halves of one matrix.
template <class Gated>
struct Halves : Gated {
    static constexpr int HALVES = 2;
};

// Where a source is not meant for every x, the elements for which another one computes.
template <class Source>
struct Rare {
    typedef Source Other;
    static __device__ __forceinline__ bool is(const float*) { return false; }
};
template <template <class> class Of>
struct Rare<Of<Silu>> {
    typedef Of<AnySilu> Other;
    static __device__ __forceinline__ bool is(const float* x) { return !(x[0] > -34.0f); }
};
template <class Gated>
struct Rare<Halves<Gated>> : Rare<Gated> {};

// x; the factor of its row -> the normalized element times the weight of its column.
template <bool OFFSET, bool ROUNDS>
struct RmsNorm : Computing<1, 1, 1, 1> {
    static __device__ __forceinline__ void compute(const float* x, const float* of_row, const float* of_col, float* y) {
        const float normed = x[0] * of_row[0], weight = OFFSET ? 1.0f + of_col[0] : of_col[0];
        y[0] = (ROUNDS ? nearest(normed) : normed) * weight;
    }
};

// x; the mean and the factor of its row; the weight of its column, and the bias.
template <bool BIASED>
struct LayerNorm : Computing<1, 1, 2, BIASED ? 2 : 1> {
    static __device__ __forceinline__ void compute(const float* x, const float* of_row, const float* of_col, float* y) {
        const float normed = (x[0] - of_row[0]) * of_row[1];
        y[0] = BIASED ? fmaf(normed, of_col[0], of_col[BIASED]) : normed * of_col[0];
    }
};

}  // namespace sources
