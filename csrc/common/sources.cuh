// Sources: how elements that are not read are computed. lpq/operations/source.py has the definition of each in plain
// PyTorch, which these equal to the bit: they round where it rounds, and fuse a product with a sum where nvcc fuses those of
// PyTorch's own operators. (What is compiled here fuses none by itself.)
//
// A source is a struct that has
//   MATRICES   how many matrices it reads, which are as large as the outputs and have their dtype,
//   OF_ROW     how many vectors with a number for each row, in fp32,
//   OF_COL     how many with a number for each column, in the dtype of the matrices,
//   OUTPUTS    how many matrices it makes, and
//   compute(x, of_row, of_col, y)
// which makes an element of each output of an element of each matrix, and of the numbers of its row and its column. All are
// given as fp32; what it makes is rounded afterwards.
#pragma once
#include "tile.cuh"

static_assert(PER_WORD == 2, "sources are computed for 16-bit floats");

template <int MATRICES_, int OUTPUTS_, int OF_ROW_ = 0, int OF_COL_ = 0>
struct Computing {
    static constexpr int MATRICES = MATRICES_, OUTPUTS = OUTPUTS_, OF_ROW = OF_ROW_, OF_COL = OF_COL_;
};

namespace sources {

// The nearest number that an element can be.
__device__ __forceinline__ float nearest(float x) { return element_value(rounded(x, 0.0f)); }

struct Add : Computing<2, 1> {
    static __device__ __forceinline__ void compute(const float* x, const float*, const float*, float* y) {
        y[0] = x[0] + x[1];
    }
};

// gate, up -> the activation.
struct Swiglu : Computing<2, 1> {
    static __device__ __forceinline__ void compute(const float* x, const float*, const float*, float* y) {
        y[0] = nearest(x[0] / (1.0f + expf(-x[0]))) * x[1];
    }
};

// gate, up, the gradient of the activation -> gradients of gate and of up, the activation.
struct SwigluBackward : Computing<3, 3> {
    static __device__ __forceinline__ void compute(const float* x, const float*, const float*, float* y) {
        const float gate = x[0], up = x[1], dy = x[2], below = 1.0f + expf(-gate);
        const float active = nearest(gate / below), sigmoid = __frcp_rn(below);
        y[0] = nearest(dy * up) * sigmoid * fmaf(gate, 1.0f - sigmoid, 1.0f);
        y[1] = dy * active;
        y[2] = active * up;
    }
};

}  // namespace sources
