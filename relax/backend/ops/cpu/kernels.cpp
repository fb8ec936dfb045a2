// Elementwise work of a training step on a CPU, each kernel one pass over memory where torch's operations make several.
//
// Sums are fp32; a result is rounded to bf16 once, to nearest even. kernels.py compiles this file, compiled.py calls it;
// plain.py and passes.py have the same in torch's operations. Matrices are dense and row-major, rows are shared among threads.

#ifndef T
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

struct bf16 {
  uint16_t bits;
};

inline float load(float x) { return x; }

inline float load(bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float wide;
  memcpy(&wide, &bits, 4);
  return wide;
}

inline void store(float& to, float x) { to = x; }

inline void store(bf16& to, float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint32_t nan = (bits & 0x7fffffff) > 0x7f800000 ? 0x400000 : 0;
  to.bits = uint16_t((nan ? bits | nan : bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// e^x for x of at most 88, to 2 units in the last place; 0 where that would be denormal. Compilers make vector code of it.
inline float exponential(float x) {
  const float capped = x > 88.0f ? 88.0f : x;
  const float n = rintf(capped * 1.44269504f);
  const float r = (capped - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts (Cody & Waite 1980)
  float y = 1.9875691500e-4f;  // Moshier's Cephes library, expf
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.0f;
  const uint32_t bits = uint32_t(int32_t(n) + 127) << 23;
  float power;
  memcpy(&power, &bits, 4);
  return x < -87.0f ? 0.0f : y * power;
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

}  // namespace

#define ROWS _Pragma("omp parallel for num_threads(threads) schedule(static)")
#define VECTOR _Pragma("omp simd")

#define T float
#define KERNEL(name) extern "C" void name##_fp32
#include "kernels.cpp"
#undef T
#undef KERNEL
#define T bf16
#define KERNEL(name) extern "C" void name##_bf16
#include "kernels.cpp"

#else  // the kernels of one type T of what the model holds

KERNEL(norm_forward)(const T* x, const T* weight, T* y, float* scale, int64_t rows, int64_t width, float eps, int threads) {
  ROWS for (int64_t i = 0; i < rows; i++) {
    const T* in = x + i * width;
    T* out = y + i * width;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < width; j++) sum += load(in[j]) * load(in[j]);
    const float s = 1.0f / sqrtf(sum / float(width) + eps);
    scale[i] = s;
    VECTOR for (int64_t j = 0; j < width; j++) store(out[j], load(in[j]) * s * load(weight[j]));
  }
}

// grad_weight [blocks, width]: a row for each block of rows, to be added up.
KERNEL(norm_backward)(const T* grad, const T* x, const T* weight, const float* scale, T* grad_x, float* grad_weight, int64_t rows,
                   int64_t width, int64_t block, int threads) {
  ROWS for (int64_t b = 0; b < (rows + block - 1) / block; b++) {
    float* sums = grad_weight + b * width;
    memset(sums, 0, width * sizeof(float));
    for (int64_t i = b * block; i < (b + 1) * block && i < rows; i++) {
      const T *g = grad + i * width, *in = x + i * width;
      T* out = grad_x + i * width;
      const float s = scale[i];
      float along = 0;
#pragma omp simd reduction(+ : along)
      for (int64_t j = 0; j < width; j++) {
        const float both = load(g[j]) * load(in[j]) * s;
        sums[j] += both;
        along += both * load(weight[j]);
      }
      along *= s * s / float(width);
      VECTOR for (int64_t j = 0; j < width; j++) store(out[j], load(g[j]) * load(weight[j]) * s - load(in[j]) * along);
    }
  }
}

KERNEL(swiglu_forward)(const T* x, T* y, int64_t rows, int64_t width, int threads) {
  ROWS for (int64_t i = 0; i < rows; i++) {
    const T *gate = x + i * 2 * width, *up = gate + width;
    T* out = y + i * width;
    VECTOR for (int64_t j = 0; j < width; j++) store(out[j], load(gate[j]) * sigmoid(load(gate[j])) * load(up[j]));
  }
}

KERNEL(swiglu_backward)(const T* grad, const T* x, T* grad_x, int64_t rows, int64_t width, int threads) {
  ROWS for (int64_t i = 0; i < rows; i++) {
    const T *g = grad + i * width, *gate = x + i * 2 * width, *up = gate + width;
    T *to_gate = grad_x + i * 2 * width, *to_up = to_gate + width;
    VECTOR for (int64_t j = 0; j < width; j++) {
      const float a = load(gate[j]), s = sigmoid(a), d = load(g[j]);
      store(to_gate[j], d * load(up[j]) * s * (1.0f + a * (1.0f - s)));
      store(to_up[j], d * a * s);
    }
  }
}

// x [rows, heads, 2 * half], a row and a head being `stride` and `head_stride` apart; y is dense; sign -1 turns back.
KERNEL(rotate)(const T* x, const T* cosine, const T* sine, T* y, int64_t rows, int64_t heads, int64_t half, int64_t stride,
            int64_t head_stride, float sign, int threads) {
  ROWS for (int64_t i = 0; i < rows; i++) {
    const T *c = cosine + i * half, *s = sine + i * half;
    for (int64_t h = 0; h < heads; h++) {
      const T *a = x + i * stride + h * head_stride, *b = a + half;
      T* out = y + (i * heads + h) * 2 * half;
      VECTOR for (int64_t j = 0; j < half; j++) {
        const float along = load(a[j]), across = load(b[j]), turned = sign * load(s[j]);
        store(out[j], along * load(c[j]) - across * turned);
        store(out[half + j], across * load(c[j]) + along * turned);
      }
    }
  }
}

// x [rows, groups, width] -> fp32 [groups, rows, width].
KERNEL(by_group)(const T* x, float* out, int64_t rows, int64_t groups, int64_t width, int threads) {
  ROWS for (int64_t i = 0; i < rows; i++)
    for (int64_t group = 0; group < groups; group++) {
      const T* from = x + (i * groups + group) * width;
      float* to = out + (group * rows + i) * width;
      VECTOR for (int64_t j = 0; j < width; j++) to[j] = load(from[j]);
    }
}

// x, fp32 [groups, rows, width] -> [rows, groups, width].
KERNEL(from_groups)(const float* x, T* out, int64_t rows, int64_t groups, int64_t width, int threads) {
  ROWS for (int64_t i = 0; i < rows; i++)
    for (int64_t group = 0; group < groups; group++) {
      const float* from = x + (group * rows + i) * width;
      T* to = out + (i * groups + group) * width;
      VECTOR for (int64_t j = 0; j < width; j++) store(to[j], from[j]);
    }
}

// The sums of grad * result over each row of `width`.
KERNEL(row_products)(const T* grad, const T* result, float* sums, int64_t rows, int64_t width, int threads) {
  ROWS for (int64_t i = 0; i < rows; i++) {
    const T *g = grad + i * width, *r = result + i * width;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < width; j++) sum += load(g[j]) * load(r[j]);
    sums[i] = sum;
  }
}

// p = softmax(scale scores), both [groups, rows * heads, keys], 0 at a key that is later than the row; the last row sees all
// keys. The logarithm of each sum goes to logsumexp [.., groups * heads], from row `first` on. The scores are used up.
KERNEL(attention_probabilities)(float* scores, T* p, float* logsumexp, int64_t first, int64_t rows, int64_t groups,
                                int64_t heads, int64_t keys, float scale, int threads) {
  ROWS for (int64_t at = 0; at < groups * rows * heads; at++) {
    const int64_t h = at % heads, i = at / heads % rows, group = at / heads / rows, seen = keys - rows + i + 1;
    float *row = scores + at * keys, top = -INFINITY, sum = 0;
    T* out = p + at * keys;
#pragma omp simd reduction(max : top)
    for (int64_t j = 0; j < seen; j++) top = row[j] > top ? row[j] : top;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < seen; j++) {
      row[j] = exponential(scale * (row[j] - top));
      sum += row[j];
    }
    const float share = 1.0f / sum;
    VECTOR for (int64_t j = 0; j < seen; j++) store(out[j], row[j] * share);
    memset(out + seen, 0, (keys - seen) * sizeof(T));
    logsumexp[(first + i) * groups * heads + group * heads + h] = scale * top + logf(sum);
  }
}

// p = exp(scale scores - logsumexp) and ds = scale p (along - delta), all [groups, rows * heads, keys], and 0 at a later key;
// logsumexp and delta [.., groups * heads], from row `first` on.
KERNEL(attention_gradients)(const float* scores, const float* along, T* p, T* ds, const float* logsumexp, const float* delta,
                            int64_t first, int64_t rows, int64_t groups, int64_t heads, int64_t keys, float scale, int threads) {
  ROWS for (int64_t at = 0; at < groups * rows * heads; at++) {
    const int64_t h = at % heads, i = at / heads % rows, group = at / heads / rows, seen = keys - rows + i + 1;
    const int64_t head = (first + i) * groups * heads + group * heads + h;
    const float *s = scores + at * keys, *a = along + at * keys;
    T *to_p = p + at * keys, *to_ds = ds + at * keys;
    const float lse = logsumexp[head], d = delta[head];
    VECTOR for (int64_t j = 0; j < seen; j++) {
      const float share = exponential(scale * s[j] - lse);
      store(to_ds[j], scale * share * (a[j] - d));
      store(to_p[j], share);
    }
    memset(to_p + seen, 0, (keys - seen) * sizeof(T));
    memset(to_ds + seen, 0, (keys - seen) * sizeof(T));
  }
}

// Of each row of logits the largest, and the sum of exp(logit - largest).
KERNEL(logits_sum)(const T* z, float* top, float* total, int64_t rows, int64_t width, int threads) {
  ROWS for (int64_t i = 0; i < rows; i++) {
    const T* row = z + i * width;
    float largest = -INFINITY, sum = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t j = 0; j < width; j++) largest = load(row[j]) > largest ? load(row[j]) : largest;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < width; j++) sum += exponential(load(row[j]) - largest);
    top[i] = largest;
    total[i] = sum;
  }
}

// Logits become their gradient in place: -grad softmax, and at_target more at `column`.
KERNEL(logits_gradient)(T* z, const float* logsumexp, const float* grad, const int64_t* column, const float* at_target,
                     int64_t rows, int64_t width, int threads) {
  ROWS for (int64_t i = 0; i < rows; i++) {
    T* row = z + i * width;
    const float lse = logsumexp[i], g = -grad[i], target = load(row[column[i]]);
    VECTOR for (int64_t j = 0; j < width; j++) store(row[j], g * exponential(load(row[j]) - lse));
    store(row[column[i]], g * exponential(target - lse) + at_target[i]);
  }
}

KERNEL(add)(float* sum, const T* x, int64_t size, int threads) {
#pragma omp parallel for simd num_threads(threads) schedule(static)
  for (int64_t i = 0; i < size; i++) sum[i] += load(x[i]);
}

#endif
